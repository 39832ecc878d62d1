"""A table of the optimizer class and settings that each parameter of a model gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightstep.optimizer.rules import described_parameters

__all__ = ["param_table"]


class SimilarParameters(NamedTuple):
    """Parameters of one shape and kind, whose names differ only in numbers.

    Attributes:
        names: the common name, with ``*`` for numbers.
    """

    names: str
    shape: tuple[int, ...]
    kind: str


def param_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Each parameter group of an optimizer with its class, learning rate, weight decay and parameters.

    Parameters of one shape and kind (``Rule(kinds=...)``) whose names differ only in numbers share a line. Those in no
    group are listed at the end.

    Args:
        model: the model without wrappers (``strategy.unwrap_model(model)``).
        optimizer: what ``strategy.create_optimizer`` returned, or any other over the model's parameters.
    """
    own = getattr(optimizer, "optimizer_class", type(optimizer)).__name__
    titles = [*(_title(group, own) for group in optimizer.param_groups), "in no group"]
    group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: list[dict[SimilarParameters, int]] = [{} for _ in titles]
    elements = [0] * len(titles)
    for name, parameter, kind in described_parameters(model):
        number = group_of.get(parameter, len(titles) - 1)
        alike = SimilarParameters(re.sub(r"\d+", "*", name), tuple(parameter.shape), kind)
        found[number][alike] = found[number].get(alike, 0) + 1
        elements[number] += parameter.numel()
    lines = []
    for number, title in enumerate(titles[: None if found[-1] else -1]):
        lines.append(f"{title}, {elements[number]:,} elements")
        for alike, count in found[number].items():
            times = f" ({count})" if count > 1 else ""
            lines.append(f"  {alike.kind:<16}{'×'.join(map(str, alike.shape)):<14}{alike.names}{times}")
    return "\n".join(lines)


def _title(group: Mapping[str, Any], own: str) -> str:
    name = str(group.get("optimizer_class", own)).rpartition(".")[2]
    settings = {"lr": group.get("lr"), "weight_decay": group.get("weight_decay", 0)}
    shown = [f"{key} {float(value):g}" for key, value in settings.items() if value is not None]
    return f"{name}: {', '.join(shown)}"
