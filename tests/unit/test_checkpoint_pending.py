"""Saves that a thread writes: what is saved is the run at the moment of asking, and nothing goes wrong in silence."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightstep.checkpoint import CheckpointError, latest_checkpoint, save
from lightstep.checkpoint import tensors as write_module
from lightstep.state.device_copies import DeviceCopies
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError
from tests.checkpoint_runs import content, held, same, trained
from tests.patience import PATIENCE
from tests.python import python

__all__ = ["held"]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
@pytest.mark.parametrize("waits", ["nobody", "result", "exception", "save", "load", "close"])
def test_training_goes_first_where_processors_are_scarce_unless_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Fetches and writes have a lower priority until somebody waits for the save."""
    strategy, model, optimizer = trained("resident")
    before, seen, go, write, fetch = niceness(), [], threading.Event(), torch.save, write_module._fetch

    def written(*arguments: Any, **keywords: Any) -> None:
        if threading.current_thread().name == "checkpoint-worker":
            seen.append(niceness())
            assert go.wait(PATIENCE)
        write(*arguments, **keywords)

    def fetched(source: Any) -> torch.Tensor:
        seen.append(niceness())
        return fetch(source)

    go.set()
    monkeypatch.setattr(torch, "save", written)
    monkeypatch.setattr(write_module, "_fetch", fetched)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    assert set(seen) == {before}
    seen.clear()
    go.clear()
    pending = strategy.save_checkpoint(tmp_path / "b", model, optimizer, asynchronous=True)
    ways = {
        "nobody": lambda: wait_until(pending.done),
        "result": pending.result,
        "exception": pending.exception,
        "save": lambda: strategy.save_checkpoint(tmp_path / "c", nn.Linear(2, 2)),
        "load": lambda: strategy.load_checkpoint(tmp_path / "b", model, optimizer),
        "close": strategy.close,
    }
    wait_until(lambda: len(seen) > 2)  # two fetches, and a write
    with pytest.raises(TimeoutError):
        pending.result(0)  # does not wait
    threading.Timer(0.3, go.set).start()
    ways[waits]()
    low = min(before + 10, 19)
    assert set(seen) == ({low} if waits == "nobody" else {low, before}) and seen[0] == low
    assert seen[-1] == (low if waits == "nobody" else before)
    assert niceness() == before


def test_the_thread_allocates_the_memory_for_state_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident")
    allocate, nbytes = HostCopyPool.allocate, Counter[bool]()

    def counted(copies: HostCopyPool, tensor: torch.Tensor) -> torch.Tensor:
        nbytes[threading.current_thread() is threading.main_thread()] += tensor.nbytes
        return allocate(copies, tensor)

    monkeypatch.setattr(HostCopyPool, "allocate", counted)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True).result(PATIENCE)
    weights = sum(p.nbytes for p in model.parameters())
    assert nbytes[True] == weights and nbytes[False] >= 5 * weights


