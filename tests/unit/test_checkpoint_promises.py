"""What a checkpoint promises whatever else happens: earlier versions, other savers, readers, failing loads."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lightstep
from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    layout,
    load,
    load_checkpoint,
    save_checkpoint,
    storage,
)
from lightstep.checkpoint import huggingface as pretrained
from lightstep.checkpoint.formats import read_checkpoint
from lightstep.checkpoint.layout import holds_checkpoint, remove_checkpoint
from lightstep.checkpoint.tensors import Chunk, StoredTensor
from tests.checkpoint_runs import OLD, Adapted, content, model_of, same, trained, values_of
from tests.reference.pair import BACKENDS

# -- earlier versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream", "fsdp2-2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_of_the_previous_version_load_to_the_same_bits(name: str, backend: str) -> None:
    strategy, model, optimizer = trained(backend, steps=1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=10)
    assert strategy.load_checkpoint(OLD / name, model, optimizer, scheduler) == {"epoch": 3}
    same(content(model, optimizer), load_file(OLD / f"{name}.safetensors"))
    assert scheduler.last_epoch == 3 and optimizer.param_groups[0]["lr"] == pytest.approx(0.0065)


def partly_frozen(backend: str, steps: int, frozen_in_groups: bool) -> tuple[Any, nn.Module, Any]:
    """Groups of the previous version held no frozen parameters."""
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model = strategy.prepare_model(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = None if frozen_in_groups else [{"params": trainable}]
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups, lr=1e-2 / (1 + steps))
    for step in range(steps):
        torch.manual_seed(10 + step)
        optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("saved_with", [False, True], ids=["saved without", "saved with"])
def test_groups_with_and_without_frozen_parameters_load_each_other(
    tmp_path: Path, backend: str, saved_with: bool
) -> None:
    strategy, model, optimizer = partly_frozen(backend, 3, saved_with)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    other, model2, optimizer2 = partly_frozen(backend, 1, not saved_with)
    other.load_checkpoint(tmp_path / "a", model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))
    assert optimizer2.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert all(p not in optimizer2.state for p in model2[0].parameters())


def test_groups_that_differ_in_what_is_trained_are_refused(tmp_path: Path) -> None:
    """So is a frozen parameter whose state would be left behind."""
    strategy, model, optimizer = partly_frozen("resident", 2, frozen_in_groups=False)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    _, thawed, _ = partly_frozen("resident", 0, frozen_in_groups=True)
    thawed[0].requires_grad_(True)
    optimizer = strategy.create_optimizer(thawed, torch.optim.AdamW)
    with pytest.raises(CheckpointError, match=r"another optimizer \(not in the checkpoint: 0.bias, 0.weight\)"):
        strategy.load_checkpoint(tmp_path / "a", thawed, optimizer)

    strategy, model, optimizer = partly_frozen("resident", 0, frozen_in_groups=True)
    model[0].requires_grad_(True)
    optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().sum())
    optimizer.step()
    model[0].requires_grad_(False)
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    strategy, model, optimizer = partly_frozen("resident", 0, frozen_in_groups=False)
    with pytest.raises(CheckpointError, match=r"another optimizer \(not in the optimizer: 0.bias, 0.weight\)"):
        strategy.load_checkpoint(tmp_path / "b", model, optimizer)


def test_a_frozen_base_that_was_saved_in_fp32_gets_no_masters(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    save_checkpoint(tmp_path / "a", whole, torch.optim.AdamW(whole.parameters()))
    strategy, model, optimizer = partly_frozen("resident", 1, frozen_in_groups=True)
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    masters = [optimizer.parameter_state(p).get("master") for p in model.parameters()]
    assert [master is not None for master in masters] == [False, False, True, True]
    assert torch.equal(masters[2], whole[1].weight)


def test_a_checkpoint_has_what_the_previous_version_reads(tmp_path: Path) -> None:
    """The files and keys of format 1."""
    strategy, model, optimizer = trained("stream")
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    old, new = (json.loads((folder / "lightstep.json").read_text()) for folder in (OLD / "stream", tmp_path / "a"))
    assert old["format"] == new["format"] and old["files"].keys() == new["files"].keys()
    assert new.keys() == old.keys()
    indices = [json.loads((folder / "tensors.json").read_text()) for folder in (OLD / "stream", tmp_path / "a")]
    assert indices[0]["tensors"].keys() == indices[1]["tensors"].keys()


# -- which is the newest -----------------------------------------------------------------------------------------------


def test_the_newest_is_the_one_saved_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "step-100", model_of(1.0))
    hour = 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns: now() - hour)
    save_checkpoint(tmp_path / "step-200", model_of(2.0))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-200"
    save_checkpoint(tmp_path / "step-150", model_of(1.5))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-150", "a run that went back and saved again"


def test_looking_for_the_newest_beside_a_process_that_rotates(tmp_path: Path) -> None:
    looks = threading.Semaphore(0)

    def rotate() -> None:
        for number in range(15):
            save_checkpoint(tmp_path / f"step-{number}", model_of(0.0))
            looks.acquire()  # not faster than somebody looks, and beside the looks
            if number >= 2:
                remove_checkpoint(tmp_path / f"step-{number - 2}")

    thread = threading.Thread(target=rotate)
    thread.start()
    try:
        while thread.is_alive():
            latest_checkpoint(tmp_path)
            looks.release()
    finally:
        looks.release(15)
        thread.join()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-14"


def test_what_is_removed_during_a_look_was_not_the_newest_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``keep_every`` keeps step-2; step-3 goes when step-5 is there, which was not when the look began."""
    for number in (2, 3):
        save_checkpoint(tmp_path / f"step-{number}", model_of(0.0))
    read = layout.read_manifest

    def late(folder: Path) -> Any:
        if folder.name == "step-3" and folder.exists():
            save_checkpoint(tmp_path / "step-5", model_of(0.0))
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(layout, "read_manifest", late)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-5"


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would start anew."""
    save_checkpoint(tmp_path / "step-1", model_of(0.0))
    stale = OSError(errno.ESTALE, "stale file handle")
    monkeypatch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(stale))
    with pytest.raises(OSError, match="stale"):
        latest_checkpoint(tmp_path)


# -- the user's files --------------------------------------------------------------------------------------------------


def test_the_users_files_stay_when_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save_checkpoint(folder, model_of(1.0, count=2))
    (folder / "notes.txt").write_text("precious")
    (folder / "eval" / "deep").mkdir(parents=True)
    (folder / "eval" / "deep" / "scores.json").write_text("[1]")
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    save_checkpoint(folder, model_of(2.0))
    assert (folder / "notes.txt").read_text() == "precious"
    assert (folder / "eval" / "deep" / "scores.json").read_text() == "[1]"
    assert (folder / "link").resolve() == tmp_path.resolve()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]
    model = model_of(0.0)
    load_checkpoint(folder, model)
    assert values_of(model) == {2.0}
    remove_checkpoint(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["eval", "link", "notes.txt"]


def test_the_users_files_survive_a_crash_after_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step"
    save_checkpoint(folder, model_of(1.0))
    (folder / "notes.txt").write_text("precious")
    monkeypatch.setattr(storage, "_remove_replaced", lambda *_: None)  # the process ends here
    save_checkpoint(folder, model_of(2.0))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2 and not (folder / "notes.txt").exists()
    save_checkpoint(folder, model_of(3.0))
    assert (folder / "notes.txt").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_the_manifest_has_the_sizes_that_the_writers_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system the first rank may see old sizes of what others wrote: it does not look."""
    nothing = torch.Size([])
    index = {"model.a": StoredTensor(torch.float32, nothing, (Chunk(nothing, nothing, "__1_0_0.distcp", 3, 4, 0),))}
    monkeypatch.setattr("lightstep.checkpoint.save.write_tensors", lambda *_: index)
    save_checkpoint(tmp_path / "a", model_of(1.0))
    manifest = json.loads((tmp_path / "a" / "lightstep.json").read_text())
    assert manifest["files"]["__1_0_0.distcp"] == 7
    assert set(manifest["files"]) == {"__1_0_0.distcp", "state.pt", "tensors.json", ".metadata"}


