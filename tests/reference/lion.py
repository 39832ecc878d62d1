"""A user's own element-wise optimizer, as one finds it in papers' repositories: no fused, no foreach, no step count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                direction = torch.sign(state["exp_avg"] * beta1 + param.grad * (1 - beta1))
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss
