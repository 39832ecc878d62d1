"""AdamW and Adam in one pass over memory, with the bits of the separate passes.

The separate passes are: scale the gradient, join the master, torch's fused update, split the master. They move 66 bytes
of device memory per bf16 parameter; the fused kernel moves 26, and less if moments are kept in fewer bytes. Before its
first use it is compared with the passes, for each kind of update. If one bit differs, or Triton is missing, the passes
are used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.precision.adam_batch import AdamBatch, AdamMemory, AdamSettings, AdamTensors, Scaling, adam_call
from lightstep.precision.adam_batch import Noise as NoiseKind
from lightstep.precision.moments import BFloat16
from lightstep.precision.moments_int8 import LARGEST_BLOCK, Int8
from lightstep.precision.noise import Noise, numbered
from lightstep.precision.split import Splitter, probe_masters

__all__ = ["CODECS", "Kind", "fused_kernel_on", "kind_of", "runs_in_one_pass"]

logger = logging.getLogger(__name__)

CODECS = (BFloat16, Int8)
"""What the kernel decodes and encodes. Moments under any other codec, also one derived from these, are left alone."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


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
    memory = batch.memories[0]
    tensors = memory.tensors
    return Kind(
        tensors.exp_avg.device,
        gradient,
        None if tensors.weight is None else tensors.weight.dtype,
        tensors.low is not None,
        tensors.max_exp_avg_sq is not None,
        batch.fingerprints is not None,
        settings.weight_decay != 0,
        settings.decoupled,
        settings.maximize,
        isinstance(settings.lr, Tensor),
        scaling.divisor is not None,
        scaling.factor is not None,
        memory.block,
        memory.noise,
        memory.noisy,
        tensors.low is None and tensors.master is None,
    )


class Kind(NamedTuple):
    """A kind of update. The kernel is compiled and checked for each.

    Attributes:
        block, noise, noisy: see :class:`AdamMemory`.
        rounded: there are no masters, and weights are rounded with the noise.
    """

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
    block: int = 0
    noise: NoiseKind = "none"
    noisy: bool = False
    rounded: bool = False

    def settings(self, lr: float, beta1: float, beta2: float, eps: float) -> AdamSettings:
        rate = torch.tensor(lr, dtype=torch.float32, device=self.device) if self.lr_on_device else lr
        return AdamSettings(
            rate, beta1, beta2, 0.1 if self.decays else 0.0, eps, self.decoupled, self.maximize, self.amsgrad
        )

    def scaling(self) -> Scaling:
        divisor, factor, overflow = (
            torch.tensor(value, dtype=torch.float32, device=self.device) for value in (768.0, 0.37, 0.0)
        )
        return Scaling(divisor if self.divided else None, factor if self.multiplied else None, overflow, 1 - overflow)

    @property
    def window(self) -> Window | None:
        """Where the elements of the example are in their whole parameter."""
        jumping = numbered(Window(5, 3 * 4099, 1 << 31, 12345), seed=2)
        windows = {"none": None, "window": Window((1 << 33) - 77), "jumps": jumping}
        return windows.get(self.noise, Window())

    def codecs(self) -> dict[str, BFloat16 | Int8]:
        """By moment; none if they are kept in fp32."""
        moments = _MOMENTS if self.amsgrad else _MOMENTS[:2]
        noise = Noise() if self.noisy else None
        if self.block == 1:
            return {key: BFloat16(noise) for key in moments}
        return {key: Int8(self.block, key != "exp_avg", noise) for key in moments if self.block}


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
    batch, count, values = _example(kind, edges, step)
    (memory,) = batch.memories
    by_passes, found = {name: value.clone() for name, value in values.items()}, values
    _update_in_passes(kind, by_passes, settings, step)
    kept, codecs = _planes_of(memory), kind.codecs()
    if codecs:
        expected_planes = {key: [torch.empty_like(plane) for plane in kept[key]] for key in codecs}
        for key, codec in codecs.items():
            _encode(codec, expected_planes[key], by_passes.pop(key), key, step, memory)
            by_passes |= {f"{key}, plane {i}": plane for i, plane in enumerate(expected_planes[key])}
    kernels.update(batch, [values["gradient"]], [count], adam_call(settings, kind.scaling()))
    if codecs:
        for key, codec in codecs.items():
            found |= {f"{key}, plane {i}": plane.clone() for i, plane in enumerate(kept[key])}
            codec.at(kept[key]).decode(values[key])
    weight, low = memory.tensors.weight, memory.tensors.low
    if kind.rounded:
        BFloat16(Noise()).at([by_passes["weight"]]).encode_update(
            by_passes.pop("master"), "weight", step, memory.numbers
        )
    if low is not None:
        assert weight is not None
        Splitter(kind.device).join(weight.clone(), low, values["exp_avg_sq"], values["master"])
    if not codecs and low is not None:
        by_passes["exp_avg_sq"].abs_()  # it carries the bits of the master, and a NaN may have had a sign
    if weight is not None:
        found["weight"] = weight
    if batch.fingerprints is not None:
        found["fingerprint"] = batch.fingerprints[memory.number :][:1]
        by_passes["fingerprint"] = torch.empty_like(found["fingerprint"])
        marks = by_passes["fingerprint"]
        Splitter(kind.device).fingerprints(by_passes["weight"], memory.first, [(0, memory.n)], marks)
    return {name for name, value in by_passes.items() if not torch.equal(_bits(value), _bits(found[name]))}


