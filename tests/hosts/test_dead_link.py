"""The link to the other host goes down, or a rank there is killed: the ranks that are left end, and say who is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hosts.hosts import ADDRESSES, NAMES, Hosts
from tests.hosts.test_checkpoints import Run

TIMEOUT_S = 8
"""Of one collective."""


def check_failure(rank: int, world_size: int, disk: str, what: str) -> None:
    """Trains until all is ready and the test has cut the link, then goes on."""
    run = Run("hsdp-stream" if what == "hsdp" else "fsdp2")
    run.train()
    answers = Path(os.environ["ANSWERS"])
    (answers / f"ready{rank}").write_text(str(os.getpid()))
    while not (answers / "go").exists():
        time.sleep(0.05)
    started = time.monotonic()
    try:
        if what == "save":
            run.save(f"{disk}/link-down")
        else:
            for _ in range(1000):
                run.train()
                (answers / f"trains{rank}").touch()
    finally:
        (answers / f"seconds{rank}").write_text(f"{time.monotonic() - started}")


FIRST = f"on {NAMES[0]} does not reach ranks 2, 3 on {NAMES[1]}: the processes ended, or the network to them is down"
SECOND = (
    f"on {NAMES[1]} does not reach {ADDRESSES[0]}, where rank 0 is: its processes ended, or the network to it is down"
)


@pytest.mark.parametrize("what", ["step", "save", "hsdp"])
def test_the_link_goes_down(hosts: Hosts, what: str) -> None:
    """``step``: at any moment of training, with interpreters that end by themselves. Else before the next step, or the
    save, begins."""
    forks = what != "step"
    with hosts.started(check_failure, timeout_s=TIMEOUT_S, forks=forks, disk=str(hosts.disk), what=what) as run:
        for rank in range(4):
            run.wait(f"ready{rank}")
        if what == "step":
            (run.answers / "go").touch()
            for rank in range(4):
                run.wait(f"trains{rank}")
        hosts.set_link("down")
        try:
            (run.answers / "go").touch()
            for rank in range(4):
                ok, text = run.outcome(rank)
                assert not ok
                if what == "save":
                    assert f"CheckpointError: {hosts.disk}/link-down was not saved: rank {rank} on" in text
                    assert (FIRST if rank < 2 else SECOND) in text
                assert float(run.wait(f"seconds{rank}")) < 10 * TIMEOUT_S
            for name, sentence in zip(NAMES, (FIRST, SECOND), strict=True):
                run.wait_for_line(f"{name}.log", sentence)
            run.wait_for_end(0)
        finally:
            hosts.set_link("up")
    assert not any((disk / "link-down").exists() for disk in hosts.disks)


def test_a_rank_of_the_other_host_is_killed(hosts: Hosts) -> None:
    with hosts.started(check_failure, timeout_s=TIMEOUT_S, disk=str(hosts.disk), what="step") as run:
        pids = [int(run.wait(f"ready{rank}")) for rank in range(4)]
        (run.answers / "go").touch()
        os.kill(pids[3], signal.SIGKILL)
        run.wait_for_line(f"{NAMES[0]}.log", f"on {NAMES[0]} does not reach rank")
        run.wait_for_end(0)
