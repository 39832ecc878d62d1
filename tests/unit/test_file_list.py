"""The files beside a checkpoint: one damaged byte of them is found, by verify and before anything is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep import CheckpointError
from lightstep.checkpoint import verify_checkpoints
from lightstep.checkpoint.saved import FILE_LIST
from tests.unit.test_accelerate import VALUES, Training
from tests.unit.test_asynchronous_saves import STATES, fresh_state, make, on_the_cpu

__all__ = ["fresh_state", "on_the_cpu"]

DAMAGE = {
    "bit": lambda text: bytes([text[0] ^ 1]) + text[1:],
    "cut": lambda text: text[:-1],
    "gone": lambda text: None,
}


def damaged(file: Path, how: str) -> bytes:
    """Damage the file, and return what was in it."""
    text = file.read_bytes()
    changed = DAMAGE[how](text)
    file.unlink()
    if changed is not None:
        file.write_bytes(changed)
    return text


def beside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_damage_in_a_checkpoint_of_the_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2, asynchronous_saves=False).train()
    newest = tmp_path / "checkpoint-2"
    found = verify_checkpoints(tmp_path)
    assert [each.path for each in found] == [newest, tmp_path / "checkpoint-1"]
    assert not any(each.damage for each in found)
    files = beside(newest)
    assert {"model.safetensors", "trainer_state.json", "rng_state.pth", FILE_LIST} <= {file.name for file in files}
    again = make(tmp_path, seed=1, max_steps=3, save_strategy="no")
    for file in files:
        for how in DAMAGE if file.name in ("rng_state.pth", FILE_LIST) else ["bit"]:
            if (file.name, how) == (FILE_LIST, "gone"):
                continue
            text = damaged(file, how)
            (verified,) = verify_checkpoints(newest)
            assert len(verified.damage) == 1 and file.name in verified.damage[0]
            with pytest.raises(CheckpointError, match=rf"{file.name}.*; .*checkpoint-1 is whole: resume_from_checkpoi"):
                again.train(resume_from_checkpoint=str(newest))
            file.write_bytes(text)
    damaged(newest / "model.safetensors", "cut")
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 was interrupted; the newest whole one is" in caplog.text
    assert "lightstep-files.json" not in caplog.text
    (tmp_path / "checkpoint-1" / FILE_LIST).unlink()
    make(tmp_path, seed=1, max_steps=3, save_strategy="no").train(str(tmp_path / "checkpoint-1"))
    assert caplog.text.count(f"checkpoint-1 has no {FILE_LIST}") == 1


def test_a_damaged_best_model_is_not_loaded(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        "resident",
        asynchronous_saves=False,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        load_best_model_at_end=True,
        save_only_model=True,
    )
    load = trainer._load_best_model

    def damage_and_load() -> Any:
        damaged(Path(trainer.state.best_model_checkpoint or "") / "model.safetensors", "bit")
        return load()

    trainer._load_best_model = damage_and_load
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged.*If you changed it yourself, remove"):
        trainer.train()


def test_damage_in_a_state_of_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(VALUES | {"optimizer_state": STATES["stream"]})
    training.train(range(2))
    folder = Path(training.accelerator.save_state(str(tmp_path / "a")))
    (folder / "notes.txt").write_text("mine")
    training.train(range(2, 4))
    for place in (0, 1):  # the second time it is written in place
        assert FILE_LIST in {file.name for file in beside(folder)}
        for file in beside(folder):
            if file.name == "notes.txt":
                continue
            text = damaged(file, "bit")
            (verified,) = verify_checkpoints(folder)
            assert len(verified.damage) == 1 and file.name in verified.damage[0]
            weights, drawn = [p.clone() for p in training.model.parameters()], torch.get_rng_state()
            with pytest.raises(CheckpointError, match=file.name):
                training.accelerator.load_state(str(folder))
            assert all(map(torch.equal, weights, training.model.parameters()))
            assert torch.equal(drawn, torch.get_rng_state())
            file.write_bytes(text)
        inner = next((folder / "lightstep").rglob("*.distcp"))
        text = damaged(inner, "bit")
        assert [inner.name in found for found in verify_checkpoints(folder)[0].damage] == [True]
        inner.write_bytes(text)
        old = tmp_path / "old"
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
