"""Training forwards of the user's module itself, where nobody kept the ``DistributedDataParallel`` around it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightstep.sharding.hooks import ModuleHook

__all__ = ["DirectCalls"]


class DirectCalls:
    """Has ``replica`` reduce the gradients of forwards that call ``replica.module``, as torch's ``replicate`` does.

    Loops that drop what ``prepare_model`` returns are right under strategies that shard in place, and so they are here.
    Forwards in evaluation mode, or without gradients, may be some ranks' alone: they communicate nothing.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = weakref.ref(replica)
        self._routed = False
        replica.module.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True)
        replica.module.register_forward_hook(ModuleHook(self._after))

    def reach(self, replica: DistributedDataParallel | None) -> bool:
        """Whether it is this replica that is told."""
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
