"""Random programs against the textbook loop: whatever people do to a model and its optimizer, in whatever order.

A program is a list of calls of :class:`Programs`' methods. Each does the same to a lightstep optimizer and to
:mod:`tests.reference.plain_loop`; reads and the end compare bit for bit. Of one that fails, a shortest one is reported.

``LIGHTSTEP_FUZZ_SECONDS=600 pytest tests/unit/test_fuzz.py`` goes on with other seeds for that long in all.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.lr_scheduler import ExponentialLR

import lightstep
from lightstep.checkpoint.background import finish_pending
from lightstep.optimizer import queue
from lightstep.state import segment
from lightstep.state import units as units_module
from lightstep.state.lanes import Lanes
from lightstep.state.snapshot import Snapshot
from tests import one_pass_on_cpu
from tests.patience import PATIENCE
from tests.reference.fuzz_model import LAYERS, FuzzModel, layers_of, loss_of
from tests.reference.pair import FP16_SCALE, TWO_GROUPS, check_state, same, through_bytes
from tests.reference.plain_loop import ReferenceAverage, ReferenceLoop
from tests.reference.rounded_weights import (
    RoundedWeights,
    RoundedWithNearestMoments,
    RoundedWithStochasticInt8Moments,
    RoundedWithStochasticMoments,
)
from tests.reference.several_classes import SeveralClasses
from tests.reference.short_moments import (
    KEPT,
    NEVER_NEGATIVE,
    Int8Moments,
    NearestMoments,
    StochasticInt8Moments,
    StochasticMoments,
    block_of,
    in_eight_bits,
)
from tests.reference.tiny_model import representable
from tests.training import random_delays, random_sleeps
from tests.unit.test_changed_weights import Receiver

_STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.0014}  # cuts every matrix
GLOBAL: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": _STREAM,
    "stream, next_forward": {**_STREAM, "update": "next_forward"},
    "stream in part, next_forward": {**_STREAM, "update": "next_forward", "resident_gib": 2e-6},
    "stream, overlap": {**_STREAM, "update": "overlap"},
    "stream, overlap, weights on the device": {**_STREAM, "update": "overlap", "previous_weights": "device"},
    "stream in part, overlap": {**_STREAM, "update": "overlap", "resident_gib": 2e-6, "spare_host_gib": 4e-5},
    "on the host": _STREAM,
    "on the host, next_forward": {**_STREAM, "update": "next_forward"},
    "on the host, overlap": {**_STREAM, "update": "overlap"},
}
"""``optimizer_state`` of strategies that clip by the global norm, or not at all."""
BY_UNIT: dict[str, dict[str, Any]] = {
    **GLOBAL,
    "resident, in_backward": {"backend": "resident", "update": "in_backward"},
    "stream, in_backward": {**_STREAM, "update": "in_backward"},
    "on the host, in_backward": {**_STREAM, "update": "in_backward"},
}
"""And with ``clipping.scope: unit``, without a dynamic loss scale."""


def weights_of(kind: str) -> dict[str, Any]:
    """The strategy's ``weights``."""
    if "on the host" not in kind:
        return {}
    return {"placement": "host", "device_mib": 64.0 if "overlap" in kind else 0.0005, "gradients_gib": 3e-7}


MOMENTS = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adam-amsgrad": ["exp_avg_sq", "max_exp_avg_sq"],
    "SGD-momentum": ["momentum_buffer"],
    "RMSprop": ["square_avg", "grad_avg", "momentum_buffer"],
    "Adagrad": ["sum"],
    "AdamW and Adagrad": ["exp_avg", "sum"],
}
"""By optimizer class, what may be edited."""

LOOPS = {
    "float32": ReferenceLoop,
    "nearest": NearestMoments,
    "stochastic": StochasticMoments,
    "int8": StochasticInt8Moments,
}
"""How moments are kept."""
ROUNDED_LOOPS = {
    "float32": RoundedWeights,
    "nearest": RoundedWithNearestMoments,
    "stochastic": RoundedWithStochasticMoments,
    "int8": RoundedWithStochasticInt8Moments,
}
"""The same without masters."""
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "nearest": {"moments": "bfloat16", "moments_rounding": "nearest"},
    "stochastic": {"moments": "bfloat16", "moments_rounding": "stochastic"},
    "int8": {"moments": "int8"},
}

HOOKED = ["embed.weight", "gain", "mix.weight", "blocks.1.down.weight"]
AT_ANY_TIME = {"step", "fail_in_step", "memory"}  # also between a backward that has updated weights and its step

GO = threading.Event()
"""Whoever writes a checkpoint meanwhile waits for it."""
GO.set()


def delay_lanes(optimizer: Any, seed: int) -> None:
    """Random sleeps in the lanes of whatever has some by now."""
    backend, weights = optimizer._backend, optimizer.engine._host_weights
    for lanes in backend._lanes.values():
        delay(lanes, seed, 2e-3 if backend.name == "resident" else 2e-4)
    if weights is not None:
        delay(weights.lanes, seed + 1, 5e-4)


