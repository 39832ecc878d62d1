"""Saves by a thread, and which checkpoints stay: what is saved is the run at the moment of asking, and is not lost."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from torch import nn

from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    layout,
    load_checkpoint,
    save,
    save_checkpoint,
    tensors,
    verify_checkpoints,
)
from lightstep.checkpoint.errors import DamagedError, UnreadableError
from lightstep.checkpoint.saved import is_undamaged, newest_undamaged_before
from lightstep.checkpoint.storage import location
from lightstep.state.device_copies import DeviceCopies
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError
from lightstep.version import __version__
from tests.checkpoint_runs import (
    DISK_IS_FULL,
    Run,
    contents,
    dies_at,
    full_disk,
    held,
    model_of,
    place,
    same,
    values_of,
    write_user_files,
)
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.python import python
from tests.unit.test_accelerate import fresh_state
from tests.unit.test_asynchronous_saves import after_a_step

__all__ = ["fresh_state", "held", "place"]


@pytest.mark.parametrize("waits", ["result", "exception", "save", "load", "export", "close"])
def test_what_waits_for_a_save_waits_for_its_callbacks_too(tmp_path: Path, held: threading.Event, waits: str) -> None:
    run, other, called = Run(), Run(steps=1), []
    expected = run.content()

    def callback(_: Future[Path]) -> None:
        time.sleep(0.1)
        called.append(latest_checkpoint(tmp_path))

    pending = run.save(tmp_path / "b", asynchronous=True)
    pending.add_done_callback(callback)
    ways = {
        "result": pending.result,
        "exception": pending.exception,
        "save": lambda: run.strategy.save_checkpoint(tmp_path / "c", nn.Linear(2, 2)),
        "load": lambda: other.load(tmp_path / "b"),
        "export": lambda: run.strategy.export_model(tmp_path, run.model),  # into the folder of the checkpoints
        "close": run.strategy.close,
    }
    with pytest.raises(TimeoutError):
        pending.result(0)
    assert not pending.cancel() and not pending.done()
    threading.Timer(0.2, held.set).start()
    ways[waits]()
    assert pending.done()
    assert waits in ("result", "exception") or called == [tmp_path / "b"]
    other.load(tmp_path / "b")
    same(other.content(), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_training_goes_first_where_processors_are_scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            seen.add((threading.current_thread().name, niceness()))
            return work(*arguments, **keywords)

        return noted

    seen, own = set[tuple[str, int]](), niceness()
    for owner, name in ((torch, "save"), (tensors, "_fetch")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    Run().save(tmp_path / "a", asynchronous=True).result(PATIENCE)
    low = min(own + 10, 19)
    here = ("MainThread", own)
    assert seen - {here} == {("checkpoint-save", low), ("checkpoint-worker", low)} and niceness() == own


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
TOLD_BY: dict[str, Callable[[Any, Any, str], object]] = {
    "a step": lambda saver, pending, path: saver.train(),
    "a save": lambda saver, pending, path: saver.save(path),
    "its result": lambda saver, pending, path: pending.result(),
    "the end": lambda saver, pending, path: saver.strategy.close(),
    "a save of accelerate": lambda saver, pending, path: saver.accelerator.save_state(path),
    "the end of accelerate's training": lambda saver, pending, path: saver.accelerator.end_training(),
}


def saver_of(told_by: str) -> tuple[Any, Callable[..., Any]]:
    """A run of the strategy or of accelerate, and how it saves."""
    saver: Any = after_a_step() if "accelerate" in told_by else Run()
    return saver, saver.save if isinstance(saver, Run) else saver.accelerator.save_state


@pytest.mark.parametrize(
    ("told_by", "fault"), [(by, "disk" if n % 2 or "accelerate" in by else "memory") for n, by in enumerate(TOLD_BY)]
)
def test_an_error_of_the_writer_reaches_the_loop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str, fault: str
) -> None:
    (saver, save_to), (kind, name, error, sentence) = saver_of(told_by), FAULTS[fault]
    method = getattr(kind, name)

    def fails_in_the_thread(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return method(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, fails_in_the_thread)
        pending = save_to(str(tmp_path / "a"), asynchronous=True)
        assert isinstance(pending.exception(PATIENCE), CheckpointError)
    with pytest.raises(CheckpointError, match=f"a.* was not saved: {sentence}"):
        TOLD_BY[told_by](saver, pending, str(tmp_path / "b"))
    save_to(str(tmp_path / "b"), asynchronous=True).result(PATIENCE)
    assert contents(tmp_path) == ["b"]


@pytest.mark.parametrize("by", ["strategy", "accelerate"])
def test_an_error_after_a_wait_that_timed_out_is_still_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Even if the save fails right after the wait has ended."""
    go, (_, save_to) = threading.Event(), saver_of(by)

    def fails(*_: Any) -> None:
        assert go.wait(PATIENCE)
        raise DISK_IS_FULL

    def timing_out(method: Any) -> Any:
        def times_out(one: Future[Path], timeout: float | None = None) -> Any:
            if one is not pending or one.done():
                return method(one, timeout)
            go.set()
            wait([one], PATIENCE)
            raise TimeoutError

        return times_out

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", fails)
        pending = save_to(str(tmp_path / "a"), asynchronous=True)
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        for method in ("exception", "result"):
            patch.setattr(Future, method, timing_out(getattr(Future, method)))
        with pytest.raises(TimeoutError):
            pending.result(0.01)
    with pytest.raises(CheckpointError, match=r"a.* was not saved: No space left on device"):
        save_to(str(tmp_path / "b"))


