"""What a runner gets of requests' wishes: sampling and logprobs, as columns over the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servekit.engine.plan import Biases, Ints, LogprobColumns, Penalties, SamplingColumns
from servekit.scheduler.request import Request
from servekit.scheduler.table import SlotTable


def sampling_columns(table: SlotTable, slots: Ints) -> SamplingColumns:
    """How the next tokens of some slots are drawn; a column for which no row asks is None."""
    t = table
    forbidden: list[Ints | None] | None = None
    early = t.known[slots] < t.min_tokens[slots]
    if early.any():
        forbidden = [t.owner(s).barred if e else None for s, e in zip(slots.tolist(), early, strict=True)]
    return SamplingColumns(
        t.temperature[slots],
        t.top_p[slots],
        t.top_k[slots],
        t.min_p[slots],
        t.seed[slots],
        t.known[slots],
        forbidden,
        _penalties(t, slots),
        _biases(t, slots),
    )


def logprob_columns(table: SlotTable, slots: Ints) -> LogprobColumns | None:
    """Which of the slots that get a token want its logprobs."""
    at = np.flatnonzero(table.tells[slots])
    if not len(at):
        return None
    states = [state for slot in slots[at].tolist() if (state := table.owner(slot).logprobs) is not None]
    ids = [state.ids for state in states]
    top = np.array([state.top for state in states], np.int64)
    return LogprobColumns(at, top, ids if any(i is not None for i in ids) else None)


def prompt_logprob_columns(
    pieces: Sequence[tuple[Request, Ints, int, int]],
) -> tuple[LogprobColumns | None, list[tuple[int, range]]]:
    """Which tokens of some pieces of sequences tell of prompt tokens whose logprobs are wanted.

    Args:
        pieces: for each piece its request, the request's known tokens, the piece's first token in the sequence, and
            one after its last; the pieces lie side by side in the step.

    Returns:
        The columns, `at` relative to the first piece; and for each piece that has any, its index and its places.
    """
    at, top, targets, ids = [], [], [], list[Ints | None]()
    places: list[tuple[int, range]] = []
    offset = 0
    for piece, (request, tokens, begin, end) in enumerate(pieces):
        state = request.logprobs
        wanted = range(0) if state is None else state.wanted(begin, end)
        if state is not None and len(wanted):
            places.append((piece, range(len(ids), len(ids) + len(wanted))))
            at.append(np.arange(wanted.start, wanted.stop) - begin + offset)
            targets.append(tokens[wanted.start + 1 : wanted.stop + 1])
            top.append(np.full(len(wanted), state.top))
            ids += [state.ids] * len(wanted)
        offset += end - begin
    if not places:
        return None, places
    given = ids if any(i is not None for i in ids) else None
    return LogprobColumns(
        np.concatenate(at), np.concatenate(top), given, np.concatenate(targets).astype(np.int64)
    ), places


def _penalties(table: SlotTable, slots: Ints) -> Penalties | None:
    at = np.flatnonzero(table.penalized[slots])
    if not len(at):
        return None
    seen = [s for slot in slots[at].tolist() if (s := table.owner(slot).seen) is not None]
    sizes = [len(s.ids) for s in seen]
    each = np.array(
        [(s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty) for s in seen]
    )
    repetition, presence, frequency = np.repeat(each.astype(np.float32), sizes, 0).T
    return Penalties(
        np.repeat(at, sizes),
        np.concatenate([s.ids for s in seen]),
        np.concatenate([s.counts for s in seen]),
        repetition,
        presence,
        frequency,
    )


def _biases(table: SlotTable, slots: Ints) -> Biases | None:
    at = np.flatnonzero(table.biased[slots])
    if not len(at):
        return None
    biases = [b for slot in slots[at].tolist() if (b := table.owner(slot).biases) is not None]
    return Biases(
        np.repeat(at, [len(ids) for ids, _ in biases]),
        np.concatenate([ids for ids, _ in biases]),
        np.concatenate([values for _, values in biases]),
    )
