"""Ranks that hold the same part of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightstep.distributed.groups import get_or_make_group, supports

_numbers_in_use: dict[tuple[int, ...], set[int]] = {}
"""The numbers of the :class:`Replicas` that have process groups of their own, by ranks."""


class Replicas:
    """The ranks that hold the same part of the model, and their collectives.

    All ranks call each collective, in the same order, with tensors of equal shapes.

    Args:
        group: these ranks, this one among them.
        own_groups: use process groups of its own. Necessary if communication overlaps the model's forward or other
            optimizers' updates, since all collectives of one group run in one order.

    Attributes:
        rank: this process's rank among them.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, own_groups: bool = False) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._ranks, self._own_groups = group, tuple(dist.get_process_group_ranks(group)), own_groups
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._number = 0

    def copy(self) -> Replicas:
        """The same ranks for another optimizer."""
        return Replicas(self._group, self._own_groups)

    def close(self) -> None:
        """Release the process groups for others; all ranks call this, in the same order."""
        _numbers_in_use.get(self._ranks, set()).discard(self._number)
        self._groups, self._number = {}, 0

    @classmethod
    def of_shards(cls, parameters: Iterable[Tensor], own_groups: bool = False) -> Replicas | None:
        """The ranks with the same shards, if all parameters are DTensors replicated along one dimension of a mesh."""
        listed = list(parameters)
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in listed}
        mesh = meshes.pop() if len(meshes) == 1 else None
        if mesh is None:
            return None
        placements = zip(*(cast(DTensor, parameter).placements for parameter in listed), strict=True)
        copied = [dim for dim, placed in enumerate(placements) if all(one.is_replicate() for one in placed)]
        return cls(mesh.get_group(copied[0]), own_groups) if len(copied) == 1 else None

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work | None:
        """Start to fill ``tensor`` (contiguous, any dtype and device) with the owner's values; :meth:`wait` for it."""
        values = tensor.data  # with a version of its own: gloo writes what a GPU has sent back to it
        values = values.view(-1).view(torch.uint8)
        return dist.broadcast(values, group=self.group_for(tensor.device), group_src=owner, async_op=True)

    @staticmethod
    def wait(works: Iterable[dist.Work | None]) -> None:
        """Wait for the values: on an accelerator the current stream, on the CPU the caller."""
        for work in works:
            if work is not None:
                work.wait()

    def broadcast_object(self, value: Any, owner: int) -> Any:
        """The owner's ``value`` (picklable). The host waits."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group_for(torch.device("cpu")), group_src=owner)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (picklable), by rank. The host waits."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group_for(torch.device("cpu")))
        return values

    def all_reduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The minimum over the ranks of each number. The host waits."""
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group_for(found.device))
        return found.tolist()

    def group_for(self, device: torch.device) -> dist.ProcessGroup:
        """The group, or one over the same ranks that supports tensors of this device."""
        if device.type not in self._groups:
            if self._own_groups and not self._number:
                taken = _numbers_in_use.setdefault(self._ranks, set())
                self._number = next(number for number in itertools.count(1) if number not in taken)
                taken.add(self._number)
            shared = supports(self._group, device) and not self._own_groups
            self._groups[device.type] = self._group if shared else get_or_make_group(self._ranks, device, self._number)
        return self._groups[device.type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer whose replicas share the work cannot be pickled: save optimizer.state_dict(), or a checkpoint"
        )
