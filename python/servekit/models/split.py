"""How a model is cut over the ranks of a replica: layers over stages, heads, widths, experts and vocabulary in a stage.

Every rank computes its own part of this from the table of ranks and the model's sizes; nothing is negotiated. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from servekit.config.server_args import ConfigError
from servekit.runtime.ranks import Rank, Sizes, check_sizes


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank holds of an axis: from `start` up to `stop` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """How many it holds."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """It holds all of them."""
        return self.count == self.total

    def times(self, size: int) -> Span:
        """The same where each is `size` wide."""
        return Span(self.start * size, self.stop * size, self.total * size)


@dataclass(frozen=True, slots=True)
class Part:
    """Which of `of` equal shares is a rank's."""

    index: int = 0
    of: int = 1

    def span(self, total: int) -> Span:
        """Its share; where it is not even, shares differ by one."""
        return Span(total * self.index // self.of, total * (self.index + 1) // self.of, total)

    def shared(self, total: int) -> Span:
        """Its share of what is held by several ranks each where there is too little for all: one at least."""
        start = total * self.index // self.of
        return Span(start, max(start + 1, total * (self.index + 1) // self.of), total)


ALL = Part()


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a model.

    Attributes:
        layers: those of its stage.
        first, last: whether its stage has the embedding, and the norm and the head.
        attention: its share of heads.
        sequences: which of the step's sequences are its own, where attention is shared out by them.
        queries: its share of each sequence's new tokens, where attention is shared out by them.
        dense: its share of everything that the whole stage splits: dense widths, vocabulary.
        experts, within: its share of the experts, and of the width of each of them.
        tokens: for which tokens it computes experts, where these are held more than once.
    """

    layers: range
    first: bool = True
    last: bool = True
    attention: Part = ALL
    sequences: Part = ALL
    queries: Part = ALL
    dense: Part = ALL
    experts: Part = ALL
    within: Part = ALL
    tokens: Part = ALL

    @classmethod
    def of(cls, rank: Rank, sizes: Sizes, layers: int, partition: Sequence[int] = ()) -> Cut:
        """The part of a rank."""
        return cls(
            stage_layers(layers, sizes.pipeline, partition)[rank.pp],
            rank.pp == 0,
            rank.pp == sizes.pipeline - 1,
            Part(rank.attn_tp, sizes.attn_tp),
            Part(rank.attn_dp, sizes.attn_dp),
            Part(rank.attn_cp, sizes.attn_cp),
            Part(rank.tp, sizes.tensor),
            Part(rank.moe_ep, sizes.moe_ep),
            Part(rank.moe_tp, sizes.moe_tp),
            Part(rank.moe_dp, sizes.moe_dp),
        )


def stage_layers(layers: int, stages: int, partition: Sequence[int] = ()) -> list[range]:
    """Layers of each stage: as the partition says, or sizes that differ by one at most, the larger ones first."""
    more = layers % stages
    counts = partition or [layers // stages + (stage < more) for stage in range(stages)]
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


class ModelSizes(NamedTuple):
    """What of a model is cut; widths are 0 where it has no such networks."""

    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dense_width: int = 0
    experts: int = 0
    expert_width: int = 0


_FLAGS = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "moe_ep": "--expert-parallel-size",
    "moe_dp": "--moe-data-parallel-size",
}


def check_model(sizes: Sizes, model: ModelSizes, partition: Sequence[int] = ()) -> None:
    """Whether a model can be cut so.

    Args:
        sizes: which `check_sizes` has let pass.
        model: the model's.
        partition: layers of each stage, if they are given.

    Raises:
        ConfigError: it can't; the line names the flag, and the values that would do with the other flags as they are.
    """
    if partition and (len(partition) != sizes.pipeline or sum(partition) != model.layers or min(partition) < 1):
        raise ConfigError(
            f"--pp-layer-partition {','.join(map(str, partition))} must be {sizes.pipeline} numbers, one for each stage"
            f" of --pipeline-parallel-size, of at least 1 that add up to the model's {model.layers} layers"
        )
    fault = _fault(sizes, model)
    if fault is None:
        return
    field, why = fault
    limit = {"tensor": model.heads, "pipeline": model.layers}.get(field, sizes.tensor)
    fitting = [str(n) for n in range(1, limit + 1) if _can(replace(sizes, **{field: n}), model)]
    can = f"it can be {' or '.join(fitting)}" if fitting else "no value would do with the other flags as they are"
    raise ConfigError(f"{_FLAGS[field]} {getattr(sizes, field)} does not fit the model, {why}: {can}")


def _can(sizes: Sizes, model: ModelSizes) -> bool:
    try:
        check_sizes(sizes)
    except ConfigError:
        return False
    return _fault(sizes, model) is None


def _fault(s: Sizes, m: ModelSizes) -> tuple[str, str] | None:
    """The first thing that does not fit: the size to change, and why."""
    a = s.attn_tp
    if s.pipeline > m.layers:
        return "pipeline", f"which has {m.layers} layers"
    if m.heads % a:
        return "tensor", f"whose {m.heads} attention heads are split {a} ways"
    if m.kv_heads % a and a % m.kv_heads:
        return "tensor", f"whose {m.kv_heads} KV heads are split {a} ways or held by {a} ranks"
    if m.dense_width % s.tensor:
        return "tensor", f"whose dense width of {m.dense_width} is split {s.tensor} ways"
    if m.vocabulary < s.tensor:
        return "tensor", f"which has {m.vocabulary} tokens"
    if not m.experts and (s.moe_ep > 1 or s.moe_dp > 1):
        return ("moe_ep" if s.moe_ep > 1 else "moe_dp"), "which has no experts"
    if m.experts % s.moe_ep:
        return "moe_ep", f"which has {m.experts} experts"
    if m.expert_width % s.moe_tp:
        return "moe_ep", f"whose experts' width of {m.expert_width} is split {s.moe_tp} ways"
    return None
