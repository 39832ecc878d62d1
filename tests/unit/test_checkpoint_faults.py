"""Faults at every moment of a save, an export or a load: what is left is whole, and nobody goes on with a half."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightstep.checkpoint import (
    CheckpointError,
    export_model,
    latest_checkpoint,
    load,
    load_checkpoint,
    save,
    save_checkpoint,
    storage,
    verify_checkpoints,
)
from lightstep.checkpoint import huggingface as pretrained
from lightstep.checkpoint.layout import holds_checkpoint, remove_checkpoint
from lightstep.checkpoint.storage import LocalStorage, UrlPath
from tests import faults
from tests.checkpoint_runs import (
    DISK_IS_FULL,
    Tied,
    content,
    contents,
    dies_at,
    failing_calls,
    limited_file_size,
    model_of,
    same,
    trained,
    values_of,
)
from tests.covering import every_pair, every_value
from tests.patience import PATIENCE
from tests.reference.pair import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks

# -- who writes a folder -----------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """Its ``save_pretrained`` writes two shards with an index, a configuration, and a file in a subfolder."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((3,), value)) for _ in range(2))

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        (folder / "templates").mkdir()
        for file in ("config.json", "templates/chat.jinja"):
            (folder / file).write_text(str(self.a[0].item()))
        names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(state_dict, 1)}
        for name, file in names.items():
            save_file({name: state_dict[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))


def loaded(folder: Any) -> float:
    load_checkpoint(folder, model := model_of(0.0))
    (value,) = values_of(model)
    return value


def exported(folder: Path) -> float:
    """The one value of all of the folder's files; of the old folder, if a crash came between the two renames."""
    if not folder.exists():
        (folder,) = folder.parent.glob(f".{folder.name}.replaced-*")
    pretrained.load_pretrained(model := Sharded(), folder)
    texts = [(folder / file).read_text() for file in ("config.json", "templates/chat.jinja")]
    (value,) = {*model.a.tolist(), *model.b.tolist(), *map(float, texts)}
    return value


@dataclass
class Writer:
    write: Callable[[Any, float], object]
    value: Callable[[Any], float]
    verb: str


WRITERS = {
    "save": Writer(lambda folder, value: save_checkpoint(folder, model_of(value)), loaded, "saved"),
    "export": Writer(lambda folder, value: export_model(folder, Sharded(value)), exported, "exported"),
}


def write_user_files(folder: Path) -> None:
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    (folder / "eval" / "empty").mkdir(parents=True, exist_ok=True)
    for file in ("notes.txt", "templates/mine.jinja", "eval/model.safetensors"):
        (folder / file).write_text("mine")
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to(folder.parent, target_is_directory=True)


def has_user_files(folder: Path) -> bool:
    files = ("notes.txt", "templates/mine.jinja", "eval/model.safetensors")
    whole = all((folder / file).read_text() == "mine" for file in files)
    return whole and (folder / "eval" / "empty").is_dir() and (folder / "link").is_symlink()


# -- fault × moment of writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "replacing"), [("save", False), ("save", True), ("export", True)])
def test_a_crash_at_any_file_operation_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, writer: str, replacing: bool
) -> None:
    how, results = WRITERS[writer], []
    for count in range(1, 300):
        folder = tmp_path / str(count) / "step"
        folder.parent.mkdir()
        if replacing:
            how.write(folder, 1.0)
            write_user_files(folder)
        died = dies_at(count, folder.parent, lambda folder=folder: how.write(folder, 2.0))
        if replacing or holds_checkpoint(folder):
            assert writer == "export" or latest_checkpoint(folder.parent) == folder
            results.append(how.value(folder))
        else:
            results.append(0.0)
            assert latest_checkpoint(folder.parent) is None
        how.write(folder, 3.0)
        assert how.value(folder) == 3.0
        assert contents(folder.parent) == ["step"], "what the crash left is gone after the next one"
        assert not replacing or has_user_files(folder)
        if not died:
            break
    else:
        pytest.fail("it never finished")
    assert results == sorted(results), "the old one, then the new one"
    assert set(results) == ({1.0, 2.0} if replacing else {0.0, 2.0}) and len(results) > 10


