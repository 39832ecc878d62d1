"""Matrices that are divided among ranks: each is gathered on one rank, its owner, and the result scattered back.

The matrices of a unit are sent together, in two all-to-alls: blocks to the owners, results back. Starting and waiting
are separate calls, so that other work can overlap them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightstep.distributed.groups import get_or_make_group
from lightstep.distributed.replicas import Replicas

__all__ = ["MatrixExchange", "MatrixTransfer", "Rows", "rows_of"]


class Block(NamedTuple):
    """Rows ``row`` to ``row_stop`` and columns ``column`` to ``column_stop`` of a matrix, stops excluded."""

    row: int
    row_stop: int
    column: int
    column_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_stop - self.row, self.column_stop - self.column

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.row : self.row_stop, self.column : self.column_stop]


@dataclass(frozen=True)
class Rows:
    """How a tensor is divided among the ranks of a process group: by rows, and with tensor parallelism by columns too.

    Attributes:
        shape: of the whole tensor.
        blocks: one per rank, in rank order; some may be empty. Further dimensions count as columns.
    """

    shape: torch.Size
    blocks: tuple[Block, ...]
    group: dist.ProcessGroup

    @property
    def most(self) -> int:
        """Elements of the largest block."""
        return max(block.numel() for block in self.blocks)

    def blocks_of(self, whole: Tensor) -> list[Tensor]:
        """The blocks of a whole tensor of this shape, as matrices: views of it if it is contiguous."""
        matrix = whole.reshape(whole.shape[0], -1)
        return [block.of(matrix) for block in self.blocks]

    def local_shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the ranks' parts."""
        if len(self.shape) == 2:
            return {block.shape for block in self.blocks}
        return {(block.shape[0], *self.shape[1:]) for block in self.blocks}


def rows_of(parameter: Tensor, local: Tensor) -> Rows | None:
    """How a parameter is divided; ``None`` if it is whole on every rank, or divided in another way than :class:`Rows`.

    Args:
        local: this rank's part of it.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [dim for dim, placed in enumerate(placements) if not placed.is_replicate() and mesh.size(dim) > 1]
    dims = [getattr(placements[dim], "dim", None) for dim in sharded]
    known = all(dim == 0 or (dim == 1 and parameter.dim() == 2) for dim in dims)
    if not sharded or not known or any(placements[dim].is_partial() for dim in sharded):
        return None
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "this rank has no part in the parameter's mesh"
    group = _group_of(mesh, sharded, coordinates)
    blocks = {}
    for rank in dist.get_process_group_ranks(group):
        place = (mesh.mesh == rank).nonzero()[0].tolist()
        blocks[rank] = _block(parameter, sharded, place)
    own = blocks[dist.get_rank()]
    return Rows(parameter.shape, tuple(blocks.values()), group) if own.numel() == local.numel() else None


def _group_of(mesh: DeviceMesh, dims: Sequence[int], coordinates: Sequence[int]) -> dist.ProcessGroup:
    """The ranks whose coordinates differ from this rank's only in these dimensions of the mesh."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    index = tuple(slice(None) if dim in dims else place for dim, place in enumerate(coordinates))
    ranks = sorted(mesh.mesh[index].flatten().tolist())
    return get_or_make_group(tuple(ranks), torch.device(mesh.device_type))


