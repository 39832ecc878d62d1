"""Measures how fast a strategy saves a checkpoint, and how long an asynchronous save blocks training.

Compared with plain files of the same size that all ranks write at once, and with torch's ``async_save``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightstep.bench.probes import elapsed
from lightstep.bench.ranks import Ranks

if TYPE_CHECKING:
    from lightstep.bench.strategies import StrategyContender

_CHUNK = 64 * 2**20
_REPEATS = 3
_QUIET_STEPS = 5
"""Steps before each save, for comparison with those during it."""


@dataclass(frozen=True)
class Stall:
    """What asynchronous saves cost training.

    Attributes:
        seconds: for which a call blocks training: the shortest of several.
        first_seconds: the same for the first one, which also allocates memory that the others reuse.
        lost: seconds by which training takes longer because of a save: the blocked ones, and what the steps during the
            write take more than quiet ones. The median of those after the first.
        first_lost: the same for the first one.
        slowdown: step time during the writes relative to that without one.
    """

    seconds: float
    first_seconds: float
    lost: float
    first_lost: float
    slowdown: float


@dataclass(frozen=True)
class DiskTime:
    """Bytes of one checkpoint over all ranks, and the seconds for saving it and for writing plain files."""

    nbytes: int
    save_s: float
    plain_s: float
    stall: Stall
    torch_stall: Stall


def measure_saving(saver: StrategyContender, step: Callable[[], None], folder: Path, ranks: Ranks) -> DiskTime:
    """Save a checkpoint and write plain files in turn, three times; the fastest of each counts. Then save in threads.

    All ranks call it with a ``folder`` that they share; nothing is left there. Every write ends when all bytes are
    flushed to disk.

    Args:
        step: one training step; returns when it is finished.
    """
    checkpoint, plain = folder / "bench-checkpoint", folder / f"bench-plain-{ranks.rank}"
    saving, writing, nbytes = [], [], 0

    def write_plainly() -> None:
        _write(plain, nbytes // ranks.world_size)

    try:
        for _ in range(_REPEATS):
            saving.append(elapsed(lambda: saver.save(checkpoint), ranks.barrier))
            nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
            ranks.barrier()
            _remove(checkpoint, ranks)
            writing.append(elapsed(write_plainly, ranks.barrier))
            plain.unlink()
        ours = _stall(step, saver.save_async, checkpoint, ranks)
        with _torch_saving(saver, ranks) as begin:
            torchs = _stall(step, begin, checkpoint, ranks)
    finally:
        _remove(checkpoint, ranks)
        plain.unlink(missing_ok=True)
    return DiskTime(nbytes, min(saving), min(writing), ours, torchs)


def _stall(step: Callable[[], None], begin: Callable[[Path], Any], path: Path, ranks: Ranks) -> Stall:
    quiet: list[float] = []
    blocked: list[float] = []
    during: list[list[float]] = []
    for _ in range(_REPEATS):
        quiet += [elapsed(step, ranks.barrier) for _ in range(_QUIET_STEPS)]
        pending: list[Any] = []
        blocked.append(elapsed(lambda pending=pending: pending.append(begin(path)), ranks.barrier))  # type: ignore[misc]
        steps: list[float] = []
        while ranks.maximum([0.0 if pending[0].done() else 1.0])[0]:
            steps.append(elapsed(step, ranks.barrier))
        during.append(steps)
        pending[0].result()
        ranks.barrier()
        _remove(path, ranks)
        ranks.barrier()
    usual = statistics.median(quiet)
    first_lost, *lost = (call + sum(steps) - len(steps) * usual for call, steps in zip(blocked, during, strict=True))
    slowdown = statistics.median(itertools.chain(*during) if any(during) else quiet) / usual
    return Stall(min(blocked), blocked[0], statistics.median(lost), first_lost, slowdown)


@contextmanager
def _torch_saving(saver: StrategyContender, ranks: Ranks) -> Iterator[Callable[[Path], Any]]:
    """``torch.distributed.checkpoint.async_save``. Its thread needs a process group of its own."""
    ranks.ensure_group()
    group = dist.new_group(backend="gloo")
    tensors: dict[str, Any] = dict(saver.saved_tensors())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lambda path: dcp.async_save(tensors, checkpoint_id=path, process_group=group)
    finally:
        dist.destroy_process_group(group)


def _write(path: Path, nbytes: int) -> None:
    chunk = memoryview(os.urandom(min(_CHUNK, nbytes)))
    with path.open("wb", buffering=0) as file:
        while (left := nbytes - file.tell()) > 0:
            file.write(chunk[:left])
        os.fsync(file.fileno())


def _remove(folder: Path, ranks: Ranks) -> None:
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
