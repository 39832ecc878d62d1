"""Tensors of a checkpoint, through ``torch.distributed.checkpoint``: each rank writes its shards, any ranks read them.

Torch plans, de-duplicates, writes and reshards. What is added here: tensors are fetched one at a time when their turn
comes (so that saving state that is built on access does not double host memory), files are of bounded size, and the
index is JSON, so that loading unpickles nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightstep.checkpoint.errors import CheckpointError, error_text
from lightstep.checkpoint.layout import INDEX, TORCHS_INDEX, sizes
from lightstep.checkpoint.storage import sync, write_file

FILE_BYTES = 512 * 2**20
"""Files end after the tensor that reaches this size; each is flushed to disk while the next one is written."""

PART_BYTES = 32 * 2**20
"""The same for the parts that a file is written in: torch keeps the host copies of a part until it is written."""


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
    items = create_default_local_save_plan({"": tensor}, is_coordinator=False).items
    if not items or items[0].tensor_data is None:
        return None
    data = items[0].tensor_data
    return Shard(data.size, data.chunk.offsets, data.chunk.sizes, items[0].type is WriteItemType.SHARD)


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to write: ``fetch`` returns this rank's local part and is called when its turn comes."""

    key: str
    shard: Shard
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


@dataclass(eq=False)
class Target:
    """A tensor to read: ``make`` returns the local tensor to fill, ``arrived`` is told when it is full."""

    key: str
    shard: Shard
    make: Callable[[], Tensor]
    arrived: Callable[[Tensor], None] = lambda tensor: None


@dataclass(frozen=True)
class Stored:
    """A tensor as the checkpoint has it; ``places`` are (file, first byte, bytes) of each chunk."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[ChunkStorageMetadata, ...]
    places: tuple[tuple[str, int, int], ...]


def write_tensors(folder: Path, sources: Sequence[Source], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Write every rank's ``sources`` into ``folder``, all ranks at once; equal keys and offsets are written once.

    Returns:
        The files that this rank wrote, and their sizes.

    Raises:
        CheckpointError: on all ranks, with the cause, when any of them could not write.
    """
    writer = _Writer(folder)
    with _dcp_errors(), _without_single_process_warning():
        dcp.save({}, storage_writer=writer, planner=_SavePlanner(sources), process_group=group)
    return sizes(folder, writer.files)


def read_tensors(folder: Path, index: dict[str, Stored], targets: Sequence[Target]) -> None:
    """Fill ``targets`` from ``folder``; each rank reads what it needs, without talking to the others.

    Raises:
        CheckpointError: a file cannot be read; some targets may be filled by then.
    """
    with _dcp_errors(), _without_single_process_warning():
        dcp.load({}, storage_reader=_Reader(folder, index), planner=_LoadPlanner(targets), no_dist=True)


def read_index(folder: Path) -> dict[str, Stored]:
    """Which tensors the checkpoint holds, by key, and where.

    Raises:
        CheckpointError: the index is damaged.
    """
    try:
        content = json.loads((folder / INDEX).read_text())
        return {key: _parse_stored(entry, content["files"]) for key, entry in content["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error_text(error)}") from error


class _SavePlanner(DefaultSavePlanner):
    """Plans from :class:`Source` objects instead of a state dict."""

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sources = {source.key: source for source in sources}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(source) for source in self._sources.values() if _has_data(source.shard)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._sources[write_item.index.fqn].fetch()


class _Writer(dcp.FileSystemWriter):
    """Bounded files, each flushed to disk while the next one is written, and a JSON index beside torch's pickled one.

    ``thread_count`` stays 1: torch loses the errors of its other writer threads.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.fs = _Appending()
        self.files: list[str] = []
        """What this rank wrote."""
        if torch.cuda.is_available() and not torch.cuda.is_initialized():
            self.per_thread_copy_ahead = 0  # nothing to copy ahead, and torch would start CUDA for it

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            with ThreadPoolExecutor(max_workers=1) as flusher, _without_checksums():
                results = self._write_files(plan, planner, flusher)
        except Exception as error:
            raise CheckpointError(error_text(error)) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_files(self, plan: SavePlan, planner: SavePlanner, flusher: ThreadPoolExecutor) -> list[WriteResult]:
        results: list[WriteResult] = []
        flushed = []
        for number, items in enumerate(_cut(plan.items, FILE_BYTES)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            written: list[WriteResult] = []
            for part in _cut(items, PART_BYTES):
                part_plan = dataclasses.replace(plan, items=part, storage_data=prefix)
                written += super().write_data(part_plan, planner).wait()
            results += written
            for file in {result.storage_data.relative_path for result in written}:
                self.files.append(file)
                flushed.append(flusher.submit(sync, Path(self.path) / file))
        for pending in flushed:
            pending.result()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        sync(Path(self.path) / TORCHS_INDEX)
        write_file(Path(self.path) / INDEX, _format_index(metadata, results))
        self.files += [TORCHS_INDEX, INDEX]

    def storage_meta(self) -> StorageMeta:
        """Without the path: it is a temporary one, and nobody else's business."""
        return StorageMeta(save_id=self.save_id)


class _Appending(FileSystem):
    """Torch opens a file anew for each part, which goes behind the ones before it; in a new folder nothing else is."""

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        return super().create_stream(path, "ab" if mode == "wb" else mode)


class _Reader(dcp.FileSystemReader):
    """Takes its metadata from the JSON index; torch reads each tensor with ``weights_only=True``."""

    def __init__(self, folder: Path, index: dict[str, Stored]) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for key, stored in self._index.items():
            tensors[key] = _tensor_metadata(stored)
            for chunk, place in zip(stored.chunks, stored.places, strict=True):
                places[MetadataIndex(key, chunk.offsets)] = _Place(*place)
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))


