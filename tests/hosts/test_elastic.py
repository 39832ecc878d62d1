"""A host is killed, comes back or does not: the run resumes by itself on the hosts that are there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lightstep.checkpoint.layout import MANIFEST
from tests.elastic_run import Options, steps_of, training_file
from tests.hosts.hosts import Hosts
from tests.measure_kills import FORKING, Found, Kill, Launcher, TwoHosts, run_with_kills, uninterrupted, wait_for_step
from tests.patience import PATIENCE

KILLS = [
    Kill(rank=0, phase="backward", delay=0, steps=2, host=0),
    Kill(rank=1, phase="save", delay=0.02, steps=1, host=1),
]
STEPS = 12


def options_in(folder: Path) -> Options:
    places = [folder / kind for kind in ("checkpoints", "notes")]
    for place in places:
        place.mkdir(parents=True)
    return Options(*map(str, places), steps=STEPS)


@pytest.fixture
def fixed(hosts: Hosts, tmp_path: Path) -> Iterator[TwoHosts]:
    cluster = TwoHosts(hosts, tmp_path, launcher=FORKING, each=1)
    yield cluster
    cluster.close()


@pytest.fixture
def elastic(hosts: Hosts, tmp_path: Path) -> Iterator[TwoHosts]:
    cluster = TwoHosts(hosts, tmp_path, nodes="1:2", launcher=FORKING, each=1)
    yield cluster
    cluster.close()


def test_a_host_comes_back(fixed: TwoHosts, tmp_path: Path) -> None:
    expected, found = uninterrupted(fixed, options_in(tmp_path / "whole")), Found()
    while len(found.kills) < len(KILLS):  # a run may end before its time has come on a busy machine
        left = KILLS[len(found.kills) :]
        run_with_kills(fixed, options_in(tmp_path / f"killed-{found.runs}"), expected, left, found)
    assert all(kill.from_newest and kill.equal for kill in found.kills), found.kills
    assert found.equal_ends == found.runs


def test_a_run_goes_on_with_fewer_hosts_and_then_with_more(elastic: TwoHosts, tmp_path: Path) -> None:
    """What is loaded has the bits of what was saved, and the loss goes on as it was."""
    options = options_in(tmp_path)
    notes = Path(options.notes)
    elastic.start(replace(options, steps=100_000))
    saved = wait_for_step(lambda step: step.ranks == 2 and step.number > options.save_every, elastic, notes)
    elastic.kill_host(1, comes_back=False)
    fewer = wait_for_step(lambda step: step.ranks == 1 and step.started > saved.time, elastic, notes)
    wait_for_step(lambda step: step.ranks == 1 and step.number > fewer.resumed + options.save_every, elastic, notes)
    elastic.bring_back(1)
    more = wait_for_step(lambda step: step.ranks == 2 and step.started > fewer.time, elastic, notes)
    elastic.close()
    assert fewer.resumed >= options.save_every and more.resumed > fewer.resumed
    for resumed in (fewer, more):
        before = [step for step in steps_of(notes) if step.started < resumed.started]
        at_save = next(step for step in reversed(before) if step.number == resumed.resumed)
        assert resumed.resumed_checksum == at_save.checksum
        again = [step.loss for step in before if step.number == resumed.number]
        assert all(abs(loss - resumed.loss) < 0.02 for loss in again)


LAST = "checkpoint-16"


@dataclass(frozen=True)
class Named:
    """A run of ``lightstep train``."""

    name: str

    @property
    def text(self) -> str:
        return f"--set=name={self.name}"


@pytest.fixture
def training(hosts: Hosts, tmp_path: Path) -> Iterator[TwoHosts]:
    """``lightstep train``, with checkpoints on each host's own disk."""
    file = training_file(tmp_path, output=hosts.disk, steps=16)
    program = ["lightstep", "train", str(file), "--resume", "auto"]
    cluster = TwoHosts(hosts, tmp_path, launcher=Launcher(FORKING.module, program), each=1)
    yield cluster
    cluster.close()


def finished(training: TwoHosts, hosts: Hosts, name: str) -> list[dict[str, bytes]]:
    """What each host's part of the last checkpoint has: tensors, and where they are."""
    assert training.wait() == 0, training.logs()
    parts = [disk / name / LAST for disk in hosts.disks]
    files = ("*.distcp", "tensors.json")
    return [{path.name: path.read_bytes() for each in files for path in part.glob(each)} for part in parts]


def test_lightstep_train_without_a_shared_disk(training: TwoHosts, hosts: Hosts) -> None:
    """The host with the first rank is killed."""
    training.start(Named("trained"))
    expected = finished(training, hosts, "trained")
    assert [set(part) for part in expected] == [{f"__{rank}_0_0.distcp", "tensors.json"} for rank in range(2)]
    training.start(Named("interrupted"))
    end = time.monotonic() + PATIENCE
    while not all((disk / "interrupted/checkpoint-4" / MANIFEST).exists() for disk in hosts.disks):
        assert training.is_running() and time.monotonic() < end, training.logs()
        time.sleep(0.01)
    training.kill_host(0)
    assert finished(training, hosts, "interrupted") == expected
    assert "continuing from" in training.logs()
