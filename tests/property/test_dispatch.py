"""`_core.DPBudget` does what the plain one does, whatever happens; and what it does is fair."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from servekit import _core, reference
from servekit.messages.envelope import Envelope, Kind, Load, encode_envelope

NUMBERS = st.integers(0, 2**32)
METHODS = [method.name for method in reference.LoadBalanceMethod]
BALANCED = ["AUTO", "ROUND_ROBIN", "TOTAL_REQUESTS", "TOTAL_TOKENS", "CACHE_AWARE"]
# Names of prompts' prefixes: a few families, of which each member has a beginning.
PREFIXES = st.builds(
    lambda family, length: [(2 * family + 1) << 32 | i for i in range(length)], st.integers(1, 4), st.integers(0, 6)
)


def packed(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def ids_of(tokens: Iterable[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def method_of(module: object, name: str) -> object:
    return getattr(module.LoadBalanceMethod, name)  # type: ignore[attr-defined]


class SameAsReference(RuleBasedStateMachine):
    """Both budgets, told the same."""

    @initialize(ranks=st.integers(1, 9))
    def start(self, ranks: int) -> None:
        self.ranks = ranks
        self.fast, self.plain = _core.DPBudget(ranks), reference.DPBudget(ranks)
        self.live: list[tuple[int, int]] = []
        self.last = 0

    def both(self, name: str, *arguments: object) -> object:
        try:
            expected = getattr(self.plain, name)(*arguments)
        except reference.DispatchError:
            with pytest.raises(_core.DispatchError):
                getattr(self.fast, name)(*arguments)
            return None
        assert getattr(self.fast, name)(*arguments) == expected
        return expected

    @rule(
        name=st.sampled_from(METHODS),
        tokens=NUMBERS | st.integers(0, 500),
        room=st.none() | st.integers(0, 2**64 - 1),
        prefixes=PREFIXES,
    )
    def dispatch(self, name: str, tokens: int, room: int | None, prefixes: list[int]) -> None:
        try:
            expected = self.plain.dispatch(method_of(reference, name), tokens, room, prefixes)
        except reference.DispatchError:
            with pytest.raises(_core.DispatchError):
                self.fast.dispatch(method_of(_core, name), tokens, room, packed(prefixes))
        else:
            assert self.fast.dispatch(method_of(_core, name), tokens, room, packed(prefixes)) == expected
            self.live.append(expected)
            self.last = expected[1]

    @rule(rank=st.integers(-2, 10), tokens=NUMBERS, prefixes=PREFIXES)
    def credit(self, rank: int, tokens: int, prefixes: list[int]) -> None:
        try:
            number = self.plain.credit(rank, tokens, prefixes)
        except reference.DispatchError:
            with pytest.raises(_core.DispatchError):
                self.fast.credit(rank, tokens, packed(prefixes))
        else:
            assert self.fast.credit(rank, tokens, packed(prefixes)) == number
            self.live.append((rank, number))
            self.last = number

    @rule(data=st.data(), requests=NUMBERS | st.integers(0, 5), tokens=NUMBERS, pending=st.none() | st.integers(0, 500))
    def update(self, data: st.DataObject, requests: int, tokens: int, pending: int | None) -> None:
        rank, seen = data.draw(st.integers(0, self.ranks - 1)), data.draw(st.integers(0, self.last + 2))
        expected = self.plain.update(rank, seen, requests, tokens, pending)
        assert self.fast.update(_core.RankReport(rank, seen, requests, tokens, pending)) == expected

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            self.both("release", *data.draw(st.sampled_from(self.live)))

    @rule(data=st.data(), active=st.booleans())
    def set_active(self, data: st.DataObject, active: bool) -> None:
        self.both("set_active", data.draw(st.integers(0, self.ranks - 1)), active)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        self.both("reset", data.draw(st.integers(0, self.ranks - 1)))

    @rule()
    def forget_prefixes(self) -> None:
        self.both("forget_prefixes")

    @invariant()
    def same(self) -> None:
        if hasattr(self, "fast"):
            assert self.fast.total_requests == self.plain.total_requests
            assert self.fast.total_tokens == self.plain.total_tokens


TestSameAsReference = SameAsReference.TestCase
TestSameAsReference.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_burst_of_equal_requests_spreads(name: str, ranks: int) -> None:
    budget = _core.DPBudget(ranks)
    counts = [0] * ranks
    for _ in range(1000):
        counts[budget.dispatch(method_of(_core, name), 10)[0]] += 1
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_a_burst_of_one_prompt_spreads_though_it_is_cached(ranks: int) -> None:
    budget = _core.DPBudget(ranks)
    ids = ids_of(range(2048))
    counts = [0] * ranks
    for _ in range(1000):
        counts[budget.dispatch(_core.LoadBalanceMethod.CACHE_AWARE, 2048, None, _core.prefix_hashes(ids))[0]] += 1
    assert max(counts) <= 1.25 * 1000 / ranks, counts


def test_shared_prefixes_land_together_unless_the_salt_differs() -> None:
    budget = _core.DPBudget(4)
    homes: dict[tuple[int, bytes], set[int]] = {}
    for turn in range(40):
        for family in range(4):
            for salt in (b"", b"secret"):
                ids = ids_of([*range(family * 1000, family * 1000 + 512), *range(10_000 + turn, 10_100 + turn)])
                hashes = _core.prefix_hashes(ids, salt)
                rank, number = budget.dispatch(_core.LoadBalanceMethod.CACHE_AWARE, 612, None, hashes)
                homes.setdefault((family, salt), set()).add(rank)
                budget.update(_core.RankReport(rank, number, 0, 0))
    assert all(len(ranks) == 1 for ranks in homes.values()), homes
    assert {rank for ranks in homes.values() for rank in ranks} == {0, 1, 2, 3}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.binary(max_size=20), st.integers(0, 300))
def test_prefix_hashes_are_those_of_the_reference(tokens: list[int], salt: bytes, cut: int) -> None:
    ids = ids_of(tokens)
    hashes = reference.prefix_hashes(ids, salt)
    assert _core.prefix_hashes(ids, salt) == packed(hashes)
    assert len(hashes) == len(tokens) // 64
    assert reference.prefix_hashes(ids[: 4 * cut], salt) == hashes[: min(cut, len(tokens)) // 64]


def test_prefix_hashes_are_bounded_and_of_whole_ids() -> None:
    assert len(_core.prefix_hashes(bytes(4 * 64 * 600))) == 8 * 512
    with pytest.raises(_core.SettingError):
        _core.prefix_hashes(b"123")
    with pytest.raises(_core.MalformedError):
        _core.DPBudget(2).dispatch(_core.LoadBalanceMethod.CACHE_AWARE, 1, None, b"123")


@pytest.mark.parametrize("name", BALANCED)
def test_dead_ranks_get_nothing_and_returned_ones_their_share(name: str) -> None:
    budget = _core.DPBudget(4)
    budget.set_active(2, False)
    assert budget.active == [True, True, False, True]
    choices = [budget.dispatch(method_of(_core, name), 10) for _ in range(300)]
    assert all(rank != 2 for rank, _ in choices)
    for rank, number in choices:
        budget.release(rank, number)
    budget.set_active(2, True)
    share = sum(budget.dispatch(method_of(_core, name), 10)[0] == 2 for _ in range(400))
    assert share == 100


def test_a_request_of_many_tokens_weighs_what_it_costs() -> None:
    budget = _core.DPBudget(2)
    heavy, _ = budget.dispatch(_core.LoadBalanceMethod.TOTAL_TOKENS, 10_000)
    others = [budget.dispatch(_core.LoadBalanceMethod.TOTAL_TOKENS, 10)[0] for _ in range(100)]
    assert heavy not in others
    assert sorted(budget.total_tokens) == [1000, 10_000]


def test_names_are_those_of_the_command_line() -> None:
    for method in reference.LoadBalanceMethod:
        fast = _core.LoadBalanceMethod.from_name(method.value)
        assert fast == method_of(_core, method.name) and fast.name == method.value
    with pytest.raises(_core.SettingError):
        _core.LoadBalanceMethod.from_name("fastest")


def test_sizes_are_checked() -> None:
    for size in (0, 5000):
        with pytest.raises(_core.SettingError):
            _core.DPBudget(size)
    budget = _core.DPBudget(2)
    with pytest.raises(_core.DispatchError):
        budget.dispatch(_core.LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM, 1)
    assert not budget.update(_core.RankReport(7, 0, 0, 0)) and not budget.release(7, 1)


def test_a_report_is_read_from_a_batch() -> None:
    load = Load(running=2, waiting=3, held_tokens=40, pending_tokens=5)
    frame = encode_envelope(Envelope(Kind.BATCH_TOKEN_ID, rank=1, last_dispatch=9, load=load))
    assert _core.RankReport.from_envelope(frame) == _core.RankReport(
        1, last_dispatch=9, requests=5, tokens=45, pending=5
    )
    assert _core.RankReport.from_envelope(encode_envelope(Envelope(Kind.BATCH_TOKEN_ID, rank=1))) is None
    for wrong in (b"", encode_envelope(Envelope(Kind.ABORT)), encode_envelope(Envelope(Kind.BATCH_STR, load=load))):
        with pytest.raises(_core.MalformedError):
            _core.RankReport.from_envelope(wrong)
