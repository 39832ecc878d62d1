"""Several torch optimizers as one, the textbook way: each has its groups, and ``step()`` runs one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.plain_loop import has_fused


class SeveralClasses:
    """One optimizer for each class that ``groups`` name (``"optimizer_class"``); fused where torch has it."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], **_: Any) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.param_groups: list[dict[str, Any]] = []
        self._before: list[Callable[..., object]] = []
        self._after: list[Callable[..., object]] = []
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        chosen = group["optimizer_class"]
        own = {key: value for key, value in group.items() if key != "optimizer_class"}
        known = [optimizer for optimizer in self.optimizers if type(optimizer) is chosen]
        if known:
            known[0].add_param_group(own)
        else:
            fused = {"fused": True} if has_fused(chosen, own["params"][0].device) else {}
            known = [chosen([own], **fused)]
            self.optimizers += known
        self.param_groups.append(known[0].param_groups[-1])

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def register_step_pre_hook(self, hook: Callable[..., object]) -> None:
        self._before.append(hook)

    def register_step_post_hook(self, hook: Callable[..., object]) -> None:
        self._after.append(hook)

    def step(self) -> None:
        for hook in self._before:
            hook()
        for optimizer in self.optimizers:
            optimizer.step()
        for hook in self._after:
            hook()
