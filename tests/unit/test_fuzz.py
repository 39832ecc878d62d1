"""Random programs against the textbook loop: whatever people do to a model and its optimizer, in whatever order.

A program is a list of calls of :class:`Programs`' methods, drawn by hypothesis and shrunk when one fails. Every method
does the same to a lightstep optimizer and to :mod:`tests.reference.plain_loop`; reads and the end compare bit for bit.

``LIGHTSTEP_FUZZ_SECONDS=600 pytest tests/unit/test_fuzz.py`` goes on with other seeds for that long, all tests together.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import tempfile
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

import lightstep
from lightstep.optimizer.schedule import NextForward
from lightstep.state import units as units_module
from tests.reference.fuzz_model import FuzzModel, layers_of, loss_of
from tests.reference.pair import FP16_SCALE, TWO_GROUPS, check_state, same, through_bytes
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.tiny_model import representable
from tests.unit.test_stream import random_delays

NOT_YET: set[str] = {
    "reads of deferred updates",  # next_forward: named_parameters, module.weight, deepcopy, pickle after step()
    "optimizers deleted with deferred updates",
    "frozen parameters are in the default groups",
    "own backwards after a thaw",
    "a first step with lr 0 and gradients of 0",
    "a step without trainable parameters",
    "a collection that fails",
    "state edited in place",
    "edits after a load",
    "masters of the values before they were rounded",
}
"""What the library gets wrong today; programs go around it."""

_STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.004}
GLOBAL: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "bulk": {"backend": "bulk"},
    "stream": _STREAM,
    "stream, next_forward": {**_STREAM, "update": "next_forward"},
    "stream in part, next_forward": {**_STREAM, "update": "next_forward", "resident_gib": 2e-6},
}
"""``optimizer_state`` of strategies that clip by the global norm, or not at all."""
BY_UNIT: dict[str, dict[str, Any]] = {
    **GLOBAL,
    "resident, in_backward": {"backend": "resident", "update": "in_backward"},
    "stream, in_backward": {**_STREAM, "update": "in_backward"},
}
"""And with ``clipping.scope: unit``, without a dynamic loss scale."""

MOMENT = {"AdamW": "exp_avg", "SGD-momentum": "momentum_buffer", "Adagrad": "sum"}
LAYERS = ["", "embed", "blocks.0", "blocks.1", "blocks.2", "mix", "dead"]
USED = ["embed.weight", "gain", "mix.weight", "blocks.1.down.weight"]


def delay_lanes(optimizer: Any, seed: int) -> None:
    """Random sleeps in the lanes of whatever has some by now."""
    with contextlib.suppress(AssertionError, NotImplementedError):
        random_delays(optimizer._backend.lanes, seed, 2e-4)


@contextlib.contextmanager
def small(at_once: int) -> Iterator[None]:
    """Tiny tensors are cut as large ones are, and few units are submitted at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "CUT_ELEMENTS", 16)
        patch.setattr(NextForward, "at_once", at_once)
        patch.setattr(NextForward, "ahead", min(at_once, 1))
        yield


