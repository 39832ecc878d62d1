"""Deltas by the bits that updates set: receivers have what a whole set would have given them, without a kept set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightstep import Strategy, WeightInfo, WeightTransport
from lightstep.optimizer.changed_weights import ChangedWeights, Changes
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.rollout.transport import Bucket, BucketDelta, HeldWeights
from lightstep.sharding.model_names import unwrap_model
from lightstep.state.schema import Managed, Unit
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.training import random_delays
from tests.unit import test_publishing as publishing
from tests.unit.test_publishing import ON_HOST, STATES


class Receiver(WeightTransport):
    """Keeps the last set, and takes deltas to it.

    Attributes:
        as_deltas: tensors that were sent in deltas in the last set.
        words: how many words these deltas had.
    """

    deltas = True

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.fails, self.go = False, threading.Event()
        self.go.set()
        self.as_deltas: list[str] = []
        self.words = self._number = 0
        self._held, self._set, self._base = HeldWeights(), "", ""
        self._buckets: Sequence[Sequence[WeightInfo]] = []

    def identify(self, set_id: str, base: str | None) -> None:
        self._set, self._base = set_id, base or ""

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        assert self.go.wait(PATIENCE)
        self.accepts_deltas = bool(self._base) and self._held.set_id == self._base
        self._held.begin(self._set, self._base if self.accepts_deltas else "")
        self._buckets, self._number, self.as_deltas, self.words = buckets, 0, [], 0

    def send(self, bucket: Bucket) -> None:
        self._take(bucket)
        self._held.keep(bucket, self._number == len(self._buckets))

    def send_delta(self, delta: BucketDelta) -> None:
        infos = self._buckets[self._number]
        self.as_deltas += [info.name for info in infos]
        self.words += delta.changed
        self._take(self._held.apply(infos, delta.buffer, self._number + 1 == len(self._buckets)))

    def _take(self, bucket: Bucket) -> None:
        if self.fails:
            self.fails = False
            raise TimeoutError("the server is gone")
        self._number += 1
        self.weights |= {info.name: tensor.cpu().clone() for info, tensor in bucket}

    def finish(self) -> None:
        self._held.end()

    def abort(self, reason: str) -> None:
        self._held.forget()


def _with_muon(strategy: Strategy, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices, rest = unwrap_model(model).split()
    groups = [{"params": matrices, "optimizer_class": torch.optim.Muon}, {"params": rest}]
    return strategy.create_optimizer(model, param_groups=groups, lr=lr)


CREATE: dict[str, Callable[[Strategy, nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda strategy, model, lr: strategy.create_optimizer(model, lr=lr),
    "sgd": lambda strategy, model, lr: strategy.create_optimizer(model, optimizer_class=torch.optim.SGD, lr=lr),
    "muon": _with_muon,
}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n].cpu(), t.cpu()) for n, t in expected.items())


CLOSES: list[Callable[[], None]] = []
"""What ends the strategies of this test."""


@pytest.fixture(autouse=True)
def every_strategy_is_closed() -> Iterator[None]:
    yield
    while CLOSES:
        CLOSES.pop()()


class Run(publishing.Run):
    """A model in training with bf16 weights, and a receiver."""

    def __init__(self, state: dict[str, Any], optimizer: str = "adamw", lr: float = 1e-4, **more: Any) -> None:
        super().__init__(state, create=lambda strategy, model: CREATE[optimizer](strategy, model, lr), **more)
        self.receiver = Receiver()

        CLOSES.append(self.strategy.close)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def publish(self, wait: bool = True, **options: Any) -> Any:  # type: ignore[override]
        self.strategy.publish_weights(self.model, to=self.receiver, wait=wait, **options)
        return self.strategy.wait_for_publication() if wait else None

    def is_served(self, expected: dict[str, Tensor] | None = None) -> bool:
        return same(self.receiver.weights, expected or self.weights())

    @property
    def changed(self) -> ChangedWeights | None:
        assert isinstance(self.optimizer, MixedPrecisionOptimizer)
        return self.optimizer.engine.updater.changed


@pytest.fixture(name="compared")
def _compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words of buffers that were compared with those of a kept set."""
    from lightstep.rollout import staged_weights

    compare = staged_weights.changed_words
    found: list[int] = []

    def counting(own: Tensor, *arguments: Any) -> Any:
        found.append(own.numel())
        return compare(own, *arguments)

    monkeypatch.setattr(staged_weights, "changed_words", counting)
    return found


@every_value(state=STATES, optimizer=CREATE, delays=[False, True])
def test_updates_set_the_bits_of_what_they_change(
    state: str, optimizer: str, delays: bool, compared: list[int]
) -> None:
    run = Run(STATES[state], optimizer, lr=1e-2 if optimizer == "sgd" else 1e-4)
    run.step()
    if delays and state != "resident":
        random_delays(run.optimizer.engine.backend.lanes, 0)
    run.publish()
    before, deltas = run.weights(), 0
    for _ in range(3):
        run.step()
        run.publish()
        now = run.weights()
        assert run.is_served()
        differing = sum(int((now[name] != before[name]).sum()) for name in run.receiver.as_deltas)
        assert run.receiver.words == differing
        deltas += len(run.receiver.as_deltas)
        before = now
    assert deltas > 6 and not compared


