"""Selects the windows of each step from seed and step number alone, so a resumed run needs no history."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor

from lightstep.config import ConfigError
from lightstep.trainer.config import Batch
from lightstep.trainer.tokens import Windows


def check_batch(batch: Batch, world_size: int) -> None:
    """Check that a step divides evenly over micro-batches and ranks.

    Raises:
        ConfigError: the sequences of a step are not divisible by micro-batches × ranks.
    """
    parts = batch.accumulation * world_size
    if batch.sequences % parts:
        raise ConfigError(
            f"batch.sequences is {batch.sequences}; it has to be a multiple of {parts} "
            f"(batch.accumulation {batch.accumulation} × {world_size} {'rank' if world_size == 1 else 'ranks'})"
        )


class Batches:
    """Uses every window once per epoch, in a new order in each epoch.

    A step has the same sequences for any number of ranks; each rank takes its rows of every micro-batch.
    """

    def __init__(self, windows: Windows, batch: Batch, seed: int, rank: int, world_size: int) -> None:
        self._windows = windows
        self._batch = batch
        self._rank, self._world_size = rank, world_size
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(windows)))

    def indices(self, step: int) -> np.ndarray:
        """The windows of step ``step`` (from 0), over all ranks: ``[sequences]``."""
        positions = step * self._batch.sequences + np.arange(self._batch.sequences)
        epochs, places = np.divmod(positions, len(self._windows))
        return np.array([self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def step(self, step: int) -> Tensor:
        """This rank's part of step ``step``: int64 ``[accumulation, rows per micro-batch, length]``."""
        cut = self.indices(step).reshape(self._batch.accumulation, self._world_size, -1)
        mine = cut[:, self._rank]
        return self._windows.rows(mine.reshape(-1)).view(*mine.shape, -1)


def validation_rows(windows: Windows, sequences: int, rank: int, world_size: int) -> Tensor:
    """This rank's share of about ``sequences`` windows, spread evenly over the text. All ranks get the same number."""
    count = max(min(sequences, len(windows)) // world_size, 1)
    spread = np.linspace(0, len(windows) - 1, count * world_size).round().astype(np.int64)
    return windows.rows(spread[rank::world_size])
