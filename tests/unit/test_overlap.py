"""Updates that are tried in backward: the bits of a step that knew the norm first, whatever it turns out to be."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightstep.optimizer import overlap
from lightstep.optimizer.arrivals import LinkShare
from lightstep.optimizer.overlap import SpeculativeUpdates
from lightstep.state import versions
from lightstep.state.lanes import DEVICE_TO_HOST
from lightstep.state.record import Record
from lightstep.state.ring import Ring
from lightstep.state.schema import aligned
from tests.covering import every_value
from tests.distributed.models import TinyTransformer
from tests.patience import PATIENCE
from tests.reference.own_classes import Growing
from tests.training import OnVectors, assert_same
from tests.unit import test_next_forward as others

pytestmark = pytest.mark.usefixtures("small_cuts")

OVERLAP: dict[str, Any] = {
    "backend": "stream",
    "update": "overlap",
    "ring_mib": 0.02,
    "previous_weights": "device",
}
ON_HOST: dict[str, Any] = {**OVERLAP, "previous_weights": "host"}
DEFERRED: dict[str, Any] = {"backend": "stream", "update": "next_forward", "ring_mib": 0.02}
RESIDENT = {"backend": "resident"}
LOOSE, NEVER, TIGHT = {"max_norm": 0.5}, {"max_norm": 1e6}, {"max_norm": 0.1}
"""Clip some steps, none, and all of them."""


@pytest.fixture(name="verdicts")
def counted_verdicts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often units were updated speculatively, and what became of it."""
    found: Counter[str] = Counter()
    early = SpeculativeUpdates
    apply_verdict, roll_back, skip = early._apply_verdict, early._roll_back, early.skip

    def applied(self: SpeculativeUpdates, speculation: Any, update: Any) -> None:
        if speculation.submitted:
            found[self._verdict.read()] += 1
        apply_verdict(self, speculation, update)

    def rolled_back(self: SpeculativeUpdates, reason: str) -> Any:
        found["rolled back"] += bool(self.speculation is not None and self.speculation.submitted)
        return roll_back(self, reason)

    def skipped(self: SpeculativeUpdates) -> None:
        found["drop"] += bool(self.speculation is not None and self.speculation.submitted)
        skip(self)

    monkeypatch.setattr(SpeculativeUpdates, "_apply_verdict", applied)
    monkeypatch.setattr(SpeculativeUpdates, "skip", skipped)
    monkeypatch.setattr(SpeculativeUpdates, "_roll_back", rolled_back)
    return found