class Programs:
    """lightstep (``model``, ``optimizer``) and the textbook (``twin``, ``loop``) side by side; methods are operations.

    Args:
        kind: a key of :data:`BY_UNIT`. by_unit: clip by layer. rounded: start from weights that bf16 holds exactly.
        default_groups: one group of all parameters, and not three.
    """

    def __init__(
        self, kind: str, by_unit: bool, dtype: str, base: str, max_norm: Any, default_groups: bool, rounded: bool
    ) -> None:
        self.by_unit, self.dtype, self.base, self.max_norm = by_unit, dtype, base, max_norm
        self.default_groups, self.late, self.number, self.micro_batches = default_groups, default_groups, 0, 0
        self.saved: Any = None
        self.folder = Path(tempfile.mkdtemp())
        rounded = rounded or "masters of the values before they were rounded" in NOT_YET
        model = representable(FuzzModel()) if rounded else FuzzModel()
        given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.make(kind, model)
        self.twin = copy.deepcopy(self.model)
        self.make_loop({parameter: given[name] for name, parameter in self.twin.named_parameters()})

    # -- both sides

    def make(self, kind: str, model: nn.Module) -> None:
        """A strategy of this kind, ``model`` prepared by it, and an optimizer."""
        scale = ({"kind": "constant", "scale": 1024.0} if self.by_unit else FP16_SCALE) if self.dtype == "float16" else "none"
        self.kind, self.in_backward = kind, "in_backward" in kind
        self.begun, self.stale, self.thawed = False, False, False
        self.strategy = lightstep.Strategy.load(
            {
                "precision": {"parameters": self.dtype, "loss_scale": scale},
                "clipping": {"max_norm": self.max_norm, "scope": "unit" if self.by_unit else "global"},
                "optimizer_state": BY_UNIT[kind],
            }
        )
        self.scale = scale
        self.model = self.strategy.prepare_model(model)
        self.named = dict(self.model.named_parameters())  # to reach them without waiting for updates
        groups: Any = self.groups(self.named)
        if self.default_groups and "frozen parameters are in the default groups" not in NOT_YET:
            groups = None
        cls, first, _ = TWO_GROUPS[self.base]
        self.optimizer: Any = self.strategy.create_optimizer(self.model, cls, param_groups=groups, **first)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def make_loop(self, masters: Any = None) -> None:
        twins = dict(self.twin.named_parameters())
        self.loop = ReferenceLoop(
            self.groups(twins),
            TWO_GROUPS[self.base][0],
            loss_scale=self.scale,
            max_norm=self.max_norm,
            scope="unit" if self.by_unit else "global",
            units=list(layers_of(twins).values()),
            model=list(twins.values()),
            masters=masters,
            **TWO_GROUPS[self.base][1],
        )
        self.pairs = [(name, self.named[name], twin) for name, twin in twins.items()]
        self.loop_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.loop.optimizer, 0.9)

    def groups(self, named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        if self.default_groups:
            return [{"params": list(named.values())}]
        early = [parameter for name, parameter in named.items() if not name.startswith("late")]
        matrices, rest = [p for p in early if p.dim() >= 2], [p for p in early if p.dim() < 2]
        groups = [{"params": matrices}, {"params": rest, **TWO_GROUPS[self.base][2]}]
        return groups + ([self.late_group(named)] if self.late else [])

    def late_group(self, named: dict[str, nn.Parameter]) -> dict[str, Any]:
        return {"params": [named["late.weight"], named["late.bias"]], "lr": 5e-3}

    def between_steps(self, item: str = "reads of deferred updates") -> None:
        """Nothing may come between the backward that has updated weights and its ``step()``."""
        if self.begun:
            self.step(False)
        if item in NOT_YET:
            self.optimizer.synchronize()

    def master(self, twin: Tensor) -> Tensor:
        """The textbook's master, or the weight where somebody has written another one."""
        master = self.loop.masters[twin]
        return master if torch.equal(master.to(twin.dtype), twin) else twin.detach().float()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.loop.sums, self.micro_batches = {}, 0
        self.twin.zero_grad()

    # -- one iteration

    def train(self, micro_batches: int) -> None:
        self.backward(micro_batches, True, None)
        self.step(False)

    def backward(self, micro_batches: int, last: bool, special: str | None) -> None:
        """Special ones: an inf in a gradient, a loss of 0, ``loss.backward()``."""
        if self.begun:
            self.step(False)
        for micro in range(micro_batches):
            final = last and micro == micro_batches - 1
            own = special == "own" and self.dtype != "float16" and not (self.thawed and _not_yet("own backwards after a thaw"))
            with self.strategy.accumulate(self.model, last=final):
                losses = [loss_of(model, self.number) for model in (self.model, self.twin)]
                assert torch.equal(*losses), f"the losses are {losses}"
                if not losses[0].requires_grad:
                    return
                ours, theirs = (loss * 0 for loss in losses) if special == "zero" else losses
                with self.hooked(USED[self.number % 4], _first_is_inf) if special == "inf" else contextlib.nullcontext():
                    ours.backward() if own else self.optimizer.backward(ours)
                    self.loop.backward(theirs)
            self.number += 1
            self.micro_batches += 1
            self.begun = self.in_backward and final and not own

    @contextlib.contextmanager
    def hooked(self, name: str, hook: Any) -> Iterator[None]:
        pair = [(ours, theirs) for key, ours, theirs in self.pairs if key == name and ours.requires_grad]
        handles = [parameter.register_hook(hook) for parameters in pair for parameter in parameters]
        yield
        for handle in handles:
            handle.remove()

    def step(self, asks: bool) -> None:
        if not any(parameter.requires_grad for parameter in self.named.values()):
            if _not_yet("a step without trainable parameters"):
                return
        if not any(self.loop.state(twin) for twin in self.loop.parameters) and not any(
            group["lr"] for group in self.optimizer.param_groups
        ):
            if _not_yet("a first step with lr 0 and gradients of 0"):
                self.lr(0, 1e-2)
        scale = self.loop.loss_scale.scale
        self.loop.skip = "unit" if self.begun else "step"
        norm = self.optimizer.grad_norm() if asks and not self.in_backward else None
        result = self.optimizer.step()
        assert norm is None or norm.isnan() or torch.equal(norm, result.grad_norm)
        with torch.no_grad():
            for twin, master in self.loop.masters.items():
                master.copy_(self.master(twin))
        applied = self.loop.step(result.grad_norm)
        assert (bool(result), float(result.loss_scale)) == (applied, scale)
        assert [name for name, parameter in self.named.items() if parameter.grad is not None] == []
        self.begun, self.stale, self.thawed, self.micro_batches = False, False, False, 0
        delay_lanes(self.optimizer, self.number)

    def zero_grad(self, of_model: bool) -> None:
        self.between_steps("")
        self.drop_gradients()
        if of_model:
            self.model.zero_grad()

    def fail(self, which: int, last: bool, drops: bool) -> None:
        """A hook raises in backward; then all is given up, or what has arrived counts."""
        self.between_steps("")
        if not self.named[USED[which]].requires_grad:
            return
        updates = self.in_backward and last
        if updates:
            self.drop_gradients()
            before = copy.deepcopy(self.model.state_dict()), self.optimizer.state_dict()
        with self.hooked(USED[which], _fail), self.strategy.accumulate(self.model, last=last):
            with pytest.raises(ZeroDivisionError):
                self.optimizer.backward(loss_of(self.model, 0))
            with pytest.raises(ZeroDivisionError):
                self.loop.backward(loss_of(self.twin, 0))
        self.loop.collect()
        self.micro_batches += 1
        if drops or updates:
            self.drop_gradients()
        if updates:
            self.stale = True
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])

    def fail_in_step(self) -> None:
        """A gradient that cannot be taken; mended, the step is made again."""
        gradient = self.named["mix.weight"].grad
        if self.begun or self.micro_batches != 1 or gradient is None or _not_yet("a collection that fails"):
            return
        self.named["mix.weight"].grad = gradient.to_sparse()
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)):
            self.optimizer.step()
        self.named["mix.weight"].grad = gradient
        self.step(False)

    # -- settings

    def lr(self, group: int, value: float) -> None:
        self.between_steps("")
        for optimizer in (self.optimizer, self.loop.optimizer):
            optimizer.param_groups[group % len(optimizer.param_groups)]["lr"] = value

    def schedule(self) -> None:
        self.between_steps("")
        self.scheduler.step()
        self.loop_scheduler.step()

    def clip(self, max_norm: float | None) -> None:
        self.between_steps("")
        self.max_norm = self.optimizer.max_norm = self.loop.max_norm = max_norm

    def memory(self, what: str) -> None:
        self.between_steps("")
        if what == "synchronize":
            self.optimizer.synchronize()
        elif what == "release":
            self.optimizer.release_device_memory()
        elif "stream" in self.kind:
            self.optimizer.set_residency(float(what))

    # -- the model

    def freeze(self, layer: str, frozen: bool) -> None:
        self.between_steps("")
        for named in (self.named, dict(self.twin.named_parameters())):
            layers = layers_of(named)
            chosen = layers.get(layer) or [p for name, ps in layers.items() for p in ps if name != "late" or self.late]
            for parameter in chosen:
                parameter.requires_grad_(not frozen)
        self.thawed |= not frozen

    def add_group(self) -> None:
        self.between_steps("")
        if self.late:
            return
        self.late = True
        twins = dict(self.twin.named_parameters())
        self.freeze("late", False)
        self.optimizer.add_param_group(self.late_group(self.named))
        self.loop.add_param_group(self.late_group(twins))

    @torch.no_grad()
    def edit(self, how: str, which: int) -> None:
        self.between_steps()
        if self.stale and _not_yet("edits after a load"):
            self.train(1)
            self.between_steps()
        for model in (self.model, self.twin):
            named = dict(model.named_parameters())
            chosen = list(named.values()) if which < 0 else [list(named.values())[which % len(named)]]
            if how == "load_state_dict":
                model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})
            for parameter in chosen:
                if how == "data":
                    parameter.data.mul_(0.5)
                elif how == "copy_":
                    parameter.copy_(parameter * 0.75)
                elif how == "exchange":
                    parameter.data = parameter.data * 0.5
                elif how == "there and back":
                    value = parameter.clone()
                    parameter.zero_()
                    parameter.copy_(value)

    def edit_state(self, which: int, in_place: bool) -> None:
        self.between_steps("")
        name, tested, twin = self.pairs[which % len(self.pairs)]
        key = MOMENT[self.base]
        if (in_place and _not_yet("state edited in place")) or twin not in self.loop.masters:
            return
        entries = self.optimizer.state[tested]
        if not isinstance(entries.get(key), Tensor):
            return
        if in_place:
            try:
                entries[key].zero_()
            except RuntimeError as refused:
                assert "Assign instead" in str(refused)
                return
        else:
            entries[key] = torch.zeros_like(entries[key])
        self.loop.state(twin)[key].zero_()

    # -- reads

    def read(self, how: str) -> None:
        read = {
            "state_dict": lambda: self.model.state_dict(),
            "named_parameters": lambda: dict(self.model.named_parameters()),
            "attribute": lambda: {name: self.model.get_parameter(name) for name in self.named},
            "deepcopy": lambda: dict(copy.deepcopy(self.model).named_parameters()),
            "pickle": lambda: dict(pickle.loads(pickle.dumps(self.model)).named_parameters()),
        }
        self.between_steps("" if how in ("state_dict", "optimizer", "state", "evaluate") else "reads of deferred updates")
        if how == "evaluate":
            with torch.inference_mode():
                assert torch.equal(loss_of(self.model, 4), loss_of(self.twin, 4))
        elif how == "optimizer":
            packed = self.optimizer.state_dict()
            ids = [index for group in packed["param_groups"] for index in group["params"]]
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.check_state({p: packed["state"].get(i, {}) for i, p in zip(ids, parameters, strict=True)})
        elif how == "state":
            self.check_state(self.optimizer.state)
        else:
            self.check_weights(how, read[how]())

    def check_weights(self, how: str, found: dict[str, Tensor]) -> None:
        for name, _, twin in self.pairs:
            same(f"{how}: {name}", found[name], twin)

    def check_state(self, state: Any) -> None:
        for name, tested, twin in self.pairs:
            if twin in self.loop.masters:
                entries = dict(state[tested]) if tested in state else {}
                check_state(name, entries, self.loop.state(twin), self.master(twin) if self.dtype != "float32" else None)

    def check(self) -> None:
        self.between_steps("")
        self.optimizer.synchronize()
        self.check_weights("the end", self.named)
        self.check_state(self.optimizer.state)
        for ours, theirs in zip(self.optimizer.param_groups, self.loop.optimizer.param_groups, strict=True):
            assert ours["lr"] == theirs["lr"]

    # -- optimizers that come and go

    def save(self, as_checkpoint: bool) -> None:
        self.between_steps("")
        path = self.folder / f"checkpoint-{self.number}-{time.monotonic_ns()}"
        if as_checkpoint:
            self.strategy.save_checkpoint(path, self.model, self.optimizer)
        states = None if as_checkpoint else through_bytes((self.model.state_dict(), self.optimizer.state_dict()))
        masters = {name: self.master(twin).clone() for name, _, twin in self.pairs if twin in self.loop.masters}
        loop = copy.deepcopy((self.loop.optimizer.state_dict(), vars(self.loop.loss_scale)))
        self.saved = path, states, self.late, masters, copy.deepcopy(self.twin.state_dict()), loop

    def load(self, kind: str | None, new_model: bool, model_first: bool) -> None:
        """What was saved last, into the optimizer (None) or a new one of some kind, of this model or a new one."""
        self.between_steps("")
        if self.saved is None:
            return
        path, states, late, masters, weights, (state, scale) = self.saved
        if kind not in (BY_UNIT if self.by_unit else GLOBAL):
            kind = None if late == self.late else self.kind
        if kind is not None:
            self.discard()
            if late < self.late:
                self.freeze("late", True)
            self.late = late
            model = FuzzModel() if new_model else self.model
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.named[name].requires_grad)
            self.make(kind, model)
        if states is None:
            self.strategy.load_checkpoint(path, self.model, self.optimizer)
        else:
            loads = [(self.model, states[0]), (self.optimizer, states[1])]
            for target, values in loads if model_first else reversed(loads):
                target.load_state_dict(values)
        self.stale = True
        self.twin.load_state_dict(weights)
        sums = self.loop.sums
        twins = dict(self.twin.named_parameters())
        self.make_loop({twins[name]: value for name, value in masters.items()})
        self.loop.sums = sums
        self.loop.optimizer.load_state_dict(copy.deepcopy(state))
        vars(self.loop.loss_scale).update(scale)

    def move(self, kind: str, as_checkpoint: bool, new_model: bool) -> None:
        """Go on under another backend and update time."""
        self.save(as_checkpoint)
        self.load(kind, new_model, True)

    def discard(self) -> None:
        if not any(parameter.requires_grad for parameter in self.named.values()):
            self.freeze("everything", False)  # optimizers of frozen models are refused
        self.between_steps("optimizers deleted with deferred updates")
        self.drop_gradients()
        del self.optimizer, self.scheduler

    def delete(self) -> None:
        """A new optimizer for weights that the old one may still be updating."""
        self.discard()
        self.check_weights("after the optimizer", self.model.state_dict())
        self.make(self.kind, self.model)
        self.make_loop()

    def become_a_copy(self) -> None:
        """Go on with a copy of model and optimizer; it updates in ``step()``."""
        self.between_steps()
        self.drop_gradients()
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        self.in_backward, self.stale = False, True
        self.named = dict(self.model.named_parameters())
        self.pairs = [(name, self.named[name], twin) for name, _, twin in self.pairs]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)


