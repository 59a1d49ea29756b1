"""Nodes that Ray places: one actor on each machine but this one, which runs there what an operator would start.

Ray carries strings: the command of a node, with its number and the address where the nodes meet. How they meet, when
they are ready and how they die is the same as without Ray, and goes past it. Ray's library, with its threads and
connections, lives in a process of its own, whose child is node 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from setproctitle import setproctitle

from servekit import _core
from servekit.config import ConfigError, ServerArgs
from servekit.config.server_args import flag_of
from servekit.runtime import logs
from servekit.runtime.nodes.shape import OWN
from servekit.runtime.notify import Notifications, tell_ready
from servekit.runtime.ranks import Sizes, make_ranks

logger = logging.getLogger("servekit.ray")

TITLE = "servekit::ray"
CONNECT_S = 5.0
"""How long the cluster's address may take to answer; Ray itself would try for minutes."""
ROOM_S = 30.0
"""How long the cluster may take to find room for the nodes."""
LOOK_EVERY_S = 0.2
FAREWELL_S = 3.0
"""How long nodes may take to end after node 0; then their actors are killed."""
_FAILED = 1
_MODULE = "servekit.runtime.ray_launcher"

_TOLD = (
    "model",
    "tokenizer",
    "served_model_name",
    "revision",
    "chat_template",
    "mock_script",
    "profile_dir",
    "dist_init_addr",
    "dist_port_range",
    "cluster_secret_file",
    "log_level",
    "log_format",
)
"""Flags that a node may have its own way, and that are node 0's where Ray starts it. Others are not told."""


class NodeActor:
    """Runs the command of one node, where Ray has put it."""

    def run(self, arguments: list[str], folder: str) -> str:
        """Run it to its end.

        Args:
            arguments: of `servekit-serve`.
            folder: where relative paths begin, if this machine has it.

        Returns:
            How it ended: its error line if it wrote one, else its status.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder if Path(folder).is_dir() else None,
        )
        error = ""
        assert process.stderr is not None
        for line in process.stderr:
            # Ray shows it where node 0 runs.
            sys.stderr.write(line)
            if ": error: " in line:
                error = line.partition(": error: ")[2].strip()
        return error or f"its command ended with status {process.wait()}"


def serve_on_ray(args: ServerArgs, arguments: Sequence[str]) -> int:
    """Run a server whose other nodes Ray places, until it is told to end or node 0 ends.

    Args:
        args: validated flags.
        arguments: of the command line that they are from.

    Returns:
        The status of node 0's main process; 1 if it could not be started, or a node could not.
    """
    setproctitle(TITLE)
    logs.configure(TITLE, 1, args.log_level, args.log_format)
    try:
        with contextlib.ExitStack() as stack:
            cluster = Cluster(args)
            stack.callback(cluster.close)
            first = stack.enter_context(FirstNode(arguments))
            cluster.start_nodes()
            return _watch_over(first, cluster)
    except ConfigError as error:
        print(f"servekit-serve: error: {error}", file=sys.stderr)  # noqa: T201 (the operator's one line)
        return _FAILED


def _watch_over(first: FirstNode, cluster: Cluster) -> int:
    """Until node 0 has ended; before it is ready, any other node's end is the end."""
    told = False
    while (status := first.wait(LOOK_EVERY_S)) is None:
        if first.is_ready and not told:
            told = True
            tell_ready()
        for node, how in cluster.ended():
            if not first.is_ready and not first.is_told_to_end:
                raise ConfigError(f"node {node}: {how}")
            logger.info("node %d has ended: %s", node, how)
    cluster.wait(FAREWELL_S)
    return status if status >= 0 else _FAILED


class FirstNode:
    """Node 0: the same command line on this machine, in a process that signals are passed on to.

    Attributes:
        is_told_to_end: a signal was passed on.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.is_told_to_end = False
        self._notifications = Notifications()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), *arguments, "--launcher=local"],
            env={**os.environ, **self._notifications.environment},
            # Ctrl-C in a terminal reaches all of its group: this one passes it on, once.
            start_new_session=True,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_told_to_end = True
        if self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        return self._notifications.is_ready()

    def wait(self, seconds: float) -> int | None:
        """Its status if it ends within that time, negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def __enter__(self) -> FirstNode:
        return self

    def __exit__(self, *error: object) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.terminate()
            if self.wait(FAREWELL_S) is None:
                self._process.kill()
                self._process.wait()
        self._notifications.close()


