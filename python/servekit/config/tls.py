"""HTTPS: what the flags say of it, checked by main before anything is started, then told to uvicorn."""

from __future__ import annotations

import ssl
from typing import Any

from servekit.config.secrets import Secrets
from servekit.config.server_args import ConfigError, ServerArgs


def tls_settings(args: ServerArgs, secrets: Secrets) -> dict[str, Any]:
    """Settings of uvicorn; {} for plain HTTP."""
    if args.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_keyfile_password": secrets.ssl_keyfile_password,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
    }


def check_tls(args: ServerArgs, secrets: Secrets) -> None:
    """Load the certificates as the workers will.

    Raises:
        ConfigError: they can't be loaded or do not fit together.
    """
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    what = "--ssl-certfile, --ssl-keyfile"
    # Without a password, OpenSSL would ask for one on the terminal.
    password = secrets.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password)
        if args.ssl_ca_certs is not None:
            what = "--ssl-ca-certs"
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what}: the files can't be used: {reason}") from None