def _block(parameter: DTensor, sharded: Sequence[int], place: Sequence[int]) -> Block:
    """The block of the rank at this place in the mesh. Strided placements divide what the placements behind them have
    left: FSDP2 comes before tensor parallelism in the mesh."""
    rows, columns = [0, parameter.shape[0]], [0, parameter.shape[1:].numel()]
    strided = [dim for dim in sharded if hasattr(parameter.placements[dim], "split_factor")]
    for dim in [*(dim for dim in sharded if dim not in strided), *reversed(strided)]:
        span = rows if parameter.placements[dim].dim == 0 else columns  # type: ignore[attr-defined]
        each = -(-(span[1] - span[0]) // parameter.device_mesh.size(dim))
        start = min(span[0] + place[dim] * each, span[1])
        span[:] = start, min(start + each, span[1])
    return Block(*rows, *columns)


@dataclass(eq=False)
class _Plan:
    """Which rank owns which matrices of a unit.

    Attributes:
        of_rank: the numbers of the matrices that each rank owns.
        sent, received: elements sent to each rank, and received from each.
    """

    rows: Sequence[Rows]
    rank: int
    of_rank: list[list[int]]
    sent: list[int] = field(init=False)
    received: list[int] = field(init=False)

    def __post_init__(self) -> None:
        def elements(numbers: list[int], source: int) -> int:
            return sum(self.rows[number].blocks[source].numel() for number in numbers)

        self.own = self.of_rank[self.rank]
        self.sent = [elements(numbers, self.rank) for numbers in self.of_rank]
        self.received = [elements(self.own, source) for source in range(len(self.of_rank))]


class _Buffers:
    """Memory for the transfer of one unit: this rank's blocks, and the matrices that it owns as blocks of all ranks."""

    def __init__(self) -> None:
        self.blocks, self.matrices = (torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2))
        self._views: dict[tuple[_Plan, torch.dtype], tuple[Any, ...]] = {}

    def views(self, plan: _Plan, like: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Both buffers, flat; this rank's block of each matrix; and for each owned matrix the blocks of all ranks."""
        if (plan, like) not in self._views:
            self._reserve(sum(plan.sent) * like.itemsize, sum(plan.received) * like.itemsize, device)
            blocks = self.blocks[: sum(plan.sent) * like.itemsize].view(like)
            matrices = self.matrices[: sum(plan.received) * like.itemsize].view(like)
            numbers = [number for own in plan.of_rank for number in own]
            found = dict(zip(numbers, _cut(blocks, [plan.rows[n].blocks[plan.rank] for n in numbers]), strict=True))
            own = [plan.rows[number] for number in plan.own]
            received = _cut(matrices, [rows.blocks[source] for source in range(len(plan.sent)) for rows in own])
            pieces = [received[first :: len(own)] for first in range(len(own))]
            self._views[plan, like] = blocks, matrices, [found[n] for n in range(len(plan.rows))], pieces
        return self._views[plan, like]

    def _reserve(self, blocks: int, matrices: int, device: torch.device) -> None:
        if self.blocks.nbytes >= blocks and self.matrices.nbytes >= matrices and self.blocks.device == device:
            return
        self._record_use()
        blocks, matrices = max(blocks, self.blocks.nbytes), max(matrices, self.matrices.nbytes)
        self.blocks, self.matrices = (torch.empty(n, dtype=torch.uint8, device=device) for n in (blocks, matrices))
        self._views.clear()

    def _record_use(self) -> None:
        """Tell the allocator before the buffers are freed: they may be in use on another stream than their own."""
        for memory in (self.blocks, self.matrices):
            if memory.device.type != "cpu":
                memory.record_stream(torch.accelerator.current_stream(memory.device))

    def nbytes(self) -> int:
        return self.blocks.nbytes + self.matrices.nbytes


def _cut(flat: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """Consecutive parts of ``flat`` as views in the shapes of the blocks."""
    parts = flat.split([block.numel() for block in blocks])
    return [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]


class MatrixExchange:
    """The transfers of one group of ranks that compute with whole matrices.

    All ranks start the same units in the same order, and continue them in the same order. The exchange has process
    groups of its own. It keeps memory for the largest number of simultaneous transfers so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = Replicas(group, own_groups=True)
        self._loads = [0] * self._ranks.size
        self._owners: dict[Hashable, tuple[int, int]] = {}  # owner and cost, by key
        self._plans: dict[Hashable, _Plan] = {}
        self._free: list[_Buffers] = []
        self._all: list[_Buffers] = []
        self._whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._assembled: dict[Any, tuple[Tensor, list[Tensor]]] = {}  # views of it

    def open(self, device: torch.device) -> None:
        """Make the process group; all ranks call this at the same time."""
        self._ranks.group_for(device)

    def start(
        self, keys: Sequence[Hashable], rows: Sequence[Rows], dtype: torch.dtype, device: torch.device, each: int = 1
    ) -> MatrixTransfer:
        """A new transfer, with memory for the blocks of these matrices.

        Args:
            keys: one for each of ``rows``. A matrix keeps its owner.
            each: the number of tensors of this division that are sent for each key, one after the other.
        """
        plan_key = tuple(keys), each
        if plan_key not in self._plans:
            self._assign_owners(keys, rows)
            of_rank: list[list[int]] = [[] for _ in self._loads]
            for number, key in enumerate(key for key in keys for _ in range(each)):
                of_rank[self._owners[key][0]].append(number)
            repeated = [divided for divided in rows for _ in range(each)]
            self._plans[plan_key] = _Plan(repeated, self._ranks.rank, of_rank)
        if not self._free:
            self._free.append(_Buffers())
            self._all.append(self._free[0])
        return MatrixTransfer(self, self._plans[plan_key], self._free.pop(), dtype, device)

    def _assign_owners(self, keys: Sequence[Hashable], rows: Sequence[Rows]) -> None:
        new = [number for number, key in enumerate(keys) if key not in self._owners]
        shapes = [rows[number].shape for number in new]
        for number, shape, owner in zip(new, shapes, assign_owners(shapes, self._loads), strict=True):
            self._owners[keys[number]] = owner, orthogonalization_cost(shape)

    def retain(self, keys: Collection[Hashable]) -> None:
        """Forget all other matrices. All ranks call this with the same keys; no transfer may be under way."""
        self._owners = {key: owned for key, owned in self._owners.items() if key in keys}
        self._loads = [
            sum(cost for owner, cost in self._owners.values() if owner == rank) for rank in range(len(self._loads))
        ]
        self._plans.clear()
        self.free()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (picklable), by rank. The host waits."""
        return self._ranks.gather_objects(value)

    def all_reduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The minimum over the ranks of each number. The host waits."""
        return self._ranks.all_reduce_min(numbers)

    def reset(self) -> None:
        """Reclaim the buffers of all transfers, completed or failed."""
        self._free = list(self._all)

    @property
    def address(self) -> int:
        """Of the memory in which matrices are assembled, one after the other; it changes if a larger one comes."""
        return self._whole.data_ptr()

    def nbytes(self) -> int:
        """Device memory held."""
        return self._whole.nbytes + sum(buffers.nbytes() for buffers in self._all)

    def free(self) -> None:
        """Free it; no transfer may be under way."""
        self._free, self._all = [], []
        self._whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._assembled.clear()

    def close(self) -> None:
        """Release the process groups for others; all ranks call this at the same time."""
        self.free()
        self._ranks.close()

    def _send(self, target: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]) -> dist.Work | None:
        """One all-to-all, of bytes: gloo does not know all dtypes."""
        size = source.itemsize
        return dist.all_to_all_single(
            target.view(torch.uint8),
            source.view(torch.uint8),
            [size * n for n in received],
            [size * n for n in sent],
            group=self._ranks.group_for(source.device),
            async_op=True,
        )

    def _matrix(self, rows: Rows, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Scratch memory in which a matrix is assembled, and its blocks."""
        nbytes = rows.shape.numel() * dtype.itemsize
        if self._whole.nbytes < nbytes or self._whole.device != device:
            if self._whole.device.type != "cpu":
                self._whole.record_stream(torch.accelerator.current_stream(self._whole.device))
            self._whole = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._assembled.clear()
        key = rows.shape, rows.blocks, dtype
        if key not in self._assembled:
            matrix = self._whole[:nbytes].view(dtype).view(rows.shape)
            self._assembled[key] = matrix, rows.blocks_of(matrix)
        return self._assembled[key]


class MatrixTransfer:
    """The transfer of one unit's matrices: :meth:`send`, :meth:`compute`, :meth:`wait`, :meth:`release`, in this order.

    Only :meth:`compute` and :meth:`wait` wait: on an accelerator the current stream, on the CPU the caller.

    Attributes:
        blocks: this rank's block [rows, columns] of each matrix. The caller fills them before :meth:`send`; after
            :meth:`wait` they hold the results.
    """

    def __init__(
        self, exchange: MatrixExchange, plan: _Plan, buffers: _Buffers, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._exchange, self._plan, self._buffers = exchange, plan, buffers
        self._flat, self._matrices, self.blocks, self._pieces = buffers.views(plan, dtype, device)
        self._work: dist.Work | None = None

    def send(self) -> None:
        """Send the blocks to the owners."""
        self._work = self._exchange._send(self._matrices, self._flat, self._plan.received, self._plan.sent)

    def compute(self, function: Callable[[int, Tensor], Tensor]) -> None:
        """Send back ``function(i, matrix)`` for each matrix that this rank owns; the result has the same shape."""
        Replicas.wait([self._work])
        for number, pieces in zip(self._plan.own, self._pieces, strict=True):
            rows = self._plan.rows[number]
            matrix, blocks = self._exchange._matrix(rows, self._flat.dtype, self._flat.device)
            torch._foreach_copy_(blocks, pieces)
            torch._foreach_copy_(pieces, rows.blocks_of(function(number, matrix)))
        self._send_back()

    def compute_together(self, each: int, function: Callable[[int, list[Tensor]], None]) -> None:
        """:meth:`compute` for keys of ``each`` tensors: ``function(n, tensors)`` changes those of the nth key."""
        Replicas.wait([self._work])
        own = list(zip(self._plan.own, self._pieces, strict=True))
        for first in range(0, len(own), each):
            group = [(self._plan.rows[number], pieces) for number, pieces in own[first : first + each]]
            wholes = [torch.empty(rows.shape, dtype=self._flat.dtype, device=self._flat.device) for rows, _ in group]
            for whole, (rows, pieces) in zip(wholes, group, strict=True):
                torch._foreach_copy_(rows.blocks_of(whole), pieces)
            function(own[first][0] // each, wholes)
            for whole, (rows, pieces) in zip(wholes, group, strict=True):
                torch._foreach_copy_(pieces, rows.blocks_of(whole))
        self._send_back()

    def _send_back(self) -> None:
        self._work = self._exchange._send(self._flat, self._matrices, self._plan.sent, self._plan.received)

    def wait(self) -> None:
        """What the caller does next sees the results in :attr:`blocks`."""
        Replicas.wait([self._work])

    def release(self) -> None:
        """Release the buffers; the work that reads the results has been queued."""
        self._exchange._free.append(self._buffers)


def assign_owners(shapes: Sequence[torch.Size], loads: list[int]) -> list[int]:
    """The owner of each matrix: the most costly one goes to the rank with the smallest load, and so on.

    Args:
        loads: the load of each rank; increased in place.
    """
    owners = [0] * len(shapes)
    costs = [orthogonalization_cost(shape) for shape in shapes]
    for number in sorted(range(len(shapes)), key=lambda n: -costs[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def orthogonalization_cost(shape: torch.Size) -> int:
    """The cost of an iteration of Newton-Schulz: two products with the matrix, and one of small square matrices."""
    short = min(shape)
    return short * (2 * shape.numel() + short * short)
