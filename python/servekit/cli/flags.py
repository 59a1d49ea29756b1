"""Every flag of `servekit-serve`: its field of `ServerArgs`, where help shows it, and what the neighbours call it."""

from __future__ import annotations

from typing import NamedTuple

MODEL, SERVING, BALANCE, RANKS, ENGINE, MOCK, LOGS, OTHER = (
    "Model",
    "HTTP",
    "Processes and balance",
    "Ranks",
    "Engine",
    "Mock engine",
    "Logs",
    "Other",
)
GROUPS = (MODEL, SERVING, BALANCE, RANKS, ENGINE, MOCK, LOGS, OTHER)
"""In the order of the help."""


class Flag(NamedTuple):
    """One flag.

    Attributes:
        field: field of `ServerArgs`; the canonical spelling is made of it.
        group: section of the help.
        help: one line.
        aliases: spellings of the neighbours that mean the same; hidden.
        metavar: what the value is called, where the type's own name says too little.
        default: shown in the help when the field's default does not say it.
    """

    field: str
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    default: str | None = None


FLAGS = (
    Flag("tokenizer", MODEL, "Folder or tokenizer.json instead of the model's.", ("--tokenizer-path",), "PATH"),
    Flag("skip_tokenizer_init", MODEL, "No tokenizer: clients send token ids and get token ids."),
    Flag("served_model_name", MODEL, "Name under which clients ask for the model.", ("--alias", "-a"), "NAME"),
    Flag("revision", MODEL, "Branch, tag or commit of a hub model.", (), "REV"),
    Flag("chat_template", MODEL, "Jinja chat template: a file, or the template itself.", (), "FILE"),
    Flag(
        "max_model_len",
        MODEL,
        "Context in tokens, prompt and output together.",
        ("--context-length", "--ctx-size", "-c"),
        "TOKENS",
        "the model's",
    ),
    Flag("load_format", MODEL, "What the weights are; dummy makes random ones."),
    Flag("dtype", MODEL, "Type in which the model computes."),
    Flag("host", SERVING, "Address to listen on.", (), "ADDRESS"),
    Flag("port", SERVING, "Port to listen on; 0 takes a free one.", (), "PORT"),
    Flag("uds", SERVING, "Unix socket to listen on instead of a port.", (), "PATH"),
    Flag("uds_mode", SERVING, "Who may connect to it, as an octal mode.", (), "MODE"),
    Flag("root_path", SERVING, "Path under which a proxy in front shows the server.", ("--fastapi-root-path",), "PATH"),
    Flag("ssl_certfile", SERVING, "Certificate, PEM: serve HTTPS.", ("--ssl-cert-file",), "FILE"),
    Flag("ssl_keyfile", SERVING, "Its key, PEM, if the certificate's file has none.", ("--ssl-key-file",), "FILE"),
    Flag("ssl_keyfile_password", SERVING, "Password of that key.", (), "PASSWORD"),
    Flag("ssl_ca_certs", SERVING, "Who signs the certificates of clients, PEM.", (), "FILE"),
    Flag("ssl_cert_reqs", SERVING, "Clients need certificates: 0 no, 1 optional, 2 yes.", (), "N"),
    Flag(
        "allowed_origins",
        SERVING,
        "Origin of web pages that may ask, or *; repeatable.",
        ("--cors-origins",),
        "ORIGIN",
        "none",
    ),
    Flag("max_body_size", SERVING, "Largest request body, as bytes or 16MiB.", (), "SIZE"),
    Flag("drain_timeout", SERVING, "Seconds that running requests get after SIGTERM.", (), "SECONDS"),
    Flag("api_key", SERVING, "Key that clients need; repeatable.", (), "KEY", "none is needed"),
    Flag("api_key_file", SERVING, "File with such keys, one a line.", (), "FILE"),
    Flag("admin_api_key", SERVING, "Key for operators' routes; without it they answer on loopback only.", (), "KEY"),
    Flag("metrics", SERVING, "Answer /metrics."),
    Flag(
        "tokenizer_workers",
        BALANCE,
        "HTTP worker processes, which tokenize.",
        ("--tokenizer-worker-num", "--api-server-count", "-asc"),
        "N",
    ),
    Flag("detokenizer_workers", BALANCE, "Detokenizer threads.", ("--detokenizer-worker-num",), "N"),
    Flag(
        "load_balance_method",
        BALANCE,
        "auto, round_robin, total_requests, total_tokens, cache_aware or follow_bootstrap_room.",
        (),
        "METHOD",
    ),
    Flag(
        "watchdog_timeout", BALANCE, "Seconds without progress after which a rank with work is killed.", (), "SECONDS"
    ),
    Flag("soft_watchdog_timeout", BALANCE, "Seconds after which it logs its stacks.", (), "SECONDS"),
    Flag("load_timeout", BALANCE, "Seconds that ranks may take to load.", (), "SECONDS"),
    Flag("rank_wait_timeout", BALANCE, "Seconds that a request waits for an active rank.", (), "SECONDS"),
    Flag("max_queued_requests", BALANCE, "Most requests that wait; more get 503.", (), "N"),
    Flag(
        "max_requests_per_worker",
        BALANCE,
        "Most requests in flight of one HTTP worker; more get 503.",
        (),
        "N",
        "any number",
    ),
    Flag("max_queued_tokens", BALANCE, "Most prompt tokens that wait; more get 503.", (), "TOKENS", "any number"),
    Flag("resume_memory", BALANCE, "Memory for requests that could be sent to another rank.", (), "SIZE"),
    Flag(
        "tensor_parallel_size",
        RANKS,
        "Ranks that share each layer.",
        ("--tp", "--tp-size", "-tp"),
        "T",
    ),
    Flag(
        "pipeline_parallel_size",
        RANKS,
        "Stages of layers, each on ranks of its own.",
        ("--pp", "--pp-size", "-pp"),
        "P",
    ),
    Flag("pp_layer_partition", RANKS, "Layers of each stage, such as 10,10,12.", (), "LAYERS", "about equal"),
    Flag("pp_max_micro_batch_size", RANKS, "Most requests in a step of those in flight.", (), "N", "an equal part"),
    Flag(
        "data_parallel_size",
        RANKS,
        "Replicas, each with a copy of the model; with DP attention, parts of the tensor group.",
        ("--dp", "--dp-size", "-dp"),
        "R",
    ),
    Flag("enable_dp_attention", RANKS, "Data parallelism inside the tensor group, of attention alone."),
    Flag(
        "attention_context_parallel_size",
        RANKS,
        "Ranks that share the tokens of a prompt's attention.",
        ("--attn-cp-size",),
        "C",
    ),
    Flag(
        "expert_parallel_size",
        RANKS,
        "Parts of the tensor group among which experts are split.",
        ("--ep", "--ep-size"),
        "E",
    ),
    Flag(
        "moe_data_parallel_size",
        RANKS,
        "Parts of the tensor group with all experts each.",
        ("--moe-dp-size",),
        "M",
    ),
    Flag("nnodes", RANKS, "Machines, each with an equal part of the ranks.", (), "N"),
    Flag("node_rank", RANKS, "Which of them this one is; node 0 answers HTTP.", (), "N"),
    Flag("dist_init_addr", RANKS, "Where node 0 is met, such as 10.0.0.1:5000.", (), "HOST:PORT"),
    Flag("dist_timeout", RANKS, "Seconds that nodes and ranks of a group wait for each other.", (), "SECONDS"),
    Flag("node_ip", RANKS, "Address of this machine for the other nodes.", (), "IP", "by the route to node 0"),
    Flag("dist_port_range", RANKS, "Ports between nodes, such as 40000-40100.", (), "FROM-TO", "any"),
    Flag("health_port", RANKS, "Where other nodes than 0 tell how they are, at --host.", (), "PORT"),
    Flag("launcher", RANKS, "Who starts the other nodes: local, you; ray, a Ray cluster."),
    Flag("ray_address", RANKS, "Of that cluster.", (), "HOST:PORT", "RAY_ADDRESS, or this machine's"),
    Flag("cluster_secret_file", RANKS, "File with the secret of all nodes.", (), "FILE"),
    Flag("base_gpu_id", RANKS, "First device of each machine.", (), "ID"),
    Flag("gpu_id_step", RANKS, "How far it is from a rank's device to the next one's.", (), "N"),
    Flag("engine", ENGINE, "torch, mock, or an engine that another package brings.", (), "NAME"),
    Flag("device", ENGINE, "Where the torch engine computes."),
    Flag(
        "attention_backend", ENGINE, "What computes attention; flashinfer on CUDA only, and from servekit[flashinfer]."
    ),
    Flag(
        "max_running_requests",
        ENGINE,
        "Most requests in a rank's batch.",
        ("--max-num-seqs", "--parallel", "-np"),
        "N",
        "64 on a CPU, 256 with CUDA, 4096 for mock",
    ),
    Flag("max_total_tokens", ENGINE, "KV pool of a rank, in tokens.", (), "TOKENS", "what memory allows"),
    Flag("page_size", ENGINE, "Tokens in a KV page.", ("--block-size",), "TOKENS"),
    Flag("max_prefill_tokens", ENGINE, "Most prompt tokens in a step.", ("--max-num-batched-tokens",), "TOKENS"),
    Flag(
        "chunked_prefill_size",
        ENGINE,
        "Most tokens of one prompt in a step; fewer while others decode.",
        (),
        "TOKENS",
    ),
    Flag("schedule_policy", ENGINE, "Who of the waiting is next.", ("--scheduling-policy",)),
    Flag(
        "prefix_caching",
        ENGINE,
        "Keep computed prefixes, and share them.",
        (
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "--cache-prompt/--no-cache-prompt",
            " /--disable-radix-cache",
        ),
    ),
    Flag("seed", ENGINE, "Base of random seeds for requests that bring none.", ("--random-seed",), "N", "drawn anew"),
    Flag("profile_dir", ENGINE, "Folder for profiles.", (), "FOLDER", "one that goes with the server"),
    Flag("mock_step_ms", MOCK, "Milliseconds from one token to the next.", (), "MS"),
    Flag("mock_script", MOCK, "JSON or TOML with scripted tokens, timings, faults.", (), "FILE"),
    Flag("log_level", LOGS, "Least level that is logged."),
    Flag("log_format", LOGS, "Lines of text, or of JSON."),
    Flag("access_log", LOGS, "Log each HTTP request."),
)
"""All but MODEL, which is positional and has the aliases `MODEL_FLAGS`."""

MODEL_FLAGS = ("--model", "--model-path", "-m")

EXAMPLES = """\
Examples:

  servekit-serve                                   the demo model on http://127.0.0.1:8000
  servekit-serve ./my-model --port 9000            a folder with safetensors
  servekit-serve model.gguf --max-model-len 4096   a GGUF file, with a shorter context
  servekit-serve ORG/NAME --revision main          a model of the Hugging Face hub
  servekit-serve --tensor-parallel-size 4 --show-ranks   who would be what, without starting anything
  servekit-serve MODEL --tokenizer-workers 2 --detokenizer-workers 2 --data-parallel-size 2
  servekit-serve --engine mock --mock-step-ms 10   no weights: canned tokens, for tests of what is around

Every flag can be set by an environment variable, --max-model-len by SERVEKIT_MAX_MODEL_LEN, and by a line of the
file that --config names, YAML or TOML: max-model-len: 4096. A flag wins over the environment, that over the file.
Spellings of vLLM, SGLang and llama.cpp work too where they mean the same: --dp, --max-num-seqs, --context-length, -m.
"""
