"""Ranks that hold the same part of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightstep.distributed.groups import carries, made_group

_senders: dict[tuple[int, ...], set[int]] = {}
"""The numbers of the replicas that send through groups of their own, by ranks."""


class Replicas:
    """The ranks that hold the same part of the model, and what they send each other.

    Each method that sends is called by all of them, in the same order, with tensors of equal shapes.

    Args:
        group: these ranks, and this one among them.
        apart: send through process groups of one's own. Needed when sending goes on beside the model's forward and
            other optimizers' updates: what a group sends, it sends in one order.

    Attributes:
        rank: this process's place among them.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup, apart: bool = False) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._ranks, self._apart = group, tuple(dist.get_process_group_ranks(group)), apart
        self._carriers: dict[str, dist.ProcessGroup] = {}
        self._number = 0

    def again(self) -> Replicas:
        """The same ranks, for another optimizer."""
        return Replicas(self._group, self._apart)

    def close(self) -> None:
        """Others may send through the groups that were made for this; all of them call it, in the same order."""
        _senders.get(self._ranks, set()).discard(self._number)
        self._carriers, self._number = {}, 0

    @classmethod
    def of_shards(cls, parameters: Iterable[Tensor], apart: bool = False) -> Replicas | None:
        """Those with the same shards: all parameters are DTensors, with copies along one dimension of one mesh."""
        listed = list(parameters)
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in listed}
        mesh = meshes.pop() if len(meshes) == 1 else None
        if mesh is None:
            return None
        placements = zip(*(cast(DTensor, parameter).placements for parameter in listed), strict=True)
        copied = [dim for dim, placed in enumerate(placements) if all(one.is_replicate() for one in placed)]
        return cls(mesh.get_group(copied[0]), apart) if len(copied) == 1 else None

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work | None:
        """Start to fill ``tensor`` (contiguous, any dtype and device) with the owner's values; to be waited for."""
        values = tensor.view(-1).view(torch.uint8)
        return dist.broadcast(values, group=self.carrier(tensor.device), group_src=owner, async_op=True)

    @staticmethod
    def wait(works: Iterable[dist.Work | None]) -> None:
        """What is done next sees the values: the current stream waits, on the CPU the caller does."""
        for work in works:
            if work is not None:
                work.wait()

    def broadcast_object(self, value: Any, owner: int) -> Any:
        """The owner's ``value``, which can be pickled. The host waits."""
        values = [value]
        dist.broadcast_object_list(values, group=self.carrier(torch.device("cpu")), group_src=owner)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank. The host waits."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.carrier(torch.device("cpu")))
        return values

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest that any of them has given, of each. The host waits."""
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.carrier(found.device))
        return found.tolist()

    def carrier(self, device: torch.device) -> dist.ProcessGroup:
        """The group, or one over the same ranks that can send tensors of this device."""
        if device.type not in self._carriers:
            if self._apart and not self._number:
                taken = _senders.setdefault(self._ranks, set())
                self._number = next(number for number in itertools.count(1) if number not in taken)
                taken.add(self._number)
            shared = carries(self._group, device) and not self._apart
            self._carriers[device.type] = self._group if shared else made_group(self._ranks, device, self._number)
        return self._carriers[device.type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer whose replicas share the work cannot be pickled: save optimizer.state_dict(), or a checkpoint"
        )
