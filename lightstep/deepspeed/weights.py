"""Weights that DeepSpeed has partitioned over the ranks (stage 3): constructing, loading and gathering them."""

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
from lightstep.checkpoint.huggingface import ONLY_LOCAL, find_tensors, warn_of_unused, write_export
from lightstep.checkpoint.storage import local_folder
from lightstep.config import ConfigError
from lightstep.distributed import Ranks
from lightstep.sharding.model_names import NamedTensor, named_tensors, unwrap_model


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed has partitioned the weights over the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return getattr(tensor, "ds_shape", tensor.shape)


def refuse_partitioned(model: nn.Module, name: str) -> None:
    """Raise :class:`CheckpointError` if the weights are partitioned: only an engine can save and load them."""
    if is_partitioned(unwrap_model(model)):
        raise CheckpointError(
            f"{name}: the model's weights are partitioned over the ranks, and DeepSpeed saves and loads them through "
            "its engine; call strategy.create_optimizer(model, ...) first"
        )


def construct_partitioned(factory: Callable[[], nn.Module], settings: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Call ``factory``, and cast and partition each module's parameters as soon as the module has been constructed.

    Buffers keep their dtype. Initial weights are the first rank's.

    Args:
        settings: DeepSpeed's configuration.
        dtype: of the parameters.

    Raises:
        ConfigError: ``factory`` called the class of a transformers model, which cannot initialise partitioned weights.
    """
    announcement = _announce_to_transformers(settings)
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, Init

    class ParameterInit(Init):
        """Casts only parameters. DeepSpeed would create all tensors in ``dtype``, even rotary frequencies."""

        def _post_init_method(self, module: nn.Module) -> None:
            _refuse_uninitialised(module)
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                    parameter.data = parameter.data.to(dtype)
            super()._post_init_method(module)

    # Without dtype=...: if the accelerator has no fp16, DeepSpeed 0.19 ignores it and uses bf16.
    with ParameterInit(config_dict_or_path=settings, tensor_overrides=[DeepSpeedTensorOverride.device]):
        model = factory()
    del announcement
    return model


def _announce_to_transformers(settings: dict[str, Any]) -> Any:
    """While the returned object exists, transformers can initialise and load partitioned weights.

    ``None`` if transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    importlib.import_module("transformers.modeling_utils")  # now: it constructs modules, which must not be partitioned
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def _refuse_uninitialised(module: nn.Module) -> None:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    known = getattr(modeling, "_is_ds_init_called", True)
    if not known and isinstance(module, modeling.PreTrainedModel):
        what = type(module).__name__
        raise ConfigError(
            f"prepare_model(function): the function called {what}(...), and at sharding.stage 3 its weights are "
            "partitioned before transformers can initialise them; have it call "
            "AutoModelForCausalLM.from_config(config) or from_pretrained(folder)"
        )


# -- from and to files -------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Load a Hugging Face folder into a partitioned model. The first rank reads, one tensor at a time.

    Raises:
        FileNotFoundError, ValueError: as ``pretrained.load_pretrained``, on every rank. Nothing has been changed.
    """
    import deepspeed

    ranks = Ranks()
    folder = Path(folder).expanduser()
    files, wanted = ranks.together(lambda: find_tensors(model, folder, whole_shape))
    warn_of_unused(model, folder, files)
    for key, tensor in wanted.items():
        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            if ranks.is_first or not hasattr(tensor, "ds_id"):
                with safe_open(folder / files[key], framework="pt") as opened:
                    tensor.copy_(opened.get_tensor(key))


@torch.no_grad()
def gather_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights on the host by name; ``{}`` on ranks that do not ``keep`` them. Called by every rank."""
    import deepspeed

    weights: dict[str, Tensor] = {}
    for named in named_tensors(model):
        partitioned = [named.tensor] if hasattr(named.tensor, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned):
            if keep:
                weights.update(dict.fromkeys(named.names, named.tensor.detach().cpu().clone()))
    return weights


def export(path: str | Path, model: nn.Module, tokenizer: Any = None) -> None:
    """``export.export_model`` for a partitioned model."""
    ranks = Ranks()
    with checkpoint_errors(f"{path} was not exported"):
        target = local_folder(path, ONLY_LOCAL)
        weights = gather_weights(model, keep=ranks.is_first)
        ranks.together(lambda: write_export(target, model, weights, tokenizer), only_first=True)


def shapes(tensors: Iterable[NamedTensor]) -> Mapping[str, list[int]]:
    """The shapes of the whole tensors by name."""
    return {named.name: list(whole_shape(named.tensor)) for named in tensors}
