"""Damage × file: found by loads and by verify, with its place and what to load instead. A stranger runs nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import runpy
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lightstep import crc32 as crc32_module
from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoints,
)
from lightstep.checkpoint.layout import seal
from lightstep.checkpoint.saved import FILE_LIST
from lightstep.cli import app
from tests import faults
from tests.checkpoint_runs import Harmful, Run, flip, model_of, same, values_of
from tests.covering import every_value
from tests.reference.pair import BACKENDS
from tests.unit.test_accelerate import VALUES, Training
from tests.unit.test_asynchronous_saves import STATES, fresh_state, make, on_the_cpu

__all__ = ["fresh_state", "on_the_cpu"]

FLIPPED = "a flipped bit"
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda text: None,
    "one byte less": lambda text: text[:-1],
    "one byte more": lambda text: text + b"\0",
    FLIPPED: lambda text: text[: len(text) // 2] + bytes([text[len(text) // 2] ^ 4]) + text[len(text) // 2 + 1 :],
    "the last sector of zeros": lambda text: text[:-200] + bytes(200),
}
"""``test_what_reliability_measures`` has more bits and sectors."""


def check_damage(
    folder: Any, file: Path, refused: Callable[[Path], str], kinds: Iterable[str] = (FLIPPED,), by_verify: bool = True
) -> None:
    """Verify names the file; and a load refuses it by name, where ``refused`` checks that it changes nothing."""
    text = file.read_bytes()
    for kind in kinds:
        changed = DAMAGE[kind](text)
        file.unlink()
        if changed is not None:
            file.write_bytes(changed)
        if by_verify:
            (verified,) = verify_checkpoints(folder)
            assert len(verified.damage) == 1 and file.name in verified.damage[0], kind
        assert file.name in refused(file), kind
        file.write_bytes(text)


@every_value(
    name=["lightstep.json", "tensors.json", "state.pt", "__0_0_0.distcp", ".metadata"],
    backend=BACKENDS,
    scheme=["", "file://"],
)
def test_damage_in_any_file_is_found_and_changes_nothing(tmp_path: Path, name: str, backend: str, scheme: str) -> None:
    """A load does not read torch's index, of which it knows the size."""
    folder = f"{scheme}{tmp_path}/step"
    Run(backend, steps=4).save(folder)
    (file,) = (tmp_path / "step").rglob(name)
    size, run = file.stat().st_size, Run(backend)
    scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.5, total_iters=10)
    expected, drawn = run.content(), torch.get_rng_state()

    def refused(file: Path) -> str:
        has_its_size = file.exists() and file.stat().st_size == size
        assert has_its_size or latest_checkpoint(f"{scheme}{tmp_path}") is None
        if name == ".metadata" and has_its_size:
            return name
        with pytest.raises(CheckpointError, match=r"step was not loaded: ") as raised:
            run.load(folder, scheduler=scheduler)
        same(run.content(), expected)
        assert torch.equal(torch.get_rng_state(), drawn)
        return str(raised.value)

    is_manifest = name == "lightstep.json"
    check_damage(folder, file, refused, [kind for kind in DAMAGE if kind != "gone" or not is_manifest])
    if is_manifest:
        check_damage(folder, file, refused, ["gone"], by_verify=False)
        file.unlink()
        with pytest.raises(CheckpointError, match="holds no checkpoint of lightstep"):
            verify_checkpoints(folder)
        return
    run.save(tmp_path / "other")  # no refused load has marked the model
    run.load(folder)


# -- files beside a checkpoint -----------------------------------------------------------------------------------------


def beside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != "notes.txt")


