"""Tiny models and data of the distributed tests. Shards are uneven, and empty on some ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 11
CLASSES = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class TinyTransformer(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, classes]; a frozen layer, one without gradient, a size-1 one."""

    def __init__(self, width: int = 7, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.dead = nn.Linear(3, 3)
        self.head = nn.Linear(width, VOCABULARY if tied else CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def split(self) -> list[dict[str, Any]]:
        """Two groups with their own hyper-parameters."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 1e-3, "weight_decay": 0.0},
        ]


def loss_of(model: nn.Module, step: int, micro: int, rank: int, device: torch.device) -> Tensor:
    """fp32 loss of one rank's micro-batch, the same data always."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=generator).to(device)
    targets = torch.randint(CLASSES, (24,), generator=generator).to(device)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets)


class Slope(nn.Module):
    """A gradient that the caller dictates: ``loss = sum(weight * slope)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5, bias=False)
        self.weight = nn.Parameter(torch.zeros(5, 3))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope.to(self.weight.dtype)).sum() + self.inner(
            slope.T[:1, :3].to(self.weight.dtype)
        ).sum()


def tiny_llama(tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)
