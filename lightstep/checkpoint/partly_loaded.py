"""Models that a failed load left half changed. They cannot be saved until a load succeeds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

_PARTLY: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def loading(model: nn.Module, optimizers: Iterable[Any], path: Any, weights_only: bool = False) -> Iterator[None]:
    """The block loads the model. If it fails, saves of the model and ``step()`` raise until a load succeeds.

    Args:
        optimizers: the ones that are loaded too or, with ``weights_only``, whose masters are rebuilt.
        path: where the model is loaded from, for the errors.
    """
    reason = f"loading {path} failed after a part of it had been loaded"
    inner = unwrap_model(model)
    _PARTLY[inner] = reason
    try:
        yield
    except BaseException:
        for optimizer in optimizers:
            if hasattr(optimizer, "refuse_until_loaded"):
                optimizer.refuse_until_loaded(reason, weights_only=weights_only)
        raise
    del _PARTLY[inner]


def refuse_partly_loaded(model: nn.Module, doing: str = "saving one") -> None:
    """Raise if the last load of this model, or a step of one of its optimizers, failed after it had changed something.

    Args:
        doing: what needs whole weights, as the end of a sentence.

    Raises:
        CheckpointError, RuntimeError: with what failed.
    """
    reason = _PARTLY.get(unwrap_model(model))
    if reason is not None:
        raise CheckpointError(f"{reason}; load a checkpoint before {doing}")
    for optimizer in PreparedModel.of(model).optimizers:
        if isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.refuse_half_updated(f"Load a checkpoint before {doing}")
