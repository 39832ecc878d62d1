"""Full optimizer state, saved by the Trainer or accelerate, for a model that is sharded or has another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.checkpoint.huggingface import shards_with_other_dtypes
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.serialization import matched_parameters

__all__ = ["local_part", "sharding_full_state"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def sharding_full_state(
    model: nn.Module,
    optimizer: BaseOptimizer,
    folder: Path,
    other_dtypes: Callable[[nn.Module, Path], Iterable[tuple[Tensor, Tensor]]] = shards_with_other_dtypes,
) -> Iterator[None]:
    """Convert what ``optimizer.load_state_dict`` is given in the block to the model's shards and dtypes.

    Each process takes its shards. Weights change dtype through fp32, as in every checkpoint: masters become the weights
    of another dtype, and fp32 weights in the folder's safetensors become the masters of 16-bit weights.

    Args:
        other_dtypes: returns the model's tensors that have another dtype in the folder, each with this process's part.
    """

    def convert(_: torch.optim.Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
        parameters = matched_parameters(optimizer, packed["param_groups"])
        state = {index: dict(packed["state"].get(index, {})) for index in parameters}
        by_parameter = {parameter: state[index] for index, parameter in parameters.items()}
        for parameter, entries in by_parameter.items():
            entries.update({key: local_part(parameter, value) for key, value in entries.items()})
        _convert_dtypes(other_dtypes(model, folder), by_parameter)
        return {**packed, "state": {index: entries for index, entries in state.items() if entries}}

    handle = optimizer.register_load_state_dict_pre_hook(convert)
    try:
        yield
    finally:
        handle.remove()


def local_part(parameter: Tensor, value: Any) -> Any:
    """This process's shard of an entry that has the shape of the whole parameter; other entries as they are."""
    whole = isinstance(value, Tensor) and value.shape == parameter.shape and not is_sharded(value)
    if not whole or not is_sharded(parameter):
        return value
    shard = shard_of(parameter)
    if shard is None:
        return value.new_empty(local_tensor(parameter).shape)
    part = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.lengths, strict=True))
    return value[part].clone()


@torch.no_grad()
def _convert_dtypes(found: Iterable[tuple[Tensor, Tensor]], states: Mapping[Tensor, dict[str, Any]]) -> None:
    for parameter, part in found:
        if parameter not in states or parameter.dtype not in _LOW_PRECISION:
            continue
        if "master" in states[parameter]:
            local_tensor(parameter).copy_(states[parameter]["master"])
        elif part.dtype == torch.float32 and (states[parameter] or parameter.requires_grad):
            states[parameter]["master"] = part
