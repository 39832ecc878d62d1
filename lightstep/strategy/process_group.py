"""The base class of strategies with several processes: process group, rank and device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.config import ConfigError
from lightstep.distributed import Replicas, differs_across_ranks, initialized, is_sharded, role_group
from lightstep.strategy.base import Strategy


class ProcessGroupStrategy(Strategy):
    """A strategy over the ranks of the default process group, or over those of them that train.

    If the user has not initialised the process group, :meth:`prepare_model` does so from torchrun's environment, and
    :meth:`close` ends it.
    """

    def _sharing_replicas(self, model: nn.Module) -> Replicas | None:
        """``None`` also where weights rest on the host, which replicas could not send each other from there."""
        alike = not any(differs_across_ranks(parameter) for parameter in model.parameters())
        on_host = self.config.weights.placement == "host"
        if self.config.optimizer_state.backend != "stream" or on_host or not alike:
            return None
        replicas = self._replicas(model)
        return None if replicas is None or replicas.size == 1 else replicas

    @abstractmethod
    def _replicas(self, model: nn.Module) -> Replicas | None:
        """The ranks that have the same shard of a prepared model as this one; ``None`` if there are no others."""

    @property
    def _overlaps_sends(self) -> bool:
        """Whether replicas send each other updated weights while the model computes."""
        return self.config.optimizer_state.update != "at_step"

    @property
    def _process_group_reason(self) -> str | None:
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
    """Refuse experts that are plain parameters: all ranks would get the first rank's.

    Raises:
        ConfigError: a parameter with the attribute ``differs_across_ranks`` is not a DTensor.
    """
    for name, parameter in parameters.items():
        if getattr(parameter, "differs_across_ranks", False) and not is_sharded(parameter):
            raise ConfigError(
                f"{strategy.name}: {name} says that it differs across ranks, and sharding.kind "
                f"{strategy.config.sharding.kind} gives the first rank's to all; keep it out: with fully_shard over a "
                "mesh of its own under fsdp2, in the model's _ddp_params_and_buffers_to_ignore under ddp"
            )


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Copy the first rank's values to all ranks of the group, in place, one tensor at a time, in any dtype.

    Args:
        group: default: the ranks of this process's role.
    """
    group = role_group() if group is None else group
    for tensor in tensors:
        if tensor.numel():
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend_config()
