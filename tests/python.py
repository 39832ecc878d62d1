"""``python`` as a user starts it, in a fork of one that has imported torch (and transformers, for those that need it):
that takes longer than most scripts do.

This file is the process that forks, too. It is asked by lines of JSON, and answers with exit statuses. What has
imported more is itself a fork of what has imported less, and gets its requests from that one.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

STREAMS = ("stdin", "stdout", "stderr")
IMPORTS = ("torch", "torch.distributed.fsdp", "torch._dynamo", "transformers.trainer")
"""Each imports those in front of it."""


def python(
    *arguments: str,
    cwd: Path | str,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    imported: str = "torch.distributed.fsdp",
) -> subprocess.CompletedProcess[str]:
    """``python *arguments``: ``-c``, ``-m``, ``-`` or a file, and what the program is given.

    The variables that the interpreter reads when it starts have no effect, but for ``PYTHONPATH``.

    Args:
        imported: what has been imported already, one of :data:`IMPORTS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(stdin, encoding="utf-8")
        where = {"cwd": str(cwd), "env": dict(os.environ if env is None else env), "folder": folder}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        request = {"level": IMPORTS.index(imported), "arguments": arguments, **where}
        status = int(_ask(server.stdin, server.stdout, json.dumps(request) + "\n"))
        said = [Path(folder, name).read_text(encoding="utf-8") for name in STREAMS[1:]]
    return subprocess.CompletedProcess(arguments, status, *said)


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.kill)
    return server


def _ask(requests: IO[str], answers: IO[str], line: str) -> str:
    requests.write(line)
    requests.flush()
    return answers.readline()


def _next_request(level: int, requests: IO[str], answers: IO[str]) -> dict[str, Any] | None:
    """In a fork, what to do there. In the processes that fork nothing, when nobody asks any more."""
    gc.disable()
    importlib.import_module(IMPORTS[level])
    gc.freeze()  # an interpreter that ends collects a million objects otherwise
    gc.enable()
    following: tuple[IO[str], IO[str]] | None = None
    while line := requests.readline():
        request: dict[str, Any] = json.loads(line)
        if request["level"] > level:
            if following is None:
                (asked, ask), (answer, answered) = os.pipe(), os.pipe()
                if not os.fork():
                    os.close(ask), os.close(answer)
                    return _next_request(level + 1, os.fdopen(asked), os.fdopen(answered, "w"))
                os.close(asked), os.close(answered)
                following = os.fdopen(ask, "w"), os.fdopen(answer)
            status = _ask(*following, line)
        elif child := os.fork():
            status = f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n"
        else:
            return request
        answers.write(status)
        answers.flush()
    return None


def _run(arguments: list[str], cwd: str, env: dict[str, str], folder: str) -> None:
    for number, name in enumerate(STREAMS):
        os.dup2(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the other one may have read further than to its line's end
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    how, *sys.argv = arguments if arguments[0] in ("-c", "-m") else ["file", *arguments]
    if how == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif how == "file" and sys.argv[0] != "-":
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        code = sys.argv.pop(0) if how == "-c" else sys.stdin.read()
        sys.argv[:0] = ["-c"] if how == "-c" else []
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    if (request := _next_request(0, sys.stdin, sys.stdout)) is not None:
        del request["level"]
        _run(**request)
