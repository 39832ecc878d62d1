"""Matrices whose rows are divided among ranks, brought together on one rank each and sent back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightstep.distributed.replicas import Replicas

__all__ = ["MatrixExchange", "Rows", "rows_of"]


@dataclass(frozen=True)
class Rows:
    """How a tensor's first dimension is divided among the ranks of a process group.

    Attributes:
        shape: of the whole tensor.
        lengths: rows of each rank, in their order; some may be 0.
    """

    shape: torch.Size
    lengths: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def most(self) -> int:
        """Elements of the largest shard."""
        return max(self.lengths) * self.shape[1:].numel()


def rows_of(parameter: Tensor) -> Rows | None:
    """``None`` where it is whole on every rank, or divided in any other way than along its first dimension."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    sharded = [dim for dim, placed in enumerate(parameter.placements) if not placed.is_replicate()]
    if len(sharded) != 1 or not parameter.placements[sharded[0]].is_shard(0):
        return None
    size, total = mesh.size(sharded[0]), parameter.shape[0]
    if size == 1:
        return None
    each = -(-total // size)
    lengths = tuple(min(max(total - place * each, 0), each) for place in range(size))
    return Rows(parameter.shape, lengths, mesh.get_group(sharded[0]))


class MatrixExchange:
    """What the ranks of one group send each other to compute with whole matrices.

    All of them call :meth:`compute` for the same matrices in the same order. It has process groups of its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = Replicas(group, apart=True)

    def open(self, device: torch.device) -> None:
        """Make the process group; all ranks call this at the same time."""
        self._ranks.carrier(device)

    def compute(
        self, shards: Sequence[Tensor], rows: Sequence[Rows], function: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """``function(i, matrix)`` of each whole matrix on one rank; returns this rank's rows of each result.

        Args:
            shards: this rank's rows [rows, columns] of each, all of one dtype and device.
            function: its result has the matrix's shape and dtype.
        """
        rank, size = self._ranks.rank, self._ranks.size
        owners = owners_of([one.shape for one in rows], size)
        of_rank = [[number for number, owner in enumerate(owners) if owner == place] for place in range(size)]
        columns = [one.shape[1] for one in rows]
        arrived = self._exchange(
            [[shards[number] for number in of_rank[to]] for to in range(size)],
            [[rows[n].lengths[source] * columns[n] for n in of_rank[rank]] for source in range(size)],
            shards[0],
        )
        back: list[list[Tensor]] = [[] for _ in range(size)]
        for number, pieces in zip(of_rank[rank], zip(*arrived, strict=True), strict=True):
            result = function(number, torch.cat(pieces).view(rows[number].shape))
            for to, part in enumerate(result.split(rows[number].lengths)):
                back[to].append(part)
        sizes = [[shards[number].numel() for number in of_rank[source]] for source in range(size)]
        returned = self._exchange(back, sizes, shards[0])
        found = {
            n: part for own, parts in zip(of_rank, returned, strict=True) for n, part in zip(own, parts, strict=True)
        }
        return [found[number].view(shard.shape) for number, shard in enumerate(shards)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """All to all, by rank: what is sent, and the elements of what arrives, flat."""
        flat = [torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)]) for tensors in sent]
        arrived = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(  # as bytes: gloo does not know all dtypes
            arrived.view(torch.uint8),
            torch.cat(flat).view(torch.uint8),
            [sum(own) * like.itemsize for own in sizes],
            [tensor.nbytes for tensor in flat],
            group=self._ranks.carrier(like.device),
        )
        blocks = arrived.split([sum(own) for own in sizes])
        return [block.split(list(own)) for block, own in zip(blocks, sizes, strict=True)]

    def close(self) -> None:
        """Others may use the process groups; all ranks call this at the same time."""
        self._ranks.close()


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """The rank that computes with each matrix: the most costly (a product with itself) goes to who has least."""
    loads, owners = [0] * ranks, [0] * len(shapes)
    costs = [shape.numel() * min(shape) for shape in shapes]
    for number in sorted(range(len(shapes)), key=lambda n: -costs[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners
