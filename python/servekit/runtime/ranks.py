"""The table of ranks: which process is which part of which group, on every node, from nothing but the sizes.

T tensor ranks side by side make a stage, P stages behind each other a replica; R replicas serve independently. Inside
the T ranks of a stage, attention is split into D x C x A (data parallel, context parallel, tensor parallel) and the
experts of a mixture into M x E x the rest. Every process computes this table for itself and finds the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servekit.config.server_args import MAX_RANKS, ConfigError, ServerArgs

ATTENTION = ("replica", "pp", "attn_dp", "attn_cp", "attn_tp")
EXPERTS = ("replica", "pp", "moe_dp", "moe_ep", "moe_tp")
STAGES = ("replica", "pp", "tp")
KINDS = {
    **dict.fromkeys(("tp", "pp"), STAGES),
    **dict.fromkeys(ATTENTION[2:], ATTENTION),
    **dict.fromkeys(EXPERTS[2:], EXPERTS),
}
"""Kinds of groups, and the coordinates among which they are: members differ in their own one and share the others."""


class GroupError(RuntimeError):
    """The ranks of a group can't go on together: one is gone, or never came, or has been told something else."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large each kind of group is.

    Attributes:
        replicas: R, whole T x P groups side by side.
        tensor, pipeline: T and P.
        attn_dp, attn_cp: D and C, of attention inside T.
        moe_ep, moe_dp: E and M, of experts inside T.
        nodes: N.
        base_gpu_id, gpu_id_step: the first device of each node, and how far it is to the next.
    """

    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    moe_ep: int = 1
    moe_dp: int = 1
    nodes: int = 1
    base_gpu_id: int = 0
    gpu_id_step: int = 1

    @classmethod
    def of(cls, args: ServerArgs) -> Sizes:
        """What the flags say."""
        data, inside = args.data_parallel_size, args.enable_dp_attention
        return cls(
            replicas=1 if inside else data,
            tensor=args.tensor_parallel_size,
            pipeline=args.pipeline_parallel_size,
            attn_dp=data if inside else 1,
            attn_cp=args.attention_context_parallel_size,
            moe_ep=args.expert_parallel_size,
            moe_dp=args.moe_data_parallel_size,
            nodes=args.nnodes,
            base_gpu_id=args.base_gpu_id,
            gpu_id_step=args.gpu_id_step,
        )

    @property
    def world(self) -> int:
        """Processes of one replica."""
        return self.tensor * self.pipeline

    @property
    def attn_tp(self) -> int:
        """A, the ranks that share the heads of one sequence's attention."""
        return self.tensor // self.attn_dp // self.attn_cp

    @property
    def moe_tp(self) -> int:
        """The ranks that share one expert."""
        return self.tensor // self.moe_dp // self.moe_ep


class Rank(NamedTuple):
    """One process that computes.

    Attributes:
        node, device: where it runs: node, and index of its device there.
        replica, pp, tp: its replica, stage, and place in the stage.
        attn_dp, attn_cp, attn_tp: that place, as attention is split.
        moe_dp, moe_ep, moe_tp: that place, as experts are split.
        leader: it alone of its data-parallel rank talks to the control process, and decides.
        world: its number in the replica.
        dp: its data-parallel rank, as control counts them.
    """

    node: int
    device: int
    replica: int
    pp: int
    tp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int
    moe_dp: int
    moe_ep: int
    moe_tp: int
    leader: bool
    world: int
    dp: int


def title_of(rank: Rank, sizes: Sizes) -> str:
    """Title of a rank's process."""
    where = f"dp={rank.dp},pp={rank.pp},tp={rank.tp}" if sizes.world > 1 else f"dp={rank.dp}"
    return f"servekit::scheduler[{where}]"


def number_of(ranks: Sequence[Rank], place: int) -> int:
    """Number of the rank at a place of the table: a leader's data-parallel rank, or how many followers come before."""
    return ranks[place].dp if ranks[place].leader else sum(not rank.leader for rank in ranks[:place])


