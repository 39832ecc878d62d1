"""Noticing that somebody else changed ``p.grad`` while it is only the newest part of a gradient."""

from __future__ import annotations

from torch import Tensor


class GradientWatch:
    """Whether ``p.grad`` still is what autograd wrote, told by its address and version: no host synchronisation.

    Earlier micro-batches' gradients are added up in fp32 outside ``p.grad``. Whoever scales, clips, zeroes or reduces
    ``p.grad`` then reaches the newest one alone: ``DistributedDataParallel`` with ``no_sync``, to begin with, and ranks
    would drift apart. Changing each micro-batch's in its turn is another matter, and sound.
    """

    def __init__(self) -> None:
        self._written: dict[Tensor, tuple[int, int]] = {}
        self._added_untouched: set[Tensor] = set()

    def written(self, parameter: Tensor) -> None:
        """Autograd has just written or added to ``p.grad``."""
        if parameter.grad is not None:
            self._written[parameter] = _identity(parameter.grad)

    def added(self, parameter: Tensor, untouched: bool) -> None:
        """What stood in ``p.grad``, ``untouched`` or not, is in the sum of earlier micro-batches now."""
        if untouched:
            self._added_untouched.add(parameter)

    def untouched(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is there and as autograd left it."""
        return parameter.grad is not None and self._written.get(parameter) == _identity(parameter.grad)

    def refuse_change(self, parameter: Tensor) -> None:
        """Called before ``p.grad`` is added or taken.

        Raises:
            RuntimeError: it was changed or exchanged, and one before it was not.
        """
        changed = parameter.grad is not None and parameter in self._written and not self.untouched(parameter)
        if not changed or parameter not in self._added_untouched:
            return
        raise RuntimeError(
            f"p.grad of a parameter of shape {tuple(parameter.shape)} was changed after backward. It holds the newest "
            "micro-batch only; those before it are added up in fp32 outside, and were not changed with it. To give "
            "gradients up call optimizer.zero_grad(); clip with the strategy's clipping.max_norm; scale the losses, "
            "not the gradients; let a strategy with sharding.kind ddp wrap the model, instead of a "
            "DistributedDataParallel of your own. Or have everything added up in p.grad: precision.reduce 'parameters' "
            "(reduce_float32=False)"
        )

    def forget(self, parameter: Tensor) -> None:
        """The parameter's gradients have been taken."""
        self._written.pop(parameter, None)
        self._added_untouched.discard(parameter)

    def clear(self) -> None:
        """All gradients have been dropped."""
        self._written.clear()
        self._added_untouched.clear()


def _identity(gradient: Tensor) -> tuple[int, int]:
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
