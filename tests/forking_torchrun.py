"""torchrun for :mod:`tests.elastic_run`, whose ranks are forked: ``python -m tests.forking_torchrun OPTIONS JSON``.

The options and the agent are torchrun's. A restart takes no time to import torch, so that many can be tried.
"""

from __future__ import annotations

import json
import signal
import sys

import torch._dynamo  # noqa: F401  (by FSDP2 in every rank)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

import lightstep.strategy.fsdp2  # noqa: F401  (by the strategy's first use)
from tests.elastic_run import Options, run


def _rank(options: Options) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler
    run(options)


if __name__ == "__main__":
    config, _, program = config_from_args(parse_args([*sys.argv[1:-1], "elastic_run", sys.argv[-1]]))
    config.start_method = "fork"
    elastic_launch(config, _rank)(Options(**json.loads(program[-1])))
