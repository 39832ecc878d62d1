"""Plans the time of an iteration: forward and backward, the link, and the part of it that is exposed."""

from __future__ import annotations

from dataclasses import dataclass

from lightstep.config import StrategyConfig
from lightstep.plan.activations import Activations
from lightstep.plan.memory import Memory, shard_count, updates_in_backward
from lightstep.plan.models import Sizes
from lightstep.plan.rates import Profile


@dataclass(frozen=True)
class Time:
    """Milliseconds of one iteration.

    Attributes:
        compute: forward and backward.
        link: the copies, both directions at once.
        exposed: the part of the step that forward and backward do not hide.
    """

    compute: float
    link: float
    exposed: float

    @property
    def iteration(self) -> float:
        return self.compute + self.exposed


def iteration_time(
    config: StrategyConfig,
    sizes: Sizes,
    activations: Activations,
    memory: Memory,
    profile: Profile,
    ranks: int = 1,
    micro_batches: int = 1,
) -> Time:
    """The time of one optimizer step with all its micro-batches.

    Assumes that collectives are hidden, and that ``overlap`` repeats no updates, as it does for a clipped step.
    """
    one = _Compute(activations, profile)
    compute = micro_batches * (one.forward + one.backward)
    state = config.optimizer_state
    update = sizes.total / shard_count(config, ranks) / 1e9 * profile.update_ms
    if state.backend == "bulk":
        link = 2 * memory.link / profile.link.alone / 1e6
        return Time(compute, link, link + update)
    if state.backend == "resident":
        return Time(compute, 0, update)
    link = memory.link / profile.link.each_way(ranks) / 1e6
    if state.update == "at_step":
        copies = link
    elif state.update == "in_backward":
        copies = _Units(sizes, one, link).end_of_updates() - one.backward
    else:
        copies = _Units(sizes, one, link).end_of_forward(updates_in_backward(config)) - one.forward
    return Time(compute, link, max(update, copies))  # copies are hidden beside the computation, arithmetic is not


class _Compute:
    """Compute times of one micro-batch in ms."""

    def __init__(self, activations: Activations, profile: Profile) -> None:
        def ms(flops: float) -> float:
            return flops / profile.tflops / 1e9

        self.blocks = activations.blocks
        self.block_forward = ms(activations.forward_flops)
        self.block_backward = ms(activations.backward_flops)
        self.loss_forward = ms(activations.other_forward_flops)
        self.loss_backward = ms(activations.other_backward_flops)
        self.forward = self.blocks * self.block_forward + self.loss_forward
        self.backward = self.blocks * self.block_backward + self.loss_backward


class _Units:
    """The link time of each unit: embedding, blocks, norm and head. Time 0 is the end of forward."""

    def __init__(self, sizes: Sizes, compute: _Compute, link: float) -> None:
        self._compute = compute
        elements = [sizes.before, *sizes.blocks, sizes.behind]
        self._link = [link * count / sizes.total for count in elements]
        last = len(elements) - 1
        ready = [compute.loss_backward + compute.block_backward * (last - i) for i in range(last)]
        self._ready = [compute.backward, *ready[1:], compute.loss_backward]

    def end_of_updates(self) -> float:
        """When the last update ends if every unit is updated as soon as its gradients are complete."""
        return max(self._in_backward().values())

    def _in_backward(self, until: float = float("inf")) -> dict[int, float]:
        """The end time of each update that begins before ``until``, last unit first."""
        now, done = 0.0, {}
        for unit in reversed(range(len(self._link))):
            start = max(now, self._ready[unit])
            if start < until:
                now = done[unit] = start + self._link[unit]
        return done

    def end_of_forward(self, early: bool) -> float:
        """Time from the end of backward to the end of the next forward, in which each part waits for its unit.

        Args:
            early: updates begin in backward. Otherwise the norm comes first.
        """
        backward = self._compute.backward
        done = self._in_backward(backward) if early else {}
        now = max([backward, *done.values()])
        for unit in range(len(self._link)):
            if unit not in done:
                now = done[unit] = now + self._link[unit]
        at = backward
        for unit in range(len(self._link)):
            at = max(at, done[unit])
            if unit == len(self._link) - 1:
                at += self._compute.loss_forward
            elif unit > 0:
                at += self._compute.block_forward
        return at - backward
