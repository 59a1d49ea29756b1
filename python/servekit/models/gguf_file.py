"""A reader for GGUF files: metadata and tensors of a memory-mapped file, with nothing but the standard library.

The layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian: magic, version, number of
tensors, number of keys; the keys with their typed values; one description per tensor; padding; the tensors' bytes.

Files come from strangers, so every length is held against the size of the file before it is used. What is wrong ends
in a `GgufError`, and neither time nor memory exceeds a small multiple of the file's size.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HEADER = struct.Struct("<4sIQQ")
_ARRAY_HEAD = struct.Struct("<IQ")

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# The fewest bytes that one of each takes: a count above what the rest of the file could hold is refused at once.
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_SMALLEST_STRING = 8


class TensorType(NamedTuple):
    """How a tensor's numbers are stored: `block` numbers of one row share `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}


class GgufError(Exception):
    """A file that is not a GGUF file, is damaged, or uses what this reader does not know. One line, with the path."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        name: e.g. `blk.0.attn_q.weight`.
        type_name: how its numbers are stored: F32, F16, BF16, Q4_1, Q8_0, Q6_K, ...
        type_id: the same as ggml's number.
        shape: outermost dimension first, a matrix is (out, in): the reverse of the order in the file.
        nbytes: length of `data`.
        data: its bytes in the mapped file, read-only.
    """

    name: str
    type_name: str
    type_id: int
    shape: tuple[int, ...]
    nbytes: int
    data: memoryview

    def part(self, index: int) -> GgufTensor:
        """One of the tensors that lie one behind the other along the outermost axis.

        Raises:
            ValueError: there is no such part.
        """
        count = self.shape[0]
        if len(self.shape) < 3 or not 0 <= index < count:
            raise ValueError(f"a tensor of shape {self.shape} has no part {index}")
        each = self.nbytes // count
        data = self.data[index * each : (index + 1) * each]
        return GgufTensor(f"{self.name}[{index}]", self.type_name, self.type_id, self.shape[1:], each, data)

    def rows(self, start: int, stop: int) -> GgufTensor:
        """Some of a matrix's rows, or of a vector's numbers where each is stored by itself."""
        each = self.nbytes // self.shape[0]
        data, shape = self.data[start * each : stop * each], (stop - start, *self.shape[1:])
        return GgufTensor(self.name, self.type_name, self.type_id, shape, len(data), data)


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key to value: bool, int, float, str or a list of these. A value is decoded when it is first asked for,
            which must be while the file is open.
        tensors: name to tensor, in the file's order.

    Arrays made over a tensor's `data` stay valid after `close`; the mapping then ends with the last of them.
    """

    path: Path
    version: int
    metadata: GgufMetadata
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path) -> None:
        """Maps the file and reads everything but the values of arrays and the tensors' bytes.

        Raises:
            GgufError: not a readable, complete GGUF file.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise GgufError(f"{self.path}: the file is empty") from error
        except OSError as error:
            raise GgufError(f"{self.path}: {error.strerror or error}") from error
        self._view = memoryview(self._map)
        self.tensors = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the mapping, at once or, if arrays over a tensor's bytes live on, with the last of them."""
        try:
            for tensor in self.tensors.values():
                tensor.data.release()
            self._view.release()
            self._map.close()
        except BufferError:
            # Somebody's array still points into the file: the mapping goes when that is collected.
            return

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        size = len(self._map)
        if size < _HEADER.size or self._map[:4] != _MAGIC:
            raise GgufError(f"{self.path}: not a GGUF file")
        _, self.version, tensor_count, key_count = _HEADER.unpack_from(self._map)
        if self.version not in _VERSIONS:
            big_endian = int.from_bytes(self._map[4:8], "big") in _VERSIONS
            what = "big-endian GGUF" if big_endian else f"GGUF version {self.version}"
            raise GgufError(f"{self.path}: {what} is not supported, only little-endian version 2 and 3")
        cursor = _Cursor(self.path, self._map, _HEADER.size)
        self.metadata = GgufMetadata(cursor, key_count)
        self._read_tensors(cursor, tensor_count)

    def _read_tensors(self, cursor: _Cursor, count: int) -> None:
        cursor.expect(count * _SMALLEST_TENSOR, f"{count} tensors")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise GgufError(f"{self.path}: general.alignment is {alignment!r}, not a power of two")
        found = [_read_tensor_info(cursor) for _ in range(count)]
        start = -(-cursor.position // alignment) * alignment
        room = max(len(self._map) - start, 0)
        total = 0
        for name, kind_id, shape, offset in found:
            kind = TENSOR_TYPES[kind_id]
            nbytes = prod(shape) // kind.block * kind.block_bytes
            total += nbytes
            if offset % alignment:
                raise GgufError(f"{self.path}: tensor {name!r} starts at {offset}, not a multiple of {alignment}")
            if offset + nbytes > room or total > room:
                raise GgufError(
                    f"{self.path}: tensor {name!r} ends {offset + nbytes} bytes into the data, which has {room}:"
                    " the file is truncated or damaged"
                )
            if name in self.tensors:
                raise GgufError(f"{self.path}: tensor {name!r} appears twice")
            data = self._view[start + offset : start + offset + nbytes]
            self.tensors[name] = GgufTensor(name, kind.name, kind_id, shape, nbytes, data)


class GgufMetadata(Mapping[str, Any]):
    """A file's keys and values. A value is decoded when it is first asked for.

    `values[key]` raises KeyError for a missing key, GgufError for text that is not UTF-8.
    """

    def __init__(self, cursor: _Cursor, count: int) -> None:
        cursor.expect(count * _SMALLEST_KEY, f"{count} keys")
        self._cursor = cursor
        self._places: dict[str, tuple[int, int]] = {}
        self._values: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.text("a key")
            if key in self._places:
                raise GgufError(f"{cursor.path}: key {key!r} appears twice")
            kind = cursor.u32()
            self._places[key] = (kind, cursor.position)
            cursor.skip_value(kind, key)

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, position = self._places[key]
            self._values[key] = self._cursor.at(position).value(kind, key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Cursor:
    """A position in the mapped file; reading moves it."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.path = path
        self.data = data
        self.position = position
        self.end = len(data)

    def at(self, position: int) -> _Cursor:
        return _Cursor(self.path, self.data, position)

    def expect(self, nbytes: int, what: str) -> None:
        left = self.end - self.position
        if nbytes > left:
            raise GgufError(
                f"{self.path}: {what} would need {nbytes} bytes where {left} are left: the file is truncated or damaged"
            )

    def u32(self) -> int:
        self.expect(4, "a number")
        value: int = _U32.unpack_from(self.data, self.position)[0]
        self.position += 4
        return value

    def u64(self) -> int:
        self.expect(8, "a number")
        value: int = _U64.unpack_from(self.data, self.position)[0]
        self.position += 8
        return value

    def text(self, what: str) -> str:
        length = self.u64()
        self.expect(length, what)
        start = self.position
        self.position += length
        return self._decode(self.data[start : self.position], what)

    def skip_value(self, kind: int, key: str) -> None:
        if kind == _ARRAY:
            kind, count = self._array_head(key)
            if kind == _STRING:
                self._skip_strings(count, key)
            else:
                self._advance(count * _SCALARS[kind].size, key)
        elif kind == _STRING:
            self._advance(self.u64(), key)
        else:
            self._advance(self._scalar(kind, key).size, key)

    def value(self, kind: int, key: str) -> Any:
        """Reads a value that `skip_value` has passed before, so its lengths are known to be right."""
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            return self._scalar(kind, key).unpack_from(self.data, self.position)[0]
        kind, count = self._array_head(key)
        if kind == _STRING:
            return self._strings(count, key)
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind].format[1:]}", self.data, self.position))

    def _array_head(self, key: str) -> tuple[int, int]:
        self.expect(_ARRAY_HEAD.size, f"the array {key!r}")
        kind, count = _ARRAY_HEAD.unpack_from(self.data, self.position)
        self.position += _ARRAY_HEAD.size
        if kind == _ARRAY:
            raise GgufError(f"{self.path}: key {key!r} holds an array of arrays, which is not supported")
        smallest = _SMALLEST_STRING if kind == _STRING else self._scalar(kind, key).size
        self.expect(count * smallest, f"the array {key!r} of {count} values")
        return kind, count

    def _skip_strings(self, count: int, key: str) -> None:
        # A vocabulary has hundreds of thousands of strings, so this loop is written out.
        unpack, data, position, last = _U64.unpack_from, self.data, self.position, self.end - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(data, position)[0]
        else:
            if position <= self.end:
                self.position = position
                return
        raise GgufError(f"{self.path}: the strings of {key!r} go past the end: the file is truncated or damaged")

    def _strings(self, count: int, key: str) -> list[str]:
        unpack, data, position = _U64.unpack_from, self.data, self.position
        found = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            found.append(data[start:position])
        return [self._decode(raw, key) for raw in found]

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.path}: {what} is not valid UTF-8") from error

    def _scalar(self, kind: int, key: str) -> struct.Struct:
        if kind not in _SCALARS:
            raise GgufError(f"{self.path}: key {key!r} has the unknown type {kind}")
        return _SCALARS[kind]

    def _advance(self, nbytes: int, key: str) -> None:
        self.expect(nbytes, f"the value of {key!r}")
        self.position += nbytes


def _read_tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Returns name, ggml type number, shape (outermost first) and offset in the data section, in bytes."""
    name = cursor.text("a tensor's name")
    dimensions = cursor.u32()
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise GgufError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
    in_file_order = [cursor.u64() for _ in range(dimensions)]
    kind_id = cursor.u32()
    offset = cursor.u64()
    if kind_id not in TENSOR_TYPES:
        raise GgufError(f"{cursor.path}: tensor {name!r} has the unknown type {kind_id}")
    kind = TENSOR_TYPES[kind_id]
    if in_file_order[0] % kind.block:
        raise GgufError(
            f"{cursor.path}: tensor {name!r} has rows of {in_file_order[0]} numbers, {kind.name} needs a multiple of"
            f" {kind.block}"
        )
    return name, kind_id, tuple(reversed(in_file_order)), offset
