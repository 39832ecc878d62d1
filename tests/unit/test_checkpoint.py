"""What is saved is loaded: by every backend into every other, at every place, at once or by a thread, bit for bit."""

from __future__ import annotations

import json
import logging
import random
import threading
import weakref
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    layout,
    load_checkpoint,
    save_checkpoint,
    tensors,
    to_torch_state_dict,
)
from lightstep.checkpoint.formats import read_checkpoint
from lightstep.checkpoint.run_state import OptimizerContent
from lightstep.checkpoint.storage import ask_server, is_nothing
from tests.checkpoint_runs import (
    OLD,
    Adapted,
    PartlyFrozen,
    PlainRun,
    Run,
    Tied,
    content,
    held,
    model_of,
    place,
    same,
    tiny_run,
)
from tests.covering import every_pair, every_value
from tests.patience import PATIENCE
from tests.reference.pair import BACKENDS, TWO_GROUPS, Pair, same_tree, scale_for
from tests.reference.tiny_model import loss_of

__all__ = ["held", "place"]

FP32: dict[str, Any] = {"precision": {"parameters": "float32"}, "clipping": {"max_norm": None}}


def draw() -> tuple[Any, ...]:
    return random.random(), numpy.random.rand(3).tolist(), numpy.random.randn(), torch.rand(3).tolist()


@every_pair(
    optimizer=["AdamW", "NAdam", "Adagrad"],
    parameters=["bfloat16", "float16", "float32"],
    saved=BACKENDS,
    loaded=BACKENDS,
    storage=["", "file://", "memory://"],
    asynchronous=[False, True],
)
def test_a_run_goes_on_bit_for_bit(
    optimizer: str,
    parameters: str,
    saved: str,
    loaded: str,
    asynchronous: bool,
    place: str,
    held: threading.Event,
) -> None:
    """As the textbook's loop does that was never interrupted. What happens while a thread writes is not in the file."""
    path = f"{place}/step-4"
    settings: dict[str, Any] = {"parameters": parameters, "backend": saved, **scale_for(parameters)}
    overflows = {2, 6} if parameters == "float16" else ()
    pair = Pair(*TWO_GROUPS[optimizer], micro_batches=2, overflow_at=overflows, late_from=6, max_norm=0.1, **settings)
    pair.train(4)
    scheduler = lr_scheduler.LambdaLR(pair.optimizer, lambda step: 1.0)
    extra = {"losses": [1.0, None], "seen": torch.zeros(2), "at": (1, {"files": ["a", True]})}
    draw()
    numpy.random.randn()  # numpy keeps a second one for the next call
    if not asynchronous:
        held.set()
    pending = pair.strategy.save_checkpoint(
        path, pair.model, pair.optimizer, scheduler, extra, asynchronous=asynchronous
    )
    drawn = draw()
    extra["losses"].append(2.0)
    extra["seen"] += 1
    for step in range(2):
        pair.optimizer.backward(loss_of(pair.model, step))
        pair.optimizer.step()
        scheduler.step()
    with torch.no_grad():
        pair.model.head.weight.zero_()
    if pending is not None:
        assert not pending.done() and latest_checkpoint(place) is None
        held.set()
        assert str(pending.result(timeout=PATIENCE)) == path
    assert str(latest_checkpoint(place)) == path

    pair.values["optimizer_state"] = BACKENDS[loaded]
    pair.strategy, pair.model, pair.optimizer = pair.build()
    pair.arm(pair.model)
    scheduler = lr_scheduler.LambdaLR(pair.optimizer, lambda step: 1.0)
    found = pair.strategy.load_checkpoint(path, pair.model, pair.optimizer, scheduler)
    assert draw() == drawn and scheduler.last_epoch == 0
    same_tree("extra", found, {"losses": [1.0, None], "seen": torch.zeros(2), "at": (1, {"files": ["a", True]})})
    pair.check()
    pair.train(4)


# -- weights alone, into plain torch, and back ---------------------------------------------------------------------


