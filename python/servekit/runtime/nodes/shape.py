"""What all nodes must have alike before they may work together: build, flags, and the model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from servekit import _core
from servekit.config import ModelInfo, ServerArgs
from servekit.config.server_args import flag_of

OWN = frozenset(
    (
        # What it is told by, on this machine.
        "model",
        "tokenizer",
        "revision",
        "served_model_name",
        "chat_template",
        "mock_script",
        "profile_dir",
        "node_rank",
        "dist_init_addr",
        "node_ip",
        "dist_port_range",
        "health_port",
        "cluster_secret_file",
        # What only node 0 does.
        "launcher",
        "ray_address",
        "host",
        "port",
        "uds",
        "uds_mode",
        "root_path",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "ssl_certfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "allowed_origins",
        "max_body_size",
        "drain_timeout",
        "api_key",
        "api_key_file",
        "admin_api_key",
        "metrics",
        "access_log",
        "tokenizer_workers",
        "detokenizer_workers",
        "load_balance_method",
        "watchdog_timeout",
        "rank_wait_timeout",
        "max_queued_requests",
        "max_requests_per_worker",
        "max_queued_tokens",
        "resume_memory",
        # How it speaks of it.
        "log_level",
        "log_format",
    )
)
"""Flags that each node may have its own way: all others must be the same. The files tell whether the models are."""

_WHOLE = 16 << 20
"""Bytes up to which a file is read to its end; of a longer one, `_SAMPLES` blocks are."""
_BLOCK, _SAMPLES = 64 << 10, 64
_FILES = ("config.json", "*.safetensors.index.json", "*.safetensors")


class Shape(msgspec.Struct, frozen=True):
    """What a node tells of itself.

    Attributes:
        build: version and commit.
        schema: hash of the messages' schema.
        flags: values of the flags that must be alike.
        files: digest of each of the model's files, by name.
    """

    build: str
    schema: str
    flags: dict[str, Any]
    files: dict[str, str]


def shape_of(args: ServerArgs, model: ModelInfo) -> Shape:
    """Shape of this node, as it has found the model."""
    built = _core.build_info()
    # Through JSON once, so that it equals what comes over the wire.
    flags = msgspec.json.decode(msgspec.json.encode(args))
    return Shape(
        build=f"{built['version']} ({built['commit']})",
        schema=built["schema"],
        flags={name: value for name, value in flags.items() if name not in OWN},
        files={path.name if path.suffix != ".gguf" else "*.gguf": digest_of(path) for path in _files(model)},
    )


def difference(ours: Shape, theirs: Shape, node: int) -> str | None:
    """In words, how another node's shape differs from that of node 0; None if it does not."""
    if (ours.build, ours.schema) != (theirs.build, theirs.schema):
        return f"its servekit is {theirs.build} and that of node 0 is {ours.build}: both must be the same build"
    for name, value in ours.flags.items():
        if theirs.flags.get(name) != value:
            other = theirs.flags.get(name)
            return f"its {flag_of(name)} is {_text(other)} and that of node 0 is {_text(value)}: they must be the same"
    if differing := sorted(n for n in {*ours.files, *theirs.files} if ours.files.get(n) != theirs.files.get(n)):
        return f"its model has another {differing[0]} than that of node 0: node {node} must serve the same files"
    return None


def _text(value: Any) -> str:
    return "not given" if value is None else str(value)


def _files(model: ModelInfo) -> Iterator[Path]:
    path = Path(model.path)
    if path.is_dir():
        for pattern in _FILES:
            yield from sorted(path.glob(pattern))
    else:
        yield path
    yield Path(model.tokenizer_file)


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hex; of a large one, of its size and of blocks from all over it."""
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
        else:
            for sample in range(_SAMPLES):
                file.seek((size - _BLOCK) * sample // (_SAMPLES - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()
