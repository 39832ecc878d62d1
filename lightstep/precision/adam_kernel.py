"""AdamW and Adam in one pass over memory, with the bits of the separate passes.

The separate passes are: scale the gradient, join the master, torch's fused update, split the master. They move 66 bytes
of device memory per bf16 parameter; the fused kernel moves 26. Before its first use it is compared with the passes, for
each kind of update. If one bit differs, or Triton is missing, the passes are used.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.precision.adam_batch import AdamBatch, AdamMemory, AdamSettings, Scaling
from lightstep.precision.split import Splitter, probe_masters

__all__ = ["Kind", "fused_kernel_on", "kind_of", "runs_in_one_pass"]

logger = logging.getLogger(__name__)


@functools.cache
def fused_kernel_on(device: torch.device) -> ModuleType | None:
    """The module with the fused kernel, if there is one for this device."""
    if device.type != "cuda":
        return None
    try:
        from lightstep.precision import adam_triton
    except Exception as error:  # Triton fails in many ways: not installed, no compiler, no driver, unknown target
        _warn_fallback(device, f"{type(error).__name__}: {error}")
        return None
    return adam_triton


def kind_of(batch: AdamBatch, gradient: torch.dtype, settings: AdamSettings, scaling: Scaling) -> Kind:
    """The kind of a batch's updates."""
    exp_avg, _, largest, weight, low, _ = batch.memories[0].tensors
    assert exp_avg is not None
    return Kind(
        exp_avg.device,
        gradient,
        None if weight is None else weight.dtype,
        low is not None,
        largest is not None,
        batch.fingerprints is not None,
        settings.weight_decay != 0,
        settings.decoupled,
        settings.maximize,
        isinstance(settings.lr, Tensor),
        scaling.divisor is not None,
        scaling.factor is not None,
    )


class Kind(NamedTuple):
    """A kind of update. The kernel is compiled and checked for each."""

    device: torch.device
    gradient: torch.dtype
    weight: torch.dtype | None
    split: bool
    amsgrad: bool
    fingerprinted: bool
    decays: bool
    decoupled: bool
    maximize: bool
    lr_on_device: bool
    divided: bool
    multiplied: bool

    def settings(self, lr: float, beta1: float, beta2: float, eps: float) -> AdamSettings:
        rate = torch.tensor(lr, dtype=torch.float32, device=self.device) if self.lr_on_device else lr
        return AdamSettings(
            rate, beta1, beta2, 0.1 if self.decays else 0.0, eps, self.decoupled, self.maximize, self.amsgrad
        )

    def scaling(self) -> Scaling:
        divisor, factor, overflow = (
            torch.tensor(value, dtype=torch.float32, device=self.device) for value in (768.0, 0.37, 0.0)
        )
        return Scaling(divisor if self.divided else None, factor if self.multiplied else None, overflow)


@functools.cache
def runs_in_one_pass(kernels: ModuleType, kind: Kind) -> bool:
    """Whether ``kernels`` gives torch's bits for updates of this kind; checked at the first call."""
    try:
        settings = (kind.settings(3e-4, 0.9, 0.999, 1e-8), kind.settings(2.0, 0.0, 0.95, 1e-3))
        cases = [(one, edges, step) for one in settings for edges in (False, True) for step in (1.0, 7.0, 4321.0)]
        differing = [_differing(kernels, kind, *case) for case in cases]
        if not any(differing):
            logger.info("AdamW and Adam run in one pass on %s (%s)", kind.device, kind)
            return True
        reason = f"{', '.join(sorted(set().union(*differing)))} differ from torch's"
    except Exception as error:  # compilers and drivers fail in many ways; the separate passes work
        reason = f"{type(error).__name__}: {error}"
    _warn_fallback(kind.device, f"{reason}; {kind}")
    return False


def _warn_fallback(device: torch.device, reason: str) -> None:
    logger.warning("AdamW and Adam run in several passes on %s, not in one (%s)", device, reason)


