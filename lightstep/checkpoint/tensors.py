"""Tensors of a checkpoint: the index that locates each in the files, writing them, and reading them.

The files are in the format of ``torch.distributed.checkpoint``, and torch's tools can read them. lightstep itself reads
a JSON index, so that loading unpickles nothing.

Writing: :func:`share` decides which rank writes what. After that no communication is needed. Each rank fetches its
share one tensor at a time from any :class:`Source`, and threads write it. Reading: each rank reads the parts that it
needs, from the files of any number of ranks.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

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

from lightstep.checkpoint.background import Worker, workers
from lightstep.checkpoint.errors import CheckpointError, DamagedError, error_text
from lightstep.checkpoint.layout import INDEX, reading
from lightstep.checkpoint.storage import storage_for
from lightstep.crc32 import crc32
from lightstep.distributed import Ranks, empty_in_order, memory_order, whole_shape

IN_FLIGHT_BYTES = 128 * 2**20
"""Limit on the bytes in host memory on their way to or from the files. Two tensors or chunks of any size are always
allowed: one is read while the other is used."""


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

    @property
    def region(self) -> tuple[slice, ...]:
        """Its place in the tensor."""
        return tuple(slice(start, start + n) for start, n in zip(self.offsets, self.lengths, strict=True))


def full_shard(shape: Iterable[int]) -> Shard:
    """The shard that is the whole tensor."""
    shape = torch.Size(shape)
    return Shard(shape, torch.Size([0] * len(shape)), shape)


def shard_of(tensor: Tensor) -> Shard | None:
    """This rank's part of a plain tensor or DTensor; ``None`` when the rank is not in the DTensor's mesh."""
    if type(tensor) in (Tensor, nn.Parameter):
        return full_shard(whole_shape(tensor))
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
    """A tensor to read: ``allocate`` returns the local tensor to fill, ``on_filled`` is called with the filled one.

    Without ``allocate`` it is any memory that nobody else has, in the dtype that is stored.
    """

    key: str
    shard: Shard
    allocate: Callable[[], Tensor] | None
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
    """CRC-32 of these bytes; ``None`` in files of other libraries."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the checkpoint's files."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


Index = dict[str, StoredTensor]