class Training(others.Training):
    """Knows its parameters: a read of the model waits."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.named = dict(self.model.named_parameters())


def pair(clipping: dict[str, Any] = NEVER, state: dict[str, Any] = OVERLAP, **settings: Any) -> tuple[Training, ...]:
    return Training(state, clipping=clipping, **settings), Training(RESIDENT, clipping=clipping, **settings)


def backward(training: Training) -> None:
    with training.strategy.accumulate(training.model, last=True):
        training.optimizer.backward(training.loss())


def weights(training: Training) -> dict[str, Tensor]:
    """As they stand in memory, without waiting for anything."""
    return {name: own.detach().clone() for name, own in training.named.items()}


class WithMuon(TinyTransformer):
    def split(self) -> list[dict[str, Any]]:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2]
        return [
            {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02},
            {"params": [p for p in trained if p.dim() != 2]},
        ]


def tried(training: Training) -> set[str]:
    """Weights of which a part has been updated, or will have been soon."""
    units = training.optimizer.engine.queue.early.speculation.submitted
    return {owner.name for unit in units for owner in unit.owners}


def test_whole_matrices_are_tried() -> None:
    training = Training(OVERLAP, make=WithMuon, clipping=NEVER)
    training.train(2)
    backward(training)
    matrices = {name for name, p in training.named.items() if p.dim() == 2 and p.grad is not None}
    assert len(matrices) > 3 and matrices <= {*tried(training), LAST}
    training.optimizer.close()  # else a later test may count that this is rolled back


@pytest.mark.parametrize("clipping", [NEVER, TIGHT], ids=["never", "always"])
@pytest.mark.usefixtures("never_pauses")
def test_a_class_that_counts_and_grows(clipping: dict[str, Any], verdicts: Counter[str]) -> None:
    tested, expected = pair(clipping, optimizer_class=Growing)
    assert tested.train(6) == expected.train(6)
    assert_same(tested.snapshot(), expected.snapshot())
    assert verdicts["commit" if clipping is NEVER else "redo"] > 2


def change_lr(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 7e-3


def decay(training: Training) -> None:
    training.optimizer.param_groups[-1]["weight_decay"] = 0.3


def clip_tighter(training: Training) -> None:
    training.optimizer.max_norm = 0.05


TRIED, LAST = "blocks.0.up.weight", "embed.weight"
"""One that is tried in backward, and one that is complete with its very end."""


def edit_gradient(training: Training) -> None:
    training.named[TRIED].grad.mul_(0.5)


def edit_gradient_data(training: Training) -> None:
    """As clipping by hand did for years; a list of parameters kept from before is no read of a weight."""
    training.named[TRIED].grad.data.mul_(0.5)


def edit_last_gradient(training: Training) -> None:
    training.named[LAST].grad.mul_(0.5)


def exchange_gradient(training: Training) -> None:
    parameter = training.named[TRIED]
    parameter.grad = torch.ones_like(parameter)


def another_backward(training: Training) -> None:
    training.steps += 1
    backward(training)


def ask_for_the_norm(training: Training) -> None:
    training.optimizer.grad_norm()


def edit_a_weight(training: Training) -> None:
    with torch.no_grad():
        next(training.model.parameters()).mul_(0.5)


def edit_the_last_weight(training: Training) -> None:
    with torch.no_grad():
        training.named[LAST].mul_(0.5)


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.loss()


def nothing(_: Training) -> None:
    pass


BETWEEN: dict[Callable[[Training], None], str] = {
    nothing: "commit",
    ask_for_the_norm: "commit",
    clip_tighter: "redo",
    change_lr: "rolled back",
    decay: "rolled back",
    edit_gradient: "rolled back",
    edit_gradient_data: "redo",
    edit_last_gradient: "commit",
    exchange_gradient: "rolled back",
    another_backward: "rolled back",
    edit_a_weight: "commit",  # the embedding's, and that of the last layer in backward, are not tried
    edit_the_last_weight: "commit",
    evaluate: "rolled back",
}


def step_and_write(training: Training, what: str, synchronize: bool) -> None:
    """A program writes to the weights or gradients that it has in a list, right after the step."""
    parameters = [p for p in training.named.values() if p.grad is not None]
    kept: Any = parameters if what == "weights" else [p.grad for p in parameters]
    training.optimizer.step()
    training.steps += 1
    if synchronize:
        training.optimizer.synchronize()
    with torch.no_grad():
        torch._foreach_mul_(kept, 0.5)


def write_after_the_step(make: type[Training], state: dict[str, Any], what: str, folder: Path) -> None:
    """After ``synchronize()`` that is the program's right; before it the step is refused, until state is loaded."""
    tested, expected = make(state, clipping=NEVER), make(RESIDENT, clipping=NEVER)
    for training in (tested, expected):
        training.named = dict(training.model.named_parameters())
        training.train(3)
        backward(training)
        step_and_write(training, what, synchronize=True)
        training.train(1)
    assert_same(tested.snapshot(), expected.snapshot())
    tested.strategy.save_checkpoint(folder / "good", tested.model, tested.optimizer)
    backward(tested)
    step_and_write(tested, what, synchronize=False)
    with pytest.raises(RuntimeError, match="was written to after step"):
        tested.train(1)
    with pytest.raises(RuntimeError, match="may be half updated"):
        tested.optimizer.step()
    tested.strategy.load_checkpoint(folder / "good", tested.model, tested.optimizer)
    tested.steps = expected.steps
    assert tested.train(2) == expected.train(2)
    assert_same(tested.snapshot(), expected.snapshot())
    tested.optimizer.close()


@pytest.mark.parametrize(("state", "what"), [(OVERLAP, "gradients"), (DEFERRED, "weights")], ids=["overlap", "next"])
def test_what_a_deferred_update_needs_is_not_written_to(state: dict[str, Any], what: str, tmp_path: Path) -> None:
    write_after_the_step(Training, state, what, tmp_path)


