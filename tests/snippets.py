"""The examples of the documentation as scripts, and a way to run them.

A fenced ``python`` or ``bash`` block is run when the line above it is one of

    <!-- run -->                a script of its own
    <!-- run: continued -->     the script of the marked block before it goes on
    <!-- run: torchrun 2 -->    on two ranks, on the CPU through gloo

A mark may span lines: what stands between the first and the last one is code that runs in front of the block and that
the page does not show (``model = ...``, where the page speaks of the reader's own model).

Importing torch takes longer than most examples, so one process imports it, and each script runs in a fork of that one.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.patience import PATIENCE
from tests.ports import free_port

CHECKOUT = Path(__file__).resolve().parents[1]
SECONDS = PATIENCE
"""Of one script."""

_BEGIN = re.compile(r"^<!-- run\b", re.MULTILINE)
_MARKED = re.compile(
    r"<!-- run(?:: (?P<how>[^\n]+?))?(?: -->|\n(?P<setup>.*?)^-->)\n"
    r"```(?P<language>python|bash)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

_processes = multiprocessing.get_context("forkserver")


@dataclass
class Script:
    """One or more blocks of a page.

    Attributes:
        text: as long as the page, with all but the code blank: line numbers of errors are those of the page.
        ranks: how many processes; 0 is one without the variables of torchrun.
        arguments: of its command line.
    """

    page: Path
    line: int
    language: str
    ranks: int
    lines: list[str] = field(default_factory=list)
    arguments: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def scripts_of(page: Path) -> list[Script]:
    """The marked blocks of a page.

    Raises:
        ValueError: a mark that is none of the above, or that stands above nothing that runs.
    """
    text = page.read_text(encoding="utf-8")
    found: list[Script] = []
    for begin in _BEGIN.finditer(text):
        line = text.count("\n", 0, begin.start()) + 1
        block = _MARKED.match(text, begin.start())
        if block is None:
            raise ValueError(f"{page.name}:{line}: below this mark a ```python or ```bash block is needed")
        _add(found, page, line, block)
        for part in ("setup", "code"):
            if block[part] is not None:
                _put(found[-1], text, block.start(part), block[part])
    return found


def _add(found: list[Script], page: Path, line: int, block: re.Match[str]) -> None:
    """A new script, unless the block continues the last one."""
    how = block["how"]
    ranks = re.fullmatch(r"torchrun (\d+)", how or "")
    if how == "continued":
        if not found or found[-1].language != block["language"]:
            raise ValueError(f"{page.name}:{line}: there is no {block['language']} block that this one continues")
    elif how is None or ranks:
        found.append(Script(page, line, block["language"], int(ranks[1]) if ranks else 0))
    else:
        raise ValueError(f"{page.name}:{line}: 'run: {how}'; allowed: run, run: continued, run: torchrun N")


def _put(script: Script, text: str, start: int, code: str) -> None:
    before = text.count("\n", 0, start)
    script.lines += [""] * (before - len(script.lines)) + code.splitlines()


def run_script(script: Script, folder: Path) -> tuple[int, str]:
    """``(exit status, output)`` of a script that runs in ``folder``, where the checkout's examples are too."""
    (folder / "examples").symlink_to(CHECKOUT / "examples")
    path = folder / f"{script.page.stem}.{'py' if script.language == 'python' else 'sh'}"
    path.write_text(script.text, encoding="utf-8")
    return _run_bash(path) if script.language == "bash" else _run_python(path, script)


def _run_bash(path: Path) -> tuple[int, str]:
    """With ``python`` and ``lightstep`` those of this environment."""
    commands = path.parent / ".bin"
    commands.mkdir()
    for name, arguments in (("python", ""), ("lightstep", "-m lightstep"), ("torchrun", "-m torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", path.name],
        cwd=path.parent,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def _run_python(path: Path, script: Script) -> tuple[int, str]:
    port = free_port() if script.ranks else 0
    environments = [_environment(rank, script.ranks, port) for rank in range(max(script.ranks, 1))]
    processes = [
        _processes.Process(target=_serve_script, args=(path, script.arguments, environment), daemon=False)
        for environment in environments
    ]
    for process in processes:
        process.start()
    status = _wait(processes)
    return status, "".join(output.read_text() for output in sorted(path.parent.glob("output-*")))


def _wait(processes: list[BaseProcess]) -> int:
    """The first exit status that is not 0; the other ranks are ended then, as torchrun does."""
    end = time.monotonic() + SECONDS
    while all(not process.exitcode for process in processes) and time.monotonic() < end:
        running = [process for process in processes if process.exitcode is None]
        if not running:
            return 0
        running[0].join(0.05)
    failed = [process.exitcode for process in processes if process.exitcode]
    for process in processes:
        process.kill()
        process.join()
    return failed[0] or -1 if failed else -1


def _serve_script(path: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """In the fork: as ``python path`` would be, with everything that is written in a file beside it."""
    os.environ.update(environment)
    os.chdir(path.parent)
    with open(f"output-{environment.get('RANK', '0')}", "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(CHECKOUT))
    runpy.run_path(str(path), run_name="__main__")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    if not ranks:
        return {}
    run = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {**run, **{name: str(value) for name, value in here.items()}}
