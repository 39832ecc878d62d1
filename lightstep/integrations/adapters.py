"""Adapters of a PEFT model from what ``save_pretrained`` wrote, into the parameters that are there.

PEFT's own ``load_adapter`` may put others in their place, in another dtype: an optimizer would go on with the old ones.
And it knows no shards.
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
from lightstep.integrations.whole_state import part_of

__all__ = ["are_saved_in", "load_adapters"]

_FILE = "adapter_model.safetensors"


def are_saved_in(folder: Path, model: nn.Module) -> bool:
    """Whether ``model`` is PEFT's and ``folder`` has its adapters' weights (prompts that are learnt are none)."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    configs: dict[str, Any] = model.peft_config
    return all(not config.is_prompt_learning and _file(folder, name).is_file() for name, config in configs.items())


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path) -> None:
    """Fill the adapters of a PEFT model, sharded or not; each process takes its shards' part.

    Raises:
        ValueError: the folder's are other adapters; nothing has been changed then.
    """
    in_file: Callable[..., dict[str, Tensor]] = sys.modules["peft"].get_peft_model_state_dict
    state, found = model.state_dict(keep_vars=True), dict[Tensor, Tensor]()
    for adapter in model.peft_config:  # type: ignore[union-attr]
        live = in_file(model, state, adapter, save_embedding_layers=True)  # the model's own tensors, by names in files
        for name, value in load_file(_file(folder, adapter)).items():
            if name not in live or live[name].shape != value.shape:
                raise ValueError(f"{_file(folder, adapter)}: {name} {list(value.shape)} is not a weight of this model")
            found[live[name]] = value
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in found]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing[:3])} ({len(missing)} of the trained parameters)")
    for parameter, value in found.items():
        local_tensor(parameter).copy_(part_of(parameter, value))


def _file(folder: Path, adapter: str) -> Path:
    return folder / _FILE if adapter == "default" else folder / adapter / _FILE
