"""Checkpoints: bitwise resume, refusal of what does not fit, and one whole checkpoint whatever happens while saving."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import random
import shutil
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

import lightstep
from lightstep.checkpoint import (
    CheckpointError,
    export_model,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    to_torch_state_dict,
    verify_checkpoints,
)
from lightstep.checkpoint import tensors as checkpoint_write
from lightstep.checkpoint.layout import seal
from lightstep.checkpoint.optimizer_state import OptimizerContent
from tests.checkpoint_runs import (
    DISK_IS_FULL,
    Adapted,
    Tied,
    Unloadable,
    contents,
    dies_at,
    failing_calls,
    held,
    limited_file_size,
)
from tests.covering import every_pair
from tests.faults import forge
from tests.reference.pair import BACKENDS, TWO_GROUPS, Pair, same_tree, scale_for, strategy_values
from tests.reference.tiny_model import TinyModel, loss_of

__all__ = ["held"]

# -- helpers -----------------------------------------------------------------------------------------------------------


def small_model(value: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Module) -> float:
    """The one value that all parameters have."""
    (value,) = {float(x) for parameter in model.parameters() for x in parameter.detach().flatten()}
    return value


def trained(parameters: str = "bfloat16", backend: str = "resident", steps: int = 3, **changes: Any) -> tuple[Any, ...]:
    """A strategy, and a model and optimizer after some steps."""
    strategy = lightstep.Strategy.load(strategy_values(parameters, backend, **scale_for(parameters), **changes))
    model = strategy.prepare_model(TinyModel())
    first, second = model.split()
    groups = [{"params": first, "lr": 3e-3}, {"params": second, "lr": 1e-3, "weight_decay": 0.0}]
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups)
    for step in range(steps):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
    return strategy, model, optimizer


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and optimizer state by name, as copies."""
    optimizer.synchronize()
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
    return found


# -- resuming ----------------------------------------------------------------------------------------------------------


class CheckpointedPair(Pair):
    """Resumes through a checkpoint folder."""

    folder: Path

    def resume(self, order: str = "model first") -> None:
        self.strategy.save_checkpoint(self.folder, self.model, self.optimizer)
        torch.manual_seed(12345)
        self.strategy, self.model, self.optimizer = self.build()
        self.arm(self.model)
        self.strategy.load_checkpoint(self.folder, self.model, self.optimizer)


@every_pair(
    name=["AdamW", "SGD-momentum", "NAdam", "Adagrad"], parameters=["bfloat16", "float16", "float32"], backend=BACKENDS
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str, parameters: str, backend: str) -> None:
    pair = CheckpointedPair(
        *TWO_GROUPS[name],
        micro_batches=2,
        overflow_at={2, 6} if parameters == "float16" else (),
        late_from=6,
        max_norm=0.1,
        parameters=parameters,
        backend=backend,
        **scale_for(parameters),
    )
    pair.folder = tmp_path / "step-4"
    pair.train(4)
    pair.resume()
    pair.check()
    pair.train(4)


STORAGES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda root: root / "runs",
    "file://": lambda root: f"file://{root}/runs",
    "memory://": lambda root: f"memory://{root}/runs",
}


@every_pair(saved=BACKENDS, loaded=BACKENDS, storage=STORAGES, asynchronous=[False, True])
def test_what_is_saved_is_loaded(
    tmp_path: Path, saved: str, loaded: str, storage: str, asynchronous: bool, held: threading.Event
) -> None:
    """By every backend into every other, wherever it is, and whatever training does while a thread writes it."""
    root = STORAGES[storage](tmp_path)
    path = root / "step-3" if isinstance(root, Path) else f"{root}/step-3"
    strategy, model, optimizer = trained(backend=saved)
    scheduler = LinearLR(optimizer, 0.5, total_iters=10)
    extra = {"losses": [1.0], "seen": torch.zeros(2)}
    expected, rates = everything(model, optimizer), [group["lr"] for group in optimizer.param_groups]
    if not asynchronous:
        held.set()
    pending = strategy.save_checkpoint(path, model, optimizer, scheduler, extra, asynchronous=asynchronous)
    drawn = draw()
    extra["losses"].append(2.0)
    extra["seen"] += 1
    for step in range(3):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        model.head.weight.zero_()
    if pending is not None:
        assert not pending.done() and latest_checkpoint(root) is None
        held.set()
        assert str(pending.result(timeout=60)) == str(path)
        weights = sum(parameter.nbytes for parameter in model.parameters())  # kept; of `resident` the state too
        assert optimizer.memory_report()["saving_bytes"] >= weights * (5 if saved == "resident" else 1)
    assert str(latest_checkpoint(root)) == str(path)
    other, model2, optimizer2 = trained(backend=loaded, steps=1)
    scheduler2 = LinearLR(optimizer2, 0.5, total_iters=10)
    found = other.load_checkpoint(path, model2, optimizer2, scheduler2)
    assert draw() == drawn
    same_tree("extra", found, {"losses": [1.0], "seen": torch.zeros(2)})
    same_tree("state", everything(model2, optimizer2), expected)
    assert [group["lr"] for group in optimizer2.param_groups] == rates and scheduler2.last_epoch == 0


