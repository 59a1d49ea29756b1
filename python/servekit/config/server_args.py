"""What the operator chose: one field per flag, checked once by main and then read by every process."""

from __future__ import annotations

from pathlib import Path

import msgspec

ENGINES = ("torch", "mock")
LOAD_BALANCE_METHODS = ("auto", "round_robin", "total_requests", "total_tokens", "follow_bootstrap_room")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_WORKERS = 4095
"""Worker numbers have 12 bits in a request id, and 0 counts too; one less keeps the count itself in 12 bits."""
MAX_RANKS = 1024
MAX_DETOKENIZERS = 62
"""The state page has a beat for 64 threads of control; router and fan-out take two."""


class ConfigError(ValueError):
    """A setting that can't be: the text is one line that names the flag and says what would do."""


class ServerArgs(msgspec.Struct, kw_only=True, frozen=True):
    """The flags of `servekit-serve`; a field is named like its flag, with underscores.

    Attributes:
        model: folder, `.gguf` file or hub id; None is the demo model.
        tokenizer: folder or `tokenizer.json` to use instead of the model's own.
        served_model_name: name under which clients ask for the model; None is the model's own.
        revision: branch, tag or commit of a hub model.
        host, port: where HTTP listens; port 0 lets the system choose one.
        tokenizer_workers: HTTP worker processes, 1 to 4095.
        detokenizer_workers: detokenizer threads of the control process, 1 to 62.
        data_parallel_size: ranks, 1 to 1024.
        load_balance_method: how a request finds its rank.
        rank_wait_timeout: seconds that a request waits for a rank to become active.
        max_model_len: context in tokens, prompt and output together; None is the model's own.
        max_total_tokens: KV pool of a rank in tokens; None is chosen by the engine.
        page_size: tokens in a KV page.
        max_running_requests: most requests in one rank's batch; None is chosen by engine and device.
        max_queued_requests: most requests that wait, over all ranks; beyond it a request gets 503.
        max_prefill_tokens: most prompt tokens in one step.
        chunked_prefill_size: most tokens of one prompt in one step.
        schedule_policy: who of the waiting requests is next: fcfs first come first served, lpm longest cached prefix,
            priority highest priority.
        prefix_caching: computed prefixes are kept and shared.
        dtype, device, load_format: how the torch engine computes and loads.
        seed: base of the random seeds of requests that bring none; None draws one.
        engine: torch, mock, or the name of an entry point in the group `servekit.engines`.
        mock_step_ms: milliseconds of a mock step, 0 to 60000.
        mock_script: JSON or TOML file with scripted tokens, timings and faults.
        chat_template: file with, or text of, a Jinja chat template that replaces the model's.
        drain_timeout: seconds that running requests get after SIGTERM.
        max_body_size: largest request body in bytes.
        admin_api_key: key for the routes of operators; None leaves them to loopback.
        log_level, log_format, access_log: what is logged and how.
    """

    model: str | None = None
    tokenizer: str | None = None
    served_model_name: str | None = None
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer_workers: int = 1
    detokenizer_workers: int = 1
    data_parallel_size: int = 1
    load_balance_method: str = "auto"
    rank_wait_timeout: float = 30.0
    max_model_len: int | None = None
    max_total_tokens: int | None = None
    page_size: int = 16
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    max_prefill_tokens: int = 8192
    chunked_prefill_size: int = 512
    schedule_policy: str = "fcfs"
    prefix_caching: bool = True
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    seed: int | None = None
    engine: str = "torch"
    mock_step_ms: float = 1.0
    mock_script: str | None = None
    chat_template: str | None = None
    drain_timeout: float = 30.0
    max_body_size: int = 16 << 20
    admin_api_key: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = False

    def validate(self) -> None:
        """Check every field by itself and those that depend on each other.

        Raises:
            ConfigError: the first thing that is wrong.
        """
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag_of(name)} must be from {_plain(low)} to {_plain(high)}, not {_plain(value)}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{flag_of(name)} must be one of {', '.join(choices)}, not {value!r}")
        for name in _NOT_EMPTY:
            if getattr(self, name) == "":
                raise ConfigError(f"{flag_of(name)} must not be empty")
        if self.mock_script is not None:
            if self.engine != "mock":
                raise ConfigError("--mock-script needs --engine mock")
            if not Path(self.mock_script).is_file():
                raise ConfigError(f"--mock-script: there is no file {self.mock_script!r}")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(f"--max-total-tokens {self.max_total_tokens} is less than a page of {self.page_size}")


_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "tokenizer_workers": (1, MAX_WORKERS),
    "detokenizer_workers": (1, MAX_DETOKENIZERS),
    "data_parallel_size": (1, MAX_RANKS),
    "rank_wait_timeout": (0, 86400),
    "max_model_len": (2, 1 << 24),
    "max_total_tokens": (1, 1 << 40),
    "page_size": (1, 1024),
    "max_running_requests": (1, 1 << 20),
    "max_queued_requests": (0, 1 << 20),
    "max_prefill_tokens": (1, 1 << 24),
    "chunked_prefill_size": (1, 1 << 24),
    "seed": (0, (1 << 63) - 1),
    "mock_step_ms": (0, 60000),
    "drain_timeout": (0, 86400),
    "max_body_size": (1024, 1 << 32),
}

_NOT_EMPTY = ("model", "tokenizer", "served_model_name", "revision", "host", "engine", "mock_script", "admin_api_key")

CHOICES: dict[str, tuple[str, ...]] = {
    "load_balance_method": LOAD_BALANCE_METHODS,
    "dtype": DTYPES,
    "device": DEVICES,
    "load_format": LOAD_FORMATS,
    "schedule_policy": SCHEDULE_POLICIES,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
}


def _plain(number: float) -> str:
    """A number as a person would write it: 16777216, 0.5."""
    return f"{number:.15g}"


def flag_of(field: str) -> str:
    """Canonical flag of a field of `ServerArgs`."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")
