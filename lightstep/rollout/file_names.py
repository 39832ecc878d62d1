"""The names that tensors have in a model's files: transformers joins some in memory, such as those of experts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.rollout.transport import WeightInfo, WeightTransferError

__all__ = ["infos_in_files", "tensors_in_files"]


def tensors_in_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's tensors as its files have them: cut, and under other names, where transformers joins them."""
    conversions: Any = sys.modules.get("transformers.core_model_loading")
    models: Any = sys.modules.get("transformers.modeling_utils")
    if conversions is None or models is None or not isinstance(model, models.PreTrainedModel):
        return dict(tensors)
    found: dict[str, Tensor] = conversions.revert_weight_conversion(model, dict(tensors))
    return found


def infos_in_files(model: nn.Module, buckets: Sequence[Sequence[WeightInfo]]) -> list[list[WeightInfo]]:
    """Each bucket's tensors as its files have them.

    Raises:
        WeightTransferError: some in a file are made of tensors in several buckets.
    """
    listed = [_converted(model, infos) for infos in buckets]
    together = _converted(model, [info for infos in buckets for info in infos])
    if {info.name: info.shape for infos in listed for info in infos} != {info.name: info.shape for info in together}:
        raise WeightTransferError(
            f"tensors of {type(model).__name__} are joined in its files that are in several buckets here; set a larger "
            "roles.rollout.bucket_mib"
        )
    return listed


def _converted(model: nn.Module, infos: Sequence[WeightInfo]) -> list[WeightInfo]:
    tied = {info.name: info.names for info in infos}
    described = {info.name: torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos}
    found = tensors_in_files(model, described)
    return [WeightInfo(tied.get(name, (name,)), tuple(t.shape), t.dtype) for name, t in found.items()]
