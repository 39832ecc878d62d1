"""The textbook mixed-precision loop that every lightstep optimizer is held against, bit for bit.

Nothing here imports lightstep. One step, in the order of the text::

    grad32  = sum of the micro-batches' gradients, each brought to fp32, in order      (reduce="float32")
            = the gradient torch accumulated in the parameter's own dtype, as fp32     (reduce="parameters")
    grad32 /= loss_scale
    master.grad = grad32
    norm    = torch.nn.utils.clip_grad_norm_(masters, max_norm)                        (in the order of the model)
    skip the step when norm is not finite
    optimizer.step()                                                                   (installed torch optimizer, fp32)
    param.copy_(master)

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
        model: the parameters in the order of ``model.parameters()``, where the groups have another one.
        masters: fp32 values to start from; without them a parameter's master is the parameter.
        rounding_seed: of the noise, in variants that round stochastically.
        hyperparameters: the optimizer's.

    Attributes:
        norm: of the last step.
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
        model: Iterable[Tensor] | None = None,
        masters: Mapping[Tensor, Tensor] | None = None,
        rounding_seed: int = 0,
        **hyperparameters: Any,
    ) -> None:
        groups = [{**group, "params": list(group["params"])} for group in param_groups]
        self.scope, self.units, self.skip, self.rounding_seed = scope, units, skip, rounding_seed
        listed = [param for group in groups for param in group["params"]]
        self.parameters: list[Tensor] = listed if model is None else in_order(listed, model)
        self.masters = {param: contiguous32((masters or {}).get(param, param)) for param in self.parameters}
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
            grad = param.grad.detach().clone().float()
            if self.reduce == "float32":
                self.sums[param] = self.sums[param] + grad if param in self.sums else grad
                param.grad = None
            else:
                self.sums[param] = grad

    @torch.no_grad()
    def step(self, reported: Tensor | None = None, *, same_bits: bool = True) -> bool:
        """Finish the step; False when it was skipped.

        Args:
            reported: what the tested step says the norm is, which must be torch's.
            same_bits: otherwise (where ranks add up a norm that torch defines for one device only) it must be near
                the norm in fp64, and is taken.
        """
        scale = self.loss_scale.scale
        # By a tensor: torch divides by a number on a GPU as it multiplies by its reciprocal, which is another rounding.
        divisors = {device: torch.tensor(scale, device=device) for device in {s.device for s in self.sums.values()}}
        grads = {p: self.sums[p] / divisors[self.sums[p].device] for p in self.parameters if p in self.sums}
        self.sums = {}
        for param in self.parameters:
            param.grad = None
        self.norm = torch.nn.utils.get_total_norm(grads.values(), self.norm_type)
        if not same_bits and reported is not None:
            check_norm(reported, grads.values(), self.norm_type)
            self.norm = reported
        elif reported is not None:
            check_same_norm(reported, self.norm)
        applied = math.isfinite(float(self.norm))
        if not applied:
            self.skipped_steps += 1
        if self.skip == "unit":
            grads = self._finite_units(grads)
        if applied or self.skip == "unit":
            self._update(grads)
        self.loss_scale.update(overflow=not applied)
        return applied

    def _update(self, grads: dict[Tensor, Tensor]) -> None:
        for param, grad in grads.items():
            self.masters[param].grad = grad
        if self.max_norm is not None:
            self._clip(list(grads))
        for param, grad in grads.items():
            grads[param] = contiguous32(grad)
            self.masters[param].grad = None
        for part in self._calls(grads):
            for param in part:
                self.masters[param].grad = grads[param]
            self.optimizer.step()
            for param in part:
                self.masters[param].grad = None
        for param, master in self.masters.items():
            param.copy_(master)

    def _clip(self, params: list[Tensor]) -> None:
        """torch's ``clip_grad_norm_``: once, or for each unit; its second half alone where the norm was given."""
        assert self.max_norm is not None
        units = [params] if self.scope == "global" else [in_order(params, unit) for unit in self.units]
        norms = []
        for unit in filter(None, units):
            masters = [self.masters[param] for param in unit]
            if self.scope == "global":
                norms.append(self.norm)
                torch.nn.utils.clip_grads_with_norm_(masters, self.max_norm, self.norm)
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(masters, self.max_norm, self.norm_type))
        self.clipped_steps += int(any(self.max_norm / (norm + 1e-6) < 1 for norm in norms))

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

    def add_param_group(self, group: Mapping[str, Any], model: Iterable[Tensor] | None = None) -> None:
        """As torch's; ``group["params"]`` are the reference model's own, ``model`` all of them in its order now."""
        for param in group["params"]:
            self.parameters.append(param)
            self.masters[param] = contiguous32(param)
        self.parameters = self.parameters if model is None else in_order(self.parameters, model)
        self.optimizer.add_param_group({**group, "params": [self.masters[param] for param in group["params"]]})

    @torch.no_grad()
    def adopt(self, param: Tensor) -> None:
        """The user changed ``param``: its master starts again from it."""
        self.masters[param].copy_(param)

    def state(self, param: Tensor) -> dict[str, Any]:
        """The base optimizer's entries for ``param``; empty before its first update."""
        return dict(self.optimizer.state.get(self.masters[param], {}))


class ReferenceAverage:
    """An exponential moving average in fp32, one ``lerp`` for each parameter and update."""

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [contiguous32(parameter) for parameter in self.parameters]

    def update(self) -> None:
        pairs = zip(self.values, self.parameters, strict=True)
        self.values = [torch.lerp(value, parameter.detach().float(), 1 - self.decay) for value, parameter in pairs]


def contiguous32(tensor: Tensor) -> Tensor:
    """An fp32 copy in row-major order: torch's fused CPU kernels ignore strides and mix up elements without a word."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).float()


def in_order(params: Iterable[Tensor], model: Iterable[Tensor]) -> list[Tensor]:
    """``params`` as ``model`` lists them, each once."""
    wanted = set(params)
    return [param for param in dict.fromkeys(model) if param in wanted]


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


def check_same_norm(reported: Tensor, norm: Tensor) -> None:
    """Assert equal bits; a norm that is not finite may be so in any way."""
    assert (reported.dim(), reported.dtype) == (0, torch.float32), f"norm must be a 0-dim fp32 tensor, is {reported!r}"
    same = torch.equal(reported.cpu(), norm.cpu())
    assert same or not (reported.isfinite() or norm.isfinite()), f"reported {reported!r}, torch has {norm!r}"
