"""Faults that the tests must find: ``python -m tests.mutants [ROOM ...]``.

Each fault in ``tests/data/mutants`` replaces one piece of code by another that is wrong. It is put into a copy of the
checkout, and the tests that are listed with it run there: one of them has to fail. A table says which did.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "data" / "mutants"
"""A file for each room of lightstep."""

_LONGEST = 900
"""Seconds that the tests of one fault may take. A fault that lets them hang is found."""


class Fault(NamedTuple):
    """``old`` in ``file`` becomes ``new``. ``what`` names it, ``tests`` are pytest's arguments."""

    room: str
    what: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, root: Path) -> None:
        """Change the file below ``root``.

        Raises:
            ValueError: ``old`` is not there exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.what}: {self.file} has {text.count(self.old)} places like {self.old!r}, not one")
        path.write_text(text.replace(self.old, self.new))


def faults(rooms: Sequence[str] = ()) -> list[Fault]:
    """Those of some rooms; of all if none is named."""
    known = {path.stem: path for path in sorted(LISTS.glob("*.toml"))}
    if unknown := sorted(set(rooms) - set(known)):
        raise ValueError(f"{', '.join(unknown)}: rooms are {', '.join(known)}")
    listed = {room: tomllib.loads(known[room].read_text())["fault"] for room in rooms or known}
    return [Fault(room, **fault) for room, own in listed.items() for fault in own]


@contextmanager
def _copy() -> Iterator[Path]:
    """Of what git knows and of new files, with the contents they have now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="lightstep-mutant-") as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def found_by(fault: Fault) -> str | None:
    """The first test that fails with the fault; ``None`` if all pass.

    Raises:
        RuntimeError: the tests could not run.
    """
    with _copy() as folder:
        fault.apply(folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            *fault.tests.split(),
        ]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            return "the time limit"
    if done.returncode == 0:
        return None
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if match is None:
        raise RuntimeError(
            f"{fault.what}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return match[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="rooms whose faults are tried; default: all")
    parser.add_argument("--processes", type=int, default=2, help="how many copies are tested at a time")
    asked = parser.parse_args()
    listed = faults(asked.rooms)
    missed = 0
    with ThreadPoolExecutor(asked.processes) as pool:
        for fault, found in zip(listed, pool.map(found_by, listed), strict=True):
            missed += found is None
            sys.stdout.write(f"| {fault.room} | {fault.what} | {found or '**nothing**'} |\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(listed) - missed} of {len(listed)} faults found\n")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
