"""Loading what other savers wrote into a model's own tensors: full optimizer state, converted weights, adapters.

The model may be sharded, or have another dtype. Loaders of other libraries replace parameters, leave some as they are,
or do not support shards.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.checkpoint.errors import CheckpointError, list_names
from lightstep.checkpoint.huggingface import shards_with_other_dtypes
from lightstep.checkpoint.model_state import loading
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import Ranks, is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.serialization import matched_parameters
from lightstep.sharding.model_names import named_tensors, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy.process_group import broadcast_from_first

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


# -- weights that transformers stores under other names, or cut and joined (each expert by itself) --------------------


def converts_weights(model: nn.Module, folder: Path) -> bool:
    """Whether ``folder`` has safetensors, and transformers converts them when it loads this model."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

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


# -- adapters of PEFT: its own load_adapter may replace the parameters, in another dtype ------------------------------


_PROMPTS = (".embedding.weight", ".trainable_embedding", ".prefix_task_cols", ".prefix_task_rows")
"""What PEFT saves of a prompt encoder."""


def _peft_configs(model: nn.Module) -> dict[str, Any]:
    """The configuration of each adapter; ``{}`` if the model is not PEFT's."""
    peft = sys.modules.get("peft")
    return {} if peft is None or not isinstance(model, peft.PeftModel) else model.peft_config


def holds_adapters(folder: Path, model: nn.Module) -> bool:
    """Whether ``folder`` has the weights of all adapters of a PEFT ``model``. Learnt prompts are not adapters."""
    configs = _peft_configs(model)
    found = [not config.is_prompt_learning and _file(folder, name).is_file() for name, config in configs.items()]
    return bool(found) and all(found)


def learns_prompts(model: nn.Module) -> bool:
    """Whether PEFT trains prompts for this model."""
    return any(config.is_prompt_learning for config in _peft_configs(model).values())


def unsaved_encoders(model: nn.Module) -> list[str]:
    """The trained parameters that compute a model's prompts: PEFT saves what they have computed, and not them."""
    named = model.named_parameters() if learns_prompts(model) else ()
    return [name for name, p in named if p.requires_grad and "prompt_encoder." in name and not name.endswith(_PROMPTS)]


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path) -> None:
    """Load what ``save_pretrained`` wrote; each process reads its shards.

    Raises:
        ValueError: the folder has the weights of other adapters. Nothing has been changed then.
    """
    in_file: Callable[..., dict[str, Tensor]] = sys.modules["peft"].get_peft_model_state_dict
    state, found = model.state_dict(keep_vars=True), dict[Tensor, Tensor]()
    for adapter in _peft_configs(model):
        live = in_file(model, state, adapter, save_embedding_layers=True)  # the model's tensors by names in the file
        for name, value in load_file(_file(folder, adapter)).items():
            if name not in live or live[name].shape != value.shape:
                raise ValueError(f"{_file(folder, adapter)}: {name} {list(value.shape)} is not a weight of this model")
            found[live[name]] = value
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in found]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing[:3])} ({len(missing)} of the trained parameters)")
    for parameter, value in found.items():
        local_tensor(parameter).copy_(local_part(parameter, value))


def _file(folder: Path, adapter: str) -> Path:
    return (folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors"
