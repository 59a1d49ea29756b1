"""The sampler: the right candidates, the right frequencies, and draws that depend on (seed, position) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from servekit.engine.plan import BAD_LOGITS, Biases, Penalties, SamplingColumns
from servekit.engine.randomness import draw_keys
from servekit.engine.sampler import Sampler

CPU = torch.device("cpu")


def columns(rows: int, **given: object) -> SamplingColumns:
    """Columns where every row is alike, or lists as given."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 1, "position": 0}
    kinds = {"top_k": np.int64, "seed": np.uint64, "position": np.int64}
    whole = {name: given.pop(name, None) for name in ("forbidden", "penalties", "biases", "allowed")}
    made = {
        k: np.broadcast_to(np.asarray(v, kinds.get(k, np.float32)), rows).copy()
        for k, v in {**neutral, **given}.items()
    }
    return SamplingColumns(**made, **whole)


def draws(logits: list[float], n: int, **given: object) -> list[int]:
    """n draws of one row's logits at n positions."""
    table = torch.tensor(logits).expand(n, -1).clone()
    return Sampler(len(logits), CPU).sample(table, columns(n, position=np.arange(n), **given)).tolist()


def frequencies(tokens: list[int], size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    logits = torch.randn(5, 300)
    expected = logits.argmax(-1).tolist()
    assert Sampler(300, CPU).sample(logits.clone(), columns(5, temperature=0.0, seed=9)).tolist() == expected
    assert Sampler(300, CPU).sample(logits.clone(), columns(5, temperature=1e-7)).tolist() == expected


def test_frequencies_are_the_softmax_of_the_scaled_logits() -> None:
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits) / temperature, -1).numpy()
        found = frequencies(draws(logits, 40_000, temperature=temperature), 6)
        # Five standard deviations.
        assert (abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 40_000) + 1e-9).all()


def test_frequencies_over_seeds_and_over_a_real_vocabulary() -> None:
    logits = torch.full((2000, 49152), -20.0)
    logits[:, [7, 4000, 49151]] = torch.tensor([1.0, 0.0, 0.0])
    tokens = Sampler(49152, CPU).sample(logits, columns(2000, seed=np.arange(2000)))
    share = (tokens == 7).double().mean().item()
    assert share == pytest.approx(math.e / (math.e + 2), abs=0.06)
    assert set(tokens.tolist()) <= {7, 4000, 49151}


def test_a_draw_depends_on_seed_and_position_and_not_on_its_batch() -> None:
    logits = torch.randn(9, 1000)
    asks = {
        "temperature": [0.7, 0, 1, 1.3, 1, 0, 0.9, 1, 2],
        "top_p": [0.9, 1, 1, 0.5, 1, 1, 0.99, 1, 1],
        "top_k": [0, 0, 5, 50, 0, 0, 0, 2, 0],
        "min_p": [0, 0, 0, 0.1, 0, 0, 0.01, 0, 0.2],
        "seed": np.arange(9) * 2**60,
        "position": np.arange(9) + 40,
    }
    sampler = Sampler(1000, CPU)
    together = sampler.sample(logits.clone(), columns(9, **asks)).tolist()
    for row in range(9):
        alone = columns(1, **{name: [values[row]] for name, values in asks.items()})
        assert sampler.sample(logits[row : row + 1].clone(), alone).tolist() == [together[row]]
    flat = torch.zeros(64, 1000)
    by_position = sampler.sample(flat.clone(), columns(64, position=np.arange(64))).tolist()
    by_seed = sampler.sample(flat.clone(), columns(64, seed=np.arange(64))).tolist()
    assert len(set(by_position)) > 50
    assert len(set(by_seed)) > 50


def test_the_draws_stay_what_they_are() -> None:
    """A resumed stream must go on as it began, also in another build."""
    assert draw_keys(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 9])).tolist() == KEYS
    assert draws([0.0] * 50, 8, seed=42) == DRAWS


KEYS = [[1293516399, 1272474839, 929851621], [-1492722385, -1320936155, -893578404]]
DRAWS = [23, 8, 40, 16, 33, 20, 3, 48]