# -- two at a time -----------------------------------------------------------------------------------------------------


def test_of_two_savers_one_is_refused_and_the_other_succeeds(tmp_path: Path) -> None:
    folder, outcomes = tmp_path / "step", []
    save_checkpoint(folder, model_of(0.0))
    begun = threading.Barrier(2)

    def save(value: float) -> None:
        for _ in range(10):
            begun.wait()
            try:
                save_checkpoint(folder, model_of(value))
                outcomes.append("saved")
            except CheckpointError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=save, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [text for text in outcomes if text != "saved"]
    assert outcomes.count("saved") >= 10
    assert all("is saving to" in text and "wait for it, or choose another path" in text for text in refused), refused
    model = model_of(0.0)
    load_checkpoint(folder, model)
    assert values_of(model) in ({1.0}, {2.0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_what_another_saver_is_about_to_replace_is_no_strangers(tmp_path: Path) -> None:
    """Between the renames of one saver the other one finds nothing at the path, or half of it."""
    folder = tmp_path / "step"
    save_checkpoint(folder, model_of(0.0))
    (folder / "lightstep.json").unlink()
    with storage.locked(folder), pytest.raises(CheckpointError, match="is saving to"):
        save_checkpoint(folder, model_of(1.0))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        save_checkpoint(folder, model_of(1.0))


def hold(folder: str, held: Any) -> None:
    with storage.locked(Path(folder)):
        held.set()
        time.sleep(60)


def test_the_lock_of_a_killed_saver_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(str(tmp_path / "step"), held))
    other.start()
    assert held.wait(30)
    with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* is saving to"):
        save_checkpoint(tmp_path / "step", model_of(1.0))
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    assert (tmp_path / ".step.lock").exists()
    save_checkpoint(tmp_path / "step", model_of(1.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def save_and_save(folder: Path, asked: Any) -> None:
    """Five saves each time somebody asks, then the value of the last one."""
    model, value = model_of(0.0, count=6), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    while asked.recv():
        first = value + 1
        for value in range(first, first + 5):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
                    optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
            save_checkpoint(folder, model, optimizer)
        asked.send(value)


def loaded_value(folder: Path) -> float | None:
    """Of all weights and of all state; None where the load was refused because of a save."""
    model = model_of(0.0, count=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        load_checkpoint(folder, model, optimizer)
    except CheckpointError as error:
        assert "replace" in str(error) or "not a complete" in str(error) or "does not exist" in str(error)
        return None
    (value,) = values_of(model) | {float(x) for s in optimizer.state.values() for x in s["momentum_buffer"].flatten()}
    return value


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_load_during_saves_is_of_one_checkpoint(tmp_path: Path) -> None:
    """Weights of one save and optimizer state of another never come together. Five saves at a time, then a break."""
    folder, context = tmp_path / "step", multiprocessing.get_context("fork")
    asked, ours = context.Pipe()
    saver = context.Process(target=save_and_save, args=(folder, ours))
    saver.start()
    for last in (5, 10, 15, 20):
        asked.send(True)
        while last > 5 and not asked.poll():
            loaded_value(folder)
        assert asked.recv() == last == loaded_value(folder)
    asked.send(False)
    saver.join()


@pytest.mark.parametrize("when", [1, 2])
def test_a_checkpoint_that_is_replaced_during_a_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """In the dry run nothing is changed; while the model is being filled, it has to be loaded again."""
    folder, read, calls = tmp_path / "step", load.read_tensors, []
    save_checkpoint(folder, model_of(1.0))

    def replacing(*arguments: Any) -> None:
        calls.append(arguments)
        read(*arguments)
        if len(calls) == when:
            save_checkpoint(folder, model_of(2.0))

    model = model_of(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(load, "read_tensors", replacing)
        with pytest.raises(CheckpointError, match=r"step was replaced or removed while it was read; load again$"):
            load_checkpoint(folder, model)
    if when == 1:
        assert values_of(model) == {0.0}
        save_checkpoint(tmp_path / "other", model)
    else:
        with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
            save_checkpoint(tmp_path / "other", model)
    load_checkpoint(folder, model)
    assert values_of(model) == {2.0}
    save_checkpoint(tmp_path / "other", model)


def test_a_checkpoint_between_two_renames_is_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step", model_of(1.0))
    os.replace(tmp_path / "step", tmp_path / ".step.replaced-00000000")
    assert holds_checkpoint(tmp_path / "step") and not holds_checkpoint(tmp_path / "other")


# -- loads that fail ---------------------------------------------------------------------------------------------------


def test_a_model_that_is_loaded_in_part_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model, optimizer = trained("resident", steps=3)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    strategy, model, optimizer = trained("resident")
    with failing_at(3, monkeypatch), pytest.raises(CheckpointError, match="Input/output error"):
        strategy.load_checkpoint(tmp_path / "a", model, optimizer)  # everything was read once, weights were loaded
    with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
        optimizer.step()
    with pytest.raises(CheckpointError, match=r"b was not saved: loading .*a failed after a part of it"):
        strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    with pytest.raises(CheckpointError, match=r"b was not exported: loading .*load a checkpoint before exporting its"):
        strategy.export_model(tmp_path / "b", model)
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    optimizer.step()


def test_a_torch_optimizer_that_is_loaded_in_part_takes_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups and the weights are the checkpoint's, its state is not."""
    model = model_of(1.0)
    save_checkpoint(tmp_path / "a", model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    model = model_of(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with failing_at(3, monkeypatch), pytest.raises(CheckpointError, match="Input/output error"):
        load_checkpoint(tmp_path / "a", model, optimizer)
    assert values_of(model) == {1.0} and optimizer.param_groups[0]["lr"] == 0.5
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed after a part of it had been loaded; weights and state may be"):
            optimizer.step()
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        save_checkpoint(tmp_path / "b", model, optimizer)
    save_checkpoint(tmp_path / "weights", model_of(3.0))
    load_checkpoint(tmp_path / "weights", model, optimizer)
    with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
        optimizer.step()  # weights alone do not repair its state
    load_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.step()
    save_checkpoint(tmp_path / "b", model, optimizer)
    with failing_at(2, monkeypatch), pytest.raises(CheckpointError, match="Input/output error"):
        load_checkpoint(tmp_path / "weights", model, optimizer)
    with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
        optimizer.step()
    load_checkpoint(tmp_path / "weights", model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_state_dict_that_is_loaded_in_part_is_not_gone_on_from(
    backend: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups have been loaded, and the state of none or one of two parameters."""
    _, _, source = trained(backend, steps=3)
    saved = source.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    _, model, optimizer = trained(backend)
    breaks_off(optimizer, number, monkeypatch, lambda: optimizer.load_state_dict(saved))
    with pytest.raises(RuntimeError, match=r"load_state_dict failed \(OSError: .*may be half updated"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    found = content(model, optimizer)
    for name, entries in zip(("weight", "bias"), saved["state"].values(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{name}.{key}"], torch.as_tensor(entries[key])), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.backward(model(torch.ones(4, 5, dtype=torch.bfloat16)).float().sum())
    optimizer.step()


def test_masters_that_are_loaded_in_part_before_the_first_step_are_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrappers load such state before the model is sharded."""
    _, _, optimizer = trained("resident", steps=0)
    masters = {number: {"master": torch.ones(shape)} for number, shape in enumerate([(3, 5), (3,)])}
    saved = {"state": masters, "param_groups": optimizer.state_dict()["param_groups"]}
    breaks_off(optimizer, 1, monkeypatch, lambda: optimizer.load_state_dict(saved))
    with pytest.raises(RuntimeError, match="load_state_dict failed"):
        optimizer.step()


def breaks_off(optimizer: Any, number: int, monkeypatch: pytest.MonkeyPatch, load_state: Callable[[], object]) -> None:
    """Load while the disk fails after the state of ``number`` parameters."""
    replace_state, calls = optimizer.engine.replace_state, []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > number:
            broken_disk()
        replace_state(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.engine, "replace_state", fails)
        with pytest.raises(OSError, match="Input/output error"):
            load_state()


def test_weights_that_are_half_updated_are_neither_saved_nor_exported(tmp_path: Path) -> None:
    """Also where the optimizer is not named."""
    strategy, model, optimizer = trained("resident")
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.refuse_until_loaded("the update failed")
    with pytest.raises(CheckpointError, match=r"b was not saved: .*may be half updated"):
        strategy.save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match=r"b was not exported: .*may be half updated"):
        strategy.export_model(tmp_path / "b", model)
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
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
    optimizer.step()


def broken_disk() -> Any:
    raise OSError(5, "Input/output error")


@contextlib.contextmanager
def failing_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk is gone when tensors are read for the ``call``-th time."""
    read, calls = load.read_tensors, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == call:
            broken_disk()
        read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(load, "read_tensors", failing)
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["no optimizer is given", "none was saved"])
def test_an_optimizer_that_follows_a_broken_load_waits_for_a_whole_one(
    tmp_path: Path, backend: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained(backend, steps=3)
    given = what == "none was saved"
    strategy.save_checkpoint(tmp_path / "a", model, None if given else optimizer)
    strategy, model, optimizer = trained(backend)
    before = content(model, optimizer)
    with failing_at(2, monkeypatch), pytest.raises(CheckpointError, match="Input/output error"):
        strategy.load_checkpoint(tmp_path / "a", model, optimizer if given else None)
    with pytest.raises(RuntimeError, match="failed after a part of it had been loaded"):
        optimizer.step()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer if given else None)
    optimizer.backward(model(torch.randn(4, 5).to(torch.bfloat16)).float().sum())
    optimizer.step()
    assert not torch.equal(content(model, optimizer)["weight"], before["weight"])


def test_a_load_of_weights_does_not_repair_a_step_that_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model, optimizer = trained("resident", steps=3)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.refuse_until_loaded("the update failed")
    with failing_at(2, monkeypatch), pytest.raises(CheckpointError, match="Input/output error"):
        strategy.load_checkpoint(tmp_path / "a", model)
    strategy.load_checkpoint(tmp_path / "a", model)
    with pytest.raises(RuntimeError, match="may be half updated"):
        optimizer.step()
    strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    optimizer.step()


# -- loaded, edited, saved ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["checkpoint", "state dict"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masters_in_the_file_follow_an_edit_after_a_load(tmp_path: Path, backend: str, how: str) -> None:
    strategy, model, optimizer = trained(backend)
    if how == "checkpoint":
        strategy.save_checkpoint(tmp_path / "a", model, optimizer)
        strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    else:
        optimizer.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        model.weight.mul_(3)
    strategy.save_checkpoint(tmp_path / "b", model, optimizer)
    saved = read_checkpoint(tmp_path / "b")
    assert torch.equal(saved.weights["weight"].read(), model.weight)
    assert torch.equal(saved.entries["weight"]["master"].read(), model.weight.float())


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(steps: int, backend: str = "resident", **arguments: Any) -> tuple[Any, Adapted, Any]:
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": backend}})
    model = strategy.prepare_model(Adapted(**arguments))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.backward(model(torch.randn(4, 6, dtype=torch.bfloat16)).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


def stored_names(folder: Path) -> set[str]:
    return {key.removeprefix("model.") for key in json.loads((folder / "tensors.json").read_text())["tensors"]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [False, True])
def test_of_an_adapter_only_what_is_trained_is_saved(
    tmp_path: Path, backend: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, model, optimizer = adapted(3, backend, tied=tied)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    assert {name.split(".")[0] for name in stored_names(tmp_path / "a")} == {"adapter", "norm", "optimizer"}
    assert not stored_names(tmp_path / "a") & {"base.weight", "base.bias", "norm.weight"}
    base = json.loads((tmp_path / "a" / "lightstep.json").read_text())["base"]
    assert base["name"] == "org/base" and base["shapes"]["base.weight"] == [6, 6]

    other, model2, optimizer2 = adapted(1, backend, tied=tied)
    other.load_checkpoint(tmp_path / "a", model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))
    assert torch.equal(model2.norm.running_mean, model.norm.running_mean)
    assert not caplog.records or all(record.levelno < logging.WARNING for record in caplog.records)

    third, model3, optimizer3 = adapted(0, backend, base="org/other", seed=5, tied=tied)
    frozen = model3.base.weight.clone()
    third.load_checkpoint(tmp_path / "a", model3, optimizer3)
    assert torch.equal(model3.base.weight, frozen) and torch.equal(model3.adapter.weight, model.adapter.weight)
    assert "trained on 'org/base', and the model's base is 'org/other'" in caplog.text


def test_the_base_is_saved_and_loaded_when_it_is_asked_for(tmp_path: Path) -> None:
    strategy, model, optimizer = adapted(2)
    strategy.save_checkpoint(tmp_path / "whole", model, optimizer, trainable_only=False)
    strategy.save_checkpoint(tmp_path / "trained", model, optimizer)
    assert "base.weight" in stored_names(tmp_path / "whole")
    other, model2, optimizer2 = adapted(0, seed=5)
    frozen = model2.base.weight.clone()
    other.load_checkpoint(tmp_path / "whole", model2, optimizer2, trainable_only=True)
    assert torch.equal(model2.base.weight, frozen) and torch.equal(model2.adapter.weight, model.adapter.weight)
    other.load_checkpoint(tmp_path / "whole", model2, optimizer2)
    assert torch.equal(model2.base.weight, model.base.weight)
    with pytest.raises(CheckpointError, match="holds only what was trained, and trainable_only=False"):
        other.load_checkpoint(tmp_path / "trained", model2, optimizer2, trainable_only=False)
    state = read_checkpoint(tmp_path / "trained")
    assert any("the frozen base (org/base) is not in it" in note for note in state.notes)


def test_what_was_trained_and_is_frozen_now_is_saved(tmp_path: Path) -> None:
    strategy, model, optimizer = adapted(2)
    model.adapter.weight.requires_grad_(False)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    assert "adapter.weight" in stored_names(tmp_path / "a")
    strategy.save_checkpoint(tmp_path / "weights", model, optimizer, weights_only=True)
    strategy.save_checkpoint(tmp_path / "model", model)
    assert {"adapter.weight"} <= stored_names(tmp_path / "weights") & stored_names(tmp_path / "model")


def test_what_was_trained_and_is_frozen_now_is_loaded(tmp_path: Path) -> None:
    strategy, model, optimizer = adapted(2)
    model.adapter.weight.requires_grad_(False)
    strategy.save_checkpoint(tmp_path / "trained", model, optimizer)
    strategy.save_checkpoint(tmp_path / "whole", model, optimizer, trainable_only=False)
    for name in ("trained", "whole"):
        other, model2, optimizer2 = adapted(0, seed=5)
        model2.adapter.weight.requires_grad_(False)
        frozen = model2.base.weight.clone()
        other.load_checkpoint(tmp_path / name, model2, optimizer2, trainable_only=True)
        assert torch.equal(model2.adapter.weight, model.adapter.weight), name
        assert torch.equal(model2.base.weight, frozen), name
