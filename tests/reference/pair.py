"""A lightstep optimizer and the textbook loop on two copies of one model, side by side, compared bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightstep
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_model import TinyModel, loss_of, representable

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

BACKENDS: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": {"backend": "stream", "ring_mib": 0.02},
}
"""What a strategy file says under ``optimizer_state``; a new backend joins every test by one line here."""

_KIB = 2.0**-20  # in GiB
EVERY_TIME = {
    **BACKENDS,
    "stream-overlap": {"backend": "stream", "ring_mib": 0.02, "update": "next_forward"},
    "stream-overlap-resident-in-part": {
        "backend": "stream",
        "ring_mib": 0.02,
        "update": "next_forward",
        "resident_gib": 2 * _KIB,
    },
    "stream-in-backward-and-forward": {"backend": "stream", "ring_mib": 0.02, "update": "overlap"},
}
"""With updates at other times, for tests that look at weights only through the model or after ``synchronize()``."""

IN_BACKWARD = {
    "resident-in-backward": {"backend": "resident", "update": "in_backward"},
    "stream-in-backward": {"backend": "stream", "ring_mib": 0.02, "update": "in_backward"},
}
"""Without clipping by the global norm, and without a dynamic loss scale."""

FP16_SCALE = {
    "kind": "dynamic",
    "init_scale": 2.0**10,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 4,
    "hysteresis": 1,
    "min_scale": 1.0,
    "max_scale": 2.0**14,
}

TWO_GROUPS: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.0},
    ),
    "Adam-amsgrad": (
        torch.optim.Adam,
        {"lr": 3e-3, "amsgrad": True, "weight_decay": 0.01},
        {"lr": 1e-3, "amsgrad": True, "betas": (0.8, 0.99)},
    ),
    "SGD-momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
        {"lr": 0.02, "momentum": 0.8, "nesterov": True},
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.5, "centered": True},
        {"lr": 2e-3, "alpha": 0.9, "weight_decay": 0.01},
    ),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.02, "lr_decay": 0.01},
        {"lr": 0.05, "weight_decay": 0.01},
    ),
    "NAdam": (
        torch.optim.NAdam,
        {"lr": 2e-3, "momentum_decay": 0.01},
        {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}
"""Optimizer class, hyper-parameters of the matrices, hyper-parameters of the rest."""


def strategy_values(
    parameters: str = "bfloat16",
    backend: str = "resident",
    *,
    loss_scale: str | Mapping[str, Any] = "none",
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scope: str = "global",
    reduce: str = "float32",
    master_weights: bool | str = True,
    rounding_seed: int = 0,
    weights: Mapping[str, Any] | None = None,
    **state: Any,
) -> dict[str, Any]:
    """A strategy file for one device, as a mapping."""
    return {
        "weights": dict(weights or {}),
        "sharding": {"kind": "single"},
        "precision": {
            "parameters": parameters,
            "reduce": reduce,
            "loss_scale": loss_scale,
            "master_weights": master_weights,
            "rounding_seed": rounding_seed,
        },
        "clipping": {"max_norm": max_norm, "norm_type": norm_type, "scope": scope},
        "optimizer_state": {**EVERY_TIME, **IN_BACKWARD}[backend] | state,
    }


def scale_for(parameters: str) -> dict[str, Any]:
    """The loss scale that goes with a parameter dtype: fp16 needs one."""
    return {"loss_scale": FP16_SCALE if parameters == "float16" else "none"}


class Pair:
    """``tested`` (lightstep) and ``reference`` (textbook), trained on the same micro-batches.

    Args:
        optimizer_class, first, second: the base optimizer and the hyper-parameters of the two groups.
        micro_batches: per step.
        overflow_at: steps in whose last micro-batch an inf is written into a gradient.
        late_from: step of the late layer's first gradient.
        intermittent: the layer ``sometimes`` is used in every second micro-batch only.
        common: hyper-parameters of the constructor (``fused``, ``foreach`` ...).
        strategy: arguments of :func:`strategy_values`; what it does not know goes under ``optimizer_state``.
    """

    reference_class: type[ReferenceLoop] = ReferenceLoop
    has_masters = True

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        first: Mapping[str, Any],
        second: Mapping[str, Any],
        *,
        micro_batches: int = 1,
        overflow_at: Collection[int] = (),
        late_from: int = 0,
        intermittent: bool = False,
        common: Mapping[str, Any] | None = None,
        make_model: Callable[[], TinyModel] = TinyModel,
        seed: int = 0,
        **strategy: Any,
    ) -> None:
        self.optimizer_class, self.common = optimizer_class, dict(common or {})
        self.groups, self.make_model = (dict(first), dict(second)), make_model
        self.micro_batches, self.overflow_at = micro_batches, frozenset(overflow_at)
        self.late_from, self.intermittent = late_from, intermittent
        self.values = strategy_values(**strategy)
        update = self.values["optimizer_state"].get("update", "at_step")
        self.deferred = update in ("next_forward", "overlap")
        self.steps = 0
        self.overflow = False
        torch.manual_seed(seed)
        self.strategy, self.model, self.optimizer = self.build()
        self.reference_model = copy.deepcopy(self.model).to(self.strategy.device)
        self.reference = self.reference_class(
            self.param_groups(self.reference_model),
            optimizer_class,
            loss_scale=self.values["precision"]["loss_scale"],
            reduce=self.values["precision"]["reduce"],
            rounding_seed=self.values["precision"]["rounding_seed"],
            units=layers_of(self.reference_model),
            skip="unit" if update == "in_backward" else "step",
            model=self.reference_model.parameters(),
            **self.values["clipping"],
            **self.common,
        )
        self.arm(self.model)
        self.arm(self.reference_model)

    def build(self) -> tuple[Any, nn.Module, Any]:
        """A fresh model with a fresh optimizer of the tested kind."""
        strategy = lightstep.Strategy.load(self.values)
        model = self.build_model(strategy)
        return strategy, model, self.build_optimizer(strategy, model)

    def build_model(self, strategy: Any) -> nn.Module:
        return strategy.prepare_model(representable(self.make_model()))

    def build_optimizer(self, strategy: Any, model: nn.Module) -> Any:
        groups = self.param_groups(model)
        return strategy.create_optimizer(model, self.optimizer_class, param_groups=groups, **self.common)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Fresh group dicts for ``model``."""
        values = copy.deepcopy(self.groups)  # a tensor lr is changed in place by schedulers
        return [{"params": params, **own} for params, own in zip(model.split(), values, strict=True)]

    def arm(self, model: nn.Module) -> None:
        """Let an inf appear in one gradient of ``model`` while ``self.overflow`` is set."""

        def with_inf(grad: Tensor) -> Tensor | None:
            if not self.overflow:
                return None
            grad = grad.clone()
            grad[0] = torch.inf
            return grad

        model.hidden.bias.register_hook(with_inf)

    def named(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, tested parameter, reference parameter)."""
        tested = self.model.named_parameters()
        return [(name, p, q) for (name, p), q in zip(tested, self.reference_model.parameters(), strict=True)]

    def train(self, steps: int, after_each: Callable[[int], None] | None = None) -> None:
        """``steps`` steps of both; weights, scale and verdict compared after each, everything at the end."""
        for _ in range(steps):
            self.step()
            if not self.deferred or self.steps % 3 == 0:
                self.optimizer.synchronize()
                self.check_weights()
            if after_each is not None:
                after_each(self.steps)
        self.check()

    def step(self) -> Any:
        """One step of both."""
        step, count = self.steps, self.micro_batches
        options = {"late_from": self.late_from, "intermittent": self.intermittent, "device": self.strategy.device}
        for micro in range(count):
            last = micro == count - 1
            self.overflow = last and step in self.overflow_at
            with self.strategy.accumulate(self.model, last=last):
                self.optimizer.backward(loss_of(self.model, step, micro, **options) / count)
            self.reference.backward(loss_of(self.reference_model, step, micro, **options) / count)
        self.overflow = False
        self.steps += 1
        return self.finish()

    def finish(self) -> Any:
        """``step()`` of both on the gradients that are there."""
        scale = self.reference.loss_scale.scale
        result = self.optimizer.step()
        applied = self.reference.step(result.grad_norm)
        assert bool(result) is applied
        assert bool(result.applied) is applied
        assert float(result.loss_scale) == scale
        groups = self.optimizer.param_groups  # a read of the model's parameters waits for their updates
        assert all(p.grad is None for group in groups for p in group["params"])
        return result

    def check_weights(self) -> None:
        """Weights, bit for bit."""
        for name, tested, expected in self.named():
            same(f"step {self.steps}: {name}", tested, expected)

    def check(self) -> None:
        """Weights, masters, optimizer state and hyper-parameters, bit for bit."""
        self.optimizer.synchronize()
        self.check_weights()
        for name, tested, expected in self.named():
            if expected not in self.reference.masters:
                continue
            low = tested.dtype != torch.float32 and self.has_masters
            check_state(
                f"step {self.steps}: {name}",
                dict(self.optimizer.state[tested]) if tested in self.optimizer.state else {},
                self.reference.state(expected),
                self.reference.masters[expected] if low else None,
            )

    def resume(self, order: str = "model first") -> None:
        """Write to bytes, read weights-only, and go on with a new model and a new optimizer."""
        saved = through_bytes({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        torch.manual_seed(12345)
        self.strategy, self.model, self.optimizer = self.build()
        self.arm(self.model)
        loads = [
            lambda: self.model.load_state_dict(saved["model"]),
            lambda: self.optimizer.load_state_dict(saved["optimizer"]),
        ]
        for load in loads if order == "model first" else reversed(loads):
            load()


def layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each module that has some of its own."""
    owned = (list(module.parameters(recurse=False)) for module in model.modules())
    return [parameters for parameters in owned if parameters]


