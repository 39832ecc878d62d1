"""The textbook mixed-precision loop that every lightstep optimizer is held against, bit for bit.

Nothing here imports lightstep. One step, in the order of the text::

    grad32  = sum of the micro-batches' gradients, each brought to fp32, in order      (reduce="float32")
            = the gradient torch accumulated in the parameter's own dtype, as fp32     (reduce="parameters")
    grad32 /= loss_scale
    norm    = what the tested step reported, checked here against the norm in fp64
    skip the step when norm is not finite
    grad32 *= clamp(max_norm / (norm + 1e-6), max=1)
    master.grad = grad32;  optimizer.step()                                            (installed torch optimizer, fp32)
    param.copy_(master)

The norm is an argument because its last bit depends on the order of a sum, and everything after it on that bit.

Two variants: with ``scope="unit"`` each unit of parameters has a norm and a factor of its own, and with ``skip="unit"``
(updates in backward) a unit whose own norm is not finite is left out, while the others go on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NORM_TOLERANCE = 2e-6


class ReferenceScale:
    """The loss scale in plain Python numbers; ``settings`` is a strategy file's ``precision.loss_scale``."""

    def __init__(self, settings: str | Mapping[str, Any] = "none") -> None:
        values = {"kind": settings} if isinstance(settings, str) else dict(settings)
        self.dynamic = values["kind"] == "dynamic"
        self.scale = float(values.get("init_scale", values.get("scale", 1.0)))
        self.growth_factor = values.get("growth_factor", 2.0)
        self.backoff_factor = values.get("backoff_factor", 0.5)
        self.growth_interval = values.get("growth_interval", 2000)
        self.hysteresis = values.get("hysteresis", 1)
        self.min_scale = values.get("min_scale", 0.0)
        self.max_scale = values.get("max_scale", math.inf)
        self.good_steps = 0
        self.patience = self.hysteresis

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            self.patience = self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)