def test_top_k_keeps_k_and_ties() -> None:
    assert set(draws([3.0, 2.9, 2.8, 2.7, 2.6], 400, top_k=2)) == {0, 1}
    assert set(draws([3.0, 2.0, 2.0, -9.0, -9.0], 400, top_k=2)) == {0, 1, 2}
    assert set(draws([3.0, 2.9, 2.8], 400, top_k=99)) == {0, 1, 2}
    assert set(draws([1.0, 3.0, 2.9], 50, top_k=1)) == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert set(draws(logits, 600, top_p=0.4)) == {0}
    assert set(draws(logits, 600, top_p=0.6)) == {0, 1}
    assert set(draws(logits, 600, top_p=0.9)) == {0, 1, 2}
    assert set(draws(logits, 600, top_p=1e-6)) == {0}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    # Of the first two, the first holds 0.571.
    assert set(draws(logits, 600, top_k=2, top_p=0.5)) == {0}
    assert set(draws(logits, 600, top_k=2, top_p=0.6)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert set(draws(logits, 600, min_p=0.25)) == {0, 1, 2}
    assert set(draws(logits, 600, min_p=0.5)) == {0, 1}
    assert set(draws(logits, 600, min_p=1.0)) == {0}


def test_a_nucleus_larger_than_the_first_sort() -> None:
    logits = torch.arange(6000) * -1e-4
    probabilities = logits.double().softmax(-1)
    inside = int((probabilities.cumsum(-1) - probabilities < 0.7).sum())
    assert inside > 2000
    for asks in ({"top_p": 0.7}, {"top_k": inside}):
        columns_ = columns(3000, position=np.arange(3000), **asks)
        tokens = Sampler(6000, CPU).sample(logits.expand(3000, -1).clone(), columns_)
        assert inside * 0.98 < tokens.max() < inside


def test_forbidden_ids_are_never_drawn() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]]).repeat(2, 1)
    barred = [np.array([0, 1]), None]
    assert Sampler(3, CPU).sample(logits.clone(), columns(2, temperature=0.0, forbidden=barred)).tolist() == [2, 0]
    assert Sampler(3, CPU).sample(logits.clone(), columns(2, forbidden=barred)).tolist()[0] == 2


def penalties(rows: list[int], ids: list[int], counts: list[int], *each: list[float]) -> Penalties:
    return Penalties(*(np.array(x, np.int64) for x in (rows, ids, counts)), *(np.array(x, np.float32) for x in each))


def test_penalties_change_only_what_was_seen_in_the_rows_that_ask() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.5], [2.0, 1.9, -1.0, 0.5], [2.0, 1.9, -1.0, 0.5]])
    # Row 0: token 0 was in the prompt. Row 2: token 0 was drawn twice, token 1 once.
    p = penalties([0, 2, 2], [0, 0, 1], [0, 2, 1], [1.5, 1, 1], [9, 0.5, 0.5], [9, 0.25, 0.25])
    greedy = {"temperature": 0.0, "penalties": p}
    assert Sampler(4, CPU).sample(logits.clone(), columns(3, **greedy)).tolist() == [1, 0, 1]
    drawn = Sampler(4, CPU)
    seen = logits.clone()
    drawn.sample(seen, columns(3, **greedy))
    expected = [[2 / 1.5, 1.9, -1.0, 0.5], [2.0, 1.9, -1.0, 0.5], [2 - 0.5 - 0.5, 1.9 - 0.5 - 0.25, -1.0, 0.5]]
    assert torch.allclose(seen, torch.tensor(expected))


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    logits = torch.tensor([[-1.0, -1.2, -4.0]])
    p = penalties([0], [0], [1], [1.3], [0], [0])
    assert Sampler(3, CPU).sample(logits, columns(1, temperature=0.0, penalties=p)).tolist() == [1]
    assert logits[0, 0].item() == pytest.approx(-1.3)


def test_biases_come_after_penalties_and_before_what_is_forbidden() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(2, 1)
    b = Biases(np.array([0, 1, 1]), np.array([2, 2, 0]), np.array([100, 100, -3], np.float32))
    p = penalties([0], [2], [1], [2], [0], [0])
    barred = [None, np.array([2])]
    asks = columns(2, temperature=0.0, biases=b, penalties=p, forbidden=barred)
    assert Sampler(3, CPU).sample(logits, asks).tolist() == [2, 1]
    assert logits[0, 2].item() == 100


def test_a_mask_allows_some_ids_in_its_row() -> None:
    logits = torch.randn(3, 70)
    words = np.zeros(3, np.uint32)
    for token in (1, 33, 69):
        words[token // 32] |= np.uint32(1 << (token % 32))
    asks = columns(3, temperature=[0, 0, 1], allowed=[None, words, words], seed=np.arange(3))
    tokens = Sampler(70, CPU).sample(logits.clone(), asks).tolist()
    assert tokens[0] == logits[0].argmax().item()
    assert tokens[1] == max((1, 33, 69), key=lambda i: logits[1, i].item())
    assert tokens[2] in (1, 33, 69)
    nothing = columns(1, allowed=[np.zeros(3, np.uint32)])
    assert Sampler(70, CPU).sample(logits[:1].clone(), nothing).tolist() == [BAD_LOGITS]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_told_and_harms_nobody(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 40)
    logits[:, 3] = 50
    logits[1, 7] = bad
    tokens = Sampler(40, CPU).sample(logits, columns(3, temperature=temperature, top_p=0.9))
    assert tokens.tolist() == [3, BAD_LOGITS, 3]
