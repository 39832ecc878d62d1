"""Optimizer classes as users write them: for each parameter with a gradient a few lines, and no fused twin of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class EachParameter(torch.optim.Optimizer):
    """Calls :meth:`update` for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group, self.state[p])

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class Adding(EachParameter):
    """Every element gets a number, also those between the parameters."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total: Tensor = state.setdefault("total", torch.zeros_like(p))
        total.add_(grad).add_(1)
        p.add_(total, alpha=0.01)


class Growing(EachParameter):
    """Counts steps in an attribute of its own, and starts to keep a second entry in a parameter's fourth update."""

    whole_tensors = False

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        state["first"] = state.get("first", torch.zeros_like(p)).add(grad)
        if state["n"] > 3:
            state["second"] = state.get("second", torch.zeros_like(p)).add(state["first"], alpha=0.1)
        p.add_(state["first"], alpha=-1e-3 / self.count).sub_(state.get("second", torch.zeros_like(p)), alpha=1e-3)


class FailingOnce(torch.optim.AdamW):
    """Fails in the update that :attr:`left` counts down to."""

    left = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        FailingOnce.left -= 1
        super().step()
        if FailingOnce.left == -1:
            raise ValueError("the base optimizer fails")