def test_weights_alone_leave_the_random_states_alone(tmp_path: Path) -> None:
    """And masters follow them: a step at rate 0 changes nothing."""
    run, other = Run(steps=3), Run(steps=1)
    run.save(tmp_path / "a")
    torch.rand(3)
    drawn = torch.get_rng_state()
    load_checkpoint(tmp_path / "a", other.model)
    assert torch.equal(torch.get_rng_state(), drawn)
    other.optimizer.param_groups[0]["lr"] = 0.0
    other.train()
    assert torch.equal(other.model.weight, run.model.weight)


def strided() -> nn.Module:
    """Fused optimizers walk parameter and state side by side in memory."""
    model = nn.Linear(6, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t())
    return model


KINDS: dict[str, Callable[[int], Run]] = {
    "torch": lambda steps: PlainRun(steps=steps, lr=0.5 / (1 + steps), **FP32),
    "lightstep": lambda steps: Run(steps=steps, lr=0.5 / (1 + steps), **FP32),
    "torch, strided": lambda steps: PlainRun(steps=steps, module=strided(), **FP32),
    "float32, strided": lambda steps: Run(steps=steps, module=strided(), **FP32),
    "bfloat16, strided": lambda steps: Run(steps=steps, module=strided()),
    "frozen parameters in groups": lambda steps: PartlyFrozen("stream", steps, frozen_in_groups=True),
    "frozen parameters in none": lambda steps: PartlyFrozen("resident", steps, frozen_in_groups=False),
}
"""A run after so many steps. Groups' settings differ by that number."""


FROZEN = ("frozen parameters in groups", "frozen parameters in none")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *permutations(("torch", "lightstep")),
        *permutations(FROZEN),
        *((kind, kind) for kind in KINDS if "strided" in kind),
    ],
)
def test_another_kind_of_run_goes_on_bit_for_bit(tmp_path: Path, saved: str, loaded: str) -> None:
    run, other = KINDS[saved](3), KINDS[loaded](1)
    run.save(tmp_path / "a")
    other.load(tmp_path / "a")
    same(other.content(), run.content())
    assert other.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    frozen = [p for p in other.model.parameters() if not p.requires_grad]
    assert len(frozen) == 2 * (loaded in FROZEN) and not any(p in other.optimizer.state for p in frozen)
    other.steps = run.steps
    same(other.train(2).content(), run.train(2).content())


def test_the_state_of_torch_without_a_file(tmp_path: Path) -> None:
    """The masters are its weights."""
    run, plain, loaded = Run(steps=3), PlainRun(steps=0, **FP32), Run(steps=1, **FP32)
    packed = to_torch_state_dict(run.optimizer)
    assert packed.keys() == {"state", "param_groups"}
    assert all(set(entries) == {"step", "exp_avg", "exp_avg_sq"} for entries in packed["state"].values())
    plain.optimizer.load_state_dict(packed)
    plain.model.load_state_dict({n: run.optimizer.state[p]["master"] for n, p in run.model.named_parameters()})
    run.save(tmp_path / "a")
    loaded.load(tmp_path / "a")
    same(plain.content(), loaded.content())


# -- what is in the groups and beside them -----------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_parameters_without_state_stay_without(tmp_path: Path, parameters: str) -> None:
    """Before the first step those of bf16 have a master. Those of fp32 have nothing."""
    _, model2, optimizer2 = tiny_run(parameters, steps=2)
    for steps in (0, 1):
        strategy, model, optimizer = tiny_run(parameters, steps=steps)
        strategy.save_checkpoint(tmp_path / "a", model, optimizer)
        strategy.load_checkpoint(tmp_path / "a", model2, optimizer2)
        assert (model2.head.weight in optimizer2.state) == bool(steps) and model2.dead.weight not in optimizer2.state


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_an_unfinished_step_are_in_no_checkpoint(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A save says so; a load drops those of the weights that it replaces."""
    ends = []
    for unfinished in (False, True):
        run = Run(backend)
        if unfinished:
            run.backward()
        run.save(tmp_path / "a")
        assert ("saved between backward() and step()" in caplog.text) == unfinished
        run.load(tmp_path / "a")
        run.steps = 5
        ends.append(run.train().content())
    same(*ends)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
}


class WarmupLR:
    """DeepSpeed's has such a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": 3}


class Renamed(lr_scheduler.MultiStepLR):
    """The same schedule."""


@pytest.mark.parametrize(
    ("saved", "loaded", "is_loaded"),
    [
        (lambda _: WarmupLR(), SCHEDULERS["LambdaLR"], False),
        (SCHEDULERS["MultiStepLR"], SCHEDULERS["LambdaLR"], False),
        (SCHEDULERS["MultiStepLR"], SCHEDULERS["OneCycleLR"], False),
        (SCHEDULERS["MultiStepLR"], lambda o: Renamed(o, [5]), True),
    ],
)
def test_the_state_of_another_scheduler_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: Any, loaded: Any, is_loaded: bool
) -> None:
    _, model, optimizer = tiny_run(steps=1)
    save_checkpoint(tmp_path / "a", model, optimizer, saved(optimizer))
    scheduler = loaded(optimizer)
    before = scheduler.state_dict()
    load_checkpoint(tmp_path / "a", model, optimizer, scheduler)
    assert (scheduler.state_dict() != before) == is_loaded
    assert (f"not of a {type(scheduler).__name__} (it has " in caplog.text) != is_loaded


