"""Saves that read the host's records while training goes on: what is on disk is the moment of asking, bit for bit.

Each is held against a synchronous save of the same moment, and the run against one that saved nothing.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightstep.checkpoint import CheckpointError, save
from lightstep.checkpoint.background import finish_pending
from lightstep.checkpoint.saved import SavedCheckpoint
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.snapshot import Snapshot
from lightstep.state.versions import Versions
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.training import Training, assert_same

STREAM: dict[str, Any] = {"backend": "stream", "ring_mib": 0.02}
OTHERS: dict[str, dict[str, Any]] = {"resident": {"backend": "resident"}, "bulk": {"backend": "bulk"}}
GIB = 2.0**30


pytestmark = pytest.mark.usefixtures("small_cuts")


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each write to a pinned record: whether it went to a spare slab; otherwise it has waited."""
    found: list[bool] = []
    exchanged = Versions._replacement_slab

    def counted(self: Versions, record: Any) -> Any:
        slab = exchanged(self, record)
        found.append(slab is not None)
        return slab

    monkeypatch.setattr(Versions, "_replacement_slab", counted)
    return found


@pytest.fixture(autouse=True)
def nothing_left_pinned() -> Iterator[None]:
    yield
    finish_pending()


class Reader:
    """Holds the writer back: before each entry it waits for :attr:`go`, and takes its time."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self.go = threading.Event()
        self.taken = 0
        self._chance = random.Random(seed)
        patch.setattr(Snapshot, "take", self._slowly(Snapshot.take))

    def _slowly(self, take: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def slowly(snapshot: Any, parameter: Tensor, key: str) -> Tensor:
            assert self.go.wait(PATIENCE)
            time.sleep(self._chance.random() * 1e-3)
            self.taken += 1
            return take(snapshot, parameter, key)

        return slowly


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    held = Reader(monkeypatch)
    yield held
    held.go.set()


def tensors_of(saved: SavedCheckpoint, path: Path) -> dict[str, Any]:
    """All that a checkpoint holds: dtype, shape and the bytes of each tensor."""
    files = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    return {
        key: (stored.dtype, stored.shape, [files[c.file][c.start : c.start + c.nbytes] for c in stored.chunks])
        for key, stored in saved.index.items()
    }


def ask_twice(training: Any, folder: Path) -> Any:
    """Save at once, reading entry by entry what anybody can read, and ask for a save of the same moment."""
    strategy, model, optimizer = training.strategy, training.model, training.optimizer
    with mock.patch("lightstep.checkpoint.save.in_place", lambda sources, *_: sources):
        strategy.save_checkpoint(folder / "expected", model, optimizer)
    return strategy.save_checkpoint(folder / "found", model, optimizer, asynchronous=True)


def check_saved(folder: Path) -> None:
    one, other = (SavedCheckpoint.read(folder / name) for name in ("found", "expected"))
    found, expected = tensors_of(one, folder / "found"), tensors_of(other, folder / "expected")
    assert found.keys() == expected.keys() and any(key.endswith(".exp_avg") for key in found)
    assert [key for key, value in expected.items() if found[key] != value] == []
    assert one.state["optimizer"] == other.state["optimizer"] and one.groups == other.groups


def hold_copies(training: Any) -> None:
    """Copies of state on the device begin when an update that did not wait for them would be over."""
    training.optimizer._backend._lanes[torch.device("cpu")].delay = lambda _: time.sleep(0.01)


def settings(update: str, parameters: str) -> dict[str, Any]:
    clipping = {"max_norm": None if update == "in_backward" else 0.5}
    return {"clipping": clipping, "parameters": parameters, "loss_scale": {"kind": "constant", "scale": 1.0}}


@functools.cache
def undisturbed(in_backward: bool, parameters: str) -> dict[str, Tensor]:
    """After four steps."""
    run = Training(STREAM, **settings("in_backward" if in_backward else "at_step", parameters))
    run.train(4)
    return run.snapshot()


def train_beside_saves(tested: Training, reader: Reader, folder: Path, updates_wait: bool = False) -> None:
    """Three steps beside the writers of two saves."""
    for number in range(2):
        reader.go.clear()
        pending = ask_twice(tested, folder / str(number))
        if updates_wait:
            reader.go.set()
        tested.train(2 - number)
        assert updates_wait or not pending.done()
        reader.go.set()
        pending.result(PATIENCE)
        check_saved(folder / str(number))
    assert reader.taken


@every_value(
    update=["next_forward", "in_backward", "overlap"],
    parameters=["bfloat16", "float32", "float16"],
    resident_gib=[0.0, 3000 / GIB],
    spare_host_gib=["auto", 0.0, 8192 / GIB],
)
def test_training_meanwhile_changes_nothing_that_is_saved(
    tmp_path: Path,
    reader: Reader,
    moved: list[bool],
    update: str,
    parameters: str,
    resident_gib: float,
    spare_host_gib: Any,
) -> None:
    """Saves beside updates at the step: ``tests/distributed/test_programs.py``."""
    state = {**STREAM, "update": update, "resident_gib": resident_gib, "spare_host_gib": spare_host_gib}
    tested = Training(state, **settings(update, parameters))
    tested.train(1)
    tested.delays(1)
    train_beside_saves(tested, reader, tmp_path, updates_wait=spare_host_gib != "auto")
    assert not tested.optimizer._backend._versions.pinned and moved
    assert spare_host_gib != "auto" or all(moved)
    assert spare_host_gib != 0.0 or update == "overlap" or not any(moved)
    assert_same(tested.snapshot(), undisturbed(update == "in_backward", parameters))


@pytest.mark.parametrize(
    ("backend", "update", "parameters"),
    [("resident", "at_step", "float16"), ("resident", "in_backward", "bfloat16"), ("bulk", "at_step", "bfloat16")],
)
def test_state_on_the_device_and_in_bulk_is_that_of_the_moment_too(
    tmp_path: Path, reader: Reader, moved: list[bool], backend: str, update: str, parameters: str
) -> None:
    tested = Training({**OTHERS[backend], "update": update}, **settings(update, parameters))
    tested.train(1)
    if backend == "resident":
        hold_copies(tested)
    train_beside_saves(tested, reader, tmp_path)
    assert all(moved) and bool(moved) == (backend == "bulk")
    assert_same(tested.snapshot(), undisturbed(update == "in_backward", parameters))


def forget_some(training: Training) -> None:
    group = training.optimizer.param_groups[0]
    group["params"] = group["params"][:1]
    training.optimizer.backward(training.loss())
    training.optimizer.step()


def to_float(training: Training) -> None:
    training.model.float()
    training.train(1)


def drop(training: Training) -> None:
    training.optimizer = training.model = None  # type: ignore[assignment]


def write_into_what_was_read(training: Training) -> None:
    for view in training.held:  # type: ignore[attr-defined]
        view.zero_()
    training.train(1)


EVENTS: list[Callable[[Training], Any]] = [
    forget_some,
    to_float,
    drop,
    write_into_what_was_read,
    lambda training: (training.train(1), training.optimizer.close()),
    lambda training: [p.data.zero_() for p in training.model.parameters()],
]
"""What else may be done is a program of ``test_programs.py``."""


@pytest.mark.parametrize(
    ("event", "backend"),
    [(event, ["resident", "bulk", "stream"][number % 3]) for number, event in enumerate([*EVENTS, *EVENTS[:3]], 1)],
)
def test_whatever_is_done_to_the_run_meanwhile(
    tmp_path: Path, reader: Reader, backend: str, event: Callable[[Training], Any]
) -> None:
    state = OTHERS.get(backend, {**STREAM, "update": "next_forward", "resident_gib": 3000 / GIB})
    training = Training(state)
    training.train(2)
    if backend == "resident":
        hold_copies(training)
    if event is write_into_what_was_read:
        entries = (training.optimizer.state[parameter] for parameter in training.optimizer.state)
        training.held = [one["exp_avg_sq"].view(-1) for one in entries]  # type: ignore[attr-defined]
    pending = ask_twice(training, tmp_path)
    event(training)
    reader.go.set()
    pending.result(PATIENCE)
    assert reader.taken
    check_saved(tmp_path)


@pytest.mark.parametrize("what", ["the writer", "its thread"])
def test_a_save_that_fails_lets_go_of_everything(tmp_path: Path, what: str) -> None:
    training = Training({**STREAM, "spare_host_gib": 0.0})
    training.train(2)
    ask = functools.partial(training.strategy.save_checkpoint, model=training.model, optimizer=training.optimizer)
    full, no_thread = OSError(28, "No space left on device"), RuntimeError("can't start new thread")
    if what == "the writer":
        with mock.patch.object(Snapshot, "take", side_effect=full):
            assert isinstance(ask(tmp_path / "a", asynchronous=True).exception(PATIENCE), CheckpointError)
        assert not training.optimizer._backend._versions.pinned
        with pytest.raises(CheckpointError, match="No space left"):
            training.train(1)
    else:
        with (
            mock.patch.object(threading.Thread, "start", side_effect=no_thread),
            pytest.raises(RuntimeError, match="can't start"),
        ):
            ask(tmp_path / "a", asynchronous=True)
        assert not training.optimizer._backend._versions.pinned
    training.train(1)
    assert training.optimizer._backend._versions.host_bytes() == 0
    ask(tmp_path / "a", asynchronous=True).result(PATIENCE)


@pytest.mark.parametrize("state", [OTHERS["resident"], {**STREAM, "resident_gib": 1.0}], ids=["resident", "stream"])
def test_a_copy_for_a_save_that_fails_stops_nothing_else(tmp_path: Path, state: dict[str, Any]) -> None:
    """What it copies is on the device, and whole."""
    training, expected = Training(state), Training(OTHERS["resident"])
    for run in (training, expected):
        run.train(2)
    ask = functools.partial(training.strategy.save_checkpoint, model=training.model, optimizer=training.optimizer)
    allocate = HostCopyPool.allocate

    def too_small(pool: HostCopyPool, tensor: Tensor) -> Tensor:
        return allocate(pool, tensor[:3] if tensor.dtype == torch.uint8 else tensor)

    with mock.patch.object(HostCopyPool, "allocate", too_small):
        error = ask(tmp_path / "a", asynchronous=True).exception(PATIENCE)
    assert isinstance(error, CheckpointError) and "copying the state of" in str(error)
    training.optimizer.state_dict()
    assert_same(training.snapshot(), expected.snapshot())
    with pytest.raises(CheckpointError, match="copying the state of"):
        ask(tmp_path / "b")
    for run in (training, expected):
        run.train(2)
    assert_same(training.snapshot(), expected.snapshot())
    ask(tmp_path / "a", asynchronous=True).result(PATIENCE)


@pytest.mark.parametrize("backend", ["resident", "stream"])
def test_a_handler_saves_while_another_save_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The save of SIGTERM's handler is still being written when training goes on and saves again."""
    training = Training({"backend": backend}, parameters="bfloat16")
    training.train(2)
    written, write, copied = threading.Event(), save._write, save.writer_group

    def write_slowly(plan: Any, ranks: Any) -> Path:
        assert plan.path != tmp_path / "found" or written.wait(PATIENCE)
        return write(plan, ranks)

    def interrupted(ranks: Any) -> Any:
        monkeypatch.setattr(save, "writer_group", copied)
        ask_twice(training, tmp_path)
        return copied(ranks)

    monkeypatch.setattr(save, "_write", write_slowly)
    monkeypatch.setattr(save, "writer_group", interrupted)
    training.strategy.save_checkpoint(tmp_path / "step-2", training.model, training.optimizer, asynchronous=True)
    training.train(1)
    threading.Timer(0.5, written.set).start()
    training.strategy.save_checkpoint(tmp_path / "step-3", training.model, training.optimizer, asynchronous=True)
    training.train(1)
    finish_pending()
    check_saved(tmp_path)