def test_parameters_without_state_stay_without(tmp_path: Path) -> None:
    strategy, model, optimizer = trained(steps=0)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    _, model2, optimizer2 = trained(steps=2)
    assert optimizer2.state
    strategy.load_checkpoint(tmp_path / "a", model2, optimizer2)
    assert not optimizer2.state
    strategy, model, optimizer = trained(steps=1)
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    strategy.load_checkpoint(tmp_path / "b", model2, optimizer2)
    assert model2.dead.weight not in optimizer2.state
    assert model2.head.weight in optimizer2.state


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 4], gamma=0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "SequentialLR": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda step: 0.1 * step), CosineAnnealingWarmRestarts(o, T_0=2)], milestones=[3]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_and_group_settings_go_on(tmp_path: Path, name: str) -> None:
    def run(optimizer: Any, scheduler: Any, model: Any, steps: range) -> list[list[float]]:
        rates = []
        for step in steps:
            optimizer.backward(loss_of(model, step))
            optimizer.step()
            scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        return rates

    strategy, model, optimizer = trained(steps=0)
    scheduler = SCHEDULERS[name](optimizer)
    run(optimizer, scheduler, model, range(4))
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, scheduler)
    expected = run(optimizer, scheduler, model, range(4, 8))

    _, model2, optimizer2 = trained(steps=0)
    optimizer2.param_groups[1]["weight_decay"] = 0.7
    scheduler2 = SCHEDULERS[name](optimizer2)
    strategy.load_checkpoint(tmp_path / "a", model2, optimizer2, scheduler2)
    assert optimizer2.param_groups[1]["weight_decay"] == 0.0
    assert [g["initial_lr"] for g in optimizer2.param_groups] == [g["initial_lr"] for g in optimizer.param_groups]
    assert run(optimizer2, scheduler2, model2, range(4, 8)) == expected
    same_tree("state", everything(model2, optimizer2), everything(model, optimizer))


