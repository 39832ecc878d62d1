"""``lightstep params``: the optimizer class and settings of each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightstep.optimizer.rules import described_parameters
from lightstep.strategy import Strategy
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.model import load_tokenizer, make_model, model_config
from lightstep.trainer.optimization import make_optimizer


class SimilarParameters(NamedTuple):
    """Parameters of one shape and kind, whose names differ only in numbers.

    Attributes:
        names: the common name, with ``*`` for numbers.
    """

    names: str
    shape: tuple[int, ...]
    kind: str


def describe_params(config: TrainConfig) -> Iterator[str]:
    """Lines for each parameter group of a training file and its parameters. No weights are loaded.

    Raises:
        ConfigError: as ``lightstep train`` would.
    """
    tokenizer = load_tokenizer(config.model)
    model = make_model(config.model, model_config(config.model, tokenizer, config.batch.length), meta=True)
    with Strategy.load("fp32") as strategy:
        optimizer = make_optimizer(strategy, model, config.optimizer)
        yield from _lines(model, optimizer.param_groups, config.optimizer.name)


def _lines(model: nn.Module, groups: list[dict[str, Any]], default: str) -> Iterator[str]:
    group_of = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
    found: dict[int, dict[SimilarParameters, int]] = {number: {} for number in range(len(groups))}
    elements = dict.fromkeys(found, 0)
    for name, parameter, kind in described_parameters(model):
        number = group_of[parameter]
        alike = SimilarParameters(re.sub(r"\d+", "*", name), tuple(parameter.shape), kind)
        found[number][alike] = found[number].get(alike, 0) + 1
        elements[number] += parameter.numel()
    for number, group in enumerate(groups):
        yield f"{_class_of(group, default)}, {elements[number]:,} elements"
        for alike, count in found[number].items():
            times = f" ({count})" if count > 1 else ""
            yield f"  {alike.kind:<16}{'×'.join(map(str, alike.shape)):<14}{alike.names}{times}"


def _class_of(group: Mapping[str, Any], default: str) -> str:
    name = str(group.get("optimizer_class", default)).rpartition(".")[2]
    return f"{name}: lr {group['lr']:g}, weight_decay {group.get('weight_decay', 0):g}"
