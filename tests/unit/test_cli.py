"""The command line: every flag, its neighbours' spellings, the environment, files, and what is said of mistakes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from servekit.cli import serve
from servekit.cli.flags import FLAGS, MODEL_FLAGS
from servekit.config.server_args import CHOICES, ConfigError, ServerArgs, flag_of


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("SERVEKIT_")]:
        monkeypatch.delenv(name)


SPECIAL = {
    "uds_mode": "600",
    "root_path": "/llm",
    "pp_layer_partition": "3,2",
    "allowed_origins": ("https://app.example",),
    "api_key": ("sk-1",),
    "node_ip": "fd00::1",
    "dist_init_addr": "[fd00::1]:5000",
    "dist_port_range": "40000-40100",
}
"""Values of fields that do not take just anything of their type."""


def needs(field: str, folder: Path) -> tuple[str | None, list[str]]:
    """Path that a field must name, and flags without which it can't be."""
    file = folder / "file"
    file.write_text("{}")
    path = str(file)
    others = {"mock_script": ["--engine", "mock"], "ssl_cert_reqs": ["--ssl-ca-certs", path]}.get(field, [])
    if field in ("attention_context_parallel_size", "expert_parallel_size", "moe_data_parallel_size", "nnodes"):
        others = ["--tensor-parallel-size", "2"]
    if field == "nnodes":
        others += ["--dist-init-addr", "10.0.0.1:5000"]
    if field in ("node_rank", "launcher"):
        others = ["--nnodes", "2", "--data-parallel-size", "2", "--dist-init-addr", "10.0.0.1:5000"]
    if field.startswith("ssl_") and field != "ssl_certfile":
        others += ["--ssl-certfile", path]
    takes_file = field in ("mock_script", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "api_key_file")
    return (path if takes_file else None), others


def other_value(field: str) -> object:
    """A value of a field that is not its default."""
    default = getattr(ServerArgs(), field)
    if field in CHOICES:
        return next(each for each in CHOICES[field] if each != default)
    if field == "engine":
        return "mock"
    if isinstance(default, bool):
        return not default
    if field in SPECIAL:
        return SPECIAL[field]
    if isinstance(default, float):
        return default + 1.5
    if isinstance(default, int):
        return default + 1
    numbers = ("max_model_len", "max_total_tokens", "max_running_requests", "max_queued_tokens", "seed")
    numbers += ("max_requests_per_worker", "pp_max_micro_batch_size", "health_port")
    return dict.fromkeys(numbers, 777).get(field, "something")


