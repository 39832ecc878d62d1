"""What is measured: contenders.

A contender computes one global gradient norm, clips to one norm, updates with fp32 AdamW (or Muon, see `--optimizer`)
and leaves new bf16 weights on the device. Contenders differ in where the state lives and how it gets there. The same
class does single steps from given gradients (`step`) and whole iterations from a batch (`iterate`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightstep.bench.machine import FORWARD, STEP
from lightstep.distributed import local_tensor
from lightstep.optimizer.rules import Rule

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"class": "AdamW", **ADAMW},
    "muon": {"class": "Muon + AdamW", "muon": MUON, "adamw": ADAMW},
}
"""`--optimizer`: its entry in the JSON file. Muon is for the hidden matrices, AdamW for the rest."""


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
        redone_steps: how many steps before the last one had to redo or roll back updates of their backward, None for
            peers.
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


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_arguments(name: str) -> dict[str, Any]:
    """Keyword arguments of `strategy.create_optimizer`."""
    if name == "adamw":
        return {"optimizer_class": torch.optim.AdamW, **ADAMW}
    matrices = Rule(torch.optim.Muon, kinds="hidden_matrices", **MUON)
    return {"rules": [matrices, Rule(torch.optim.AdamW, kinds="rest", **ADAMW)]}


def torch_optimizers(
    name: str, model: nn.Module, updated: Sequence[Tensor], **adamw: Any
) -> list[torch.optim.Optimizer]:
    """torch's optimizers on `updated`, one tensor for each parameter of the model, in its order.

    Args:
        adamw: the implementation of AdamW, for example `fused=True`.
    """
    if name == "adamw":
        return [torch.optim.AdamW(updated, **adamw, **ADAMW)]
    matrices, rest = split_matrices(model, updated)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **adamw, **ADAMW)]


def split_matrices(model: nn.Module, updated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split `updated` into the tensors of hidden matrices and those of all other parameters."""
    pairs = list(zip(updated, hidden_matrices(model), strict=True))
    return [tensor for tensor, hidden in pairs if hidden], [tensor for tensor, hidden in pairs if not hidden]


def hidden_matrices(model: nn.Module) -> list[bool]:
    """For each parameter, whether it is a matrix inside a block."""
    inside = {id(parameter) for parameter in model.layers.parameters()}  # type: ignore[union-attr]
    return [parameter.dim() == 2 and id(parameter) in inside for parameter in model.parameters()]
