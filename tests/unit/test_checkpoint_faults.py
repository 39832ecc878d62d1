"""Faults at every moment of a save, an export or a load: what is left is whole, and nobody goes on with a half."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM

from lightstep.checkpoint import (
    CheckpointError,
    export_model,
    latest_checkpoint,
    load_checkpoint,
    save,
    save_checkpoint,
    storage,
    verify_checkpoints,
)
from lightstep.checkpoint import huggingface as pretrained
from lightstep.checkpoint.formats import convert_checkpoint
from lightstep.checkpoint.storage import LocalStorage, UrlPath
from tests import faults
from tests.checkpoint_runs import (
    DISK_IS_FULL,
    PlainRun,
    Run,
    Tied,
    at_read,
    broken_disk,
    contents,
    dies_at,
    fails_at,
    has_user_files,
    model_of,
    place,
    same,
    values_of,
    write_user_files,
)
from tests.covering import every_value
from tests.patience import PATIENCE
from tests.reference.pair import BACKENDS, same_tree
from tests.reference.tiny_llama import make_llama

__all__ = ["place"]

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


def converted(to: str) -> Callable[[Path, float], object]:
    """To this format, of a checkpoint two folders above."""

    def convert(folder: Path, value: float) -> None:
        source = folder.parents[1] / f"source-{value}"
        if not source.exists():
            save_checkpoint(source, model_of(value))
        convert_checkpoint(source, folder, to)

    return convert


def values_in_file(file: Path) -> float:
    (value,) = {float(x) for tensor in torch.load(file)["model"].values() for x in tensor.flatten()}
    return value


WRITERS: dict[str, tuple[Callable[[Any, float], object], Callable[[Any], float]]] = {
    "save": (lambda folder, value: save_checkpoint(folder, model_of(value)), loaded),
    "export": (lambda folder, value: export_model(folder, Sharded(value)), exported),
    "conversion": (converted("lightstep"), loaded),
    "conversion to a file": (converted("torch"), values_in_file),
}
"""How a folder is written, and what it holds."""


# -- fault × moment of writing -----------------------------------------------------------------------------------------

FAULTS: dict[str, Any] = {"crash": None, "full disk": DISK_IS_FULL, "interrupt": KeyboardInterrupt()}


@pytest.mark.parametrize(
    ("fault", "writer"),
    [
        ("crash", "save"),
        ("full disk", "save"),
        ("interrupt", "export"),
        ("interrupt", "conversion"),
        ("interrupt", "conversion to a file"),
        ("crash", "conversion to a file"),
    ],
)
def test_a_fault_at_any_change_of_a_file_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, fault: str, writer: str
) -> None:
    (write, value_in), error, results, broken = WRITERS[writer], FAULTS[fault], [], []
    (tmp_path / "before").mkdir()
    for value in (1.0, 2.0, 3.0):
        write(tmp_path / "before" / "step", value)
    for count in range(1, 200):
        folder = tmp_path / str(count) / "step"
        folder.parent.mkdir()
        write(folder, 1.0)
        if has_files := "conversion" not in writer:
            write_user_files(folder)
        work = partial(write, folder, 2.0)
        end = dies_at(count, folder.parent, work) if error is None else fails_at(count, error, work)
        if writer != "conversion":
            assert latest_checkpoint(folder.parent) == (folder if writer == "save" else None)
        results.append(value_in(folder))
        broken += results[-1:] * (end in ("died", "raised"))
        if end in ("went on", "ended"):
            assert results[-1] == 2.0
        elif end == "raised" and (fault == "full disk" or results[-1] == 1.0):  # else it was interrupted afterwards
            assert results[-1] == 1.0 and contents(folder.parent) == ["step"]
            assert not has_files or has_user_files(folder)
        write(folder, 3.0)
        assert value_in(folder) == 3.0
        assert contents(folder.parent) == ["step"], "what the fault left is gone after the next one"
        assert not has_files or has_user_files(folder)
        if end == "ended":
            break
    else:
        pytest.fail("it never finished")
    assert broken == sorted(broken), "the old one, and the new one after the last rename"
    assert set(results) == {1.0, 2.0} and len(results) > 3


@every_value(limit=[0, 1000, 5000], was_whole=[False, True])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path, limit: int, was_whole: bool) -> None:
    """Also right after a crash between the renames: the new one counts if it was whole, else the old one."""
    folder, elsewhere = tmp_path / "step", tmp_path / "elsewhere"
    save_checkpoint(folder, model_of(1.0, count=20))
    save_checkpoint(elsewhere, model_of(2.0, count=20))
    os.replace(folder, tmp_path / ".step.replaced-00000000")
    os.replace(elsewhere, tmp_path / ".step.saving-00000000")
    if not was_whole:
        (tmp_path / ".step.saving-00000000" / "state.pt").unlink()
    assert latest_checkpoint(tmp_path) == folder
    with faults.disk_of(limit), pytest.raises(CheckpointError) as raised:
        save_checkpoint(folder, model_of(3.0, count=20))
    assert str(raised.value) == f"{folder} was not saved: No space left on device"
    load_checkpoint(folder, model := model_of(0.0, count=20))
    assert values_of(model) == {2.0 if was_whole else 1.0} and contents(tmp_path) == ["step"]


@pytest.mark.parametrize("writer", ["save", "export"])
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
    WRITERS[writer][0](tmp_path / "m", 1.0)


KILLED = {"killed while saving", "killed besides"}


@pytest.mark.parametrize(
    ("fault", "tried"),
    [
        (lambda place: faults.full_disks(place, 8, asynchronous=True), "tried"),
        (lambda place: faults.damaged(place, partial(faults.flipped_bits, count=8)), "tried"),
        (lambda place: faults.two_savers(place, 0.5), "saved"),
        (lambda place: faults.kills(place, 2, 1, asynchronous=True, placement="host"), None),
        (lambda place: faults.kills(place, 1, 2, asynchronous=True, alone=True), None),
    ],
    ids=["disk", "bits", "two savers", "one rank", "one of 2"],
)
def test_what_reliability_measures(tmp_path: Path, fault: Callable[[Path], faults.Counts], tried: str | None) -> None:
    """``python -m tests.faults`` does more of the same for docs/reliability.md."""
    counts = fault(tmp_path)
    harmless = {"tried", "saved", "refused", "had finished", "no checkpoint yet", *KILLED}
    assert not {what: count for what, count in counts.items() if count and what not in harmless}
    assert counts[tried] >= 3 if tried else counts.keys() & {"had finished", *KILLED}


# -- at URLs, where nothing can be renamed -----------------------------------------------------------------------------


at_urls = pytest.mark.parametrize("storage", ["file://", "memory://"])


def files(place: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(place)
    return {} if not system.exists(root) else {path[len(root) :]: system.cat_file(path) for path in system.find(root)}


@at_urls
@pytest.mark.parametrize("existed", [True, False])
def test_a_checkpoint_is_replaced_by_its_manifest(place: str, monkeypatch: pytest.MonkeyPatch, existed: bool) -> None:
    """Whichever file fails before, the one before is there; what is left of it then goes.

    So it is if half of the manifest has been written, where a file system writes in place.
    """
    create = storage.UrlStorage.create
    if existed:
        save_checkpoint(place, model_of(1.0))
    before = files(place)
    for name in ("__0_0_0.distcp", "tensors.json", "state.pt", "lightstep.json", "half of lightstep.json"):

        def fails(self: Any, file: Path, name: str = name) -> Any:
            if not name.endswith(file.name):
                return create(self, file)
            if name != file.name:
                monkeypatch.undo()
                with create(self, file) as stream:
                    stream.write(b"{")
            raise DISK_IS_FULL

        monkeypatch.setattr(storage.UrlStorage, "create", fails)
        with pytest.raises(CheckpointError, match=f"{place} was not saved: No space left"):
            save_checkpoint(place, model_of(2.0))
        monkeypatch.undo()
        assert files(place) == before, name
    save_checkpoint(place, model_of(2.0))
    assert loaded(place) == 2.0
    assert len(files(place)) == 5 and not (files(place).keys() & before.keys()) - {"/lightstep.json"}


@at_urls
def test_the_remains_of_a_crash_are_no_checkpoint_and_go(place: str) -> None:
    system, path = (UrlPath(f"{place}/step") / "data-0123456789abcdef" / "__0_0_0.distcp").fsspec()
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, b"half")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        loaded(f"{place}/step")
    assert latest_checkpoint(place) is None
    save_checkpoint(f"{place}/step", model_of(1.0))
    assert b"half" not in files(place).values() and loaded(f"{place}/step") == 1.0


@at_urls
@pytest.mark.parametrize("moment", ["tensors", "end"])
def test_of_two_savers_one_is_told_or_the_later_one_counts(
    place: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    write, inside = save.write_tensors, storage._entries

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


# -- fault × moment of loading -----------------------------------------------------------------------------------------

IN_PART = "failed after a part of it had been loaded"


def check_stopped(run: Run, folder: Path, why: str, is_known: bool = True) -> None:
    """It is neither trained nor saved nor exported, also where the optimizer is not named, and state is not read.

    Args:
        is_known: the optimizer is, to what has failed.
    """
    for _ in range(2 if is_known else 0):
        with pytest.raises(RuntimeError, match=why):
            run.train()
    if is_known and not isinstance(run, PlainRun):
        with pytest.raises(RuntimeError, match=f"{why}.*Load a checkpoint before reading state"):
            dict(run.optimizer.state[next(run.model.parameters())])
    for what, call in (("saved", save_checkpoint), ("exported", export_model)):
        with pytest.raises(CheckpointError, match=rf"b was not {what}: .*{why}"):
            call(folder / "b", run.model)


def check_goes_on(run: Run, folder: Path) -> None:
    run.train().save(folder / "b")
    export_model(folder / "exported", run.model)


@pytest.mark.parametrize(
    ("backend", "state_is", "read"),
    [
        ("stream", "loaded", 1),
        ("stream", "loaded", 2),
        ("torch", "loaded", 2),
        ("torch", "loaded", 3),
        ("stream", "not saved", 2),
        ("torch", "not saved", 2),
        ("torch", "not asked for", 1),
        ("stream", "not asked for", 2),
        ("torch", "not asked for", 2),
    ],
)
def test_a_load_that_breaks_off_changes_nothing_or_stops_the_run_until_all_is_loaded(
    tmp_path: Path, backend: str, state_is: str, read: int
) -> None:
    def make(steps: int) -> Run:
        return PlainRun(steps=steps, lr=0.5 / (1 + steps)) if backend == "torch" else Run(backend, steps)

    run = make(3)
    expected = values_of(run.model)
    save_checkpoint(tmp_path / "a", run.model, None if state_is == "not saved" else run.optimizer)
    save_checkpoint(tmp_path / "weights", run.model)
    run = make(1)
    before, given = run.content(), None if state_is == "not asked for" else run.optimizer
    with at_read(read, broken_disk), pytest.raises(CheckpointError, match="Input/output error"):
        load_checkpoint(tmp_path / "a", run.model, given)
    if read == 1:
        same(run.content(), before)
        check_goes_on(run, tmp_path)
        return
    check_stopped(run, tmp_path, f"loading .*a {IN_PART}", backend != "torch" or given is not None)
    load_checkpoint(tmp_path / "weights", run.model, given)
    if state_is == "loaded":
        with pytest.raises(RuntimeError, match=IN_PART):
            run.train()  # weights alone do not repair its state
    load_checkpoint(tmp_path / "a", run.model, given)
    assert values_of(run.model) == expected
    check_goes_on(run, tmp_path)


@every_value(backend=BACKENDS, number=[0, 1], steps=[0, 2])
def test_a_state_dict_that_is_loaded_in_part_is_not_gone_on_from(
    tmp_path: Path, backend: str, number: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups have been loaded, and the state of none or one of two parameters."""
    saved = Run(backend, 3).optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    run, calls = Run(backend, steps), []
    replace_state = run.optimizer.engine.replace_state

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > number:
            broken_disk()
        replace_state(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run.optimizer.engine, "replace_state", fails)
        with pytest.raises(OSError, match="Input/output error"):
            run.optimizer.load_state_dict(saved)
    check_stopped(run, tmp_path, r"load_state_dict failed \(OSError: .*may be half updated")
    run.optimizer.load_state_dict(saved)
    found = run.optimizer.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    for number, entries in saved["state"].items():
        moments = {key: value for key, value in entries.items() if key != "master"}  # which has bits of the weights
        same_tree("state", {key: found["state"][number][key] for key in moments}, moments)
    check_goes_on(run, tmp_path)


