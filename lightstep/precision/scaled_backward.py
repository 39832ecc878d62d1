"""Noticing gradients of a loss that was not scaled, and that a step would divide by the scale all the same."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from lightstep.precision.leaf_hooks import LeafHooks
from lightstep.precision.loss_scale import ConstantLossScale, LossScale

_watching: weakref.WeakSet[ScaledBackward] = weakref.WeakSet()
"""Autograd may run hooks in threads of its own, so that a backward of one optimizer is announced to all."""


class ScaledBackward:
    """Whether the gradients that autograd wrote since the last step come from losses that were scaled.

    Gradients that somebody assigned are taken as they are. Without a scale nothing is watched.

    Attributes:
        unscaled: there are gradients of a loss that was not scaled, unless somebody gave them up.
    """

    def __init__(self) -> None:
        self._hooks = LeafHooks()
        self._watched: list[Tensor] = []
        self._scale: LossScale | None = None
        self._running = 0  # backwards of losses with this scale
        self.unscaled = False
        _watching.add(self)

    def watch(self, parameters: Iterable[Tensor], scale: LossScale) -> None:
        """From now on look at the gradients of these parameters; others are forgotten."""
        self._scale = scale
        wanted = [] if scale.is_identity else [p for p in parameters if p.is_floating_point()]
        if len(wanted) == len(self._watched) and all(map(operator.is_, wanted, self._watched)):
            return
        self._watched = wanted
        reference = weakref.ref(self)
        self._hooks.carry(wanted, after=lambda _: _noting(reference))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A backward of a scaled loss. Several optimizers may share it if their scales never part."""
        if self._scale is None or self._scale.is_identity:
            yield
            return
        told = [watch for watch in _watching if watch._scale is not None and _equal(self._scale, watch._scale)]
        for watch in told:
            watch._running += 1
        try:
            yield
        finally:
            for watch in told:
                watch._running -= 1

    def refuse_unscaled(self) -> None:
        """Called before gradients are taken.

        Raises:
            RuntimeError: some of them are of a loss that was not scaled.
        """
        if self.unscaled and self._scale is not None:
            raise RuntimeError(
                "there are gradients of a loss that was not multiplied by this optimizer's loss scale "
                f"({self._scale!r}), and step() divides by it: call optimizer.backward(loss), and not "
                "loss.backward(), or set precision.loss_scale 'none' (optimizer.zero_grad() gives them up)"
            )

    def clear(self) -> None:
        """The gradients have been taken, or given up."""
        self.unscaled = False

    def close(self) -> None:
        """Take the hooks off."""
        self._watched = []
        self._hooks.carry(())
        self.clear()


def _equal(mine: LossScale, other: LossScale) -> bool:
    constant = isinstance(mine, ConstantLossScale) and isinstance(other, ConstantLossScale)
    return mine is other or (constant and mine.scale == other.scale)


def _noting(reference: weakref.ref[ScaledBackward]) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook."""

    def hook(_: Tensor) -> None:
        watch = reference()
        if watch is not None and not watch._running:
            watch.unscaled = True

    return hook
