"""What strategies of several processes share: the process group, and where this process stands in it."""

from __future__ import annotations

import os
import shlex
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.config import ConfigError, StrategyConfig
from lightstep.distributed import Replicas, differs_across_ranks, end_process_group, initialized, is_sharded
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.mixed_precision import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import Place
from lightstep.precision.gradients import ReducedGradients
from lightstep.state.backend import StateBackend
from lightstep.state.replicas import SharedByReplicas
from lightstep.state.stream import StreamBackend
from lightstep.strategy.base import ModelSource, Strategy

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupStrategy(Strategy):
    """A strategy over the ranks of the default process group.

    The group is the user's, or is started from torchrun's environment by :meth:`prepare_model` and ended by
    :meth:`close`.
    """

    def __init__(self, config: StrategyConfig, name: str = "strategy") -> None:
        super().__init__(config, name)
        self._started = False

    def _make_backend(self, model: nn.Module) -> StateBackend:
        backend = super()._make_backend(model)
        alike = not any(differs_across_ranks(parameter) for parameter in model.parameters())
        replicas = self._replicas(model) if isinstance(backend, StreamBackend) and alike else None
        return backend if replicas is None or replicas.size == 1 else SharedByReplicas(backend, replicas)

    @abstractmethod
    def _replicas(self, model: nn.Module) -> Replicas | None:
        """The ranks that hold the same part of a prepared model as this one; ``None`` where no other does."""

    @property
    def _sends_beside(self) -> bool:
        """Whether replicas send each other weights while the model goes on."""
        return self.config.optimizer_state.update != "at_step"

    def _places(self, model: nn.Module) -> Mapping[Tensor, Place]:
        for optimizer in self._optimizers_of(model):  # the model may have been sharded by hand since
            self._connect(model, optimizer)
        return super()._places(model)

    def _connect(self, model: nn.Module, optimizer: BaseOptimizer) -> None:
        gradients = self._fp32_gradients(model)
        if gradients is not None and isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.gradients.comes_from(gradients)

    @abstractmethod
    def _fp32_gradients(self, model: nn.Module) -> ReducedGradients | None:
        """What takes this model's gradients out of the reduction; ``None`` where ``p.grad`` is what it should be."""

    def prepare_model(self, model: ModelSource, role: str = "trainer", weights: str | Path | None = None) -> nn.Module:
        self.start()
        prepared = super().prepare_model(model, role, weights)
        self._fp32_gradients(prepared)  # parameters of an optimizer of another model may be exchanged for this one's
        for optimizer in self._optimizers_of(prepared):
            self._connect(prepared, optimizer)
        return prepared

    def start(self) -> None:
        """Make sure there is a default process group.

        Raises:
            ConfigError: there is none, and this process was not started by torchrun.
        """
        if initialized():
            return
        missing = [name for name in _TORCHRUN if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{self.name}: sharding.kind {self.config.sharding.kind} needs a process per device, and this one has "
                f"no {missing[0]} in its environment; start it with: {_command()}"
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo")
        self._started = True

    def close(self) -> None:
        """End the process group, if this strategy started it."""
        if self._started and initialized():
            end_process_group()
        self._started = False

    @property
    def device(self) -> torch.device:
        """This process's GPU if the process group can use it, else the CPU."""
        on_gpu = torch.cuda.is_available() and (not initialized() or _has_nccl())
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def rank(self) -> int:
        return dist.get_rank() if initialized() else int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if initialized() else int(os.environ.get("WORLD_SIZE", "1"))


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
    """Every rank of the group gets its first rank's values; in place, any dtype, one tensor after the other."""
    for tensor in tensors:
        if tensor.numel():
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)


def _has_nccl() -> bool:
    backends = dist.get_backend_config()
    return "nccl" in backends


def _command() -> str:
    """What to type instead: torchrun with this process's program and arguments."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return f"torchrun --nproc-per-node {max(devices, 2)} {shlex.join(_program())}"


def _program() -> list[str]:
    """The module or script that runs, with its arguments; a name to fill in where there is neither (``-c``, stdin)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # that is what a folder or a zip file with a __main__.py says
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    named = getattr(main, "__file__", None) is not None and sys.argv[0] not in ("", "-", "-c")
    return sys.argv if named else ["train.py"]
