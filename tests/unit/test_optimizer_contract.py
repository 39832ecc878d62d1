"""A lightstep optimizer is a torch optimizer: everything torch's own tools do with one works, and changes no bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lightstep
from lightstep.optimizer.serialization import refuse_nan
from tests.covering import every_pair, every_value
from tests.reference.pair import (
    BACKENDS,
    DTYPES,
    IN_BACKWARD,
    TWO_GROUPS,
    Pair,
    same_tree,
    scale_for,
    through_bytes,
)
from tests.reference.tiny_model import TinyModel, loss_of
from tests.training import made
from tests.unit.test_classes_of_others import CountsInItsGroup
from tests.unit.test_exactness import DEVICE, HOST

backends = pytest.mark.parametrize("backend", ["stream"])


def build(parameters: str = "bfloat16", backend: str = "resident", name: str = "AdamW", **more: Any) -> Pair:
    scope = "unit" if backend in IN_BACKWARD else "global"
    values = {"micro_batches": 2, "max_norm": 0.35, "scope": scope, **scale_for(parameters), **more}
    return Pair(*TWO_GROUPS[name], parameters=parameters, backend=backend, **values)


def without_dead_layer() -> TinyModel:
    """Every trainable parameter gets gradients: torch's own tools refuse to load state that was never made."""
    model = TinyModel()
    model.dead.requires_grad_(False)
    return model


# -- the face of a torch optimizer ------------------------------------------------------------------------------------


def test_a_lazy_module_needs_a_forward_first() -> None:
    strategy = lightstep.Strategy.load("fp32")
    model = strategy.prepare_model(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet.*forward"):
        strategy.create_optimizer(model)
    model(torch.ones(2, 3))
    optimizer = strategy.create_optimizer(model)
    optimizer.backward(model(torch.ones(2, 3)).sum())
    assert optimizer.step()


@every_pair(parameters=DTYPES, backend=BACKENDS, weights=[DEVICE, HOST])
def test_an_optimizer_that_was_replaced_takes_no_gradients(
    parameters: str, backend: str, weights: dict[str, Any]
) -> None:
    """A notebook cell run again: optimizers are forgotten by their user, and not yet by the garbage collector."""
    pair = build(parameters, backend, micro_batches=3, weights=weights)
    forgotten = [pair.optimizer, *(pair.build_optimizer(pair.strategy, pair.model) for _ in range(3))]
    pair.optimizer = pair.build_optimizer(pair.strategy, pair.model)
    pair.train(4)
    assert not any(optimizer.state for optimizer in forgotten)


def test_an_optimizer_says_that_another_one_has_its_gradients() -> None:
    """Where weights rest on the host, one of them takes the gradients to itself."""
    pair = build("bfloat16", "stream", weights=HOST)
    first = pair.optimizer
    second = pair.build_optimizer(pair.strategy, pair.model)
    loss_of(pair.model, 0).backward()
    with pytest.raises(RuntimeError, match="another optimizer of this model has taken the gradient"):
        first.step()
    assert second.step()
    loss_of(pair.model, 1).backward()
    pair.model.zero_grad()
    first.backward(loss_of(pair.model, 1))
    assert first.step()


# -- hooks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def global_hooks() -> Iterator[list[tuple[str, Optimizer]]]:
    seen: list[tuple[str, Optimizer]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("pre", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(("post", optimizer))),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@every_value(name=["AdamW", "NAdam"], backend=["stream", *IN_BACKWARD])
def test_step_hooks_fire_once_per_step(name: str, backend: str, global_hooks: list[tuple[str, Optimizer]]) -> None:
    pair = build(backend=backend, name=name, overflow_at=(2,))
    seen: list[str] = []
    handles = [
        pair.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append("pre")),
        pair.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append("post")),
    ]
    for _ in range(4):
        pair.step()
    assert seen == ["pre", "post"] * 4
    for handle in handles:
        handle.remove()
    pair.step()
    assert seen == ["pre", "post"] * 4
    assert pair.reference.skipped_steps == 1

    # The reference is a plain torch optimizer in the same process: everything that is not its is ours.
    ours = [(when, optimizer) for when, optimizer in global_hooks if optimizer is not pair.reference.optimizer]
    assert [when for when, _ in ours] == ["pre", "post"] * 5
    assert all(optimizer is pair.optimizer for _, optimizer in ours)


