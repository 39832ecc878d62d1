"""Two hosts on one machine: network namespaces with a link between them, and torchrun on both.

Each host has a network, a name and mounts of its own. ``Hosts.disk`` is one path
with another folder behind it on each host; all other paths are the same files on both. The namespaces end with the
process that holds them, so nothing is left when a test is killed. Making them needs root and ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.forked import Forked
from tests.patience import PATIENCE

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.213.0.1", "10.213.0.2")
RANKS = 2
"""Ranks of each host."""
LINK = "link0"
TORCHRUN = "torch.distributed.run"
PORT = 29400


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot play two hosts; ``None`` if it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "try0", "type", "veth", "peer", "try1"],
        capture_output=True,
        text=True,
    )
    return made.stderr.strip() or "unshare failed" if made.returncode else None


@functools.cache
def lacks_discipline(name: str) -> str | None:
    """Why links cannot have a queueing discipline here (``tbf``, ``netem``); ``None`` if they can."""
    if shutil.which("tc") is None:
        return "tc not found"
    made = subprocess.run(
        ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *name.split()], capture_output=True, text=True
    )
    return made.stderr.strip() or "tc failed" if made.returncode else None


class Hosts:
    """Two hosts. Their folders and what their ranks return are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.disks = tuple(folder / name for name in NAMES)
        """What is behind :attr:`disk`, by host."""
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        self.disk.mkdir(exist_ok=True)
        try:
            for name, disk in zip(NAMES, self.disks, strict=True):
                disk.mkdir(exist_ok=True)
                self._holders.append(_hold(name, disk, self.disk))
            first, second = (str(holder.pid) for holder in self._holders)
            _run("ip", "link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
            for host, address in enumerate(ADDRESSES):
                self.on(host, "ip", "link", "set", "lo", "up")
                self.on(host, "ip", "address", "add", f"{address}/24", "dev", LINK)
                self.on(host, "ip", "link", "set", LINK, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host, holder in enumerate(self._holders):
            self.kill(host)
            holder.kill()
        for holder in self._holders:
            holder.wait()

    def on(self, host: int, *command: str) -> str:
        """Run a command on a host. Returns its output.

        Raises:
            OSError: it failed.
        """
        return _run(*self._inside(host), *command)

    def set_link(self, state: str) -> None:
        """``"up"`` or ``"down"``: a link that is down drops what is sent, and neither side is told."""
        self.on(1, "ip", "link", "set", LINK, state)

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """The link is down in this block."""
        self.set_link("down")
        try:
            yield
        finally:
            self.set_link("up")

    @contextlib.contextmanager
    def lost_packets(self, port: int) -> Iterator[None]:
        """What a connection with this port on the first host sends is lost."""
        rule = ["ipproto", "tcp", "sport", str(port), "blackhole"]
        self.on(0, "ip", "rule", "add", *rule)
        try:
            yield
        finally:
            self.on(0, "ip", "rule", "del", *rule)

    @contextlib.contextmanager
    def slow_link(self, *discipline: str) -> Iterator[None]:
        """The link delays, or drops, what either host sends, as a queueing discipline of ``tc`` says."""
        for host in range(len(NAMES)):
            self.on(host, "tc", "qdisc", "add", "dev", LINK, "root", *discipline)
        try:
            yield
        finally:
            for host in range(len(NAMES)):
                self.on(host, "tc", "qdisc", "del", "dev", LINK, "root")

    def held_back(self) -> int:
        """How often the discipline of the first host's end of the link has delayed or dropped packets."""
        told = self.on(0, "tc", "-s", "-j", "qdisc", "show", "dev", LINK)
        return sum(int(each["drops"]) + int(each["overlimits"]) for each in json.loads(told))

    def run(self, check: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What ``check(rank, world_size, **arguments)`` returned, by rank.

        Raises:
            AssertionError: with every failed rank's traceback.
        """
        with self.started(check, **arguments) as run:
            return run.results()

    @contextlib.contextmanager
    def started(
        self,
        check: Callable[..., Any],
        timeout_s: float = PATIENCE,
        on: Sequence[int] = range(len(NAMES)),
        forks: bool = True,
        **arguments: Any,
    ) -> Iterator[Run]:
        """torchrun on both hosts, which calls ``check(rank, world_size, **arguments)`` on every rank.

        Args:
            check: importable.
            timeout_s: of one collective.
            on: the hosts; with the first one.
            forks: ranks are forked, and need not import torch. Their end is not that of an interpreter.
            arguments: as JSON has them.
        """
        answers = self.folder / f"answers-{time.monotonic_ns()}"
        answers.mkdir()
        program = [f"{check.__module__}:{check.__qualname__}", json.dumps(arguments), str(answers), str(timeout_s)]
        options = {"nnodes": len(on), "launcher": "tests.forking_torchrun" if forks else TORCHRUN}
        module = [*([] if forks else ["-m"]), "tests.hosts.rank", *program]
        processes = [self.torchrun(host, answers, module, rdzv_conf=f"is_host={1 - host}", **options) for host in on]
        try:
            yield Run(answers, processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def torchrun(
        self,
        host: int,
        answers: Path,
        program: Sequence[str],
        environment: Mapping[str, str] | None = None,
        launcher: str = TORCHRUN,
        **changes: Any,
    ) -> HostProcess:
        """torchrun on one host. Its output is added to a log in ``answers``, whose name is that of the run.

        Args:
            launcher: a module with torchrun's options.
            changes: options of torchrun, with underscores.
        """
        options = {
            "nnodes": len(NAMES),
            "nproc_per_node": RANKS,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"{ADDRESSES[0]}:{PORT}",
            "rdzv_id": answers.name,
            "local_addr": ADDRESSES[host],
            **changes,
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [launcher, *arguments, *program]
        return self.start(host, answers / f"{NAMES[host]}.log", command, environment)

    def start(
        self, host: int, log: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> HostProcess:
        """``python -m`` with these arguments on a host, in a session of its own. Its output is added to ``log``."""
        defaults = {"GLOO_SOCKET_IFNAME": LINK, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **defaults, **(environment or {})}
        return HostProcess(self._holders[host].pid, log, command, variables)

    def kill(self, host: int, spared: Collection[int] = ()) -> None:
        """Kill all processes of a host at once, as when its power fails.

        Args:
            spared: processes that stay, as if they were on a third host.
        """
        network = os.readlink(f"/proc/{self._holders[host].pid}/ns/net")
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if process in {self._holders[host].pid, *spared}:
                continue
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{process}/ns/net") == network:
                    os.kill(process, signal.SIGKILL)

    def _inside(self, host: int) -> list[str]:
        where = ["--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        return ["nsenter", "--target", str(self._holders[host].pid), *where]


class HostProcess(Forked):
    """A module that runs in the namespaces of a process; :meth:`kill` kills all of its session."""

    def __init__(self, holder: int, log: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__(_run_module, holder, str(log), list(command), dict(variables), os.getcwd())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()  # it may not have its session yet


def _run_module(holder: int, log: str, command: list[str], variables: dict[str, str], folder: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    namespaces = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(namespace)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)  # OpenMP has read the variable already
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


class Run:
    """A check that runs on both hosts; every rank writes its answer to a file."""

    def __init__(self, answers: Path, processes: list[HostProcess]) -> None:
        self.answers, self._processes = answers, processes

    def wait(self, name: str) -> str:
        """The content of a file that a rank writes into :attr:`answers`, once it is there."""
        file = self.answers / name
        end = time.monotonic() + PATIENCE
        while not file.exists():
            running = any(process.poll() is None for process in self._processes)
            if not file.exists() and (not running or time.monotonic() > end):
                raise AssertionError(f"no {name}\n{self._logs()}")
            time.sleep(0.02)
        return file.read_text(errors="replace")

    def wait_for_line(self, name: str, text: str) -> None:
        """Wait until a file in :attr:`answers` has this text."""
        end = time.monotonic() + PATIENCE
        while text not in self.wait(name):
            assert time.monotonic() < end, f"no {text!r}\n{self._logs()}"
            time.sleep(0.1)

    def wait_for_end(self, host: int) -> None:
        """Wait until torchrun has ended on a host."""
        self._processes[host].wait(PATIENCE)

    def outcome(self, rank: int) -> tuple[bool, Any]:
        """Whether the check succeeded on this rank, and its result or the text of its error."""
        self.wait(f"rank{rank}.done")
        ok, value = pickle.loads((self.answers / f"rank{rank}").read_bytes())
        return ok, value

    def results(self) -> list[Any]:
        """What the check returned, by rank.

        Raises:
            AssertionError: with every failed rank's traceback.
        """
        outcomes = [self.outcome(rank) for rank in range(len(self._processes) * RANKS)]
        failures = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in outcomes]

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name} ---\n{log.read_text()[-5000:]}" for log in sorted(self.answers.glob("*.log")))


def _hold(name: str, disk: Path, shared_path: Path) -> subprocess.Popen[bytes]:
    """A process in new namespaces, which last as long as it. Its path ``shared_path`` is ``disk``."""
    script = 'hostname "$1" && mount --bind "$2" "$3" && echo ready && exec cat'
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, "sh", name, str(disk), str(shared_path)],
        stdin=subprocess.PIPE,  # cat ends with this process, which closes it
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != b"ready\n":
        holder.kill()
        raise OSError(f"{name} could not be made")
    return holder


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
