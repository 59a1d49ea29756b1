"""Splitting and merging batches, held against the plain Python of `servekit.reference` and against itself."""

from math import prod
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit import _core, reference
from servekit.messages.batches import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    LoadReport,
    Tensor,
)
from servekit.messages.columns import BATCHES, ColumnKind, columns_of
from servekit.messages.envelope import Kind, mint_rid, route_of

ENCODE = msgspec.msgpack.encode

SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i64": 8}


class Maker:
    """Values for columns out of a seed: drawing each of them from Hypothesis would take minutes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def some(self, most: int) -> range:
        return range(self.random.randint(0, most))

    def number(self) -> int:
        return self.random.choice([0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, -1, -33, 2**63])

    def text(self) -> str:
        return "".join(self.random.choices("aé日😀 \n", k=self.random.choice([0, 1, 5, 31, 32, 90, 300])))

    def data(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 4, 8, 255, 256, 300]))

    def tensor(self, rows: int) -> Tensor:
        dtype = self.random.choice(sorted(SIZES))
        rest = [self.random.randint(0, 3) for _ in self.some(2)]
        return Tensor(dtype, [rows, *rest], self.random.randbytes(SIZES[dtype] * rows * prod(rest)))

    def reason(self) -> FinishReason | None:
        types, matched = ["stop", "length", "abort", "error"], [None, "a", 5, 70000]
        reason = FinishReason(self.random.choice(types), self.random.choice(matched), self.random.choice([None, "b"]))
        return self.random.choice([None, reason])

    def anything(self, depth: int = 3) -> Any:
        leaves = [None, True, 1.5, self.number(), self.text(), self.data()]
        branches = [[self.anything(depth - 1) for _ in self.some(3)], {"k": self.anything(depth - 1)}] if depth else []
        return self.random.choice(leaves + branches)

    def element(self, name: str) -> Any:
        if name == "finished_reasons":
            return self.reason()
        if name == "embeddings":
            return self.data()
        if name in ("http_worker_ipcs", "decoded_texts", "output_strs"):
            return self.text()
        return self.random.choice([True, False]) if name.startswith(("skip", "spaces", "no_stop")) else self.number()

    def column(self, name: str, kind: ColumnKind, n: int) -> Any:
        """Values of a column in a batch of n rows; absent ones too."""
        if self.random.random() < 0.3:
            return None
        nested = lambda: self.random.choice([None, [self.data() for _ in self.some(3)]])  # noqa: E731
        match kind:
            case ColumnKind.LIST_OR_EMPTY if self.random.random() < 0.5:
                return []
            case ColumnKind.LIST | ColumnKind.LIST_OR_EMPTY:
                return [self.element(name) for _ in range(n)]
            case ColumnKind.RAGGED:
                return [self.data() for _ in range(n)]
            case ColumnKind.RAGGED_SHORT:
                return [self.random.choice([None, self.data()]) for _ in self.some(n)]
            case ColumnKind.NESTED:
                return [[self.tensor(1) for _ in self.some(2)] for _ in range(n)]
            case ColumnKind.NESTED_SHORT:
                return [nested() for _ in self.some(n)]
            case ColumnKind.DICT_OF_LISTS:
                return {str(key): [self.anything() for _ in self.some(n)] for key in self.some(3)}
            case ColumnKind.LIST_OR_STACKED if self.random.random() < 0.5:
                return [self.element(name) for _ in range(n)]
            case ColumnKind.STACKED | ColumnKind.LIST_OR_STACKED:
                return self.tensor(n)
            case ColumnKind.SHARED:
                return LoadReport(self.random.randint(0, 300))


@st.composite
def batches(draw: st.DrawFn, least: int = 0) -> tuple[Kind, Any]:
    """A batch of any kind, each column there or not."""
    kind = draw(st.sampled_from(sorted(BATCHES)))
    routes = draw(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 4095)), min_size=1, max_size=4))
    picks = draw(st.lists(st.sampled_from(routes), min_size=least, max_size=draw(st.sampled_from([3, 20]))))
    rids = [mint_rid(*route, i) for i, route in enumerate(picks)]
    maker = Maker(draw(st.integers(0, 2**32)))
    columns = list(columns_of(BATCHES[kind]).items())[1:]
    return kind, BATCHES[kind](rids, **{name: maker.column(name, shape, len(rids)) for name, (shape, _) in columns})


def rows_by_route(batch: Any) -> dict[tuple[int, int], list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for row, rid in enumerate(batch.rids):
        groups.setdefault(route_of(rid), []).append(row)
    return groups


@given(batches())
@settings(deadline=None, max_examples=300)
def test_split_equals_plain_python(drawn: tuple[Kind, Any]) -> None:
    kind, batch = drawn
    body = ENCODE(batch)
    assert _core.split_batch(body) == reference.split_batch(kind, body)


@given(batches(least=1), st.data())
@settings(deadline=None, max_examples=200)
def test_one_row_equals_plain_python(drawn: tuple[Kind, Any], data: st.DataObject) -> None:
    _, batch = drawn
    row = data.draw(st.integers(0, len(batch.rids) - 1))
    name = data.draw(st.sampled_from(batch.__struct_fields__))
    one = reference.handle_output_by_index(batch, row)
    assert _core.handle_output_by_index(ENCODE(batch), row) == ENCODE(one)
    field = _core.extract_field_by_index(ENCODE(batch), name, row)
    assert field == ENCODE(getattr(one, name)) == ENCODE(reference.extract_field_by_index(batch, name, row))


@given(batches(least=1))
@settings(deadline=None, max_examples=200)
def test_splitting_and_merging_gives_the_original(drawn: tuple[Kind, Any]) -> None:
    _, batch = drawn
    body = ENCODE(batch)
    parts = [part for *_, part in _core.split_batch(body)]
    positions = list(rows_by_route(batch).values())
    assert _core.merge_batches(parts, positions) == body
    decoded = [msgspec.msgpack.decode(part, type=type(batch)) for part in parts]
    assert ENCODE(reference.merge(decoded, positions)) == body


@given(batches(least=1))
@settings(deadline=None, max_examples=100)
def test_splitting_to_workers_is_splitting_by_row_and_grouping(drawn: tuple[Kind, Any]) -> None:
    _, batch = drawn
    body = ENCODE(batch)
    groups = rows_by_route(batch)
    parts = _core.split_batch(body)
    assert [part[:2] for part in parts] == list(groups)
    for rows, (*_, part) in zip(groups.values(), parts, strict=True):
        singles = [_core.handle_output_by_index(body, row) for row in rows]
        assert _core.merge_batches(singles, [[i] for i in range(len(rows))]) == part


@given(batches(least=1), st.data())
@settings(deadline=None, max_examples=100)
def test_routing_by_name(drawn: tuple[Kind, Any], data: st.DataObject) -> None:
    _, batch = drawn
    names = data.draw(st.lists(st.sampled_from(["a", "bé", ""]), min_size=len(batch.rids), max_size=len(batch.rids)))
    batch.http_worker_ipcs = names
    groups = {name: [row for row, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}
    expected = [(name, ENCODE(reference.take_rows(batch, rows))) for name, rows in groups.items()]
    assert _core.split_batch_by_name(ENCODE(batch)) == expected


@given(batches(least=1), st.data())
@settings(deadline=None, max_examples=300)
def test_broken_bodies_raise(drawn: tuple[Kind, Any], data: st.DataObject) -> None:
    """A cut body always raises; a changed one raises or is another batch, and nothing worse."""
    _, batch = drawn
    body = ENCODE(batch)
    with pytest.raises(_core.MalformedError):
        _core.split_batch(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(_core.MalformedError):
        _core.split_batch(body + b"\0")
    broken = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        parts = _core.split_batch(bytes(broken))
    except _core.MalformedError:
        return
    assert sum(len(part) for *_, part in parts) < 100 * len(body) + 1000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt_tokens", [1]),
        ("prompt_tokens", [1, 2, 3]),
        ("prompt_tokens", []),
        ("decode_ids", [b""]),
        ("spec_verify_ct", [1]),
        ("output_token_logprobs_val", [None] * 3),
        ("output_top_logprobs_val", [None] * 3),
        ("output_hidden_states", [[]]),
        ("customized_info", {"a": [1, 2, 3]}),
        ("finished_reasons", [None, 5]),
        ("finished_reasons", [None, []]),
    ],
)
def test_columns_of_the_wrong_length_raise(name: str, values: Any) -> None:
    """Whatever is not the batch's length raises, unless the column's kind allows it."""
    batch = BatchTokenIDOutput([mint_rid(1, 1, 1), mint_rid(2, 1, 1)])
    setattr(batch, name, values)
    with pytest.raises(_core.MalformedError, match=name):
        _core.split_batch(ENCODE(batch))


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("f32", [1, 2], bytes(8)),
        Tensor("f32", [2, 2], bytes(8)),
        Tensor("f32", [], bytes(4)),
        Tensor("f8", [2, 4], bytes(8)),
        Tensor("f32", [2, 2**62, 2**62], b""),
        Tensor("f32", [2, 2**64 - 1, 0], b"1"),
    ],
)
def test_tensors_that_do_not_fit_raise(tensor: Tensor) -> None:
    batch = BatchEmbeddingOutput([mint_rid(1, 1, 1), mint_rid(2, 1, 1)], embeddings=tensor)
    with pytest.raises(_core.MalformedError, match="embeddings"):
        _core.split_batch(ENCODE(batch))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\xdd\xff\xff\xff\xff\xae",
        ENCODE(["BatchStr", []]),
        ENCODE(["BatchTokenIDOutput"]),
        ENCODE(["BatchTokenIDOutput", None]),
        ENCODE(["BatchTokenIDOutput", [-1]]),
        ENCODE(["BatchTokenIDOutput", ["a"]]),
        ENCODE(["BatchTokenIDOutput", [], *[None] * 99]),
        b"\x92" + ENCODE("BatchTokenIDOutput") + b"\xdd\xff\xff\xff\xff",
        b"\x93" + ENCODE("BatchTokenIDOutput") + b"\x91\x01" + b"\x91" * 100_000,
    ],
)
def test_hostile_bodies_raise(body: bytes) -> None:
    with pytest.raises(_core.MalformedError):
        _core.split_batch(body)


def test_bodies_of_other_messages_raise() -> None:
    for name in ("TokenizedGenerateReqInput", "BatchStr", "", 7, None):
        with pytest.raises(_core.MalformedError):
            _core.split_batch(ENCODE([name, []]))


def test_a_batch_of_one_worker_is_not_copied() -> None:
    body = ENCODE(BatchStrOutput([mint_rid(1, 1, i) for i in range(3)]))
    assert _core.split_batch(body)[0][2] is body


def test_rows_and_columns_that_are_not_there_raise() -> None:
    body = ENCODE(BatchTokenIDOutput([mint_rid(1, 1, 1)]))
    with pytest.raises(IndexError) as row:
        _core.handle_output_by_index(body, 1)
    with pytest.raises(KeyError) as column:
        _core.extract_field_by_index(body, "nothing", 0)
    assert isinstance(row.value, _core.ServekitError) and isinstance(column.value, _core.ServekitError)


def test_bodies_of_an_older_peer_are_split() -> None:
    """A body without the newest columns stays one."""
    rids = [mint_rid(1, 1, 1), mint_rid(2, 1, 1)]
    body = ENCODE(["BatchTokenIDOutput", rids, None, [None, None]])
    parts = _core.split_batch(body)
    assert [part[2] for part in parts] == [ENCODE(["BatchTokenIDOutput", [rid], None, [None]]) for rid in rids]


def test_many_workers() -> None:
    rids = [mint_rid(i % 100, 1, i) for i in range(1000)]
    body = ENCODE(BatchTokenIDOutput(rids, prompt_tokens=list(range(1000))))
    assert _core.split_batch(body) == reference.split_batch(Kind.BATCH_TOKEN_ID, body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt_tokens": [1]}, {}),
        ({"load": LoadReport(1)}, {"load": LoadReport(2)}),
        ({"spec_verify_ct": [1]}, {"spec_verify_ct": []}),
    ],
)
def test_what_does_not_fit_together_is_not_merged(first: dict[str, Any], second: dict[str, Any]) -> None:
    parts = [BatchTokenIDOutput([mint_rid(1, 1, i)], **columns) for i, columns in enumerate((first, second))]
    with pytest.raises(_core.MalformedError):
        _core.merge_batches([ENCODE(part) for part in parts], [[0], [1]])
    with pytest.raises(ValueError):
        reference.merge(parts, [[0], [1]])


def test_merged_rows_without_an_element_are_null_in_the_middle_and_left_out_at_the_end() -> None:
    rids = [mint_rid(1, 1, i) for i in range(3)]
    columns = [
        {"logprobs": [], "info": {}},
        {"logprobs": [b"1234"], "info": {"k": [5]}},
        {"logprobs": [], "info": {"k": []}},
    ]
    parts = [
        BatchTokenIDOutput([rid], output_token_logprobs_val=c["logprobs"], customized_info=c["info"])
        for rid, c in zip(rids, columns, strict=True)
    ]
    merged = BatchTokenIDOutput(rids, output_token_logprobs_val=[None, b"1234"], customized_info={"k": [None, 5]})
    positions = [[0], [1], [2]]
    assert _core.merge_batches([ENCODE(part) for part in parts], positions) == ENCODE(merged)
    assert reference.merge(parts, positions) == merged


@pytest.mark.parametrize("positions", [[], [[0]], [[0], [0]], [[0], [2]], [[0, 1], []]])
def test_positions_must_be_a_permutation(positions: list[list[int]]) -> None:
    parts = [ENCODE(BatchTokenIDOutput([mint_rid(1, 1, i)])) for i in range(2)]
    with pytest.raises(_core.MalformedError, match="permutation"):
        _core.merge_batches(parts, positions)
