"""`lightstep train` on two ranks: one batch shared, one report, and a resumed run that equals the uninterrupted one."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import lightstep
from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.storage import LocalStorage
from lightstep.config import ConfigError
from lightstep.distributed import Ranks, RemoteRankError
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.output import newest_undamaged
from lightstep.trainer.session import train
from tests.distributed.deepspeed_runs import number_anew
from tests.distributed.ranks import Pool
from tests.training_files import BATCH, MODEL, training_values
from tests.unit.test_trainer import stop_at
from tests.unit.test_trainer_data import word_tokenizer


@pytest.fixture(name="pool")
def pool_without_groups(pool: Pool) -> Any:
    """`train` starts the process group."""
    return SimpleNamespace(run=functools.partial(pool.run, group=False))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A tiny run of four steps."""
    sample = {"prompts": ["line"], "tokens": 3}
    return training_values(tmp_path, steps=4, batch=BATCH | {"sequences": 8}, sample=sample)


# -- what the ranks do


def run(
    rank: int, world_size: int, values: dict[str, Any], resume: bool = False, stop: int | None = None, **changes: Any
) -> dict[str, Any]:
    """One call of `train`, with changed values.

    Args:
        stop: SIGTERM reaches the last rank, and no other, in the middle of that step.
    """
    values = {**values, **changes}
    if str(values.get("strategy")).startswith("deepspeed"):
        number_anew()
    console = Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, stop if rank == world_size - 1 else None)
        outcome = train(TrainConfig.model_validate(values), resume, console)
    return {
        "losses": dict(outcome.losses),
        "step": outcome.step,
        "before": outcome.validation_before,
        "after": outcome.validation_after,
        "stopped": outcome.stopped_by,
        "said": console.export_text(),
    }


def refused(rank: int, values: dict[str, Any], missing_on: int | None) -> str:
    """What the rank is told when the text is missing on one of them."""
    if rank == missing_on:
        values = {**values, "data": "nowhere"}
    with pytest.raises((ConfigError, RemoteRankError)) as caught:
        train(TrainConfig.model_validate(values))
    return str(caught.value)


# -- tests


