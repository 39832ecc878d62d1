"""Optimizers that were made before their model is sharded: they follow its parameters, which are others then.

accelerate and the transformers Trainer build the optimizer first. Nothing of it is set up yet, so that it can let go of
the parameters while the model is sharded (the unsharded ones would all stay in memory), and take the new ones by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.sharding.model_names import unwrap_model

__all__ = ["following"]


@contextlib.contextmanager
def following(model: nn.Module, optimizers: Iterable[BaseOptimizer]) -> Iterator[list[MixedPrecisionOptimizer]]:
    """While the body exchanges the model's parameters, these optimizers hold none; afterwards they hold the new ones.

    Those that have been set up are left alone. Yields those that are not.
    """
    waiting = [o for o in optimizers if isinstance(o, MixedPrecisionOptimizer) and not o.is_set_up]
    held = _let_go(model, waiting)
    try:
        yield waiting
    finally:
        now = dict(_named(model))
        for group, names in held:
            group["params"] = [now[name] for name in names]


def _let_go(model: nn.Module, optimizers: Iterable[MixedPrecisionOptimizer]) -> list[tuple[dict[str, Any], list[str]]]:
    """Each group with the names of its parameters, which are taken out of it."""
    names = {id(parameter): name for name, parameter in reversed(list(_named(model)))}
    held = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held.append((group, [names[id(parameter)] for parameter in group["params"]]))
        optimizer.forget_parameters()
    return held


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tied parameters under each of their names."""
    for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
        yield clean_name(name), parameter
