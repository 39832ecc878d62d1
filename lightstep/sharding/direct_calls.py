"""DDP for forwards that call the user's module, not the ``DistributedDataParallel`` around it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.sharding.hooks import ModuleHook

__all__ = ["DirectCalls"]


class DirectCalls:
    """Makes ``replica`` reduce the gradients of forwards that call ``replica.module``, as torch's ``replicate`` does.

    Loops that ignore the return value of ``prepare_model`` work under strategies that shard in place, and so they do
    here. Forwards in evaluation mode or without gradients communicate nothing: some ranks may run them alone.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = weakref.ref(replica)
        self._routed = False
        replica.module.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True)
        replica.module.register_forward_hook(ModuleHook(self._after))

    def belongs_to(self, replica: DistributedDataParallel | None) -> bool:
        """Whether forwards are passed on to this replica."""
        return self._replica() is replica

    def _before(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        replica = self._replica()
        called = replica is not None and DistributedDataParallel._active_ddp_module is not replica
        self._routed = called and module.training and torch.is_grad_enabled()
        return replica._pre_forward(*arguments, **keywords) if replica is not None and self._routed else None

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        replica, routed = self._replica(), self._routed
        self._routed = False
        return replica._post_forward(output) if replica is not None and routed else None
