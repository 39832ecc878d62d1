"""A tiny model of transformers with random weights, and rows of tokens for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 48
LENGTH = 10
ROWS = 26  # an uneven last batch


def make_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**values))


def row(index: int) -> Tensor:
    """Tokens of one row, int64 ``[LENGTH]``."""
    return torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Some labels are masked, another number of them in each row."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = row(index)
        labels = tokens.clone()
        labels[: index % 4] = -100
        return {"input_ids": tokens, "labels": labels}


class QuietArguments(TrainingArguments):
    """No process reports: what a step will take is not planned, which takes as long as to train such a model."""

    should_log = False


def training_arguments(folder: Path | str, reports: bool = False, **changes: Any) -> TrainingArguments:
    """Two micro-batches of two rows a step, every step logged.

    Args:
        reports: plan and measure what a step takes, and print that.
    """
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    return (TrainingArguments if reports else QuietArguments)(**values)
