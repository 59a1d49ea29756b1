"""What an HTTP worker loads: it must stay small, and none of the model's machinery belongs to it."""

from __future__ import annotations

import subprocess
import sys

from servekit import _core

from tests.api.fakes import FakePage

PROGRAM = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import servekit.http.worker
from servekit.config.secrets import Secrets
from servekit.http.app import create_app
from servekit.tokenizer.chat_template import ChatTemplate
from servekit.tokenizer.encoding import TextEncoder
from servekit.tokenizer.meter import Meter
from tests.api.fakes import make_config
config = make_config(Path(tempfile.mkdtemp()))
TextEncoder(config.port_args.tokenizer_file, config.model_info).encode_prompt("x")
ChatTemplate(config.model_info.chat_template).render([{"role": "user", "content": "x"}])
manager = SimpleNamespace(config=config, page=None, meter=Meter(None, 0))
create_app(manager, None, None, None, Secrets(api_keys=["00"]))
print(" ".join(name for name in ("torch", "numpy", "transformers", "huggingface_hub") if name in sys.modules))
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")))
"""


def test_a_worker_is_small_and_loads_nothing_of_the_model() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    loaded, pss_kib = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split(
        "\n"
    )[:2]
    assert loaded == ""
    assert int(pss_kib) < 90 * 1024, "with the demo model's tokenizer a worker must stay within 100 MiB"


def test_the_fake_state_page_has_only_what_the_real_one_has() -> None:
    real = set(dir(_core.StatePage))
    fake = {name for name in dir(FakePage) if not name.startswith("_")} | {"phase", "ready_once"}
    assert fake <= real