@dataclass(frozen=True)
class _Place:
    """What torch's reader wants to know of a chunk."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _LoadPlanner(LoadPlanner):
    """Reads into :class:`Target` objects; they are told one by one when they are full."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._tensors: dict[int, Tensor] = {}
        self._missing: dict[int, int] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, target in enumerate(self._targets):
            needed = self._items_of(number, target)
            self._missing[number] = len(needed)
            items += needed
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        for number, missing in self._missing.items():
            if missing == 0:
                self._targets[number].arrived(self._targets[number].make())
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor; nothing else is read this way")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = int(read_item.dest_index.fqn)
        if number not in self._tensors:
            self._tensors[number] = self._targets[number].make().detach()
        part = self._tensors[number]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        number = int(read_item.dest_index.fqn)
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._targets[number].arrived(self._tensors.pop(number))

    def _items_of(self, number: int, target: Target) -> list[ReadItem]:
        if target.shard.numel == 0:
            return []
        chunk = ChunkStorageMetadata(target.shard.offsets, target.shard.lengths)
        stored: Any = self._metadata.state_dict_metadata[target.key]
        items = create_read_items_for_chunk_list(target.key, stored, [chunk])
        if sum(math.prod(item.lengths) for item in items) != target.shard.numel:
            raise CheckpointError(f"the checkpoint does not hold all of {target.key}")
        return [dataclasses.replace(item, dest_index=MetadataIndex(str(number))) for item in items]


class _dcp_errors:
    """Torch reports what happened on any rank as a ``BaseException``; make it one :class:`CheckpointError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, CheckpointException):
            return
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from error
        rank, cause = next(iter(causes.items()))
        text = str(cause) if isinstance(cause, CheckpointError) else error_text(cause)
        raise CheckpointError(text if len(causes) == 1 and rank == 0 else f"rank {rank}: {text}") from error


@contextmanager
def _without_checksums() -> Iterator[None]:
    """``torch.save`` without CRC-32, which holds one core to 1 GB/s and which ``torch.load`` does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _without_single_process_warning(warnings.catch_warnings):
    """Torch warns that it works without a process group, which is what was asked for."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return entered


def _has_data(shard: Shard) -> bool:
    """Empty shards are not written, empty tensors are (their existence counts)."""
    return shard.numel > 0 or math.prod(shard.shape) == 0


def _write_item(source: Source) -> WriteItem:
    shard = source.shard
    return WriteItem(
        index=MetadataIndex(source.key, shard.offsets),
        type=WriteItemType.SHARD if shard.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(shard.offsets, shard.lengths),
            properties=TensorProperties(dtype=source.dtype),
            size=shard.shape,
        ),
    )


def _cut(items: Sequence[WriteItem], size: int) -> Iterator[list[WriteItem]]:
    """Consecutive items, about ``size`` bytes together."""
    part: list[WriteItem] = []
    filled = 0
    for item in items:
        assert item.tensor_data is not None
        part.append(item)
        filled += math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if filled >= size:
            yield part
            part, filled = [], 0
    if part:
        yield part


def _format_index(metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
    places = {result.index: result.storage_data for ranks in results for result in ranks}
    files = sorted({place.relative_path for place in places.values()})
    number = {file: i for i, file in enumerate(files)}
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            where = [number[place.relative_path], place.offset, place.length]
            chunks.append([list(chunk.offsets), list(chunk.sizes), *where])
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return json.dumps({"files": files, "tensors": tensors}, separators=(",", ":")).encode()


def _parse_stored(entry: dict[str, Any], files: list[str]) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype) or any(Path(file).name != file for file in files):
        raise ValueError(f"unknown dtype {entry['dtype']!r} or a file outside the folder")
    chunks, places = [], []
    for offsets, lengths, file, start, size in entry["chunks"]:
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
        places.append((files[file], int(start), int(size)))
    return Stored(dtype, torch.Size(entry["shape"]), tuple(chunks), tuple(places))


def _tensor_metadata(stored: Stored) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), stored.shape, list(stored.chunks))
