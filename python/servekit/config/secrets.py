"""Keys and passwords: taken out of the flags before these go anywhere, and told to the HTTP workers alone.

Workers get them over their line to main, so they are never in shared memory, on a command line or in the environment of
a child. Of keys they get digests, which is all that comparing needs.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from servekit.config.server_args import ConfigError, ServerArgs

CLUSTER_SECRET = "SERVEKIT_CLUSTER_SECRET"  # noqa: S105 (the name)
"""Variable with the secret that all nodes share, for those who have no file of it."""
ENVIRONMENT = ("SERVEKIT_API_KEY", "SERVEKIT_ADMIN_API_KEY", "SERVEKIT_SSL_KEYFILE_PASSWORD", CLUSTER_SECRET)
"""Variables that hold secrets; children do not inherit them."""
HIDDEN = "***"
"""What stands in the flags in place of a secret."""

_KEY = re.compile(r"[\x21-\x7e]{1,1024}")
_MAX_FILE = 1 << 20


class Keys(msgspec.Struct, frozen=True):
    """A pair of CURVE keys in Z85: the sockets that listen have both, the ones that connect use the public one."""

    public: str
    secret: str


class Secrets(msgspec.Struct, kw_only=True, frozen=True):
    """What only HTTP workers are told.

    Attributes:
        api_keys: SHA-256 of each key that clients may use, in hex; [] lets everybody in.
        admin_api_key: SHA-256 of the operators' key, in hex, None if there is none.
        ssl_keyfile_password: password of the TLS key, None if it has none.
    """

    api_keys: list[str] = []
    admin_api_key: str | None = None
    ssl_keyfile_password: str | None = None


def take_secrets(args: ServerArgs) -> tuple[ServerArgs, Secrets]:
    """Flags without their secrets, and the secrets.

    Raises:
        ConfigError: a key has characters that no header can carry, or the file of keys can't be read or has none. The
            text does not show the key.
    """
    keys = list(args.api_key)
    for key in keys:
        _check(key, "--api-key")
    if args.api_key_file is not None:
        keys += _read(Path(args.api_key_file))
    admin = args.admin_api_key
    if admin is not None:
        _check(admin, "--admin-api-key")
    secrets = Secrets(
        api_keys=[digest(key) for key in keys],
        admin_api_key=None if admin is None else digest(admin),
        ssl_keyfile_password=args.ssl_keyfile_password,
    )
    open_args = msgspec.structs.replace(
        args,
        api_key=(HIDDEN,) * len(args.api_key),
        admin_api_key=None if admin is None else HIDDEN,
        ssl_keyfile_password=None if args.ssl_keyfile_password is None else HIDDEN,
    )
    return open_args, secrets


def digest(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def _check(key: str, where: str) -> None:
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key must be 1 to 1024 printable ASCII characters without spaces")


def _read(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE + 1).decode()
    except OSError as error:
        raise ConfigError(f"--api-key-file {str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {str(path)!r} is no text") from None
    if len(text) > _MAX_FILE:
        raise ConfigError(f"--api-key-file {str(path)!r} is larger than {_MAX_FILE} bytes")
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    for key in keys:
        _check(key, "--api-key-file")
    if not keys:
        raise ConfigError(f"--api-key-file {str(path)!r} has no key: it takes one a line")
    return keys
