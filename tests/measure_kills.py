"""Kills of ranks and hosts: torchrun starts the run again, it resumes, and ends as if nothing had happened.

``python -m tests.measure_kills --help`` measures; ``tests/distributed/test_elastic.py`` and
``tests/hosts/test_elastic.py`` do less of the same. A run has two ranks on one host or, with ``--hosts``, on two hosts
of two ranks, which needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightstep.checkpoint import latest_checkpoint
from tests.elastic_run import PHASES, Options, Step, place_of, steps_of
from tests.forking_torchrun import Torchrun
from tests.hosts.hosts import ADDRESSES, NAMES, PORT, RANKS, HostProcess, Hosts
from tests.patience import PATIENCE

RESTARTS = 60
"""More than a run needs."""


@dataclass(frozen=True)
class Launcher:
    """What starts the ranks."""

    module: str
    program: Sequence[str]
    """Before the options of the run."""


class Program(Protocol):
    """What distinguishes a run."""

    @property
    def text(self) -> str:
        """The last argument of the program."""


TORCHRUN = Launcher("torch.distributed.run", ["-m", "tests.elastic_run"])
FORKING = Launcher("tests.forking_torchrun", ["tests.elastic_run"])
"""torchrun's agent, whose ranks do not import torch again."""


ALONE = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
"""What torchrun's ``--standalone`` stands for."""


@dataclass(frozen=True)
class Kill:
    """What is killed, and when."""

    rank: int
    """Its process is watched, and killed if ``host`` is ``None``."""
    phase: str
    """What the rank is doing then."""
    delay: float
    """Seconds since it has begun that."""
    steps: int
    """The run does this many steps first, since it was resumed."""
    host: int | None = None
    """All of this host is killed."""


@dataclass(frozen=True)
class Killed:
    """What came of it."""

    phase: str
    """What the rank was doing when it ended."""
    host: bool
    seconds: float
    """From the kill to the end of the first step after it."""
    from_newest: bool
    """The newest whole checkpoint was resumed from."""
    equal: bool
    """What was loaded, and the state after the first new step, are those of the uninterrupted run."""


@dataclass
class Found:
    """The kills of all runs, and how these ended."""

    kills: list[Killed] = field(default_factory=list)
    runs: int = 0
    equal_ends: int = 0

    def __str__(self) -> str:
        seconds = [kill.seconds for kill in self.kills]
        phases = Counter(kill.phase for kill in self.kills)
        hosts = sum(kill.host for kill in self.kills)
        newest, equal = sum(kill.from_newest for kill in self.kills), sum(kill.equal for kill in self.kills)
        lines = [
            f"kills {len(self.kills)}, of a host {hosts}; in "
            + ", ".join(f"{phase} {count}" for phase, count in phases.items()),
            f"resumes {len(self.kills)}, of the newest whole checkpoint {newest}, equal {equal}",
            f"runs {self.runs}, equal ends {self.equal_ends}",
        ]
        if seconds:
            lines.append(
                f"seconds from a kill to the first new step: minimum {min(seconds):.1f}, median "
                f"{statistics.median(seconds):.1f}, maximum {max(seconds):.1f}"
            )
        return "\n".join(lines)


class OneHost:
    """torchrun with two ranks, which restarts them."""

    ranks = 2

    def __init__(self, folder: Path, launcher: Launcher = TORCHRUN) -> None:
        self._folder, self._launcher = folder, launcher
        self._torchrun: subprocess.Popen[bytes] | Torchrun | None = None

    def start(self, options: Options) -> None:
        switches = [*ALONE, f"--nproc-per-node={self.ranks}", f"--max-restarts={RESTARTS}"]
        arguments = [*switches, *self._launcher.program, options.text]
        if self._launcher is FORKING:
            self._torchrun = Torchrun(arguments, self._folder / "log")
            return
        command = [sys.executable, "-m", self._launcher.module, *arguments]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with (self._folder / "log").open("ab") as log:
            self._torchrun = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill_host(self, host: int) -> None:
        raise AssertionError("there is one host")

    def is_running(self) -> bool:
        assert self._torchrun is not None
        return self._torchrun.poll() is None

    def wait(self) -> int:
        """torchrun's exit code."""
        assert self._torchrun is not None
        return self._torchrun.wait(PATIENCE)

    def close(self) -> None:
        if self._torchrun is not None and self.is_running():
            self._torchrun.terminate()  # it ends its ranks
            self._torchrun.wait(PATIENCE)

    def logs(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-10_000:]