def test_a_tensor_learning_rate_is_filled_in_place(tmp_path: Path) -> None:
    model, model2, rate = model_of(1.0), model_of(0.0), torch.tensor(0.5)
    save_checkpoint(tmp_path / "a", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)))
    optimizer = torch.optim.AdamW(model2.parameters(), lr=rate)
    load_checkpoint(tmp_path / "a", model2, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.25


def test_a_scheduler_made_after_the_load_goes_on(tmp_path: Path) -> None:
    """torch's schedulers begin in mid-run only with a group's ``initial_lr``."""

    def halved(optimizer: torch.optim.Optimizer, step: int) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number, last_epoch=step)

    run, other = Run(steps=1), Run(steps=0)
    halved(run.optimizer, -1).step()
    run.save(tmp_path / "a")
    other.load(tmp_path / "a")
    assert halved(other.optimizer, 1).get_last_lr() == [1e-2 / 4]


def test_groups_are_matched_by_name_and_told_when_they_were_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def optimizer(model: nn.Module, *rates: float, first: int = 0) -> torch.optim.Optimizer:
        layers = (model[first], model[1 - first])
        groups = [{"params": m.parameters(), "lr": lr} for m, lr in zip(layers, rates, strict=True)]
        return torch.optim.SGD(groups, momentum=0.9)

    model, target = model_of(1.0, count=2), model_of(2.0, count=2)
    two = optimizer(model, 0.1, 0.2)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
    two.step()
    save_checkpoint(tmp_path / "two", model, two)
    load_checkpoint(tmp_path / "two", target, swapped := optimizer(target, 1.0, 1.0, first=1))
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1]
    same(content(target, swapped), content(model, two))
    save_checkpoint(tmp_path / "one", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for rates in ((0.3, 0.3), (0.1, 0.3)):
        assert not caplog.records
        load_checkpoint(tmp_path / "one", target, divided := optimizer(target, *rates))
        assert [group["lr"] for group in divided.param_groups] == [0.1, 0.1]
    assert "groups 0 and 1 of the optimizer were one group of the checkpoint, and get the same settings" in caplog.text


def test_a_frozen_base_that_was_saved_in_fp32_gets_no_masters(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    save_checkpoint(tmp_path / "a", whole, torch.optim.AdamW(whole.parameters()))
    run = PartlyFrozen("resident", 1, frozen_in_groups=True)
    run.load(tmp_path / "a")
    masters = [run.optimizer.parameter_state(p).get("master") for p in run.model.parameters()]
    assert [master is not None for master in masters] == [False, False, True, True]
    assert torch.equal(masters[2], whole[1].weight)


@every_value(backend=BACKENDS, how=["checkpoint", "state dict"])
def test_masters_in_the_file_follow_an_edit_after_a_load(tmp_path: Path, backend: str, how: str) -> None:
    run = Run(backend)
    if how == "checkpoint":
        run.save(tmp_path / "a")
        run.load(tmp_path / "a")
    else:
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    with torch.no_grad():
        run.model.weight.mul_(3)
    run.save(tmp_path / "b")
    saved = read_checkpoint(tmp_path / "b")
    assert torch.equal(saved.weights["weight"].read(), run.model.weight)
    assert torch.equal(saved.entries["weight"]["master"].read(), run.model.weight.float())


# -- names -------------------------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


def each_block(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Tied], Tied]:
    def wrapped(model: Tied) -> Tied:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrap(block)
        return model

    return wrapped


WRAPPINGS: dict[str, Callable[[Tied], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled in place": lambda model: (model.compile(backend="eager"), model)[1],
    "compiled blocks": each_block(compiled),
    "activation checkpointing": each_block(checkpoint_wrapper),
    "both": lambda model: compiled(each_block(checkpoint_wrapper)(model)),
}


@every_value(saved=WRAPPINGS, loaded=["plain", "both"])
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, saved: str, loaded: str) -> None:
    source, target = Tied(), Tied()
    save_checkpoint(tmp_path / "a", WRAPPINGS[saved](source))
    load_checkpoint(tmp_path / "a", WRAPPINGS[loaded](target))
    assert [p.tolist() for p in target.parameters()] == [p.tolist() for p in source.parameters()]


def test_tied_weights_are_saved_once_and_load_into_untied_ones_and_back(tmp_path: Path) -> None:
    source, untied, tied = Tied(), Tied(tie=False), Tied()
    save_checkpoint(tmp_path / "a", source)
    manifest = json.loads((tmp_path / "a" / "lightstep.json").read_text())
    assert manifest["aliases"] == {"head.weight": "embed.weight"}
    assert not manifest["tensors"].keys() & {"head.weight", "scratch"}
    load_checkpoint(tmp_path / "a", untied)
    assert torch.equal(untied.head.weight, source.embed.weight)
    save_checkpoint(tmp_path / "b", untied)
    load_checkpoint(tmp_path / "b", tied)
    assert torch.equal(tied.head.weight, source.embed.weight)


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


# -- adapters ----------------------------------------------------------------------------------------------------------


def stored(folder: Path) -> set[str]:
    return {key.removeprefix("model.") for key in json.loads((folder / "tensors.json").read_text())["tensors"]}


def adapted(steps: int, backend: str = "resident", **arguments: Any) -> Run:
    return Run(backend, steps, Adapted(**arguments))


@every_value(backend=BACKENDS, tied=[False, True])
def test_of_an_adapter_only_what_is_trained_is_saved(
    tmp_path: Path, backend: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run, other, third = (
        adapted(3, backend, tied=tied),
        adapted(1, backend, tied=tied),
        adapted(0, backend, base="org/other", seed=5, tied=tied),
    )
    run.save(tmp_path / "a")
    assert {name.split(".")[0] for name in stored(tmp_path / "a")} == {"adapter", "norm", "optimizer"}
    assert not stored(tmp_path / "a") & {"base.weight", "base.bias", "norm.weight"}
    base = json.loads((tmp_path / "a" / "lightstep.json").read_text())["base"]
    assert base["name"] == "org/base" and base["shapes"]["base.weight"] == [6, 6]
    assert any("the frozen base (org/base) is not in it" in note for note in read_checkpoint(tmp_path / "a").notes)
    other.load(tmp_path / "a")
    same(other.content(), run.content())
    assert torch.equal(other.model.norm.running_mean, run.model.norm.running_mean)
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    frozen = third.model.base.weight.clone()
    third.load(tmp_path / "a")
    assert torch.equal(third.model.base.weight, frozen)
    assert torch.equal(third.model.adapter.weight, run.model.adapter.weight)
    assert "trained on 'org/base', and the model's base is 'org/other'" in caplog.text


@every_value(
    options=[{}, {"trainable_only": False}, {"weights_only": True}, "the model alone"], frozen_now=[False, True]
)
def test_what_was_trained_is_saved_and_loaded_and_the_base_when_asked_for(
    tmp_path: Path, options: Any, frozen_now: bool
) -> None:
    """Also what is frozen when it is saved, and when it is loaded."""
    run, other = adapted(2), adapted(0, seed=5)
    for model in (run.model, other.model):
        model.adapter.weight.requires_grad_(not frozen_now)
    if options == "the model alone":
        save_checkpoint(tmp_path / "a", run.model)
    else:
        run.save(tmp_path / "a", **options)
    is_whole, frozen = options == {"trainable_only": False}, other.model.base.weight.clone()
    assert "adapter.weight" in stored(tmp_path / "a") and ("base.weight" in stored(tmp_path / "a")) == is_whole
    if options in ({}, {"trainable_only": False}):
        other.load(tmp_path / "a", trainable_only=True)
        assert torch.equal(other.model.adapter.weight, run.model.adapter.weight)
        assert torch.equal(other.model.base.weight, frozen)
    other.load(tmp_path / "a")
    assert torch.equal(other.model.adapter.weight, run.model.adapter.weight)
    assert torch.equal(other.model.base.weight, run.model.base.weight if is_whole else frozen)


# -- earlier versions --------------------------------------------------------------------------------------------------


@every_value(name=["stream", "fsdp2-2"], backend=BACKENDS)
def test_checkpoints_of_the_previous_version_load_to_the_same_bits(name: str, backend: str) -> None:
    run = Run(backend, steps=1)
    scheduler = lr_scheduler.LinearLR(run.optimizer, 0.5, total_iters=10)
    assert run.load(OLD / name, scheduler=scheduler) == {"epoch": 3}
    expected = load_file(OLD / f"{name}.safetensors")
    same(run.content(), expected)
    state = read_checkpoint(OLD / name)
    assert state.world_size == (2 if name == "fsdp2-2" else 1)
    read = {n: weight.read() for n, weight in state.weights.items()}
    for n, entries in state.entries.items():
        for key, value in entries.items():
            read[f"{n}.{key}"] = value.read() if hasattr(value, "read") else torch.as_tensor(value)
    same(read, expected)
    assert scheduler.last_epoch == 3 and run.optimizer.param_groups[0]["lr"] == pytest.approx(0.0065)


def test_a_checkpoint_has_what_the_previous_version_reads(tmp_path: Path) -> None:
    """The files and keys of format 1; the manifest has the sizes that the writers saw."""
    Run("stream").save(tmp_path / "a")
    old, new = (json.loads((folder / "lightstep.json").read_text()) for folder in (OLD / "stream", tmp_path / "a"))
    assert old["format"] == new["format"] and old["files"].keys() == new["files"].keys() and new.keys() == old.keys()
    indices = [json.loads((folder / "tensors.json").read_text()) for folder in (OLD / "stream", tmp_path / "a")]
    assert indices[0]["tensors"].keys() == indices[1]["tensors"].keys()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_tensors_are_written_and_loaded_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("stream", 1, nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20))))
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    fetch, counts = tensors._fetch, []

    def noted(*found: Any) -> Any:
        alive.update(value for value in found if isinstance(value, Tensor))
        counts.append(len(alive))
        return found[0]

    monkeypatch.setattr(tensors, "FILE_BYTES", 4096)
    monkeypatch.setattr(tensors, "IN_FLIGHT_BYTES", 1024)
    monkeypatch.setattr(tensors, "_fetch", lambda source: noted(fetch(source)))
    run.save(tmp_path / "a")
    assert len(counts) == 5 * 20 and max(counts) <= 4, "more tensors alive than two parameters have"
    files = [file.stat().st_size for file in (tmp_path / "a").glob("*.distcp")]
    assert len(files) > 10 and max(files) < 4096 + 3 * 1024, "each ends after the tensor that reaches the limit"
    counts.clear()
    monkeypatch.setattr(OptimizerContent, "load", lambda own, name, entries: noted(*entries.values()))
    run.load(tmp_path / "a")
    assert len(counts) == 20 and max(counts) <= 2 * 4, "more alive than two parameters have"


def test_a_folder_that_comes_and_goes_is_nothing(tmp_path: Path) -> None:
    """Another rank asks the server of a network disk by making one."""
    path, is_over = tmp_path / "step-1", threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            ask_server(path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert all(is_nothing(path) for _ in range(3000))
    finally:
        is_over.set()
        asking.join()
    path.write_text("a file")
    assert not is_nothing(path) and is_nothing(path / "below a file")


def test_a_folder_that_comes_between_two_looks_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(path: Path) -> list[Path]:
        path.mkdir()
        return []

    monkeypatch.setattr(layout, "leftovers", made)
    with pytest.raises(CheckpointError, match="step-1 does not exist or is an empty folder"):
        layout.find_checkpoint(tmp_path / "step-1")
