"""``python`` as a user starts it, in a fork of one that has imported torch (and transformers, for those that need it):
that takes longer than most scripts do.

This file is the process that forks, too. It is asked by lines of JSON, and answers with exit statuses.
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
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")


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
        imported: the module that has been imported already.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(stdin, encoding="utf-8")
        where = {"cwd": str(cwd), "env": dict(os.environ if env is None else env), "folder": folder}
        server = _server(imported)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"arguments": arguments, **where}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        said = [Path(folder, name).read_text(encoding="utf-8") for name in STREAMS[1:]]
    return subprocess.CompletedProcess(arguments, status, *said)


@functools.cache
def _server(imported: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__, imported], stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.kill)
    return server


def _next_request() -> dict[str, Any] | None:
    """In a fork, what to do there. In the process that forks nothing, when nobody asks any more."""
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            return json.loads(line)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
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
    importlib.import_module(sys.argv[1])
    gc.freeze()  # an interpreter that ends collects a million objects otherwise
    if (request := _next_request()) is not None:
        _run(**request)
