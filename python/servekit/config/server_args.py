"""What the operator chose: one field per flag, checked once by main and then read by every process."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import msgspec

ENGINES = ("torch", "mock")
LOAD_BALANCE_METHODS = (
    "auto",
    "round_robin",
    "total_requests",
    "total_tokens",
    "cache_aware",
    "follow_bootstrap_room",
)
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
LAUNCHERS = ("local", "ray")
ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")
SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_WORKERS = 4095
"""Worker numbers have 12 bits in a request id, and 0 counts too; one less keeps the count itself in 12 bits."""
MAX_RANKS = 1024
MAX_DETOKENIZERS = 63
"""The state page has a beat for 64 threads of control, and the router takes one."""


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
        uds: path of a Unix socket to listen on instead.
        uds_mode: who may connect to it, as an octal mode.
        root_path: path under which a proxy in front shows the server, such as /llm.
        ssl_keyfile, ssl_certfile, ssl_ca_certs: PEM files; a certificate makes HTTP into HTTPS.
        ssl_keyfile_password: of the key file.
        ssl_cert_reqs: whether clients need certificates: 0 no, 1 optional, 2 required.
        allowed_origins: of web pages whose scripts may ask; "*" is all of them.
        tokenizer_workers: HTTP worker processes, 1 to 4095.
        detokenizer_workers: detokenizer threads of the control process, 1 to 62.
        tensor_parallel_size: ranks that share each layer, 1 to 1024.
        pipeline_parallel_size: stages of layers behind each other, 1 to 1024.
        pp_layer_partition: layers of each stage, such as 10,10,12; None makes them about equal.
        pp_max_micro_batch_size: most requests in one of the steps that are in flight at the same time.
        data_parallel_size: data-parallel ranks, 1 to 1024: replicas of the whole, or with `enable_dp_attention`
            parts of the tensor group.
        enable_dp_attention: attention and its pages are split by sequences inside the tensor group.
        attention_context_parallel_size: ranks that share the tokens of a long prompt's attention.
        expert_parallel_size: parts of the tensor group among which the experts of a mixture are split.
        moe_data_parallel_size: parts of the tensor group with all experts each.
        nnodes: machines, each with an equal part of the ranks.
        node_rank: which of them this one is; node 0 answers HTTP.
        dist_init_addr: host and port where node 0 is met by the others.
        dist_timeout: seconds that nodes, and the ranks of a group, wait for each other, at the start and in a step.
        node_ip: address of this machine for the other nodes; None is the one from which it reaches node 0.
        dist_port_range: ports for the sockets between nodes, such as 40000-40100; None is any.
        health_port: where nodes other than 0 tell at `host` how their ranks are; None tells it nowhere.
        cluster_secret_file: file with the secret that all nodes share.
        launcher: who starts the other nodes: local, each machine's operator; ray, actors of a Ray cluster.
        ray_address: of that cluster; None is RAY_ADDRESS, or the one that this machine belongs to.
        base_gpu_id, gpu_id_step: first device of each machine, and how far it is to the next.
        load_balance_method: how a request finds its rank.
        rank_wait_timeout: seconds that a request waits for a rank to become active.
        max_model_len: context in tokens, prompt and output together; None is the model's own.
        max_total_tokens: KV pool of a rank in tokens; None is chosen by the engine.
        page_size: tokens in a KV page.
        max_running_requests: most requests in one rank's batch; None is chosen by engine and device.
        max_queued_requests: most requests that wait, over all ranks; beyond it a request gets 503.
        max_queued_tokens: most prompt tokens that wait, over all ranks; beyond them a request gets 503; None is any
            number.
        max_requests_per_worker: most requests in flight of one HTTP worker; beyond it a request gets 503; None is any
            number.
        skip_tokenizer_init: neither text to ids nor ids to text; clients send ids and get ids.
        resume_memory: most bytes of requests that control keeps until they end, so that it could send them once more.
        max_prefill_tokens: most prompt tokens in one step.
        chunked_prefill_size: most tokens of one prompt in one step.
        schedule_policy: who of the waiting requests is next: fcfs first come first served, lpm longest cached prefix,
            priority highest priority.
        prefix_caching: computed prefixes are kept and shared.
        dtype, device, load_format: how the torch engine computes and loads.
        attention_backend: what computes its attention.
        seed: base of the random seeds of requests that bring none; None draws one.
        engine: torch, mock, or the name of an entry point in the group `servekit.engines`.
        profile_dir: folder for profiles of the ranks; None is one in the run directory, which goes with the server.
        mock_step_ms: milliseconds of a mock step, 0 to 60000.
        mock_script: JSON or TOML file with scripted tokens, timings and faults.
        chat_template: file with, or text of, a Jinja chat template that replaces the model's.
        drain_timeout: seconds that running requests get after SIGTERM.
        watchdog_timeout: seconds that a rank with work may get no further before it is killed.
        soft_watchdog_timeout: seconds before its stacks are logged.
        load_timeout: seconds that the ranks may take to load, at the start.
        max_body_size: largest request body in bytes.
        api_key: keys that clients may use, each one enough; with none, and no file, everybody may ask.
        api_key_file: file with further keys, one a line.
        admin_api_key: key for the routes of operators; None leaves them to loopback.
        metrics: whether there is a route /metrics.
        log_level, log_format, access_log: what is logged and how.
    """

    model: str | None = None
    tokenizer: str | None = None
    served_model_name: str | None = None
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    uds_mode: str = "660"
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    allowed_origins: tuple[str, ...] = ()
    tokenizer_workers: int = 1
    detokenizer_workers: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: str | None = None
    pp_max_micro_batch_size: int | None = None
    data_parallel_size: int = 1
    enable_dp_attention: bool = False
    attention_context_parallel_size: int = 1
    expert_parallel_size: int = 1
    moe_data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    dist_timeout: float = 600.0
    node_ip: str | None = None
    dist_port_range: str | None = None
    health_port: int | None = None
    cluster_secret_file: str | None = None
    launcher: str = "local"
    ray_address: str | None = None
    base_gpu_id: int = 0
    gpu_id_step: int = 1
    load_balance_method: str = "auto"
    rank_wait_timeout: float = 30.0
    max_model_len: int | None = None
    max_total_tokens: int | None = None
    page_size: int = 16
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    max_requests_per_worker: int | None = None
    skip_tokenizer_init: bool = False
    resume_memory: int = 256 << 20
    max_prefill_tokens: int = 8192
    chunked_prefill_size: int = 512
    schedule_policy: str = "fcfs"
    prefix_caching: bool = True
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    attention_backend: str = "auto"
    seed: int | None = None
    engine: str = "torch"
    profile_dir: str | None = None
    mock_step_ms: float = 1.0
    mock_script: str | None = None
    chat_template: str | None = None
    drain_timeout: float = 30.0
    watchdog_timeout: float = 300.0
    soft_watchdog_timeout: float = 60.0
    load_timeout: float = 1800.0
    max_body_size: int = 16 << 20
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key: str | None = None
    metrics: bool = True
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
        if self.pp_layer_partition is not None and not re.fullmatch(r"\d{1,5}(,\d{1,5})*", self.pp_layer_partition):
            raise ConfigError(f"--pp-layer-partition must be numbers such as 10,10,12, not {self.pp_layer_partition!r}")
        self._validate_nodes()
        self._validate_http()
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(f"--max-total-tokens {self.max_total_tokens} is less than a page of {self.page_size}")

    def _validate_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank}: --nnodes {self.nnodes} are numbered from 0")
        if self.launcher == "ray":
            if self.nnodes == 1:
                raise ConfigError("--launcher ray places other nodes, and --nnodes is 1")
            if self.node_rank:
                raise ConfigError("--launcher ray starts the other nodes itself: --node-rank is 0 where it is given")
        if self.node_ip is not None:
            try:
                ipaddress.ip_address(self.node_ip)
            except ValueError:
                raise ConfigError(f"--node-ip must be an IPv4 or IPv6 address, not {self.node_ip!r}") from None

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each stage, if that is given."""
        return tuple(map(int, self.pp_layer_partition.split(","))) if self.pp_layer_partition else ()

    def _validate_http(self) -> None:
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise ConfigError(f"--uds-mode must be an octal mode such as 660, not {self.uds_mode!r}")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ConfigError(
                f"--root-path must be a path such as /llm, without a slash at its end: {self.root_path!r}"
            )
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(f"{flag_of(name)} needs --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, or no certificate of a client can be checked")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag_of(name)}: there is no file {path!r}")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"--allowed-origins: {origin!r} is no origin such as https://app.example, nor *")


_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "ssl_cert_reqs": (0, 2),
    "tokenizer_workers": (1, MAX_WORKERS),
    "detokenizer_workers": (1, MAX_DETOKENIZERS),
    "tensor_parallel_size": (1, MAX_RANKS),
    "pipeline_parallel_size": (1, MAX_RANKS),
    "data_parallel_size": (1, MAX_RANKS),
    "attention_context_parallel_size": (1, MAX_RANKS),
    "expert_parallel_size": (1, MAX_RANKS),
    "moe_data_parallel_size": (1, MAX_RANKS),
    "nnodes": (1, MAX_RANKS),
    "node_rank": (0, MAX_RANKS - 1),
    "health_port": (0, 65535),
    "pp_max_micro_batch_size": (1, 1 << 20),
    "dist_timeout": (1, 86400),
    "base_gpu_id": (0, MAX_RANKS),
    "gpu_id_step": (1, MAX_RANKS),
    "rank_wait_timeout": (0, 86400),
    "max_model_len": (2, 1 << 24),
    "max_total_tokens": (1, 1 << 40),
    "page_size": (1, 1024),
    "max_running_requests": (1, 1 << 20),
    "max_queued_requests": (0, 1 << 20),
    "max_queued_tokens": (1, 1 << 40),
    "max_requests_per_worker": (1, 1 << 40),
    "resume_memory": (0, 1 << 40),
    "max_prefill_tokens": (1, 1 << 24),
    "chunked_prefill_size": (1, 1 << 24),
    "seed": (0, (1 << 63) - 1),
    "mock_step_ms": (0, 60000),
    "drain_timeout": (0, 86400),
    "watchdog_timeout": (2, 86400),
    "soft_watchdog_timeout": (2, 86400),
    "load_timeout": (1, 86400),
    "max_body_size": (1024, 1 << 32),
}

_NOT_EMPTY = (
    "model",
    "tokenizer",
    "served_model_name",
    "revision",
    "host",
    "engine",
    "profile_dir",
    "mock_script",
    "uds",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "api_key_file",
    "admin_api_key",
    "dist_init_addr",
    "node_ip",
    "dist_port_range",
    "cluster_secret_file",
    "ray_address",
)

CHOICES: dict[str, tuple[str, ...]] = {
    "load_balance_method": LOAD_BALANCE_METHODS,
    "dtype": DTYPES,
    "device": DEVICES,
    "load_format": LOAD_FORMATS,
    "launcher": LAUNCHERS,
    "attention_backend": ATTENTION_BACKENDS,
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