def test_weights_that_are_half_updated_are_neither_saved_nor_exported_nor_repaired_by_weights(tmp_path: Path) -> None:
    run = Run(steps=3)
    run.save(tmp_path / "a")
    run.optimizer.refuse_until_loaded("the update failed")
    check_stopped(run, tmp_path, "the update failed; .*may be half updated")
    others: list[Callable[[], object]] = [  # accelerate, Fabric and torch.distributed.checkpoint save what they return
        run.optimizer.state_dict,
        lambda: get_optimizer_state_dict(run.model, run.optimizer),
        lambda: copy.deepcopy(run.optimizer),
        lambda: pickle.dumps(run.optimizer),
    ]
    for call in others:
        with pytest.raises(RuntimeError, match=r"the update failed; .*may be half updated\. Load a checkpoint before"):
            call()
    for read in (2, 99):
        with at_read(read, broken_disk), suppress(CheckpointError):
            load_checkpoint(tmp_path / "a", run.model)
        with pytest.raises(RuntimeError, match="may be half"):
            run.optimizer.step()
    run.load(tmp_path / "a")
    check_goes_on(run, tmp_path)


def test_pretrained_weights_that_break_off_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    save_file({name: torch.ones(p.shape) for name, p in run.model.named_parameters()}, tmp_path / "model.safetensors")
    part = pretrained._read_shard
    with monkeypatch.context() as patched:
        patched.setattr(
            pretrained, "_read_shard", lambda *which: part(*which) if which[2] == "weight" else broken_disk()
        )
        with pytest.raises(OSError, match="Input/output error"):
            pretrained.load_pretrained(run.model, tmp_path)
    assert values_of(run.model) > {1.0}, "a part of it"
    check_stopped(run, tmp_path, IN_PART)
    pretrained.load_pretrained(run.model, tmp_path)
    run.optimizer.refresh_master_weights()
    check_goes_on(run, tmp_path)


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_checkpoint_that_is_replaced_during_a_load_is_refused(tmp_path: Path, read: int) -> None:
    """In the dry run nothing is changed; while the model is being filled, it has to be loaded again."""
    folder = tmp_path / "step"
    save_checkpoint(folder, *faults.model_of(1.0))
    model, optimizer = faults.model_of(0.0)
    fault = lambda: save_checkpoint(folder, *faults.model_of(2.0))  # noqa: E731
    with (
        at_read(read, fault),
        pytest.raises(CheckpointError, match=r"step was replaced or removed while it was read; load again$"),
    ):
        load_checkpoint(folder, model, optimizer)
    if read == 1:
        assert values_of(model) == {0.0}
    else:
        with pytest.raises(CheckpointError, match=IN_PART):
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