@pytest.mark.parametrize("late", ["begin", "allocate"])
def test_an_update_waits_for_the_copies_of_the_state_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Whether the thread that queues them has not begun, or is allocating memory for them."""
    strategy, model, optimizer = trained("resident")
    expected = content(model, optimizer)
    kind, go = DeviceCopies if late == "begin" else HostCopyPool, threading.Event()
    method = getattr(kind, late)

    def waits(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(PATIENCE)
        return method(*arguments)

    monkeypatch.setattr(kind, late, waits)
    pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    if late == "allocate":
        threading.Timer(0.3, go.set).start()
    for _ in range(2):
        optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
        optimizer.step()
    go.set()
    pending.result(PATIENCE)
    _, other, optimizer2 = trained("resident", steps=1)
    strategy.load_checkpoint(tmp_path / "a", other, optimizer2)
    same(content(other, optimizer2), expected)


def test_the_thread_waits_for_copies_that_an_update_is_queueing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident")
    expected = content(model, optimizer)
    begin, copy, queueing, begun = DeviceCopies.begin, DeviceCopies._copy, threading.Event(), threading.Event()

    def begin_meanwhile(snapshot: DeviceCopies) -> None:
        assert queueing.wait(PATIENCE)
        begun.set()
        begin(snapshot)

    def copy_slowly(*arguments: Any) -> Any:
        queueing.set()
        assert begun.wait(PATIENCE)
        time.sleep(0.1)
        return copy(*arguments)

    monkeypatch.setattr(DeviceCopies, "begin", begin_meanwhile)
    monkeypatch.setattr(DeviceCopies, "_copy", copy_slowly)
    pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
    optimizer.step()
    pending.result(PATIENCE)
    _, other, optimizer2 = trained("resident", steps=1)
    strategy.load_checkpoint(tmp_path / "a", other, optimizer2)
    same(content(other, optimizer2), expected)


def test_memory_that_the_thread_does_not_get_is_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident")
    allocate = HostCopyPool.allocate

    def refused(copies: HostCopyPool, tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            return allocate(copies, tensor)
        raise HostMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopyPool, "allocate", refused)
        pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
        assert "a was not saved: HostMemoryError: no memory" in str(pending.exception(PATIENCE))
    with pytest.raises(CheckpointError, match="no memory"):
        pending.result()
    optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
    optimizer.step()
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True).result(PATIENCE)


def test_a_second_save_waits_for_the_first(tmp_path: Path, held: threading.Event) -> None:
    strategy, model, optimizer = trained("resident")
    first = strategy.save_checkpoint(tmp_path / "step-1", model, optimizer, asynchronous=True, keep_last=1)
    threading.Timer(0.3, held.set).start()
    strategy.save_checkpoint(tmp_path / "step-2", model, optimizer, keep_last=1)
    assert first.done() and first.result() == tmp_path / "step-1"
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_load_waits_for_what_is_being_saved(tmp_path: Path, held: threading.Event) -> None:
    strategy, model, optimizer = trained("stream")
    expected = content(model, optimizer)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    threading.Timer(0.3, held.set).start()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    same(content(model, optimizer), expected)


def test_without_memory_for_copies_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, model, optimizer = trained("resident")
    expected = content(model, optimizer)
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0")
    pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    assert pending.done() and pending.result() == tmp_path / "a"
    assert "training waits for" in caplog.text and "asynchronous=False" in caplog.text
    monkeypatch.delenv("LIGHTSTEP_HOST_MEMORY_CHECK")
    _, other, optimizer2 = trained("resident", steps=1)
    strategy.load_checkpoint(tmp_path / "a", other, optimizer2)
    same(content(other, optimizer2), expected)


@pytest.mark.parametrize("told_by", ["step", "save", "result", "close"])
def test_an_error_of_the_writer_reaches_the_loop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    strategy, model, optimizer = trained("resident")
    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
        assert isinstance(pending.exception(PATIENCE), CheckpointError)

    def step() -> None:
        optimizer.backward(model(torch.ones(4, 5).to(torch.bfloat16)).float().sum())
        optimizer.step()

    tell = {
        "step": step,
        "save": lambda: strategy.save_checkpoint(tmp_path / "b", model, optimizer),
        "result": pending.result,
        "close": strategy.close,
    }
    with pytest.raises(CheckpointError, match="a was not saved: No space left on device"):
        tell[told_by]()
    step()
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_save_cannot_be_cancelled(tmp_path: Path, held: threading.Event) -> None:
    strategy, model, optimizer = trained("resident")
    pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    assert not pending.cancel() and not pending.done()
    held.set()
    assert pending.result(PATIENCE) == tmp_path / "a"
    assert not pending.cancel() and not pending.cancelled()


def test_an_error_after_a_wait_that_timed_out_is_still_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the save fails right after the wait has ended."""
    strategy, model, optimizer = trained("resident")
    go = threading.Event()

    def fails(*_: Any) -> None:
        assert go.wait(PATIENCE)
        raise OSError(28, "No space left on device")

    def times_out(pending: Future[Path], timeout: float | None = None) -> Path:
        go.set()
        wait([pending], 60)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", fails)
        pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        patch.setattr(Future, "exception", times_out)
        patch.setattr(Future, "result", times_out)
        with pytest.raises(TimeoutError):
            pending.result(0.01)
    with pytest.raises(CheckpointError, match="a was not saved: No space left on device"):
        strategy.save_checkpoint(tmp_path / "b", model, optimizer)


def test_the_next_save_waits_for_callbacks(tmp_path: Path, held: threading.Event) -> None:
    """They run in the writer's thread."""
    strategy, model, optimizer = trained("resident")
    called = []

    def callback(_: Future[Path]) -> None:
        time.sleep(0.2)
        called.append(latest_checkpoint(tmp_path))

    pending = strategy.save_checkpoint(tmp_path / "a", model, optimizer, asynchronous=True)
    pending.add_done_callback(callback)
    held.set()
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    assert called == [tmp_path / "a"]


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


ENDS = """
import os, sys, threading, time, torch
from torch import nn
from lightstep.checkpoint import save, save_checkpoint, tensors
from lightstep.checkpoint.retention import Retention
model = nn.Sequential(*(nn.Linear(3, 4) for _ in range(3)))
fetch, remove, seen = tensors._fetch, Retention.remove_old, []
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    save_checkpoint(f"{sys.argv[1]}-{step}", model, optimizer)
def slowly(source):
    seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    time.sleep(0.1)
    return fetch(source)
def late(*arguments, **keywords):
    time.sleep(0.3)
    remove(*arguments, **keywords)
    if seen:
        assert seen[-1] == os.getpriority(os.PRIO_PROCESS, 0), seen
tensors._fetch, Retention.remove_old = slowly, late
save_checkpoint(f"{sys.argv[1]}-3", model, optimizer, asynchronous=True, keep_last=1)
"""


def test_the_end_of_the_process_waits_for_the_writer(tmp_path: Path) -> None:
    """It also verifies older checkpoints before it removes them, and no longer has a low priority."""
    ended = python("-c", ENDS, str(tmp_path / "a"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["a-3"]
    assert latest_checkpoint(tmp_path) == tmp_path / "a-3"