def delay(lanes: Lanes, seed: int, longest: float) -> None:
    """Up to so many seconds; on a GPU kernels sleep, for longer than the host needs to launch a forward."""
    if lanes.device.type == "cpu":
        random_delays(lanes, seed, longest)
    else:
        random_sleeps(lanes, seed, int(longest * 2e10))


@contextlib.contextmanager
def small(at_once: int, one_pass: bool, large: int) -> Iterator[None]:
    """Tiny tensors are cut as large ones are, few units are submitted at once, and saves take their time.

    Parameters of ``large`` elements are updated in their own memory, and others put together.
    """
    with pytest.MonkeyPatch.context() as patch:
        if one_pass:
            one_pass_on_cpu.install(patch)
        patch.setattr(Snapshot, "take", _slowly(Snapshot.take))
        patch.setattr(units_module, "CUT_ELEMENTS", 16)
        patch.setattr(segment, "LARGE", large)
        patch.setattr(queue, "SUBMIT_IN_STEP", at_once)
        patch.setattr(queue, "SUBMIT_AHEAD", min(at_once, 1))
        yield


def _slowly(take: Any) -> Any:
    chance = random.Random(0)

    def slowly(snapshot: Any, parameter: Tensor, key: str) -> Tensor:
        assert GO.wait(PATIENCE)
        time.sleep(chance.random() ** 4 * 2e-3)
        return take(snapshot, parameter, key)

    return slowly


class Diverged(Exception):
    """Both losses are NaN, which nothing is equal to: the program ends."""


def check_losses(ours: Tensor, theirs: Tensor) -> None:
    if ours.isnan() and theirs.isnan():
        raise Diverged
    assert torch.equal(ours, theirs), f"the losses are {ours} and {theirs}"


