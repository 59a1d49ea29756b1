"""The table of columns is complete, means what the types say, and Rust has the same."""

import typing

import msgspec
import pytest
from servekit.messages import columns
from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput
from servekit.messages.columns import BATCHES, Carry, ColumnKind


@pytest.mark.parametrize("batch", BATCHES.values(), ids=lambda batch: batch.__name__)
def test_every_field_has_an_entry(batch):
    assert list(columns.columns_of(batch)) == list(batch.__struct_fields__)


def test_no_entry_is_left_over():
    fields = {name for batch in BATCHES.values() for name in batch.__struct_fields__}
    assert fields == set(columns._COLUMNS)


SHAPES = {
    ColumnKind.LIST: "list[",
    ColumnKind.LIST_OR_EMPTY: "list[int]",
    ColumnKind.RAGGED: "list[bytes]",
    ColumnKind.RAGGED_SHORT: "list[bytes | None]",
    ColumnKind.NESTED: "list[list[",
    ColumnKind.NESTED_SHORT: "list[list[bytes] | None]",
    ColumnKind.DICT_OF_LISTS: "dict[str, list[",
    ColumnKind.STACKED: "Tensor",
    ColumnKind.LIST_OR_STACKED: "list[bytes] | Tensor",
    ColumnKind.SHARED: "LoadReport",
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=lambda batch: batch.__name__)
def test_kinds_fit_the_types(batch):
    for name, (kind, _) in columns.columns_of(batch).items():
        assert batch.__annotations__[name].startswith(SHAPES[kind]), name


def test_text_gets_every_column_that_both_have():
    """A column of the steps that text rows have too is carried, or made by the detokenizer."""
    for name in BatchStrOutput.__struct_fields__:
        _, carry = columns.columns_of(BatchStrOutput)[name]
        if name not in BatchTokenIDOutput.__struct_fields__:
            assert carry is Carry.OWN, name


def test_generated_file_is_fresh():
    assert columns.GENERATED.read_text() == columns.rust_source(), "run python -m servekit.messages.columns --write"


def test_a_changed_definition_changes_the_schema(monkeypatch):
    before = columns.schema_hash()
    later = msgspec.defstruct("BatchStrOutput", [("rids", list[int])], array_like=True, tag=True)
    later.__module__ = "servekit.messages.batches"
    monkeypatch.setattr("servekit.messages.batches.BatchStrOutput", later)
    assert columns.schema_hash() != before


def test_tags_are_the_names():
    for batch in BATCHES.values():
        assert batch.__struct_config__.tag == batch.__name__
        assert typing.get_type_hints(batch)["rids"] == list[int]
