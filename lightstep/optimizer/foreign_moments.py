"""State dicts of bitsandbytes' and torchao's 8-bit Adam, as torch's class would have them: in fp32.

bitsandbytes keeps codes in the parameter's shape (``state1``, ``state2``), a table of 256 values for each, and the
largest magnitude of each block of the flattened tensor; small tensors are in fp32. torchao keeps tensors of a class of
its own, which decode themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import like, local_tensor

__all__ = ["OTHER_SETTINGS", "has_codes", "is_foreign", "with_torchs_moments"]

_WRAPPED = "__bnb_optimizer_quant_state__"
OTHER_SETTINGS = ("alpha", "t_alpha", "t_beta3")
"""What bitsandbytes' parameter groups have for other classes than Adam."""

_NAMES = {"1": "exp_avg", "2": "exp_avg_sq"}
_BLOCKS = (256, 2048)
"""Elements of a block, in present and in earlier versions of bitsandbytes."""


def is_foreign(entries: Mapping[str, Any]) -> bool:
    """Whether this is a parameter's state from a state dict of one of these libraries."""
    return _WRAPPED in entries or any(map(_is_coded, entries.values()))


def has_codes(entries: Mapping[str, Any]) -> bool:
    """Whether moments in a parameter's state are codes: both libraries keep those of small tensors in fp32."""
    values = [*entries.values(), *entries.get(_WRAPPED, {}).values()]
    return any(_is_coded(one) or (isinstance(one, Tensor) and one.dtype == torch.uint8) for one in values)


def with_torchs_moments(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with the names of :class:`torch.optim.AdamW` and fp32 moments.

    Args:
        name: of the parameter, for messages.

    Raises:
        ValueError: the state is that of another algorithm, or of a version that kept it in another way.
    """
    found = {**entries, **entries.get(_WRAPPED, {})}
    found.pop(_WRAPPED, None)
    if "state1" in found:
        found = _from_bitsandbytes(name, found)
    return {key: _decoded(value) if _is_coded(value) else value for key, value in found.items()}


def _from_bitsandbytes(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    if "state2" not in entries:
        raise ValueError(
            f"the state of {name} is bitsandbytes' and has one moment (state1), that of Lion, SGD or another class; "
            "only that of its Adam and AdamW can be loaded here"
        )
    found = {"step": entries["step"]}
    for number, key in _NAMES.items():
        is_coded = entries[f"state{number}"].dtype == torch.uint8
        found[key] = _table_values(name, entries, number) if is_coded else entries[f"state{number}"].float()
    return found


def _table_values(name: str, entries: Mapping[str, Any], number: str) -> Tensor:
    codes, table, largest = (entries.get(f"{key}{number}") for key in ("state", "qmap", "absmax"))
    assert codes is not None
    blocks = 0 if largest is None else largest.numel()
    size = next((size for size in _BLOCKS if -(-codes.numel() // size) == blocks), None)
    if table is None or largest is None or size is None:
        raise ValueError(
            f"state{number} of {name} has {codes.numel()} codes and {blocks} scales; bitsandbytes' block-wise state, "
            f"with a scale for each {' or '.join(map(str, _BLOCKS))} codes and a table, can be loaded here"
        )
    values = table.float()[codes.reshape(-1).long()]
    scales = largest.float().repeat_interleave(size)[: codes.numel()]
    return (values * scales).view(codes.shape)


def _is_coded(value: Any) -> bool:
    """Whether this is a tensor of torchao's 8-bit, 4-bit or fp8 classes; its shards are."""
    own = local_tensor(value) if isinstance(value, Tensor) else value
    return isinstance(own, Tensor) and type(own) is not Tensor and hasattr(own, "codes") and hasattr(own, "dequantize")


def _decoded(value: Tensor) -> Tensor:
    return like(value, local_tensor(value).dequantize().float())