def _not_yet(item: str) -> bool:
    return item in NOT_YET


def _first_is_inf(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[0] = torch.inf
    return gradient


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("in backward")


# -- programs

flags, counts, numbers = st.booleans(), st.integers(1, 3), st.integers(0, 20)
edits = st.sampled_from(["data", "copy_", "exchange", "load_state_dict", "there and back"])
reads = st.sampled_from(
    ["state_dict", "named_parameters", "attribute", "deepcopy", "pickle", "evaluate", "optimizer", "state"]
)
special = st.sampled_from([None, "inf", "inf", "zero", "own"])
kinds = st.sampled_from(list(BY_UNIT))
OPERATIONS: dict[str, list[st.SearchStrategy[Any]]] = {
    "train": [counts],
    "backward": [counts, flags, special],
    "step": [flags],
    "zero_grad": [flags],
    "fail": [st.integers(0, 3), flags, flags],
    "fail_in_step": [],
    "lr": [numbers, st.sampled_from([0.0, 1e-3, 3e-2])],
    "schedule": [],
    "clip": [st.sampled_from([None, 0.02, 0.5])],
    "memory": [st.sampled_from(["synchronize", "release", "0", "1e-6", "1"])],
    "freeze": [st.sampled_from([*LAYERS, "everything"]), flags],
    "add_group": [],
    "edit": [edits, st.integers(-1, 15)],
    "edit_state": [numbers, flags],
    "read": [reads],
    "save": [flags],
    "load": [st.none() | kinds, flags, flags],
    "move": [kinds, flags, flags],
    "delete": [],
    "become_a_copy": [],
}
OFTEN = ["train"] * 5 + ["backward", "step", "read"] * 3
calls = st.one_of([st.tuples(st.just(name), *OPERATIONS[name]) for name in [*OPERATIONS, *OFTEN]])


def programs(kind: str, by_unit: bool) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "kind": st.just(kind),
            "by_unit": st.just(by_unit),
            "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
            "base": st.sampled_from(list(MOMENT)),
            "max_norm": st.sampled_from([None, 0.02, 0.5]),
            "default_groups": flags,
            "rounded": flags,
            "at_once": st.sampled_from([0, 2, 40]),
            "calls": st.lists(calls, min_size=10, max_size=30),
        }
    )


