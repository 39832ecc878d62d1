"""A model as a checkpoint has it: tensors by name, their averages, and of adapters what is trained and the base's name.

A model that a failed load left half changed is marked here. It cannot be saved until a load succeeds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightstep.checkpoint.errors import CheckpointError
from lightstep.distributed import Ranks
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.sharding.model_names import NamedTensor, holders, named_tensors, numbered, several_holders, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks, for_load: bool = False
) -> list[NamedTensor]:
    """The model's tensors after all pending updates. Different tensors have different names on all ranks.

    Called by all ranks.

    Args:
        for_load: they will be replaced, so a step that has failed does not matter.

    Raises:
        CheckpointError: tensors are on the meta device.
    """
    tensors = ranks.together(lambda: _updated_tensors(model, optimizer, for_load))
    return numbered(tensors, several_holders(ranks.gather(holders(tensors))))


def _updated_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, for_load: bool) -> list[NamedTensor]:
    is_replaced = for_load and getattr(optimizer, "half_updated", False)
    if optimizer is not None and hasattr(optimizer, "synchronize") and not is_replaced:
        optimizer.synchronize()
    tensors = named_tensors(model)
    empty = [named.name for named in tensors if named.tensor.is_meta]
    if empty:
        raise CheckpointError(f"{len(empty)} tensors of the model are on the meta device ({', '.join(empty[:3])})")
    return tensors


def averaged_weights(model: nn.Module, tensors: Iterable[NamedTensor]) -> list[tuple[NamedTensor, Tensor]]:
    """Each of the model's ``tensors`` that has an average, and the average."""
    average = PreparedModel.of(model).average
    averages = {} if average is None else average.tensors
    return [(named, averages[named.model_name]) for named in tensors if named.model_name in averages]


def average_key(name: str) -> str:
    """The key of a weight's average in the checkpoint."""
    return f"average.{name}"


# -- adapters ----------------------------------------------------------------------------------------------------------


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has PEFT adapters."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def without_base(
    model: nn.Module, tensors: Sequence[NamedTensor], optimizer: torch.optim.Optimizer | None
) -> list[NamedTensor]:
    """All buffers, and the parameters that are trainable or have optimizer state.

    Args:
        optimizer: counts beside the optimizers that a strategy made for the model.
    """
    optimizers = [*PreparedModel.of(model).optimizers, *([] if optimizer is None else [optimizer])]
    return [
        named
        for named in tensors
        if not isinstance(named.tensor, nn.Parameter)
        or named.tensor.requires_grad
        or any(named.tensor in one.state for one in optimizers)
    ]


def describe_base(model: nn.Module, tensors: Sequence[NamedTensor], saved: Sequence[NamedTensor]) -> dict[str, Any]:
    """The base's name, as PEFT knows it, and the shapes of the tensors that are not saved."""
    saved_names = {named.name for named in saved}
    shapes = {named.name: list(named.tensor.shape) for named in tensors if named.name not in saved_names}
    return {"name": _base_name(model), "shapes": shapes}


def warn_if_other_base(model: nn.Module, base: Mapping[str, Any]) -> None:
    """Log a warning if the adapters were trained on a base of another name. (Its weights may be the same.)"""
    name = _base_name(model)
    if base["name"] != name:
        logger.warning(
            "the checkpoint holds what was trained on %r, and the model's base is %r; the base is left as it is",
            base["name"],
            name,
        )


def _base_name(model: nn.Module) -> str | None:
    """The base's name or path for ``from_pretrained``; ``None`` if neither PEFT nor the model's config has one."""
    inner = unwrap_model(model)
    configs = getattr(inner, "peft_config", None) or {}
    names = [getattr(config, "base_model_name_or_path", None) for config in configs.values()]
    return next((str(name) for name in names if name), getattr(getattr(inner, "config", None), "_name_or_path", None))


# -- loads that failed -------------------------------------------------------------------------------------------------

_half_loaded: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Models that a load has changed in part -> what failed."""

_refusing: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[RemovableHandle, bool]] = weakref.WeakKeyDictionary()
"""torch's own optimizers after a load that broke off -> the hook by which ``step()`` raises, and whether it was loading
state."""


@contextmanager
def loading(model: nn.Module, optimizers: Iterable[Any], path: Any, weights_only: bool = False) -> Iterator[None]:
    """The block loads the model. If it fails, saves of the model and ``step()`` raise until a load succeeds.

    Args:
        optimizers: the ones that are loaded too or, with ``weights_only``, whose masters are rebuilt.
        path: where the model is loaded from, for the errors.
    """
    reason = f"loading {path} failed after a part of it had been loaded"
    inner = unwrap_model(model)
    _half_loaded[inner] = reason
    optimizers = list(optimizers)
    try:
        yield
    except BaseException:
        for optimizer in optimizers:
            if hasattr(optimizer, "refuse_until_loaded"):
                optimizer.refuse_until_loaded(reason, weights_only=weights_only)
            else:
                with_state = not weights_only or _refusing.get(optimizer, (None, False))[1]
                _allow_steps(optimizer)
                _refusing[optimizer] = optimizer.register_step_pre_hook(partial(_refuse_step, reason)), with_state
        raise
    del _half_loaded[inner]
    for optimizer in optimizers:
        if not (weights_only and _refusing.get(optimizer, (None, False))[1]):
            _allow_steps(optimizer)


def _refuse_step(reason: str, *_: Any) -> None:
    raise RuntimeError(f"{reason}; weights and state may be half loaded. Load a checkpoint before the next step")


def _allow_steps(optimizer: Any) -> None:
    if (refusal := _refusing.pop(optimizer, None)) is not None:
        refusal[0].remove()


def refuse_partly_loaded(model: nn.Module, doing: str = "saving one") -> None:
    """Raise if the last load of this model, or a step of one of its optimizers, failed after it had changed something.

    Args:
        doing: what needs whole weights, as the end of a sentence.

    Raises:
        CheckpointError, RuntimeError: with what failed.
    """
    reason = _half_loaded.get(unwrap_model(model))
    if reason is not None:
        raise CheckpointError(f"{reason}; load a checkpoint before {doing}")
    for optimizer in PreparedModel.of(model).optimizers:
        if isinstance(optimizer, MixedPrecisionOptimizer):
            optimizer.refuse_half_updated(f"Load a checkpoint before {doing}")
