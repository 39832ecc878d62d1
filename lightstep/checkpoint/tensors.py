"""Tensors of a checkpoint: what is written, what is read, and the index that locates every tensor in the files.

The files are in the format of ``torch.distributed.checkpoint``, and torch's tools can read them. lightstep itself reads
a JSON index, so that loading unpickles nothing. ``write.py`` and ``read.py`` move the tensors.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
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

IN_FLIGHT_BYTES = 128 * 2**20
"""Limit on the bytes in host memory on their way to or from the files. Writing always allows two tensors of any size,
reading one chunk."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor of ``shape``: ``lengths`` elements per dimension from ``offsets`` on."""

    shape: torch.Size
    offsets: torch.Size
    lengths: torch.Size
    sharded: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)


def full_shard(shape: Iterable[int]) -> Shard:
    """The shard that is the whole tensor."""
    shape = torch.Size(shape)
    return Shard(shape, torch.Size([0] * len(shape)), shape)


def shard_of(tensor: Tensor) -> Shard | None:
    """This rank's part of a plain tensor or DTensor; ``None`` when the rank is not in the DTensor's mesh."""
    if type(tensor) in (Tensor, nn.Parameter):
        return full_shard(tensor.shape)
    if not hasattr(tensor, "placements"):
        return _planned_shard(tensor)
    key = (tensor.shape, tensor.device_mesh, tensor.placements, dist.get_rank())  # type: ignore[attr-defined]
    if key not in _known_shards:
        _known_shards[key] = _planned_shard(tensor)
    return _known_shards[key]


_known_shards: dict[tuple[Any, ...], Shard | None] = {}
"""By shape, mesh, placements and rank. torch's plan of one tensor takes long, and many tensors are alike."""


def _planned_shard(tensor: Tensor) -> Shard | None:
    items = create_default_local_save_plan({"": tensor}, is_coordinator=False).items
    if not items or items[0].tensor_data is None:
        return None
    data = items[0].tensor_data
    return Shard(data.size, data.chunk.offsets, data.chunk.sizes, items[0].type is WriteItemType.SHARD)


@dataclass(eq=False)
class Source:
    """A tensor to write.

    Attributes:
        key: its name in the checkpoint.
        shard: the part that this rank writes.
        dtype: of the tensor.
        fetch: returns this rank's part; called when the part is about to be written.
        model_tensor: the model's tensor that is written, or the parameter whose optimizer state is written.
        entry: the name of the optimizer state entry; ``None`` for the model's tensor itself.
        on_written: called from any thread when the part has been written.
    """

    key: str
    shard: Shard
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    model_tensor: Tensor | None = None
    entry: str | None = None
    on_written: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        return self.shard.numel * self.dtype.itemsize

    def with_fetch(self, fetch: Callable[[], Tensor], on_written: Callable[[], object] = lambda: None) -> Source:
        """The same tensor with another ``fetch``."""
        return replace(self, fetch=fetch, on_written=on_written)


@dataclass(eq=False)
class Target:
    """A tensor to read: ``allocate`` returns the local tensor to fill, ``on_filled`` is called with the filled one."""

    key: str
    shard: Shard
    allocate: Callable[[], Tensor]
    on_filled: Callable[[Tensor], None] = lambda tensor: None


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file: ``nbytes`` bytes from ``start`` on, in the format of ``torch.save``."""

    offsets: torch.Size
    lengths: torch.Size
    file: str
    start: int
    nbytes: int
    checksum: int | None = None
    """CRC-32 of these bytes. ``None`` in files from versions without checksums, and from other libraries."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the checkpoint's files."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Index = dict[str, StoredTensor]


def merge_indices(indices: Iterable[Index]) -> Index:
    """One index for the tensors in all of ``indices``."""
    merged: Index = {}
    for index in indices:
        for key, stored in index.items():
            before = merged[key].chunks if key in merged else ()
            merged[key] = StoredTensor(stored.dtype, stored.shape, (*before, *stored.chunks))
    return merged


def file_sizes(index: Index) -> dict[str, int]:
    """The size in bytes of each file in the index: where its last chunk ends."""
    ends: dict[str, int] = {}
    for stored in index.values():
        for chunk in stored.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.nbytes)
    return ends


def format_index(index: Index) -> bytes:
    """The index as JSON: per tensor its chunks, ``[offsets, lengths, file number, start, bytes]``, and their CRC-32."""
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
    """The index in ``text``, as :func:`format_index` wrote it.

    Raises:
        DamagedError: ``text`` is not an index.
    """
    try:
        content = json.loads(text)
        return {key: _parse_stored(entry, content["files"]) for key, entry in content["tensors"].items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise DamagedError(f"{INDEX} cannot be read: {error_text(error)}") from error


def _parse_stored(entry: dict[str, Any], files: Sequence[str]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype) or any(PurePosixPath(file).name != file for file in files):
        raise ValueError(f"unknown dtype {entry['dtype']!r} or a file outside the folder")
    checksums = entry.get("crc32") or [None] * len(entry["chunks"])
    numbers = [number for offsets, lengths, *others in entry["chunks"] for number in (*offsets, *lengths, *others)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a chunk has {entry['chunks']}")
    if any(type(checksum) not in (int, type(None)) for checksum in checksums):
        raise ValueError(f"a chunk has the checksum {checksums}")
    chunks = tuple(
        Chunk(torch.Size(offsets), torch.Size(lengths), files[file], int(start), int(size), checksum)
        for (offsets, lengths, file, start, size), checksum in zip(entry["chunks"], checksums, strict=True)
    )
    return StoredTensor(dtype, torch.Size(entry["shape"]), chunks)


def format_torch_index(index: Index) -> bytes:
    """The index for torch's tools: a pickle of torch's classes."""
    tensors: dict[str, Any] = {}
    locations: dict[MetadataIndex, Any] = {}
    for key, stored in index.items():
        chunks = [ChunkStorageMetadata(chunk.offsets, chunk.lengths) for chunk in stored.chunks]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), stored.shape, chunks)
        for number, chunk in enumerate(stored.chunks):
            location = _StorageInfo(chunk.file, chunk.start, chunk.nbytes)
            locations[MetadataIndex(key, chunk.offsets, number)] = location
    return pickle.dumps(Metadata(tensors, storage_data=locations, storage_meta=StorageMeta()))
