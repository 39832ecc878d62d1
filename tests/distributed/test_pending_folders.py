"""A rank that fails inside a pending folder: the others raise, wherever they wait, and nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep import CheckpointError, Strategy
from lightstep.integrations.folders import PendingFolder, SavedFolders
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.test_integrations import STRATEGIES, accelerated, fresh_state
from tests.patience import PATIENCE

FOLDERS = SavedFolders("a test's folder", "saved-", ("*.txt",), lambda _: True, lambda _: True)
KEPT: list[PendingFolder] = []
"""So that no collector removes their hidden folders."""
PLACES = ["before the checkpoint", "after the checkpoint", "without a checkpoint"]


def save(path: Path, run: tuple[Strategy, Any, Any], place: str, fails: bool, asynchronous: bool) -> PendingFolder:
    strategy, model, optimizer = run
    with PendingFolder(path, FOLDERS, lambda: None) as pending:
        KEPT.append(pending)
        if fails and place != "after the checkpoint":
            raise OSError(28, "No space left on device")
        (pending.folder / f"{strategy.rank}.txt").parent.mkdir(exist_ok=True)
        (pending.folder / f"{strategy.rank}.txt").write_text("small")
        if place != "without a checkpoint":
            where = pending.folder / "lightstep"
            pending.checkpoint = strategy.save_checkpoint(where, model, optimizer, asynchronous=asynchronous)
        if fails:
            raise OSError(28, "No space left on device")
    return pending


def check_failures(rank: int, folder: str) -> None:
    strategy = Strategy.load("ddp")
    model = strategy.prepare_model(TinyTransformer())
    run = strategy, model, strategy.create_optimizer(model, torch.optim.AdamW)
    path = Path(folder, "saved")
    for place in PLACES:
        for asynchronous in (False, True):
            for failing in ({0}, {1}) if asynchronous else ({1}, {0, 1}):
                fails = rank in failing
                error = OSError if fails else CheckpointError
                with pytest.raises(error, match="No space left on device"):
                    save(path, run, place, fails, asynchronous)
                torch.distributed.barrier()
                assert not list(Path(folder).iterdir()), f"{place}, {failing}"
                torch.distributed.barrier()
            pending = save(path, run, place, False, asynchronous)
            assert pending.result(PATIENCE) == path
            pending.finish()
            torch.distributed.barrier()
            assert {file.name for file in path.glob("*.txt")} == {"0.txt", "1.txt"}
            torch.distributed.barrier()
            if rank == 0:
                path.rename(Path(folder).parent / f"{place}, {asynchronous}")
            torch.distributed.barrier()


def test_a_rank_that_fails(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    pool.run(check_failures, 2, folder=str(tmp_path / "folder"))


@on_ranks(2)
def test_a_rank_that_fails_under_accelerate(rank: int, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    values: dict[str, Any] = {**STRATEGIES["strategy"], "precision": {"parameters": "bfloat16"}}
    with fresh_state("strategy"):
        accelerator, *_ = accelerated("strategy", values, {"lr": 1e-3})
        hook = accelerator.register_save_state_pre_hook(full)
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            accelerator.save_state(f"{tmp_path}/state")
        hook.remove()
        torch.distributed.barrier()
        assert not list(tmp_path.iterdir())
        torch.distributed.barrier()
        accelerator.save_state(f"{tmp_path}/state")
        assert (tmp_path / "state").is_dir()