ENDS = """
import atexit, sys, time, torch
from torch import nn
from lightstep.checkpoint import save_checkpoint, tensors
model, fetch = nn.Sequential(*(nn.Linear(3, 4) for _ in range(3))), tensors._fetch
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    save_checkpoint(f"{sys.argv[1]}-{step}", model, optimizer)
tensors._fetch = lambda source: (time.sleep(0.1), fetch(source))[1]
def save():
    save_checkpoint(f"{sys.argv[1]}-3", model, optimizer, asynchronous=True, keep_last=1)
"""


@pytest.mark.parametrize("when", ["save()", "atexit.register(save)"])
def test_the_end_of_the_process_waits_for_the_writer(tmp_path: Path, when: str) -> None:
    """And removes older checkpoints."""
    arguments = ("-c", ENDS + when, str(tmp_path / "a"))
    if when == "save()":
        ended = python(*arguments, cwd=tmp_path)
    elif sys.version_info < (3, 12):  # a fork of ours calls nothing when it ends
        ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    else:
        pytest.skip("Python 3.12 starts no threads then, and says so")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["a-3"]
    assert latest_checkpoint(tmp_path) == tmp_path / "a-3"


# -- which stay ------------------------------------------------------------------------------------------------------

STORAGES = ["", "file://", "memory://"]


def saved(folder: Any, *numbers: int, **options: Any) -> None:
    for number in numbers:
        model = model_of(float(number))
        pending = save_checkpoint(f"{folder}/step-{number}", model, torch.optim.SGD(model.parameters()), **options)
        assert pending is None or pending.result(PATIENCE)


def damage(path: str) -> None:
    system, root = fsspec.core.url_to_fs(path)
    (file,) = [each for each in system.find(root) if each.endswith("__0_0_0.distcp")]
    data = bytearray(system.cat_file(file))
    data[1000] ^= 4
    system.pipe_file(file, bytes(data))


def left(folder: Any) -> list[int]:
    """The numbers of what is left."""
    system, root = fsspec.core.url_to_fs(folder)
    return sorted({int(path[len(root) :].split("/")[1].rpartition("-")[2]) for path in system.find(root)})


