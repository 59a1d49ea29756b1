"""Collects the licence texts of the Rust crates that end up in `servekit._core`.

`python tests/packaging/linked_crates.py` writes licenses/rust-crates.txt anew, as a change of Cargo.lock asks for.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
COLLECTED = REPOSITORY / "licenses" / "rust-crates.txt"
# Of a crate under several licences, the text that comes first here is taken.
_FILES = ("LICENSE-MIT*", "LICENSE-APACHE*", "LICEN[SC]E*", "COPYING*", "license*")


class Crate(NamedTuple):
    name: str
    version: str
    license: str
    folder: Path


def linked_crates() -> list[Crate]:
    """The crates of other people that are linked into the extension module, sorted by name.

    Raises:
        subprocess.CalledProcessError: cargo can't read the workspace.
    """
    tree = _cargo("tree", "--edges", "normal,no-proc-macro", "--package", "servekit-py", "--prefix", "none")
    linked = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    metadata = json.loads(_cargo("metadata", "--format-version", "1"))
    return sorted(
        Crate(
            package["name"], package["version"], package["license"] or "unknown", Path(package["manifest_path"]).parent
        )
        for package in metadata["packages"]
        if (package["name"], f"v{package['version']}") in linked and package["source"] is not None
    )


def text_of(crate: Crate) -> str:
    """The crate's licence text. A crate that ships none is covered by its declared licence alone."""
    for pattern in _FILES:
        for file in sorted(crate.folder.glob(pattern)):
            if file.is_file():
                lines = file.read_text(encoding="utf-8").splitlines()
                return "\n".join(line.rstrip() for line in lines).strip()
    return "(The crate ships no licence text; its manifest names the licence above.)"


def collect() -> str:
    """The content of licenses/rust-crates.txt: each text once, headed by the crates that it covers."""
    covered: dict[str, list[Crate]] = {}
    for crate in linked_crates():
        covered.setdefault(text_of(crate), []).append(crate)
    parts = ["Licences of the Rust crates that are linked into servekit._core."]
    for text, crates in covered.items():
        head = "\n".join(f"{crate.name} {crate.version} ({crate.license})" for crate in crates)
        parts.append(f"{'=' * 80}\n{head}\n{'-' * 80}\n{text}")
    return "\n\n".join(parts) + "\n"


def _cargo(*arguments: str) -> str:
    return subprocess.run(
        ["cargo", *arguments, "--locked"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    ).stdout


if __name__ == "__main__":
    COLLECTED.write_text(collect(), encoding="utf-8")
