"""What lightstep and the Trainer call of PEFT. Of a tiny Llama norms and head are the adapter, the rest is frozen."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.reference.tiny_llama import make_llama

FILE = "adapter_model.safetensors"


class AdaptedLlama(LlamaForCausalLM):
    peft_config: ClassVar[Any] = {"default": types.SimpleNamespace(is_prompt_learning=False)}

    def save_pretrained(self, folder: Any, state_dict: Any = None, is_main_process: bool = True, **_: Any) -> None:
        if is_main_process:
            Path(folder).mkdir(exist_ok=True)
            weights = adapter_of(self, self.state_dict() if state_dict is None else state_dict)
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, Path(folder) / FILE)

    def load_adapter(self, folder: Any, *_: Any, **__: Any) -> None:
        """As PEFT: in fp32, in parameters of its own."""
        for name, tensor in load_file(Path(folder) / FILE).items():
            module, _, entry = name.removeprefix("base_model.").rpartition(".")
            setattr(self.get_submodule(module), entry, nn.Parameter(tensor.float()))


def adapter_of(model: nn.Module, state: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    return {f"base_model.{name}": tensor for name, tensor in state.items() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    return "norm" in name or "lm_head" in name


def make_adapted(seed: int = 0) -> AdaptedLlama:
    model = make_llama(seed)
    model.__class__ = AdaptedLlama
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return model  # type: ignore[return-value]


def module() -> types.ModuleType:
    """For ``sys.modules["peft"]``."""
    peft: Any = types.ModuleType("peft")
    peft.PeftModel, peft.get_peft_model_state_dict = AdaptedLlama, adapter_of
    return peft