def make_ranks(sizes: Sizes) -> list[Rank]:
    """Every rank of every node, replica by replica, in the order of their world ranks.

    Raises:
        ConfigError: these sizes can't be.
    """
    check_sizes(sizes)
    return [
        _rank(sizes, r, p, t) for r in range(sizes.replicas) for p in range(sizes.pipeline) for t in range(sizes.tensor)
    ]


def _rank(s: Sizes, replica: int, p: int, t: int) -> Rank:
    # A replica's own nodes, the stages of a node, the nodes of a stage, a node's ranks of a stage, its replicas.
    nodes = max(s.nodes // s.replicas, 1)
    stages, spread = max(s.pipeline // nodes, 1), max(nodes // s.pipeline, 1)
    beside, replicas = s.tensor // spread, max(s.replicas // s.nodes, 1)
    node = replica // replicas * nodes + p // stages * spread + t // beside
    place = replica % replicas * s.world + p % stages * beside + t % beside
    a, e = s.attn_tp, s.moe_tp
    attn_dp, attn_cp, attn_tp = t // (a * s.attn_cp), t // a % s.attn_cp, t % a
    return Rank(
        node=node,
        device=s.base_gpu_id + place * s.gpu_id_step,
        replica=replica,
        pp=p,
        tp=t,
        attn_dp=attn_dp,
        attn_cp=attn_cp,
        attn_tp=attn_tp,
        moe_dp=t // (e * s.moe_ep),
        moe_ep=t // e % s.moe_ep,
        moe_tp=t % e,
        leader=p == attn_cp == attn_tp == 0,
        world=p * s.tensor + t,
        dp=replica * s.attn_dp + attn_dp,
    )


def groups(ranks: Iterable[Rank], kind: str) -> list[list[Rank]]:
    """All groups of one of `KINDS`, members in the order of their rank in the group."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    for rank in ranks:
        key = tuple(getattr(rank, each) for each in KINDS[kind] if each != kind)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def check_sizes(s: Sizes) -> None:
    """Whether a table can be made of these sizes.

    Raises:
        ConfigError: it can't; the line names the flags, and what they could be.
    """
    if s.replicas * s.world > MAX_RANKS:
        raise ConfigError(
            f"--tensor-parallel-size {s.tensor} x --pipeline-parallel-size {s.pipeline} in {s.replicas} replicas make"
            f" {s.replicas * s.world} ranks, at most {MAX_RANKS} can be"
        )
    if s.tensor % (s.attn_dp * s.attn_cp):
        raise ConfigError(
            f"--tensor-parallel-size {s.tensor} must be a multiple of --data-parallel-size {s.attn_dp} (with"
            f" --enable-dp-attention) x --attention-context-parallel-size {s.attn_cp}: for {s.tensor} their product"
            f" can be {_or(_divisors(s.tensor))}"
        )
    if s.tensor % (s.moe_dp * s.moe_ep):
        raise ConfigError(
            f"--tensor-parallel-size {s.tensor} must be a multiple of --expert-parallel-size {s.moe_ep} x"
            f" --moe-data-parallel-size {s.moe_dp}: for {s.tensor} their product can be {_or(_divisors(s.tensor))}"
        )
    if s.moe_dp > 1 and s.pipeline > 1:
        raise ConfigError(
            f"--moe-data-parallel-size {s.moe_dp} needs --pipeline-parallel-size 1, not {s.pipeline}; with"
            f" {s.pipeline} stages it can be 1"
        )
    if not _fits_nodes(s, s.nodes):
        fitting = _or(n for n in range(1, s.replicas * s.world + 1) if _fits_nodes(s, n))
        raise ConfigError(
            f"--nnodes {s.nodes} can't hold equal parts of {s.replicas} replicas (--data-parallel-size) of"
            f" --pipeline-parallel-size {s.pipeline} x --tensor-parallel-size {s.tensor}: --nnodes can be {fitting}"
        )


def _fits_nodes(s: Sizes, nodes: int) -> bool:
    """Whether each node gets whole replicas, or whole stages of one, or an equal part of one stage."""
    if s.replicas % nodes and nodes % s.replicas:
        return False
    own = max(nodes // s.replicas, 1)
    return s.pipeline % own == 0 or (own % s.pipeline == 0 and s.tensor % (own // s.pipeline) == 0)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _or(numbers: Iterable[int]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
