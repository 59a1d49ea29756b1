"""How each column of a batch is split by row, and how the detokenizer carries it from a step to a row of text.

This table is the only place that says so. `python -m servekit.messages.columns --write` makes
`rust/servekit-core/src/wire/columns.rs` of it; a test fails when that file is stale or a field has no entry here.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import struct
import sys
from pathlib import Path

import msgspec

from . import batches, envelope, requests

GENERATED = Path(__file__).parents[3] / "rust/servekit-core/src/wire/columns.rs"


class ColumnKind(enum.Enum):
    """Shape of a column in a batch of n rows. Any column may be absent (null)."""

    LIST = "List"
    """One element a row."""
    LIST_OR_EMPTY = "ListOrEmpty"
    """One element a row, or none at all."""
    RAGGED = "Ragged"
    """One `bytes` of 4-byte numbers a row."""
    RAGGED_SHORT = "RaggedShort"
    """As RAGGED, elements may be null and rows may be missing at the end."""
    NESTED = "Nested"
    """One list a row."""
    NESTED_SHORT = "NestedShort"
    """As NESTED, elements may be null and rows may be missing at the end."""
    DICT_OF_LISTS = "DictOfLists"
    """A map of lists, each with an element a row; rows may be missing at the end of a list."""
    STACKED = "Stacked"
    """One tensor whose first dimension is n."""
    LIST_OR_STACKED = "ListOrStacked"
    """A list or a stacked tensor."""
    SHARED = "Shared"
    """One value for all rows, copied whole."""


class Carry(enum.Enum):
    """What a row of text gets of a column, when it stands for several steps of its request."""

    NEWEST = "Newest"
    """The value of the newest step."""
    OWN = "Own"
    """The detokenizer makes it."""
    PER_TOKEN = "PerToken"  # noqa: S105
    """One item for each id, released and cut together with the ids."""
    APPENDED = "Appended"
    """All items so far."""
    ONCE = "Once"
    """The first value, with the first row that is sent."""


_K, _C = ColumnKind, Carry
_COLUMNS: dict[str, tuple[ColumnKind, Carry]] = {
    "rids": (_K.LIST, _C.OWN),
    "http_worker_ipcs": (_K.LIST, _C.NEWEST),
    "finished_reasons": (_K.LIST, _C.OWN),
    "prompt_tokens": (_K.LIST, _C.NEWEST),
    "completion_tokens": (_K.LIST, _C.OWN),
    "cached_tokens": (_K.LIST, _C.NEWEST),
    "retraction_counts": (_K.LIST, _C.NEWEST),
    "dp_ranks": (_K.LIST, _C.NEWEST),
    "decode_ids": (_K.RAGGED, _C.OWN),
    "output_ids": (_K.RAGGED, _C.OWN),
    "decoded_texts": (_K.LIST, _C.NEWEST),
    "read_offsets": (_K.LIST, _C.NEWEST),
    "skip_special_tokens": (_K.LIST, _C.NEWEST),
    "spaces_between_special_tokens": (_K.LIST, _C.NEWEST),
    "no_stop_trim": (_K.LIST, _C.NEWEST),
    "output_strs": (_K.LIST, _C.OWN),
    "spec_verify_ct": (_K.LIST_OR_EMPTY, _C.NEWEST),
    "spec_accepted_tokens": (_K.LIST_OR_EMPTY, _C.NEWEST),
    "input_token_logprobs_val": (_K.RAGGED_SHORT, _C.ONCE),
    "input_token_logprobs_idx": (_K.RAGGED_SHORT, _C.ONCE),
    "output_token_logprobs_val": (_K.RAGGED_SHORT, _C.PER_TOKEN),
    "output_token_logprobs_idx": (_K.RAGGED_SHORT, _C.PER_TOKEN),
    "input_top_logprobs_val": (_K.NESTED_SHORT, _C.ONCE),
    "input_top_logprobs_idx": (_K.NESTED_SHORT, _C.ONCE),
    "output_top_logprobs_val": (_K.NESTED_SHORT, _C.PER_TOKEN),
    "output_top_logprobs_idx": (_K.NESTED_SHORT, _C.PER_TOKEN),
    "input_token_ids_logprobs_val": (_K.NESTED_SHORT, _C.ONCE),
    "input_token_ids_logprobs_idx": (_K.NESTED_SHORT, _C.ONCE),
    "output_token_ids_logprobs_val": (_K.NESTED_SHORT, _C.PER_TOKEN),
    "output_token_ids_logprobs_idx": (_K.NESTED_SHORT, _C.PER_TOKEN),
    "output_hidden_states": (_K.NESTED, _C.APPENDED),
    "customized_info": (_K.DICT_OF_LISTS, _C.NEWEST),
    "time_stats": (_K.DICT_OF_LISTS, _C.NEWEST),
    "embeddings": (_K.LIST_OR_STACKED, _C.NEWEST),
    "pooled_hidden_states": (_K.STACKED, _C.NEWEST),
    "load": (_K.SHARED, _C.NEWEST),
}

BATCHES: dict[envelope.Kind, type[msgspec.Struct]] = {
    envelope.Kind.BATCH_TOKEN_ID: batches.BatchTokenIDOutput,
    envelope.Kind.BATCH_STR: batches.BatchStrOutput,
    envelope.Kind.BATCH_EMBEDDING: batches.BatchEmbeddingOutput,
}
"""The struct of each kind of batch."""


def columns_of(batch: type[msgspec.Struct]) -> dict[str, tuple[ColumnKind, Carry]]:
    """Columns of a batch struct, in the order of its fields.

    Raises:
        KeyError: a field has no entry in the table.
    """
    return {name: _COLUMNS[name] for name in batch.__struct_fields__}


def _definitions() -> list[str]:
    """Every message definition as a line of text: what two builds must agree on."""
    lines = [f"version {envelope.VERSION}"]
    for module in (envelope, requests, batches):
        for name, value in sorted(vars(module).items()):
            if not isinstance(value, type) or value.__module__ != module.__name__:
                if isinstance(value, struct.Struct):
                    lines.append(f"{name} {value.format}")
            elif issubclass(value, msgspec.Struct):
                fields = ", ".join(f"{field}: {value.__annotations__[field]}" for field in value.__struct_fields__)
                lines.append(f"{name} {value.__struct_config__.tag} ({fields})")
            elif issubclass(value, enum.IntEnum):
                lines.append(f"{name} " + ", ".join(f"{member.name}={member.value}" for member in value))
    return lines


def schema_hash() -> int:
    """Hash of all message definitions, 64 bits, as HELLO carries it."""
    return int.from_bytes(hashlib.blake2b("\n".join(_definitions()).encode(), digest_size=8).digest(), "little")


def rust_source() -> str:
    """Text of the generated Rust file."""
    digits = f"{schema_hash():016x}"
    grouped = "_".join(digits[i : i + 4] for i in range(0, 16, 4))
    out = [
        "//! Columns of each kind of batch. Made by `python -m servekit.messages.columns --write`; not edited by hand.",
        "",
        "use super::column::{Carry, Column, ColumnKind, column};",
        "",
        "/// Hash of all message definitions, as HELLO carries it.",
        f"pub const SCHEMA: u64 = 0x{grouped};",
    ]
    for kind, batch in BATCHES.items():
        out += ["", *_rust_module(kind.name.lower(), batch)]
    return "\n".join(out) + "\n"


def _rust_module(name: str, batch: type[msgspec.Struct]) -> list[str]:
    out = [
        f"/// `{batch.__name__}`.",
        f"pub mod {name} {{",
        "    use super::{Carry, Column, ColumnKind, column};",
        "",
        "    /// First element of the body.",
        f'    pub const TAG: &str = "{batch.__name__}";',
        "",
        "    /// In the order of the body.",
        "    pub const COLUMNS: &[Column] = &[",
    ]
    for field, (kind, carry) in columns_of(batch).items():
        out.append(f'        column("{field}", ColumnKind::{kind.value}, Carry::{carry.value}),')
    out.append("    ];")
    for i, field in enumerate(batch.__struct_fields__):
        out += [f"    /// Place of `{field}` in `COLUMNS`.", f"    pub const {field.upper()}: usize = {i};"]
    return [*out, "}"]


def main() -> int:
    """Write the generated file, or check it: status 1 if it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of checking it")
    if parser.parse_args().write:
        GENERATED.write_text(rust_source())
        return 0
    if not GENERATED.is_file() or GENERATED.read_text() != rust_source():
        sys.stderr.write(f"{GENERATED} is stale: run python -m servekit.messages.columns --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
