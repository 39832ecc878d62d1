"""Saves that a thread writes: what is saved is the run at the moment of asking, and nothing goes wrong in silence."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightstep.checkpoint import CheckpointError, latest_checkpoint, save
from lightstep.checkpoint import tensors as write_module
from lightstep.checkpoint.background import Background
from lightstep.state.device_copies import DeviceCopies
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError
from tests.checkpoint_runs import DISK_IS_FULL, Run, contents, held, same
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.python import python

__all__ = ["held"]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
@pytest.mark.parametrize("waits", ["nobody", "result", "exception", "save", "load", "export", "close"])
def test_training_goes_first_where_processors_are_scarce_unless_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Fetches and writes have a lower priority until somebody waits for the save, and for its callbacks."""
    run, other, called = Run(), Run(steps=1), []
    expected = run.content()
    before, seen, go, write, fetch = niceness(), [], threading.Event(), torch.save, write_module._fetch

    def written(*arguments: Any, **keywords: Any) -> None:
        if threading.current_thread().name == "checkpoint-worker":
            seen.append(niceness())
            assert go.wait(PATIENCE)
        write(*arguments, **keywords)

    def fetched(source: Any) -> torch.Tensor:
        seen.append(niceness())
        return fetch(source)

    def callback(_: Future[Path]) -> None:
        time.sleep(0.1)
        called.append(latest_checkpoint(tmp_path))

    go.set()
    monkeypatch.setattr(torch, "save", written)
    monkeypatch.setattr(write_module, "_fetch", fetched)
    run.save(tmp_path / "a")
    assert set(seen) == {before}
    seen.clear()
    go.clear()
    pending = run.save(tmp_path / "b", asynchronous=True)
    pending.add_done_callback(callback)
    ways = {
        "nobody": lambda: wait_until(pending.done),
        "result": pending.result,
        "exception": pending.exception,
        "save": lambda: run.strategy.save_checkpoint(tmp_path / "c", nn.Linear(2, 2)),
        "load": lambda: other.load(tmp_path / "b"),
        "export": lambda: run.strategy.export_model(tmp_path, run.model),  # into the folder of the checkpoints
        "close": run.strategy.close,
    }
    wait_until(lambda: len(seen) > 2)  # two fetches, and a write
    with pytest.raises(TimeoutError):
        pending.result(0)  # does not wait
    assert not pending.cancel() and not pending.done()
    hurry = Background.hurry
    monkeypatch.setattr(Background, "hurry", lambda background: (hurry(background), go.set()))
    if waits == "nobody":
        go.set()
    ways[waits]()
    low = min(before + 10, 19)
    assert set(seen) == ({low} if waits == "nobody" else {low, before}) and seen[0] == low
    assert seen[-1] == (low if waits == "nobody" else before)
    assert niceness() == before
    assert waits not in ("save", "load", "export", "close") or called == [tmp_path / "b"]
    other.load(tmp_path / "b")
    same(other.content(), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_a_save_that_is_waited_for_before_it_writes_has_the_priority_of_training(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, fetch, hurry = [], write_module._fetch, Background.hurry
    monkeypatch.setattr(write_module, "_fetch", lambda source: (seen.append(niceness()), fetch(source))[1])
    monkeypatch.setattr(Background, "hurry", lambda background: (hurry(background), held.set()))
    Run().save(tmp_path / "a", asynchronous=True).result(PATIENCE)
    assert set(seen) == {niceness()}


def test_the_thread_allocates_the_memory_for_state_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, allocate, nbytes = Run(), HostCopyPool.allocate, Counter[bool]()

    def counted(copies: HostCopyPool, tensor: torch.Tensor) -> torch.Tensor:
        nbytes[threading.current_thread() is threading.main_thread()] += tensor.nbytes
        return allocate(copies, tensor)

    monkeypatch.setattr(HostCopyPool, "allocate", counted)
    run.save(tmp_path / "a", asynchronous=True).result(PATIENCE)
    weights = sum(p.nbytes for p in run.model.parameters())
    assert nbytes[True] == weights and nbytes[False] >= 5 * weights


@pytest.mark.parametrize("late", ["begin", "allocate", "_copy"])
def test_an_update_waits_for_the_copies_of_the_state_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The thread that queues them has not begun, or is allocating memory; or waits for those that the update queues."""
    run, go, queueing = Run(), threading.Event(), threading.Event()
    expected = run.content()
    kind = HostCopyPool if late == "allocate" else DeviceCopies
    method, begin = getattr(kind, late), DeviceCopies.begin

    def waits(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or late == "_copy":
            queueing.set()
            assert go.wait(PATIENCE)
            time.sleep(0.1 if late == "_copy" else 0)
        return method(*arguments)

    def begin_meanwhile(snapshot: DeviceCopies) -> None:
        assert queueing.wait(PATIENCE)
        go.set()
        begin(snapshot)

    monkeypatch.setattr(kind, late, waits)
    if late == "_copy":
        monkeypatch.setattr(DeviceCopies, "begin", begin_meanwhile)
    pending = run.save(tmp_path / "a", asynchronous=True)
    if late == "allocate":
        threading.Timer(0.2, go.set).start()
    run.train(2)
    go.set()
    pending.result(PATIENCE)
    run.load(tmp_path / "a")
    same(run.content(), expected)


def test_without_memory_for_copies_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = Run(), Run(steps=1)
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0")
    pending = run.save(tmp_path / "a", asynchronous=True)
    assert pending.done() and pending.result() == tmp_path / "a"
    assert "training waits for" in caplog.text and "asynchronous=False" in caplog.text
    monkeypatch.delenv("LIGHTSTEP_HOST_MEMORY_CHECK")
    other.load(tmp_path / "a")
    same(other.content(), run.content())


FAULTS = {
    "disk": (save, "write_tensors", DISK_IS_FULL, "No space left on device"),
    "memory": (HostCopyPool, "allocate", HostMemoryError("no memory"), "HostMemoryError: no memory"),
}


@every_value(told_by=["step", "save", "result", "close"], fault=FAULTS)
def test_an_error_of_the_writer_reaches_the_loop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str, fault: str
) -> None:
    run, (kind, name, error, sentence) = Run(), FAULTS[fault]
    method = getattr(kind, name)

    def fails_in_the_thread(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return method(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, fails_in_the_thread)
        pending = run.save(tmp_path / "a", asynchronous=True)
        assert isinstance(pending.exception(PATIENCE), CheckpointError)
    tell = {
        "step": run.train,
        "save": lambda: run.save(tmp_path / "b"),
        "result": pending.result,
        "close": run.strategy.close,
    }
    with pytest.raises(CheckpointError, match=f"a was not saved: {sentence}"):
        tell[told_by]()
    run.train()
    run.save(tmp_path / "b", asynchronous=True).result(PATIENCE)
    assert contents(tmp_path) == ["b"]


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


ENDS = """
import sys, time, torch
from torch import nn
from lightstep.checkpoint import save_checkpoint, tensors
model, fetch = nn.Sequential(*(nn.Linear(3, 4) for _ in range(3))), tensors._fetch
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    save_checkpoint(f"{sys.argv[1]}-{step}", model, optimizer)
tensors._fetch = lambda source: (time.sleep(0.1), fetch(source))[1]
save_checkpoint(f"{sys.argv[1]}-3", model, optimizer, asynchronous=True, keep_last=1)
"""


def test_the_end_of_the_process_waits_for_the_writer(tmp_path: Path) -> None:
    """And removes older checkpoints."""
    ended = python("-c", ENDS, str(tmp_path / "a"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["a-3"]
    assert latest_checkpoint(tmp_path) == tmp_path / "a-3"