class Programs:
    """lightstep (``model``, ``optimizer``) and the textbook (``twin``, ``loop``) side by side.

    Args:
        kind: a key of :data:`BY_UNIT`. by_unit: clip by layer. one_group: ``param_groups`` is left out.
        rounded: start from weights that bf16 holds exactly. moments: a key of :data:`LOOPS`.
        rounds: bf16 weights have no masters and are rounded stochastically. seed: ``precision.rounding_seed``.
    """

    def __init__(
        self,
        kind: str,
        by_unit: bool,
        dtype: str,
        base: str,
        max_norm: Any,
        one_group: bool,
        rounded: bool,
        moments: str,
        rounds: bool,
        seed: int,
    ) -> None:
        self.rounds = rounds and dtype == "bfloat16" and "SGD" not in base
        self.seed, self.receiver, self.published = seed, Receiver(), None
        one_group = one_group and "and" not in base
        self.average: lightstep.WeightAverage | None = None
        self.original: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self.last_sums: dict[Tensor, Tensor] = {}
        self.by_unit, self.dtype, self.base, self.max_norm = by_unit, dtype, base, max_norm
        self.one_group, self.late, self.rounded = one_group, one_group, rounded
        self.number, self.saved, self.folder = 0, None, tempfile.TemporaryDirectory()
        constant = {"kind": "constant", "scale": 1024.0}
        self.scale: Any = "none" if dtype != "float16" else constant if by_unit else FP16_SCALE
        model = representable(FuzzModel())
        for parameter in [] if rounded else [model.embed.weight, model.mix.weight, *model.blocks.parameters()]:
            nn.init.uniform_(parameter, -0.5, 0.5)
        given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.make(kind, model, moments)
        self.twin = copy.deepcopy(self.model).to(self.strategy.device)  # copies of weights on the host are there
        self.make_loop(None if self.rounds else given)

    # -- both sides

    def make(self, kind: str, model: nn.Module, moments: str) -> None:
        self.moments = "nearest" if self.base == "SGD-momentum" and moments == "stochastic" else moments
        self.kind, self.in_backward, self.begun, self.micro_batches = kind, "in_backward" in kind, False, 0
        self.wait_for_publication()
        is_random = self.rounds or self.moments in ("stochastic", "int8")
        self.strategy = lightstep.Strategy.load(
            {
                "precision": {
                    "parameters": self.dtype,
                    "loss_scale": self.scale,
                    "rounding_seed": self.seed if is_random else 0,  # refused otherwise
                    "master_weights": "stochastic" if self.rounds else True,
                },
                "clipping": {"max_norm": self.max_norm, "scope": "unit" if self.by_unit else "global"},
                "optimizer_state": {**BY_UNIT[kind], **SETTINGS[self.moments]},
                "roles": {"rollout": {"bucket_mib": 0.0005}},
                "weights": weights_of(kind),
            }
        )
        self.model = self.strategy.prepare_model(model)
        self.named = dict(self.model.named_parameters())  # to reach them without waiting for updates
        base, values = self.base_class()
        groups = None if self.one_group else self.groups(self.named)
        self.optimizer: Any = self.strategy.create_optimizer(self.model, base, param_groups=groups, **values)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)

    def base_class(self) -> tuple[Any, dict[str, Any]]:
        several = "and" in self.base  # each group names its own
        return (torch.optim.AdamW, {}) if several else TWO_GROUPS[self.base][:2]

    def make_loop(self, masters: dict[str, Tensor] | None = None) -> None:
        self.twins = dict(self.twin.named_parameters())
        base, values = self.base_class()
        self.loop = (ROUNDED_LOOPS if self.rounds else LOOPS)[self.moments](
            [{"params": list(self.twins.values())}] if self.one_group else self.groups(self.twins),
            SeveralClasses if "and" in self.base else base,
            loss_scale=self.scale,
            max_norm=self.max_norm,
            scope="unit" if self.by_unit else "global",
            units=list(layers_of(self.twins).values()),
            model=self.twins.values(),
            masters={self.twins[name]: master.to(self.twins[name].device) for name, master in (masters or {}).items()},
            rounding_seed=self.seed,
            **values,
        )

    def groups(self, named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        early = [parameter for name, parameter in named.items() if not name.startswith("late")]
        matrices, rest = [p for p in early if p.dim() >= 2], [p for p in early if p.dim() < 2]
        first, second = self.two_groups()
        groups = [{"params": matrices, **first}, {"params": rest, **second}]
        return groups + ([self.late_group(named)] if self.late else [])

    def two_groups(self) -> list[dict[str, Any]]:
        if "and" not in self.base:
            return [{}, TWO_GROUPS[self.base][2]]
        return [{"optimizer_class": TWO_GROUPS[one][0], **TWO_GROUPS[one][1]} for one in self.base.split(" and ")]

    def late_group(self, named: dict[str, nn.Parameter]) -> dict[str, Any]:
        return {"params": [named["late.weight"], named["late.bias"]], **self.two_groups()[0], "lr": 5e-3}

    def master(self, twin: Tensor) -> Tensor:
        """The textbook's master, or the weight where somebody has written another one."""
        master = self.loop.masters[twin]
        return master if torch.equal(master.to(twin.dtype), twin) else twin.detach().float()

    def all_have_state(self) -> bool:
        """Before that, nothing but the first optimizer knows what the weights were rounded from."""
        states = [self.loop.state(twin) for name, twin in self.twins.items() if not name.startswith(("dead", "late"))]
        return self.rounded or all(state and state.get("step", 1) > 0 for state in states)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.twin.zero_grad()
        self.loop.sums, self.micro_batches = {}, 0

    # -- one iteration

    def train(self, micro_batches: int) -> None:
        self.backward(micro_batches, True, None)
        self.step(False)

    def backward(self, micro_batches: int, last: bool, special: str | None) -> None:
        """Special ones.

        An inf in a gradient, a loss of 0 or NaN, ``loss.backward()``, a kept graph, a key of :data:`LOSSES`, or
        micro-batches of which the strategy is not told (``untold``).
        """
        own = special == "own" and self.dtype != "float16"
        told = special != "untold" or self.in_backward
        hook = self.hooked(HOOKED[self.number % 4], _first_is_inf) if special == "inf" else contextlib.nullcontext()
        with hook:
            for micro in range(micro_batches):
                final = last and micro == micro_batches - 1
                with self.strategy.accumulate(self.model, last=final) if told else contextlib.nullcontext():
                    losses = [LOSSES.get(special, loss_of)(model, self.number) for model in (self.model, self.twin)]
                    check_losses(*losses)
                    if not losses[0].requires_grad:
                        return
                    factor = {"zero": 0.0, "nan": torch.nan}.get(special)
                    ours, theirs = losses if factor is None else (loss * factor for loss in losses)
                    ours.backward() if own else self.optimizer.backward(ours, retain_graph=special == "retain")
                    self.loop.backward(theirs)
                self.number += 1
                self.micro_batches += 1
                self.begun = self.in_backward and final and not own

    @contextlib.contextmanager
    def hooked(self, name: str, hook: Any) -> Iterator[None]:
        pair = (self.named[name], self.twins[name]) if self.named[name].requires_grad else ()
        handles = [parameter.register_hook(hook) for parameter in pair]
        yield
        for handle in handles:
            handle.remove()

    def step(self, asks: bool) -> None:
        scale = self.loop.loss_scale.scale
        self.loop.skip = "unit" if self.begun else "step"
        norm = self.optimizer.grad_norm() if asks and not self.in_backward else None
        result = self.optimizer.step()
        assert norm is None or norm.isnan() or torch.equal(norm, result.grad_norm)
        for twin, master in self.loop.masters.items():
            master.data.copy_(self.master(twin))
        self.last_sums = self.loop.sums
        applied = self.loop.step(result.grad_norm)
        assert (bool(result), float(result.loss_scale)) == (applied, scale)
        assert [name for name, parameter in self.named.items() if parameter.grad is not None] == []
        self.begun, self.micro_batches = False, 0
        delay_lanes(self.optimizer, self.number)

    def closure(self, own: bool) -> None:
        if self.dtype == "float16" or self.in_backward:
            return

        def ours() -> Tensor:
            assert torch.is_grad_enabled()
            loss = loss_of(self.model, self.number)
            loss.backward() if own else self.optimizer.backward(loss)
            return loss

        if loss_of(self.twin, self.number).requires_grad:
            for twin, master in self.loop.masters.items():
                master.data.copy_(self.master(twin))
            self.loop.skip = "step"
            self.loop.backward(loss_of(self.twin, self.number))
            with torch.no_grad():
                result = self.optimizer.step(ours)
            assert bool(result) == self.loop.step(result.grad_norm)
            self.number, self.micro_batches = self.number + 1, 0

    def zero_grad(self, of_model: bool) -> None:
        if of_model:
            self.model.zero_grad()
        self.drop_gradients()

    def set_gradients_to_zero(self) -> None:
        """Those that are there, or those of the last step: zeros count as gradients."""
        given = self.loop.sums or self.last_sums
        self.optimizer.zero_grad(set_to_none=False)
        self.loop.sums = {twin: torch.zeros_like(total) for twin, total in given.items()}

    def fail(self, name: str, last: bool, drops: bool) -> None:
        """A hook raises in backward. Then all gradients are given up, or those that have arrived count."""
        updates = self.in_backward and last
        if not self.named[name].requires_grad or (updates and not self.all_have_state()):
            return
        if updates:
            self.drop_gradients()
            weights, state = copy.deepcopy(self.model.state_dict()), self.optimizer.state_dict()
        with self.hooked(name, _fail), self.strategy.accumulate(self.model, last=last):
            for backward, model in ((self.optimizer.backward, self.model), (self.loop.backward, self.twin)):
                with pytest.raises(ZeroDivisionError):
                    backward(loss_of(model, 4))
        self.loop.collect()
        self.micro_batches += 1
        if drops or updates:
            self.drop_gradients()
        if updates:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def interrupt_forward(self, layer: str) -> None:
        handle = self.model.get_submodule(layer).register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(self.model, 4)
        handle.remove()

    def fail_in_step(self) -> None:
        """A gradient that cannot be taken; mended, the step is made again."""
        gradient = self.named["mix.weight"].grad
        if self.begun or self.micro_batches != 1 or gradient is None:
            return
        self.named["mix.weight"].grad = gradient.to_sparse()
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
            self.optimizer.step()
        self.named["mix.weight"].grad = gradient
        self.step(False)

    def ask_for_the_norm(self) -> None:
        """Some time before the step."""
        if not self.in_backward:
            self.optimizer.grad_norm()

    def compute_gradients(self) -> None:
        """``torch.autograd.grad`` beside what is added up."""
        trained = [parameter for parameter in self.named.values() if parameter.requires_grad]
        torch.autograd.grad(loss_of(self.model, 4), trained, allow_unused=True)

    def edit_gradient(self, name: str, how: str) -> None:
        """All that was added up."""
        parameter, total = self.named[name], self.loop.sums.get(self.twins[name])
        if parameter.grad is not None and total is not None:  # it is not on the host
            parameter.grad = torch.zeros_like(parameter.grad) if how == "exchange" else parameter.grad.mul_(0.5)
            total.mul_(0 if how == "exchange" else 0.5)

    def add_to_gradient(self, name: str) -> None:
        """By hand, before or after a backward; matrices are in column-major order."""
        if self.in_backward:
            return
        parameter, twin = self.named[name], self.twins[name]
        own = torch.linspace(0, 1, parameter.numel()).view(parameter.shape[::-1]).to(parameter.dtype).mT
        total = self.loop.sums.get(twin, torch.zeros_like(own, dtype=torch.float32))
        if parameter.grad is None:  # there is none, or it is on the host
            parameter.grad, self.loop.sums[twin] = own, total + own
        else:
            parameter.grad = parameter.grad + own
            self.loop.sums[twin] = parameter.grad.float().clone()

    def give_up_gradients(self, layer: str, how: str) -> None:
        """Of a part of the model (``""``: all of it), through its modules or, of those that are seen, one by one."""
        if how == "one by one" and "on the host" in self.kind:
            how = "zero_grad"
        for model in (self.model, self.twin):
            part = model.get_submodule(layer)
            if how == "one by one":
                for parameter in part.parameters():
                    parameter.grad = None
            else:
                part.zero_grad(set_to_none=how == "zero_grad")
        for twin in self.loop.sums.keys() & {*self.twin.get_submodule(layer).parameters()}:
            total = self.loop.sums.pop(twin)
            if how == "to zero":
                self.loop.sums[twin] = torch.zeros_like(total)

    # -- settings

    def lr(self, group: int, value: float) -> None:
        for optimizer in (self.optimizer, self.loop.optimizer):
            optimizer.param_groups[group % len(optimizer.param_groups)]["lr"] = value

    def exchange_group(self, value: float) -> None:
        self.optimizer.param_groups[0] = {**self.optimizer.param_groups[0], "lr": value}
        self.loop.optimizer.param_groups[0]["lr"] = value

    def move_to_the_next_group(self) -> None:
        """A parameter, which has its settings from then on; the order of all parameters stays."""
        if not self.one_group and "and" not in self.base:
            for optimizer in (self.optimizer, self.loop.optimizer):
                first, second = optimizer.param_groups[:2]
                second["params"].insert(0, first["params"].pop())

    def schedule(self) -> None:
        self.scheduler.step()
        for group in self.loop.optimizer.param_groups:
            group["lr"] *= 0.9

    def clip(self, max_norm: float | None) -> None:
        self.max_norm = self.optimizer.max_norm = self.loop.max_norm = max_norm

    def memory(self, what: str) -> None:
        if what in ("synchronize", "release_device_memory"):
            getattr(self.optimizer, what)()
        elif "stream" in self.kind:
            self.optimizer.set_residency(float(what))

    def evaluating(self, name: str, *arguments: Any) -> None:
        """What is made under ``torch.inference_mode()`` could not be written to by the next step."""
        with torch.inference_mode():
            getattr(self, name)(*arguments)

    # -- the model

    def freeze(self, layer: str, frozen: bool) -> None:
        for named in (self.named, self.twins):
            layers = layers_of(named)
            every = [name for name in layers if name != "late" or self.late]
            for parameter in [p for name in (every if layer == "all" else [layer]) for p in layers[name]]:
                parameter.requires_grad_(not frozen)

    def cast(self, dtype: str) -> None:
        """The masters are the new weights then."""
        if self.rounds or "on the host" in self.kind:
            return
        self.dtype = dtype
        for model in (self.model, self.twin):
            model.to(getattr(torch, dtype))
        for twin in self.loop.masters:
            self.loop.adopt(twin)

    def swap(self, how: str) -> None:
        """Parameters are exchanged for others, as ``model.to()`` does it where there is another device."""
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            if how == "load_state_dict":
                self.model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})
            elif "on the host" not in self.kind:
                self.model._apply(torch.clone)
                self.model.float().to(getattr(torch, self.dtype))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def add_group(self) -> None:
        if not self.late:
            self.late = True
            self.freeze("late", False)
            self.optimizer.add_param_group(self.late_group(self.named))
            self.loop.add_param_group(self.late_group(self.twins))

    @torch.no_grad()
    def edit(self, how: str, which: int) -> None:
        if how == "held data":  # no read through the model says that somebody may write
            self.read("evaluate")
        for model in (self.model, self.twin):
            held = how == "held data" and model is self.model
            named = self.named if held else dict(model.named_parameters())
            if how == "load_state_dict":
                model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})
            for parameter in list(named.values()) if which < 0 else [list(named.values())[which]]:
                before = parameter.clone()
                if "data" in how:
                    parameter.data.mul_(0.5)
                elif how == "exchange":
                    parameter.data = before * 0.5
                elif how == "a row":
                    parameter.view(-1)[:1] = 0.0
                elif how != "load_state_dict":
                    parameter.copy_(before * 0.75)
                if how == "there and back":
                    parameter.copy_(before)
        if "data" in how and "on the host" in self.kind:
            self.read("evaluate")
            self.refresh()

    def refresh(self) -> None:
        """After writes through ``.data`` to weights on the host, which no step sees."""
        self.optimizer.refresh_master_weights()
        for twin, master in self.loop.masters.items():
            master.copy_(twin)

    def edit_state(self, which: int, in_place: bool, entry: int) -> None:
        name, key = list(self.twins)[which], MOMENTS[self.base][entry % len(MOMENTS[self.base])]
        entries = self.optimizer.state[self.named[name]]
        if not isinstance(entries.get(key), Tensor):
            return
        try:
            entries[key] = entries[key].zero_() if in_place else torch.zeros_like(entries[key])
        except RuntimeError as refused:
            assert "Assign instead" in str(refused)
            return
        self.loop.state(self.twins[name])[key].zero_()

    def load_own_state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    # -- reads

    def read(self, how: str) -> None:
        if how == "evaluate":
            with torch.inference_mode():
                check_losses(loss_of(self.model, 4), loss_of(self.twin, 4))
        elif how == "forward":
            check_losses(loss_of(self.model, 4), loss_of(self.twin, 4))
        elif how == "get_state_dict":
            get_state_dict(self.model, self.optimizer)
        elif how == "optimizer.state":
            self.check_state(self.optimizer.state)
        elif how == "optimizer.state_dict":
            packed = self.optimizer.state_dict()
            ids = [index for group in packed["param_groups"] for index in group["params"]]
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.check_state({p: packed["state"].get(i, {}) for i, p in zip(ids, parameters, strict=True)})
        else:
            self.check_weights(how, READS[how](self.model))

    def check_weights(self, how: str, found: dict[str, Tensor]) -> None:
        for name, twin in self.twins.items():
            same(f"{how}: {name}", found[name], twin)

    def check_state(self, state: Any) -> None:
        for name, twin in self.twins.items():
            if twin in self.loop.masters:
                entries = dict(state[self.named[name]]) if self.named[name] in state else {}
                master = self.master(twin) if self.dtype != "float32" and not self.rounds else None
                check_state(name, entries, self.loop.state(twin), master)

    def check(self) -> None:
        self.optimizer.synchronize()
        self.wait_for_publication()
        self.check_weights("the end", self.named)
        self.check_state(self.optimizer.state)
        self.check_averages()
        assert [g["lr"] for g in self.optimizer.param_groups] == [g["lr"] for g in self.loop.optimizer.param_groups]
        for name, parameter in self.original[0].items():
            same(f"{name} of the original", parameter, self.original[1][name])
        if self.saved is not None and self.saved[1] is None:
            self.load(self.kind, True, True, "float32")
            self.check_weights("what was saved", self.named)
            self.check_state(self.optimizer.state)

    def averages(self, applied: bool) -> None:
        if self.average is None:
            if not any(parameter.requires_grad for parameter in self.named.values()):
                return
            self.average = lightstep.WeightAverage(self.model, 0.9)
            self.expected = ReferenceAverage([self.twins[name] for name in self.average.tensors], 0.9)
        elif not applied:
            self.average.update()
            self.expected.update()
        else:
            with self.average.applied():
                for name, value in zip(self.average.tensors, self.expected.values, strict=True):
                    same(f"averaged {name}", self.named[name].detach(), value.to(self.named[name].dtype))
        self.check_averages()

    def check_averages(self) -> None:
        if self.average is not None:
            for (name, found), value in zip(self.average.tensors.items(), self.expected.values, strict=True):
                same(f"average of {name}", found, value)

    def forget_averages(self) -> None:
        self.average = None
        gc.collect()

    def publish(self, waits: bool) -> None:
        """The receiver takes deltas wherever it can."""
        self.wait_for_publication()
        self.strategy.publish_weights(self.model, to=self.receiver, wait=waits)
        self.published = {name: twin.detach().clone() for name, twin in self.twins.items()}
        if waits:
            self.wait_for_publication()

    def fail_to_publish(self) -> None:
        self.wait_for_publication()
        self.receiver.fails = True
        with pytest.raises(lightstep.WeightTransferError):
            self.strategy.publish_weights(self.model, to=self.receiver)

    def wait_for_publication(self) -> None:
        if self.published is not None:
            self.strategy.wait_for_publication()
            for name, value in self.published.items():
                same(f"received {name}", self.receiver.weights[name], value)
            self.published = None

    # -- optimizers that come and go

    def save(self, how: str) -> None:
        """``state``, ``checkpoint``, ``meanwhile``: written while the program goes on, or ``late``: when it is over."""
        path = Path(self.folder.name) / str(time.monotonic_ns())
        if how != "state":
            if how == "late":
                finish_pending()
                GO.clear()
            asynchronous = how in ("meanwhile", "late")
            self.strategy.save_checkpoint(path, self.model, self.optimizer, asynchronous=asynchronous)
        states = through_bytes((self.model.state_dict(), self.optimizer.state_dict())) if how == "state" else None
        masters = {n: self.master(twin).clone() for n, twin in self.twins.items() if twin in self.loop.masters}
        state = {n: self.loop.state(twin) for n, twin in self.twins.items() if twin in self.loop.masters}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.loop.optimizer.param_groups]
        averages = None if self.average is None else self.expected.values
        loop = copy.deepcopy((self.twin.state_dict(), state, groups, vars(self.loop.loss_scale), averages))
        self.saved = path, states, self.late, masters, loop

    def load(self, kind: str | None, new_model: bool, model_first: bool, moments: str) -> None:
        """What was saved last, into the optimizer (None) or a new one of some kind, of this model or a new one."""
        GO.set()
        if self.saved is None:
            return
        path, states, late, masters, (weights, state, groups, scale, averages) = self.saved
        if kind not in (BY_UNIT if self.by_unit else GLOBAL):
            kind = None if late == self.late else self.kind
        if kind is not None:
            new_model = new_model or weights_of(kind) != weights_of(self.kind)
            if late < self.late:
                self.freeze("late", True)
            self.late = late
            self.discard()
            model = FuzzModel() if new_model else self.model
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.named[name].requires_grad)
            if new_model:
                self.forget_averages()
            self.make(kind, model, moments)
        if states is None:
            finish_pending()
            self.strategy.load_checkpoint(path, self.model, self.optimizer)
        else:
            loads = [(self.model, states[0]), (self.optimizer, states[1])]
            for target, values in loads if model_first else reversed(loads):
                target.load_state_dict(values)
                self.optimizer.state_dict()  # reading does not take the old weights for an edit
        sums = {} if states is None else self.loop.sums  # load_checkpoint drops gradients
        self.twin.load_state_dict(weights)
        self.make_loop(masters)
        self.loop.sums = sums
        self.load_loop(copy.deepcopy(state))
        for group, values in zip(self.loop.optimizer.param_groups, groups, strict=True):
            group.update(values)
        vars(self.loop.loss_scale).update(scale)
        if self.average is not None and states is None:
            self.load_averages(averages)

    def load_averages(self, averages: list[Tensor] | None) -> None:
        names = self.average.tensors
        if averages is None or len(averages) != len(names):
            averages = [self.twins[name].detach().float() for name in names]
        self.expected.values = [value.clone() for value in averages]
        self.expected.parameters = [self.twins[name] for name in names]

    def load_loop(self, state: dict[str, dict[str, Any]]) -> None:
        for name, entries in state.items():
            master = self.loop.masters[self.twins[name]]
            wide = {k: v.float() if isinstance(v, Tensor) else v for k, v in entries.items()}
            for optimizer in getattr(self.loop.optimizer, "optimizers", [self.loop.optimizer]) if wide else []:
                if any(master is p for group in optimizer.param_groups for p in group["params"]):
                    optimizer.state[master].update(wide)
            if isinstance(self.loop, NearestMoments) and entries:
                kept = {k: v for k, v in wide.items() if k in KEPT and isinstance(v, Tensor)}
                shorter = _in_eight_bits if isinstance(self.loop, Int8Moments) else lambda _, value: value.bfloat16()
                self.loop.kept[master] = {k: shorter(k, v) for k, v in kept.items()}

    def move(self, kind: str, how: str, new_model: bool, moments: str) -> None:
        """Go on under another backend and update time."""
        self.save(how)
        self.load(kind, new_model, True, moments)

    def discard(self) -> None:
        if not any(parameter.requires_grad for parameter in self.named.values()):
            self.freeze("all", False)  # optimizers of frozen models are refused
        self.drop_gradients()
        del self.optimizer, self.scheduler

    def delete(self) -> None:
        """A new optimizer for weights that the old one was updating."""
        if self.all_have_state():
            self.discard()
            self.check_weights("without an optimizer", self.named)
            self.make(self.kind, self.model, self.moments)
            self.make_loop()

    def become_a_copy(self, pickled: bool) -> None:
        """Go on with a copy of model and optimizer, which updates in ``step()``; the original stays as it is."""
        self.drop_gradients()
        self.forget_averages()
        self.original = dict(self.model.named_parameters()), copy.deepcopy(self.twin.state_dict())
        both = self.model, self.optimizer
        self.model, self.optimizer = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
        self.in_backward = False
        self.named = dict(self.model.named_parameters())
        self.scheduler = ExponentialLR(self.optimizer, 0.9)