# each save: number, options, what is left
WEIGHTS = {"weights_only": True}
ROTATIONS: dict[str, list[tuple[int, dict[str, Any], list[int]]]] = {
    "the newest": [(1, {}, [1]), (2, {"keep_last": 2}, [1, 2]), (3, {"keep_last": 2}, [2, 3])],
    "one": [(1, {"keep_last": 1}, [1]), (2, {"keep_last": 1}, [2]), (3, {"keep_last": 1}, [3])],
    "every so manieth": [
        *((n, {"keep_last": 1, "keep_every": 3}, [*range(3, n, 3), n]) for n in range(1, 8)),
        (8, {"keep_last": 1}, [8]),
    ],
    "higher numbers": [(9, {}, [9]), (3, {}, [3, 9]), (4, {"keep_last": 1}, [4, 9])],
    "weights alone are counted by themselves": [
        (1, {"keep_last": 1}, [1]),
        *((n, {"keep_last": 2, **WEIGHTS}, [1, *range(max(2, n - 1), n + 1)]) for n in range(2, 6)),
        (6, {"keep_last": 1}, [4, 5, 6]),
    ],
}


@every_value(what=ROTATIONS, storage=STORAGES)
def test_what_a_save_keeps(place: str, what: str) -> None:
    for number, options, expected in ROTATIONS[what]:
        saved(place, number, **options)
        assert left(place) == expected, number


def test_only_checkpoints_of_the_same_name_are_removed_and_no_users_files(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    save_checkpoint(tmp_path / "other-1", model_of(0.0))
    for name in ("step-0", "step-01b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.distcp").write_text("of another library")
    write_user_files(tmp_path / "step-2")
    saved(tmp_path, 4, keep_last=1)
    assert contents(tmp_path) == ["other-1", "step-0", "step-01b", "step-2", "step-4"]
    assert contents(tmp_path / "step-0") == ["weights.distcp"]
    assert contents(tmp_path / "step-2") == ["eval", "link", "notes.txt", "templates"]


# before: which are damaged, keep_last; after a save that fails; after one that succeeds
ROOM: dict[str, tuple[list[int], int, list[int], list[int]]] = {
    "there is room": ([], 9, [1, 2, 3, 4], [1, 2, 3, 4, 5]),
    "the surplus goes first": ([], 2, [3, 4], [4, 5]),
    "one whole one stays": ([], 1, [4], [5]),
    "the damaged one is not what is kept": ([4], 1, [3], [5]),
    "nor are all but one": ([2, 3, 4], 1, [1], [5]),
    "none goes before one is whole": ([1, 2, 3, 4], 1, [1, 2, 3, 4], [5]),
}


@every_value(what=ROOM, storage=STORAGES, asynchronous=[False, True])
def test_a_full_disk_with_a_lower_number_makes_room(place: str, what: str, asynchronous: bool) -> None:
    damaged, keep_last, after_failure, after_success = ROOM[what]
    saved(place, 1, 2, 3, 4)
    for number in damaged:
        damage(f"{place}/step-{number}")

    with full_disk(), pytest.raises(CheckpointError, match="step-5 was not saved: No space left"):
        saved(place, 5, keep_last=keep_last, asynchronous=asynchronous)
    assert left(place) == after_failure
    saved(place, 5, keep_last=keep_last, asynchronous=asynchronous)
    assert left(place) == after_success


@pytest.mark.parametrize("storage", STORAGES)
def test_the_manifest_is_written_last_and_older_checkpoints_go_after_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    write, remove = layout.write_file, save.remove_checkpoint

    def written(path: Path, data: bytes) -> Any:
        assert path.name == "lightstep.json" and not path.exists()
        done.append("write")
        return write(path, data)

    monkeypatch.setattr(layout, "write_file", written)
    monkeypatch.setattr(save, "remove_checkpoint", lambda path: done.append(f"remove {path.name}") or remove(path))
    for number in range(1, 5):
        saved(place, number, asynchronous=True, keep_last=2)
    assert done == ["write", "write", "write", "remove step-1", "write", "remove step-2"]


def test_a_crash_at_any_moment_of_a_rotation_leaves_a_whole_one(tmp_path: Path) -> None:
    """A child dies at its n-th file operation, for random n until it gets through."""
    seed, died, folder = random.Random(0), 0, tmp_path / "run"
    for number in range(2, 9):
        if not folder.exists():
            saved(folder, 1)
        died += dies_at(seed.randrange(1, 18), folder, partial(saved, folder, number, keep_last=1)) == "died"
        newest = latest_checkpoint(folder)
        assert newest is not None and not verify_checkpoints(newest)[0].damage
        load_checkpoint(newest, model := model_of(0.0))
        assert values_of(model) <= {float(n) for n in range(1, number + 1)}
    assert died >= 2


# -- which is the newest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_the_newest_is_the_one_saved_last_whatever_the_clock_says(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert latest_checkpoint(place) is None
    for hours, number in enumerate((9, 10, 7)):  # the last one of a place that went back and saved again
        monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns, hours=hours: now() - hours * 3600 * 10**9)
        saved(place, number)
        assert str(latest_checkpoint(place)) == f"{place}/step-{number}"
    damage(f"{place}/step-7")
    assert [bool(each.damage) for each in verify_checkpoints(place)] == [True, False, False]
    system, root = fsspec.core.url_to_fs(f"{place}/step-7")
    system.rm(root, recursive=True)
    assert str(latest_checkpoint(place)) == f"{place}/step-10"


