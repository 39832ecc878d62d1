"""The smallest model that holds everything an optimizer can meet.

A 0-dim parameter, sizes that are no multiple of a vector register, a frozen layer, a layer that never gets a gradient,
one whose first gradient comes late and one that has a gradient only now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 11
CLASSES = 5


class TinyModel(nn.Module):
    """Tokens [batch] -> logits [batch, 5]."""

    _no_split_modules = ("Linear",)  # a forward waits for the updates of each layer when it comes to it, not at first

    def __init__(self, narrow: int = 6, wide: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, narrow)
        self.frozen = nn.Linear(narrow, narrow, bias=False).requires_grad_(False)
        self.hidden = nn.Linear(narrow, wide)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.sometimes = nn.Linear(wide, wide, bias=False)
        self.late = nn.Linear(wide, CLASSES)
        self.dead = nn.Linear(7, 3)
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, tokens: Tensor, *, sometimes: bool = True, late: bool = True) -> Tensor:
        hidden = torch.tanh(self.hidden(self.frozen(self.embed(tokens)))) * self.gain
        if sometimes:
            hidden = hidden + self.sometimes(hidden)
        logits = self.head(hidden)
        if late:
            logits = logits + self.late(hidden.to(self.late.weight.dtype))
        return logits

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Two groups: matrices, and the rest. The frozen and the dead layer are in them, as in most scripts."""
        parameters = list(self.parameters())
        return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]


def representable(model: nn.Module) -> nn.Module:
    """The model itself with weights that bf16 and fp16 hold exactly: no master depends on what rounded them."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16().half())
    return model


def batch(step: int, micro: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same tokens [6] and targets [6] for the same ``step`` and ``micro``, always."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(VOCABULARY, (6,), generator=generator)
    targets = torch.randint(CLASSES, (6,), generator=generator)
    return tokens.to(device), targets.to(device)


def loss_of(
    model: nn.Module,
    step: int,
    micro: int = 0,
    *,
    late_from: int = 0,
    intermittent: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """fp32 loss of one micro-batch, on the device of the weights if no other is given."""
    tokens, targets = batch(step, micro, device or next(model.parameters()).device)
    sometimes = not intermittent or (step + micro) % 2 == 1
    logits = model(tokens, sometimes=sometimes, late=step >= late_from)
    return nn.functional.cross_entropy(logits.float(), targets)
