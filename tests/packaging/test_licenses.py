"""The collected licences are those of the crates that are linked now."""

from __future__ import annotations

from tests.packaging.linked_crates import COLLECTED, collect, linked_crates


def test_collected_licences_are_up_to_date() -> None:
    assert COLLECTED.read_text(encoding="utf-8") == collect(), "run python tests/packaging/linked_crates.py"


def test_every_linked_crate_allows_it() -> None:
    permissive = {
        "MIT",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "Unlicense",
        "Zlib",
        "BSL-1.0",
        "Unicode-3.0",
    }
    crates = linked_crates()
    assert "tokenizers" in {crate.name for crate in crates}
    for crate in crates:
        words = crate.license.replace("/", " ").replace("(", " ").replace(")", " ").split()
        assert set(words) - {"OR", "AND"} <= permissive, crate
