"""Weights that DeepSpeed has divided by the ranks (stage 3): making, filling and collecting them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.export import write_export
from lightstep.checkpoint.pretrained import find_tensors
from lightstep.checkpoint.ranks import Ranks
from lightstep.config import ConfigError
from lightstep.sharding.model_names import NamedTensor, named_tensors, unwrap_model


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed has divided the weights by the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return getattr(tensor, "ds_shape", tensor.shape)


def refuse_partitioned(model: nn.Module, name: str) -> None:
    """Raises :class:`CheckpointError`: without an engine there are no files of DeepSpeed's."""
    if is_partitioned(unwrap_model(model)):
        raise CheckpointError(
            f"{name}: the model's weights are divided by the ranks, and DeepSpeed saves and loads them through its "
            "engine; call strategy.create_optimizer(model, ...) first"
        )


def construct(factory: Callable[[], nn.Module], settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """What ``factory`` makes, each module's parameters cast and divided by the ranks as soon as it is made.

    Buffers keep their dtype. Initial weights are the first rank's.

    Args:
        settings: DeepSpeed's configuration.
        dtype: of the parameters.

    Raises:
        ConfigError: a transformers model made by its class, which then initialises weights that are not there.
    """
    hint = _hint_to_transformers(settings)
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, Init

    class Dividing(Init):
        """DeepSpeed itself would make every floating-point tensor in ``dtype``, rotary frequencies among them."""

        def _post_init_method(self, module: nn.Module) -> None:
            _refuse_uninitialised(module)
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(dtype)
            super()._post_init_method(module)

    # Not with dtype=...: where the accelerator has no fp16, DeepSpeed 0.19 takes bf16 whatever that says.
    with Dividing(config_dict_or_path=settings, tensor_overrides=[DeepSpeedTensorOverride.device]):
        model = factory()
    del hint
    return model


def _hint_to_transformers(settings: dict[str, Any]) -> Any:
    """While it lives, transformers, where it is installed, initialises and loads weights part by part."""
    if importlib.util.find_spec("transformers") is None:
        return None
    importlib.import_module("transformers.modeling_utils")  # makes modules, which would be divided later
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def _refuse_uninitialised(module: nn.Module) -> None:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    known = getattr(modeling, "_is_ds_init_called", True)
    if not known and isinstance(module, modeling.PreTrainedModel):
        what = type(module).__name__
        raise ConfigError(
            f"prepare_model(function) made {what} by its class, and at sharding.stage 3 its weights are divided "
            "before transformers can initialise them; have the function call AutoModelForCausalLM.from_config(config) "
            "or from_pretrained(folder)"
        )


# -- from and to files -------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Fill a partitioned model from a Hugging Face folder: the first rank reads, one tensor at a time.

    Raises:
        FileNotFoundError, ValueError: as ``pretrained.load_pretrained``, on every rank; nothing has been changed then.
    """
    import deepspeed

    ranks = Ranks()
    folder = Path(folder)
    files, wanted = ranks.together(lambda: find_tensors(model, folder, full_shape))
    for key, tensor in wanted.items():
        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            if ranks.is_first or not hasattr(tensor, "ds_id"):
                with safe_open(folder / files[key], framework="pt") as opened:
                    tensor.copy_(opened.get_tensor(key))


@torch.no_grad()
def gathered(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights on the host by name; ``{}`` on ranks that do not ``keep`` them. Every rank calls it."""
    import deepspeed

    weights: dict[str, Tensor] = {}
    for named in named_tensors(model):
        with deepspeed.zero.GatheredParameters(_parameters([named])):
            if keep:
                weights.update(dict.fromkeys(named.names, named.tensor.detach().cpu().clone()))
    return weights


def _parameters(named: Iterable[NamedTensor]) -> list[Tensor]:
    return [one.tensor for one in named if hasattr(one.tensor, "ds_id")]


def export(path: str | Path, model: nn.Module, tokenizer: Any = None) -> None:
    """As ``export.export_model``, of a partitioned model."""
    ranks = Ranks()
    with checkpoint_errors(f"{path} was not exported"):
        weights = gathered(model, keep=ranks.is_first)
        ranks.together(lambda: write_export(Path(path), model, weights, tokenizer), only_first=True)


def shapes(tensors: Iterable[NamedTensor]) -> Mapping[str, list[int]]:
    """By name, of the whole tensors."""
    return {named.name: list(full_shape(named.tensor)) for named in tensors}
