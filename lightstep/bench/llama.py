"""The model that is trained: transformers' Llama, with a loss that never holds the logits of all tokens at once.

The logits of 65 536 tokens over 128 256 words are 34 GB in fp32. Users of fused losses do not hold them either: the
head and the cross entropy are computed chunk by chunk and recomputed in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from lightstep.bench.model import LlamaShape

LOSS_CHUNK = 1024
"""Tokens whose logits exist at the same time."""


class TrainedLlama(LlamaForCausalLM):
    """`model(tokens, targets)` is the mean cross entropy, 0-dim fp32."""

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`tokens`, `targets`: (sequences, length) of token numbers; `targets` are the tokens one place further on."""
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        chunks = zip(hidden.flatten(0, 1).split(LOSS_CHUNK), targets.flatten().split(LOSS_CHUNK), strict=True)
        losses = [checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum over one chunk."""
        return cross_entropy(self.lm_head(hidden).float(), targets, reduction="sum")


def trained_model(
    shape: LlamaShape, sequence: int, device: torch.device, dtype: torch.dtype, seed: int
) -> TrainedLlama:
    """A new model on `device`; the same weights for the same seed."""
    config = shape.config(max_position_embeddings=sequence, attn_implementation="sdpa")
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return TrainedLlama(config)
    finally:
        torch.set_default_dtype(before)