def test_damage_in_a_checkpoint_of_the_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2, asynchronous_saves=False).train()
    newest = tmp_path / "checkpoint-2"
    found = verify_checkpoints(tmp_path)
    assert [each.path for each in found] == [newest, tmp_path / "checkpoint-1"]
    assert not any(each.damage for each in found)
    names = {"model.safetensors", "trainer_state.json", "rng_state.pth", FILE_LIST}
    assert names <= {file.name for file in beside(newest)}
    again = make(tmp_path, seed=1, max_steps=3, save_strategy="no")

    def refused(file: Path) -> str:
        with pytest.raises(CheckpointError, match=r"checkpoint-1 is whole: resume_from_checkpoi") as raised:
            again.train(resume_from_checkpoint=str(newest))
        assert "no older" not in str(raised.value)
        return str(raised.value)

    for file in (*beside(newest), next((newest / "lightstep").rglob("*.distcp"))):
        check_damage(newest, file, refused)
    for kind in ("one byte less", "gone"):
        check_damage(newest, newest / "rng_state.pth", refused, [kind])
    os.truncate(newest / "model.safetensors", 100)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 was interrupted; the newest whole one is" in caplog.text
    assert "lightstep-files.json" not in caplog.text
    (tmp_path / "checkpoint-1" / FILE_LIST).unlink()
    make(tmp_path, seed=1, max_steps=3, save_strategy="no").train(str(tmp_path / "checkpoint-1"))
    assert caplog.text.count(f"checkpoint-1 has no {FILE_LIST}") == 1


