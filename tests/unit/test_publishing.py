"""Weights that a thread sends while training goes on: those of one step, whatever training does meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightstep
from lightstep import Strategy, TransformersEngine, WeightInfo, WeightTransferError, WeightTransport
from lightstep.rollout.transport import Bucket
from lightstep.sharding.prepared_model import PreparedModel
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.python import python
from tests.reference.tiny_model import TinyModel, loss_of
from tests.rollout_servers import FakeServer
from tests.unit.test_rollout_servers import KINDS, Training
from tests.unit.test_stream import random_delays

ROOT = Path(lightstep.__file__).resolve().parents[1]
STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "stream": {"backend": "stream"},
    "next_forward": {"backend": "stream", "update": "next_forward"},
    "overlap": {"backend": "stream", "update": "overlap"},
    "in_backward": {"backend": "stream", "update": "in_backward"},
}
ON_HOST = {"placement": "host", "device_mib": 0.005}
"""Weights and gradients rest on the host, beside these states."""


class Slow(WeightTransport):
    """Keeps what arrives, by version. It takes its time, and its first set begins when ``go`` is set.

    Args:
        seconds: the longest time of a call.
        fails_at: the method that fails once.
    """

    def __init__(self, seconds: float = 0.0, fails_at: str | None = None) -> None:
        self.received: dict[int, dict[str, Tensor]] = {}
        self.calls: list[str] = []
        self.go = threading.Event()
        self._seconds, self._fails_at, self._chance = seconds, fails_at, random.Random(0)
        self._version = 0

    def _called(self, what: str) -> None:
        self.calls.append(what)
        time.sleep(self._chance.random() * self._seconds)
        if what == self._fails_at:
            self._fails_at = None
            raise TimeoutError("the server is gone")

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        self._version = version
        assert self.go.wait(PATIENCE)
        self._called("begin")
        self.received[version] = {}

    def send(self, bucket: Bucket) -> None:
        self._called("send")
        self.received[self._version] |= {info.name: tensor.clone() for info, tensor in bucket}

    def finish(self) -> None:
        self._called("finish")

    def abort(self, reason: str) -> None:
        assert "the server is gone" in reason or "no more" in reason
        self.calls.append("abort")


class Run:
    """A model in training, and a transport."""

    def __init__(
        self,
        state: dict[str, Any] | None = None,
        transport: Any = None,
        create: Callable[[Strategy, Any], Any] = lambda strategy, model: strategy.create_optimizer(model, lr=1e-2),
        **settings: Any,
    ) -> None:
        settings = {"optimizer_state": state or STATES["resident"], "roles.rollout.bucket_mib": 0.0005, **settings}
        if (state or {}).get("update") == "in_backward":
            settings["clipping"] = {"max_norm": None}
        self.strategy = Strategy.load("resident", overrides=settings)
        torch.manual_seed(0)
        self.model: Any = self.strategy.prepare_model(TinyModel())
        self.optimizer: Any = create(self.strategy, self.model)
        self.transport = transport or Slow()
        self.steps = 0

    def backward(self, scale: float = 1.0) -> None:
        self.optimizer.backward(loss_of(self.model, self.steps) * scale)
        self.steps += 1

    def step(self, scale: float = 1.0) -> None:
        self.backward(scale)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def publish(self, **options: Any) -> int:
        return self.strategy.publish_weights(self.model, to=self.transport, wait=False, **options)

    def wait(self) -> Any:
        self.transport.go.set()
        return self.strategy.wait_for_publication()

    def received(self, version: int, expected: dict[str, Tensor]) -> bool:
        found = self.transport.received[version]
        return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def edit(run: Run, folder: Path) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(3)


def load(run: Run, folder: Path) -> None:
    run.strategy.load_checkpoint(folder / "first", run.model, run.optimizer)


def save(run: Run, folder: Path) -> None:
    run.strategy.save_checkpoint(folder / "second", run.model, run.optimizer, asynchronous=True)


def nothing(run: Run, folder: Path) -> None:
    pass


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "weights", "meanwhile"),
    [
        (state, weights, [nothing, edit, load, save][(number + on_host) % 4])
        for number, state in enumerate(["resident", "next_forward", "overlap", "in_backward"])
        for on_host, weights in enumerate(({}, ON_HOST))
    ],
)
def test_what_arrives_is_one_steps_whatever_training_does(
    state: str, weights: dict[str, Any], meanwhile: Callable[[Run, Path], None], tmp_path: Path
) -> None:
    """Each state with weights at each place; and what happens meanwhile with each of the two."""
    run = Run(STATES[state], Slow(seconds=0.004), weights=weights)
    visits = PreparedModel.of(run.model).weight_visits
    if visits is not None:
        random_delays(visits.weights.lanes, 0)
    run.step()
    if meanwhile is load:
        run.strategy.save_checkpoint(tmp_path / "first", run.model, run.optimizer)
    expected = {}
    for version in (1, 2):
        run.step()
        expected[version] = run.weights()
        assert run.publish() == version
        meanwhile(run, tmp_path)
        run.transport.go.set()
        for _ in range(2):
            run.step()
    assert run.wait().version == 2
    assert all(run.received(version, tensors) for version, tensors in expected.items())
    run.strategy.close()


def test_training_trains_as_if_nothing_was_published() -> None:
    runs = Run(STATES["overlap"], Slow(seconds=0.002)), Run(STATES["overlap"])
    for run in runs:
        run.transport.go.set()
        for _ in range(6):
            run.step()
            if run is runs[0]:
                run.publish(replace=True)
        run.strategy.close()
    assert all(torch.equal(tensor, runs[1].weights()[name]) for name, tensor in runs[0].weights().items())


# -- a second set while one is on its way ------------------------------------------------------------------------------


def test_a_second_set_waits_for_the_first() -> None:
    run = Run()
    run.publish()
    timer = threading.Timer(0.3, run.transport.go.set)
    timer.start()
    begin = time.monotonic()
    run.publish()
    assert time.monotonic() - begin > 0.2 and "finish" in run.transport.calls
    run.wait()
    assert sorted(run.transport.received) == [1, 2]


def test_a_third_set_replaces_the_second_one_that_waits() -> None:
    run = Run()
    expected = {}
    for version in range(1, 6):
        run.step()
        expected[version] = run.weights()
        assert run.publish(replace=True) == version
        while run.transport._version != 1:  # the first set is begun
            time.sleep(0.001)
    assert run.wait().version == 5
    assert sorted(run.transport.received) == [1, 5]
    assert run.received(1, expected[1]) and run.received(5, expected[5])


def test_host_memory_is_bounded_and_reused() -> None:
    run = Run()
    run.transport.go.set()
    for number in range(12):
        run.publish(replace=number % 3 > 0)
    run.wait()
    publisher = run.strategy.rollout._publisher
    assert publisher is not None
    assert len(publisher._free) <= 2 and all(pool.nbytes <= 2 << 20 for pool in publisher._free)


def test_too_little_memory_is_an_error_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.transport.go.set()
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0.0000001")
    with pytest.raises(MemoryError, match="weights that are published while training goes on"):
        run.publish()
    monkeypatch.delenv("LIGHTSTEP_HOST_MEMORY_CHECK")
    run.step()
    assert run.publish() == 1 and run.wait().version == 1


# -- errors ------------------------------------------------------------------------------------------------------------


@every_value(fails_at=["begin", "send", "finish"], then=["publish", "replace", "in turn", "wait", "close"])
def test_an_error_of_the_thread_reaches_the_loop_once(fails_at: str, then: str) -> None:
    run = Run(transport=Slow(fails_at=fails_at))
    run.transport.go.set()
    run.publish()
    while "abort" not in run.transport.calls:
        time.sleep(0.001)
    run.strategy.rollout._publisher._sets[0].pending.join()  # type: ignore[union-attr]
    run.step()
    calls: dict[str, Callable[[], object]] = {
        "publish": run.publish,
        "replace": lambda: run.publish(replace=True),
        "in turn": lambda: run.strategy.publish_weights(run.model, to=run.transport),
        "wait": run.strategy.wait_for_publication,
        "close": run.strategy.close,
    }
    with pytest.raises(WeightTransferError, match="the server is gone"):
        calls[then]()
    assert run.strategy.wait_for_publication() is None
    run.publish()
    assert run.wait().version == 2 and run.received(2, run.weights())
    run.strategy.close()


def test_a_set_that_waits_is_sent_although_the_one_before_it_failed() -> None:
    run = Run(transport=Slow(fails_at="finish"))
    run.publish(replace=True)
    while run.transport._version != 1:
        time.sleep(0.001)
    run.publish(replace=True)
    run.transport.go.set()
    while "abort" not in run.transport.calls:
        time.sleep(0.001)
    with pytest.raises(WeightTransferError, match="the server is gone"):
        run.wait()
    assert run.wait().version == 2 and run.received(2, run.weights())


def test_servers_change_while_a_set_is_on_its_way() -> None:
    training = Training("vllm", servers=1)
    (first,) = training.fakes
    begun, gate = threading.Event(), threading.Event()

    def before(path: str) -> None:
        if path == "/start_weight_update":
            begun.set()
            assert gate.wait(PATIENCE)

    first.before = before
    training.strategy.publish_weights(training.model, to=training.servers, wait=False)
    assert begun.wait(PATIENCE)
    second: FakeServer = KINDS["vllm"][0](training.initial, 10.0)
    training.servers.add(second.url)
    training.fakes.append(second)
    gate.set()
    assert training.strategy.wait_for_publication() is not None
    assert first.process.version == "1" and second.calls == []
    assert training.publish() == 2 and training.serves("2")
    training.close()


def test_what_makes_no_sense_is_refused() -> None:
    run = Run()
    with pytest.raises(ValueError, match="needs wait=False"):
        run.strategy.publish_weights(run.model, to=run.transport, replace=True)
    amid_a_step = Run(STATES["in_backward"])
    amid_a_step.backward()
    with pytest.raises(RuntimeError, match="Call step"):
        amid_a_step.publish()
    engine = TransformersEngine(run.strategy.prepare_model(TinyModel(), role="rollout"))
    with pytest.raises(ValueError, match="leave wait out"):
        run.strategy.publish_weights(run.model, to=engine, wait=False)


# -- the end of the process --------------------------------------------------------------------------------------------

PROGRAM = """
import logging, time, torch
from lightstep import Strategy, WeightTransport
logging.basicConfig(level=logging.ERROR)

class Printing(WeightTransport):
    def begin(self, version, buckets): pass
    def send(self, bucket): pass
    def abort(self, reason): pass
    def finish(self):
        time.sleep(0.3)
        print("all arrived", flush=True)
        raise TimeoutError("the server is gone")

strategy = Strategy.load("resident")
model = strategy.prepare_model(torch.nn.Linear(4, 4))
strategy.publish_weights(model, to=Printing(), wait=False)
"""


def test_a_process_that_ends_sends_the_set_and_logs_its_error() -> None:
    done = python("-c", PROGRAM, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "all arrived" in done.stdout and "the server is gone" in done.stderr