NAMES = [name for name, _ in FuzzModel().named_parameters()]
READS: dict[str, Any] = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: dict(model.named_parameters()),
    "attribute": lambda model: {name: model.get_parameter(name) for name in NAMES},
    "deepcopy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "pickle": lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
}


LOSSES: dict[str | None, Any] = {
    "two forwards": lambda model, number: loss_of(model, number) + loss_of(model, number + 1),
    "of weights": lambda model, number: loss_of(model, number) + model.mix.weight.float().square().sum(),
}


def _first_is_inf(gradient: Tensor) -> Tensor:
    first = torch.zeros(1, dtype=torch.int64, device=gradient.device)
    return gradient.flatten().index_fill(0, first, torch.inf).view_as(gradient)


def _in_eight_bits(key: str, value: Tensor) -> Tensor:
    block = block_of(value.shape)
    if not block:
        return value.clone()
    found = in_eight_bits(value.cpu().numpy().reshape(-1, block), key in NEVER_NEGATIVE, key, None)
    return torch.from_numpy(found).view(value.shape).to(value.device)


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("in backward")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# -- programs

flags, counts, one_of_kinds = st.booleans(), st.integers(1, 3), st.sampled_from(list(BY_UNIT))
ways_to_save, ways_to_keep = st.sampled_from(["state", "checkpoint", "meanwhile"]), st.sampled_from(list(LOOPS))
OPERATIONS: dict[str, list[st.SearchStrategy[Any]]] = {
    "train": [counts],
    "backward": [counts, flags, st.sampled_from([None, "inf", "zero", "own", "retain"])],
    "step": [flags],
    "closure": [flags],
    "zero_grad": [flags],
    "fail": [st.sampled_from(HOOKED[:3]), flags, flags],
    "fail_in_step": [],
    "lr": [st.integers(0, 2), st.sampled_from([0.0, 1e-3, 3e-2])],
    "schedule": [],
    "clip": [st.sampled_from([None, 0.02, 0.5])],
    "memory": [st.sampled_from(["synchronize", "release_device_memory", "0", "1e-6", "1"])],
    "freeze": [st.sampled_from(LAYERS), flags],
    "add_group": [],
    "edit": [
        st.sampled_from(["data", "copy_", "exchange", "load_state_dict", "there and back", "a row", "held data"]),
        st.integers(-1, len(NAMES) - 1),
    ],
    "edit_state": [st.integers(0, len(NAMES) - 1), flags, st.integers(0, 1)],
    "read": [st.sampled_from([*READS, "evaluate", "optimizer.state", "optimizer.state_dict"])],
    "averages": [flags],
    "publish": [flags],
    "save": [ways_to_save],
    "load": [st.none() | one_of_kinds, flags, flags, ways_to_keep],
    "move": [one_of_kinds, ways_to_save, flags, ways_to_keep],
    "delete": [],
    "become_a_copy": [flags],
}
OFTEN = ["train"] * 5 + ["backward", "step", "read", "publish"] * 3


