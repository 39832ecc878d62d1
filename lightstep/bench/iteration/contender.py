"""What trains: something that takes a batch and has done forward, backward and step, or queued them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightstep.bench.contender import MAX_NORM
from lightstep.bench.iteration.shape import TrainedShape
from lightstep.distributed import local_tensor

FORWARD, STEP = "lightstep: forward", "lightstep: step"
"""Ranges in traces; what lies between them is backward."""

SETTINGS: dict[str, Any] = {"clipping.max_norm": MAX_NORM, "sharding.activation_checkpointing": True}
"""Laid over every strategy."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, (sequences, length) each."""


@dataclass(frozen=True)
class Task:
    """What everybody trains. `tokens`: per step and rank, multiples of `sequence`, ascending."""

    shape: TrainedShape
    device: torch.device
    seed: int
    sequence: int
    tokens: tuple[int, ...]

    def batches(self, rank: int) -> dict[int, Batch]:
        """Random tokens for each size of step; other ranks have others."""
        generator = torch.Generator().manual_seed(self.seed + 1 + rank)
        return {tokens: self._batch(tokens // self.sequence, generator) for tokens in self.tokens}

    def _batch(self, sequences: int, generator: torch.Generator) -> Batch:
        size = (sequences, self.sequence + 1)
        words = torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Training(ABC):
    """One contender. Building it makes the model; state may be made by the first iteration.

    Attributes:
        model: what is trained; called with a batch it returns the loss.
        loss: of the last iteration, 0-dim on the device.
        grad_norm: of the last iteration before clipping, 0-dim; None where nobody computes it.
    """

    name: str
    about: str
    kind: Literal["lightstep", "peer", "baseline"]
    model: nn.Module
    loss: Tensor
    grad_norm: Tensor | None = None

    def iterate(self, batch: Batch) -> None:
        """Forward, backward and step. Nothing waits for the device, unless the contender does."""
        with record_function(FORWARD):
            loss = self.forward(batch)
        self.backward(loss)
        with record_function(STEP):
            self.step()
        self.loss = loss.detach()

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @abstractmethod
    def step(self) -> None:
        """Consume the gradients."""

    def weight_bytes(self) -> int:
        """Of this rank's weights on the device."""
        return sum(local_tensor(parameter).nbytes for parameter in self.model.parameters())

    def host_bytes(self) -> int:
        """What the contender keeps in host memory."""
        return 0

    def finish(self) -> None:
        """Wait until the last step's weights and host state have landed."""
        return

    def close(self) -> None:
        """Let go of what garbage collection does not."""
        return
