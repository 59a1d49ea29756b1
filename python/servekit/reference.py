"""The hot paths in plain Python: what `servekit._core` does, said as briefly as possible.

The property tests hold the two against each other, and the benches measure against this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput, FinishReason, Tensor
from servekit.messages.columns import BATCHES, ColumnKind, columns_of
from servekit.messages.envelope import Kind, TextOptions, route_of

_SHORT = {ColumnKind.RAGGED_SHORT, ColumnKind.NESTED_SHORT, ColumnKind.DICT_OF_LISTS}
_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(batch) for kind, batch in BATCHES.items()
}
_ENCODER = msgspec.msgpack.Encoder()

Frame = tuple[int, int, bytes]
"""Worker, low bits of its epoch, body."""


# Splitting: one batch into one for each worker, row by row.


def _take_tensor(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows of a tensor."""
    stride = len(tensor.data) // max(tensor.shape[0], 1)
    data = b"".join(tensor.data[row * stride : (row + 1) * stride] for row in rows)
    return Tensor(tensor.dtype, [len(rows), *tensor.shape[1:]], data)


def _take_list(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """Those rows of a list; rows that it lacks are None, and left out at the end."""
    taken = [values[row] if row < len(values) else None for row in rows]
    last = max((i for i, row in enumerate(rows) if row < len(values)), default=-1)
    return taken[: last + 1]


def _take_column(kind: ColumnKind, values: Any, rows: Sequence[int]) -> Any:
    if values is None or kind is ColumnKind.SHARED:
        return values
    if isinstance(values, Tensor):
        return _take_tensor(values, rows)
    if kind is ColumnKind.DICT_OF_LISTS:
        return {key: _take_list(list_, rows) for key, list_ in values.items()}
    return _take_list(values, rows)


def take_rows(batch: msgspec.Struct, rows: Sequence[int]) -> msgspec.Struct:
    """A batch with the given rows, in the given order."""
    columns = columns_of(type(batch)).items()
    return type(batch)(**{name: _take_column(kind, getattr(batch, name), rows) for name, (kind, _) in columns})


def handle_output_by_index(batch: msgspec.Struct, index: int) -> msgspec.Struct:
    """The batch of one row."""
    return take_rows(batch, [index])


def extract_field_by_index(batch: msgspec.Struct, name: str, index: int) -> Any:
    """One column of one row, as a column of its own."""
    kind, _ = columns_of(type(batch))[name]
    return _take_column(kind, getattr(batch, name), [index])


def split_batch(kind: int, body: bytes) -> list[Frame]:
    """Split a batch by the workers that its request ids lead back to, in the order of their first rows.

    Raises:
        msgspec.DecodeError: the body is no batch of that kind.
    """
    batch: Any = _DECODERS[Kind(kind)].decode(body)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, rid in enumerate(batch.rids):
        groups.setdefault(route_of(rid), []).append(row)
    if len(groups) == 1:
        return [(*route, body) for route in groups]
    return [(*route, _ENCODER.encode(take_rows(batch, rows))) for route, rows in groups.items()]


# Merging: the inverse of splitting.


def _merge_lists(kind: ColumnKind, lists: Sequence[Sequence[Any]], sources: Sequence[tuple[int, int]]) -> list[Any]:
    missing = [row >= len(lists[part]) for part, row in sources]
    last = max((i for i, gone in enumerate(missing) if not gone), default=-1)
    if kind not in _SHORT and last >= 0 and any(missing):
        raise ValueError("rows are missing")
    return [None if gone else lists[part][row] for (part, row), gone in zip(sources, missing, strict=True)][: last + 1]


def _merge_column(kind: ColumnKind, parts: Sequence[Any], sources: Sequence[tuple[int, int]]) -> Any:
    first = parts[0]
    if any((part is None) != (first is None) for part in parts):
        raise ValueError("one part has the column, another lacks it")
    if first is None:
        return None
    if kind is ColumnKind.SHARED:
        if any(part != first for part in parts):
            raise ValueError("shared values differ")
        return first
    if isinstance(first, Tensor):
        rows = [_take_tensor(parts[part], [row]).data for part, row in sources]
        return Tensor(first.dtype, [len(sources), *first.shape[1:]], b"".join(rows))
    if kind is ColumnKind.DICT_OF_LISTS:
        keys = list(dict.fromkeys(key for part in parts for key in part))
        return {key: _merge_lists(kind, [part.get(key, []) for part in parts], sources) for key in keys}
    return _merge_lists(kind, parts, sources)


def merge(parts: Sequence[Any], positions: Sequence[Sequence[int]]) -> Any:
    """Merge batches of one kind; `positions[p][i]` is the place of row i of part p.

    Raises:
        ValueError: a column can't be merged.
    """
    placed = {place: (part, row) for part, places in enumerate(positions) for row, place in enumerate(places)}
    sources = [placed[place] for place in range(len(placed))]
    columns = columns_of(type(parts[0])).items()
    merged = {name: _merge_column(kind, [getattr(p, name) for p in parts], sources) for name, (kind, _) in columns}
    return type(parts[0])(**merged)


# Detokenizing: ids in, complete characters out, stop strings matched.


def find_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first stop string to be complete ends at or after `start`, and its length; the longest of several."""
    for end in range(start + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if stop and text.endswith(stop, 0, end)]
        if lengths:
            return end, max(lengths)
    return None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = max(map(len, stops), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


@dataclass
class _Request:
    """A request in the detokenizer; `text` is all text so far, `sent` how much of it is out."""

    options: TextOptions
    stream: bool
    ids: list[int] = field(default_factory=list)
    context: int = 0
    read: int = 0
    text: str = ""
    sent: int = 0
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Ids that are not sent, each with the length that the text must have for it."""


class Detokenizer:
    """Incremental detokenizer over any tokenizer's `decode(ids, skip_special_tokens)`.

    It decodes a window of ids and takes what goes beyond the text of the window's known part, once that ends in no
    replacement character. Columns of logprobs are not carried.
    """

    def __init__(self, decode: Callable[[list[int], bool], str]) -> None:
        self._decode = decode
        self._requests: dict[int, _Request | None] = {}

    def open(self, rid: int, options: TextOptions, stream: bool = True) -> None:
        """Begin a request."""
        self._requests.setdefault(rid, _Request(options, stream))

    def _push(self, request: _Request, whatever: bool = False) -> None:
        """Add to the text what the newest ids complete; what is incomplete too, if `whatever`."""
        skip = request.options.skip_special_tokens
        known = self._decode(request.ids[request.context : request.read], skip)
        text = self._decode(request.ids[request.context :], skip)
        if whatever or not text.endswith("\ufffd"):
            request.text += text[len(known) :]
            if len(text) > len(known):
                request.context, request.read = request.read, len(request.ids)

    def _take(self, request: _Request, ids: Sequence[int], reason: FinishReason | None) -> tuple[int, str | None]:
        """Take a row's ids; how many count, and the stop string that ended the text."""
        options = request.options
        for i, id_ in enumerate(ids):
            start = len(request.text)
            last = reason is not None and i == len(ids) - 1
            if not (last and reason and reason.type == "stop" and reason.matched == id_ and not options.no_stop_trim):
                request.ids.append(id_)
                self._push(request)
            if last:
                self._push(request, whatever=True)
            waits = request.read < len(request.ids)
            request.pending.append((id_, len(request.text) + waits))
            found = find_stop(request.text, start, options.stops)
            if found:
                end, length = found
                matched = request.text[end - length : end]
                keep = options.include_stop or options.no_stop_trim
                request.text = request.text[: end if keep else end - length]
                return i + 1, matched
        return len(ids), None

    def step(self, body: bytes) -> tuple[list[Frame], list[int]]:
        """Take a `BatchTokenIDOutput`; frames for workers, and requests that ended here by a stop string."""
        batch: BatchTokenIDOutput = _DECODERS[Kind.BATCH_TOKEN_ID].decode(body)
        n = len(batch.rids)
        reasons = batch.finished_reasons or [None] * n
        out: dict[tuple[int, int], BatchStrOutput] = {}
        sources: dict[tuple[int, int], list[int]] = {}
        aborts = []
        for row, (rid, reason) in enumerate(zip(batch.rids, reasons, strict=True)):
            request = self._requests.get(rid)
            if request is None:
                if reason is not None:
                    self._requests.pop(rid, None)
                continue
            raw = batch.decode_ids[row] if batch.decode_ids else b""
            ids = memoryview(raw).cast("I").tolist()
            taken, matched = self._take(request, ids, reason)
            end = FinishReason("stop", matched) if matched is not None else reason
            held = 0 if end else held_back(request.text, request.options.stops)
            piece = request.text[request.sent : len(request.text) - held]
            sent = request.sent + len(piece)
            ready = [id_ for id_, length in request.pending if end or length <= sent]
            if end or (request.stream and (piece or (ready and request.options.ids))):
                route = route_of(rid)
                rows = out.setdefault(
                    route,
                    BatchStrOutput([], None, [], completion_tokens=[], output_strs=[], output_ids=[]),
                )
                sources.setdefault(route, []).append(row)
                rows.rids.append(rid)
                _list(rows.finished_reasons).append(end)
                _list(rows.completion_tokens).append(_list(batch.completion_tokens)[row] - len(ids) + taken)
                _list(rows.output_strs).append(piece)
                packed = b"".join(id_.to_bytes(4, "little") for id_ in ready)
                _list(rows.output_ids).append(packed if request.options.ids else b"")
                del request.pending[: len(ready)]
                request.sent = sent
            if reason is not None:
                del self._requests[rid]
            elif end is not None:
                self._requests[rid] = None
                aborts.append(rid)
        frames = []
        for route, rows in out.items():
            taken_from = sources[route]
            for name in ("prompt_tokens", "cached_tokens", "retraction_counts", "dp_ranks"):
                setattr(rows, name, _take_column(ColumnKind.LIST, getattr(batch, name), taken_from))
            if not any(_list(rows.output_ids)):
                rows.output_ids = None
            frames.append((*route, _ENCODER.encode(rows)))
        return frames, aborts


def _list(column: list[Any] | None) -> list[Any]:
    """A column that is there."""
    return column if column is not None else []


# Dispatch: which data-parallel rank takes a request.


class LoadBalanceMethod(enum.Enum):
    """How a rank is chosen among the active ones; the values are the command line's."""

    AUTO = "auto"
    ROUND_ROBIN = "round_robin"
    FOLLOW_BOOTSTRAP_ROOM = "follow_bootstrap_room"
    TOTAL_REQUESTS = "total_requests"
    TOTAL_TOKENS = "total_tokens"
    CACHE_AWARE = "cache_aware"


class DispatchError(Exception):
    """No rank can take the request."""


@dataclass
class _Rank:
    active: bool = True
    last_dispatch: int = 0
    requests: int = 0
    tokens: int = 0
    pending: int = 0
    unseen: dict[int, int] = field(default_factory=dict)
    """Dispatch number to tokens of what the rank has not seen."""


CHUNK = 64
"""Tokens between one prefix hash and the next."""
MAX_HASHES = 512
HOLDERS = 8
"""Ranks that are remembered for one prefix; one that so many have counts as everybody's."""
TICK = 64
"""Searches between two ticks of the clock that ages are told in."""
CROWD = 3
"""Requests that a rank may have above the mean and an eighth of it, this one included, to be chosen for its cache."""

_MASK = (1 << 64) - 1


def prefix_hashes(input_ids: bytes, salt: bytes = b"") -> list[int]:
    """The hash of each prefix of whole 64-token chunks, shortest first; `input_ids` is little-endian u32."""

    def add(chain: int, word: int) -> int:
        product = ((chain ^ word) * 0xBB67AE8584CAA73B) & _MASK
        return product ^ (product >> 32)

    chain = add(0x6A09E667F3BCC909, len(salt))
    for at in range(0, len(salt), 8):
        chain = add(chain, int.from_bytes(salt[at : at + 8], "little"))
    hashes = []
    for start in range(0, len(input_ids) // (4 * CHUNK) * 4 * CHUNK, 4 * CHUNK)[:MAX_HASHES]:
        for at in range(start, start + CHUNK * 4, 8):
            chain = add(chain, int.from_bytes(input_ids[at : at + 8], "little"))
        chain = add(chain, 0)
        hashes.append(chain)
    return hashes


@dataclass
class _Holder:
    rank: int | None = None
    used: int = 0


class _Prefixes:
    """Which rank probably has which prefixes cached: those that were sent to it."""

    def __init__(self) -> None:
        self._holders: dict[int, list[_Holder]] = {}
        self._searches = 0

    def search(self, hashes: list[int]) -> tuple[int, dict[int, int]]:
        """Chunks of a prompt that count as everybody's, and rank to chunks of its longest prefix."""
        self._searches += 1
        common, depths = 0, {}
        for depth, hash_ in enumerate(hashes, 1):
            ranks = [holder.rank for holder in self._holders.get(hash_, ()) if holder.rank is not None]
            if not ranks:
                break
            if len(ranks) == HOLDERS:
                common = depth
            depths.update(dict.fromkeys(ranks, depth))
        return common, depths

    def learn(self, rank: int, hashes: list[int]) -> None:
        """A rank gets a prompt, and will have its prefixes."""
        now = self._searches // TICK
        for hash_ in hashes:
            holders = self._holders.setdefault(hash_, [])
            place = next((holder for holder in holders if holder.rank == rank), None)
            if place is None:
                place = next((holder for holder in holders if holder.rank is None), None)
            if place is None and len(holders) < HOLDERS:
                place = _Holder()
                holders.append(place)
            place = place or min(holders, key=lambda holder: holder.used)
            place.rank, place.used = rank, now

    def forget(self, rank: int) -> None:
        """A rank has nothing any more."""
        for holders in self._holders.values():
            for holder in holders:
                if holder.rank == rank:
                    holder.rank = None

    def clear(self) -> None:
        """No rank has anything any more."""
        self._holders.clear()


class DPBudget:
    """The load of each rank: what it last reported, plus what was dispatched and not yet seen by it."""

    def __init__(self, dp_size: int) -> None:
        self._ranks = [_Rank() for _ in range(dp_size)]
        self._next = 0
        self._dispatches = 0
        self._prefixes = _Prefixes()

    @property
    def total_requests(self) -> list[int]:
        """Requests of each rank."""
        return [rank.requests + len(rank.unseen) for rank in self._ranks]

    @property
    def total_tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [rank.tokens + sum(rank.unseen.values()) for rank in self._ranks]

    def dispatch(
        self, method: LoadBalanceMethod, tokens: int, room: int | None = None, prefixes: list[int] | None = None
    ) -> tuple[int, int]:
        """Choose a rank for a request of `tokens` prompt tokens: rank and number of the dispatch.

        Raises:
            DispatchError: no rank can take it.
        """
        n = len(self._ranks)
        if method == LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM:
            if room is None:
                raise DispatchError("no room")
            return room % n, self.credit(room % n, tokens, prefixes)
        turns = [(self._next + i) % n for i in range(n)]
        candidates = [rank for rank in turns if self._ranks[rank].active]
        if not candidates:
            raise DispatchError("no rank is active")
        load = {
            LoadBalanceMethod.TOTAL_REQUESTS: self.total_requests,
            LoadBalanceMethod.TOTAL_TOKENS: self.total_tokens,
            LoadBalanceMethod.CACHE_AWARE: self._work(),
        }.get(method, [0] * n)
        rank = min(candidates, key=load.__getitem__)
        if method == LoadBalanceMethod.CACHE_AWARE and prefixes:
            rank, tokens = self._cached(candidates, rank, tokens, prefixes)
            self._prefixes.learn(rank, prefixes)
        self._next = rank + 1
        return rank, self._book(rank, tokens)

    def _cached(self, candidates: list[int], rank: int, tokens: int, prefixes: list[int]) -> tuple[int, int]:
        """The rank with the least to compute once what is not cached there is added, and how much that is."""
        common, depths = self._prefixes.search(prefixes)
        if not depths:
            return rank, tokens
        requests, queued = self.total_requests, self._work()
        mean = sum(requests[each] for each in candidates) // len(candidates)
        crowded = {each for each in candidates if requests[each] > mean + mean // 8 + CROWD - 1}
        if rank in crowded:
            rank = min(candidates, key=requests.__getitem__)
        work = {each: max(tokens - CHUNK * depths.get(each, common), 1) for each in candidates}
        usable = [rank, *(each for each in depths if each in work and each not in crowded)]
        rank = min(usable, key=lambda each: (queued[each] + work[each], work[each]))
        return rank, work[rank]

    def _work(self) -> list[int]:
        """What each rank has to compute, in tokens: what is pending or unseen, and one chunk for each request."""
        return [
            rank.pending + sum(rank.unseen.values()) + CHUNK * (rank.requests + len(rank.unseen))
            for rank in self._ranks
        ]

    def credit(self, rank: int, tokens: int, prefixes: list[int] | None = None) -> int:
        """Book a request at a rank that somebody named: number of the dispatch.

        Raises:
            DispatchError: there is no such rank, or it is not active.
        """
        if not 0 <= rank < len(self._ranks) or not self._ranks[rank].active:
            raise DispatchError(f"rank {rank}")
        self._prefixes.learn(rank, prefixes or [])
        return self._book(rank, tokens)

    def _book(self, rank: int, tokens: int) -> int:
        self._dispatches += 1
        self._ranks[rank].unseen[self._dispatches] = tokens
        return self._dispatches

    def update(self, rank: int, last_dispatch: int, requests: int, tokens: int, pending: int | None = None) -> bool:
        """Take a rank's report; False if it is older than a known one, or speaks of dispatches that never were."""
        known = self._ranks[rank]
        if not known.last_dispatch <= last_dispatch <= self._dispatches:
            return False
        known.last_dispatch, known.requests, known.tokens = last_dispatch, requests, tokens
        known.pending = tokens if pending is None else pending
        known.unseen = {number: size for number, size in known.unseen.items() if number > last_dispatch}
        return True

    def release(self, rank: int, dispatch: int) -> bool:
        """Take back a dispatch that no report will show; False if one has."""
        return self._ranks[rank].unseen.pop(dispatch, None) is not None

    def set_active(self, rank: int, active: bool) -> None:
        """Let a rank take requests, or not."""
        self._ranks[rank].active = active

    def reset(self, rank: int) -> None:
        """Forget all that a rank was charged with."""
        self._ranks[rank] = _Rank(active=self._ranks[rank].active)
        self._prefixes.forget(rank)

    def forget_prefixes(self) -> None:
        """Forget what every rank had cached."""
        self._prefixes.clear()
