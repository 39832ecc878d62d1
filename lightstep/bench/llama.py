"""A real Llama whose forward returns the loss, for whole iterations: transformers' model, and a loss made in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightstep.bench.model import LlamaShape

_LOSS_TOKENS = 4096
"""Tokens whose logits are in memory at once: 64k tokens over 128k words would be 33 GB in fp32."""


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama with grouped-query attention; ``tied``: embedding and head are one tensor."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool

    @classmethod
    def near(cls, parameters: float, layers: int | None = None) -> LlamaSizes:
        """The published Llama 3 of about this size (1 B, 3 B, 8 B); below 0.6 B one with the bench's usual shapes."""
        if parameters >= 0.6e9:
            sizes = _PUBLISHED[min(_PUBLISHED, key=lambda count: abs(count - parameters))]
        else:
            shape = LlamaShape.near(int(parameters))
            heads = max(1, shape.hidden // 64)
            sizes = cls(shape.hidden, shape.feed_forward, shape.layers, heads, heads, shape.vocabulary, False)
        return sizes if layers is None else replace(sizes, layers=layers)

    def model(self, sequence: int) -> LossModel:
        """The model on torch's current default device, in fp32."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=sequence,
            attn_implementation="sdpa",
            use_cache=False,
        )
        return LossModel(LlamaForCausalLM(config))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


_PUBLISHED: Mapping[float, LlamaSizes] = {
    1.24e9: LlamaSizes(2048, 8192, 16, 32, 8, 128_256, True),
    3.21e9: LlamaSizes(3072, 8192, 28, 24, 8, 128_256, True),
    8.03e9: LlamaSizes(4096, 14_336, 32, 32, 8, 128_256, False),
}


class LossModel(nn.Module):
    """Tokens [sequences, length + 1] → mean cross entropy (0-dim fp32), as a training loop with a fused loss has it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = list(model._no_split_modules)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=tokens[:, :-1]).last_hidden_state.flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        pieces = zip(hidden.split(_LOSS_TOKENS), targets.split(_LOSS_TOKENS), strict=True)
        losses = [checkpoint(self._summed_loss, piece, wanted, use_reentrant=False) for piece, wanted in pieces]
        return torch.stack(losses).sum() / targets.numel()

    def _summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(**options)

    def init_weights(self) -> None:
        self.model.init_weights()
