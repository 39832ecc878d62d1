"""Models whose weights DeepSpeed partitions over the ranks while they are constructed (stage 3)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.config import ConfigError
from lightstep.distributed import is_divided
from lightstep.sharding.model_names import unwrap_model


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed has partitioned the weights over the ranks."""
    return any(map(is_divided, model.parameters()))


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
                if parameter.is_floating_point() and not is_divided(parameter):
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
