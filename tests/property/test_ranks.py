"""The table of ranks: what holds for all sizes up to 8, odd ones too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from servekit.config.server_args import ConfigError
from servekit.runtime.ranks import KINDS, Sizes, groups, make_ranks

quickly = settings(max_examples=60, deadline=None)
small = st.integers(1, 8)
sizes = st.builds(
    Sizes,
    replicas=small,
    tensor=small,
    pipeline=small,
    attn_dp=small,
    attn_cp=small,
    moe_ep=small,
    moe_dp=small,
    nodes=small,
    base_gpu_id=small,
    gpu_id_step=small,
)


def possible(s: Sizes) -> bool:
    """The constraints, said once more in other words."""
    if s.tensor % (s.attn_dp * s.attn_cp) or s.tensor % (s.moe_ep * s.moe_dp) or (s.moe_dp > 1 and s.pipeline > 1):
        return False
    if s.replicas % s.nodes == 0:
        return True
    if s.nodes % s.replicas:
        return False
    nodes = s.nodes // s.replicas
    return s.pipeline % nodes == 0 or (nodes % s.pipeline == 0 and s.tensor % (nodes // s.pipeline) == 0)


@st.composite
def possible_sizes(draw: st.DrawFn) -> Sizes:
    """Sizes that can be, up to 8."""

    def part(of: int) -> int:
        return draw(st.sampled_from([each for each in range(1, of + 1) if of % each == 0]))

    tensor, pipeline, replicas = draw(small), draw(small), draw(small)
    attn_dp, moe_dp = part(tensor), part(tensor) if pipeline == 1 else 1
    s = Sizes(
        replicas=replicas,
        tensor=tensor,
        pipeline=pipeline,
        attn_dp=attn_dp,
        attn_cp=part(tensor // attn_dp),
        moe_ep=part(tensor // moe_dp),
        moe_dp=moe_dp,
        base_gpu_id=draw(small),
        gpu_id_step=draw(small),
    )
    fitting = [n for n in range(1, 9) if possible(replace(s, nodes=n))]
    return replace(s, nodes=draw(st.sampled_from(fitting)))


@quickly
@given(sizes)
def test_exactly_the_impossible_is_refused_in_one_line_with_a_flag(s):
    if possible(s):
        assert len(make_ranks(s)) == s.replicas * s.tensor * s.pipeline
        return
    with pytest.raises(ConfigError, match=r"^--[a-z-]+ \d[^\n]* can be [\d, or]+$"):
        make_ranks(s)


@quickly
@given(possible_sizes())
def test_every_rank_is_there_once_and_stands_at_its_number(s):
    ranks = make_ranks(s)
    assert len({(r.replica, r.pp, r.tp) for r in ranks}) == len(ranks)
    assert [r.replica * s.tensor * s.pipeline + r.world for r in ranks] == list(range(len(ranks)))
    for rank in ranks:
        assert rank.tp == (rank.attn_dp * s.attn_cp + rank.attn_cp) * s.attn_tp + rank.attn_tp
        assert rank.tp == (rank.moe_dp * s.moe_ep + rank.moe_ep) * s.moe_tp + rank.moe_tp


@quickly
@given(possible_sizes())
def test_groups_of_each_kind_are_equal_parts_of_the_world(s):
    ranks = make_ranks(s)
    wanted = {"tp": s.tensor, "pp": s.pipeline} | {kind: getattr(s, kind) for kind in KINDS if kind not in ("tp", "pp")}
    for kind, size in wanted.items():
        found = groups(ranks, kind)
        assert sorted(rank for group in found for rank in group) == sorted(ranks)
        for group in found:
            assert [getattr(rank, kind) for rank in group] == list(range(size))
            assert len({rank.replica for rank in group}) == 1


@quickly
@given(possible_sizes())
def test_each_data_parallel_rank_has_one_leader_in_the_first_stage(s):
    ranks = make_ranks(s)
    leaders = [rank for rank in ranks if rank.leader]
    assert sorted(rank.dp for rank in leaders) == list(range(s.replicas * s.attn_dp))
    assert all(rank.pp == 0 for rank in leaders)
    assert {rank.dp for rank in ranks} == {rank.dp for rank in leaders}


@quickly
@given(possible_sizes())
def test_nodes_have_equal_parts_and_each_rank_a_device_of_its_own(s):
    ranks = make_ranks(s)
    for node in range(s.nodes):
        mine = [rank for rank in ranks if rank.node == node]
        assert len(mine) * s.nodes == len(ranks)
        # The devices are neighbours, a step apart, whatever the step is.
        assert sorted(r.device for r in mine) == [s.base_gpu_id + i * s.gpu_id_step for i in range(len(mine))]


@quickly
@given(possible_sizes())
def test_a_stage_of_one_node_is_not_scattered(s):
    assume(s.pipeline % max(s.nodes // s.replicas, 1) == 0)
    for stage in groups(make_ranks(s), "tp"):
        assert len({rank.node for rank in stage}) == 1


@pytest.mark.parametrize(
    ("given_sizes", "t", "attention", "experts"),
    [
        (Sizes(tensor=8, attn_dp=4, moe_ep=8), 5, (2, 0, 1), (0, 5, 0)),
        (Sizes(tensor=8, attn_dp=2, attn_cp=2, moe_ep=4), 7, (1, 1, 1), (0, 3, 1)),
        (Sizes(tensor=8, moe_ep=2, moe_dp=2), 6, (0, 0, 6), (1, 1, 0)),
    ],
)
def test_worked_examples_of_places(given_sizes, t, attention, experts):
    rank = make_ranks(given_sizes)[t]
    assert (rank.attn_dp, rank.attn_cp, rank.attn_tp) == attention
    assert (rank.moe_dp, rank.moe_ep, rank.moe_tp) == experts


@pytest.mark.parametrize(
    ("given_sizes", "stage", "places"),
    [(Sizes(tensor=4, pipeline=2, nodes=2), 1, range(4)), (Sizes(tensor=8, nodes=2), 0, range(4, 8))],
)
def test_worked_examples_of_nodes(given_sizes, stage, places):
    second = [rank for rank in make_ranks(given_sizes) if rank.node == 1]
    assert {rank.pp for rank in second} == {stage}
    assert [rank.tp for rank in second] == list(places)


@pytest.mark.parametrize("tensor", [2, 4])
def test_three_stages_are_not_split_over_two_nodes(tensor):
    refused = Sizes(tensor=tensor, pipeline=3, nodes=2)
    with pytest.raises(ConfigError, match=rf"--nnodes can be 1, 3{', 6' if tensor == 4 else ''} or {3 * tensor}$"):
        make_ranks(refused)
    assert make_ranks(replace(refused, nodes=3))


def test_replicas_may_share_a_node_or_span_several():
    assert [(r.node, r.device) for r in make_ranks(Sizes(replicas=4, tensor=2, nodes=2, gpu_id_step=2))] == [
        (0, 0), (0, 2), (0, 4), (0, 6), (1, 0), (1, 2), (1, 4), (1, 6)
    ]  # fmt: skip
    assert [(r.node, r.device) for r in make_ranks(Sizes(replicas=2, tensor=4, nodes=4))] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)
    ]  # fmt: skip