def test_what_is_incomplete_is_not_the_newest_and_what_a_crash_renamed_may_be(tmp_path: Path) -> None:
    saved(tmp_path, 9, 10, 11)
    (tmp_path / "step-11" / "state.pt").unlink()
    (tmp_path / "logs").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    os.replace(tmp_path / "step-10", tmp_path / ".step-10.saving-01234567")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-10"
    load_checkpoint(tmp_path / "step-10", model_of(0.0))


def test_the_newest_has_optimizer_state_if_any_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that was saved alone afterwards (``best``), or weights alone, is not what a run continues from."""
    run = Run()
    saves = {
        "weights": lambda: run.save(tmp_path / "weights", weights_only=True),
        "best": lambda: save_checkpoint(tmp_path / "best", run.model),
    }
    saves["weights"]()
    assert latest_checkpoint(tmp_path) is None
    saves["best"]()
    assert latest_checkpoint(tmp_path) == tmp_path / "best"
    run.save(tmp_path / "step-1")
    for name, save_again in saves.items():
        save_again()
        assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
        load_checkpoint(tmp_path / name, run.model)
        assert f"{name} holds no optimizer state" not in caplog.text
        run.load(tmp_path / name)
        assert f"{name} holds no optimizer state; only its weights were loaded" in caplog.text
    sizes = [sum(file.stat().st_size for file in (tmp_path / n).glob("*.distcp")) for n in ("weights", "step-1")]
    assert sizes[0] < sizes[1] / 2


def test_what_is_removed_during_a_look_was_not_the_newest_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``keep_every`` keeps step-2; step-3 goes when step-5 is there, which was not when the look began."""
    saved(tmp_path, 2, 3)
    read: Callable[[Path], Any] = layout.read_manifest

    def late(folder: Path) -> Any:
        if folder.name == "step-3" and folder.exists():
            saved(tmp_path, 5)
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(layout, "read_manifest", late)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-5"


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would start anew."""
    saved(tmp_path, 1)
    stale = OSError(errno.ESTALE, "stale file handle")
    monkeypatch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(stale))
    with pytest.raises(CheckpointError, match=r"could not be read \(stale.*; try again"):
        latest_checkpoint(tmp_path)


class ServerError(Exception):
    """gcsfs's errors are no ``OSError`` either."""


