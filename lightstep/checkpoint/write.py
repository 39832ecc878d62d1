"""Writing tensors: each rank fetches its share one tensor at a time, and threads write it.

:func:`share` decides which rank writes what. After that no communication is needed. Tensors come from any
:class:`~lightstep.checkpoint.tensors.Source`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.storage import storage_for
from lightstep.checkpoint.tensors import IN_FLIGHT_BYTES, Chunk, Index, Source, StoredTensor, merge_indices
from lightstep.checkpoint.workers import Background, Worker
from lightstep.crc32 import crc32

FILE_BYTES = 512 * 2**20
"""A file ends with the tensor that brings it to this size."""

_WRITERS = 4
"""Threads, each with its own files: one computes checksums while another waits for the disk."""


def share(sources: Sequence[Source], ranks: Ranks) -> list[Source]:
    """The ``sources`` that this rank writes. A shard that several ranks have is written by one of them.

    All ranks write about the same number of bytes. The order stays: consecutive entries of one parameter are built
    once. Called by all ranks.
    """
    own = {(source.key, source.shard.offsets): source for source in sources if _has_data(source)}
    if not ranks.is_distributed:
        return list(own.values())
    load = [0] * ranks.size
    sizes = ranks.gather({shard: source.nbytes for shard, source in own.items()})
    owners: dict[tuple[str, torch.Size], list[int]] = {}
    for rank, shards in enumerate(sizes):
        for shard in shards:
            owners.setdefault(shard, []).append(rank)
    writer = {}
    for shard, candidates in owners.items():
        writer[shard] = rank = min(candidates, key=lambda rank: load[rank])
        load[rank] += sizes[rank][shard]
    return [source for shard, source in own.items() if writer[shard] == ranks.rank]


def write_tensors(
    folder: Path, sources: Sequence[Source], rank: int = 0, background: Background | None = None
) -> Index:
    """Write ``sources`` to files of this rank, and return their index.

    At most :data:`IN_FLIGHT_BYTES`, or two tensors, are in host memory at a time, and what the last fetch built.

    Args:
        background: the priority of fetches and writes; ``None``: that of the caller.

    Raises:
        Exception: the first error of a fetch or of the storage. Files may have been written.
    """
    count = min(_WRITERS, max(1, math.ceil(sum(source.nbytes for source in sources) / IN_FLIGHT_BYTES)))
    written: list[Index] = []
    in_flight: deque[tuple[int, Future[Index]]] = deque()
    in_flight_bytes = 0
    with without_torch_crc32(), ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder, f"__{rank}_{number}_", background)) for number in range(count)]
        fetcher = None if background is None else stack.enter_context(Worker(background))
        for source in sources:
            while len(in_flight) > 1 and in_flight_bytes >= IN_FLIGHT_BYTES:
                nbytes, future = in_flight.popleft()
                written.append(future.result())
                in_flight_bytes -= nbytes
            writer = min(writers, key=lambda writer: writer.nbytes)
            if background is not None:
                background.hurry_if_process_ends()
            fetch = partial(_fetch, source)
            tensor = fetch() if fetcher is None else fetcher.submit(fetch).result()
            in_flight.append((source.nbytes, writer.submit(source, tensor)))
            del tensor
            in_flight_bytes += source.nbytes
        written += [future.result() for _, future in in_flight]
        for closed in [writer.submit_close() for writer in writers]:
            closed.result()
    return merge_indices(written)


class _Writer:
    """A worker that writes one file after another."""

    def __init__(self, folder: Path, prefix: str, background: Background | None) -> None:
        self.nbytes = 0
        """Bytes submitted so far."""
        self._folder, self._prefix = folder, prefix
        self._files = 0
        self._file: _ChecksummedFile | None = None
        self._worker = Worker(background)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._worker.__exit__(*error)
        if self._file is not None:
            self._file.stream.close()

    def submit(self, source: Source, tensor: Tensor) -> Future[Index]:
        self.nbytes += source.nbytes
        return self._worker.submit(lambda: self._write(source, tensor))

    def submit_close(self) -> Future[None]:
        return self._worker.submit(self._close)

    def _write(self, source: Source, tensor: Tensor) -> Index:
        if self._file is None:
            self._file = _ChecksummedFile(self._folder / f"{self._prefix}{self._files}.distcp")
            self._files += 1
        file, shard = self._file, source.shard
        start, file.checksum = file.nbytes, 0
        torch.save(tensor, cast(IO[bytes], file))
        source.on_written()
        chunk = Chunk(shard.offsets, shard.lengths, file.name, start, file.nbytes - start, file.checksum)
        if file.nbytes >= FILE_BYTES:
            self._close()
        return {source.key: StoredTensor(source.dtype, shard.shape, (chunk,))}

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.stream.close()


class _ChecksummedFile:
    """A new file for ``torch.save``. ``checksum`` is the CRC-32 of what was written since it was set to 0."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.stream: BinaryIO = storage_for(path).create(path)
        self.nbytes = 0
        self.checksum = 0

    def write(self, data: bytes) -> int:
        self.checksum = crc32(data, self.checksum)
        self.stream.write(data)
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Does nothing: the file is flushed when it is closed."""


@contextmanager
def without_torch_crc32() -> Iterator[None]:
    """``torch.save`` without its own CRC-32, which ``torch.load`` does not check."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _fetch(source: Source) -> Tensor:
    """The tensor on the host, with a storage of its own size: ``torch.save`` writes the whole storage."""
    tensor = source.fetch().detach().cpu()
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    data = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())  # the same memory
    return data.view(tensor.dtype).view(tensor.shape)


def _has_data(source: Source) -> bool:
    """Empty shards are not written. Empty tensors are, so that the checkpoint lists them."""
    return source.shard.numel > 0 or math.prod(source.shard.shape) == 0
