"""Profiles of a rank: what torch computed and when, as traces that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from servekit.messages.requests import ControlReply, ProfileReq

logger = logging.getLogger(__name__)

MAX_STEPS = 2000
"""Steps after which a profile that nobody stops is written: each holds some megabytes of memory."""


class Profiler:
    """Starts a profile and writes it, on the thread that runs the engine.

    Args:
        folder: where traces go that name no folder of their own; made when the first is written.
        name: which rank this is, for the files' names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._profile: Any = None
        self._target = folder
        self._steps = 0

    def obey(self, request: ProfileReq) -> ControlReply:
        """Start or stop; the reply to a stop says where the trace is, as JSON with a `path`."""
        try:
            return self._start(request.folder) if request.start else self._stop()
        except ImportError as error:
            return ControlReply(False, f"a profile needs the package {error.name}, which is not installed")
        except (OSError, RuntimeError) as error:
            self._profile = None
            return ControlReply(False, f"the profile failed: {error}")

    def step(self) -> None:
        """Count a step of the engine; a profile of `MAX_STEPS` is written."""
        if self._profile is None:
            return
        self._steps += 1
        if self._steps >= MAX_STEPS:
            reply = self.obey(ProfileReq(False))
            logger.warning("the profile was stopped after %d steps: %s", MAX_STEPS, reply.message or reply.data)

    def _start(self, folder: str) -> ControlReply:
        if self._profile is not None:
            return ControlReply(False, "a profile is running already")
        import torch.profiler as profiler

        self._target = Path(folder) if folder else self._folder
        # Now, rather than after the work of a profile that nobody can write.
        self._target.mkdir(parents=True, exist_ok=True, mode=0o700)
        profile = profiler.profile(activities=profiler.supported_activities())
        profile.start()
        self._profile, self._steps = profile, 0
        return ControlReply(True)

    def _stop(self) -> ControlReply:
        if self._profile is None:
            return ControlReply(False, "no profile is running")
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._target / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}-{self._steps}-steps.json"
        profile.export_chrome_trace(str(path))
        return ControlReply(True, data=json.dumps({"path": str(path), "steps": self._steps}).encode())
