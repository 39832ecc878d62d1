"""Writing tensors: each rank its share, fetched one after another and written by threads behind.

Which rank writes what is planned first; the rest needs no other rank, and takes its tensors from any
:class:`~lightstep.checkpoint.tensors.Source`.
"""

from __future__ import annotations

import contextvars
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.storage import storage_of
from lightstep.checkpoint.tensors import PART_BYTES, Chunk, Index, Source, Stored, join
from lightstep.crc32 import crc32

FILE_BYTES = 512 * 2**20
"""Files end after the tensor that reaches this size."""

_WRITERS = 4
"""Threads that write, each its own files: checksums and the disk's waits take turns."""


def share(sources: Sequence[Source], ranks: Ranks) -> list[Source]:
    """What this rank writes of what it has: of equal keys and offsets only one rank's, so that all write about as much.

    Their order stays: entries of one parameter that follow each other are put together once. Called by all ranks.
    """
    mine = {(source.key, source.shard.offsets): source for source in sources if _has_data(source)}
    if not ranks.several:
        return list(mine.values())
    load = [0] * ranks.size
    everyone = ranks.gather({place: source.nbytes for place, source in mine.items()})
    holders: dict[tuple[str, torch.Size], list[int]] = {}
    for rank, places in enumerate(everyone):
        for place in places:
            holders.setdefault(place, []).append(rank)
    writer = {}
    for place, having in holders.items():
        writer[place] = rank = min(having, key=lambda rank: load[rank])
        load[rank] += everyone[rank][place]
    return [source for place, source in mine.items() if writer[place] == ranks.rank]


def write_tensors(folder: Path, sources: Sequence[Source], rank: int = 0) -> Index:
    """Write these into files of this rank, and return where they lie.

    Host memory holds :data:`PART_BYTES` of them at a time (or two tensors), and what the last fetch made.

    Raises:
        Exception: the first that a fetch or the storage raised; files may be there.
    """
    count = min(_WRITERS, max(1, math.ceil(sum(source.nbytes for source in sources) / PART_BYTES)))
    written: list[Index] = []
    underway: deque[tuple[int, Future[Index]]] = deque()
    held = 0
    with without_torchs_checksums(), ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder, f"__{rank}_{number}_")) for number in range(count)]
        for source in sources:
            while len(underway) > 1 and held >= PART_BYTES:
                nbytes, future = underway.popleft()
                written.append(future.result())
                held -= nbytes
            writer = min(writers, key=lambda writer: writer.nbytes)
            underway.append((source.nbytes, writer.submit(source, _on_host(source.fetch()))))
            held += source.nbytes
        written += [future.result() for _, future in underway]
        for closed in [writer.submit_close() for writer in writers]:
            closed.result()
    return join(written)


class _Writer:
    """A thread that writes one file after another.

    No thread of ``concurrent.futures``: those take nothing more once the interpreter begins to end, and a save that is
    under way then still ends well.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.nbytes = 0
        """Handed over so far."""
        self._folder, self._prefix = folder, prefix
        self._files = 0
        self._file: _Counting | None = None
        self._failed = False
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        run = contextvars.copy_context().run  # torch's options hold for a context, and are asked for in this thread
        self._thread = Thread(target=run, args=(self._run,), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self._tasks.put(None)
        self._thread.join()
        if self._file is not None:
            self._file.stream.close()

    def submit(self, source: Source, tensor: Tensor) -> Future[Index]:
        self.nbytes += source.nbytes
        return self._submit(lambda: self._write(source, tensor))

    def submit_close(self) -> Future[None]:
        return self._submit(self._close)

    def _submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            future, task = entry
            if self._failed:
                future.cancel()
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                self._failed = True
                future.set_exception(error)
            del entry, future, task  # a tensor is let go before the next one is waited for

    def _write(self, source: Source, tensor: Tensor) -> Index:
        if self._file is None:
            self._file = _Counting(self._folder / f"{self._prefix}{self._files}.distcp")
            self._files += 1
        file, shard = self._file, source.shard
        start, file.checksum = file.nbytes, 0
        torch.save(tensor, cast(IO[bytes], file))
        source.written()
        chunk = Chunk(shard.offsets, shard.lengths, file.name, start, file.nbytes - start, file.checksum)
        if file.nbytes >= FILE_BYTES:
            self._close()
        return {source.key: Stored(source.dtype, shard.shape, (chunk,))}

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.stream.close()


class _Counting:
    """A new file that ``torch.save`` writes to; ``checksum`` is of what was written since it was set to 0."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.stream: BinaryIO = storage_of(path).create(path)
        self.nbytes = 0
        self.checksum = 0

    def write(self, data: bytes) -> int:
        self.checksum = crc32(data, self.checksum)
        self.stream.write(data)
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        """The file is flushed when it is closed."""


@contextmanager
def without_torchs_checksums() -> Iterator[None]:
    """``torch.save`` without its own CRC-32, which ``torch.load`` does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _on_host(tensor: Tensor) -> Tensor:
    """``torch.save`` writes a tensor's whole storage: a view of a larger one gets a storage that ends with it."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    data = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())  # the same memory
    return data.view(tensor.dtype).view(tensor.shape)


def _has_data(source: Source) -> bool:
    """Empty shards are not written, empty tensors are (their existence counts)."""
    return source.shard.numel > 0 or math.prod(source.shard.shape) == 0