@backends
def test_state_dict_hooks(backend: str) -> None:
    pair = build(backend=backend)
    pair.train(2)
    seen: list[str] = []
    optimizer = pair.optimizer

    def after_save(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("after save")
        return {**state_dict, "note": "mine"}

    def before_load(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append("before load")
        assert state_dict["note"] == "mine"
        return {key: value for key, value in state_dict.items() if key != "note"}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before save"))
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    saved = optimizer.state_dict()
    assert saved["note"] == "mine"
    optimizer.load_state_dict(saved)
    assert seen == ["before save", "after save", "before load", "after load"]
    pair.train(2)


# -- groups, copies, closures, rates ----------------------------------------------------------------------------------


@backends
def test_a_closure_with_fp16_scaling_is_refused_and_nothing_lost(backend: str) -> None:
    pair = build("float16", backend, micro_batches=1)

    def refuse_a_closure_and_finish() -> Any:
        with pytest.raises((ValueError, RuntimeError), match=r"^[^\n]*closure[^\n]*$"):
            pair.optimizer.step(lambda: pytest.fail("the closure was called"))
        return finish()

    finish = pair.finish
    pair.finish = refuse_a_closure_and_finish
    pair.train(3)


@every_value(
    optimizer_class=[torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop], backend=BACKENDS, shared=[False, True]
)
def test_tensor_learning_rates(optimizer_class: type[Optimizer], backend: str, shared: bool) -> None:
    """torch puts one tensor into all groups where it is given for all of them: it is still one after a resume."""
    first = {"lr": torch.tensor(3e-3)}
    second = first if shared else {"lr": torch.tensor(1e-3)}
    pair = Pair(optimizer_class, first, second, backend=backend, max_norm=0.35)
    own = [group["lr"] for group in pair.optimizer.param_groups]
    assert all(isinstance(lr, torch.Tensor) for lr in own)
    schedulers = [lr_scheduler.ExponentialLR(o, 0.8) for o in (pair.optimizer, pair.reference.optimizer)]
    for _ in range(4):
        pair.train(1)
        for scheduler in schedulers:
            scheduler.step()
    assert all(group["lr"] is lr for group, lr in zip(pair.optimizer.param_groups, own, strict=True))
    for optimizer in (pair.optimizer, pair.reference.optimizer):
        optimizer.param_groups[0]["lr"].mul_(0.25)
    pair.train(2)
    pair.resume()
    for optimizer in (pair.optimizer, pair.reference.optimizer):
        optimizer.param_groups[0]["lr"].mul_(0.5)
    pair.train(2)


# -- state dicts ------------------------------------------------------------------------------------------------------


@every_value(parameters=DTYPES, backend=BACKENDS)
def test_the_layout_is_torchs(parameters: str, backend: str) -> None:
    pair = build(parameters, backend, make_model=without_dead_layer)
    pair.train(3)
    saved = pair.optimizer.state_dict()
    plain = pair.reference.optimizer.state_dict()
    assert {"state", "param_groups"} <= set(saved)
    assert set(saved["state"]) == set(plain["state"])
    for index, expected in plain["state"].items():
        entries = dict(saved["state"][index])
        assert ("master" in entries) == (parameters != "float32")
        entries.pop("master", None)
        same_tree(f"state[{index}]", entries, expected)
    for group, expected in zip(saved["param_groups"], plain["param_groups"], strict=True):
        assert group["params"] == expected["params"]
        assert set(expected) <= set(group)


@every_value(name=["AdamW", "Adagrad"], parameters=DTYPES, backend=BACKENDS)
def test_a_state_dict_is_a_snapshot(name: str, parameters: str, backend: str) -> None:
    pair = build(parameters, backend, name)
    pair.train(3)
    saved = pair.optimizer.state_dict()
    frozen = copy.deepcopy(saved)
    pair.train(3)
    pair.optimizer.param_groups[0]["lr"] *= 2
    pair.reference.optimizer.param_groups[0]["lr"] *= 2
    same_tree("after more steps", saved, frozen)

    for entries in saved["state"].values():
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                value.fill_(1e9)
    saved["param_groups"][0]["lr"] = 1e9
    pair.train(3)


@every_value(name=TWO_GROUPS, parameters=DTYPES, backend=BACKENDS)
def test_state_of_the_plain_torch_optimizer_loads(name: str, parameters: str, backend: str) -> None:
    """A run of plain torch on fp32 weights goes on under lightstep: masters come from the model."""
    pair = build(parameters, backend, name)
    plain_model = copy.deepcopy(pair.model).float()
    plain = TWO_GROUPS[name][0](pair.param_groups(plain_model))
    for step in range(3):
        loss_of(plain_model, step).backward()
        plain.step()
        plain.zero_grad()
    saved = through_bytes(plain.state_dict())
    for model in (pair.model, pair.reference_model):
        model.load_state_dict(plain_model.state_dict())
    for parameter in pair.reference.parameters:
        pair.reference.adopt(parameter)
    pair.optimizer.load_state_dict(saved)
    fused = [group["fused"] for group in pair.reference.optimizer.param_groups if "fused" in group]
    pair.reference.optimizer.load_state_dict(copy.deepcopy(saved))
    for group, own in zip(pair.reference.optimizer.param_groups, fused, strict=False):
        group["fused"] = own  # nobody asked for another implementation: fused where torch has it
    pair.train(4)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any], Any], object]]] = {
    "a group too few": ("group", lambda saved, last: saved["param_groups"].pop()),
    "a parameter too many": ("group", lambda saved, last: saved["param_groups"][0]["params"].append(999)),
    "a wrong shape": (
        r"'exp_avg' of parameter \d+ has shape \(2, 3\)",
        lambda saved, last: last.update(exp_avg=torch.zeros(2, 3)),
    ),
    "no entry": ("has exp_avg_sq, master, step and no exp_avg", lambda saved, last: last.pop("exp_avg")),
    "NaN": ("holds 1 NaN", lambda saved, last: last["exp_avg"].view(-1)[-1].fill_(float("nan"))),
    "a wrong scale": ("scale", lambda saved, last: saved.update(loss_scale={"scale": -1.0})),
}


