"""A strategy's checkpoints: checks roles, and saves and loads between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightstep import checkpoint
from lightstep.checkpoint.background import PendingSave
from lightstep.optimizer.base import BaseOptimizer
from lightstep.rollout.roles import Role, Roles
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

_SAVED_BY_TRAINERS = "a checkpoint is saved by the ranks that train (export_model writes these weights alone)"


class Checkpoints:
    """Saves and loads checkpoints for a strategy.

    Args:
        roles: the strategy's.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None,
        scheduler: Any,
        extra: Mapping[str, Any] | None,
        **options: Any,
    ) -> PendingSave | None:
        """See ``Strategy.save_checkpoint``."""
        self._roles.require_trainer("save_checkpoint", _SAVED_BY_TRAINERS, model, allowed=("reference",))
        with PreparedModel.of(model).between_steps("save_checkpoint()"):
            return checkpoint.save_checkpoint(path, model, optimizer, scheduler, extra, **options)

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None,
        scheduler: Any,
        trainable_only: bool | None,
    ) -> dict[str, Any]:
        """See ``Strategy.load_checkpoint``."""
        allowed: tuple[Role, ...] = ("reference", "rollout") if optimizer is None else ()
        self._roles.require_trainer("load_checkpoint with an optimizer", "leave the optimizer out", model, allowed)
        record = PreparedModel.of(model)
        record.recover()
        with record.between_steps("load_checkpoint()"):
            return checkpoint.load_checkpoint(path, model, optimizer, scheduler, trainable_only=trainable_only)

    def export(self, path: str | Path, model: nn.Module, tokenizer: Any) -> None:
        """See ``Strategy.export_model``."""
        with PreparedModel.of(model).between_steps("export_model()"):
            checkpoint.export_model(path, unwrap_model(model), tokenizer)
