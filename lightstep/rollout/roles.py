"""Who does what in reinforcement learning: ranks that train, ranks that generate, and models that nobody trains."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightstep.config import ConfigError, Rollout
from lightstep.distributed import form_role_group, initialized
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.preparation import cast_parameters, materialise
from lightstep.sharding.prepared_model import PreparedModel

Role = Literal["trainer", "rollout", "reference"]

ROLES: tuple[Role, ...] = ("trainer", "rollout", "reference")

_WHAT_IT_IS = {
    "rollout": "a rollout model: it holds the inference weights and nothing else",
    "reference": "a reference model: it has no gradients and no optimizer",
}


def known_role(role: str) -> Role:
    """``role``, if there is such a one.

    Raises:
        ConfigError: there is not.
    """
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(map(repr, ROLES))}")
    return role


class Roles:
    """Which ranks have which role, from ``roles.rollout`` and the number of processes; and which model has which.

    Args:
        config: the section of the strategy file.
        name: the strategy's, for errors.
    """

    def __init__(self, config: Rollout, name: str) -> None:
        self._config = config
        self._name = name

    @property
    def asynchronous(self) -> bool:
        """Whether some ranks generate and do nothing else."""
        return self._config.mode == "async"

    @property
    def rollout_ranks(self) -> tuple[int, ...]:
        """The ranks that generate, by their numbers in the default process group; none where the trainers do.

        Raises:
            ConfigError: the strategy file names more ranks than there are, or leaves none to train.
        """
        if not self.asynchronous:
            return ()
        size, asked = _rank_and_size()[1], self._config.ranks or 1
        chosen = tuple(asked) if isinstance(asked, list) else tuple(range(max(size - asked, 0), size))
        if max(chosen) >= size or len(chosen) >= size:
            raise ConfigError(
                f"{self._name}: roles.rollout.ranks is {asked} and {size} {'is' if size == 1 else 'are'} running; at "
                "least one has to be left to train. Start more processes (torchrun --nproc-per-node), or set fewer"
            )
        return chosen

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        """The ranks that train, by their numbers in the default process group."""
        generating = set(self.rollout_ranks)
        return tuple(rank for rank in range(_rank_and_size()[1]) if rank not in generating)

    @property
    def mine(self) -> Role:
        """This process's role."""
        return "rollout" if _rank_and_size()[0] in self.rollout_ranks else "trainer"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process's role."""
        return self.rollout_ranks if self.mine == "rollout" else self.trainer_ranks

    @property
    def rank(self) -> int:
        """This process's number among those of its role."""
        return self.ranks.index(_rank_and_size()[0])

    def form_group(self) -> None:
        """Have the ranks of each role find each other. The default process group is there.

        Raises:
            ConfigError: roles were given out differently before.
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
        """Raise if this process may not prepare a model for ``role``.

        Raises:
            ConfigError: it is another rank's.
        """
        if self.asynchronous and role != "reference" and role != self.mine:
            raise ConfigError(
                f"{self._name}: prepare_model(role={role!r}) on rank {_rank_and_size()[0]}, whose role is "
                f"{self.mine!r} (roles.rollout.ranks: {list(self.rollout_ranks)}); strategy.role says which role a "
                "process has"
            )

    def refuse(self, what: str, instead: str, model: nn.Module | None = None, but: tuple[Role, ...] = ()) -> None:
        """Raise where this process, or this model, does not train.

        Args:
            what: the call that is refused.
            instead: what to do.
            model: prepared by the strategy; ``None`` to ask for the process only.
            but: roles of models for which it is fine.

        Raises:
            ConfigError: with the role.
        """
        role = None if model is None else PreparedModel.of(model).role
        if role in _WHAT_IT_IS and role not in but:
            raise ConfigError(f"{self._name}: {what}: this {_named(model)} is {_WHAT_IT_IS[role]}; {instead}")
        if self.mine == "rollout" and role is None:
            raise ConfigError(
                f"{self._name}: {what} on rank {_rank_and_size()[0]}, which is a rollout worker: it has no trainer's "
                f"model, gradients or optimizer; {instead}"
            )


def prepare_inference(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The whole model on this device in ``dtype``, once, without gradients, in evaluation mode."""
    cast_parameters(model, dtype)  # first: the device never holds them in a wider dtype
    return materialise(model, device).requires_grad_(False).eval()


def fsdp_version(model: nn.Module) -> int:
    """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 for one that is not sharded."""
    modules = list(model.modules())
    if any(isinstance(module, FSDPModule) for module in modules):
        return 2
    return int(any(isinstance(module, FullyShardedDataParallel) for module in modules))


def _named(model: nn.Module | None) -> str:
    return type(unwrap_model(model)).__name__ if model is not None else "process"


def _rank_and_size() -> tuple[int, int]:
    """Rank and number of processes: of the default process group, or as torchrun says."""
    if initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