class TwoHosts:
    """torchrun on both hosts. The store of the rendezvous outlives them, as one on a third host does.

    Args:
        nodes: torchrun's ``--nnodes``.
        each: ranks of each host.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, nodes: str = "2", launcher: Launcher = TORCHRUN, each: int = RANKS
    ) -> None:
        self._hosts, self._folder, self._nodes, self._launcher, self._each = hosts, folder, nodes, launcher, each
        self.ranks = each * len(NAMES)
        self._processes: list[HostProcess] = []
        self._options: Program | None = None
        self._runs = 0
        store = ["tests.hosts.store", ADDRESSES[0], str(PORT + 1)]
        self._store = hosts.start(0, folder / "store.log", store)

    def start(self, options: Program) -> None:
        self._options = options
        self._runs += 1
        self._processes = [self.start_host(host) for host in range(len(NAMES))]

    def start_host(self, host: int) -> HostProcess:
        assert self._options is not None
        return self._hosts.torchrun(
            host,
            self._folder,
            [*self._launcher.program, self._options.text],
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            self._launcher.module,
            rdzv_id=self._runs,  # a rendezvous is over when its run is
            nnodes=self._nodes,
            nproc_per_node=self._each,
            max_restarts=RESTARTS,
            rdzv_endpoint=f"{ADDRESSES[0]}:{PORT + 1}",
            rdzv_conf="is_host=0,last_call_timeout=2,keep_alive_interval=1",
        )

    def kill_host(self, host: int, comes_back: bool = True) -> None:
        self._hosts.kill(host, spared=[self._store.pid])
        self._processes[host].wait(PATIENCE)
        if comes_back:
            self.bring_back(host)

    def bring_back(self, host: int) -> None:
        self._processes[host] = self.start_host(host)

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def wait(self) -> int:
        """torchrun's exit code; the highest of the two."""
        return max(process.wait(PATIENCE) for process in self._processes)

    def close(self) -> None:
        for host in range(len(NAMES)):
            self._hosts.kill(host)
        for process in [*self._processes, self._store]:
            process.wait(PATIENCE)

    def logs(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-10_000:] for log in sorted(self._folder.glob("*.log")))


def uninterrupted(cluster: Any, options: Options) -> dict[int, int]:
    """The checksum after each step, and of the initial values, of a run that nobody kills."""
    cluster.start(options)
    assert cluster.wait() == 0, cluster.logs()
    return checksums(steps_of(Path(options.notes)))


def checksums(steps: Sequence[Step]) -> dict[int, int]:
    """By the number of steps that had ended, of a run from its beginning."""
    return {step.number: step.checksum for step in steps} | {steps[0].resumed: steps[0].resumed_checksum}


def run_with_kills(
    cluster: Any, options: Options, expected: dict[int, int], kills: Sequence[Kill], found: Found
) -> None:
    """One run, with as many of the kills as there is time for before its last steps."""
    notes = Path(options.notes)
    cluster.start(options)
    for kill in kills:
        if not _wait_for(kill, cluster, options):
            break
        found.kills.append(_carry_out(kill, cluster, options, expected))
    code = cluster.wait()
    assert code == 0, cluster.logs()
    steps = steps_of(notes)
    found.runs += 1
    found.equal_ends += steps[-1].number == options.steps and all(
        step.checksum == expected[step.number] for step in steps
    )


