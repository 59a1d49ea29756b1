"""What `--show-ranks` prints: the table of ranks of all nodes, and who is in which group."""

from __future__ import annotations

import json

from servekit.runtime.ranks import KINDS, Rank, groups

FORMS = ("table", "json")
COLUMNS = Rank._fields[: Rank._fields.index("world")]
"""What is shown of a rank; where it stands in the list says the rest."""


def show_ranks(ranks: list[Rank], form: str) -> str:
    """The table as text for a person, or as a JSON list of objects."""
    if form == "json":
        return json.dumps([{name: getattr(rank, name) for name in COLUMNS} for rank in ranks], indent=1)
    head = ("rank", *COLUMNS[:-1], "leader of")
    rows = [(rank.world, *rank[: len(COLUMNS) - 1], f"dp {rank.dp}" if rank.leader else "") for rank in ranks]
    lines = [head, *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    # Replicas are alike but for where they are.
    one = [rank for rank in ranks if rank.replica == 0]
    members = [f"{kind:8} {_members(one, kind)}" for kind in KINDS]
    return "\n".join([*table, "", "Groups, as ranks of a replica:", *members])


def _members(ranks: list[Rank], kind: str) -> str:
    return " | ".join(" ".join(str(rank.world) for rank in group) for group in groups(ranks, kind))