def run(calls: list[tuple[Any, ...]], at_once: int, **settings: Any) -> None:
    torch.manual_seed(0)
    with small(at_once), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Programs(**settings)
        for number, (name, *arguments) in enumerate([*calls, ("check",)]):
            try:
                getattr(program, name)(*arguments)
            except BaseException as error:
                error.add_note(f"in call {number}, {name}{tuple(arguments)}")
                raise
        program.optimizer.close()


def run_and_shorten(program: dict[str, Any]) -> None:
    """Of a program that fails, leave out call after call that is not needed for that: hypothesis takes minutes."""
    try:
        return run(**program)
    except Exception as error:
        failure = error
    for place in reversed(range(len(program["calls"]))):
        shorter = {**program, "calls": program["calls"][:place] + program["calls"][place + 1 :]}
        try:
            run(**shorter)
        except type(failure) as error:
            program, failure = shorter, error
        except Exception:
            continue
    failure.add_note(f"run(**{program})")
    raise failure


CASES = [(kind, by_unit) for by_unit, kinds in ((False, GLOBAL), (True, BY_UNIT)) for kind in kinds]
EXAMPLES = 20
SECONDS = float(os.environ.get("LIGHTSTEP_FUZZ_SECONDS", 0)) / len(CASES)


@pytest.mark.parametrize(("kind", "by_unit"), CASES)
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_random_programs(kind: str, by_unit: bool) -> None:
    start, seed = time.monotonic(), int(time.time()) if SECONDS else 0
    while True:
        explore = hypothesis.given(programs(kind, by_unit))(run_and_shorten)
        explore = hypothesis.settings(
            max_examples=EXAMPLES,
            phases=[hypothesis.Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )(explore)
        hypothesis.seed(seed)(explore)()
        seed += 1
        if time.monotonic() - start >= SECONDS:
            return
