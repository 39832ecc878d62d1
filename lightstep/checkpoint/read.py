"""Reading tensors: each rank what it needs, whatever the ranks were that wrote them."""

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
from lightstep.checkpoint.storage import storage_of
from lightstep.checkpoint.tensors import PART_BYTES, Chunk, Index, Target
from lightstep.crc32 import crc32

_READERS = 4
"""Threads that read ahead."""


class Held:
    """Chunks that were read, for a second reading: as many as ``nbytes`` of host memory have room for."""

    def __init__(self, nbytes: int = 0) -> None:
        self._room = nbytes
        self._chunks: dict[Chunk, Tensor] = {}

    def hold(self, chunk: Chunk, tensor: Tensor) -> None:
        """Unless there is no room for it."""
        if tensor.nbytes <= self._room and chunk not in self._chunks:
            self._room -= tensor.nbytes
            self._chunks[chunk] = tensor

    def take(self, chunk: Chunk) -> Tensor | None:
        """It is held no longer."""
        return self._chunks.pop(chunk, None)

    def no_more(self) -> None:
        """The second reading begins."""
        self._room = 0


def read_tensors(folder: Path, index: Index, targets: Sequence[Target], held: Held | None = None) -> None:
    """Fill ``targets`` in their order from ``folder``, without talking to other ranks.

    Args:
        held: keeps what is read, and has what was read before.

    Raises:
        DamagedError: a file cannot be read, or what it holds is not what was written.
        CheckpointError: parts of a tensor are missing. Some targets may be filled by then.
    """
    pieces = [(target, _pieces(target, index)) for target in targets]
    in_order = [(target.key, piece.chunk) for target, needed in pieces for piece in needed]
    held = held or Held()
    with closing(_read_ahead(folder, in_order, held)) as chunks:
        for target, needed in pieces:
            local = target.make()
            with torch.no_grad():
                for piece in needed:
                    tensor = next(chunks)
                    local[piece.there].copy_(tensor[piece.here])
                    held.hold(piece.chunk, tensor)
            target.arrived(local)


def read_chunk(folder: Path, key: str, chunk: Chunk) -> bytes:
    """A chunk's bytes, which are those that were written.

    Raises:
        DamagedError: they are not, with file, tensor and offset.
    """
    file = folder / chunk.file
    where = f"{file} is damaged: {key.partition('.')[2]} ({key.partition('.')[0]}) at byte {chunk.start}"
    try:
        content = storage_of(file).read(file, chunk.start, chunk.nbytes)
    except OSError as error:
        raise DamagedError(f"{where}: {error_text(error)}") from error
    if len(content) < chunk.nbytes:
        raise DamagedError(f"{where}: the file ends {chunk.nbytes - len(content)} bytes early")
    if chunk.checksum is not None and crc32(content) != chunk.checksum:
        found = crc32(content)
        raise DamagedError(f"{where}: the checksum of {chunk.nbytes} bytes is {found:08x}, not {chunk.checksum:08x}")
    return content


@dataclass(frozen=True)
class _Piece:
    """What a chunk has for a target: ``here`` in the chunk, ``there`` in the target."""

    chunk: Chunk
    here: tuple[slice, ...]
    there: tuple[slice, ...]


def _pieces(target: Target, index: Index) -> list[_Piece]:
    shard = target.shard
    found = []
    for chunk in index[target.key].chunks if shard.numel > 0 else ():
        ends = zip(chunk.offsets, chunk.lengths, shard.offsets, shard.lengths, strict=True)
        common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in ends]
        if all(start < end for start, end in common):
            here = tuple(slice(start - a, end - a) for (start, end), a in zip(common, chunk.offsets, strict=True))
            there = tuple(slice(start - b, end - b) for (start, end), b in zip(common, shard.offsets, strict=True))
            found.append(_Piece(chunk, here, there))
    if sum(math.prod(part.stop - part.start for part in piece.there) for piece in found) != shard.numel:
        raise CheckpointError(f"the checkpoint does not hold all of {target.key}")
    return found


def _read_ahead(folder: Path, needed: Iterable[tuple[str, Chunk]], held: Held) -> Generator[Tensor, None, None]:
    """The chunks in this order; :data:`PART_BYTES` of them, and at least one, are read ahead."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-reader") as pool:
        ahead: deque[tuple[int, Future[Tensor]]] = deque()
        for key, chunk in needed:
            ahead.append((chunk.nbytes, pool.submit(_load, folder, key, chunk, held.take(chunk))))
            while sum(nbytes for nbytes, _ in ahead) > PART_BYTES:
                yield ahead.popleft()[1].result()
        while ahead:
            yield ahead.popleft()[1].result()


def _load(folder: Path, key: str, chunk: Chunk, held: Tensor | None) -> Tensor:
    if held is not None:
        return held
    content = read_chunk(folder, key, chunk)
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start}: {error_text(error)}") from error
    if not isinstance(tensor, Tensor) or tensor.shape != chunk.lengths:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start} is not the tensor that the index names")
    return tensor