def run_main(*arguments: str, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        serve.main(arguments)
    return end.value.code, capsys.readouterr().err


def test_defaults():
    assert serve.parse([]) == ServerArgs()


def test_every_setting_has_a_flag():
    assert {flag.field for flag in FLAGS} | {"model"} == set(ServerArgs.__struct_fields__)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_each_spelling_and_variable_sets_its_field(flag, monkeypatch, tmp_path):
    path, extra = needs(flag.field, tmp_path)
    value = path or other_value(flag.field)
    name = flag_of(flag.field)
    text = value[0] if isinstance(value, tuple) else str(value)
    if isinstance(value, bool):
        for on, off in [(name, "--no-" + name[2:]), *(alias.strip().split("/") for alias in flag.aliases)]:
            assert getattr(serve.parse([on if value else off]), flag.field) is value
    else:
        for spelling in (name, *flag.aliases):
            assert getattr(serve.parse([spelling, text, *extra]), flag.field) == value
    monkeypatch.setenv("SERVEKIT_" + flag.field.upper(), text)
    assert getattr(serve.parse(extra), flag.field) == value


def test_flags_that_may_be_repeated(monkeypatch, tmp_path):
    assert serve.parse(["--api-key", "a", "--api-key", "b"]).api_key == ("a", "b")
    both = ("https://a.example", "https://b.example")
    assert serve.parse(["--allowed-origins", both[0], "--cors-origins", both[1]]).allowed_origins == both
    # As vLLM spells it.
    assert serve.parse(["--allowed-origins", '["https://a.example", "https://b.example"]']).allowed_origins == both
    for wrong in ('["a"', "[1]"):
        with pytest.raises(click.BadParameter, match="no JSON list"):
            serve.parse(["--allowed-origins", wrong])
    monkeypatch.setenv("SERVEKIT_API_KEY", "c d")
    assert serve.parse([]).api_key == ("c", "d")
    for text, keys in (("api-key: [e, f]", ("e", "f")), ("api-key: g", ("g",))):
        monkeypatch.delenv("SERVEKIT_API_KEY", raising=False)
        file = tmp_path / "flags.yaml"
        file.write_text(text)
        assert serve.parse(["--config", str(file)]).api_key == keys
    file.write_text("api-key: [1]")
    with pytest.raises(click.UsageError, match="list of texts"):
        serve.parse(["--config", str(file)])


def test_a_wrong_key_is_a_mistake_of_usage_and_is_not_shown(capsys):
    status, said = run_main("--api-key", "two words", capsys=capsys)
    assert status == 2 and "--api-key" in said and "words" not in said


def test_model_is_positional_or_named():
    for arguments in (["m"], *([flag, "m"] for flag in MODEL_FLAGS), ["m", "--model", "m"]):
        assert serve.parse(arguments).model == "m"
    with pytest.raises(click.UsageError, match="named twice"):
        serve.parse(["m", "--model", "other"])


def test_model_on_the_command_line_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("SERVEKIT_MODEL", "from-environment")
    assert serve.parse([]).model == "from-environment"
    assert serve.parse(["positional"]).model == "positional"


@pytest.mark.parametrize(
    ("text", "size"),
    [("16777216", 16 << 20), ("16MiB", 16 << 20), ("16m", 16 << 20), ("2MB", 2_000_000), ("4 KiB", 4096)],
)
def test_sizes(text, size):
    assert serve.parse(["--max-body-size", text]).max_body_size == size


@pytest.mark.parametrize("name", ["flags.yaml", "flags.toml"])
def test_config_file_comes_after_flags_and_environment(name, tmp_path, monkeypatch):
    lines = {"port": 9000, "max-model-len": 100, "tokenizer_workers": 3, "access-log": True, "model": "m"}
    sep = " = " if name.endswith("toml") else ": "
    quoted = {"m": '"m"', True: "true"}
    text = "\n".join(f"{k}{sep}{quoted.get(v, v)}" for k, v in lines.items())
    file = tmp_path / name
    file.write_text(text)
    monkeypatch.setenv("SERVEKIT_MAX_MODEL_LEN", "200")
    args = serve.parse(["--config", str(file), "--tokenizer-workers", "4"])
    assert (args.port, args.max_model_len, args.tokenizer_workers, args.access_log, args.model) == (
        9000,
        200,
        4,
        True,
        "m",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1", "unknown flag prot; did you mean port"),
        ("port: [1]", "port must be one plain value"),
        ("- port", "must hold lines"),
        ("port: 1\nport: {", "--config"),
        ("ctx-size: 100\nmax-model-len: 200", "set twice"),
        ("config: x", "unknown flag config"),
        ("port: many", "--port"),
    ],
)
def test_config_file_mistakes_are_one_line(text, complaint, tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    status, said = run_main("--config", str(file), capsys=capsys)
    assert status == 2 and complaint in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--max-num-seq", "1"], "did you mean --max-num-seqs?"),
        (["--zzzzzz"], "unknown flag --zzzzzz; --help lists all"),
        (["--port", "x"], "--port"),
        (["--port", "65536"], "--port must be from 0 to 65535, not 65536"),
        (["--max-body-size", "big"], "'big' is no size"),
        (["--log-level", "loud"], "--log-level"),
        (["--seed"], "--seed"),
        (["one", "two"], "two"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--config", "/nowhere.yaml"], "No such file"),
    ],
)
def test_mistakes_are_one_line_with_status_2(arguments, complaint, capsys):
    status, said = run_main(*arguments, capsys=capsys)
    assert status == 2 and complaint in said and said.count("\n") == 1 and said.startswith("servekit-serve: error: ")


def test_help_names_each_flag_once_and_no_alias():
    command = serve.make_command()
    text = command.get_help(click.Context(command, info_name="servekit-serve"))
    for flag in FLAGS:
        assert flag_of(flag.field) + (" " if flag.field != "access_log" else " /") in text
        assert not any(alias + " " in text for alias in flag.aliases)
    assert "Examples:" in text


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom servekit.cli.serve import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'zmq', 'asyncio', 'servekit._core'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 1.0


def test_values_that_do_not_go_together():
    with pytest.raises(ConfigError, match="--mock-script needs --engine mock"):
        serve.parse(["--mock-script", "x"])
