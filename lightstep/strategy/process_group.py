"""What strategies of several processes share: the process group, and where this process stands in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.config import ConfigError
from lightstep.distributed import Replicas, differs_across_ranks, initialized, is_sharded, role_group
from lightstep.state.backend import StateBackend
from lightstep.state.replicas import SharedByReplicas
from lightstep.state.stream import StreamBackend
from lightstep.strategy.base import Strategy


class ProcessGroupStrategy(Strategy):
    """A strategy over the ranks of the default process group, or over those of them that train.

    The group is the user's, or is started from torchrun's environment by :meth:`prepare_model` and ended by
    :meth:`close`.
    """

    _reduces_in_backward: ClassVar[bool] = True
    """Whether gradients are reduced layer by layer, and are there while backward goes on."""

    def _make_backend(self, model: nn.Module) -> StateBackend:
        backend = super()._make_backend(model)
        alike = not any(differs_across_ranks(parameter) for parameter in model.parameters())
        replicas = self._replicas(model) if isinstance(backend, StreamBackend) and alike else None
        if replicas is None or replicas.size == 1:
            return backend
        return SharedByReplicas(backend, replicas, self._reduces_in_backward)

    @abstractmethod
    def _replicas(self, model: nn.Module) -> Replicas | None:
        """The ranks that hold the same part of a prepared model as this one; ``None`` where no other does."""

    @property
    def _sends_beside(self) -> bool:
        """Whether replicas send each other weights while the model goes on."""
        return self.config.optimizer_state.update != "at_step"

    @property
    def _needs_process_group(self) -> str | None:
        return f"sharding.kind {self.config.sharding.kind} needs a process per device"

    @property
    def device(self) -> torch.device:
        """This process's GPU if the process group can use it, else the CPU."""
        on_gpu = torch.cuda.is_available() and (not initialized() or _has_nccl())
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def rank(self) -> int:
        return self.roles.rank

    @property
    def world_size(self) -> int:
        return len(self.roles.ranks)


def refuse_experts(strategy: Strategy, parameters: Mapping[str, Tensor]) -> None:
    """All ranks would get the first one's.

    Raises:
        ConfigError: a plain parameter says that it differs across ranks.
    """
    for name, parameter in parameters.items():
        if getattr(parameter, "differs_across_ranks", False) and not is_sharded(parameter):
            raise ConfigError(
                f"{strategy.name}: {name} says that it differs across ranks, and sharding.kind "
                f"{strategy.config.sharding.kind} gives the first rank's to all; keep it out: with fully_shard over a "
                "mesh of its own under fsdp2, in the model's _ddp_params_and_buffers_to_ignore under ddp"
            )


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Every rank of the group (this role's ranks) gets its first rank's values; in place, any dtype, one by one."""
    group = role_group() if group is None else group
    for tensor in tensors:
        if tensor.numel():
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)


def _has_nccl() -> bool:
    backends = dist.get_backend_config()
    return "nccl" in backends
