"""Runs of parameters that AdamW or Adam updates together, in one pass over memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.shared_tables import SharedTable
from lightstep.precision.triton_launch import ALIGNMENT, is_aligned

__all__ = [
    "AdamBatch",
    "AdamCall",
    "AdamMemory",
    "AdamSettings",
    "AdamTensors",
    "Noise",
    "Scaling",
    "adam_call",
    "corrections",
]

Noise = Literal["none", "window", "jumps", "listed"]

_LONGEST = 1 << 20
"""Number of updates after which bias corrections must be 1 in fp32; that allows betas up to 0.99998."""


class AdamTensors(NamedTuple):
    """The tensors of a run, flat and contiguous: ``[n]``, but for scales and signs.

    Attributes:
        exp_avg, exp_avg_sq, max_exp_avg_sq: fp32, bf16, or 8-bit codes; the last with ``amsgrad`` only.
        weight: the parameters; ``None`` if they are their own masters. bf16 weights without ``low`` and ``master`` are
            widened for the update, and its result is rounded stochastically.
        low: int16, the low halves of bf16 weights' masters as :class:`~lightstep.precision.split.Splitter` makes them,
            with the extra bits in the signs of ``exp_avg_sq``.
        master: fp32.
        scales, sq_scales, max_scales, sq_signs, max_signs: what :class:`~lightstep.precision.moments_int8.Int8` keeps
            of the moments beside codes.
        numbers: the elements' numbers in their whole parameters, for noise (int32); ``None``: a window says them.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    weight: Tensor | None
    low: Tensor | None
    master: Tensor | None
    scales: Tensor | None = None
    sq_scales: Tensor | None = None
    max_scales: Tensor | None = None
    sq_signs: Tensor | None = None
    max_signs: Tensor | None = None
    numbers: Tensor | None = None


class AdamMemory:
    """The memory of a run on one device, which stays the same from step to step.

    Args:
        number: position of the weights' fingerprint.
        first: position of the first element, for the fingerprint.
        block: how moments are kept: 0: in fp32; 1: in bf16; more: in 8 bits, with a scale for so many elements.
        window: where the elements are in their whole parameter, for noise; ``None``: there is none.
        noisy: moments are rounded with the noise, not to nearest.

    Attributes:
        addresses, aligned: the tensors' addresses (0 for ``None``), and whether all of them are aligned.
    """

    __slots__ = ("addresses", "aligned", "block", "first", "n", "noisy", "number", "tensors", "window")

    def __init__(
        self,
        tensors: AdamTensors,
        number: int = 0,
        first: int = 0,
        block: int = 0,
        window: Window | None = None,
        noisy: bool = False,
    ) -> None:
        self.tensors, self.n, self.number, self.first = tensors, tensors.exp_avg.numel(), number, first
        self.block, self.window, self.noisy = block, window, noisy
        self.addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        self.aligned = all(map(is_aligned, self.addresses))

    @property
    def written(self) -> Tensor:
        """The weights, or the masters if the weights are their own."""
        written = self.tensors.master if self.tensors.weight is None else self.tensors.weight
        assert written is not None
        return written

    @property
    def numbers(self) -> Tensor | Window:
        """The elements' numbers in their whole parameters, for noise."""
        found = self.window if self.tensors.numbers is None else self.tensors.numbers
        assert found is not None
        return found

    @property
    def noise(self) -> Noise:
        """How the elements' noise is found."""
        if self.window is None:
            return "none"
        return "listed" if self.tensors.numbers is not None else "jumps" if self.window.jump else "window"


