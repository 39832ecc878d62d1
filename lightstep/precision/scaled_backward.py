"""Noticing gradients of a loss that was not scaled, and that a step would divide by the scale all the same."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from lightstep.precision.loss_scale import ConstantLossScale, LossScale

_running: list[LossScale] = []
"""The scales of the backwards that are under way (autograd may run hooks in threads of its own)."""


class ScaledBackward:
    """Whether the gradients that autograd wrote since the last step come from losses that were scaled.

    Gradients that somebody assigned are taken as they are. Without a scale nothing is watched.

    Attributes:
        unscaled: there are gradients of a loss that was not scaled, unless somebody gave them up.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._scale: LossScale | None = None
        self.unscaled = False

    def watch(self, parameters: Iterable[Tensor], scale: LossScale) -> None:
        """From now on look at the gradients of these parameters; others are forgotten."""
        self._scale = scale
        wanted = set() if scale.is_identity else set(parameters)
        for parameter in self._handles.keys() - wanted:
            self._handles.pop(parameter).remove()
        for parameter in wanted - self._handles.keys():
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(_noting(self))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A backward of a scaled loss."""
        if self._scale is None or self._scale.is_identity:
            yield
            return
        _running.append(self._scale)
        try:
            yield
        finally:
            _running.remove(self._scale)

    def note(self) -> None:
        """A gradient has arrived."""
        mine = self._scale
        self.unscaled |= mine is not None and not any(_equal(mine, other) for other in _running)

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
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.clear()


def _equal(mine: LossScale, other: LossScale) -> bool:
    """Several optimizers may share one backward if their scales never part."""
    constant = isinstance(mine, ConstantLossScale) and isinstance(other, ConstantLossScale)
    return mine is other or (constant and mine.scale == other.scale)


def _noting(watch: ScaledBackward) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook."""
    reference = weakref.ref(watch)

    @unserializable_hook
    def hook(_: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner.note()

    return hook
