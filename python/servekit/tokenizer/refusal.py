"""A request that is not served, in terms that its client understands."""

from __future__ import annotations


class Refusal(Exception):
    """Why a request is refused or ended.

    Attributes:
        status: HTTP status, 400 to 599.
        message: one line for the client.
        param: field of the request that is at fault, if one is.
        code: short machine-readable reason, if there is one.
        retry_after: seconds after which another try makes sense, for 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""
