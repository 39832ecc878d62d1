"""Several torch optimizers as one, the textbook way: each has its groups, and ``step()`` runs one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.plain_loop import has_fused


class SeveralClasses:
    """One optimizer for each class that ``groups`` name (``"optimizer_class"``); fused where torch has it."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], **_: Any) -> None:
        classes = list(dict.fromkeys(group["optimizer_class"] for group in groups))
        self.optimizers: list[torch.optim.Optimizer] = []
        for chosen in classes:
            own = [
                {key: value for key, value in group.items() if key != "optimizer_class"}
                for group in groups
                if group["optimizer_class"] is chosen
            ]
            fused = {"fused": True} if has_fused(chosen, own[0]["params"][0].device) else {}
            self.optimizers.append(chosen(own, **fused))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