def programs(kind: str, by_unit: bool) -> st.SearchStrategy[dict[str, Any]]:
    calls = st.one_of([st.tuples(st.just(name), *OPERATIONS[name]) for name in [*OPERATIONS, *OFTEN]])
    return st.fixed_dictionaries(
        {
            "kind": st.just(kind),
            "by_unit": st.just(by_unit),
            "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
            "base": st.sampled_from(list(MOMENTS)),
            "moments": ways_to_keep,
            "one_pass": flags,
            "large": st.sampled_from([1 << 18, 8]),
            "max_norm": st.sampled_from([None, 0.02, 0.5]),
            "one_group": flags,
            "rounded": flags,
            "rounds": flags,
            "seed": st.sampled_from([0, 7]),
            "at_once": st.sampled_from([0, 2, 40]),
            "calls": st.lists(calls, min_size=10, max_size=30),
        }
    )


def run(calls: list[tuple[Any, ...]], at_once: int, one_pass: bool, large: int, **settings: Any) -> None:
    torch.manual_seed(0)
    with small(at_once, one_pass, large), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Programs(**settings)
        for number, (name, *arguments) in enumerate([*calls, ("check",)]):
            try:
                if program.begun and name not in AT_ANY_TIME:
                    program.step(False)
                getattr(program, name)(*arguments)
            except Diverged:
                break
            except BaseException as error:
                error.add_note(f"in call {number}: {name}{tuple(arguments)}")
                GO.set()
                with contextlib.suppress(Exception):
                    finish_pending()
                raise
        GO.set()
        finish_pending()