def _planes_of(memory: AdamMemory) -> dict[str, list[Tensor]]:
    """The memory of each moment."""
    one = memory.tensors
    planes = {
        "exp_avg": (one.exp_avg, one.scales),
        "exp_avg_sq": (one.exp_avg_sq, one.sq_scales, one.sq_signs),
        "max_exp_avg_sq": (one.max_exp_avg_sq, one.max_scales, one.max_signs),
    }
    return {key: [plane for plane in listed if plane is not None] for key, listed in planes.items()}


def _encode(
    codec: BFloat16 | Int8, planes: Sequence[Tensor], value: Tensor, key: str, step: float, memory: AdamMemory
) -> None:
    """Keep a moment as an update does that runs in separate passes."""
    if memory.noisy:
        codec.at(planes).encode_update(value, key, step, memory.numbers)
    else:
        codec.at(planes).encode(value)


def _example(kind: Kind, edges: bool, step: float) -> tuple[AdamBatch, Tensor, dict[str, Tensor]]:
    """Memory for one update, the number of updates before it, and gradient, moments and master by name; what is coded
    or split is there in fp32."""
    special, generator = probe_masters(kind.device), torch.Generator().manual_seed(2)
    special = special[: special.numel() // LARGEST_BLOCK * LARGEST_BLOCK] if kind.block > 1 else special

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
    if kind.rounded:
        assert weight is not None
        master.copy_(weight)
    count = torch.tensor(step - 1, dtype=torch.float32, device=kind.device)
    marks = torch.zeros(3, dtype=torch.int32, device=kind.device) if kind.fingerprinted else None
    planes: dict[str, list[Any]] = {}
    for key, codec in kind.codecs().items():
        sizes = ((master.numel() // per, dtype) for _, dtype, per in codec.planes)
        planes[key] = [torch.empty(size, dtype=dtype, device=kind.device) for size, dtype in sizes]
        codec.at(planes[key]).encode(values[key])
        codec.at(planes[key]).decode(values[key])
    low = torch.empty_like(master, dtype=torch.int16) if kind.split else None
    if low is not None:
        assert weight is not None
        Splitter(kind.device).split(master, weight, low, values["exp_avg_sq"])
        for key, codec in kind.codecs().items():
            codec.at(planes[key]).encode(values[key])
    first, second, largest = (planes.get(key, [values.get(key)]) for key in _MOMENTS)
    beside = {"scales": first[1:], "sq_scales": second[1:2], "max_scales": largest[1:2]}
    beside |= {"sq_signs": second[2:], "max_signs": largest[2:]}
    listed = None
    if kind.noise == "listed":
        bits = torch.randint(-(2**31), 2**31, (master.numel(),), generator=generator, dtype=torch.int64, device="cpu")
        listed = bits.to(torch.int32).to(kind.device)
    whole = None if kind.split or kind.rounded else master
    given: Any = {name: one[0] for name, one in beside.items() if one}
    tensors = AdamTensors(first[0], second[0], largest[0], weight, low, whole, numbers=listed, **given)
    return AdamBatch([AdamMemory(tensors, 1, 1 << 20, kind.block, kind.window, kind.noisy)], marks), count, values


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
        else:
            values["weight"].copy_(values["master"])


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
