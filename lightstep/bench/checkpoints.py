"""`lightstep bench --checkpoints`: how fast a strategy saves, and how long an asynchronous save blocks training.

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
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightstep.bench.machine import Ranks, elapsed

_CHUNK = 64 * 2**20
_REPEATS = 3
_QUIET_STEPS = 5
"""Steps before each save, for comparison with those during it."""


class Saver(Protocol):
    """A contender that saves checkpoints."""

    def save(self, path: Path) -> None: ...
    def save_async(self, path: Path) -> Any: ...
    def saved_tensors(self) -> dict[str, Tensor]: ...


def measure_saving(saver: Saver, step: Callable[[], None], folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Save a checkpoint and write plain files in turn, three times; the fastest of each counts. Then save in threads.

    All ranks call it with a ``folder`` that they share; nothing is left there. Every write ends when all bytes are
    flushed to disk.

    Args:
        step: one training step; returns when it is finished.

    Returns:
        The JSON values: bytes over all ranks, seconds and rates, and what asynchronous saves cost (:func:`_stall`).
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
    gigabytes, save_s = nbytes / 1e9, min(saving)
    return {
        "gb": gigabytes,
        "save_s": save_s,
        "gb_per_s": gigabytes / save_s,
        "plain_files_gb_per_s": gigabytes / min(writing),
        "stall_percent": 100 * ours["stall_s"] / save_s,
        **ours,
        **{f"torch_async_save_{key}": value for key, value in torchs.items()},
    }


def _stall(step: Callable[[], None], begin: Callable[[Path], Any], path: Path, ranks: Ranks) -> dict[str, float]:
    """What asynchronous saves cost training, of the first save, which also allocates memory, and of later ones.

    Stall: the seconds for which the call blocks training; the shortest of all. Lost: those, and what the
    steps during the write take more than quiet ones; the median of the later ones. Steps meanwhile: their time relative
    to that of quiet ones.
    """
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
    return {
        "first_stall_s": blocked[0],
        "stall_s": min(blocked),
        "first_lost_s": first_lost,
        "lost_s": statistics.median(lost),
        "steps_meanwhile": slowdown,
    }


@contextmanager
def _torch_saving(saver: Saver, ranks: Ranks) -> Iterator[Callable[[Path], Any]]:
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
