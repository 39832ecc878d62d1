"""How fast a strategy saves a checkpoint, beside plain files of as many bytes written by all ranks at once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightstep.bench.ranks import Ranks

_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class DiskTime:
    """Bytes of one checkpoint over all ranks, and the seconds that saving it and writing plain files took."""

    nbytes: int
    save_s: float
    plain_s: float


def time_saving(save: Callable[[Path], None], folder: Path, ranks: Ranks) -> DiskTime:
    """Save and write plainly, twice in turn, into ``folder``; the faster of each counts. Nothing is left there.

    All ranks call it, on a folder that they share. Both end with every byte flushed to the disk.
    """
    checkpoint, plain = folder / "bench-checkpoint", folder / f"bench-plain-{ranks.rank}"
    saving, writing, nbytes = [], [], 0

    def write_plainly() -> None:
        _write(plain, nbytes // ranks.world_size)

    try:
        for _ in range(2):
            saving.append(_timed(lambda: save(checkpoint), ranks))
            nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
            ranks.barrier()
            _remove(checkpoint, ranks)
            writing.append(_timed(write_plainly, ranks))
            plain.unlink()
    finally:
        _remove(checkpoint, ranks)
        plain.unlink(missing_ok=True)
    return DiskTime(nbytes, min(saving), min(writing))


def _timed(work: Callable[[], None], ranks: Ranks) -> float:
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
