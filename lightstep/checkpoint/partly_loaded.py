"""Models that a load left between two states: they are not saved until a load has gone through."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.sharding.model_names import unwrap_model

_PARTLY: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def changing(model: nn.Module, optimizers: Iterable[Any], path: Any, weights_only: bool = False) -> Iterator[None]:
    """The model is loaded in this block. After an error neither ``step()`` nor a save goes on from what is there.

    Args:
        optimizers: those that are loaded too or, with ``weights_only``, follow the model.
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


def refuse_partly_loaded(model: nn.Module) -> None:
    """Raises :class:`CheckpointError` when the last load broke off after it had changed something."""
    reason = _PARTLY.get(unwrap_model(model))
    if reason is not None:
        raise CheckpointError(f"{reason}; load a checkpoint before saving one")