def run_and_shorten(program: dict[str, Any]) -> None:
    """Of a program that fails, leave out call after call that it fails without. (hypothesis itself takes minutes.)"""
    try:
        return run(**program)
    except Exception as error:
        failure = error
    for place in reversed(range(len(program["calls"]))):
        shorter = {**program, "calls": program["calls"][:place] + program["calls"][place + 1 :]}
        try:
            run(**shorter)
        except Exception as error:
            if type(error) is type(failure):
                program, failure = shorter, error
    failure.add_note(f"run(**{program})")
    raise failure


CASES = [(kind, by_unit) for by_unit, kinds in ((False, GLOBAL), (True, BY_UNIT)) for kind in kinds]
EXAMPLES = 1
SECONDS = float(os.environ.get("LIGHTSTEP_FUZZ_SECONDS", 0)) / len(CASES)
if not SECONDS:  # every kind in one of the two ways
    CASES = [(kind, kind not in GLOBAL or number % 2 == 0) for number, kind in enumerate(BY_UNIT)]


@pytest.mark.parametrize(("kind", "by_unit"), CASES)
@pytest.mark.timeout(3 * PATIENCE + 2 * SECONDS)
def test_random_programs(kind: str, by_unit: bool) -> None:
    check_random_programs(kind, by_unit)


def check_random_programs(kind: str, by_unit: bool, **fixed: Any) -> None:
    """Programs of one kind, one or for :data:`SECONDS`, with these arguments of :func:`run`."""
    start, seed = time.monotonic(), time.time_ns() if SECONDS else 0
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    drawn = programs(kind, by_unit).map(lambda program: {**program, **fixed})
    while True:
        hypothesis.seed(seed)(settings(hypothesis.given(drawn)(run_and_shorten)))()
        seed += 1
        if time.monotonic() - start >= SECONDS:
            return