@every_pair(
    writer=WRITERS,
    call=["fsync", "replace", "mkdir"],
    error=[DISK_IS_FULL, KeyboardInterrupt()],
    replacing=[True, False],
)
def test_a_failing_call_leaves_everything_as_it_was(
    tmp_path: Path, writer: str, call: str, error: BaseException, replacing: bool
) -> None:
    how = WRITERS[writer]
    for number, patch in enumerate(failing_calls(call, error)):
        folder, expected = tmp_path / str(number) / "step", 2.0
        if replacing:
            how.write(folder, 1.0)
            write_user_files(folder)
        folder.parent.mkdir(exist_ok=True)
        with patch:
            try:
                how.write(folder, 2.0)
            except (CheckpointError, KeyboardInterrupt) as caught:
                expected = 1.0
                assert caught is error or str(caught) == f"{folder} was not {how.verb}: No space left on device"
        if not replacing and expected == 1.0:
            assert contents(folder.parent) == []
            continue
        found = how.value(folder)
        assert found == expected or (found == 2.0 and error is not DISK_IS_FULL), "or it was interrupted afterwards"
        if found == 1.0:
            assert contents(folder.parent) == ["step"] and has_user_files(folder)
        how.write(folder, 3.0)
        assert contents(folder.parent) == ["step"] and how.value(folder) == 3.0
        assert not replacing or has_user_files(folder)


