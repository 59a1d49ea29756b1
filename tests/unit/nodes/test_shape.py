"""What must be alike on all nodes."""

from __future__ import annotations

import msgspec
import pytest
from servekit.config import ServerArgs
from servekit.config.model_source import resolve_model
from servekit.runtime.nodes import shape

from tests.unit.tiny_models import save_case


@pytest.fixture
def model(tmp_path):
    folder = save_case(tmp_path / "model", "qwen3")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    args = ServerArgs(model=str(folder), skip_tokenizer_init=True)
    return args, resolve_model(args, tmp_path), folder


def test_every_flag_is_a_nodes_own_or_must_be_alike(model):
    args, info, _ = model
    fields = set(ServerArgs.__struct_fields__)
    assert fields >= shape.OWN
    assert set(shape.shape_of(args, info).flags) == fields - shape.OWN


def test_the_same_files_elsewhere_and_other_names_of_them_are_alike(model, tmp_path):
    args, info, folder = model
    ours = shape.shape_of(args, info)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    moved = msgspec.structs.replace(args, model=str(elsewhere), log_level="debug", port=1)
    theirs = shape.shape_of(moved, resolve_model(moved, tmp_path))
    assert shape.difference(ours, theirs, 1) is None
    assert msgspec.json.decode(msgspec.json.encode(theirs), type=shape.Shape) == theirs


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_one_byte_of_a_file_makes_the_difference(model, name):
    args, info, folder = model
    ours = shape.shape_of(args, info)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    reason = shape.difference(ours, shape.shape_of(args, info), 1)
    assert reason == f"its model has another {name} than that of node 0: node 1 must serve the same files"


def test_a_large_file_is_known_by_its_size_and_by_blocks_from_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shape, "_WHOLE", 1000)
    path = tmp_path / "large"
    path.write_bytes(bytes(10 << 20))
    before = shape.digest_of(path)
    with path.open("r+b") as file:
        for place in (0, (10 << 20) - 1):
            file.seek(place)
            file.write(b"\1")
            file.flush()
            assert shape.digest_of(path) != before
            before = shape.digest_of(path)
        file.seek(0, 2)
        file.write(b"\0")
        file.flush()
        assert shape.digest_of(path) != before
