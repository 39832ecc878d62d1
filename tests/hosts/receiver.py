"""A receiver of weights on a host: ``python -m tests.hosts.receiver KIND MODEL ADDRESS PORT FOLDER``.

It can be stopped in the middle of a set: if ``FOLDER/hold`` is there, it makes ``FOLDER/receiving`` before it takes its
third bucket, and waits for ``FOLDER/cut``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from tests.distributed.models import TinyTransformer
from tests.patience import PATIENCE
from tests.rollout_faults import GeneratingSglang, GeneratingVllm

HELD = 3
LAYERS = 8
"""Of the model ``wide``. Each is a bucket of 128 KiB."""


class Stop:
    """Stops an answer, as files in ``folder`` say."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._updates = folder, 0

    def __call__(self, path: str) -> None:
        if not path.startswith("/update_weights") or not (self._folder / "hold").exists():
            return
        self._updates += 1
        if self._updates == HELD:
            (self._folder / "receiving").touch()
            while not (self._folder / "cut").exists():
                time.sleep(0.01)
            (self._folder / "hold").unlink()


def wide_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))


MODELS = {"tiny": lambda: TinyTransformer(tied=True), "wide": wide_model}


def main(kind: str, model: str, address: str, port: str, folder: str) -> None:
    """Serve a model whose weights are all zeros."""
    torch.set_num_threads(1)
    weights = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in MODELS[model]().named_parameters()}
    stand_in = {"vllm": GeneratingVllm, "sglang": GeneratingSglang}[kind]
    stand_in(weights, timeout_s=PATIENCE, address=address, port=int(port)).before = Stop(Path(folder))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