@every_value(damage=DAMAGE, backend=BACKENDS)
def test_a_state_dict_that_does_not_fit_changes_nothing(damage: str, backend: str) -> None:
    pair = build("float16" if damage == "a wrong scale" else "bfloat16", backend)
    pair.train(3)
    saved = pair.optimizer.state_dict()
    message, spoil = DAMAGE[damage]
    spoil(saved, saved["state"][max(saved["state"])])
    for entries in saved["state"].values():
        entries["step"] = entries["step"] + 1000
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    with pytest.raises(ValueError, match=message):
        pair.optimizer.load_state_dict(saved)
    assert [group["lr"] for group in pair.optimizer.param_groups] == [3e-3, 1e-3]
    pair.check()
    pair.train(2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state_with_nan_is_refused_in_every_dtype(dtype: torch.dtype) -> None:
    """float8 has NaN, too, and torch has no maximum of it. It has no infinity, and torch 2.11 makes it NaN."""
    largest = torch.finfo(dtype).max if dtype.itemsize == 1 else math.inf
    sound = torch.tensor([1.0, largest]).to(dtype)
    refuse_nan("weight", {"exp_avg": sound, "empty": torch.empty(0, dtype=dtype)})
    with pytest.raises(ValueError, match=r"'exp_avg' of weight holds 2 NaN \(of 2\)"):
        refuse_nan("weight", {"exp_avg": torch.tensor([math.nan, math.nan]).to(dtype)})


def test_loaded_groups_are_not_overwritten_by_the_update_under_way() -> None:
    values = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}}
    state = {"backend": "stream", "ring_mib": 0.01, "update": "next_forward"}
    _, model, optimizer = made({**values, "optimizer_state": state}, nn.Linear(20, 30), CountsInItsGroup)
    saved = None
    for step in range(4):
        optimizer.backward(model(torch.ones(3, 20)).mean())
        optimizer.step()
        saved = optimizer.state_dict() if step == 1 else saved
    assert saved is not None
    optimizer.load_state_dict(saved)
    optimizer.synchronize()
    assert optimizer.param_groups[0]["k"] == 2


# -- torch.distributed.checkpoint.state_dict --------------------------------------------------------------------------

MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "flatten": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "full and cpu": {"full_state_dict": True, "cpu_offload": True},
}


@every_value(
    fresh=[True, False], parameters=DTYPES, name=["AdamW", "SGD-momentum", "RMSprop"], mode=MODES, backend=BACKENDS
)
def test_dcp_sets_a_fresh_or_running_optimizer_back(
    fresh: bool, parameters: str, name: str, mode: str, backend: str
) -> None:
    pair = build(parameters, backend, name, make_model=without_dead_layer, overflow_at=(2,))
    options = StateDictOptions(**MODES[mode])
    pair.train(5)
    saved = through_bytes(get_optimizer_state_dict(pair.model, pair.optimizer, options=options))
    frozen, weights = copy.deepcopy(saved), copy.deepcopy(pair.model.state_dict())
    scale = pair.optimizer.loss_scale.state_dict()
    references = copy.deepcopy((pair.reference_model, pair.reference))
    pair.train(4)  # reading the state disturbed nothing
    same_tree("what was read", saved, frozen)
    if fresh:
        pair.strategy, pair.model, pair.optimizer = pair.build()
    pair.model.load_state_dict(weights)
    before = pair.optimizer.loss_scale.state_dict()
    set_optimizer_state_dict(pair.model, pair.optimizer, saved, options=options)
    assert pair.optimizer.loss_scale.state_dict() == before, "the loss scale is not torch's to touch"
    pair.optimizer.loss_scale.load_state_dict(scale)
    pair.reference_model, pair.reference = references
    pair.steps = 5
    pair.check()
    pair.train(4)
