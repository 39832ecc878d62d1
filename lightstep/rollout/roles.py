"""Roles in reinforcement learning: of ranks (which train, which generate) and of models."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightstep.config import ConfigError, Rollout
from lightstep.distributed import form_role_group, initialized
from lightstep.sharding.dtypes import planned_dtypes
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.preparation import cast_tensors, materialise
from lightstep.sharding.prepared_model import PreparedModel

Role = Literal["trainer", "rollout", "reference"]

ROLES: tuple[Role, ...] = ("trainer", "rollout", "reference")

_DESCRIPTIONS = {
    "rollout": "a rollout model: it holds the inference weights and nothing else",
    "reference": "a reference model: it has no gradients and no optimizer",
}


def check_role(role: str) -> Role:
    """``role``, if it is one of :data:`ROLES`.

    Raises:
        ConfigError: it is not.
    """
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(map(repr, ROLES))}")
    return role


class Roles:
    """Which ranks have which role, from ``roles.rollout`` and the number of processes.

    Args:
        config: ``roles.rollout`` in the strategy file.
        name: the strategy's name, for errors.
    """

    def __init__(self, config: Rollout, name: str) -> None:
        self._config = config
        self._name = name

    @property
    def asynchronous(self) -> bool:
        """Whether some ranks only generate."""
        return self._config.mode == "async"

    @property
    def rollout_ranks(self) -> tuple[int, ...]:
        """The ranks of the default process group that only generate; none if the trainers generate.

        Raises:
            ConfigError: ``roles.rollout.ranks`` names a rank that does not exist, or leaves none to train.
        """
        if not self.asynchronous:
            return ()
        size, configured = _rank_and_size()[1], self._config.ranks or 1
        ranks = tuple(configured) if isinstance(configured, list) else tuple(range(max(size - configured, 0), size))
        if max(ranks) >= size or len(ranks) >= size:
            raise ConfigError(
                f"{self._name}: roles.rollout.ranks is {configured} and {size} {'is' if size == 1 else 'are'} running; "
                "at least one has to be left to train. Start more processes (torchrun --nproc-per-node), or set fewer"
            )
        return ranks

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        """The ranks of the default process group that train."""
        generating = set(self.rollout_ranks)
        return tuple(rank for rank in range(_rank_and_size()[1]) if rank not in generating)

    @property
    def own_role(self) -> Role:
        """This process's role."""
        return "rollout" if _rank_and_size()[0] in self.rollout_ranks else "trainer"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process's role."""
        return self.rollout_ranks if self.own_role == "rollout" else self.trainer_ranks

    @property
    def rank(self) -> int:
        """This process's rank among the ranks of its role."""
        return self.ranks.index(_rank_and_size()[0])

    def form_group(self) -> None:
        """Create the process group of each role. Needs the default process group.

        Raises:
            ConfigError: another strategy of this process has other roles.
        """
        ranks = self.ranks
        try:
            form_role_group(ranks)
        except ValueError as error:
            raise ConfigError(
                f"{self._name}: {error}; give every strategy of a program the same roles.rollout"
            ) from error

    # -- models

    def check(self, role: Role) -> None:
        """Check that this process may prepare a model for ``role``.

        Raises:
            ConfigError: this rank has another role.
        """
        if self.asynchronous and role != "reference" and role != self.own_role:
            raise ConfigError(
                f"{self._name}: prepare_model(role={role!r}) on rank {_rank_and_size()[0]}, whose role is "
                f"{self.own_role!r} (roles.rollout.ranks: {list(self.rollout_ranks)}); strategy.role says which role a "
                "process has"
            )

    def require_trainer(
        self, what: str, instead: str, model: nn.Module | None = None, allowed: tuple[Role, ...] = ()
    ) -> None:
        """Check that the model is trained, or without a role that this process is a trainer.

        Args:
            what: the call that needs a trainer.
            instead: what to do instead, for the error.
            model: prepared by the strategy; ``None`` checks only the process.
            allowed: further roles of models for which the call is allowed.

        Raises:
            ConfigError: the message has the role.
        """
        role = None if model is None else PreparedModel.of(model).role
        if model is not None and role in _DESCRIPTIONS and role not in allowed:
            kind = type(unwrap_model(model)).__name__
            raise ConfigError(f"{self._name}: {what}: this {kind} is {_DESCRIPTIONS[role]}; {instead}")
        if role is None and self.own_role == "rollout":
            raise ConfigError(
                f"{self._name}: {what} on rank {_rank_and_size()[0]}, which is a rollout worker: it has no trainer's "
                f"model, gradients or optimizer; {instead}"
            )


def prepare_inference(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Cast the whole model to ``dtype`` and move it to ``device``, without gradients, in evaluation mode."""
    cast_tensors(model, planned_dtypes(model, dtype))  # before the move: the device needs no memory for a wider dtype
    return materialise(model, device).requires_grad_(False).eval()


def fsdp_version(model: nn.Module) -> int:
    """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 for one that is not sharded."""
    modules = list(model.modules())
    if any(isinstance(module, FSDPModule) for module in modules):
        return 2
    return int(any(isinstance(module, FullyShardedDataParallel) for module in modules))


def _rank_and_size() -> tuple[int, int]:
    """Rank and number of processes, from the default process group or from torchrun's environment."""
    if initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