class ReferenceLoop:
    """fp32 masters, fp32 gradients, the installed optimizer's own ``step``.

    Args:
        param_groups: torch's layout, one dict with ``"params"`` and hyper-parameters per group; the parameters are
            the reference model's own, in bf16, fp16 or fp32.
        optimizer_class: the torch optimizer; fused where torch has it, unless ``fused`` or ``foreach`` is given.
        loss_scale: ``"none"`` or the mapping of the strategy file.
        max_norm: clip to this global norm; None clips nothing.
        norm_type: 1, 2, 3, ... or ``math.inf``.
        scope: ``"global"`` or ``"unit"``, what has one norm.
        reduce: ``"float32"`` or ``"parameters"``, the dtype in which micro-batches are added.
        units: the parameters of each unit.
        skip: ``"step"`` or ``"unit"``, what is left out where a norm is not finite.
        hyperparameters: the optimizer's.
    """

    def __init__(
        self,
        param_groups: Iterable[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        *,
        loss_scale: str | Mapping[str, Any] = "none",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scope: str = "global",
        reduce: str = "float32",
        units: Sequence[Sequence[Tensor]] = (),
        skip: str = "step",
        **hyperparameters: Any,
    ) -> None:
        groups = [dict(group) for group in param_groups]
        self.scope, self.units, self.skip = scope, units, skip
        self.parameters: list[Tensor] = [param for group in groups for param in group["params"]]
        self.masters = {param: contiguous32(param) for param in self.parameters}
        if not {"fused", "foreach"} & hyperparameters.keys() and has_fused(optimizer_class, self.parameters[0].device):
            hyperparameters["fused"] = True
        self.optimizer = optimizer_class(
            [{**group, "params": [self.masters[param] for param in group["params"]]} for group in groups],
            **hyperparameters,
        )
        self.loss_scale = ReferenceScale(loss_scale)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.reduce = reduce
        self.sums: dict[Tensor, Tensor] = {}
        self.clipped_steps = 0
        self.skipped_steps = 0

    def backward(self, loss: Tensor) -> None:
        """One micro-batch: scaled backward; its gradients join the sum."""
        (loss * self.loss_scale.scale).backward()
        self.collect()

    def collect(self) -> None:
        """Add what is in ``.grad`` to the fp32 sums; with ``reduce="parameters"`` torch has already added it."""
        for param in self.parameters:
            if param.grad is None:
                continue
            grad = contiguous32(param.grad)
            if self.reduce == "float32":
                self.sums[param] = self.sums[param] + grad if param in self.sums else grad
                param.grad = None
            else:
                self.sums[param] = grad

    @torch.no_grad()
    def step(self, norm: Tensor) -> bool:
        """Finish the step with the reported ``norm`` (0-dim fp32); False when it was skipped."""
        scale = self.loss_scale.scale
        grads = {param: total / scale for param, total in self.sums.items()}
        self.sums = {}
        for param in self.parameters:
            param.grad = None
        check_norm(norm, grads.values(), self.norm_type)
        applied = math.isfinite(float(norm))
        if not applied:
            self.skipped_steps += 1
        if self.skip == "unit":
            grads = self._finite_units(grads)
        if applied or self.skip == "unit":
            self._update(grads, norm)
        self.loss_scale.update(overflow=not applied)
        return applied

    def _update(self, grads: dict[Tensor, Tensor], norm: Tensor) -> None:
        if self.max_norm is not None:
            coefficients = [
                (unit, torch.clamp(self.max_norm / (own + 1e-6), max=1.0)) for unit, own in self._norms(grads, norm)
            ]
            self.clipped_steps += int(any(coefficient < 1 for _, coefficient in coefficients))
            for unit, coefficient in coefficients:
                for param in unit:
                    grads[param] *= coefficient.to(grads[param].device)
        for part in self._calls(grads):
            for param in part:
                self.masters[param].grad = grads[param]
            self.optimizer.step()
            for param in part:
                self.masters[param].grad = None
        for param, master in self.masters.items():
            param.copy_(master)

    def _norms(self, grads: Mapping[Tensor, Tensor], norm: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """What is clipped together, and its norm."""
        if self.scope == "global":
            return [(list(grads), norm)]
        units = [[param for param in unit if param in grads] for unit in self.units]
        return [
            (unit, torch.tensor(exact_norm([grads[param] for param in unit], self.norm_type), dtype=torch.float32))
            for unit in units
            if unit
        ]

    def _finite_units(self, grads: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        finite = [unit for unit in self.units if all(grads[param].isfinite().all() for param in unit if param in grads)]
        return {param: grads[param] for unit in finite for param in unit if param in grads}

    def _calls(self, grads: Mapping[Tensor, Tensor]) -> list[list[Tensor]]:
        """The parameters of each call of ``optimizer.step()``: one call, except for SGD.

        torch's SGD on the CPU and the GPU (2.11 - 2.13, fused) fails with a TypeError when one parameter of a group
        has its momentum buffer and another is at its first gradient: those go in a call of their own.
        """
        if not isinstance(self.optimizer, torch.optim.SGD):
            return [list(grads)]
        return [[param for param in grads if bool(self.state(param)) is known] for known in (True, False)]

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """As torch's; ``group["params"]`` are the reference model's own."""
        for param in group["params"]:
            self.parameters.append(param)
            self.masters[param] = contiguous32(param)
        self.optimizer.add_param_group({**group, "params": [self.masters[param] for param in group["params"]]})

    @torch.no_grad()
    def adopt(self, param: Tensor) -> None:
        """The user changed ``param``: its master starts again from it."""
        self.masters[param].copy_(param)

    def state(self, param: Tensor) -> dict[str, Any]:
        """The base optimizer's entries for ``param``; empty before its first update."""
        return dict(self.optimizer.state.get(self.masters[param], {}))


def contiguous32(tensor: Tensor) -> Tensor:
    """An fp32 copy in row-major order: torch's fused CPU kernels ignore strides and mix up elements without a word."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).float()


def has_fused(optimizer_class: type[Optimizer], device: torch.device) -> bool:
    """Whether torch has a fused implementation of ``optimizer_class`` on ``device`` (Adagrad's is for the CPU only)."""
    if issubclass(optimizer_class, torch.optim.Adagrad):
        return device.type == "cpu"
    return "fused" in inspect.signature(optimizer_class.__init__).parameters


def exact_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> float:
    """The norm of all elements of ``grads`` together, in fp64; 0 for none."""
    flat = [grad.detach().double().flatten().cpu() for grad in grads]
    elements = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)
    if elements.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(elements, norm_type))


def check_norm(norm: Tensor, grads: Iterable[Tensor], norm_type: float = 2.0) -> None:
    """Assert that ``norm`` is a 0-dim fp32 tensor within ``NORM_TOLERANCE`` of fp64; not finite where that is not."""
    assert (norm.dim(), norm.dtype) == (0, torch.float32), f"norm must be a 0-dim fp32 tensor, is {norm!r}"
    exact = exact_norm(grads, norm_type)
    if not math.isfinite(exact):
        assert not math.isfinite(float(norm)), f"the norm is {exact}, reported {float(norm)}"
        return
    assert abs(float(norm) - exact) <= NORM_TOLERANCE * exact, f"reported norm {float(norm)!r}, in fp64 {exact!r}"