@pytest.mark.parametrize("state", ["resident", "overlap"])
def test_masters_that_were_edited_count(state: str) -> None:
    """Before and after the step that writes them. What else may come between sets: ``test_programs.py``."""
    run = Run(STATES[state])
    run.step()
    chosen = next(iter(run.model.parameters()))
    for is_published_first in (True, False):
        run.step()
        run.publish()
        run.optimizer.state[chosen]["master"] = run.optimizer.state[chosen]["master"] + 1
        for _ in range(1 + is_published_first):
            run.publish()
            assert run.is_served()
            run.step()
        run.publish()
        assert run.is_served()


def test_a_set_that_replaces_another_has_the_changes_of_both() -> None:
    run = Run(STATES["resident"])
    for _ in range(3):
        run.step()
        run.publish()
    run.receiver.go.clear()
    run.step()
    run.publish(wait=False)  # is begun, and waits
    for _ in range(3):
        run.step()
        run.publish(wait=False, replace=True)
    expected = run.weights()
    run.receiver.go.set()
    run.strategy.wait_for_publication()
    assert run.is_served(expected) and run.receiver.as_deltas


# -- when bits are kept


def test_bits_take_the_place_of_the_last_set() -> None:
    run = Run(STATES["resident"])
    run.publish()  # before the set-up nobody knows who writes
    assert run.changed is None
    for _ in range(3):
        run.step()
        run.publish()
    publisher = run.strategy.rollout._publisher
    assert publisher is not None and run.receiver.as_deltas
    assert len(publisher._free) == 1
    weights = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    assert weights / 8 < run.optimizer.memory_report()["delta_bytes"] < 8 * weights


@pytest.mark.parametrize(
    "settings",
    [
        {"precision.master_weights": "stochastic"},
        {"precision.parameters": "float32", "roles.rollout.parameters": "bfloat16"},
        {"weights": ON_HOST, "optimizer_state": STATES["stream"]},
    ],
)
def test_without_masters_that_writes_are_found_by_sets_are_compared(
    settings: dict[str, Any], compared: list[int]
) -> None:
    run = Run(settings.pop("optimizer_state", STATES["resident"]), **settings)
    for _ in range(3):
        run.step()
        for parameter in run.model.parameters():
            parameter.data.view(-1)[:1] += 1
        expected = {name: tensor.bfloat16() for name, tensor in run.weights().items()}
        run.publish()
        assert run.is_served(expected)
    assert run.changed is None and compared and run.receiver.as_deltas


def no_room(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def test_without_room_for_bits_sets_are_compared(monkeypatch: pytest.MonkeyPatch, compared: list[int]) -> None:
    monkeypatch.setattr(ChangedWeights, "__init__", no_room)
    run = Run(STATES["resident"])
    for _ in range(3):
        run.step()
        run.publish()
        assert run.is_served()
    assert compared and run.receiver.as_deltas


def test_without_room_for_other_bits_the_old_ones_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(STATES["resident"])
    for _ in range(2):
        run.step()
        run.publish()
    assert run.changed is not None
    monkeypatch.setattr(ChangedWeights, "covers", lambda *arguments: False)
    monkeypatch.setattr(ChangedWeights, "__init__", no_room)
    run.step()
    run.publish()
    assert run.is_served() and run.changed is None


def test_two_receivers_in_turn_get_whole_sets() -> None:
    run, other = Run(STATES["resident"]), Receiver()
    run.step()
    for _ in range(3):
        run.step()
        run.publish()
        assert run.is_served() and not run.receiver.as_deltas
        run.receiver, other = other, run.receiver


def test_another_strategy_that_publishes_breaks_the_chain() -> None:
    """The bits that it took are missing in the next ones."""
    run, other = Run(STATES["resident"]), Receiver()
    strategy = Strategy.load("resident")
    CLOSES.append(strategy.close)
    for _ in range(3):
        run.step()
        run.publish()
    assert run.receiver.as_deltas
    run.step()
    strategy.publish_weights(run.model, to=other)
    run.step()
    run.publish()
    assert run.is_served() and not run.receiver.as_deltas


def test_bits_are_read_behind_the_stream_that_copied_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sends has a stream of its own."""
    order: list[str] = []

    class Stream:
        def record_event(self) -> str:
            order.append("recorded")
            return "event"

        def wait_event(self, event: str) -> None:
            order.append(f"waited for the {event}")

    class OnDevice:
        device = torch.device("cuda")

        def __getitem__(self, place: slice) -> Tensor:
            order.append("read")
            return torch.tensor([0b101], dtype=torch.uint8)

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    parameter = nn.Parameter(torch.zeros(8))
    unit = Unit(0, ((cast(Managed, SimpleNamespace(name="weight", param=parameter)), 0, 8),))
    changes = Changes([parameter], {unit: cast(Tensor, OnDevice())}, set(), None, object())
    assert changes.places_in(parameter, 8, torch.device("cpu")).tolist() == [0, 2]
    assert order == ["recorded", "waited for the event", "read"]
