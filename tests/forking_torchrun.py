"""torchrun whose ranks are forked: ``python -m tests.forking_torchrun OPTIONS PROGRAM ARGUMENTS``.

The program is a module or a file. The options and the agent are torchrun's. A start takes no time to import torch, so
that many can be tried.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

import lightstep.strategy.fsdp2  # noqa: F401  (by the strategy's first use)
from tests.forked import Forked

IMPORTED = {"lightstep": "lightstep.trainer.session", "tests.elastic_run": "tests.distributed.models"}
"""What programs import. :mod:`tests.hosts.rank` imports the module of its check."""


def _rank(program: str, *arguments: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:  # the agent waits for this function to return
        if end.code:
            raise
    except BaseException:  # as an interpreter ends
        sys.excepthook(*sys.exc_info())
        os._exit(1)


class Torchrun(Forked):
    """torchrun, without an interpreter of its own.

    Args:
        log: a file to which all of its processes append what they say.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        super().__init__(_run_on_cpu, arguments, log)


def _run_on_cpu(arguments: list[str], log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)  # OpenMP has read the variable already
    run(arguments)


def run(arguments: list[str]) -> None:
    config, _, command = config_from_args(parse_args(arguments))
    program, *arguments = command[1:]  # after -u, for the interpreter that torchrun would start
    imported = arguments[0].partition(":")[0] if program == "tests.hosts.rank" else IMPORTED.get(program)
    if imported is not None:
        importlib.import_module(imported)
    config.start_method = "fork"
    elastic_launch(config, _rank)(program, *arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
