"""How a model is cut over ranks: what holds for all sizes, and what is said of those that do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit.config.server_args import ConfigError
from servekit.models.split import Cut, ModelSizes, Part, check_model, stage_layers
from servekit.runtime.ranks import Sizes, groups, make_ranks

quickly = settings(max_examples=60, deadline=None)
small = st.integers(1, 8)
DEMO = ModelSizes(layers=30, heads=9, kv_heads=3, vocabulary=49152, dense_width=1536)
MIXTURE = ModelSizes(layers=4, heads=8, kv_heads=4, vocabulary=1000, experts=6, expert_width=24)


@quickly
@given(st.integers(1, 100), small)
def test_shares_are_neighbours_and_together_everything(total, of):
    spans = [Part(i, of).span(total) for i in range(of)]
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(total))
    assert max(span.count for span in spans) - min(span.count for span in spans) <= 1


@quickly
@given(small, small, small)
def test_query_heads_stay_with_the_kv_head_that_they_read(group, kv_heads, times):
    # Either ranks hold several KV heads, or several ranks hold one.
    for ranks in {n for n in range(1, kv_heads * group + 1) if kv_heads % n == 0} | {kv_heads * times}:
        heads = kv_heads * group
        if heads % ranks:
            continue
        for i in range(ranks):
            mine, kv = Part(i, ranks).span(heads), Part(i, ranks).shared(kv_heads)
            # A rank's heads are dealt evenly to its KV heads, as attention deals them.
            each = mine.count // kv.count
            found = [kv.start + at // each for at in range(mine.count)]
            assert found == [head // group for head in range(mine.start, mine.stop)]


@quickly
@given(st.integers(1, 60), small)
def test_stages_have_all_layers_in_order_the_larger_first(layers, stages):
    if layers < stages:
        return
    found = stage_layers(layers, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    counts = [len(stage) for stage in found]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_a_partition_says_it_differently():
    assert stage_layers(5, 2, (1, 4)) == [range(1), range(1, 5)]
    for partition in ((2, 2), (5,), (5, 0)):
        with pytest.raises(ConfigError, match=r"--pp-layer-partition [\d,]+ must be 2 numbers.* model's 5 layers"):
            check_model(Sizes(pipeline=2), ModelSizes(5, 1, 1, 10), partition)


@quickly
@given(st.sampled_from([(8, 1, 1), (8, 2, 1), (8, 1, 2), (4, 4, 1), (8, 2, 4)]))
def test_every_rank_of_a_mixture_has_its_experts_and_every_expert_all_its_ranks(sizes):
    tensor, ep, dp = sizes
    s = Sizes(tensor=tensor, moe_ep=ep, moe_dp=dp)
    for group in groups(make_ranks(s), "moe_dp"):
        # Copies are alike but for the tokens that they compute.
        cuts = [Cut.of(rank, s, 4) for rank in group]
        assert len({(cut.experts, cut.within) for cut in cuts}) == 1
        assert [cut.tokens.index for cut in cuts] == list(range(dp))


@pytest.mark.parametrize(
    ("sizes", "model", "said"),
    [
        (
            Sizes(tensor=2),
            DEMO,
            "--tensor-parallel-size 2 does not fit the model, whose 9 attention heads are split 2 ways:"
            " it can be 1 or 3",
        ),
        (
            Sizes(tensor=9),
            DEMO,
            "--tensor-parallel-size 9 does not fit the model, whose dense width of 1536 is split 9 ways:"
            " it can be 1 or 3",
        ),
        (
            Sizes(pipeline=31),
            DEMO,
            "--pipeline-parallel-size 31 does not fit the model, which has 30 layers: it can be "
            + " or ".join(map(str, range(1, 31))),
        ),
        (
            Sizes(tensor=4, moe_ep=4),
            MIXTURE,
            "--expert-parallel-size 4 does not fit the model, which has 6 experts: it can be 1 or 2",
        ),
        (
            Sizes(tensor=2, moe_ep=2),
            DEMO._replace(heads=8, kv_heads=4),
            "--expert-parallel-size 2 does not fit the model, which has no experts: it can be 1",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_sizes_that_do(sizes, model, said):
    with pytest.raises(ConfigError) as error:
        check_model(sizes, model)
    assert str(error.value) == said


def test_what_fits_is_let_pass():
    check_model(Sizes(tensor=3, pipeline=7), DEMO)
    check_model(Sizes(tensor=8), MIXTURE)
    check_model(Sizes(tensor=8, moe_ep=2, moe_dp=2), MIXTURE)
