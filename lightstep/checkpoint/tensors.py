"""Tensors of a checkpoint: what is written, what is read, and the index that says where everything lies.

The files are those of ``torch.distributed.checkpoint``, and its own tools read them. The index is JSON besides, so that
loading unpickles nothing. ``write.py`` and ``read.py`` move the tensors.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from lightstep.checkpoint.errors import DamagedError, error_text
from lightstep.checkpoint.layout import INDEX

PART_BYTES = 128 * 2**20
"""How much may be in host memory on its way to or from the files; two tensors always may, however large."""


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this rank holds: ``lengths`` elements from ``offsets`` on, of ``shape``."""

    shape: torch.Size
    offsets: torch.Size
    lengths: torch.Size
    sharded: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


def whole(shape: Iterable[int]) -> Shard:
    """The shard of a tensor that every rank has all of."""
    shape = torch.Size(shape)
    return Shard(shape, torch.Size([0] * len(shape)), shape)


def shard_of(tensor: Tensor) -> Shard | None:
    """This rank's part of a plain tensor or DTensor; ``None`` when the rank is not in the DTensor's mesh."""
    if type(tensor) in (Tensor, nn.Parameter):
        return whole(tensor.shape)
    items = create_default_local_save_plan({"": tensor}, is_coordinator=False).items
    if not items or items[0].tensor_data is None:
        return None
    data = items[0].tensor_data
    return Shard(data.size, data.chunk.offsets, data.chunk.sizes, items[0].type is WriteItemType.SHARD)


@dataclass(eq=False)
class Source:
    """A tensor to write: ``fetch`` returns this rank's local part and is called when its turn comes.

    Attributes:
        of: the live tensor of the model that it is, or to whose optimizer state it belongs.
        entry: which one there; ``None``: it is the tensor itself.
        written: called by any thread when what was fetched has been written.
    """

    key: str
    shard: Shard
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    of: Tensor | None = None
    entry: str | None = None
    written: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.shard.numel * self.dtype.itemsize

    def read_by(self, fetch: Callable[[], Tensor], written: Callable[[], object] = lambda: None) -> Source:
        """The same tensor, fetched from elsewhere."""
        return Source(self.key, self.shard, self.dtype, fetch, self.of, self.entry, written)


@dataclass(eq=False)
class Target:
    """A tensor to read: ``make`` returns the local tensor to fill, ``arrived`` is told when it is full."""

    key: str
    shard: Shard
    make: Callable[[], Tensor]
    arrived: Callable[[Tensor], None] = lambda tensor: None


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file: ``nbytes`` from ``start`` on, as ``torch.save`` writes it."""

    offsets: torch.Size
    lengths: torch.Size
    file: str
    start: int
    nbytes: int
    checksum: int | None = None
    """``None`` in files of before there were checksums, and of other libraries."""


@dataclass(frozen=True)
class Stored:
    """A tensor as the checkpoint has it."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Index = dict[str, Stored]


def join(parts: Iterable[Index]) -> Index:
    """One index of what several ranks wrote."""
    joined: Index = {}
    for part in parts:
        for key, stored in part.items():
            before = joined[key].chunks if key in joined else ()
            joined[key] = Stored(stored.dtype, stored.shape, (*before, *stored.chunks))
    return joined


def file_sizes(index: Index) -> dict[str, int]:
    """The files that an index knows, to the last byte."""
    ends: dict[str, int] = {}
    for stored in index.values():
        for chunk in stored.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.nbytes)
    return ends


def format_index(index: Index) -> bytes:
    """The JSON: per tensor its chunks, ``[offsets, lengths, number of the file, start, bytes]``, and their CRC-32."""
    files = sorted(file_sizes(index))
    number = {file: i for i, file in enumerate(files)}
    tensors = {
        key: {
            "dtype": str(stored.dtype).removeprefix("torch."),
            "shape": list(stored.shape),
            "chunks": [[list(c.offsets), list(c.lengths), number[c.file], c.start, c.nbytes] for c in stored.chunks],
            "crc32": [c.checksum for c in stored.chunks],
        }
        for key, stored in index.items()
    }
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode()


def parse_index(text: bytes) -> Index:
    """Which tensors the checkpoint holds, by key, and where.

    Raises:
        DamagedError: it is no index.
    """
    try:
        content = json.loads(text)
        return {key: _parse_stored(entry, content["files"]) for key, entry in content["tensors"].items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedError(f"{INDEX} cannot be read: {error_text(error)}") from error


def _parse_stored(entry: dict[str, Any], files: Sequence[str]) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype) or any(PurePosixPath(file).name != file for file in files):
        raise ValueError(f"unknown dtype {entry['dtype']!r} or a file outside the folder")
    checksums = entry.get("crc32") or [None] * len(entry["chunks"])
    chunks = tuple(
        Chunk(torch.Size(offsets), torch.Size(lengths), files[file], int(start), int(size), checksum)
        for (offsets, lengths, file, start, size), checksum in zip(entry["chunks"], checksums, strict=True)
    )
    return Stored(dtype, torch.Size(entry["shape"]), chunks)


def format_torchs_index(index: Index) -> bytes:
    """The same for torch's own tools: a pickle of its classes."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for key, stored in index.items():
        chunks = [ChunkStorageMetadata(chunk.offsets, chunk.lengths) for chunk in stored.chunks]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), stored.shape, chunks)
        for number, chunk in enumerate(stored.chunks):
            place = MetadataIndex(key, chunk.offsets, number)
            places[place] = _StorageInfo(chunk.file, chunk.start, chunk.nbytes)
    return pickle.dumps(Metadata(tensors, storage_data=places, storage_meta=StorageMeta()))
