"""Loading the adapters of a PEFT model into its existing parameters.

PEFT's own ``load_adapter`` may replace the parameters, in another dtype, and the optimizer would keep updating the old
ones. It does not support shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightstep.distributed import local_tensor
from lightstep.integrations.full_state import local_part

__all__ = ["has_adapters", "learns_prompts", "load_adapters", "unsaved_encoders"]

_FILE = "adapter_model.safetensors"
_PROMPTS = (".embedding.weight", ".trainable_embedding", ".prefix_task_cols", ".prefix_task_rows")
"""What PEFT saves of a prompt encoder."""


def has_adapters(folder: Path, model: nn.Module) -> bool:
    """Whether ``folder`` has the weights of all adapters of a PEFT ``model``. Learnt prompts are not adapters."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    configs: dict[str, Any] = model.peft_config
    return all(not config.is_prompt_learning and _file(folder, name).is_file() for name, config in configs.items())


def learns_prompts(model: nn.Module) -> bool:
    """Whether PEFT trains prompts for this model."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    return any(config.is_prompt_learning for config in model.peft_config.values())


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
    for adapter in model.peft_config:  # type: ignore[union-attr]
        live = in_file(
            model, state, adapter, save_embedding_layers=True
        )  # the model's own tensors, under the names in the file
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
    return folder / _FILE if adapter == "default" else folder / adapter / _FILE
