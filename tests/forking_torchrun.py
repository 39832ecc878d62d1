"""torchrun whose ranks are forked: ``python -m tests.forking_torchrun OPTIONS PROGRAM ARGUMENTS``.

The program is a module or a file. The options and the agent are torchrun's. A start takes no time to import torch, so
that many can be tried.
"""

from __future__ import annotations

import importlib
import runpy
import signal
import sys

import torch._dynamo  # noqa: F401  (by FSDP2 in every rank)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

import lightstep.strategy.fsdp2  # noqa: F401  (by the strategy's first use)

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


if __name__ == "__main__":
    config, _, command = config_from_args(parse_args(sys.argv[1:]))
    program, *arguments = command[1:]  # after -u, for the interpreter that torchrun would start
    imported = arguments[0].partition(":")[0] if program == "tests.hosts.rank" else IMPORTED.get(program)
    if imported is not None:
        importlib.import_module(imported)
    config.start_method = "fork"
    elastic_launch(config, _rank)(program, *arguments)
