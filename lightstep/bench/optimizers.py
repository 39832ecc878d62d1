"""`--optimizer`: what everybody steps with, AdamW alone or Muon on the hidden matrices and AdamW on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.bench.contender import ADAMW
from lightstep.optimizer.rules import Rule

MUON: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"class": "AdamW", **ADAMW},
    "muon": {"class": "Muon + AdamW", "muon": MUON, "adamw": ADAMW},
}
"""What the JSON file says of each."""


def arguments(name: str) -> dict[str, Any]:
    """Of `strategy.create_optimizer`."""
    if name == "adamw":
        return {"optimizer_class": torch.optim.AdamW, **ADAMW}
    matrices = Rule(torch.optim.Muon, kinds="hidden_matrices", **MUON)
    return {"rules": [matrices, Rule(torch.optim.AdamW, kinds="rest", **ADAMW)]}


def by_hand(name: str, model: nn.Module, updated: Sequence[Tensor], **adamw: Any) -> list[torch.optim.Optimizer]:
    """torch's own on `updated`, which stand for the model's parameters in their order.

    Args:
        adamw: which implementation of AdamW.
    """
    if name == "adamw":
        return [torch.optim.AdamW(updated, **adamw, **ADAMW)]
    matrices, rest = matrices_and_rest(model, updated)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **adamw, **ADAMW)]


def matrices_and_rest(model: nn.Module, updated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What stands for hidden matrices, and for the other parameters."""
    pairs = list(zip(updated, hidden_matrices(model), strict=True))
    return [tensor for tensor, hidden in pairs if hidden], [tensor for tensor, hidden in pairs if not hidden]


def hidden_matrices(model: nn.Module) -> list[bool]:
    """Of each parameter, whether it is a matrix inside a block."""
    inside = {id(parameter) for parameter in model.layers.parameters()}  # type: ignore[union-attr]
    return [parameter.dim() == 2 and id(parameter) in inside for parameter in model.parameters()]
