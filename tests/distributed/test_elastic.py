"""Ranks are killed: torchrun starts them again, and the run ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from lightstep.checkpoint.layout import MANIFEST
from lightstep.strategy import launch
from tests import elastic_run
from tests.distributed.ranks import Pool
from tests.distributed.test_trainer_ranks import _contents, run
from tests.elastic_run import Options, training_file
from tests.forking_torchrun import Torchrun
from tests.measure_kills import ALONE, FORKING, Found, Kill, OneHost, checksums, run_with_kills
from tests.patience import PATIENCE

KILLS = {
    "synchronous": [
        Kill(rank=1, phase="forward", delay=0, steps=1),
        Kill(rank=0, phase="save", delay=0.01, steps=2),
    ],
    "asynchronous": [
        Kill(rank=0, phase="step", delay=0, steps=4),
        Kill(rank=1, phase="save", delay=0.03, steps=1),
    ],
}
STEPS = 12
ON_HOST = {
    "sharding": {"kind": "fsdp2"},
    "optimizer_state": {"backend": "stream", "ring_mib": 1, "update": "next_forward"},
    "weights": {"placement": "host", "device_mib": 1},
}


def _options(folder: Path, asynchronous: bool = False) -> Options:
    places = [folder / kind for kind in ("checkpoints", "notes")]
    for place in places:
        place.mkdir(parents=True)
    more = {"strategy": ON_HOST} if asynchronous else {}
    return Options(*map(str, places), STEPS, asynchronous=asynchronous, **more)


def run_elastic(options: Options) -> None:
    elastic_run.run(options)


@pytest.fixture(scope="module")
def expected(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """The checksum after each step of a run that nobody kills, on the CPU as the others."""
    options = _options(tmp_path_factory.mktemp("whole"))
    pool.run(run_elastic, 2, group=False, cpu=True, options=options)
    return checksums(elastic_run.steps_of(Path(options.notes)))


@pytest.mark.parametrize("saves", KILLS)
def test_kills(tmp_path: Path, saves: str, expected: dict[int, int]) -> None:
    """In a step, whose phases leave the same files, and while a checkpoint is written.

    With shards on the device, and on the host if saves are asynchronous: the bits are the same.
    """
    cluster, found = OneHost(tmp_path, FORKING), Found()
    try:
        while len(found.kills) < len(KILLS[saves]):  # a run may end before its time has come on a busy machine
            options = _options(tmp_path / f"killed-{found.runs}", saves == "asynchronous")
            run_with_kills(cluster, options, expected, KILLS[saves][len(found.kills) :], found)
    finally:
        cluster.close()
    assert all(kill.from_newest and kill.equal for kill in found.kills), found.kills
    assert found.equal_ends == found.runs
    for number in range(found.runs):
        left = {path.name for path in (tmp_path / f"killed-{number}/checkpoints").iterdir()}
        assert left == {"step-9", "step-12"}


LATE = """
import os, time
import lightstep, torch

restarts, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
if restarts and rank == 0:
    time.sleep(2)  # until the other rank has looked in the store for the first one's address
with lightstep.Strategy.load("ddp") as strategy:
    strategy.start()
    torch.distributed.all_reduce(torch.ones(1))
    if not restarts:
        os._exit(rank)  # the second rank fails
"""


def test_a_restarted_rank_does_not_look_for_one_that_has_ended(tmp_path: Path) -> None:
    """torchrun's store still has the addresses of the first try."""
    (tmp_path / "late.py").write_text(LATE)
    ended = _torchrun(["--max-restarts=1", str(tmp_path / "late.py")], tmp_path).wait(PATIENCE)
    assert ended == 0, (tmp_path / "log").read_text()


def test_a_rank_that_asked_and_then_ended_is_named() -> None:
    """The first rank does not answer it for ever."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    store.set("lightstep-question-1", "of a process that has ended")
    with pytest.raises(RuntimeError, match=r"rank 1 has not joined the process group within 0\.3 s"):
        launch._fresh_prefix(store, rank=0, world_size=2)


def test_lightstep_train_goes_on_by_itself(pool: Pool, tmp_path: Path) -> None:
    """After a rank was killed, until torchrun gets a signal. One rank reports. Shards on the host change no bits."""
    config = training_file(tmp_path, output=tmp_path / "runs", steps=100_000, strategy="fsdp2-offload")
    program = ["lightstep", "train", str(config), "--resume", "auto"]
    killed = _torchrun(["--max-restarts=1", *program, "--set", "name=killed", "--set", "log_every=1"], tmp_path)

    def wait_until(happened: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            assert killed.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.01)

    log = tmp_path / "log"
    try:
        wait_until((tmp_path / "runs/killed/checkpoint-4" / MANIFEST).exists)  # a folder alone asks a network disk
        os.kill(_children(killed.pid)[-1], signal.SIGKILL)
        wait_until(lambda: re.search(r"continuing from.*\bstep \d+/", log.read_text(), re.DOTALL))
    finally:
        killed.terminate()
    assert killed.wait(PATIENCE) == 1, "torchrun's own"
    said = log.read_text()
    found = re.findall(r"SIGTERM: stopped after step (\d+); continue from \S*checkpoint-\1 with --resume", said)
    assert len(found) == said.count("continuing from") == said.count("validation loss before") - 1 == 1, said
    values = {**yaml.safe_load(config.read_text()), "name": "whole", "strategy": "fsdp2", "checkpoint": {"every": 0}}
    pool.run(run, 2, group=False, cpu=True, values=values, stop=int(found[0]))
    runs = [tmp_path / "runs" / name / f"checkpoint-{found[0]}" for name in ("whole", "killed")]
    assert _contents(runs[0]) == _contents(runs[1])


def _torchrun(arguments: list[str], folder: Path) -> Torchrun:
    return Torchrun([*ALONE, "--nproc-per-node=2", *arguments], folder / "log")


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
