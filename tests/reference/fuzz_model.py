"""A model of 350 elements that holds what optimizers get wrong, for long random programs.

A 0-dim, a 0-element and odd-sized parameters; a weight tied to the embedding; one that is read past its module; a layer
that never gets a gradient, one that is frozen at first, and blocks that are left out now and then. One
block has rows that are long enough for 8-bit moments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 7
WIDTH = 4
LAYERS = ["", "embed", "blocks.0", "blocks.1", "blocks.2", "mix", "dead", "all"]


class FuzzBlock(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class FuzzModel(nn.Module):
    """Tokens [batch] -> logits [batch, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(FuzzBlock(inner) for inner in (5, 16, 5))
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dead = nn.Linear(3, 3)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight
        self.late = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: Tensor, left_out: int = -1) -> Tensor:
        hidden = self.embed(tokens.to(self.gain.device)) * self.gain + self.empty.sum()
        for number, block in enumerate(self.blocks):
            hidden = hidden if number == left_out else block(hidden)
        return self.out(F.linear(hidden, self.mix.weight) + self.late(hidden))


def layers_of(named: dict[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """What is clipped, frozen and updated together, by name: ``"blocks.0"``, ``"embed"``, ``""`` (the model's own)."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        parts = name.split(".")
        layers.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else len(parts) - 1]), []).append(parameter)
    return layers


def loss_of(model: nn.Module, number: int) -> Tensor:
    """fp32 loss of micro-batch ``number``; in two of five a block is left out."""
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(VOCABULARY, (2, 6), generator=generator)
    logits = model(tokens, number % 5).float()
    return F.cross_entropy(logits, targets.to(logits.device))
