"""Weights that transformers converts: a file has other names than the model, or other tensors (each expert by itself).

The Trainer loads such a file by ``load_state_dict(strict=False)``, which leaves these parameters as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.huggingface import shards_with_other_dtypes
from lightstep.checkpoint.model_state import loading
from lightstep.distributed import Ranks, local_tensor
from lightstep.integrations.full_state import local_part
from lightstep.sharding.model_names import named_tensors, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy.process_group import broadcast_from_first

__all__ = ["converts_weights", "load_converted", "parts_with_other_dtypes"]


def converts_weights(model: nn.Module, folder: Path) -> bool:
    """Whether ``folder`` has safetensors, and transformers converts them when it loads this model."""
    inner = unwrap_model(model)
    if not isinstance(inner, PreTrainedModel) or not any(folder.glob("model*.safetensors")):
        return False
    return bool(getattr(inner, "_weight_conversions", None) or get_model_conversion_mapping(inner, add_legacy=False))


def load_converted(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Load what ``save_pretrained`` wrote into the model's own tensors. Called by every rank.

    The first rank has the whole model in host memory once more, and sends one tensor at a time.

    Args:
        model: whole or sharded.
        device: where tensors are sent from and to.

    Raises:
        CheckpointError: a parameter that is trained is not in the folder, or ``from_pretrained`` cannot make the
            model. Nothing has been changed then.
    """
    weights = _read_on_first(model, folder)
    with torch.no_grad(), loading(model, PreparedModel.of(model).optimizers, folder, weights_only=True):
        for tensor, part in _parts(model, weights, device):
            if not tensor.is_meta:
                local_tensor(tensor).copy_(part)


def parts_with_other_dtypes(model: nn.Module, folder: Path, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """``pretrained.shards_with_other_dtypes`` for any model. Called by every rank."""
    if not converts_weights(model, folder):
        yield from shards_with_other_dtypes(model, folder)
        return
    ours = {named.tensor.dtype for named in named_tensors(model) if named.tensor.is_floating_point()}
    if {_dtype(folder)} == ours:
        return
    for tensor, part in _parts(model, _read_on_first(model, folder), device):
        if part.dtype != tensor.dtype:
            yield tensor, part


def _read_on_first(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The folder's weights by the model's names on the first rank, in the dtype of the files; ``{}`` on the others."""
    weights: dict[str, Tensor] = {}
    Ranks().together(lambda: weights.update(_read(unwrap_model(model), folder)), only_first=True)
    return weights


def _read(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config: Any = copy.deepcopy(model.config)
    try:
        loaded, report = cast(Any, kind).from_pretrained(
            folder, config=config, dtype=_dtype(folder), output_loading_info=True
        )
    except Exception as error:
        raise CheckpointError(
            f"{folder} has weights that transformers converts, and {kind.__name__}.from_pretrained failed with "
            f"{type(error).__name__}: {error}. Resume under a strategy with optimizer_state.backend stream, whose "
            "checkpoints hold the weights as the model has them"
        ) from error
    missing = set(report["missing_keys"])
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad and name in missing)
    if trained:
        raise CheckpointError(f"{folder} has no {list_names(trained)}, which this {kind.__name__} trains")
    return {name: tensor for name, tensor in loaded.state_dict().items() if name not in missing}


def _dtype(folder: Path) -> torch.dtype:
    """The one dtype of all floating-point tensors in the folder, else fp32, which has the values of all."""
    found = set()
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    floats = {_FLOATS[name] for name in found & _FLOATS.keys()}
    return floats.pop() if len(floats) == 1 else torch.float32


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _parts(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's tensors that are in the first rank's ``weights``, each with this rank's part of the value."""
    ranks = Ranks()
    described = ranks.together(
        lambda: {name: (whole.shape, whole.dtype) for name, whole in weights.items()}, only_first=True
    )
    for named in named_tensors(model):
        name = next((name for name in named.names if name in described), None)
        if name is None:
            continue
        if not ranks.is_distributed:
            yield named.tensor, weights.pop(name)
            continue
        shape, dtype = described[name]
        whole = weights.pop(name).to(device) if ranks.is_first else torch.empty(shape, dtype=dtype, device=device)
        broadcast_from_first([whole])
        yield named.tensor, local_part(named.tensor, whole)