class Cluster:
    """The Ray cluster, with room for all nodes.

    Args:
        args: validated flags.

    Raises:
        ConfigError: Ray is missing, or unreachable, or has no room.
    """

    def __init__(self, args: ServerArgs) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--launcher ray needs Ray, which is not installed: pip install 'servekit[ray]'") from None
        self._ray = ray
        self._args = args
        self._nodes: dict[Any, int] = {}
        _connect(ray, args.ray_address or os.environ.get("RAY_ADDRESS") or "auto")
        try:
            self._take_room()
        except BaseException:
            ray.shutdown()
            raise

    def _take_room(self) -> None:
        from ray.util.placement_group import placement_group

        ray, sizes = self._ray, Sizes.of(self._args)
        wants_gpu = self._args.device == "cuda" or (self._args.device == "auto" and "GPU" in ray.cluster_resources())
        self._kind = "GPU" if wants_gpu and self._args.engine == "torch" else "CPU"
        ranks = [rank.node for rank in make_ranks(sizes)]
        self._rooms = [float(ranks.count(node)) for node in range(sizes.nodes)]
        # All ranks of a node lie together, nodes on machines of their own, node 0 on this one: its room is taken too.
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            [{self._kind: room} for room in self._rooms],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[here, *[{} for _ in self._rooms[1:]]],
        )
        if not self._group.wait(ROOM_S):
            has = ", ".join(f"{each['Resources'].get(self._kind, 0):g}" for each in ray.nodes() if each["Alive"])
            raise ConfigError(
                f"Ray has no room for {sizes.nodes} nodes of {max(self._rooms):g} {self._kind}s each, one of them on"
                f" this machine: its machines have {has}"
            )

    def start_nodes(self) -> None:
        """Start all nodes but the first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(NodeActor)
        for node, room in enumerate(self._rooms[1:], 1):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            taken = {"num_gpus": room, "num_cpus": 0} if self._kind == "GPU" else {"num_cpus": room}
            placed = actor.options(scheduling_strategy=where, max_restarts=0, **taken).remote()
            self._nodes[placed.run.remote(arguments_of(self._args, node), str(Path.cwd()))] = node

    def ended(self) -> list[tuple[int, str]]:
        """Nodes that have ended since the last call, and how."""
        ray = self._ray
        done = ray.wait(list(self._nodes), num_returns=len(self._nodes), timeout=0)[0] if self._nodes else []
        found = []
        for each in done:
            try:
                how = ray.get(each)
            except ray.exceptions.RayError as error:
                how = _first_line(error)
            found.append((self._nodes.pop(each), how))
        return found

    def wait(self, seconds: float) -> None:
        """Wait until all nodes have ended, no longer than that."""
        if self._nodes:
            self._ray.wait(list(self._nodes), num_returns=len(self._nodes), timeout=seconds)

    def close(self) -> None:
        """Leave the cluster; nodes that still run end with that."""
        self._ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address=address, configure_logging=False, log_to_driver=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address} ({_first_line(error)}): start one with `ray start --head`, or"
            " name it with --ray-address"
        ) from None


def arguments_of(args: ServerArgs, node: int) -> list[str]:
    """Arguments of `servekit-serve` on another node: those of node 0 that concern it, and its own number."""
    found, plain = [f"--node-rank={node}"], ServerArgs()
    for field in args.__struct_fields__:
        value = getattr(args, field)
        if value == getattr(plain, field) or (field in OWN and field not in _TOLD):
            continue
        flag = "--model" if field == "model" else flag_of(field)
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found.append(f"{flag}={value}")
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main() -> None:
    """A node's command, which ends with its parent: that one's process id, then the arguments."""
    _core.set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(_FAILED)
    from servekit.cli.serve import main as serve

    serve(sys.argv[2:])


if __name__ == "__main__":
    main()