def check_state(where: str, tested: dict[str, Any], expected: dict[str, Any], master: Tensor | None) -> None:
    """``tested`` holds exactly ``expected`` plus the fp32 ``master`` (None: a parameter that is its own master).

    Before the first update state (Adagrad makes it at once) may or may not be listed; when it is, it must be right.
    """
    found = dict(tested)
    if not found.keys() - {"master"} and "step" in expected and float(expected["step"]) == 0:
        expected = {}
    listed = found.pop("master", None)
    assert listed is None or master is not None, f"{where}: a master of an fp32 parameter"
    if master is not None and (expected or listed is not None):
        assert listed is not None, f"{where}: no master"
        same(f"{where}: master", listed, master)
    expected = {key: value for key, value in expected.items() if value is not None}
    assert found.keys() == expected.keys(), f"{where}: state {sorted(found)}, expected {sorted(expected)}"
    for key, value in expected.items():
        same(f"{where}: {key}", found[key], value)


def same(where: str, tested: Any, expected: Any) -> None:
    """Equal dtype, shape and bits; plain numbers compare as numbers."""
    if not isinstance(expected, Tensor):
        assert float(tested) == float(expected), f"{where}: {tested!r}, expected {expected!r}"
        return
    tested = torch.as_tensor(tested)
    assert tested.dtype == expected.dtype, f"{where}: {tested.dtype}, expected {expected.dtype}"
    assert torch.equal(tested.cpu(), expected.cpu()), f"{where} differs"


def same_tree(where: str, tested: Any, expected: Any) -> None:
    """:func:`same` over dicts, lists and tuples."""
    if isinstance(expected, dict):
        assert set(tested) == set(expected), f"{where}: {set(tested)} != {set(expected)}"
        for key in expected:
            same_tree(f"{where}.{key}", tested[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(tested) == len(expected), where
        for index, pair in enumerate(zip(tested, expected, strict=True)):
            same_tree(f"{where}[{index}]", *pair)
    elif isinstance(expected, Tensor):
        same(where, tested, expected)
    else:
        assert tested == expected, f"{where}: {tested!r} != {expected!r}"


def through_bytes(value: Any) -> Any:
    """``torch.save`` and ``torch.load(weights_only=True)``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