@pytest.mark.parametrize("backend", ["bulk", "stream"])
def test_an_edit_of_one_parameter_meanwhile_leaves_the_others_of_its_unit(
    tmp_path: Path, reader: Reader, moved: list[bool], backend: str
) -> None:
    """The record that it is written to has other memory, as the save reads the old one."""
    run, undisturbed_run = Training(OTHERS.get(backend, STREAM)), Training(OTHERS.get(backend, STREAM))
    for training in (run, undisturbed_run):
        training.train(2)
    pending = ask_twice(run, tmp_path)
    for training in (run, undisturbed_run):
        training.optimizer.state[next(training.model.parameters())]["exp_avg"].mul_(0.5)
        training.optimizer.state_dict()  # it is applied
    assert True in moved
    assert_same(run.snapshot(), undisturbed_run.snapshot())
    reader.go.set()
    pending.result(PATIENCE)
    check_saved(tmp_path)
    for training in (run, undisturbed_run):
        training.train(1)
    assert_same(run.snapshot(), undisturbed_run.snapshot())


def test_the_records_are_not_copied(tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it returns, a save copies the weights and nothing that is in the records."""
    training = Training(STREAM)
    training.train(2)
    copied: list[Tensor] = []
    allocate = HostCopyPool.allocate
    monkeypatch.setattr(HostCopyPool, "allocate", lambda self, tensor: copied.append(tensor) or allocate(self, tensor))
    pending = training.strategy.save_checkpoint(tmp_path / "a", training.model, training.optimizer, asynchronous=True)
    assert sum(tensor.dtype == torch.bfloat16 for tensor in copied) == len(list(training.model.parameters()))
    beside = {tuple(tensor.shape) for tensor in copied if tensor.dtype == torch.float32}
    assert beside == {(3, 3), (3,)}  # from what the masters of a layer start that was never updated
    reader.go.set()
    pending.result(PATIENCE)