@pytest.mark.parametrize("clipping", [NEVER, TIGHT], ids=["committed", "rolled back"])
@pytest.mark.usefixtures("never_pauses")
def test_a_write_after_step_is_told_whatever_the_verdict(clipping: dict[str, Any], verdicts: Counter[str]) -> None:
    training = Training(OVERLAP, clipping=clipping)
    training.train(2)
    backward(training)
    speculation = training.optimizer.engine.queue.early.speculation
    name = next(item.name for item in speculation.used if item not in speculation.plan.first)
    training.optimizer.step()
    with torch.no_grad():
        training.named[name].add_(1)
    with pytest.raises(RuntimeError, match=f"{name} was written to after step"):
        training.loss()
    assert verdicts["commit" if clipping is NEVER else "redo"]


@pytest.mark.parametrize(
    ("act", "parameters"),
    [*zip(BETWEEN, cycle(["bfloat16", "float32"]), strict=False), (edit_a_weight, "float32")],
)
def test_what_happens_between_backward_and_step(
    act: Callable[[Training], None], parameters: str, verdicts: Counter[str]
) -> None:
    tested, expected = pair(parameters=parameters)
    for training in (tested, expected):
        training.train(3)
        verdicts.clear()
        backward(training)
        act(training)
        result = training.optimizer.step()
        found = training.snapshot()
        training.steps += 1
        training.train(2)
        training.found = found, training.snapshot()
        if training is tested:
            seen = Counter(verdicts)
            assert result.rolled_back == (BETWEEN[act] == "rolled back")
    for mine, theirs in zip(tested.found, expected.found, strict=True):
        assert_same(mine, theirs)
    assert seen[BETWEEN[act]] >= 1


@pytest.mark.parametrize("clipping", [NEVER, TIGHT], ids=["committed", "redone"])
@pytest.mark.usefixtures("never_pauses")
def test_gradients_are_freed_with_the_last_wait(clipping: dict[str, Any], verdicts: Counter[str]) -> None:
    """Not with the next backward, whose own gradients would find them still there."""
    training = Training(OVERLAP, clipping=clipping)
    training.train(3)
    verdicts.clear()
    backward(training)
    gradients = [weakref.ref(parameter.grad) for parameter in training.named.values() if parameter.grad is not None]
    assert tried(training) and gradients
    training.optimizer.step()
    training.optimizer.synchronize()
    assert [gradient() for gradient in gradients if gradient() is not None] == []
    assert +verdicts == {"commit" if clipping is NEVER else "redo": 2}


@pytest.mark.parametrize("verdict", ["commit", "redo", "drop"])
def test_what_is_complete_last_is_updated_before_anybody_asks(verdict: str, verdicts: Counter[str]) -> None:
    """By the true factor, behind ``step()``, and with neither a second slab nor a copy of its weights."""
    tested, expected = pair()
    for training in (tested, expected):
        training.train(3)
        training.optimizer.synchronize()
    verdicts.clear()
    before = weights(tested)
    copied = {part.owner.name for record in tested.optimizer._backend._versions._previous for part in record.parts}
    assert TRIED in copied and LAST not in copied
    for training in (tested, expected):
        training.optimizer.max_norm = 1e-3 if verdict == "redo" else 1e6
        backward(training)
        if verdict == "drop":
            training.named[LAST].grad.fill_(float("inf"))
        training.optimizer.step()
    tested.optimizer._backend.lanes.compute.synchronize()
    after = weights(tested)
    assert not verdicts
    assert torch.equal(after[LAST], before[LAST]) == (verdict == "drop")
    assert_same(tested.snapshot(), expected.snapshot())
    assert torch.equal(after[LAST], tested.named[LAST])
    assert verdicts[verdict] == 1


READS: dict[str, Callable[[Training], Any]] = {
    "parameters": lambda training: list(training.model.parameters()),
    "state_dict": lambda training: training.model.state_dict(),
    "optimizer.state_dict": lambda training: training.optimizer.state_dict(),
    "copy": lambda training: copy.deepcopy(training.model),
    "synchronize": lambda training: training.optimizer.synchronize(),
    "zero_grad": lambda training: training.optimizer.zero_grad() or training.loss(),
    "delete": lambda training: training.__dict__.pop("optimizer"),
}