def without_files(stored: StoredTensor, files: Collection[str]) -> StoredTensor:
    """The tensor without its chunks in these files."""
    return replace(stored, chunks=tuple(chunk for chunk in stored.chunks if chunk.file not in files))


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
    numbers = [number for offsets, lengths, *others in entry["chunks"] for number in (*offsets, *lengths, *others)]
    if any(type(number) is not int or number < 0 for number in [*numbers, *entry["crc32"]]):
        raise ValueError(f"a chunk has {entry['chunks']}, with the checksums {entry['crc32']}")
    chunks = tuple(
        Chunk(torch.Size(offsets), torch.Size(lengths), files[file], int(start), int(size), checksum)
        for (offsets, lengths, file, start, size), checksum in zip(entry["chunks"], entry["crc32"], strict=True)
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


FILE_BYTES = 512 * 2**20
"""A file ends with the tensor that brings it to this size."""

_WRITERS = 4
"""Threads, each with its own files: one computes checksums while another waits for the disk."""


def share(sources: Sequence[Source], ranks: Ranks, disks: Sequence[int]) -> list[Source]:
    """The ``sources`` that this rank writes. A shard that several ranks have is written by one of them on each disk.

    All ranks write about the same number of bytes. The order stays: consecutive entries of one parameter are built
    once. Called by all ranks.

    Args:
        disks: each rank's disk, by number.
    """
    own = {(source.key, source.shard.offsets): source for source in sources if _has_data(source)}
    if not ranks.is_distributed:
        return list(own.values())
    load = [0] * ranks.size
    sizes = ranks.gather({shard: source.nbytes for shard, source in own.items()})
    owners: dict[tuple[int, tuple[str, torch.Size]], list[int]] = {}
    for rank, shards in enumerate(sizes):
        for shard in shards:
            owners.setdefault((disks[rank], shard), []).append(rank)
    writer = {}
    for (disk, shard), candidates in owners.items():
        writer[disk, shard] = rank = min(candidates, key=lambda rank: load[rank])
        load[rank] += sizes[rank][shard]
    return [source for shard, source in own.items() if writer[disks[ranks.rank], shard] == ranks.rank]


def write_tensors(folder: Path, sources: Sequence[Source], rank: int = 0) -> Index:
    """Write ``sources`` to files of this rank, and return their index.

    At most :data:`IN_FLIGHT_BYTES`, or two tensors, are in host memory at a time, and what the last fetch built.

    Raises:
        Exception: the first error of a fetch or of the storage. Files may have been written.
    """
    count = min(_WRITERS, max(1, math.ceil(sum(source.nbytes for source in sources) / IN_FLIGHT_BYTES)))
    written: list[Index] = []
    in_flight: deque[tuple[int, Future[Index]]] = deque()
    in_flight_bytes = 0
    with without_torch_crc32(), ExitStack() as stack:
        writers = [stack.enter_context(_Writer(folder, f"__{rank}_{number}_")) for number in range(count)]
        for source in sources:
            while len(in_flight) > 1 and in_flight_bytes >= IN_FLIGHT_BYTES:
                nbytes, future = in_flight.popleft()
                written.append(future.result())
                in_flight_bytes -= nbytes
            writer = min(writers, key=lambda writer: writer.nbytes)
            tensor = _fetch(source)
            in_flight.append((source.nbytes, writer.write(source, tensor)))
            del tensor
            in_flight_bytes += source.nbytes
        written += [future.result() for _, future in in_flight]
        for closed in [writer.submit(writer.close) for writer in writers]:
            closed.result()
    return merge_indices(written)


class _Writer(Worker):
    """A worker that writes one file after another."""

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__()
        self.nbytes = 0
        """Bytes submitted so far."""
        self._folder, self._prefix = folder, prefix
        self._files = 0
        self._file: _ChecksummedFile | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._file is not None:
            self._file.stream.close()

    def write(self, source: Source, tensor: Tensor) -> Future[Index]:
        self.nbytes += source.nbytes
        return self.submit(partial(self._write, source, tensor))

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
            self.close()
        return {source.key: StoredTensor(source.dtype, shard.shape, (chunk,))}

    def close(self) -> None:
        """A task: end the file."""
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
    # `Tensor.numpy()` would pin the storage at its size, and weights that rest on the host leave theirs.
    data = torch.from_dlpack(tensor.view(-1).view(torch.uint8))  # the same memory
    return data.view(tensor.dtype).view(tensor.shape)


def _has_data(source: Source) -> bool:
    """Empty shards are not written. Empty tensors are, so that the checkpoint lists them."""
    return source.shard.numel > 0 or math.prod(source.shard.shape) == 0


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
        DamagedError, UnreadableError: as :func:`read_chunk`. Some targets may have been filled.
        CheckpointError: a part of a tensor is not in the checkpoint.
    """
    overlaps = [(target, _overlaps(target, index)) for target in targets]
    needed = [(target.key, overlap.chunk) for target, found in overlaps for overlap in found]
    cache = cache or ChunkCache()
    with closing(_prefetched(folder, needed, cache)) as chunks:
        for target, found in overlaps:
            dtype = index[target.key].dtype
            if target.allocate is None and [overlap.chunk.lengths for overlap in found] == [target.shard.lengths]:
                tensor = next(chunks)
                cache.add(found[0].chunk, tensor)
                target.on_filled(tensor.to(dtype))
                continue
            local = None if target.allocate is None else target.allocate()
            with torch.no_grad():
                for overlap in found:
                    tensor = next(chunks)
                    if local is None:  # an entry's order in memory is kept
                        local = empty_in_order(target.shard.lengths, memory_order(tensor), dtype)
                    local[overlap.in_target].copy_(tensor[overlap.in_chunk])
                    cache.add(overlap.chunk, tensor)
            target.on_filled(torch.empty(target.shard.lengths, dtype=dtype) if local is None else local)


def read_whole(folder: Path, key: str, stored: StoredTensor) -> Tensor:
    """A whole tensor.

    Raises:
        CheckpointError: as :func:`read_tensors`.
    """
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    read_tensors(folder, {key: stored}, [Target(key, full_shard(stored.shape), lambda: whole)])
    return whole


def read_chunk(folder: Path, key: str, chunk: Chunk) -> Tensor:
    """A chunk's bytes (uint8), compared with their checksum.

    Raises:
        DamagedError: they differ, or the file is gone; the message has file, tensor and offset.
        UnreadableError: the network or a disk failed.
    """
    file = folder / chunk.file
    where = f"{file} is damaged: {key.partition('.')[2]} ({key.partition('.')[0]}) at byte {chunk.start}"
    content = torch.empty(chunk.nbytes, dtype=torch.uint8)
    try:
        with reading(file, listed=True):
            found = storage_for(file).read(file, chunk.start, _view(content))
    except OSError as error:
        raise DamagedError(f"{where}: {error_text(error)}") from error
    if found < chunk.nbytes:
        raise DamagedError(f"{where}: the file ends {chunk.nbytes - found} bytes early")
    checksum = None if chunk.checksum is None else crc32(_view(content))
    if checksum != chunk.checksum:
        raise DamagedError(f"{where}: the checksum of {chunk.nbytes} bytes is {checksum:08x}, not {chunk.checksum:08x}")
    return content


def _view(content: Tensor) -> memoryview:
    return memoryview(cast(Any, content.numpy()))


class IncompleteTensorError(CheckpointError):
    """A part of a tensor is not in the checkpoint."""


@dataclass(frozen=True)
class _Overlap:
    """The region that a chunk and a target have in common."""

    chunk: Chunk
    in_chunk: tuple[slice, ...]
    in_target: tuple[slice, ...]


def _overlaps(target: Target, index: Index) -> list[_Overlap]:
    shard = target.shard
    found = []
    if target.allocate is None and not shard.numel and len(shard.lengths) > 1 and index[target.key].chunks:
        nothing = (slice(0, 0),) * len(shard.shape)
        return [_Overlap(index[target.key].chunks[0], nothing, nothing)]  # its order in memory counts
    chunks = {(chunk.offsets, chunk.lengths): chunk for chunk in index[target.key].chunks if shard.numel > 0}
    for chunk in chunks.values():  # each part of a save on several disks may have the same one
        ends = zip(chunk.offsets, chunk.lengths, shard.offsets, shard.lengths, strict=True)
        common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in ends]
        if all(start < end for start, end in common):
            in_chunk = tuple(slice(start - a, end - a) for (start, end), a in zip(common, chunk.offsets, strict=True))
            in_target = tuple(slice(start - b, end - b) for (start, end), b in zip(common, shard.offsets, strict=True))
            found.append(_Overlap(chunk, in_chunk, in_target))
    if sum(math.prod(part.stop - part.start for part in overlap.in_target) for overlap in found) != shard.numel:
        raise IncompleteTensorError(f"the checkpoint does not hold all of {target.key}")
    return found


def _prefetched(folder: Path, needed: Sequence[tuple[str, Chunk]], cache: ChunkCache) -> Generator[Tensor, None, None]:
    """The ``needed`` chunks in order. At most :data:`IN_FLIGHT_BYTES` of them, but at least one, are read ahead."""
    with workers(min(_READERS, len(needed))) as submit:
        ahead: deque[tuple[int, Future[Tensor]]] = deque()
        for key, chunk in needed:
            ahead.append((chunk.nbytes, submit(partial(_load_unless, cache.pop(chunk), folder, key, chunk))))
            while len(ahead) > 1 and sum(nbytes for nbytes, _ in ahead) > IN_FLIGHT_BYTES:
                yield ahead.popleft()[1].result()
        while ahead:
            yield ahead.popleft()[1].result()


def _load_unless(cached: Tensor | None, folder: Path, key: str, chunk: Chunk) -> Tensor:
    return _load(folder, key, chunk) if cached is None else cached


def _load(folder: Path, key: str, chunk: Chunk) -> Tensor:
    content = read_chunk(folder, key, chunk)
    try:
        tensor = _tensor_in(content)
    except Exception as error:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start}: {error_text(error)}") from error
    if not isinstance(tensor, Tensor) or tensor.shape != chunk.lengths:
        raise DamagedError(f"{folder / chunk.file}: {key} at byte {chunk.start} is not the tensor that the index names")
    return tensor


def _tensor_in(content: Tensor) -> Any:
    """What ``torch.save`` has written to these bytes: a tensor lies there, without a copy."""
    described = torch.load(cast(BinaryIO, _Reader(content)), map_location="meta", weights_only=True)
    if not isinstance(described, Tensor):
        return described
    storage = described.untyped_storage()
    start = storage._checkpoint_offset
    assert start is not None, "torch sets it for the meta device"
    elements = content[start : start + storage.nbytes()].view(described.dtype)
    first = elements.storage_offset() + described.storage_offset()
    return elements.as_strided(described.shape, described.stride(), first)


class _Reader(io.RawIOBase):
    """Reads bytes in memory; ``io.BytesIO`` would copy all of them first."""

    def __init__(self, content: Tensor) -> None:
        self._content, self._position = _view(content), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._content[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
