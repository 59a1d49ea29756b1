"""The secret that all nodes of a server share, and the keys that are made of it.

CURVE, the security of ZeroMQ's connections, knows a server by its public key. A client that knows that key gets in: its
first message is a box that only the key's owner can open and only somebody who knows it can make. Here the key is made
of the secret and never sent, so whoever gets in knows the secret, and whoever lets in knows it too. What is said is
encrypted with keys of that one connection; a secret that becomes known later opens no recording.

Each run has keys of its own, made with a number that node 0 draws at its start and tells the nodes that it takes: a
process of an earlier run can't connect to this one's sockets, whatever addresses it remembers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

import zmq
from zmq.utils import z85

from servekit.config import ConfigError, ServerArgs
from servekit.config.secrets import CLUSTER_SECRET, Keys

MIN_CHARACTERS = 16
"""Of a secret. Somebody who listens can try one guess after the other, so guessing must be hopeless."""
_MAX_FILE = 4096
_FLAG = "--cluster-secret-file"


def read_secret(args: ServerArgs) -> bytes | None:
    """The secret of the file or of the environment; None if there is neither.

    Raises:
        ConfigError: both are given, the file can't be read or can be read by others, or it is too short.
    """
    named = args.cluster_secret_file
    given = os.environ.get(CLUSTER_SECRET)
    if named is not None and given is not None:
        raise ConfigError(f"the cluster's secret is given twice, by {_FLAG} and {CLUSTER_SECRET}")
    if named is None and given is None:
        return None
    text = _read(Path(named)) if named is not None else str(given)
    secret = text.strip().encode()
    if len(secret) < MIN_CHARACTERS:
        where = CLUSTER_SECRET if named is None else f"{_FLAG} {named!r}"
        raise ConfigError(
            f"{where}: the secret has less than {MIN_CHARACTERS} characters; `openssl rand -hex 32` makes one"
        )
    return secret


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(
                    f"{_FLAG} {str(path)!r} has mode {mode:03o}: others must not read it nor the group write it;"
                    f" `chmod 600` makes it fit"
                )
            return file.read(_MAX_FILE).decode()
    except OSError as error:
        raise ConfigError(f"{_FLAG} {str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{_FLAG} {str(path)!r} is no text") from None


def make_keys(secret: bytes, purpose: str, run: bytes = b"") -> Keys:
    """The keys of one purpose, and of one run, by HKDF-SHA-256 (RFC 5869).

    Args:
        secret: what all nodes share; b"" on a machine that is alone, where the keys only keep runs apart.
        purpose: what they are for.
        run: number of the run.
    """
    extracted = hmac.digest(run or bytes(hashlib.sha256().digest_size), secret, "sha256")
    # One block is as long as a key of X25519.
    key = hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")
    encoded = z85.encode(key)
    return Keys(zmq.curve_public(encoded).decode(), encoded.decode())
