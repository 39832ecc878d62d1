"""A receiver of weights on a host: ``python -m tests.hosts.receiver ADDRESS PORT FOLDER``.

It can be stopped in the middle of a set: if ``FOLDER/hold`` is there, it makes ``FOLDER/receiving`` before it takes its
third bucket, and waits for ``FOLDER/cut``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

from tests.distributed.models import TinyTransformer
from tests.patience import PATIENCE
from tests.rollout_faults import GeneratingVllm

HELD = 3


class Receiver(GeneratingVllm):
    """vLLM's stand-in with a model whose weights are all zeros."""

    def __init__(self, address: str, port: int, folder: Path) -> None:
        weights = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in _model().named_parameters()}
        self._folder, self._updates = folder, 0
        super().__init__(weights, timeout_s=PATIENCE, address=address, port=port)
        self.before = self._hold

    def _hold(self, path: str) -> None:
        if not (self._folder / "hold").exists():
            return
        self._updates += path == "/update_weights"
        if self._updates == HELD:
            (self._folder / "receiving").touch()
            while not (self._folder / "cut").exists():
                time.sleep(0.01)
            (self._folder / "hold").unlink()


def _model() -> TinyTransformer:
    return TinyTransformer(tied=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Receiver(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    threading.Event().wait()
