"""Which checkpoints stay: never fewer than one whole one, nothing of the user's is removed, and room is made first."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightstep import Strategy
from lightstep.checkpoint import CheckpointError, latest_checkpoint, load_checkpoint, save, save_checkpoint
from lightstep.checkpoint.verify import is_undamaged
from tests.checkpoint_runs import dies_at, flip, model_of, trained, values_of


def saved(folder: Path, *numbers: int, **options: Any) -> None:
    for number in numbers:
        save_checkpoint(folder / f"step-{number}", *full(float(number)), **options)


def full(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(value)
    return model, torch.optim.SGD(model.parameters())


def left(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def test_the_newest_and_every_so_manieth_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, *range(100, 900, 100), keep_last=2, keep_every=300)
    assert left(tmp_path) == ["step-300", "step-600", "step-700", "step-800"]
    saved(tmp_path, 900, keep_last=1)
    assert left(tmp_path) == ["step-900"]


def test_only_checkpoints_of_lower_numbers_and_the_same_name_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 9)
    save_checkpoint(tmp_path / "other-1", model_of(0.0))
    for name in ("step-0", "step-01b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.distcp").write_text("of another library")
    (tmp_path / "step-2" / "notes.txt").write_text("precious")
    saved(tmp_path, 4, keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-0", "step-01b", "step-2", "step-4", "step-9", "other-1"}
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-0" / "weights.distcp").is_file()


def test_weights_alone_do_not_count_for_the_whole_state(tmp_path: Path) -> None:
    strategy, model, optimizer = trained("resident")
    strategy.save_checkpoint(tmp_path / "step-1", model, optimizer, keep_last=1)
    for number in range(2, 6):
        extra = {"step": number}
        strategy.save_checkpoint(
            tmp_path / f"step-{number}", model, optimizer, extra=extra, weights_only=True, keep_last=2
        )
    assert left(tmp_path) == ["step-1", "step-4", "step-5"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1", "what a run goes on from"
    strategy.save_checkpoint(tmp_path / "step-6", model, optimizer, keep_last=1)
    assert left(tmp_path) == ["step-4", "step-5", "step-6"]
    _, fresh, fresh_optimizer = trained("stream", steps=0)
    assert strategy.load_checkpoint(tmp_path / "step-5", fresh, fresh_optimizer) == {"step": 5}
    assert torch.equal(fresh.weight, model.weight)
    sizes = [sum(file.stat().st_size for file in (tmp_path / f"step-{n}").glob("*.distcp")) for n in (5, 6)]
    assert sizes[0] < sizes[1] / 2


def test_a_full_disk_with_a_lower_number_makes_room_and_keeps_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2, 3, 4)

    def full_disk(*_: Any) -> Any:
        assert "step-3" in left(tmp_path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save, "write_tensors", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        saved(tmp_path, 5, keep_last=9)
    assert left(tmp_path) == ["step-1", "step-2", "step-3", "step-4"], "nothing is removed that may stay"
    flip(tmp_path / "step-4" / "__0_0_0.distcp", 3000)
    with pytest.raises(CheckpointError, match="No space left"):
        saved(tmp_path, 5, keep_last=1)
    assert left(tmp_path) == ["step-3"], "the damaged one is not what is kept"
    monkeypatch.undo()
    saved(tmp_path, 5, keep_last=1)
    assert left(tmp_path) == ["step-5"]


def test_when_all_are_damaged_none_is_removed_before_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2, 3)
    for number in (1, 2, 3):
        flip(tmp_path / f"step-{number}" / "__0_0_0.distcp", 3000)
    monkeypatch.setattr(save, "write_tensors", lambda *_: 1 / 0)
    with pytest.raises(CheckpointError):
        saved(tmp_path, 4, keep_last=1)
    assert left(tmp_path) == ["step-1", "step-2", "step-3"]


def test_a_crash_at_any_moment_of_a_rotation_leaves_a_whole_one(tmp_path: Path) -> None:
    """A child dies at its n-th file operation, for random n until it gets through."""
    seed, died, folder = random.Random(0), 0, tmp_path / "run"
    for number in range(2, 14):
        if not folder.exists():
            saved(folder, 1)
        died += dies_at(seed.randrange(1, 26), folder, lambda number=number: saved(folder, number, keep_last=1))
        newest = latest_checkpoint(folder)
        assert newest is not None and is_undamaged(newest)
        load_checkpoint(newest, model := model_of(0.0))
        assert values_of(model) <= {float(n) for n in range(1, number + 1)}
    assert died >= 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("step", {"keep_last": 1}, "a path that ends in a number"),
        ("step-1", {"keep_last": 0}, "keep_last is 0"),
        ("step-1", {"keep_every": 5}, "keep_every is 5 without keep_last"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    tmp_path: Path, name: str, options: dict[str, int], message: str, asynchronous: bool
) -> None:
    strategy = Strategy.load("fp32")
    model = strategy.prepare_model(model_of(1.0))
    with pytest.raises(CheckpointError, match=message):
        strategy.save_checkpoint(tmp_path / name, model, **options, asynchronous=asynchronous)
    assert not list(tmp_path.iterdir())
