"""Detects gradients of a loss that was not scaled; a step would divide them by the scale."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor

from lightstep.precision.leaf_hooks import LeafHooks
from lightstep.precision.loss_scale import ConstantLossScale, LossScale

_instances: weakref.WeakSet[ScaledBackward] = weakref.WeakSet()
"""All instances: a backward is reported to all of them, since autograd may run hooks in other threads."""


class ScaledBackward:
    """Whether all gradients that autograd wrote since the last step come from scaled losses.

    Gradients that user code assigned are accepted as they are. Without a scale nothing is checked.

    Attributes:
        unscaled: autograd has written gradients of a loss that was not scaled; they may have been dropped since.
    """

    def __init__(self) -> None:
        self._hooks = LeafHooks()
        self._watched: list[Tensor] = []
        self._scale: LossScale | None = None
        self._running = 0  # backwards of losses with this scale
        self.unscaled = False
        _instances.add(self)

    def watch(self, parameters: Iterable[Tensor], scale: LossScale) -> Collection[Tensor]:
        """Check the gradients of exactly these parameters; returns those that it has not checked before."""
        self._scale = scale
        wanted = [] if scale.is_identity else [p for p in parameters if p.is_floating_point()]
        swapped = self._hooks.restore() if self._watched else []
        if len(wanted) == len(self._watched) and all(map(operator.is_, wanted, self._watched)):
            return swapped
        missed = {*wanted}.difference(self._watched).union(swapped)
        self._watched = wanted
        reference = weakref.ref(self)
        self._hooks.set_parameters(wanted, after=_make_hook(reference))
        return missed

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A backward of a scaled loss runs in the body. It counts for all optimizers with the same scale."""
        if self._scale is None or self._scale.is_identity:
            yield
            return
        same_scale = [watch for watch in _instances if watch._scale is not None and _equal(self._scale, watch._scale)]
        for watch in same_scale:
            watch._running += 1
        try:
            yield
        finally:
            for watch in same_scale:
                watch._running -= 1

    def refuse_unscaled(self) -> None:
        """Called before gradients are used.

        Raises:
            RuntimeError: some come from a loss that was not scaled.
        """
        if self.unscaled and self._scale is not None:
            raise RuntimeError(
                "there are gradients of a loss that was not multiplied by this optimizer's loss scale "
                f"({self._scale!r}), and step() divides by it: call optimizer.backward(loss), and not "
                "loss.backward(), or set precision.loss_scale 'none' (optimizer.zero_grad() drops them)"
            )

    def clear(self) -> None:
        """The gradients have been consumed or dropped."""
        self.unscaled = False

    def close(self) -> None:
        """Remove the hooks."""
        self._watched = []
        self._hooks.set_parameters(())
        self.clear()


def _equal(mine: LossScale, other: LossScale) -> bool:
    constant = isinstance(mine, ConstantLossScale) and isinstance(other, ConstantLossScale)
    return mine is other or (constant and mine.scale == other.scale)


def _make_hook(reference: weakref.ref[ScaledBackward]) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook."""

    def hook(_: Tensor) -> None:
        watch = reference()
        if watch is not None and not watch._running:
            watch.unscaled = True

    return hook
