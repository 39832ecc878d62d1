"""How fast a strategy saves a checkpoint, and how long training stands still for one that a thread writes.

Beside plain files of as many bytes written by all ranks at once, and torch's own ``async_save`` of the same tensors.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightstep.bench.ranks import Ranks

_CHUNK = 64 * 2**20
_REPEATS = 3


class Saver(Protocol):
    """Who is measured. All ranks call each of these at once."""

    def save(self, path: Path) -> None:
        """A whole checkpoint."""

    def begin_save(self, path: Path) -> Any:
        """The same by a thread: a handle with ``done()`` and ``result()``."""

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """What is in it, by name."""

    def one_step(self) -> None:
        """A step of training, waited for."""


@dataclass(frozen=True)
class Stall:
    """Seconds until training goes on, and how long steps take while a thread writes, over that without one."""

    seconds: float
    steps: float


@dataclass(frozen=True)
class DiskTime:
    """Bytes of one checkpoint over all ranks, and the seconds that saving it and writing plain files took."""

    nbytes: int
    save_s: float
    plain_s: float
    stall: Stall
    torchs_stall: Stall


def time_saving(saver: Saver, folder: Path, ranks: Ranks) -> DiskTime:
    """Save and write plainly, three times in turn, into ``folder``; the faster of each counts. Then save by threads.

    All ranks call it, on a folder that they share, and nothing is left there. Everything ends with every byte flushed
    to the disk.
    """
    checkpoint, plain = folder / "bench-checkpoint", folder / f"bench-plain-{ranks.rank}"
    saving, writing, nbytes = [], [], 0

    def write_plainly() -> None:
        _write(plain, nbytes // ranks.world_size)

    try:
        for _ in range(_REPEATS):
            saving.append(_timed(lambda: saver.save(checkpoint), ranks))
            nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
            ranks.barrier()
            _remove(checkpoint, ranks)
            writing.append(_timed(write_plainly, ranks))
            plain.unlink()
        ours = _stall(saver, saver.begin_save, checkpoint, ranks)
        with _torch_saving(saver, ranks) as begin:
            torchs = _stall(saver, begin, checkpoint, ranks)
    finally:
        _remove(checkpoint, ranks)
        plain.unlink(missing_ok=True)
    return DiskTime(nbytes, min(saving), min(writing), ours, torchs)


def _stall(saver: Saver, begin: Callable[[Path], Any], path: Path, ranks: Ranks) -> Stall:
    """Of the best of some saves: the first one takes memory that the others find."""
    quiet = statistics.median(_timed(saver.one_step, ranks) for _ in range(5))
    stalls, during = [], []
    for _ in range(_REPEATS):
        pending: list[Any] = []
        stalls.append(_timed(lambda pending=pending: pending.append(begin(path)), ranks))  # type: ignore[misc]
        while ranks.maximum([0.0 if pending[0].done() else 1.0])[0]:
            during.append(_timed(saver.one_step, ranks))
        pending[0].result()
        ranks.barrier()
        _remove(path, ranks)
        ranks.barrier()
    return Stall(min(stalls), statistics.median(during or [quiet]) / quiet)


@contextmanager
def _torch_saving(saver: Saver, ranks: Ranks) -> Iterator[Callable[[Path], Any]]:
    """``torch.distributed.checkpoint.async_save``; its thread needs a process group that no step uses."""
    ranks.ensure_group()
    group = dist.new_group(backend="gloo")
    tensors: dict[str, Any] = dict(saver.saved_tensors())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lambda path: dcp.async_save(tensors, checkpoint_id=path, process_group=group)
    finally:
        dist.destroy_process_group(group)


def _timed(work: Callable[[], object], ranks: Ranks) -> float:
    """Seconds until the last rank is done."""
    ranks.barrier()
    began = time.perf_counter()
    work()
    ranks.barrier()
    return time.perf_counter() - began


def _write(path: Path, nbytes: int) -> None:
    chunk = memoryview(os.urandom(min(_CHUNK, nbytes)))
    with path.open("wb", buffering=0) as file:
        while (left := nbytes - file.tell()) > 0:
            file.write(chunk[:left])
        os.fsync(file.fileno())


def _remove(folder: Path, ranks: Ranks) -> None:
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
