"""Noticing that somebody else reduces gradients over ranks, and has seen only the last of several micro-batches."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from lightstep.distributed import world_size


class ForeignReduction:
    """Whether ``p.grad`` still is what autograd wrote, told by its address and version: no host synchronisation.

    ``DistributedDataParallel`` replaces or overwrites ``p.grad`` when it reduces it, and leaves it alone under
    ``no_sync``. Earlier micro-batches' gradients that were moved away untouched, with a last one that was not, are this
    rank's own, and ranks would drift apart.
    """

    def __init__(self) -> None:
        self._written: dict[Tensor, tuple[int, int]] = {}
        self._local: set[Tensor] = set()

    def watch(self, parameter: Tensor) -> RemovableHandle:
        """Remember from now on what autograd leaves in ``p.grad``."""
        check_ref = weakref.ref(self)

        @unserializable_hook
        def hook(leaf: Tensor) -> None:
            check = check_ref()
            if check is not None and leaf.grad is not None and world_size() > 1:
                check._written[leaf] = _identity(leaf.grad)

        return parameter.register_post_accumulate_grad_hook(hook)

    def moved_away(self, parameter: Tensor) -> None:
        """Called before an earlier micro-batch's ``p.grad`` is moved into a sum."""
        if self.untouched(parameter):
            self._local.add(parameter)

    def check(self, parameter: Tensor) -> None:
        """Called with the last micro-batch's ``p.grad`` in place.

        Raises:
            RuntimeError: it was reduced, and those before it were not.
        """
        here = parameter.grad is not None and parameter in self._written
        if here and parameter in self._local and not self.untouched(parameter):
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was changed after the last backward, and those of "
                "earlier micro-batches, which are added up in fp32 outside p.grad, were not: a DistributedDataParallel "
                "that lightstep does not know has reduced only the last one. Let a strategy with sharding.kind ddp "
                "wrap the model, or add up in p.grad: precision.reduce 'parameters' (reduce_float32=False)"
            )

    def forget(self, parameter: Tensor) -> None:
        """The parameter's gradients have been taken."""
        self._written.pop(parameter, None)
        self._local.discard(parameter)

    def clear(self) -> None:
        """All gradients have been dropped."""
        self._written.clear()
        self._local.clear()

    def untouched(self, parameter: Tensor) -> bool:
        """Whether ``p.grad`` is there and as autograd left it."""
        return parameter.grad is not None and self._written.get(parameter) == _identity(parameter.grad)


def _identity(gradient: Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version
