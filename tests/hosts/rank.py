"""One rank of a check on several hosts: ``python -m tests.hosts.rank MODULE:CHECK ARGUMENTS ANSWERS TIMEOUT``.

torchrun starts it. Its answer is a file, because the ranks of another host have no pipe to the test.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main(name: str, arguments: str, answers: str, timeout: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["ANSWERS"] = answers
    module, _, check = name.partition(":")
    try:
        run = getattr(importlib.import_module(module), check)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(timeout)))
        value = run(rank, world_size, **json.loads(arguments))
        _answer(Path(answers, f"rank{rank}"), True, value)
    except BaseException:
        _answer(Path(answers, f"rank{rank}"), False, traceback.format_exc())
        raise
    dist.destroy_process_group()


def _answer(file: Path, ok: bool, value: Any) -> None:
    file.write_bytes(pickle.dumps((ok, value)))
    file.with_suffix(".done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