@pytest.mark.parametrize("limit", [0, 1000, 5000])
@pytest.mark.parametrize("was_whole", [False, True])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path, limit: int, was_whole: bool) -> None:
    """Also right after a crash between the renames: the new one counts if it was whole, else the old one."""
    folder, elsewhere = tmp_path / "step", tmp_path / "elsewhere"
    save_checkpoint(folder, model_of(1.0, count=20))
    save_checkpoint(elsewhere, model_of(2.0, count=20))
    os.replace(folder, tmp_path / ".step.replaced-00000000")
    os.replace(elsewhere, tmp_path / ".step.saving-00000000")
    if not was_whole:
        (tmp_path / ".step.saving-00000000" / "state.pt").unlink()
    assert holds_checkpoint(folder) and not holds_checkpoint(elsewhere)
    with limited_file_size(limit), pytest.raises(CheckpointError) as raised:
        save_checkpoint(folder, model_of(3.0, count=20))
    assert str(raised.value) == f"{folder} was not saved: File too large"
    load_checkpoint(folder, model := model_of(0.0, count=20))
    assert values_of(model) == {2.0 if was_whole else 1.0} and contents(tmp_path) == ["step"]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_file_is_on_the_disk_before_the_folder_takes_its_place(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, commit = os.fsync, LocalStorage.commit

    def counted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(self: LocalStorage, folder: Path, *arguments: Any) -> None:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert len(files) >= 5 and {file.stat().st_ino for file in files} <= synced
        commit(self, folder, *arguments)
        assert folder.parent.stat().st_ino in synced

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(LocalStorage, "commit", checked)
    WRITERS[writer].write(tmp_path / "m", 1.0)


def test_the_users_files_stay_when_their_checkpoint_goes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step", model_of(1.0))
    write_user_files(tmp_path / "step")
    remove_checkpoint(tmp_path / "step")
    assert contents(tmp_path / "step") == ["eval", "link", "notes.txt", "templates"]


@pytest.mark.parametrize(
    ("fault", "tried"),
    [
        (lambda place: faults.full_disks(place, 12), "tried"),
        (lambda place: faults.full_disks(place, 12, asynchronous=True), "tried"),
        (lambda place: faults.clocks(place, 3), "tried"),
        (lambda place: faults.two_savers(place, 2), "saved"),
        (lambda place: faults.kills(place, 3, 1), None),
        (lambda place: faults.kills(place, 1, 2), None),
        (lambda place: faults.kills(place, 3, 1, asynchronous=True), None),
        (lambda place: faults.kills(place, 1, 2, asynchronous=True), None),
        (lambda place: faults.kills(place, 1, 2, asynchronous=True, alone=True), None),
    ],
    ids=["disk", "disk, asynchronous", "clock", "two savers", "kill", "2 ranks", "asynchronous", "both", "one of 2"],
)
def test_what_reliability_measures(tmp_path: Path, fault: Callable[[Path], faults.Counts], tried: str | None) -> None:
    """``python -m tests.faults`` does more of the same for docs/reliability.md."""
    counts = fault(tmp_path)
    harmless = {
        "tried",
        "saved",
        "refused",
        "had finished",
        "no checkpoint yet",
        "killed while saving",
        "killed besides",
    }
    assert not {what: count for what, count in counts.items() if count and what not in harmless}
    assert counts[tried] >= 3 if tried else counts.keys() & {"had finished", "killed while saving", "killed besides"}


# -- at URLs, where nothing can be renamed -----------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}/run" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").store.clear()


def files(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    return {} if not system.exists(root) else {path[len(root) :]: system.cat_file(path) for path in system.find(root)}


def test_a_checkpoint_is_replaced_by_its_manifest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file fails before, the one before is there; what is left of it then goes."""
    place, create = f"{url}/step", storage.UrlStorage.create
    save_checkpoint(place, model_of(1.0))
    before = files(place)
    for name in ("__0_0_0.distcp", "tensors.json", "state.pt", "lightstep.json"):

        def fails(self: Any, file: Path, name: str = name) -> Any:
            if file.name == name:
                raise DISK_IS_FULL
            return create(self, file)

        with monkeypatch.context() as patch:
            patch.setattr(storage.UrlStorage, "create", fails)
            with pytest.raises(CheckpointError, match=f"{place} was not saved: No space left"):
                save_checkpoint(place, model_of(2.0))
        assert files(place) == before, name
    save_checkpoint(place, model_of(2.0))
    assert loaded(place) == 2.0
    assert len(files(place)) == len(before) and not (files(place).keys() & before.keys()) - {"/lightstep.json"}


def test_the_remains_of_a_crash_are_no_checkpoint_and_go(url: str) -> None:
    system, path = (UrlPath(f"{url}/step") / "data-0123456789abcdef" / "__0_0_0.distcp").fsspec()
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, b"half")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        loaded(f"{url}/step")
    assert latest_checkpoint(url) is None
    save_checkpoint(f"{url}/step", model_of(1.0))
    assert b"half" not in files(url).values() and loaded(f"{url}/step") == 1.0


@pytest.mark.parametrize("moment", ["tensors", "end"])
def test_of_two_savers_one_is_told_or_the_later_one_counts(
    url: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    place, write, inside = f"{url}/step", save.write_tensors, storage._entries

    def another(*arguments: Any) -> Any:
        monkeypatch.undo()
        index = write(*arguments) if moment == "tensors" else None
        save_checkpoint(place, model_of(2.0))
        return inside(*arguments) if index is None else index

    monkeypatch.setattr(*((save, "write_tensors") if moment == "tensors" else (storage, "_entries")), another)
    if moment == "tensors":
        with pytest.raises(CheckpointError, match="was not saved"):
            save_checkpoint(place, model_of(1.0))
        assert loaded(place) == 2.0
    else:
        save_checkpoint(place, model_of(1.0))
        assert loaded(place) == 1.0


def test_a_downloaded_checkpoint_loads(tmp_path: Path) -> None:
    save_checkpoint(f"file://{tmp_path}/step", model_of(1.0))
    assert loaded(tmp_path / "step") == 1.0


# -- two processes -----------------------------------------------------------------------------------------------------


def hold(folder: str, held: Any) -> None:
    with storage.locked(Path(folder)):
        held.set()
        time.sleep(600)


def test_the_lock_of_a_killed_saver_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(str(tmp_path / "step"), held), daemon=True)
    other.start()
    assert held.wait(PATIENCE)
    with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* is saving to .*; wait for it, or"):
        save_checkpoint(tmp_path / "step", model_of(1.0))
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    assert (tmp_path / ".step.lock").exists()
    save_checkpoint(tmp_path / "step", model_of(1.0))
    assert contents(tmp_path) == ["step"]


def test_what_another_saver_is_about_to_replace_is_no_strangers(tmp_path: Path) -> None:
    """Between the renames of one saver the other one finds nothing at the path, or half of it."""
    folder = tmp_path / "step"
    save_checkpoint(folder, model_of(0.0))
    (folder / "lightstep.json").unlink()
    with storage.locked(folder), pytest.raises(CheckpointError, match="is saving to"):
        save_checkpoint(folder, model_of(1.0))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save_checkpoint(folder, model_of(1.0))


def save_and_save(folder: Path, asked: Any) -> None:
    """Five saves each time somebody asks, then the value of the last one."""
    value = 0
    while asked.recv():
        first = value + 1
        for value in range(first, first + 5):
            save_checkpoint(folder, *faults.model_of(float(value)))
        asked.send(value)


def value_during_saves(folder: Path) -> float | None:
    """Of all weights and of all state; None where the load was refused because of a save."""
    model, optimizer = faults.model_of(0.0)
    try:
        load_checkpoint(folder, model, optimizer)
    except CheckpointError as error:
        assert "replace" in str(error) or "not a complete" in str(error) or "does not exist" in str(error)
        return None
    (value,) = values_of(model) | {float(x) for s in optimizer.state.values() for x in s["momentum_buffer"].flatten()}
    return value


def test_a_load_during_saves_is_of_one_checkpoint(tmp_path: Path) -> None:
    """Weights of one save and optimizer state of another never come together. Five saves at a time, then a break."""
    folder, context = tmp_path / "step", multiprocessing.get_context("fork")
    asked, ours = context.Pipe()
    saver = context.Process(target=save_and_save, args=(folder, ours), daemon=True)  # ends with a test that fails
    saver.start()
    for last in (5, 10, 15):
        asked.send(True)
        while last > 5 and not asked.poll():
            value_during_saves(folder)
        assert asked.recv() == last == value_during_saves(folder)
    asked.send(False)
    saver.join()


# -- fault × moment of loading -----------------------------------------------------------------------------------------


@contextmanager
def at_read(call: int, fault: Callable[[], object]) -> Iterator[None]:
    """At the first read everything is only tried, at the second weights are loaded, at the third state."""
    read, calls = load.read_tensors, []

    def faulty(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            fault()
        read(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "read_tensors", faulty)
        yield


def broken_disk() -> Any:
    raise OSError(5, "Input/output error")


def plain_run(steps: int) -> tuple[Any, nn.Module, Any]:
    strategy, model, _ = trained("resident", steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / (1 + steps), momentum=0.9)
    for _ in range(steps):
        step(model, optimizer)
    return strategy, model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    loss = model(torch.ones(4, 5, dtype=torch.bfloat16)).float().square().sum()
    optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
    optimizer.step()


@pytest.mark.parametrize("backend", [*BACKENDS, "torch"])
@pytest.mark.parametrize(
    ("state_is", "read"),
    [("loaded", 1), ("loaded", 2), ("loaded", 3), ("not saved", 2), ("not asked for", 1), ("not asked for", 2)],
)
def test_a_load_that_breaks_off_changes_nothing_or_stops_the_run_until_all_is_loaded(
    tmp_path: Path, backend: str, state_is: str, read: int
) -> None:
    make = plain_run if backend == "torch" else lambda steps: trained(backend, steps=steps)
    _, model, optimizer = make(3)
    expected = values_of(model)
    save_checkpoint(tmp_path / "a", model, None if state_is == "not saved" else optimizer)
    save_checkpoint(tmp_path / "weights", model)
    _, model, optimizer = make(1)
    before = content(model, optimizer) if backend != "torch" else None
    given = None if state_is == "not asked for" else optimizer
    with at_read(read, broken_disk), pytest.raises(CheckpointError, match="Input/output error"):
        load_checkpoint(tmp_path / "a", model, given)
    if read == 1:
        assert before is None or same(content(model, optimizer), before) is None
        step(model, optimizer)
        save_checkpoint(tmp_path / "b", model, optimizer)
        return
    is_known = backend != "torch" or given is not None
    for _ in range(2):
        if is_known:
            with pytest.raises(RuntimeError, match="failed after a part of it had been loaded; weights and"):
                step(model, optimizer)
    with pytest.raises(CheckpointError, match=r"b was not saved: loading .*a failed after a part of it"):
        save_checkpoint(tmp_path / "b", model, optimizer)
    with pytest.raises(CheckpointError, match=r"b was not exported: loading .*load a checkpoint before exporting its"):
        export_model(tmp_path / "b", model)
    load_checkpoint(tmp_path / "weights", model, given)
    if state_is == "loaded":
        with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
            step(model, optimizer)  # weights alone do not repair its state
    load_checkpoint(tmp_path / "a", model, given)
    assert values_of(model) == expected
    step(model, optimizer)
    save_checkpoint(tmp_path / "b", model, optimizer)
    export_model(tmp_path / "exported", model)


@every_value(backend=BACKENDS, number=[0, 1], before_the_first_step=[False, True])
def test_a_state_dict_that_is_loaded_in_part_is_not_gone_on_from(
    backend: str, number: int, before_the_first_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups have been loaded, and the state of none or one of two parameters."""
    _, _, source = trained(backend, steps=3)
    saved = source.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    _, model, optimizer = trained(backend, steps=0 if before_the_first_step else 2)
    replace_state, calls = optimizer.engine.replace_state, []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > number:
            broken_disk()
        replace_state(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.engine, "replace_state", fails)
        with pytest.raises(OSError, match="Input/output error"):
            optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"load_state_dict failed \(OSError: .*may be half updated"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    found = content(model, optimizer)
    for name, entries in zip(("weight", "bias"), saved["state"].values(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{name}.{key}"], torch.as_tensor(entries[key])), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.5
    step(model, optimizer)


def test_weights_that_are_half_updated_are_neither_saved_nor_exported_nor_repaired_by_weights(tmp_path: Path) -> None:
    """Also where the optimizer is not named."""
    strategy, model, optimizer = trained("resident", steps=3)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.refuse_until_loaded("the update failed")
    with pytest.raises(CheckpointError, match=r"b was not saved: .*may be half updated"):
        strategy.save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match=r"b was not exported: .*may be half updated"):
        strategy.export_model(tmp_path / "b", model)
    for read in (2, 99):
        with at_read(read, broken_disk), suppress(CheckpointError):
            strategy.load_checkpoint(tmp_path / "a", model)
        with pytest.raises(RuntimeError, match="may be half"):
            optimizer.step()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    step(model, optimizer)
    strategy.export_model(tmp_path / "b", model)


def test_pretrained_weights_that_break_off_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident")
    save_file({name: torch.ones(p.shape) for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    part = pretrained._read_shard
    with monkeypatch.context() as patched:
        patched.setattr(
            pretrained, "_read_shard", lambda *which: part(*which) if which[2] == "weight" else broken_disk()
        )
        with pytest.raises(OSError, match="Input/output error"):
            pretrained.load_pretrained(model, tmp_path)
    assert values_of(model) > {1.0}, "a part of it"
    with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
        optimizer.step()
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    pretrained.load_pretrained(model, tmp_path)
    optimizer.refresh_master_weights()
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    step(model, optimizer)


@pytest.mark.parametrize("read", [2, 3])
def test_a_checkpoint_that_is_replaced_during_a_load_is_refused(tmp_path: Path, read: int) -> None:
    """After the dry run nothing is changed; while the model is being filled, it has to be loaded again."""
    folder = tmp_path / "step"
    save_checkpoint(folder, *faults.model_of(1.0))
    model, optimizer = faults.model_of(0.0)
    fault = lambda: save_checkpoint(folder, *faults.model_of(2.0))  # noqa: E731
    with (
        at_read(read, fault),
        pytest.raises(CheckpointError, match=r"step was replaced or removed while it was read; load again$"),
    ):
        load_checkpoint(folder, model, optimizer)
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        save_checkpoint(tmp_path / "other", model)
    load_checkpoint(folder, model, optimizer)
    assert values_of(model) == {2.0}
    save_checkpoint(tmp_path / "other", model)


# -- short reads and writes --------------------------------------------------------------------------------------------


class ShortReads(io.FileIO):
    """A file of which a call reads 1000 bytes at most; Linux reads less than 2 GiB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000])

    def read(self, size: int | None = -1) -> bytes:
        return super().read(1000 if size is None or size < 0 else min(size, 1000))


class ShortWrites(storage._SyncedFile):
    """A file to which a call writes 1000 bytes at most."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data).cast("B")[:1000])


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SyncedFile", ShortWrites)
    save_checkpoint(tmp_path / "step", model_of(1.0, count=40))
    open_file = io.open

    def shortly(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any) -> Any:
        if mode != "rb":
            return open_file(file, mode, buffering, *arguments)
        return ShortReads(file) if buffering == 0 else io.BufferedReader(ShortReads(file))

    monkeypatch.setattr(io, "open", shortly)
    (verified,) = verify_checkpoints(tmp_path / "step")
    assert not verified.damage and verified.nbytes > 2000
    load_checkpoint(tmp_path / "step", model := model_of(0.0, count=40))
    assert values_of(model) == {1.0}


# -- exports beside others ---------------------------------------------------------------------------------------------


class Adapter(nn.Linear):
    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        save_file(state_dict, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")


def test_an_adapter_leaves_the_base_beside_it_and_a_whole_model_replaces_both(tmp_path: Path) -> None:
    export_model(tmp_path / "m", nn.Linear(2, 2))
    base = (tmp_path / "m" / "model.safetensors").read_bytes()
    export_model(tmp_path / "m", Adapter(2, 2))
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == base
    export_model(tmp_path / "m", Sharded(1.0))
    assert not {"model.safetensors", "adapter_model.safetensors"} & {*contents(tmp_path / "m")}
    export_model(tmp_path / "m", nn.Linear(2, 2))
    files = {file for file in contents(tmp_path / "m") if file.startswith(("adapter", "model"))}
    assert files == {"model.safetensors"}


def test_checkpoints_in_the_folder_stay_and_a_save_that_is_running_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident")
    create, write = LocalStorage.create, pretrained.write_export

    def slowly(self: LocalStorage, file: Path) -> Any:
        time.sleep(0.1 if threading.current_thread() is not threading.main_thread() else 0)
        return create(self, file)

    def afterwards(*arguments: Any) -> None:
        assert pending is not None and pending.done()
        write(*arguments)

    monkeypatch.setattr(LocalStorage, "create", slowly)
    monkeypatch.setattr(pretrained, "write_export", afterwards)
    pending = strategy.save_checkpoint(tmp_path / "run" / "step-1", model, optimizer, asynchronous=True)
    strategy.export_model(tmp_path / "run", model)
    assert contents(tmp_path / "run") == ["model.safetensors", "step-1"]
    strategy.load_checkpoint(tmp_path / "run" / "step-1", model, optimizer)


def test_tied_weights_of_a_plain_module_are_exported_once(tmp_path: Path) -> None:
    export_model(tmp_path / "m", torch.compile(model := Tied(), backend="eager"))
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert torch.equal(weights["embed.weight"], model.embed.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_export_of_a_transformers_model(tmp_path: Path, tied: bool) -> None:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, tie_word_embeddings=tied, **sizes)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    (tmp_path / "m").mkdir()
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / "m" / stale).write_text("old")
    export_model(tmp_path / "m", torch.compile(model, backend="eager"))
    assert contents(tmp_path / "m") == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert read.dtype == torch.bfloat16
    same(dict(read.state_dict()), dict(model.state_dict()))