def test_tied_weights_of_a_plain_module_are_exported_once(tmp_path: Path) -> None:
    export_model(tmp_path / "m", torch.compile(model := Tied(), backend="eager"))
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert torch.equal(weights["embed.weight"], model.embed.weight)


def test_export_of_a_transformers_model(tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True).to(torch.bfloat16)
    (tmp_path / "m").mkdir()
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / "m" / stale).write_text("old")
    export_model(tmp_path / "m", torch.compile(model, backend="eager"))
    assert contents(tmp_path / "m") == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert read.dtype == torch.bfloat16
    same(dict(read.state_dict()), dict(model.state_dict()))


@at_urls
def test_a_new_manifest_keeps_its_files(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the files that the manifest named before are removed must not remove the new ones, too."""
    save_checkpoint(place, model_of(1.0))
    remove = storage._remove

    def interrupted(folder: Path) -> None:
        remove(folder)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "_remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(place, model_of(2.0))
    assert loaded(place) == 2.0
    save_checkpoint(place, model_of(3.0))
    assert loaded(place) == 3.0


@at_urls
def test_what_a_server_does_not_remove_stays(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may not be removed for some time. Saves go on, of which the last ones would be kept."""

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("403: the object is under a retention policy")

    for name in ("rm", "rm_file"):
        monkeypatch.setattr(type(fsspec.core.url_to_fs(place)[0]), name, refused)
    for value in (1.0, 2.0):
        save_checkpoint(f"{place}/step", model_of(value))
    assert loaded(f"{place}/step") == 2.0
    for number in (1, 2):
        save_checkpoint(f"{place}/step-{number}", model_of(float(number)), keep_last=1)
    assert [loaded(f"{place}/step-{number}") for number in (1, 2)] == [1.0, 2.0]
