"""Generates text with the trained model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import set_seed

from lightstep.config import ConfigError
from lightstep.trainer.config import Sample


def check_prompts(sample: Sample | None, tokenizer: Any) -> None:
    """Raise ``ConfigError`` if a prompt has no tokens: the model needs one to continue from."""
    for prompt in sample.prompts if sample is not None else ():
        if not len(tokenizer(prompt, add_special_tokens=False)["input_ids"]):
            raise ConfigError(f"sample.prompts: {prompt!r} has no tokens; at least one is needed to continue from")


@torch.no_grad()
def write_samples(model: nn.Module, tokenizer: Any, sample: Sample, seed: int) -> list[str]:
    """One text per prompt. All ranks of a sharded model call it, and all get the same texts.

    Args:
        model: anything with transformers' ``generate``.
    """
    set_seed(seed)
    model.eval()
    texts = []
    for prompt in sample.prompts:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(next(model.parameters()).device)
        written: Any = model.generate(  # type: ignore[operator]
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            max_new_tokens=sample.tokens,
            do_sample=True,
            temperature=sample.temperature,
            top_k=sample.top_k,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        texts.append(_printable(tokenizer.decode(written[0].tolist(), skip_special_tokens=True)))
    return texts


def _printable(text: str) -> str:
    """Replace control characters, which could affect the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in text)
