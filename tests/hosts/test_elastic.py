"""A host is killed, comes back or does not: the run resumes by itself on the hosts that are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.elastic_run import Options, steps_of
from tests.hosts.hosts import Hosts
from tests.measure_kills import FORKING, Found, Kill, TwoHosts, run_with_kills, uninterrupted, wait_for_step

KILLS = [
    Kill(rank=0, phase="backward", delay=0, steps=2, host=0),
    Kill(rank=1, phase="save", delay=0.02, steps=1, host=1),
]
STEPS = 18


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
