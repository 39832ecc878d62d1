"""How much state an optimizer keeps: its classes are asked, by one update of a small matrix on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightstep.optimizer.arithmetic import ADAMS, BaseArithmetic
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.moments import moments_of
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.rules import Rule, groups_by_rules, own_class
from lightstep.plan.cost import ADAMW, MASTER, SPLIT_MASTER, StateBytes

_CPU = torch.device("cpu")
Group = Mapping[str, Any]


def state_by_rules(model: nn.Module, rules: Sequence[Rule] | Rule) -> StateBytes:
    """The state of the optimizer that ``strategy.create_optimizer(model, rules=rules)`` would create.

    Raises:
        TypeError, ValueError: as :func:`~lightstep.optimizer.rules.groups_by_rules`.
    """
    groups = groups_by_rules(rules, model)
    classes = GroupClasses(*own_class(groups))
    return _mean(classes, [{**classes.defaults_for(group), **group} for group in groups])


def state_of(optimizer: torch.optim.Optimizer) -> StateBytes:
    """The state of an optimizer that a strategy created; of others, for example DeepSpeed's, that of AdamW."""
    if not isinstance(optimizer, MixedPrecisionOptimizer):
        return ADAMW
    return _mean(optimizer.engine.classes, optimizer.param_groups)


def _mean(classes: GroupClasses, groups: Iterable[Group]) -> StateBytes:
    """The mean over the groups' parameters."""
    sizes = [(sum(p.numel() for p in group["params"]), _state_of_group(classes, group)) for group in groups]
    total = max(sum(size for size, _ in sizes), 1)

    def mean(kind: str) -> float:
        return sum(size * getattr(state, kind) for size, state in sizes) / total

    is_adam = all(state.is_adam for _, state in sizes)
    return StateBytes(mean("full"), mean("short"), mean("bitmap"), mean("resident_master"), is_adam)


def _state_of_group(classes: GroupClasses, group: Group) -> StateBytes:
    """Entries of other shapes than the parameter's (Adafactor's row sums) are small, and not counted."""
    own = classes.arithmetic_for(group)
    arithmetic = BaseArithmetic(own.optimizer_class, own.hyperparameters)
    arithmetic.prepare(_CPU)
    schema = arithmetic.schema(_CPU, [dict(group)])
    moments = moments_of(arithmetic.optimizer_class, schema)
    widths = {key: spec.dtype.itemsize for key, spec in schema.items() if spec.like_parameter and spec.dtype}
    full = sum(widths.values())
    bitmap = 0 if any(schema[key].never_negative for key in widths) else 1 / 8
    is_adam = arithmetic.optimizer_class in ADAMS  # a kernel of lightstep's joins its masters
    return StateBytes(full, full - 2 * len(moments), bitmap, SPLIT_MASTER if is_adam else MASTER, is_adam)
