"""Reading tensors: each rank reads the parts it needs, from the files of any number of ranks."""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightstep.checkpoint.errors import CheckpointError, DamagedError, error_text
from lightstep.checkpoint.storage import storage_for
from lightstep.checkpoint.tensors import IN_FLIGHT_BYTES, Chunk, Index, StoredTensor, Target
from lightstep.crc32 import crc32

_READERS = 4
"""Threads that prefetch chunks."""


class ChunkCache:
    """Chunks kept in host memory between a dry run and the load: at most ``nbytes`` bytes."""

    def __init__(self, nbytes: int = 0) -> None:
        self._free_bytes = nbytes
        self._chunks: dict[Chunk, Tensor] = {}

    def add(self, chunk: Chunk, tensor: Tensor) -> None:
        """Keep the chunk if there is room for it."""
        if tensor.nbytes <= self._free_bytes and chunk not in self._chunks:
            self._free_bytes -= tensor.nbytes
            self._chunks[chunk] = tensor

    def pop(self, chunk: Chunk) -> Tensor | None:
        """Remove the chunk and return it; ``None`` if it is not kept."""
        return self._chunks.pop(chunk, None)

    def close(self) -> None:
        """Keep no further chunks."""
        self._free_bytes = 0


def read_tensors(folder: Path, index: Index, targets: Sequence[Target], cache: ChunkCache | None = None) -> None:
    """Fill ``targets`` in their order from ``folder``, without communication.

    Args:
        cache: where chunks are looked up first, and added.

    Raises:
        DamagedError: a file cannot be read, or is damaged. Some targets may have been filled.
        CheckpointError: a part of a tensor is not in the checkpoint.
    """
    overlaps = [(target, _overlaps(target, index)) for target in targets]
    needed = [(target.key, overlap.chunk) for target, found in overlaps for overlap in found]
    cache = cache or ChunkCache()
    with closing(_prefetched(folder, needed, cache)) as chunks:
        for target, found in overlaps:
            local = target.allocate()
            with torch.no_grad():
                for overlap in found:
                    tensor = next(chunks)
                    local[overlap.in_target].copy_(tensor[overlap.in_chunk])
                    cache.add(overlap.chunk, tensor)
            target.on_filled(local)


def read_whole(folder: Path, key: str, stored: StoredTensor) -> Tensor:
    """A whole tensor, read by the calling thread.

    Raises:
        DamagedError: a file cannot be read, or is damaged.
    """
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        ends = zip(chunk.offsets, chunk.lengths, strict=True)
        whole[tuple(slice(start, start + length) for start, length in ends)] = _load(folder, key, chunk)
    return whole


def read_chunk(folder: Path, key: str, chunk: Chunk) -> bytes:
    """A chunk's bytes, compared with their checksum.

    Raises:
        DamagedError: they differ or cannot be read; the message has file, tensor and offset.
    """
    file = folder / chunk.file
    where = f"{file} is damaged: {key.partition('.')[2]} ({key.partition('.')[0]}) at byte {chunk.start}"
    try:
        content = storage_for(file).read(file, chunk.start, chunk.nbytes)
    except OSError as error:
        raise DamagedError(f"{where}: {error_text(error)}") from error
    if len(content) < chunk.nbytes:
        raise DamagedError(f"{where}: the file ends {chunk.nbytes - len(content)} bytes early")
    if chunk.checksum is not None and crc32(content) != chunk.checksum:
        found = crc32(content)
        raise DamagedError(f"{where}: the checksum of {chunk.nbytes} bytes is {found:08x}, not {chunk.checksum:08x}")
    return content


@dataclass(frozen=True)
class _Overlap:
    """The region that a chunk and a target have in common."""

    chunk: Chunk
    in_chunk: tuple[slice, ...]
    in_target: tuple[slice, ...]


def _overlaps(target: Target, index: Index) -> list[_Overlap]:
    shard = target.shard
    found = []
    for chunk in index[target.key].chunks if shard.numel > 0 else ():
        ends = zip(chunk.offsets, chunk.lengths, shard.offsets, shard.lengths, strict=True)
        common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in ends]
        if all(start < end for start, end in common):
            in_chunk = tuple(slice(start - a, end - a) for (start, end), a in zip(common, chunk.offsets, strict=True))
            in_target = tuple(slice(start - b, end - b) for (start, end), b in zip(common, shard.offsets, strict=True))
            found.append(_Overlap(chunk, in_chunk, in_target))
    if sum(math.prod(part.stop - part.start for part in overlap.in_target) for overlap in found) != shard.numel:
        raise CheckpointError(f"the checkpoint does not hold all of {target.key}")
    return found


def _prefetched(folder: Path, needed: Iterable[tuple[str, Chunk]], cache: ChunkCache) -> Generator[Tensor, None, None]:
    """The ``needed`` chunks in order. At most :data:`IN_FLIGHT_BYTES` of them, but at least one, are prefetched."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-reader") as pool:
        ahead: deque[tuple[int, Future[Tensor]]] = deque()
        for key, chunk in needed:
            ahead.append((chunk.nbytes, pool.submit(_load_unless, cache.pop(chunk), folder, key, chunk)))
            while sum(nbytes for nbytes, _ in ahead) > IN_FLIGHT_BYTES:
                yield ahead.popleft()[1].result()
        while ahead:
            yield ahead.popleft()[1].result()


def _load_unless(cached: Tensor | None, folder: Path, key: str, chunk: Chunk) -> Tensor:
    return _load(folder, key, chunk) if cached is None else cached


def _load(folder: Path, key: str, chunk: Chunk) -> Tensor:
    content = read_chunk(folder, key, chunk)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start}: {error_text(error)}") from error
    if not isinstance(tensor, Tensor) or tensor.shape != chunk.lengths:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start} is not the tensor that the index names")
    return tensor