@pytest.mark.parametrize("how", READS)
def test_weights_are_those_of_before_until_step(how: str, verdicts: Counter[str]) -> None:
    tested, _ = pair()
    tested.train(3)
    tested.optimizer.synchronize()
    before, state = weights(tested), copy.deepcopy(tested.optimizer.state_dict())
    tested.delays(0)
    backward(tested)
    READS[how](tested)
    assert verdicts["rolled back"] == 1
    assert_same(weights(tested), before)
    if how not in ("delete", "zero_grad"):
        now = tested.optimizer.state_dict()["state"]
        assert now.keys() == state["state"].keys()
        for index, entries in state["state"].items():
            assert [key for key, value in entries.items() if not torch.equal(now[index][key], value)] == []


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.detach().mul_(0.5),
    ".data": lambda weight: weight.data.mul_(0.5),
    "exchanged": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


def edit_nothing(_: Training) -> None:
    """``step()`` itself finds the write."""


@pytest.mark.parametrize(
    ("write", "then"),
    [*zip(WRITES, [change_lr, edit_gradient, change_lr], strict=True), ("in place", edit_nothing), ("in place", None)],
)
def test_a_weight_that_was_written_to_is_refused_before_it_is_rolled_back(
    write: str, then: Callable[[Training], None] | None
) -> None:
    """Whatever rolls it back: what the writer saw was neither before the step nor after it, and the written value would
    be gone without a word."""
    tested, _ = pair()
    tested.train(3)
    tested.optimizer.synchronize()
    before = weights(tested)
    backward(tested)
    tested.optimizer._backend.lanes.compute.synchronize()
    WRITES[write](tested.named[TRIED])
    if then is not None:
        then(tested)
    with pytest.raises(RuntimeError, match=rf"{TRIED} was written to between backward\(\) and step\(\).*synchronize"):
        tested.optimizer.synchronize() if then is None else tested.optimizer.step()
    if write != "exchanged":
        assert_same(weights(tested), before)


@pytest.mark.usefixtures("never_pauses")
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adamax])
def test_an_overflow_is_reported_alike_where_the_host_and_where_the_device_skips(
    optimizer_class: Any, caplog: pytest.LogCaptureFixture, verdicts: Counter[str]
) -> None:
    """Adamax knows no ``found_inf``: the host reads the verdict in ``step()``, and drops the updates there."""
    caplog.set_level("INFO", overlap.logger.name)
    tested, expected = pair(optimizer_class=optimizer_class)
    for training in (tested, expected):
        for step in range(10):
            with training.strategy.accumulate(training.model, last=True):
                training.optimizer.backward(training.loss() * (torch.inf if step in (2, 4, 6, 8) else 1))
            result = training.optimizer.step()
            assert bool(result) == (step not in (2, 4, 6, 8))
            assert result.redone == result.rolled_back == 0
            training.steps += 1
            if training is tested:
                tested.delays(step)
    assert_same(tested.snapshot(), expected.snapshot())
    logged = (record for record in caplog.records if record.name == overlap.logger.name)
    assert [(record.levelname, record.getMessage()) for record in logged] == [
        ("INFO", "updates in backward: drop (0 steps redone so far): overflow")
    ] * 4
    assert verdicts["rolled back"] == 0


def test_after_steps_that_are_clipped_few_are_tried_until_nothing_is_clipped(verdicts: Counter[str]) -> None:
    tested, expected = pair(TIGHT)
    assert tested.train(10) == expected.train(10)
    assert verdicts["redo"] == 1 and tested.optimizer.step().redone == 1
    for training in (tested, expected):
        training.optimizer.max_norm = 1e6
        training.train(6)
    assert_same(tested.snapshot(), expected.snapshot())
    assert verdicts["redo"] == 1
    assert verdicts["commit"] >= 3


@pytest.mark.parametrize("gib", [0.0, 1e-5])
def test_without_spare_memory_the_rest_waits_for_the_forward(gib: float, verdicts: Counter[str]) -> None:
    tested, expected = pair(LOOSE, state={**OVERLAP, "spare_host_gib": gib})
    assert tested.train(6) == expected.train(6)
    assert_same(tested.snapshot(), expected.snapshot())
    spare = tested.optimizer._backend._versions.host_bytes()
    assert spare <= gib * 2**30
    assert bool(verdicts) == (spare > 0)


