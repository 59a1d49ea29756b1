"""How many descriptors the processes may have: each connection takes one, and shells give too few for a server."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 1 << 18
"""Descriptors beyond which more are of no use; unlimited ones make some libraries loop over all of them."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit, and so that of children to come, as far as the system allows; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
