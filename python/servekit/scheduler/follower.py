"""The ranks of a group: the leader's runner, which hands its plans on, and the followers, which run the same steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servekit.engine.plan import ModelRunner, Plan, StepResult
from servekit.messages.envelope import Kind
from servekit.scheduler.log_level import set_log_level
from servekit.scheduler.orders import JOINT, STEP, STOP, OrderReceiver, OrderSender, ResultReceiver, ResultSender
from servekit.scheduler.profiling import Profiler

if TYPE_CHECKING:
    from servekit._core import Pulse


class LeadingRunner:
    """A leader's part of a model, and through it everybody's.

    Args:
        runner: computes this rank's part.
        orders: to all other ranks.
        results: from the last stage, None where this rank is in it.
        ahead: steps that are launched before one is collected, so that all stages are at work.
    """

    def __init__(
        self, runner: ModelRunner, orders: OrderSender, results: ResultReceiver | None, ahead: int = 0
    ) -> None:
        self._runner, self._orders, self._results = runner, orders, results
        self.info, self.ahead = runner.info, ahead

    def launch(self, plan: Plan) -> tuple[int, Any]:
        """Start a step everywhere."""
        self._orders.step(plan)
        return plan.step, self._runner.launch(plan)

    def collect(self, handle: tuple[int, Any]) -> StepResult:
        """Wait for a step's tokens."""
        step, own = handle
        return self._runner.collect(own) if self._results is None else self._results.next(step)


class Follower:
    """A rank that decides nothing: it computes its part of the steps that its leader plans, until that says stop.

    Args:
        runner: computes this rank's part.
        orders: from the leader.
        results: to the leader, for the rank that tells it what was sampled.
        profiler: writes this rank's traces.
        own: its place among the data-parallel ranks that compute their steps together.
        pulse: shows what it does to those who watch it; None shows it nowhere.
    """

    def __init__(
        self,
        runner: Any,
        orders: OrderReceiver,
        results: ResultSender | None,
        profiler: Profiler,
        own: int = 0,
        pulse: Pulse | None = None,
    ) -> None:
        self._runner, self._orders, self._results, self._profiler = runner, orders, results, profiler
        self._own, self._pulse, self._steps = own, pulse, 0
        self.info = runner.info

    def run(self) -> None:
        """Follow until the leader says stop.

        Raises:
            GroupError: an order is not the one that should come.
        """
        while True:
            self._enter("idle")
            kind, body = self._orders.next()
            self._steps += kind in (STEP, JOINT)
            self._enter("computing" if kind in (STEP, JOINT) else "working")
            match kind:
                case _ if kind == STEP:
                    self._tell(body, self._runner.launch(body))
                case _ if kind == JOINT:
                    self._tell(body[self._own], self._runner.launch_joint(body))
                case _ if kind == STOP:
                    self._orders.close()
                    return
                case Kind.PROFILE:
                    self._profiler.obey(body)
                case Kind.SET_LOG_LEVEL:
                    set_log_level(body)

    def _enter(self, phase: str) -> None:
        if self._pulse is not None:
            self._pulse.enter(phase, self._steps)

    def _tell(self, plan: Plan | None, handle: Any) -> None:
        if self._results is not None and plan is not None:
            self._results.send(plan.step, self._runner.collect(handle))
        self._profiler.step()