def _differing(kernels: ModuleType, kind: Kind, settings: AdamSettings, edges: bool, step: float) -> set[str]:
    """Names of the tensors in which an update by ``kernels`` differs from the separate passes."""
    batch, number, values = _example(kind, edges, step)
    by_passes = {name: value.clone() for name, value in values.items()}
    _update_in_passes(kind, by_passes, settings, step)
    batch.update(kernels, [values["gradient"]], [number], settings, kind.scaling())
    (memory,) = batch.memories
    _, squares, _, weight, low, _ = memory.tensors
    if low is not None:
        assert weight is not None and squares is not None
        Splitter(kind.device).join(weight.clone(), low, squares, values["master"])
    found = {**values, **({} if weight is None else {"weight": weight})}
    if batch.fingerprints is not None:
        found["fingerprint"] = batch.fingerprints[memory.number :][:1]
        expected = torch.empty_like(found["fingerprint"])
        Splitter(kind.device).fingerprints(by_passes["weight"], memory.first, [(0, memory.n)], expected)
        by_passes["fingerprint"] = expected
    return {name for name, value in found.items() if not torch.equal(_bits(value), _bits(by_passes[name]))}


def _example(kind: Kind, edges: bool, step: float) -> tuple[AdamBatch, Tensor, dict[str, Tensor]]:
    """Memory for one update, the update's number, and gradient, moments and master by name; a split master is joined
    in a copy."""
    special, generator = probe_masters(kind.device), torch.Generator().manual_seed(2)

    def numbers(scale: float) -> Tensor:
        noise = torch.randn(special.numel(), generator=generator, dtype=torch.float32, device="cpu") * scale
        order = torch.randperm(special.numel(), generator=generator, device="cpu")
        return special[order.to(kind.device)] if edges else noise.to(kind.device)

    gradient, master, exp_avg = numbers(1.0).to(kind.gradient), numbers(0.02), numbers(0.1)
    squares = [numbers(1.0).abs() for _ in range(2 if kind.amsgrad else 1)]
    values = {"gradient": gradient, "master": master, "exp_avg": exp_avg, "exp_avg_sq": squares[0]}
    if kind.amsgrad:
        values["max_exp_avg_sq"] = squares[1]
    weight = None if kind.weight is None else torch.empty_like(master, dtype=kind.weight).copy_(master)
    number = torch.tensor(step, dtype=torch.float32, device=kind.device)
    marks = torch.zeros(3, dtype=torch.int32, device=kind.device) if kind.fingerprinted else None
    moments = exp_avg, squares[0], values.get("max_exp_avg_sq")
    if not kind.split:
        return AdamBatch([AdamMemory(*moments, weight, None, master, 1, 1 << 20)], marks), number, values
    low = torch.empty_like(master, dtype=torch.int16)
    assert weight is not None
    Splitter(kind.device).split(master, weight, low, squares[0])
    return AdamBatch([AdamMemory(*moments, weight, low, None, 1, 1 << 20)], marks), number, values


def _update_in_passes(kind: Kind, values: dict[str, Tensor], settings: AdamSettings, step: float) -> None:
    """Scale the gradient, run torch's own update, and round the weight from its result."""
    values["exp_avg_sq"].abs_()  # it may carry the bits of the master
    scaling, gradient = kind.scaling(), values["gradient"].float()
    if scaling.divisor is not None:
        gradient = gradient / scaling.divisor
    if scaling.factor is not None:
        gradient = gradient * scaling.factor
    optimizer_class: Any = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    optimizer = optimizer_class(
        [values["master"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        amsgrad=kind.amsgrad,
        maximize=settings.maximize,
        fused=True,
    )
    entries = {name: value for name, value in values.items() if name not in ("gradient", "master")}
    before = torch.tensor(step - 1, dtype=torch.float32, device=kind.device)
    optimizer.state[values["master"]] = {"step": before, **entries}
    values["master"].grad = gradient
    optimizer.step()
    values["master"].grad = None
    if kind.weight is not None:
        values["weight"] = torch.empty_like(values["master"], dtype=kind.weight)
        if kind.split:
            low = torch.empty_like(values["weight"], dtype=torch.int16)
            Splitter(kind.device).split(values["master"], values["weight"], low, values["exp_avg_sq"])
            values["exp_avg_sq"].abs_()  # a NaN may have had a sign
        else:
            values["weight"].copy_(values["master"])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
