"""`--optimizer`: AdamW, or Muon for the hidden matrices and AdamW for the rest."""

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
"""Name: its entry in the JSON file."""


def optimizer_arguments(name: str) -> dict[str, Any]:
    """Keyword arguments of `strategy.create_optimizer`."""
    if name == "adamw":
        return {"optimizer_class": torch.optim.AdamW, **ADAMW}
    matrices = Rule(torch.optim.Muon, kinds="hidden_matrices", **MUON)
    return {"rules": [matrices, Rule(torch.optim.AdamW, kinds="rest", **ADAMW)]}


def torch_optimizers(
    name: str, model: nn.Module, updated: Sequence[Tensor], **adamw: Any
) -> list[torch.optim.Optimizer]:
    """torch's optimizers on `updated`, one tensor for each parameter of the model, in its order.

    Args:
        adamw: the implementation of AdamW, for example `fused=True`.
    """
    if name == "adamw":
        return [torch.optim.AdamW(updated, **adamw, **ADAMW)]
    matrices, rest = split_matrices(model, updated)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **adamw, **ADAMW)]


def split_matrices(model: nn.Module, updated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split `updated` into the tensors of hidden matrices and those of all other parameters."""
    pairs = list(zip(updated, hidden_matrices(model), strict=True))
    return [tensor for tensor, hidden in pairs if hidden], [tensor for tensor, hidden in pairs if not hidden]


def hidden_matrices(model: nn.Module) -> list[bool]:
    """For each parameter, whether it is a matrix inside a block."""
    inside = {id(parameter) for parameter in model.layers.parameters()}  # type: ignore[union-attr]
    return [parameter.dim() == 2 and id(parameter) in inside for parameter in model.parameters()]