@pytest.mark.usefixtures("never_pauses")
def test_weights_that_travel_are_taken_back_when_they_have_arrived() -> None:
    tested, expected = pair(TIGHT, ON_HOST)
    losses = expected.train(3)
    found = tested.train(2)
    lanes = tested.optimizer._backend.lanes
    lanes.delay = lambda lane: time.sleep(0.01 if lane == DEVICE_TO_HOST else 0)
    assert found + tested.train(1) == losses
    assert_same(tested.snapshot(), expected.snapshot())


class FullDevice:
    """torch, on a device without room."""

    asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: int, **settings: Any) -> Tensor:
        self.asked += 1
        raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("where", ["device", "auto"])
def test_without_device_memory_weights_go_to_the_host_or_the_rest_waits_for_the_forward(
    where: str, monkeypatch: pytest.MonkeyPatch, verdicts: Counter[str]
) -> None:
    """It is asked for once: a request in vain takes torch's cache with it."""
    tested, expected = pair(LOOSE, {**OVERLAP, "previous_weights": where})
    with monkeypatch.context() as full:
        full.setattr(versions, "torch", full_device := FullDevice())
        assert tested.train(4) == expected.train(4)
    assert full_device.asked == 1 and bool(verdicts) == (where == "auto")
    tested.optimizer.release_device_memory()
    assert tested.train(2) == expected.train(2)
    assert verdicts
    assert_same(tested.snapshot(), expected.snapshot())


@pytest.mark.usefixtures("never_pauses")
def test_weights_that_travel_take_no_device_memory_beside_the_ring(verdicts: Counter[str]) -> None:
    (on_device, expected), (on_host, _) = pair(LOOSE), pair(LOOSE, ON_HOST)
    losses = expected.train(8)
    reports = []
    for tested in (on_device, on_host):
        assert tested.train(8) == losses
        assert_same(tested.snapshot(), expected.snapshot())
        reports.append(tested.optimizer.memory_report())
    assert verdicts["commit"] > 1 and verdicts["redo"] > 1
    assert reports[0]["device_bytes"] > reports[1]["device_bytes"] == 0
    assert reports[1]["ring_bytes"] <= 1.25 * reports[0]["ring_bytes"]
    assert reports[1]["host_bytes"] > reports[0]["host_bytes"]