@contextmanager
def failing_reads(
    place: str, name: str, error: BaseException, file: str = "lightstep.json", question: str = "read"
) -> Iterator[None]:
    """Every read of such a file in the folder ``name`` fails; at a URL with ``"info"`` every question about it."""
    url = "://" in place
    owner = type(fsspec.core.url_to_fs(place)[0]) if url else Path
    reads = ("cat_file", "open") if url else ("read_bytes", "open")
    with pytest.MonkeyPatch.context() as patch:
        for method in reads if question == "read" else (question,):
            read = getattr(owner, method)

            def failing(*args: Any, read: Any = read, **kwargs: Any) -> Any:
                path = str(args[1] if url else args[0])
                if (f"/{name}/" in path and path.endswith(file)) or (question == "info" and path.endswith(name)):
                    raise error
                return read(*args, **kwargs)

            patch.setattr(owner, method, failing)
        yield


TIMED_OUT = OSError(errno.ETIMEDOUT, "Connection timed out")
FORBIDDEN = PermissionError(errno.EACCES, "The token has expired")
FAILURES: list[tuple[str, BaseException, str]] = [
    ("", TIMED_OUT, "read"),
    ("", PermissionError(errno.EACCES, "Permission denied"), "read"),
    *(
        (scheme, error, question)
        for scheme in STORAGES[1:]
        for error in (TIMED_OUT, FORBIDDEN, ServerError("503"))
        for question in ("read", "info")
    ),
]


@pytest.mark.parametrize(("storage", "error", "question"), FAILURES)
def test_a_newest_checkpoint_that_a_network_hides_is_not_skipped(
    place: str, error: BaseException, question: str
) -> None:
    """A run would go on from step-2, and the next save would have the counter of step-3."""
    saved(place, 1, 2, 3)
    file = r"step-3/lightstep\.json " if question == "read" else ""
    hidden = rf"{file}could not be read \(.*{error.args[-1]}"
    with failing_reads(place, "step-3", error, question=question):
        with pytest.raises(CheckpointError, match=rf"{hidden}.*; try again"):
            latest_checkpoint(place)
        with pytest.raises(CheckpointError, match=rf"step-4 was not saved: .*{hidden}"):
            saved(place, 4)
        with pytest.raises(CheckpointError, match=rf"{hidden}.*; try again"):
            newest_undamaged_before(location(f"{place}/step-4"), with_state=True)
    assert str(latest_checkpoint(place)) == f"{place}/step-3"
    saved(place, 4)
    assert str(latest_checkpoint(place)) == f"{place}/step-4"


DEVICE_ERROR = OSError(errno.EIO, "Input/output error")


CONTENT = ["__0_0_0.distcp", "tensors.json", "state.pt"]
HIDDEN = [
    ("", TIMED_OUT),
    ("", DEVICE_ERROR),
    ("", PermissionError(errno.EACCES, "Permission denied")),
    ("", OSError(errno.ESTALE, "stale file handle")),
    *((scheme, error) for scheme in STORAGES[1:] for error in (TIMED_OUT, FORBIDDEN, ServerError("503"))),
]