def _contents(checkpoint: Path) -> dict[str, str]:
    """A digest of every file but those with the time or the run's name in it."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.iterdir()
        if path.suffix == ".distcp" or path.name == "tensors.json"
    }


def test_a_resumed_run_equals_an_uninterrupted_one(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    values |= {"strategy": "fsdp2-stream", "ema": {"decay": 0.9, "validation": True}}
    whole, other = pool.run(run, 2, values=values, name="whole")
    assert whole["losses"] == other["losses"] and whole["after"] == other["after"], "means over the ranks"
    assert "validation loss after" in whole["said"] and "sample 1 of 1" in whole["said"] and other["said"] == ""
    first, _ = pool.run(run, 2, values=values, name="cut", stop=3)
    assert (first["stopped"], first["step"]) == (signal.SIGTERM, 3) and "stopped after step 3" in first["said"]
    second, _ = pool.run(run, 2, values=values, name="cut", resume=True)
    assert "checkpoint-3" in second["said"] and "warning" not in second["said"]
    assert first["losses"] | second["losses"] == whole["losses"] and second["after"] == whole["after"]
    ends = [_contents(tmp_path / "runs" / name / "checkpoint-4") for name in ("whole", "cut")]
    assert ends[0] == ends[1] and len(ends[0]) > 1
    folder = tmp_path / "runs/cut"
    (folder / "checkpoint-4/lightstep.json").unlink()
    again, other = pool.run(run, 2, values=values, name="cut", resume=True)
    assert "checkpoint-3" in again["said"] and again["after"] == other["after"] == whole["after"]
    assert (folder / "checkpoint-4/lightstep.json").is_file()
    assert [path.name for path in folder.glob("checkpoint-4.*")] == ["checkpoint-4.1"], "moved aside once"


def test_a_resumed_run_under_deepspeed_equals_an_uninterrupted_one(
    pool: Pool, values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {"strategy": "deepspeed-zero2", "checkpoint": {"every": 2, "keep": 1}}
    whole, other = pool.run(run, 2, values=values, name="whole")
    first, _ = pool.run(run, 2, values=values, name="cut", stop=2)
    second, _ = pool.run(run, 2, values=values, name="cut", resume=True)
    assert whole["losses"] == other["losses"] == first["losses"] | second["losses"]
    assert whole["after"] == second["after"] < whole["before"] and "sample 1 of 1" in whole["said"]
    assert [path.name for path in (tmp_path / "runs" / "cut").glob("checkpoint-*")] == ["checkpoint-4"]
    assert (tmp_path / "runs" / "cut" / "model" / "model.safetensors").is_file()


def test_a_run_with_divided_weights_under_deepspeed(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    values |= {"strategy": "deepspeed-zero3", "steps": 2, "name": "a"}
    first, second = pool.run(run, 2, values=values)
    assert first["losses"] == second["losses"] and first["after"] < first["before"]
    assert "sample 1 of 1" in first["said"] and (tmp_path / "runs" / "a" / "model" / "model.safetensors").is_file()


def test_two_ranks_train_on_the_batch_of_one(pool: Pool, values: dict[str, Any]) -> None:
    quiet = {**MODEL, "attention_dropout": 0.0}  # each rank draws its own
    values |= {"model": {"config": quiet}, "strategy_overrides": {"precision.parameters": "float32"}}
    several = [pool.run(run, 2, values=values, name=s, strategy=s)[0] for s in ("ddp", "fsdp2")]
    values |= {"name": "one", "strategy": "fp32", "strategy_overrides": {}}
    (one,) = pool.run(run, 1, values=values)
    for outcome in several:
        assert outcome["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert [outcome["before"], outcome["after"]] == pytest.approx([one["before"], one["after"]], rel=1e-4)


def run_in_parts(rank: int, world_size: int, **arguments: Any) -> dict[str, Any]:
    """`run`, on which no rank may read the whole folder."""
    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", None):
        return run(rank, world_size, **arguments)


def test_each_rank_reads_its_part_of_a_folder(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("red green blue " * 2000)
    folder, tokenizer = tmp_path / "folder", word_tokenizer()
    config = AutoConfig.for_model(**{**MODEL, "attention_dropout": 0.0}, vocab_size=8, max_position_embeddings=32)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="8KB")
    tokenizer.save_pretrained(folder)
    values |= {"model": str(folder), "steps": 2, "sample": None}
    (whole,) = pool.run(run, 1, values=values, name="whole", strategy="resident")
    first, _ = pool.run(run_in_parts, 2, values=values, name="parts", strategy="fsdp2")
    assert (folder / "model.safetensors.index.json").is_file()
    assert first["before"] == pytest.approx(whole["before"], rel=1e-6), "the folder's weights"
    assert first["losses"] == pytest.approx(whole["losses"], rel=1e-2)


def test_what_one_rank_finds_wrong_ends_all(pool: Pool, values: dict[str, Any], tmp_path: Path) -> None:
    """Text that is missing on one of them, and a folder that is no run."""
    values["strategy"] = "fsdp2"
    for rank in range(2):
        told = pool.run(refused, 2, values=values, missing_on=rank)
        assert all("data.path nowhere does not exist" in text for text in told)
        assert told[1 - rank].startswith(f"rank {rank}: ")
    (tmp_path / "runs/train").mkdir(parents=True)
    (tmp_path / "runs/train/thesis.txt").write_text("precious")
    told = pool.run(refused, 2, values=values, missing_on=None)
    assert all("is not a run of lightstep" in text for text in told)
    assert [path.name for path in (tmp_path / "runs/train").iterdir()] == ["thesis.txt"]


def check_newest(rank: int, folder: str) -> list[str]:
    """What is resumed from, where each rank has a disk of its own."""
    own, ranks = Path(folder) / f"disk{rank}", Ranks()
    strategy = lightstep.Strategy.load("fsdp2")
    model = strategy.prepare_model(torch.nn.Linear(8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightstep.checkpoint.disks.is_seen", lambda mark, path: False)
        for step in range(1, 5):
            strategy.save_checkpoint(own / f"checkpoint-{step}", model)
    timed_out = mock.patch.object(LocalStorage, "read", side_effect=TimeoutError(110, "Connection timed out"))
    with timed_out if rank == 1 else nullcontext(), pytest.raises((CheckpointError, RemoteRankError)) as raised:
        newest_undamaged(own, ranks)
    assert "timed out); try again, or move" in str(raised.value) and "disk1/checkpoint-4 away" in str(raised.value)
    found = [newest_undamaged(own, ranks)]
    if rank == 1:
        (own / "checkpoint-4").rename(own / "lost")
    found.append(newest_undamaged(own, ranks))
    if rank == 1:
        file = next((own / "checkpoint-3").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    found.append(newest_undamaged(own, ranks))
    if rank == 0:
        own.rename(own.with_name("gone"))
    with pytest.raises(ConfigError) as raised:
        newest_undamaged(own, ranks)
    assert all(path is not None and path.parent == own for path in found)
    return [*(path.name for path in found if path is not None), str(raised.value)]


def test_all_parts_of_what_is_resumed_are_whole(pool: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(pool.run(check_newest, 2, group=True, folder=str(tmp_path))):
        *names, refused = found
        assert names == ["checkpoint-4", "checkpoint-3", "checkpoint-2"]
        assert re.search(
            rf"rank 0 on \S+ has no checkpoints in {tmp_path}/disk{rank}, and rank 1 on \S+ has checkpoint-3, checkp",
            refused,
        )
