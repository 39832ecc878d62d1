"""What helps where the link limits an iteration, in the order in which to consider it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightstep.config import StrategyConfig
from lightstep.plan.planning import Plan, Planner

__all__ = ["Relief", "reliefs"]

_GIB = 2**30
_FACTORS = (2, 4, 8)
"""How many times as many micro-batches in a step."""


class Relief(NamedTuple):
    """A change of the command or of the strategy, and the plan with it."""

    change: str
    plan: Plan


def reliefs(name: str, config: StrategyConfig, plan: Plan, planner: Planner) -> list[Relief]:
    """The changes that shorten the step, per micro-batch; none if the link does not limit it.

    More accumulation comes first: it costs nothing but a larger batch. State on the device takes memory. Moments in
    fewer bytes are rounded.

    Args:
        plan: of this strategy, by this planner.
    """
    if plan.time is None or not plan.time.is_limited_by_link:
        return []

    def changed(**settings: Any) -> Plan:
        return planner.plan(name, _with(config, settings))

    tried = [
        *_accumulating(name, config, plan.workload.micro_batches, planner),
        *_staying(config, plan, changed),
        *_rounding(config, changed),
    ]
    return [one for one in tried if one.plan.fits and _per_micro_batch(one.plan) < 0.99 * _per_micro_batch(plan)]


def _accumulating(name: str, config: StrategyConfig, now: int, planner: Planner) -> Iterator[Relief]:
    """More micro-batches, until the link does not limit the step."""
    for factor in _FACTORS:
        tried = planner.with_micro_batches(factor * now).plan(name, config)
        yield Relief(f"--micro-batches {factor * now}", tried)
        if tried.time is None or not tried.time.is_limited_by_link:
            return


def _staying(config: StrategyConfig, plan: Plan, changed: Callable[..., Plan]) -> Iterator[Relief]:
    """As much state on the device as there is room for, in halves of a GiB."""
    state = config.optimizer_state
    if state.backend != "stream" or state.resident_gib == "auto" or plan.limit is None:
        return
    now = float(state.resident_gib)
    halves = 2 * min(plan.limit - plan.memory.peak, plan.memory.link) // _GIB
    for more in range(halves, max(halves - 4, 0), -1):  # previous weights move to the host, and need room in the ring
        tried = changed(resident_gib=now + more / 2)
        if tried.fits:
            yield Relief(f"resident_gib: {now + more / 2:g}", tried)
            return


def _rounding(config: StrategyConfig, changed: Callable[..., Plan]) -> Iterator[Relief]:
    kinds = ("float32", "bfloat16", "int8")
    for moments in kinds[kinds.index(config.optimizer_state.moments) + 1 :]:
        yield Relief(f"moments: {moments}", changed(moments=moments))


def _with(config: StrategyConfig, settings: Mapping[str, Any]) -> StrategyConfig:
    return config.model_copy(update={"optimizer_state": config.optimizer_state.model_copy(update=dict(settings))})


def _per_micro_batch(plan: Plan) -> float:
    assert plan.time is not None
    return plan.time.iteration / plan.workload.micro_batches
