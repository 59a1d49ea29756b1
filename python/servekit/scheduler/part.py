"""A rank's part of a model: loading it, and the sockets between the leader of a group and its followers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.config import ConfigError
from servekit.config.port_args import offers_ipc, orders_ipc, results_ipc, store_name
from servekit.runtime.ranks import make_ranks
from servekit.scheduler.follower import Follower
from servekit.scheduler.orders import (
    OfferReceiver,
    OfferSender,
    OrderReceiver,
    OrderSender,
    ResultReceiver,
    ResultSender,
)
from servekit.scheduler.profiling import Profiler

if TYPE_CHECKING:
    import torch

    from servekit.engine.group import ReplicaGroup
    from servekit.engine.torch_runner import TorchRunner
    from servekit.runtime.child import ChildContext


def load_part(ctx: ChildContext) -> TorchRunner:
    """What this rank computes, loaded and warmed up together with the other ranks of its replica.

    Gives up the start if the model can't be loaded, or cut into so many parts.
    """
    # Imported here: without torch there is the dummy runner.
    from servekit.engine.device import DeviceError
    from servekit.engine.torch_runner import load_torch_runner
    from servekit.models.weights import WeightError

    args, model = ctx.config.server_args, ctx.config.model_info
    try:
        return load_torch_runner(
            Path(model.path),
            device=args.device,
            dtype=args.dtype,
            ranks=ctx.sharing,
            rank=ctx.rank.device,
            page=args.page_size,
            max_model_len=model.max_model_len,
            max_total_tokens=args.max_total_tokens,
            progress=lambda done, total: ctx.progress(done, total, "weights"),
            join=partial(_join, ctx) if ctx.sizes.world > 1 else None,
            partition=args.partition,
            attention=args.attention_backend,
            stage=ctx.stage,
            passed=ctx.pulse.moved,
        )
    except (WeightError, DeviceError, ConfigError) as error:
        ctx.fail(str(error))


def _join(ctx: ChildContext, device: torch.device) -> ReplicaGroup:
    from servekit.engine.group import join_group

    ports, name = ctx.config.port_args, store_name(ctx.rank.replica)
    address, listener = ports.tcp[name], ctx.sockets.get(name, -1)
    nodes = {rank.node for rank in make_ranks(ctx.sizes) if rank.replica == ctx.rank.replica}
    interface = ports.interface if len(nodes) > 1 else None
    timeout = ctx.config.server_args.dist_timeout
    return join_group(ctx.rank, ctx.sizes, address, listener, device, timeout, interface, ctx.pulse.awaits)


def order_sender(ctx: ChildContext) -> OrderSender:
    """From the first leader of a replica to all its other ranks."""
    ports, replica = ctx.config.port_args, ctx.rank.replica
    ranks = [rank for rank in make_ranks(ctx.sizes) if rank.replica == replica and rank.world > 0]
    addresses = [ports.address(orders_ipc(replica, rank.world)) for rank in ranks]
    return OrderSender(addresses, [place for place, rank in enumerate(ranks) if rank.leader], ctx.keys)


def order_receiver(ctx: ChildContext) -> OrderReceiver:
    """Any other rank's end of it."""
    return OrderReceiver(*_own(ctx, orders_ipc(ctx.rank.replica, ctx.rank.world)), ctx.keys)


def offer_sender(ctx: ChildContext) -> OfferSender:
    """From another leader of a replica to its first one."""
    address = ctx.config.port_args.address(offers_ipc(ctx.rank.replica))
    return OfferSender(address, ctx.rank.attn_dp, ctx.keys)


def offer_receiver(ctx: ChildContext) -> OfferReceiver:
    """The first leader's end of it."""
    return OfferReceiver(*_own(ctx, offers_ipc(ctx.rank.replica)), ctx.keys)


def result_receiver(ctx: ChildContext) -> ResultReceiver | None:
    """A leader's end of the way back from the last stage, None where there is one stage."""
    if ctx.sizes.pipeline == 1:
        return None
    return ResultReceiver(*_own(ctx, results_ipc(ctx.rank.dp)), ctx.keys, ctx.pulse.awaits)


def _own(ctx: ChildContext, name: str) -> tuple[str, int | None]:
    """Where this process listens, for its own node and for others."""
    return ctx.config.port_args.own_address(name), ctx.sockets.get(name)


def create_torch_follower(ctx: ChildContext) -> Follower:
    """A rank of a group that is not its leader."""
    runner, rank = load_part(ctx), ctx.rank
    # One rank of the last stage tells each leader what all of them have sampled.
    tells = rank.pp == ctx.sizes.pipeline - 1 > 0 and rank.attn_tp == rank.attn_cp == 0
    results = ResultSender(ctx.config.port_args.address(results_ipc(rank.dp)), ctx.keys) if tells else None
    name = f"rank{rank.dp}-pp{rank.pp}-tp{rank.tp}-epoch{ctx.epoch}"
    return Follower(runner, order_receiver(ctx), results, Profiler(profiles_of(ctx), name), rank.attn_dp, ctx.pulse)


def profiles_of(ctx: ChildContext) -> Path:
    """Folder of the traces that name no other."""
    given = ctx.config.server_args.profile_dir
    return Path(given) if given else Path(ctx.config.port_args.run_dir) / "profiles"