def _wait_for(kill: Kill, cluster: Any, options: Options) -> bool:
    """Wait until it is time. ``False`` if the run is about to end."""
    notes, end = Path(options.notes), time.monotonic() + PATIENCE
    while True:
        assert cluster.is_running() and time.monotonic() < end, cluster.logs()
        place = place_of(notes, kill.rank)
        if place is not None and place.phase == "end":
            return False
        if place is not None and place.phase == kill.phase and (steps := steps_of(notes)):
            if steps[-1].number > options.steps - 2 * options.save_every:
                return False
            if steps[-1].number >= steps[-1].resumed + kill.steps:
                time.sleep(kill.delay)
                return True
        time.sleep(0.001)


def _carry_out(kill: Kill, cluster: Any, options: Options, expected: dict[int, int]) -> Killed:
    folder, notes = Path(options.folder), Path(options.notes)
    place = place_of(notes, kill.rank)
    assert place is not None
    began = time.time()
    if kill.host is None:
        os.kill(place.process, signal.SIGKILL)
    else:
        cluster.kill_host(kill.host)
    died = place_of(notes, kill.rank)
    newest = latest_checkpoint(folder)
    step = wait_for_step(lambda step: step.started > began, cluster, notes)
    return Killed(
        died.phase if died is not None else place.phase,
        kill.host is not None,
        step.time - began,
        newest is None or step.resumed >= int(newest.name.removeprefix("step-")),
        step.resumed_checksum == expected[step.resumed] and step.checksum == expected[step.number],
    )


def wait_for_step(matches: Callable[[Step], bool], cluster: Any, notes: Path) -> Step:
    """The first step that matches, once it has ended."""
    end = time.monotonic() + PATIENCE
    while True:
        step = next(filter(matches, steps_of(notes)), None)
        if step is not None:
            return step
        assert cluster.is_running() and time.monotonic() < end, cluster.logs()
        time.sleep(0.02)


def random_kills(chance: random.Random, ranks: int, count: int, saves: int, hosts: int = 0) -> list[Kill]:
    """Kills in all phases in random order: ``saves`` of them while a checkpoint is written, ``hosts`` of a host."""
    phases = ["save"] * saves + [chance.choice(PHASES[:3]) for _ in range(count - saves)]
    of_host = [True] * hosts + [False] * (count - hosts)
    chance.shuffle(phases)
    chance.shuffle(of_host)
    found = []
    for phase, whole in zip(phases, of_host, strict=True):
        rank = chance.randrange(ranks)
        delay = chance.random() * (0.1 if phase == "save" else 0.01)
        found.append(Kill(rank, phase, delay, chance.randrange(1, 8), rank // RANKS if whole else None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--saves", type=int, default=4, help="so many of them while a checkpoint is written")
    parser.add_argument("--hosts", type=int, default=0, help="two hosts, and so many of the kills are of a whole host")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--fork", action="store_true", help="ranks are forked, and import nothing when they start again"
    )
    asked = parser.parse_args()
    launcher = FORKING if asked.fork else TORCHRUN
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # torchrun must not outlive it
    found, number = Found(), 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.hosts:
            cluster: Any = TwoHosts(stack.enter_context(Hosts(folder)), folder, launcher=launcher)
        else:
            cluster = OneHost(folder, launcher)
        stack.callback(cluster.close)

        def options() -> Options:
            nonlocal number
            number += 1
            checkpoints, notes = (folder / f"{kind}-{number}" for kind in ("checkpoints", "notes"))
            for place in (checkpoints, notes):
                place.mkdir()
            return Options(str(checkpoints), str(notes), asked.steps, asynchronous=asked.asynchronous)

        expected = uninterrupted(cluster, options())
        planned = random_kills(random.Random(asked.seed), cluster.ranks, asked.kills, asked.saves, asked.hosts)
        while len(found.kills) < len(planned):
            run_with_kills(cluster, options(), expected, planned[len(found.kills) :], found)
            sys.stdout.write(f"{found}\n\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