class AdamBatch:
    """Runs that are updated together, all of one kind. It is made once and used in many steps.

    Args:
        memories: in the order of their numbers, alike in blocks and noise.
        fingerprints: int32 ``[m]``; element ``memory.number`` is set to the fingerprint of the 16-bit weights, as by
            :meth:`~lightstep.precision.split.Splitter.fingerprints`. ``None``: no fingerprints are kept.

    ``kernels.update(batch, gradients, steps, call)`` updates each run once, with ``kernels`` that
    :func:`~lightstep.precision.adam_kernel.runs_in_one_pass` has accepted for their kind. It sets :attr:`marks` to zero
    before, and increments the versions of :attr:`written` afterwards. Its arguments:

    - ``gradients``: one for each run, contiguous, with its number of elements, all bf16, fp16 or fp32, as backward left
      them. They are only read.
    - ``steps``: 0-dim fp32: how many updates each run has had.

    Attributes:
        launches: what the kernels keep from step to step.
        marks: the fingerprints, to which the kernels add.
        written: the weights, or masters, that are updated: autograd refuses graphs that need earlier versions.
    """

    __slots__ = ("fingerprints", "launches", "marks", "memories", "written")

    def __init__(self, memories: Sequence[AdamMemory], fingerprints: Tensor | None) -> None:
        self.memories, self.fingerprints = memories, fingerprints
        self.launches: dict[Any, Any] = {}
        self.written = [memory.written for memory in memories]
        self.marks: list[Tensor] = []
        if fingerprints is not None:
            for _, neighbours in itertools.groupby(enumerate(memories), lambda one: one[1].number - one[0]):
                first, *others = (memory.number for _, memory in neighbours)
                self.marks.append(fingerprints[first : first + 1 + len(others)])


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
    """The update uses ``gradient / divisor * factor``; if ``overflow`` is 1 nothing changes. All are 0-dim fp32.

    ``counted`` is ``1 - overflow``: what counters of updates increase by.
    """

    divisor: Tensor | None
    factor: Tensor | None
    overflow: Tensor
    counted: Tensor


_forms: dict[Any, int] = {}
"""A number for each :attr:`AdamCall.form`, which is quicker to look up."""
_numbers = itertools.count()  # two threads must not give one number to two forms


class AdamCall(NamedTuple):
    """The kernel's arguments that all runs of a group have in common in a step.

    Attributes:
        settings, scaling: as given; the call keeps the scaling, so that no other one has its ``id``.
        shared: ``overflow``, ``corrections``, ``learning_rate``, ``divisor``, ``factor``.
        numbers: ``lr``, ``beta1``, ``beta2``, ``weight_decay``, ``eps``, and the length of ``corrections``.
        constants: whether weights decay, apart from the gradient, and whether the step goes up.
        kind: what a plan of updates depends on: whether the learning rate is on the device, whether there is a largest
            moment, and the constants.
        form: calls with the same number are of one form: constants, and dtypes and alignments of :attr:`shared`.
    """

    settings: AdamSettings
    scaling: Scaling
    shared: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple[bool, bool, bool]
    kind: tuple[bool, ...]
    form: int


def adam_call(settings: AdamSettings, scaling: Scaling) -> AdamCall:
    """What the updates of a group with these settings and this scaling have in common."""
    lr = settings.lr
    known = corrections(settings.beta1, settings.beta2, scaling.overflow.device)
    assert known is not None
    table = known.read() if known.complete is None else known.complete
    rate = lr if isinstance(lr, Tensor) else None
    shared = scaling.overflow, table, rate, scaling.divisor, scaling.factor
    numbers = (0.0 if isinstance(lr, Tensor) else lr, *settings[1:5], table.shape[1])
    constants = settings.weight_decay != 0, settings.decoupled, settings.maximize
    tensors = [None if one is None else (one.dtype, one.data_ptr() % ALIGNMENT == 0) for one in shared]
    form = _forms.setdefault((constants, *tensors), next(_numbers))
    kind = rate is not None, settings.amsgrad, *constants
    return AdamCall(settings, scaling, shared, numbers, constants, kind, form)


@functools.lru_cache(maxsize=64)
def corrections(beta1: float, beta2: float, device: torch.device) -> SharedTable | None:
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
    return SharedTable(torch.stack([first, second.sqrt()]))
