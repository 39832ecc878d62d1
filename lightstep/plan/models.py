"""Loads a model on the meta device (from a known name, a Hugging Face folder, or a factory function); its sizes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightstep.config import ConfigError
from lightstep.config_errors import one_sentence, suggest
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.preparation import transformer_blocks

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-3B": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
"""Sizes alone; nothing is downloaded."""


def load_shape(source: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model of that shape on the meta device, without weights.

    Args:
        source: a name of :data:`SHAPES`, a Hugging Face folder, a ``config.json``, or ``module:factory``, a function
            that returns a causal language model of transformers.

    Raises:
        ConfigError: none of these, or what cannot be read; with what is allowed.
    """
    if source in SHAPES:
        return from_values(SHAPES[source], dtype)
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return from_values(_read(file), dtype)
    if path.is_dir():
        raise ConfigError(f"{path} holds no config.json; give the folder of a Hugging Face model")
    module, colon, attribute = source.partition(":")
    if colon and module and attribute:
        return _from_factory(module, attribute)
    raise ConfigError(
        f"{source!r} is not a known model{suggest(source, list(SHAPES))}; a Hugging Face folder, a config.json, "
        f"module:factory or one of these is needed: {', '.join(SHAPES)}"
    )


def from_values(values: dict[str, Any], dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """A causal language model of transformers from its configuration's values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("the model's configuration has no model_type")
    try:
        config = AutoConfig.for_model(**values)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # transformers has many classes of errors
        raise ConfigError(f"model_type {kind!r}: {one_sentence(error)}") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not a model's configuration; a JSON object is needed")
    return values


def _import(module: str) -> ModuleType:
    """Import a module, also from the current folder, which a console script does not search."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(os.getcwd())


def _from_factory(module: str, attribute: str) -> nn.Module:
    try:
        factory = getattr(_import(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{module}:{attribute}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{module}:{attribute} is not a function; one that returns the model is needed")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{module}:{attribute} returned an object of type {type(model).__name__}; a torch.nn.Module is needed"
        )
    return model


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements in a model: of each block, and outside the blocks in model order."""

    blocks: tuple[int, ...]
    before: int
    """The embedding, which the first block waits for."""
    behind: int
    """The last norm and the head; a tied head counts as embedding."""
    tensors: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.blocks) + self.root

    @property
    def root(self) -> int:
        return self.before + self.behind


def model_sizes(model: nn.Module) -> Sizes:
    """The sizes of a model; a shared parameter counts once."""
    blocks = list(transformer_blocks(model))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    before = behind = 0
    seen_block = False
    for parameter in model.parameters():
        if parameter in inside:
            seen_block = True
        elif seen_block:
            behind += parameter.numel()
        else:
            before += parameter.numel()
    counts = tuple(sum(p.numel() for p in block.parameters()) for block in blocks)
    return Sizes(counts, before, behind, tuple(p.numel() for p in model.parameters()))


def fp32_share(model: nn.Module, dtype: torch.dtype) -> float:
    """The share of the parameters that the model keeps in fp32 under a strategy of another ``dtype``."""
    if dtype == torch.float32:
        return 0.0
    planned, parameters = planned_by_tensor(model, dtype), list(model.parameters())
    kept = sum(p.numel() for p in parameters if planned.get(p, p.dtype) == torch.float32)
    return kept / max(sum(p.numel() for p in parameters), 1)