def test_a_damaged_best_model_is_not_loaded(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_only_model": True}
    trainer = make(tmp_path, "resident", asynchronous_saves=False, max_steps=2, **options)
    load = trainer._load_best_model

    def damage_and_load() -> Any:
        flip(Path(trainer.state.best_model_checkpoint or "") / "model.safetensors", 4000)
        return load()

    trainer._load_best_model = damage_and_load
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged.*If you changed it yourself, remove"):
        trainer.train()


def test_damage_in_a_state_of_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(VALUES | {"optimizer_state": STATES["stream"]})
    training.train(range(2))
    folder, old = Path(training.accelerator.save_state(str(tmp_path / "a"))), tmp_path / "old"
    (folder / "notes.txt").write_text("mine")
    training.train(range(2, 4))

    def refused(file: Path) -> str:
        weights, drawn = [p.clone() for p in training.model.parameters()], torch.get_rng_state()
        with pytest.raises(CheckpointError) as raised:
            training.accelerator.load_state(str(folder))
        assert all(map(torch.equal, weights, training.model.parameters()))
        assert torch.equal(drawn, torch.get_rng_state())
        return str(raised.value)

    for place in (0, 1):  # the second time it is written in place
        assert FILE_LIST in {file.name for file in beside(folder)}
        for file in (*beside(folder), next((folder / "lightstep").rglob("*.distcp"))):
            check_damage(folder, file, refused)
        if not place:
            shutil.copytree(folder, old)
        training.accelerator.save_state(str(folder))
    # a save in place that was killed: the checkpoint is of one save, the files beside it of another
    shutil.rmtree(folder / "lightstep")
    os.rename(old / "lightstep", folder / "lightstep")
    with pytest.raises(CheckpointError, match="are of two saves; one was interrupted"):
        training.accelerator.load_state(str(folder))
    (folder / FILE_LIST).unlink()
    training.accelerator.load_state(str(folder))
    assert caplog.text.count(f"has no {FILE_LIST}") == 1


# -- what the error says -----------------------------------------------------------------------------------------------


def test_files_that_are_in_no_list_are_the_user_s(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever they are called: a later save to the folder keeps them. Saves of weights alone are not interrupted."""
    training = Training(VALUES)
    training.train(range(2))
    state = Path(training.accelerator.save_state(str(tmp_path / "a")))
    (state / "vectors.bin").write_text("mine")
    for text in ("mine", "changed"):
        (state / "vectors.bin").write_text(text)
        training.accelerator.save_state(str(state))
        assert (state / "vectors.bin").read_text() == text
    (state / "vectors.bin").write_text("changed again")
    training.accelerator.load_state(str(state))

    run = tmp_path / "run"
    make(run, max_steps=2, asynchronous_saves=False).train()
    (run / "checkpoint-2" / "merged.safetensors").write_text("mine")
    make(run, max_steps=2, asynchronous_saves=False).train()
    assert (run / "checkpoint-2" / "merged.safetensors").read_text() == "mine"
    make(run, max_steps=3, save_steps=3, asynchronous_saves=False, save_only_model=True).train()
    make(run, max_steps=3, save_strategy="no").train(resume_from_checkpoint=True)
    assert "interrupted" not in caplog.text


def saved(folder: Path, **options: Any) -> Path:
    save_checkpoint(folder, *faults.model_of(1.0), extra={"step": 3}, **options)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, *faults.model_of(7.0))
    return str(raised.value)


def test_the_error_names_tensor_and_offset(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step")
    index = json.loads((folder / "tensors.json").read_text())
    _, _, _, start, size = index["tensors"]["optimizer.1.weight.momentum_buffer"]["chunks"][0]
    flip(folder / "__0_0_0.distcp", 8 * (start + size // 2))
    expected = f"__0_0_0.distcp is damaged: 1.weight.momentum_buffer (optimizer) at byte {start}"
    assert expected in refused(folder) and expected in verify_checkpoints(folder)[0].damage[0]
    load_checkpoint(folder, model := faults.model_of(0.0)[0])
    assert values_of(model) == {1.0}, "only what is read is compared"


def test_the_error_names_the_newest_older_checkpoint_that_is_whole(tmp_path: Path) -> None:
    """Weights alone are one for a load of weights alone."""
    folders = {step: tmp_path / f"step-{step}" for step in range(1, 5)}
    for folder in folders.values():
        saved(folder)
    for step, name in ((2, "__0_0_0.distcp"), (3, "state.pt")):
        flip(folders[step] / name, 4000)
    assert refused(folders[3]).endswith(f"{folders[1]} is undamaged: load that one")
    flip(folders[1] / "state.pt", 4000)
    assert refused(folders[3]).endswith("no older checkpoint next to it is undamaged"), "step-4 is newer"
    os.truncate(folders[4] / "__0_0_0.distcp", 3)
    saved(folders[1])
    saved(folders[2], weights_only=True)
    shutil.rmtree(folders[3])
    flip(saved(folders[3]) / "lightstep.json", 800)
    assert refused(folders[3]).endswith(f"{folders[1]} is undamaged: load that one")
    with pytest.raises(CheckpointError, match=r"step-2 is undamaged: load that one$"):
        load_checkpoint(folders[3], faults.model_of(7.0)[0])


def test_verify_from_the_command_line(tmp_path: Path) -> None:
    def run(*paths: Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["checkpoint", "verify", *map(str, paths)])
        return result.exit_code, result.stdout + result.stderr

    for name in ("run/a", "run/b", "other"):
        saved(tmp_path / name)
    code, text = run(tmp_path / "run", tmp_path / "other")
    assert code == 0 and text.count("whole") == 3 and "5 files" in text
    flip(tmp_path / "run" / "a" / "__0_0_0.distcp", 5000)
    flip(tmp_path / "run" / "b" / "lightstep.json", 50)
    code, text = run(tmp_path / "run", tmp_path / "other")
    assert code == 1 and text.count("whole") == 1 and "__0_0_0.distcp is damaged" in text
    assert "lightstep.json" in text and "b: damaged" in text.replace("\n", "")
    code, text = run(tmp_path / "nothing")
    assert code == 2 and "does not exist" in text


@pytest.mark.parametrize("library", ["isal", "zlib"])
def test_the_checksum_is_the_same_with_and_without_the_faster_library(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "zlib":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    crc32 = runpy.run_path(crc32_module.__file__)["crc32"]
    data = random.Random(0).randbytes(100_001)
    assert crc32.__module__ == ("zlib" if library == "zlib" else "isal.isal_zlib")
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[7:], 5) == zlib.crc32(data[7:], 5)


# -- malice: whoever wrote the files made all checksums right ----------------------------------------------------------


def evil_tensor(folder: Path, index: dict[str, Any]) -> None:
    torch.save(Harmful(), folder / "__0_0_0.distcp")
    text = (folder / "__0_0_0.distcp").read_bytes()
    for tensor in index["tensors"].values():
        tensor["chunks"][0][3:] = [0, len(text)]
        tensor["crc32"] = [zlib.crc32(text)]


def too_long(folder: Path, index: dict[str, Any]) -> None:
    for tensor in index["tensors"].values():
        tensor["chunks"][0][-1] = 2**40


def outside(folder: Path, index: dict[str, Any]) -> None:
    (folder / "__0_0_0.distcp").rename(folder.parent / "outside.distcp")
    index["files"] = ["../outside.distcp"]


MALICE: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str | None]] = {
    "a pickle as torch's index, which is not read": (
        lambda folder, _: (folder / ".metadata").write_bytes(pickle.dumps(Harmful())),
        None,
    ),
    "a pickle as the state": (
        lambda folder, _: torch.save({"extra": Harmful()}, folder / "state.pt"),
        r"state\.pt cannot be read: it is damaged, or holds more than plain",
    ),
    "a pickle as a tensor": (evil_tensor, r"Unpickl|Weights only"),
    "bytes that a file does not have": (too_long, r"__0_0_0\.distcp has fewer bytes than the \d+ that it names"),
    "a file outside": (outside, r"'\.\./outside\.distcp', which is not a file name"),
}


@pytest.mark.parametrize("what", MALICE)
def test_a_stranger_runs_nothing_and_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harmful()))
    Harmful.FILE.unlink()  # it does harm where it is run
    save_checkpoint(tmp_path / "a", model_of(1.0), extra={"epoch": 1})
    forging, sentence = MALICE[what]
    index = json.loads((tmp_path / "a" / "tensors.json").read_text())
    forging(tmp_path / "a", index)
    (tmp_path / "a" / "tensors.json").write_text(json.dumps(index))
    files = dict.fromkeys(("../outside.distcp", "tensors.json", "state.pt", ".metadata"), 1)
    faults.forge(tmp_path / "a", **({"files": files} if what == "a file outside" else {}))
    model = model_of(0.0)
    if sentence is None:
        assert load_checkpoint(tmp_path / "a", model) == {"epoch": 1} and values_of(model) == {1.0}
    else:
        with pytest.raises(CheckpointError, match=sentence):
            load_checkpoint(tmp_path / "a", model)
        assert values_of(model) == {0.0}
    assert not Harmful.FILE.exists()


STRANGE = [None, -1, 2**62, 2**70, 1.5, True, "x", "../x", "\ud800", [], [[]], ["a"], {}, {"a": 1}]


def replaced(content: Any, chance: random.Random) -> Any:
    """The content with something in it replaced by something else."""
    if isinstance(content, dict | list) and content and chance.random() < 0.8:
        changed: Any = copy.copy(content)
        key = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        changed[key] = replaced(content[key], chance)
        return changed
    return chance.choice(STRANGE)


@pytest.mark.parametrize("name", ["lightstep.json", "tensors.json"])
def test_a_strangers_manifest_or_index_is_refused_and_stops_nobody_else(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        save_checkpoint(tmp_path / f"step-{number}", *faults.model_of(float(number)))
    folder, chance = tmp_path / "step-2", random.Random(0)
    files = {each: json.loads((folder / each).read_text()) for each in ("lightstep.json", "tensors.json")}
    del files["lightstep.json"]["crc32"]
    for number in range(40):
        changed = files | {name: replaced(files[name], chance)}
        manifest, text = changed["lightstep.json"], json.dumps(changed["tensors.json"]).encode()
        if not isinstance(manifest, dict):
            continue
        if name == "tensors.json":
            (folder / name).write_bytes(text)
            manifest = manifest | {
                "files": manifest["files"] | {name: len(text)},
                "checksums": manifest["checksums"] | {name: zlib.crc32(text)},
            }
        (folder / "lightstep.json").write_bytes(seal(manifest))
        for read in (lambda: load_checkpoint(folder, faults.model_of(0.0)[0]), lambda: verify_checkpoints(folder)):
            with suppress(CheckpointError):
                read()
        assert latest_checkpoint(tmp_path) in {tmp_path / "step-1", folder}
        if number % 10 == 0:
            save_checkpoint(tmp_path / "step-3", model_of(0.0))
            shutil.rmtree(tmp_path / "step-3")
