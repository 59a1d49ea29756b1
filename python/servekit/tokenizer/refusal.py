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


def too_long(max_model_len: int, came: str) -> Refusal:
    """The refusal of a prompt that does not fit the context; `came` says how many tokens it has."""
    return Refusal(
        400,
        # OpenAI's words: litellm and others tell this refusal by them, not by its code.
        f"this model's maximum context length is {max_model_len} tokens, of which a prompt may fill "
        f"{max_model_len - 1}: this one has {came}",
        code="context_length_exceeded",
    )
