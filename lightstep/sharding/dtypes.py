"""The dtype of each of a model's tensors under a strategy: what is cast, what stays fp32, what is not touched.

==========================================  ==========================================================================
never touched                               packed or scaled storage: float8, 4-bit weights in 16-bit storage,
                                            quantised tensor subclasses, and the scales beside them
fp32 under 16-bit strategies                what ``_keep_in_fp32_modules_strict`` names (and ``_keep_in_fp32_modules``
                                            under float16), buffers that transformers makes in fp32, ``inv_freq``
the strategy's dtype                        all other floating-point parameters and buffers, as by ``model.to(dtype)``
==========================================  ==========================================================================
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightstep.distributed import is_sharded
from lightstep.optimizer.param_groups import clean_name

logger = logging.getLogger(__name__)

DtypePlan = Mapping[tuple[nn.Module, str], torch.dtype]
"""(module, name of its own tensor) -> dtype. Tensors that are not touched are left out."""

_HALF = (torch.float16, torch.bfloat16)
_FREQUENCIES = "inv_freq"
"""How names of rotary frequencies end: 8 bits of mantissa would move distant positions."""
_ADAPTER_PARTS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""What PEFT inserts into the names of the modules that it wraps."""


def planned_dtypes(model: nn.Module, dtype: torch.dtype) -> DtypePlan:
    """The dtype of every floating-point parameter and buffer that :func:`cast` may touch.

    Args:
        model: the whole model: names are matched, and transformers' models are asked.
        dtype: the strategy's.
    """
    kept = _kept(model, dtype) if dtype in _HALF else {}
    packed = {tensor for module in model.modules() for tensor in _packed(module)}
    return {
        (module, name): kept.get(tensor, dtype)
        for module in model.modules()
        for name, tensor in _own(module)
        if tensor.is_floating_point() and tensor not in packed
    }


def planned_by_tensor(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, torch.dtype]:
    """:func:`planned_dtypes` by the tensors themselves."""
    return {tensor_of(*key): planned for key, planned in planned_dtypes(model, dtype).items()}


def cast(model: nn.Module, plan: DtypePlan) -> None:
    """Cast the model's tensors, in place: parameters and buffers stay the same objects.

    Args:
        model: the planned model, or a part of it.
        plan: from :func:`planned_dtypes`.
    """
    for module in model.modules():
        for name, tensor in _own(module):
            dtype = plan.get((module, name), tensor.dtype)
            if tensor.dtype == dtype:
                continue
            if is_sharded(tensor):  # assigning .data would change a DTensor's metadata, not its local tensor
                torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach().to(dtype), tensor.requires_grad))
            else:
                tensor.data = tensor.data.to(dtype)


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """A module's own parameter or buffer; ``getattr`` may find an attribute of its class."""
    return {**module._parameters, **module._buffers}[name]  # type: ignore[return-value]


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


# -- packed storage


def _packed(module: nn.Module) -> Iterator[Tensor]:
    """The module's own tensors whose storage is no plain number, and what its quantiser keeps beside them."""
    own = _own(module)
    if any(_is_packed(name, tensor) for name, tensor in own):
        yield from (t for name, t in own if (not t.requires_grad and name != "bias") or _is_packed(name, t))


def _is_packed(name: str, tensor: Tensor) -> bool:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return True
    if not tensor.is_floating_point():
        return not tensor.is_complex() and tensor.dtype != torch.bool and "weight" in name
    if hasattr(tensor, "quant_state"):  # bitsandbytes, where storage may be float16, bfloat16 or float32
        return True
    return is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor) and not tensor.requires_grad


# -- what the model keeps


def _kept(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, torch.dtype]:
    """Tensors that get another dtype than the strategy's."""
    kept: dict[Tensor, torch.dtype] = {}
    for module in model.modules():
        kept |= {tensor: torch.float32 for name, tensor in _own(module) if name.endswith(_FREQUENCIES)}
    for module in models_of_transformers(model):
        kept |= _class_buffers(module, dtype)
    for module in model.modules():
        patterns = _patterns(module, dtype)
        if patterns:
            kept |= {tensor: torch.float32 for name, tensor in _all(module) if _matches(name, patterns)}
    return kept


def _patterns(module: nn.Module, dtype: torch.dtype) -> list[str]:
    lists = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype == torch.float16)
    return [pattern for name in lists for pattern in getattr(module, name, None) or ()]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """As ``from_pretrained`` matches them."""
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _all(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors below a module; tied ones under each of their names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        yield _ADAPTER_PARTS.sub("", clean_name(name)), tensor


def models_of_transformers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is not None and isinstance(module, modeling.PreTrainedModel):
        yield module
        return
    for child in module.children() if modeling is not None else ():
        yield from models_of_transformers(child)


_made: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, dict[str, torch.dtype]]] = weakref.WeakKeyDictionary()


def _class_buffers(module: nn.Module, dtype: torch.dtype) -> dict[Tensor, torch.dtype]:
    """Buffers of a transformers model for which its class asks for another dtype, whatever the model's."""
    by_dtype = _made.setdefault(module, {})
    if dtype not in by_dtype:
        by_dtype[dtype] = _buffers_of_class(module, dtype)
    buffers = by_dtype[dtype]
    return {t: buffers[n] for n, t in _all(module) if buffers.get(n, dtype) != dtype}


def _buffers_of_class(module: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The buffers' dtypes in ``from_pretrained(dtype=...)``, by name: of a model without memory, of the same class."""
    config = copy.deepcopy(module.config)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = type(module)(config)
    except Exception as error:
        logger.warning("%s could not be constructed in %s to find the buffers that it keeps in fp32: %s: %s; they are "
                       "cast, except those that _keep_in_fp32_modules_strict names", type(module).__name__, dtype,
                       type(error).__name__, error)  # fmt: skip
        return {}
    finally:
        torch.set_default_dtype(before)
    return {name: buffer.dtype for name, buffer in made.named_buffers()}
