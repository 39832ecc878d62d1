"""The model that a DeepSpeed strategy returns: its forward runs through the engine once there is one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn


class EngineModel(nn.Module):
    """Wraps the user's module, and has its attributes.

    DeepSpeed makes its engine together with the optimizer, after the model has been prepared.

    Args:
        module: the user's module.
        partitioned: its weights are divided among the ranks already, and only an engine can gather them.
    """

    def __init__(self, module: nn.Module, partitioned: bool = False) -> None:
        super().__init__()
        self.module = module
        self.partitioned = partitioned
        self._hidden: list[Any] = []  # in a list: an engine is a module, and would become a second path to every weight

    @property
    def engine(self) -> Any:
        """The ``DeepSpeedEngine``, or ``None`` before ``create_optimizer``."""
        return self._hidden[0] if self._hidden else None

    def attach(self, engine: Any) -> None:
        """Run forwards through ``engine`` from now on."""
        self._hidden[:] = [engine]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self.engine is not None:
            return self.engine(*arguments, **keywords)
        if self.partitioned:
            raise RuntimeError(
                "the model's weights are divided among the ranks (sharding.stage 3), and DeepSpeed gathers them once "
                "it has an engine: call strategy.create_optimizer(model, ...) before the first forward"
            )
        return self.module(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def tell_deepspeed_where_it_is() -> None:
    """Set DeepSpeed's accelerator to the CPU if there is no other; without this it warns on import.

    transformers imports an installed DeepSpeed when it saves a model.
    """
    if torch.accelerator.current_accelerator(check_available=True) is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
