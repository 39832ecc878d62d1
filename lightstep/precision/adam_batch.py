"""Runs of parameters that AdamW or Adam updates together, in one pass over memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.precision.triton_launch import is_aligned

__all__ = ["AdamBatch", "AdamMemory", "AdamSettings", "Scaling", "corrections"]

_LONGEST = 1 << 20
"""Number of updates after which bias corrections must be 1 in fp32; that allows betas up to 0.99998."""


class AdamMemory:
    """The memory of a run on one device, which stays the same from step to step: flat, contiguous tensors ``[n]``.

    Args:
        exp_avg, exp_avg_sq, max_exp_avg_sq: fp32; the last with ``amsgrad`` only.
        weight: the parameters; ``None`` if they are their own masters.
        low: int16, the low halves of bf16 weights' masters as :class:`~lightstep.precision.split.Splitter` makes them,
            with the extra bits in the signs of ``exp_avg_sq``; ``None`` if ``master`` is given.
        master: fp32.
        number: position of the weights' fingerprint.
        first: position of the first element, for the fingerprint.

    Attributes:
        addresses, aligned: the tensors' addresses (0 for ``None``), and whether all of them are aligned.
    """

    __slots__ = ("addresses", "aligned", "first", "n", "number", "tensors")

    def __init__(
        self,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        weight: Tensor | None,
        low: Tensor | None,
        master: Tensor | None,
        number: int = 0,
        first: int = 0,
    ) -> None:
        self.tensors = exp_avg, exp_avg_sq, max_exp_avg_sq, weight, low, master
        self.n, self.number, self.first = exp_avg.numel(), number, first
        self.addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in self.tensors)
        self.aligned = all(map(is_aligned, self.addresses))

    @property
    def written(self) -> Tensor:
        """The weights, or the masters if the weights are their own."""
        *_, weight, _, master = self.tensors
        written = master if weight is None else weight
        assert written is not None
        return written


class AdamBatch:
    """Runs that are updated together, all of one kind. It is made once and used in many steps.

    Args:
        memories: in the order of their numbers.
        fingerprints: int32 ``[m]``; element ``memory.number`` is set to the fingerprint of the 16-bit weights, as by
            :meth:`~lightstep.precision.split.Splitter.fingerprints`. ``None``: no fingerprints are kept.

    Attributes:
        launches: what the kernels keep from step to step.
    """

    __slots__ = ("_marks", "_written", "fingerprints", "launches", "memories")

    def __init__(self, memories: Sequence[AdamMemory], fingerprints: Tensor | None) -> None:
        self.memories, self.fingerprints = memories, fingerprints
        self.launches: dict[Any, Any] = {}
        self._written = [memory.written for memory in memories]
        self._marks: list[Tensor] = []
        if fingerprints is not None:
            for _, neighbours in itertools.groupby(enumerate(memories), lambda one: one[1].number - one[0]):
                first, *others = (memory.number for _, memory in neighbours)
                self._marks.append(fingerprints[first : first + 1 + len(others)])

    def update(
        self,
        kernels: ModuleType,
        gradients: Sequence[Tensor],
        steps: Sequence[Tensor],
        settings: AdamSettings,
        scaling: Scaling,
    ) -> None:
        """Update each run once with ``kernels``, which :func:`runs_in_one_pass` has accepted for their kind.

        Args:
            gradients: one for each run, contiguous, with its number of elements, all bf16, fp16 or fp32, as backward
                left them. They are only read.
            steps: 0-dim fp32: the number of each run's update.
        """
        for marks in self._marks:
            marks.zero_()  # the kernel adds to them
        lr, device = settings.lr, steps[0].device
        table = corrections(settings.beta1, settings.beta2, device)
        assert table is not None
        rate = lr if isinstance(lr, Tensor) else None
        shared = (scaling.overflow, table, rate, scaling.divisor, scaling.factor)
        numbers = (0.0 if isinstance(lr, Tensor) else lr, *settings[1:5], table.shape[1])
        decays = settings.weight_decay != 0
        kernels.update(self, gradients, steps, shared, numbers, decays, settings.decoupled, settings.maximize)
        torch.autograd.graph.increment_version(self._written)  # autograd then refuses older graphs


class AdamSettings(NamedTuple):
    """Hyper-parameters of one parameter group; ``lr`` may be a 0-dim fp32 tensor on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    decoupled: bool
    maximize: bool
    amsgrad: bool


class Scaling(NamedTuple):
    """The update uses ``gradient / divisor * factor``; if ``overflow`` is 1 nothing changes. All are 0-dim fp32."""

    divisor: Tensor | None
    factor: Tensor | None
    overflow: Tensor


@functools.lru_cache(maxsize=64)
def corrections(beta1: float, beta2: float, device: torch.device) -> Tensor | None:
    """``[2, updates]``: ``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` for each number of updates, until both are 1.

    Computed by torch's own ``pow`` on that device, for its exact bits. ``None`` for betas that need too many updates.
    """
    updates = 2
    for beta in (beta1, beta2):
        if not 0 <= beta < 1:
            return None
        updates = max(updates, 2 if beta == 0 else 2 + math.ceil(26 * math.log(2) / -math.log(beta)))
    if updates > _LONGEST:
        return None
    numbers = torch.arange(updates, dtype=torch.float32, device=device)
    first, second = (
        1 - torch.pow(torch.full((), beta, dtype=torch.float32, device=device), numbers) for beta in (beta1, beta2)
    )  # `torch.tensor` would make the host wait, in every step if a scheduler cycles betas
    return torch.stack([first, second.sqrt()])