def test_a_tensor_learning_rate_is_filled_in_place(tmp_path: Path) -> None:
    model, model2 = small_model(1.0), small_model()
    save_checkpoint(tmp_path / "a", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(model2.parameters(), lr=rate)
    load_checkpoint(tmp_path / "a", model2, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def draw() -> tuple[Any, ...]:
    return random.random(), numpy.random.rand(3).tolist(), numpy.random.randn(), torch.rand(3).tolist()


def test_random_states_go_on(tmp_path: Path) -> None:
    strategy, model, optimizer = trained()
    draw()
    numpy.random.randn()
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    expected = draw()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    assert draw() == expected
    strategy.load_checkpoint(tmp_path / "a", model)
    assert draw() != expected, "a model loaded on its own leaves the random states alone"


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_an_unfinished_step_are_in_no_checkpoint(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A save says so; a load drops those of the weights that it replaces."""
    strategy, model, optimizer = trained(backend=backend)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    assert "between backward() and step()" not in caplog.text
    ends = []
    for micro_batches in (0, 2):
        with strategy.accumulate(model, last=False):
            for micro in range(micro_batches):
                optimizer.backward(loss_of(model, 7, micro))
        if micro_batches:
            strategy.save_checkpoint(tmp_path / "b", model, optimizer)
            assert "saved between backward() and step()" in caplog.text
        strategy.load_checkpoint(tmp_path / ("b" if micro_batches else "a"), model, optimizer)
        optimizer.backward(loss_of(model, 3))
        optimizer.step()
        ends.append(everything(model, optimizer))
        strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    same_tree("ends", *ends)


def test_extra_comes_back(tmp_path: Path) -> None:
    extra = {"epoch": 3, "seen": {"files": ["a", None, True]}, "loss": torch.tensor(0.5), "at": (1, 2.5)}
    save_checkpoint(tmp_path / "a", small_model(), extra=extra)
    same_tree("extra", load_checkpoint(tmp_path / "a", small_model()), extra)


def test_loss_scale_goes_on(tmp_path: Path) -> None:
    strategy, model, optimizer = trained("float16", steps=5)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    _, model2, optimizer2 = trained("float16", steps=0)
    strategy.load_checkpoint(tmp_path / "a", model2, optimizer2)
    assert optimizer2.loss_scale.state_dict() == optimizer.loss_scale.state_dict()
    assert optimizer.loss_scale.scale == 2.0**11


# -- changing the dtype ------------------------------------------------------------------------------------------------


def test_fp32_weights_become_the_masters(tmp_path: Path) -> None:
    strategy, model, optimizer = trained("float32")
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    other, model2, optimizer2 = trained("bfloat16", steps=1)
    other.load_checkpoint(tmp_path / "a", model2, optimizer2)
    for (name, parameter), source in zip(model2.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, source.to(torch.bfloat16)), name
        if source in optimizer.state:
            assert torch.equal(optimizer2.state[parameter]["master"], source), name
            assert torch.equal(optimizer2.state[parameter]["exp_avg_sq"], optimizer.state[source]["exp_avg_sq"]), name
    before = everything(model2, optimizer2)
    optimizer2.refresh_master_weights()
    assert any(not torch.equal(value, before[key]) for key, value in everything(model2, optimizer2).items())


@pytest.mark.parametrize("target", ["float32", "float16"])
def test_masters_become_the_weights(tmp_path: Path, target: str) -> None:
    strategy, model, optimizer = trained("bfloat16")
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    other, model2, optimizer2 = trained(target, steps=1)
    other.load_checkpoint(tmp_path / "a", model2, optimizer2)
    for (name, parameter), source in zip(model2.named_parameters(), model.parameters(), strict=True):
        master = optimizer.parameter_state(source).get("master", source)  # of one without updates, what was given
        assert torch.equal(parameter, master.to(parameter.dtype)), name
        if target == "float16" and source in optimizer.state:
            assert torch.equal(optimizer2.state[parameter]["master"], master), name
    other.load_checkpoint(tmp_path / "a", model2)
    assert torch.equal(model2.head.weight, model.head.weight.to(model2.head.weight.dtype)), "without an optimizer"


def test_a_model_loaded_alone_refreshes_the_masters(tmp_path: Path) -> None:
    strategy, model, _ = trained(steps=5)
    strategy.save_checkpoint(tmp_path / "a", model)
    for pass_optimizer in (True, False):
        _, model2, optimizer2 = trained(steps=2)
        strategy.load_checkpoint(tmp_path / "a", model2, optimizer2 if pass_optimizer else None)
        if pass_optimizer:
            assert torch.equal(optimizer2.state[model2.head.weight]["master"], model.head.weight.float())
        optimizer2.param_groups[0]["lr"] = optimizer2.param_groups[1]["lr"] = 0.0
        optimizer2.backward(loss_of(model2, 0))
        optimizer2.step()
        assert torch.equal(model2.head.weight, model.head.weight)


# -- plain torch -------------------------------------------------------------------------------------------------------


def test_a_plain_torch_run_continues_in_lightstep_and_back(tmp_path: Path) -> None:
    _, model, optimizer = trained("float32", steps=0)
    plain = torch.optim.AdamW([{"params": g["params"], "lr": g["lr"]} for g in optimizer.param_groups], fused=True)
    for step in range(3):
        loss_of(model, step).backward()
        plain.step()
        plain.zero_grad()
    save_checkpoint(tmp_path / "plain", model, plain)
    _, model2, optimizer2 = trained("float32", steps=1)
    load_checkpoint(tmp_path / "plain", model2, optimizer2)
    same_tree("state", everything(model2, optimizer2), {**everything_plain(model, plain)})

    save_checkpoint(tmp_path / "ours", model2, optimizer2)
    _, model3, optimizer3 = trained("float32", steps=0)
    groups = [{"params": g["params"], "lr": 0.5} for g in optimizer3.param_groups]
    plain3 = torch.optim.AdamW(groups, fused=True)
    load_checkpoint(tmp_path / "ours", model3, plain3)
    assert [g["lr"] for g in plain3.param_groups] == [3e-3, 1e-3]
    for run, weights in ((plain, model), (plain3, model3)):
        loss_of(weights, 3).backward()
        run.step()
    same_tree("state", everything_plain(model3, plain3), everything_plain(model, plain))


def everything_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


@pytest.mark.parametrize("parameters", ["plain torch", "float32", "bfloat16"])
def test_strided_parameters_go_on_bit_for_bit(tmp_path: Path, parameters: str) -> None:
    """Fused optimizers walk parameter and state side by side in memory."""

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 4, bias=False)
        dtype = torch.bfloat16 if parameters == "bfloat16" else torch.float32
        model.weight = nn.Parameter(torch.randn(6, 4).to(dtype).t())
        if parameters == "plain torch":
            return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        return model, lightstep.MixedPrecisionOptimizer(model.parameters(), torch.optim.AdamW, {"lr": 0.1})

    def train(model: nn.Module, optimizer: Any) -> None:
        for number in range(3):
            model(torch.full((1, 6), 1.0 + number, dtype=model.weight.dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    model2, optimizer2 = build()
    load_checkpoint(tmp_path / "a", model2, optimizer2)
    train(model, optimizer)
    train(model2, optimizer2)
    assert torch.equal(model.weight, model2.weight)


def test_our_state_as_a_torch_state_dict(tmp_path: Path) -> None:
    strategy, model, optimizer = trained("bfloat16")
    packed = to_torch_state_dict(optimizer)
    assert set(packed) == {"state", "param_groups"}
    assert all(set(entries) == {"step", "exp_avg", "exp_avg_sq"} for entries in packed["state"].values())
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    _, model2, optimizer2 = trained("float32", steps=0)
    load_checkpoint(tmp_path / "a", model2, optimizer2)
    plain = torch.optim.AdamW([{"params": group["params"]} for group in optimizer2.param_groups])
    plain.load_state_dict(packed)
    for name, parameter in model2.named_parameters():
        for key, value in plain.state.get(parameter, {}).items():
            assert torch.equal(value, optimizer2.state[parameter][key]), (name, key)


# -- names -------------------------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


def recomputing(model: Tied) -> Tied:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return model


def compiled_blocks(model: Tied) -> Tied:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = compiled(block)
    return model


WRAPPINGS: dict[str, Callable[[Tied], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled in place": lambda model: (model.compile(backend="eager"), model)[1],
    "compiled blocks": compiled_blocks,
    "activation checkpointing": recomputing,
    "both": lambda model: compiled(recomputing(model)),
}


@pytest.mark.parametrize("saved", WRAPPINGS)
@pytest.mark.parametrize("loaded", ["plain", "both"])
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, saved: str, loaded: str) -> None:
    source, target = Tied(), Tied()
    save_checkpoint(tmp_path / "a", WRAPPINGS[saved](source))
    load_checkpoint(tmp_path / "a", WRAPPINGS[loaded](target))
    assert [p.tolist() for p in target.parameters()] == [p.tolist() for p in source.parameters()]


def test_tied_weights_are_saved_once_and_load_into_untied_ones(tmp_path: Path) -> None:
    source, target = Tied(), Tied(tie=False)
    save_checkpoint(tmp_path / "a", source)
    manifest = json.loads((tmp_path / "a" / "lightstep.json").read_text())
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in manifest["tensors"]
    assert "scratch" not in manifest["tensors"]
    load_checkpoint(tmp_path / "a", target)
    assert torch.equal(target.head.weight, source.embed.weight)
    assert torch.equal(target.embed.weight, source.embed.weight)


def test_untied_weights_load_into_tied_ones_if_they_are_equal(tmp_path: Path) -> None:
    source, target = Tied(tie=False), Tied()
    save_checkpoint(tmp_path / "a", source)
    before = target.embed.weight.clone()
    with pytest.raises(CheckpointError, match=r"embed\.weight, head\.weight are tied in the model, and in the"):
        load_checkpoint(tmp_path / "a", target)
    assert torch.equal(target.embed.weight, before)
    source.head.weight.data.copy_(source.embed.weight)
    save_checkpoint(tmp_path / "b", source)
    load_checkpoint(tmp_path / "b", target)
    assert torch.equal(target.head.weight, source.head.weight)


def test_module_extra_state_comes_back(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    source, target = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    source[0].calls = 7
    save_checkpoint(tmp_path / "a", source)
    load_checkpoint(tmp_path / "a", target)
    assert target[0].calls == 7


# -- refusals ----------------------------------------------------------------------------------------------------------


def with_(model: nn.Sequential, number: int, module: nn.Module) -> nn.Sequential:
    """The model with another module at a place, or one more."""
    model.add_module(str(number), module)
    return model


def counted(dtype: torch.dtype) -> nn.Sequential:
    """A whole number that an 8-bit buffer cannot hold."""
    model = small_model(2.0)
    model[1].num_batches_tracked = torch.tensor(99, dtype=dtype)
    return model


Loaded = tuple[nn.Module, torch.optim.Optimizer | None]


def adam_of(model: nn.Module, parameters: nn.Module | None = None, kind: Any = torch.optim.AdamW) -> Loaded:
    return model, kind((parameters or model).parameters())


REFUSED: dict[str, tuple[Callable[[], Loaded], Callable[[], Loaded], str]] = {
    "a weight of another shape, and two more": (
        lambda: (small_model(1.0), None),
        lambda: (with_(with_(small_model(2.0), 2, nn.Linear(4, 3)), 3, nn.Linear(1, 1)), None),
        r"another model \(not in the checkpoint: 3\.weight, 3\.bias; "
        r"different: 2\.weight is \[2, 4\] in the checkpoint and \[3, 4\] in the model, 2\.bias",
    ),
    "weights that the model does not have": (
        lambda: (small_model(1.0), None),
        lambda: (nn.Sequential(nn.Linear(3, 4)), None),
        r"not in the model: 1\.bias, 1\.num_batches_tracked",
    ),
    "whole numbers that do not fit": (
        lambda: (counted(torch.int64), None),
        lambda: (counted(torch.uint8), None),
        r"tracked is torch\.int64 in the checkpoint and torch\.uint8 in the",
    ),
    "an optimizer of fewer parameters": (
        lambda: adam_of(small_model(1.0)),
        lambda: adam_of(model := small_model(2.0), model[0]),
        r"another optimizer \(not in the optimizer: 1\.bias",
    ),
    "an optimizer of more parameters": (
        lambda: adam_of(model := small_model(1.0), model[0]),
        lambda: adam_of(small_model(2.0)),
        r"another optimizer \(not in the checkpoint: 1\.bias",
    ),
    "an optimizer of another class": (
        lambda: adam_of(small_model(1.0)),
        lambda: adam_of(small_model(2.0), kind=torch.optim.SGD),
        "holds the state of AdamW, the optimizer is SGD",
    ),
    "an optimizer of another model": (
        lambda: adam_of(small_model(1.0)),
        lambda: adam_of(small_model(2.0), small_model()),
        r"6 parameters of the optimizer .* are not the model's",
    ),
    "a base of another shape": (
        lambda: (Adapted(), None),
        lambda: (changed(Adapted(), base=nn.Linear(6, 7)), None),
        r"base.weight is \[6, 6\] in the checkpoint and \[7, 6\]",
    ),
    "no base": (
        lambda: (Adapted(), None),
        lambda: (changed(Adapted(), base=None), None),
        "not in the model: base.bias, base.weight",
    ),
    "more than base and adapter": (
        lambda: (Adapted(), None),
        lambda: (changed(Adapted(), more=nn.Linear(1, 1)), None),
        "not in the checkpoint: more.weight",
    ),
}


def changed(model: nn.Module, **modules: nn.Module | None) -> nn.Module:
    for name, module in modules.items():
        setattr(model, name, module)
    return model


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_left_alone(tmp_path: Path, what: str) -> None:
    saved, loaded, sentence = REFUSED[what]
    save_checkpoint(tmp_path / "a", *saved())
    model, optimizer = loaded()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"a was not loaded: .*{sentence}"):
        load_checkpoint(tmp_path / "a", model, optimizer)
    same_tree("model", dict(model.state_dict()), before)
    assert optimizer is None or not optimizer.state


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none", "none does not exist"),
        ("", r"it has no lightstep\.json"),
        ("run", r"run is a folder of checkpoints; the newest is .*run/a"),
        ("run/b", "format 99"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, path: str, sentence: str) -> None:
    for name in ("b", "a"):
        save_checkpoint(tmp_path / "run" / name, small_model())
    forge(tmp_path / "run" / "b", format=99)
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint(tmp_path / path, small_model())


class Planned:
    """A scheduler."""

    def state_dict(self) -> dict[str, Any]:
        return {"last": 3, "plan": Unloadable()}


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ({"extra": {"a": {"b": [1, Unloadable()]}}}, r"extra\['a'\]\['b'\]\[1\] is a .*Unloadable"),
        ({"extra": {"loss": numpy.float64(0.5)}}, r"extra\['loss'\] is a numpy\.float64"),
        ({"extra": {"hook": lambda: 0}}, r"extra\['hook'\] is a builtins\.function"),
        ({"extra": {"where": Path("a")}}, r"extra\['where'\] is a pathlib"),
        ({"scheduler": Planned()}, r"scheduler\['plan'\] is a .*Unloadable"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_writing(tmp_path: Path, saved: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=rf"a was not saved: {sentence}"):
        save_checkpoint(tmp_path / "a", small_model(), **saved)
    assert contents(tmp_path) == []


def test_groups_are_matched_by_name(tmp_path: Path) -> None:
    model, target = small_model(), small_model()
    rates = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    save_checkpoint(tmp_path / "a", nn.Sequential(model[0], model[2]), torch.optim.SGD(rates))
    swapped = torch.optim.SGD([{"params": target[2].parameters()}, {"params": target[0].parameters()}])
    load_checkpoint(tmp_path / "a", nn.Sequential(target[0], target[2]), swapped)
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]
    joined = torch.optim.SGD([*target[0].parameters(), *target[2].parameters()])
    with pytest.raises(CheckpointError, match=r"group 0 .* joins groups \[0, 1\]"):
        load_checkpoint(tmp_path / "a", nn.Sequential(target[0], target[2]), joined)


def test_groups_that_were_one_are_told_that_they_get_the_same_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "a", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rate in (0.1, 0.3):
        groups: list[dict[str, Any]] = [{"params": [target.weight]}, {"params": [target.bias], "lr": rate}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        assert not caplog.records
        load_checkpoint(tmp_path / "a", target, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert "groups 0 and 1 of the optimizer were one group of the checkpoint, and get the same settings" in caplog.text


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_checkpoint(tmp_path / "a", small_model())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("precious")
    (tmp_path / "c").write_text("a file")
    for name in ("b", "c"):
        with pytest.raises(CheckpointError, match=f"{name} exists and is not a checkpoint"):
            save_checkpoint(tmp_path / name, small_model())
    assert contents(tmp_path) == ["a", "b", "c"]
    assert contents(tmp_path / "b") == ["thesis.tex"]


@pytest.mark.parametrize("name", ["LambdaLR", "MultiStepLR"])
def test_a_state_of_another_librarys_scheduler_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    class WarmupLR:
        def state_dict(self) -> dict[str, Any]:
            return {"last_batch_iteration": 3}

    strategy, model, optimizer = trained(steps=1)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, WarmupLR())
    scheduler = SCHEDULERS[name](optimizer)
    before = scheduler.state_dict()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer, scheduler)
    assert scheduler.state_dict() == before
    assert f"not of a {name} (it has last_batch_iteration); the scheduler starts where it is" in caplog.text


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR"])
def test_a_scheduler_of_another_class_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    strategy, model, optimizer = trained(steps=1)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, SCHEDULERS["MultiStepLR"](optimizer))
    strategy.load_checkpoint(tmp_path / "a", model, optimizer, SCHEDULERS["MultiStepLR"](optimizer))
    assert not caplog.records
    scheduler = SCHEDULERS[name](optimizer)
    before = scheduler.state_dict()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer, scheduler)
    assert scheduler.state_dict() == before
    assert f"is not of a {name} (it has " in caplog.text

    class Renamed(MultiStepLR):
        """The same schedule."""

    scheduler = Renamed(optimizer, [5])
    strategy.load_checkpoint(tmp_path / "a", model, optimizer, scheduler)
    assert scheduler.milestones == {2: 1, 4: 1}


# -- malice ------------------------------------------------------------------------------------------------------------

_fired: list[str] = []


class Evil:
    """Runs when unpickled."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return fire, (self.where,)


def fire(where: str) -> None:
    _fired.append(where)


@pytest.fixture(autouse=True)
def nothing_fires() -> Iterator[None]:
    _fired.clear()
    yield
    assert _fired == []


def test_pickles_of_a_stranger_are_not_executed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_checkpoint(folder, small_model(1.0), extra={"epoch": 1})
    evil = pickle.dumps(Evil("metadata"))
    assert (pickle.loads(evil), _fired.pop()) == (None, "metadata"), "the trap works"

    (folder / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"\.metadata has \d+ bytes of \d+"):
        load_checkpoint(folder, small_model())
    forge(folder)
    model = small_model()
    assert load_checkpoint(folder, model) == {"epoch": 1}, "torch's index is not read at all"
    assert value_of(model) == 1.0

    index = (folder / "tensors.json").read_text()
    torch.save(Evil("tensor"), folder / "__0_0_0.distcp")
    size = (folder / "__0_0_0.distcp").stat().st_size
    entries = json.loads(index)
    for tensor in entries["tensors"].values():
        tensor["chunks"][0][3:] = [0, size]
        tensor["crc32"] = [zlib.crc32((folder / "__0_0_0.distcp").read_bytes())]
    (folder / "tensors.json").write_text(json.dumps(entries))
    forge(folder)
    with pytest.raises(CheckpointError, match=r"Unpickl|Weights only"):
        load_checkpoint(folder, small_model())

    torch.save({"extra": Evil("state")}, folder / "state.pt")
    forge(folder)
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read: it is damaged, or holds more than plain"):
        load_checkpoint(folder, small_model())


STRANGE = [None, -1, 2**62, 2**70, 1.5, True, "x", "../x", "\ud800", [], [[]], ["a"], {}, {"a": 1}]


def replaced(content: Any, chance: random.Random) -> Any:
    """The content with something in it replaced by something else."""
    if isinstance(content, dict | list) and content and chance.random() < 0.8:
        changed: Any = copy.copy(content)
        key = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        changed[key] = replaced(content[key], chance)
        return changed
    return chance.choice(STRANGE)


@pytest.mark.parametrize("name", ["lightstep.json", "tensors.json"])
def test_a_strangers_manifest_or_index_is_refused_and_stops_nobody_else(tmp_path: Path, name: str) -> None:
    """All checksums are right."""
    for number in (1, 2):
        model = small_model(float(number))
        save_checkpoint(tmp_path / f"step-{number}", model, torch.optim.SGD(model.parameters(), momentum=0.9))
    folder, chance = tmp_path / "step-2", random.Random(0)
    files = {each: json.loads((folder / each).read_text()) for each in ("lightstep.json", "tensors.json")}
    del files["lightstep.json"]["crc32"]
    for number in range(60):
        changed = files | {name: replaced(files[name], chance)}
        manifest, text = changed["lightstep.json"], json.dumps(changed["tensors.json"]).encode()
        if not isinstance(manifest, dict):
            continue
        if name == "tensors.json":
            (folder / name).write_bytes(text)
            manifest = manifest | {
                "files": manifest["files"] | {name: len(text)},
                "checksums": manifest["checksums"] | {name: zlib.crc32(text)},
            }
        (folder / "lightstep.json").write_bytes(seal(manifest))
        with suppress(CheckpointError):
            load_checkpoint(folder, small_model())
        with suppress(CheckpointError):
            verify_checkpoints(folder)
        assert latest_checkpoint(tmp_path) in {tmp_path / "step-1", folder}
        if number % 10 == 0:
            save_checkpoint(tmp_path / "step-3", small_model())
            shutil.rmtree(tmp_path / "step-3")


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_checkpoint(folder, small_model())
    (folder / "__0_0_0.distcp").rename(tmp_path / "outside.distcp")
    files = {"../outside.distcp": 1, "tensors.json": 1, "state.pt": 1, ".metadata": 1}
    index = (folder / "tensors.json").read_text().replace("__0_0_0.distcp", "../outside.distcp")
    (folder / "tensors.json").write_text(index)
    forge(folder, files=files)
    with pytest.raises(CheckpointError, match=r"'\.\./outside\.distcp', which is not a file name"):
        load_checkpoint(folder, small_model())


def test_an_index_names_no_bytes_that_its_file_does_not_have(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    save_checkpoint(folder, small_model())
    index = json.loads((folder / "tensors.json").read_text())
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk[-1] = 2**40
    (folder / "tensors.json").write_text(json.dumps(index))
    forge(folder)
    with pytest.raises(CheckpointError, match=r"__0_0_0\.distcp has fewer bytes than the \d+ that it names"):
        load_checkpoint(folder, small_model())


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("replacing", [True, False], ids=["replacing", "first"])
def test_a_crash_at_any_file_operation_leaves_one_whole_checkpoint(tmp_path: Path, replacing: bool) -> None:
    results = []
    for count in range(1, 200):
        folder = tmp_path / str(count) / "step"
        folder.parent.mkdir()
        if replacing:
            save_checkpoint(folder, small_model(1.0))
        died = dies_at(count, folder.parent, lambda folder=folder: save_checkpoint(folder, small_model(2.0)))
        model = small_model()
        if replacing or latest_checkpoint(folder.parent) is not None:
            assert latest_checkpoint(folder.parent) == folder
            load_checkpoint(folder, model)
        else:
            with pytest.raises(CheckpointError, match="does not exist"):
                load_checkpoint(folder, model)
        results.append(value_of(model))
        save_checkpoint(folder, small_model(3.0))
        load_checkpoint(folder, model)
        assert value_of(model) == 3.0
        assert contents(folder.parent) == ["step"], "what the crash left is gone after the next save"
        if not died:
            break
    else:
        pytest.fail("the save never finished")
    assert results == sorted(results), "the old one, then the new one"
    assert set(results) == ({1.0, 2.0} if replacing else {0.0, 2.0})
    assert len(results) > 10


def test_saving_right_after_a_crash_between_the_renames_keeps_a_checkpoint_all_the_time(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save_checkpoint(folder, small_model(1.0))
    os.replace(folder, tmp_path / ".step.replaced-00000000")
    with limited_file_size(100), pytest.raises(CheckpointError):
        save_checkpoint(folder, small_model(2.0))
    model = small_model()
    load_checkpoint(folder, model)
    assert value_of(model) == 1.0
    assert contents(tmp_path) == ["step"]


@pytest.mark.parametrize("limit", [0, 1000, 5000])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path, limit: int) -> None:
    folder = tmp_path / "step"
    save_checkpoint(folder, small_model(1.0))
    with limited_file_size(limit), pytest.raises(CheckpointError) as raised:
        save_checkpoint(folder, small_model(2.0))
    assert str(raised.value) == f"{folder} was not saved: {os.strerror(errno.EFBIG)}"
    model = small_model()
    load_checkpoint(folder, model)
    assert value_of(model) == 1.0
    assert contents(tmp_path) == ["step"]


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
@pytest.mark.parametrize("error", [DISK_IS_FULL, KeyboardInterrupt()])
def test_a_failing_call_leaves_everything_as_it_was(tmp_path: Path, call: str, error: BaseException) -> None:
    folder = tmp_path / "step"
    for patch in failing_calls(call, error):
        save_checkpoint(folder, small_model(1.0))
        expected = 2.0
        with patch:
            try:
                save_checkpoint(folder, small_model(2.0))
            except (CheckpointError, KeyboardInterrupt) as caught:
                expected = 1.0
                assert caught is error or str(caught) == f"{folder} was not saved: No space left on device"
        assert contents(tmp_path) == ["step"]
        load_checkpoint(folder, model := small_model())
        assert value_of(model) == expected


def test_latest_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    for name in ("step-9", "step-10", "a"):
        save_checkpoint(tmp_path / name, small_model())
        assert latest_checkpoint(tmp_path) == tmp_path / name
    (tmp_path / "a" / "state.pt").unlink()
    (tmp_path / "logs").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    os.replace(tmp_path / "step-10", tmp_path / ".step-10.saving-01234567")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    load_checkpoint(tmp_path / "step-10", small_model())


def test_the_latest_checkpoint_has_optimizer_state_if_any_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that was saved alone afterwards (``best``) is not what a run continues from."""
    strategy, model, optimizer = trained(steps=1)
    strategy.save_checkpoint(tmp_path / "step-1", model, optimizer)
    strategy.save_checkpoint(tmp_path / "best", model)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    strategy.load_checkpoint(tmp_path / "step-1", model, optimizer)
    strategy.load_checkpoint(tmp_path / "best", model)
    assert "holds no optimizer state" not in caplog.text
    strategy.load_checkpoint(tmp_path / "best", model, optimizer)
    assert "best holds no optimizer state; only its weights were loaded" in caplog.text


# -- memory ------------------------------------------------------------------------------------------------------------


class BuiltOnAccess(torch.optim.Optimizer):
    """Its state is made whenever somebody looks, as a streaming backend does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0
        outer = self

        class View(dict[Tensor, Any]):
            def get(self, parameter: Tensor, default: Any = None) -> dict[str, Tensor]:
                built = {key: torch.full_like(parameter, 0.5) for key in ("exp_avg", "exp_avg_sq")}
                outer.alive.update(built.values())
                outer.most = max(outer.most, len(outer.alive))
                return built

        self.state = View()


def test_state_that_is_built_on_access_is_fetched_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20)))
    optimizer = BuiltOnAccess(model.parameters())
    monkeypatch.setattr(checkpoint_write, "FILE_BYTES", 4096)
    monkeypatch.setattr(checkpoint_write, "IN_FLIGHT_BYTES", 1024)
    save_checkpoint(tmp_path / "a", model, optimizer)
    assert optimizer.most <= 4, "more tensors alive than two parameters have"
    files = [file.stat().st_size for file in (tmp_path / "a").glob("*.distcp")]
    assert len(files) > 10 and max(files) < 4096 + 3 * 1024, "each ends after the tensor that reaches the limit"


def test_loaded_state_is_handed_over_parameter_by_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model, optimizer = trained()
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []

    def let_go(self: OptimizerContent, name: str, entries: dict[str, Any]) -> None:
        alive.update(value for value in entries.values() if isinstance(value, Tensor))
        counts.append(len(alive))

    monkeypatch.setattr(OptimizerContent, "load", let_go)
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    entries = len(optimizer.state[next(model.parameters())])
    assert len(counts) > 4
    assert max(counts) <= 2 * entries, "more tensors alive than two parameters have"


# -- export ------------------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    save_checkpoint("~/runs/step-1", small_model(1.0))
    model = small_model()
    load_checkpoint("~/runs/step-1", model)
    export_model("~/exported", model)
    assert value_of(model) == 1.0 and latest_checkpoint("~/runs") == tmp_path / "home/runs/step-1"
    assert contents(tmp_path) == ["home"] and (tmp_path / "home/exported/model.safetensors").is_file()


def test_export_of_a_plain_module(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Tied()
    export_model(tmp_path / "m", compiled(model))
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert torch.equal(weights["embed.weight"], model.embed.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_export_of_a_transformers_model(tmp_path: Path, tied: bool) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    (tmp_path / "m").mkdir()
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / "m" / stale).write_text("old")
    export_model(tmp_path / "m", model)
    assert contents(tmp_path / "m") == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
    assert contents(tmp_path) == ["m"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    same_tree("weights", dict(loaded.state_dict()), dict(model.state_dict()))
