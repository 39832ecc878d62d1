"""What is measured: contenders, and the task that all of them have.

A contender does one global gradient norm, clipping to `MAX_NORM`, AdamW in fp32 (`--optimizer` says what else), and
leaves new bf16 weights on the device. What differs is where the state lives and how it gets there. One class serves
single steps from given gradients (`step`) and whole iterations from a batch (`iterate`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightstep.distributed import local_tensor

if TYPE_CHECKING:
    from lightstep.bench.report import Values, View
    from lightstep.bench.run import Measurement, Row, Run

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

FORWARD, STEP = "lightstep: forward", "lightstep: step"
"""Ranges in traces; what lies between them is backward."""


class Skipped(Exception):
    """This contender cannot run here; the message is the row's note."""


class Contender(ABC):
    """One row of the table. Building it allocates what a step needs, except state that its optimizer creates lazily.

    Attributes:
        model: what is trained; called with a batch it returns the loss.
        optimizers: what `--optimizer` may be for it.
        loss, grad_norm: of the last iteration, 0-dim on the device; the norm before clipping, None if nobody has it.
    """

    name: str
    about: str
    kind: Literal["lightstep", "peer", "baseline"] = "peer"
    gradient_dtype: torch.dtype = torch.bfloat16
    needs_group: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    model: nn.Module
    loss: Tensor
    grad_norm: Tensor | None = None

    @abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimizer step from gradients shaped like `gradient_weights()`; may change them, keeps none of them."""

    def iterate(self, batch: Sequence[Tensor]) -> None:
        """Forward, backward and step. Nothing waits for the device, unless the contender does."""
        with self.accumulate():
            with record_function(FORWARD):
                loss = self.model(*batch)
            self.backward(loss)
            with record_function(STEP):
                self.update()
        self.loss = loss.detach()

    def limit_norm(self, max_norm: float) -> None:
        """The limit of the global norm from the next step on."""
        return

    def accumulate(self) -> AbstractContextManager[object]:
        """Around each iteration."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """One optimizer step from the gradients that backward left in the model; consumes them."""
        self.step([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        self.model.zero_grad()

    def weights(self) -> list[Tensor]:
        """The weights a forward would use after the step (this rank's shards)."""
        return [local_tensor(parameter.detach()) for parameter in self.model.parameters()]

    def gradient_weights(self) -> list[Tensor]:
        """Tensors whose shapes the gradients have."""
        return self.weights()

    def device_weights(self) -> list[Tensor]:
        """What counts as weights on the device."""
        return self.weights()

    def host_tensors(self) -> list[Tensor]:
        """What the contender keeps in host memory."""
        return []

    def host_bytes(self) -> int:
        return nbytes(self.host_tensors())

    def finish(self) -> None:
        """Wait (the host or the current stream) until the last step's weights and host state have landed."""
        return

    def close(self) -> None:
        """Let go of what garbage collection does not."""
        return


@dataclass(frozen=True)
class Task(ABC):
    """What everybody does, how that is measured, and how the result is shown.

    Attributes:
        case: the size at which it is done, where there are several.
        stem: of the files that hold the result.
        case_name: the key of a row's size.
        gives_gradients: whether steps are given their gradients, without any backward.
        max_norm: limit of the global norm; peers know :data:`MAX_NORM` alone.
        optimizer: `--optimizer`.
        threads: of torch's CPU work; None for this rank's share of the cores.
        peers: who may take part beside the strategies.
        baseline: measured before all others.
        view: the result as tables and a chart.
    """

    device: torch.device
    seed: int

    stem: ClassVar[str]
    case_name: ClassVar[str | None] = None
    default_peers: ClassVar[str] = "all"
    max_norm: float = field(default=MAX_NORM, kw_only=True)
    optimizer: str = field(default="adamw", kw_only=True)
    gives_gradients: ClassVar[bool] = False
    threads: ClassVar[int | None] = None
    peers: ClassVar[tuple[type[Contender], ...]]
    baseline: ClassVar[type[Contender] | None] = None
    view: ClassVar[View]

    case: int = field(default=0, kw_only=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Laid over every strategy."""
        return {"clipping.max_norm": self.max_norm}

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        """What `--strategies default` means on so many ranks."""
        return ("resident", "stream", "stream-overlap")

    @abstractmethod
    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """A new one on the device; equal weights for equal seeds."""

    def model_by_hand(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The same with what `settings` tell strategies to do to it."""
        return self.model(dtype)

    @abstractmethod
    def measure(self, measurement: Measurement) -> None:
        """One round of one contender."""

    def probe(self, measurement: Measurement) -> None:
        """What else is wanted of the last round."""
        return

    @abstractmethod
    def head(self, run: Run) -> Values:
        """The result's values above the rows."""

    @abstractmethod
    def figures(self, run: Run, row: Row) -> Values:
        """One row's values. A collective: all ranks call it."""

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        """Add to the values of one case what follows from all of its rows."""
        return


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global 2-norm, 0-dim fp32, whatever the gradients' dtype."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_coefficient(norm: Tensor) -> Tensor:
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
