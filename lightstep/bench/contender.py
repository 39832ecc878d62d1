"""What the benchmark runs: something that takes a list of gradients and leaves updated low-precision weights behind.

Every contender does the same work per step: one global gradient norm, clipping to `MAX_NORM`, AdamW in fp32, and the
new weights in bf16 on the device. What differs is where the state lives and how it gets there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightstep.bench.model import LlamaShape, LlamaStack

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Skipped(Exception):
    """This contender cannot run here; the message is the row's note."""


@dataclass(frozen=True)
class Setup:
    """What every contender is built from."""

    shape: LlamaShape
    device: torch.device
    seed: int = 0

    def stack(self, dtype: torch.dtype = torch.bfloat16) -> LlamaStack:
        return LlamaStack(self.shape, self.device, dtype, self.seed)


class Contender(ABC):
    """One row of the table. Building it allocates what a step needs, except state that its optimizer creates lazily."""

    name: str
    about: str
    kind: Literal["lightstep", "peer"] = "peer"
    gradient_dtype: torch.dtype = torch.bfloat16

    @abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimizer step from gradients shaped like `gradient_weights()`; may change them, keeps none of them."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The weights a forward would use after the step (this rank's shards)."""

    def gradient_weights(self) -> list[Tensor]:
        """Tensors whose shapes the gradients have."""
        return self.weights()

    def device_weights(self) -> list[Tensor]:
        """What counts as weights on the device; the table's peak is what lies beyond them and the gradients."""
        return self.weights()

    def host_tensors(self) -> list[Tensor]:
        """What the contender keeps in host memory."""
        return []

    def host_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.host_tensors())

    def finish(self) -> None:
        """Wait (the host or the current stream) until the last step's weights and host state have landed."""
        return

    def close(self) -> None:
        """Let go of what garbage collection does not."""
        return


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global 2-norm, 0-dim fp32, whatever the gradients' dtype."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_coefficient(norm: Tensor) -> Tensor:
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