class Gated(nn.Module):
    """A layer with a gate, which reads what it is given in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate(hidden.to(self.gate.weight.dtype)).sigmoid().mean()
        return hidden + self.layer(hidden).tanh() * gate.to(hidden.dtype)


class GatedTraining(OnVectors):
    """Gates are in fp32; two steps have large gradients."""

    rows, width, micro_batches = 4, 24, 1

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state, make=lambda: nn.Sequential(*(Gated() for _ in range(4))), clipping={"max_norm": 100.0})
        for block in self.model:
            block.gate.float()

    def loss(self, micro: int = 0) -> Tensor:
        return super().loss(micro) * (1000 if self.steps in (3, 7) else 1)


def test_previous_weights_take_their_own_bytes(verdicts: Counter[str]) -> None:
    """2 for a weight in bf16, and 4 for one in fp32 in the same unit."""
    tested, expected = GatedTraining(ON_HOST), GatedTraining(RESIDENT)
    losses = tested.train(1)
    tested.delays(0)
    assert losses + tested.train(9) == expected.train(10)
    assert_same(tested.snapshot(), expected.snapshot())
    assert verdicts["commit"] > 1 and verdicts["redo"] > 1
    previous: dict[Any, Any] = tested.optimizer.engine.backend._versions._previous
    assert any(len({part.owner.local.dtype for part in record.parts}) > 1 for record in previous)
    for record, kept in previous.items():
        assert kept.weights_nbytes == sum(part.owner.local.itemsize * aligned(part.elements) for part in record.parts)


@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_the_ring_is_filled_with_what_the_next_backward_completes_first(
    fraction: float, monkeypatch: pytest.MonkeyPatch, verdicts: Counter[str]
) -> None:
    """Each record is fetched once in a step, whatever share of the units is left to the forward."""
    monkeypatch.setattr(LinkShare, "fraction", property(lambda _: fraction, lambda *_: None), raising=False)
    fetched: list[Record] = []
    taken: list[Record] = []
    fetch, take = Ring._fetch, Ring.acquire
    monkeypatch.setattr(Ring, "_fetch", lambda self, record: (fetched.append(record), fetch(self, record)))
    monkeypatch.setattr(Ring, "acquire", lambda self, record: (taken.append(record), take(self, record))[1])
    tested, expected = pair()
    losses = [tested.step() for _ in range(3)]
    backend = tested.optimizer.engine.backend
    for step in range(3):
        tested.optimizer.synchronize()
        ready = backend._ring.staged()
        tested.delays(step)
        assert len(ready) > 2
        fetched.clear()
        taken.clear()
        losses.append(tested.step())
        tested.optimizer.synchronize()
        assert sum(record.nbytes for record in fetched) == sum(unit.nbytes for unit in backend._records)
        assert taken[: len(ready)] == ready
    assert losses == expected.train(6)
    assert_same(tested.snapshot(), expected.snapshot())
    assert verdicts.keys() == {"commit"}


def test_where_the_ring_has_no_room_for_weights_they_do_not_travel(
    monkeypatch: pytest.MonkeyPatch, verdicts: Counter[str]
) -> None:
    tested, expected = pair(LOOSE)
    assert tested.train(1) == expected.train(1)
    most, made = max(tested.optimizer._backend._ring.sizes), Ring._allocate

    def make_slots(self: Ring, sizes: list[int]) -> None:
        if max(sizes) > most:
            raise torch.OutOfMemoryError("no room")
        made(self, sizes)

    monkeypatch.setattr(Ring, "_allocate", make_slots)
    monkeypatch.setattr(versions, "torch", FullDevice())
    assert tested.train(4) == expected.train(4)
    assert not verdicts and max(tested.optimizer._backend._ring.sizes) == most
    monkeypatch.undo()
    assert_same(tested.snapshot(), expected.snapshot())


def test_recomputing_takes_nothing_back(verdicts: Counter[str]) -> None:
    tested, expected = pair(recompute=True)
    assert tested.train(5) == expected.train(5)
    assert_same(tested.snapshot(), expected.snapshot())
    assert verdicts["rolled back"] == 0
    assert verdicts["commit"] >= 2


class HeldAttempts:
    """Units are tried when :meth:`release` says so."""

    def __init__(self, training: Training) -> None:
        self.free, self.stood = threading.Event(), 0
        updater = training.optimizer.engine.updater
        update = updater.update

        def held(unit: Any, updates: Any, speculative: bool = False) -> None:
            if speculative:
                self.stood += 1
                assert self.free.wait(PATIENCE)
            update(unit, updates, speculative)

        updater.update = held


@pytest.mark.parametrize(("width", "writes"), [(7, False), (32, False), (7, True)])
def test_backward_does_not_wait_for_what_is_tried(width: int, writes: bool, verdicts: Counter[str]) -> None:
    """Nor is a weight that has several units edited by the first of them, for those behind it.

    One that somebody else writes to before its update is updated from there.
    """
    tested, expected = pair(make=lambda: TinyTransformer(width=width))
    for training in (tested, expected):
        training.train(3)
        training.optimizer.synchronize()
        held = HeldAttempts(training) if training is tested else None
        if training is tested:
            verdicts.clear()
        backward(training)  # all of it, while the first unit stands still
        if writes:
            with torch.no_grad():
                training.named[TRIED].mul_(0.5)
        if held is not None:
            assert held.stood <= 1
            held.free.set()
        training.optimizer.step()
        if held is not None:
            parts = Counter(owner.name for unit in training.optimizer._backend.units() for owner in unit.owners)
            assert (held.stood > 3 or writes) and (parts[TRIED] > 2 or width == 7)
    assert_same(tested.snapshot(), expected.snapshot())
    assert bool(verdicts["commit"]) is not writes and bool(verdicts["rolled back"]) is writes


NORM = "blocks.1.norm.weight"
RESIDENT_IN_PART: dict[str, Any] = {**OVERLAP, "resident_gib": 6 * 1024 / 2**30}


def keep_the_graph(training: Training) -> None:
    """Its second backward reads the weights again."""
    for _ in range(2):
        loss = training.loss()
        with training.strategy.accumulate(training.model, last=True):
            training.optimizer.backward(loss, retain_graph=True)
            training.optimizer.backward(loss)
        training.optimizer.step()
        training.steps += 1


def fail_in_backward(training: Training) -> None:
    """In the last layer: all that was updated is taken back."""
    before = weights(training)
    handle = training.named[LAST].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(training)
    handle.remove()
    assert_same(weights(training), before)
    training.optimizer.zero_grad()
    training.train(3)


def write_to(name: str) -> Callable[[Training], None]:
    """After every step, as a logit scale is clamped: its own unit is left to ``step()``, which rebuilds its master."""

    def write_after_every_step(training: Training) -> None:
        for step in range(7):
            training.optimizer.max_norm = 1e-3 if step == 5 else 1e6
            training.step()
            with torch.no_grad():
                training.model.get_parameter(name).mul_(0.9)

    return write_after_every_step


def exchange_for_a_backward(training: Training) -> None:
    """And write to the weight again between it and ``step()``: the master is that of the last value."""
    for step in range(6):
        weight = training.model.get_parameter(NORM)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.25)
        backward(training)
        with torch.no_grad():
            training.named[NORM].copy_(kept)
            if step % 3:
                training.named[NORM].mul_(0.5) if step % 3 == 1 else training.named[NORM].add_(1).sub_(1)
        training.optimizer.step()
        training.steps += 1


def sharpen(training: Training) -> None:
    """Sharpness-aware minimization (SAM): weights are others in a backward, and the same again before the step."""
    for step in range(4):
        if step % 2:
            backward(training)
            training.optimizer.zero_grad()
        weights_now = list(training.model.parameters())
        kept = [weight.detach().clone() for weight in weights_now]
        with torch.no_grad():
            torch._foreach_mul_(weights_now, 1.125)
        training.optimizer.backward(training.loss(1))
        with torch.no_grad():
            torch._foreach_copy_(weights_now, kept)
        training.optimizer.step()
        training.steps += 1
    training.train(3)  # updates run in backward again


def write_to_betas(training: Training) -> None:
    """In place, also while updates are pending."""
    betas = torch.tensor(0.9), torch.tensor(0.99)
    for group in training.optimizer.param_groups:
        group.update(lr=torch.tensor(1e-2), betas=betas, fused=False, foreach=False)
    for _ in range(6):
        training.step()
        betas[0].mul_(0.8)
        backward(training)
        betas[0].mul_(0.9)
        training.optimizer.step()
        betas[0].mul_(0.9)


def change_the_rate_after_every_backward(training: Training) -> None:
    for step in range(8):
        backward(training)
        training.optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        training.optimizer.step()


LOOPS: dict[str, tuple[Callable[[Training], None], set[str], str]] = {
    "keep the graph": (keep_the_graph, {"commit"}, ""),
    "fail in backward": (fail_in_backward, {"rolled back", "commit"}, ""),
    "write to a norm": (write_to(NORM), {"commit", "redo"}, NORM),
    "write to the embedding": (write_to(LAST), {"commit", "redo"}, ""),
    "exchange for a backward": (exchange_for_a_backward, {"commit"}, NORM),
    "SAM": (sharpen, {"rolled back", "commit"}, "and 19 others"),
    "write to betas": (write_to_betas, {"rolled back", "commit"}, ""),
    "change the rate": (change_the_rate_after_every_backward, {"rolled back"}, ""),
}
"""What users do, which verdicts come of it, and what the log says once of units that are left to ``step()``."""


@pytest.mark.usefixtures("never_pauses")
@every_value(loop=LOOPS, state=[OVERLAP, ON_HOST, RESIDENT_IN_PART], parameters=["bfloat16", "float16", "float32"])
def test_loops_of_users(
    loop: str, state: dict[str, Any], parameters: str, verdicts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", overlap.logger.name)
    repeat, wanted, left_to_step = LOOPS[loop]
    tested, expected = pair(state=state, parameters=parameters)
    for training in (tested, expected):
        training.train(3)
        training.optimizer.synchronize()
        if training is tested:
            training.delays(3)
        verdicts.clear()
        repeat(training)
        found = {verdict for verdict, times in verdicts.items() if times}
        assert found == (wanted if training is tested else set())
    rollbacks = tested.optimizer.engine.queue.rolled_back
    assert_same(tested.snapshot(), expected.snapshot())
    logged = [record for record in caplog.records if record.name == overlap.logger.name]
    warned = [record.getMessage() for record in logged if record.levelname == "WARNING"]
    assert len(warned) == (rollbacks > 2), "one warning of a habit"
    assert all("rolled back before step() (3 so far): hyper-parameters were changed" in text for text in warned)
    said = [text for text in caplog.messages if "were written to after the last one" in text]
    assert len(said) == bool(left_to_step) and all(left_to_step in text for text in said), said


@every_value(update=["at_step", "next_forward", "overlap", "in_backward"], clipping=[NEVER, TIGHT])
@pytest.mark.usefixtures("never_pauses")
def test_own_updates_are_not_taken_for_writes_of_others(update: str, clipping: dict[str, Any]) -> None:
    """On an accelerator, weights that others may have written to are compared, and the host waits for that."""
    scope = "unit" if update == "in_backward" else "global"
    state = {"backend": "stream", "ring_mib": 0.02, "update": update}
    training = Training(state, clipping={**clipping, "scope": scope})
    for _ in range(4):
        training.step()
        training.optimizer.synchronize()
        managed = training.optimizer.engine.managed
        assert not managed._look(managed).touched


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_updates_in_backward_refuse_weights_that_are_written_to_before_the_step(backend: str) -> None:
    """The write came after the update, and would come before it with any other update time."""
    state = {"backend": backend, "update": "in_backward", **({"ring_mib": 0.02} if backend == "stream" else {})}
    tested, expected = pair({"max_norm": None}, state)

    def spoil() -> None:
        backward(tested)
        with torch.no_grad():
            tested.model.head.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"head\.weight was written to between backward.*in_backward"):
            tested.optimizer.step()

    others.goes_on_after_a_load(tested, spoil, expected)


def two_graphs(training: Training) -> None:
    """The second one has saved weights that the backward of the first one updates."""
    first, second = training.loss(0), training.loss(1)
    training.optimizer.backward(first)
    training.optimizer.backward(second)


def a_weight_without_gradient(training: Training) -> None:
    """The gradient of the embedding is computed last, and needs the weight of a block that is complete by then."""
    block, embedding = training.model.blocks[2], training.model.embed.weight
    penalty = nn.functional.linear(embedding, block.up.weight.detach()).float().square().mean()
    training.optimizer.backward(training.loss() + penalty)


@pytest.mark.parametrize(
    ("update", "other", "act"),
    [
        ("overlap", "next_forward", two_graphs),
        ("overlap", "next_forward", a_weight_without_gradient),
        ("in_backward", "at_step", a_weight_without_gradient),
    ],
)
def test_a_graph_that_needs_weights_from_before_their_update_is_explained(
    update: str, other: str, act: Callable[[Training], None]
) -> None:
    state = {"backend": "stream", "ring_mib": 0.02}
    clipping = {"max_norm": None}
    tested, expected = (Training({**state, "update": each}, clipping=clipping) for each in (update, other))
    for training in (tested, expected):
        training.train(3)
        training.optimizer.synchronize()
    before = weights(tested)
    act(expected)
    with pytest.raises(RuntimeError, match=f"inplace operation: .* a backward updates weights.*set update: {other}"):
        act(tested)
    if update == "overlap":
        assert_same(weights(tested), before)


def test_a_spare_slab_that_a_snapshot_has_taken_is_none_for_updates_in_backward(verdicts: Counter[str]) -> None:
    """What could be reserved for them is asked again."""
    tested, expected = pair()
    tested.train(3)
    backend = tested.optimizer._backend
    wanted = {item: {"exp_avg"} for item in tested.optimizer.engine.managed}
    snapshot = backend.pin(wanted, lambda parameter: parameter.detach().clone, None)
    assert snapshot is not None and backend._versions.pinned
    tested.train(3)
    snapshot.close()
    before = verdicts.total()
    tested.train(3)
    assert verdicts.total() > before
    expected.train(9)
    assert_same(tested.snapshot(), expected.snapshot())


def test_a_plan_holds_until_the_link_can_carry_less() -> None:
    training = Training(OVERLAP, clipping=NEVER)
    training.train(3)
    early = training.optimizer.engine.queue.early
    plan = early._plan
    training.train(1)
    assert early._plan is plan
    early._link_share.fraction = 0.5
    training.train(1)
    assert 0 < len(early._plan.local) < len(plan.local)
