"""What is measured: contenders, and the task that all of them do.

A contender computes one global gradient norm, clips to one norm, updates with fp32 AdamW (or Muon, see `--optimizer`)
and leaves new bf16 weights on the device. Contenders differ in where the state lives and how it gets there. The same
class does single steps from given gradients (`step`) and whole iterations from a batch (`iterate`).
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
"""Names of the ranges in traces. Backward lies between them."""


class Skipped(Exception):
    """This contender cannot run here; the message is the row's note."""


class Contender(ABC):
    """One row of the table. Building it allocates what a step needs, except state that its optimizer creates lazily.

    Attributes:
        model: the model that is trained; called with a batch, it returns the loss.
        optimizers: the values of `--optimizer` that it supports.
        max_norm: the global norm that it clips to.
        loss, grad_norm: of the last iteration, 0-dim on the device. The norm is the one before clipping, None if the
            contender does not expose it.
        redone_steps: how many steps before the last one had to redo updates of their backward, None for peers.
    """

    name: str
    about: str
    kind: Literal["lightstep", "peer", "baseline"] = "peer"
    gradient_dtype: torch.dtype = torch.bfloat16
    needs_group: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    max_norm: float = MAX_NORM
    model: nn.Module
    loss: Tensor
    grad_norm: Tensor | None = None
    redone_steps: int | None = None

    def placed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients, shaped like `gradient_weights()`, as :meth:`step` takes them: as backward would leave them."""
        return list(gradients)

    @abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimizer step. `gradients` may be changed, but not kept."""

    def iterate(self, batch: Sequence[Tensor]) -> None:
        """Forward, backward and step. Waits for the device only if the contender itself does."""
        with self.accumulate():
            with record_function(FORWARD):
                loss = self.model(*batch)
            self.backward(loss)
            with record_function(STEP):
                self.update()
        self.loss = loss.detach()

    def set_max_norm(self, max_norm: float) -> None:
        """Clip to this global norm from the next step on."""
        self.max_norm = max_norm

    def accumulate(self) -> AbstractContextManager[object]:
        """Context of one iteration."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """One optimizer step from the gradients in the model, which are cleared."""
        self.step([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])
        self.model.zero_grad()

    def weights(self) -> list[Tensor]:
        """The weights that the next forward uses (this rank's shards)."""
        return [local_tensor(parameter.detach()) for parameter in self.model.parameters()]

    def gradient_weights(self) -> list[Tensor]:
        """Tensors with the shapes of the gradients."""
        return self.weights()

    def device_weights(self) -> list[Tensor]:
        """All tensors on the device that count as weights."""
        return self.weights()

    def host_tensors(self) -> list[Tensor]:
        """The tensors that the contender keeps in host memory."""
        return []

    def host_bytes(self) -> int:
        return nbytes(self.host_tensors())

    def finish(self) -> None:
        """Make the host or the current stream wait until the last step's weights and host state are written."""
        return

    def close(self) -> None:
        """Release what garbage collection does not."""
        return


@dataclass(frozen=True)
class Task(ABC):
    """What every contender does, how it is measured, and how the result is shown.

    Attributes:
        case: the size (tokens or tensors), for tasks that are measured at several.
        stem: file name of the result, without its suffix.
        case_name: the JSON key of `case`.
        provides_gradients: whether steps are given gradients instead of running backward.
        max_norm: the global norm to clip to.
        optimizer: `--optimizer`.
        threads: torch's CPU threads; None: this rank's share of the cores.
        peers: the contenders that `--peers` can name.
        baseline: a contender that is measured before all others.
        view: how tables and chart show the result; None: the task writes its own files instead.
    """

    device: torch.device
    seed: int

    stem: ClassVar[str]
    case_name: ClassVar[str | None] = None
    default_peers: ClassVar[str] = "all"
    max_norm: float = field(default=MAX_NORM, kw_only=True)
    optimizer: str = field(default="adamw", kw_only=True)
    provides_gradients: ClassVar[bool] = False
    threads: ClassVar[int | None] = None
    peers: ClassVar[tuple[type[Contender], ...]]
    baseline: ClassVar[type[Contender] | None] = None
    view: ClassVar[View | None] = None

    case: int = field(default=0, kw_only=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Overrides for every strategy."""
        return {"clipping.max_norm": self.max_norm}

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        """The strategies of `--strategies default` on `ranks` ranks."""
        return ("resident", "stream", "stream-overlap")

    @abstractmethod
    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """A new model on the device. Equal seeds give equal weights."""

    def model_for_peers(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The same model, changed as `settings` tells strategies to change theirs."""
        return self.model(dtype)

    @abstractmethod
    def measure(self, measurement: Measurement) -> None:
        """Measure one round of one contender."""

    def probe(self, measurement: Measurement) -> None:
        """Further measurements, after the last round."""
        return

    @abstractmethod
    def head(self, run: Run) -> Values:
        """The JSON values that belong to the whole run."""

    @abstractmethod
    def figures(self, run: Run, row: Row) -> Values:
        """The JSON values of one row. A collective: all ranks call it."""

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        """Add values that compare the rows of one case with each other."""
        return


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(local_tensor(tensor.detach()).nbytes for tensor in tensors)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global 2-norm, 0-dim fp32, for gradients of any dtype."""
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