@pytest.mark.parametrize(("storage", "error", "name"), [(*where, CONTENT[row % 3]) for row, where in enumerate(HIDDEN)])
def test_content_that_a_network_hides_is_not_damaged(place: str, name: str, error: BaseException) -> None:
    """A run would go on from step-2, without a word. Each storage with each file."""
    saved(place, 1, 2, 3)
    model, sentence = model_of(7.0), rf"step-3/.*{name} could not be read \(.*{error.args[-1]}.*; try again"
    with failing_reads(place, "step-3", error, name):
        with pytest.raises(UnreadableError, match=rf"step-3 was not loaded: .*{sentence}$"):
            load_checkpoint(f"{place}/step-3", model)
        assert values_of(model) == {7.0}
        with pytest.raises(UnreadableError, match=sentence):
            is_undamaged(location(f"{place}/step-3"))
        with pytest.raises(UnreadableError, match=sentence):
            newest_undamaged_before(location(f"{place}/step-4"), with_state=False)
        saved(place, 4)
        damage(f"{place}/step-4")
        with pytest.raises(DamagedError, match=rf"step-4/.* is damaged.*which older one is undamaged is not .*{name}"):
            load_checkpoint(f"{place}/step-4", model)
    load_checkpoint(f"{place}/step-3", model)
    assert values_of(model) == {3.0}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_is_gone_is_damage(place: str, name: str) -> None:
    saved(place, 2, 3)
    with failing_reads(place, "step-3", FileNotFoundError(errno.ENOENT, "gone"), name):
        with pytest.raises(DamagedError, match=rf"{name} .*gone; .*step-2 is undamaged: load that one"):
            load_checkpoint(f"{place}/step-3", model_of(7.0))
        assert str(newest_undamaged_before(location(f"{place}/step-4"), with_state=False)) == f"{place}/step-2"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_checkpoint_of_a_newer_version_is_not_skipped(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it removed as incomplete. (A version was installed that is older than the one that the run began with.)"""
    saved(place, 1, 2)
    with monkeypatch.context() as newer:
        newer.setattr(layout, "FORMAT", 2)
        saved(place, 3)
    sentence = rf"step-3/lightstep\.json has format 2, and lightstep {__version__} reads up to 1; install a newer"
    with pytest.raises(CheckpointError, match=sentence):
        latest_checkpoint(place)
    with pytest.raises(CheckpointError, match=rf"step-3 was not loaded: .*{sentence}"):
        load_checkpoint(f"{place}/step-3", model_of(7.0))
    with pytest.raises(CheckpointError, match=rf"step-4 was not saved: .*{sentence}"):
        saved(place, 4, keep_last=1)
    assert left(place) == [1, 2, 3]
    monkeypatch.setattr(layout, "FORMAT", 2)
    assert str(latest_checkpoint(place)) == f"{place}/step-3"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_checkpoint_that_a_network_hides_is_not_removed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """It would count as incomplete, and an older one would stay in its place. The save itself is whole."""
    saved(place, 1, 2)
    finish = save.finish_checkpoint
    with ExitStack() as stack, mock.patch.object(save, "finish_checkpoint") as finished:

        def finish_and_fail(*args: Any) -> None:
            finish(*args)
            stack.enter_context(failing_reads(place, "step-2", TIMED_OUT))

        finished.side_effect = finish_and_fail
        saved(place, 3, keep_last=2)
    assert left(place) == [1, 2, 3] and "no older checkpoint was removed" in caplog.text
    saved(place, 4, keep_last=2)
    assert left(place) == [3, 4]


@contextmanager
def failing_stat(file: Path, error: OSError) -> Iterator[None]:
    """As that of a file whose folder may not be entered: root, who may run the tests, can enter all."""
    stat = Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == file:
            raise error
        return stat(path, **options)

    with mock.patch.object(Path, "stat", failing):
        yield


def test_what_is_another_users_or_gone_is_skipped(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for error in (FORBIDDEN, FileNotFoundError(errno.ENOENT, "gone"), NotADirectoryError(errno.ENOTDIR, "gone")):
        with failing_reads(str(tmp_path), "step-2", error), failing_stat(tmp_path / "step-2" / "lightstep.json", error):
            assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    (tmp_path / "step-2" / "lightstep.json").unlink()
    (tmp_path / "step-2" / "lightstep.json").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_a_handle_that_another_host_made_stale_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has replaced the checkpoint, or removed it."""
    saved(tmp_path, 1, 2)
    read, stale = Path.read_bytes, [tmp_path / "step-2"]

    def reads(file: Path) -> bytes:
        if file.parent in stale:
            stale.remove(file.parent)
            raise OSError(errno.ESTALE, "stale file handle")
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", reads)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2" and not stale
