"""State sharded over replicas: each updates its share of the parameters and broadcasts the new weights.

Replicas (ranks under DDP, the copies of HSDP) have equal gradients and would all do the same update. Here each
parameter has one owner among them. Only the owner has its masters and state, fetches them, updates them and writes them
back; the other replicas receive the new weight. Host memory and traffic over each link fall by the number of replicas.

All replicas must have gradients for the same parameters. DDP and FSDP2 ensure that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import Replicas
from lightstep.error_text import error_text
from lightstep.state.schema import Managed, Unit
from lightstep.state.units import group_by_layer, split_shared_updates

__all__ = ["ReplicaShare", "assign_owners"]

Cost = Callable[[Managed], int]
Owners = Mapping[Managed, int]


class ReplicaShare:
    """Divides parameters among replicas, and broadcasts one step's weights from their owners.

    A step broadcasts every parameter's weight once, updated or not, in the same order on all replicas: that in which
    equally fast replicas complete them. Receiving starts with the next weight that this replica sends, so that on a GPU
    no receiving kernel waits from the start of the step.

    Set-up communicates whether every replica could allocate its share, :meth:`gather` the state of one parameter.

    Args:
        replicas: the ranks that hold the same part of the model.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._owners: dict[Managed, int] = {}
        self._order: list[tuple[Managed, int]] = []
        self._begun = False  # a step has, and has not ended
        self._started = 0  # of those in the order
        self._own_left: deque[tuple[int, Managed]] = deque()
        self._elements_left: dict[Managed, int] = {}  # of own ones, that are not updated yet
        self._works: dict[Managed, Any] = {}
        self._row_major: dict[Managed, Tensor] = {}

    # -- set-up

    def assign(self, managed: Sequence[Managed], cost: Cost) -> list[Managed]:
        """Assign every parameter to a replica; returns this one's.

        Raises:
            ValueError: on all replicas: they have different parameters, or settings for one of them.
        """
        self._refuse_different(managed)
        self._owners = assign_owners(managed, cost, self._owners, self.replicas.size)
        for item, owner in self._owners.items():
            item.is_remote = owner != self.replicas.rank
        self._plan(managed, cost)
        return [item for item in managed if not item.is_remote]

    def _refuse_different(self, managed: Sequence[Managed]) -> None:
        """Refuse parameters and hyper-parameters that are not the same on all replicas, as torch's DDP does for models.

        Weights would be received in the place of others, and each would have the settings of its owner.
        """
        found = self.replicas.gather_objects([_description(item) for item in managed])
        for rank, listed in enumerate(found):
            for first, other in itertools.zip_longest(found[0], listed, fillvalue={"parameter": None}):
                differ = [key for key in {**first, **other} if first.get(key) != other.get(key)]
                if differ:
                    shown = differ[:1] if differ[0] == "parameter" else differ
                    one, another = ({key: each.get(key) for key in shown} for each in (first, other))
                    raise ValueError(
                        f"the optimizers of replicas 0 and {rank} differ: one has {one}, and the other {another}, for "
                        f"{first['parameter'] or other['parameter']} or in its place. Replicas share the updates "
                        "(optimizer_state.backend: stream): give the optimizer the same parameters with the same "
                        "settings on all ranks"
                    )

    def _plan(self, managed: Sequence[Managed], cost: Cost) -> None:
        """Plan the broadcasts."""
        reached: list[tuple[int, int, Managed]] = []
        for replica in range(self.replicas.size):
            progress = 0
            for layer in group_by_layer([item for item in managed if self._owners[item] == replica]):
                for item in layer:
                    progress += cost(item)
                    reached.append((progress, replica, item))
        reached.sort(key=lambda entry: entry[:2])
        self._order = [(item, replica) for _, replica, item in reached if item.local.numel()]
        self._begun = False
        self._row_major = {item: buffer for item, buffer in self._row_major.items() if item in self._owners}

    def run_on_all(self, step: Callable[[], None]) -> None:
        """Run ``step``. If it fails on one replica, all of them raise, so that none waits for another's weights."""
        failure: Exception | None = None
        try:
            step()
        except Exception as error:
            failure = error
        texts = self.replicas.gather_objects(None if failure is None else error_text(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"replica {rank} could not allocate its share of the optimizer state: {text}")

    # -- one step

    def arrival_jobs(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """See :meth:`Store.arrival_jobs <lightstep.state.store.Store.arrival_jobs>`.

        Weights are sent in the order, so each own one waits for all own ones before it. Others' are received with the
        next own one in the order.

        Weights that are not contiguous arrive in row-major copies, and are copied at the end of the step.
        """
        found = {item: end for item, _ in self._order if item.is_remote}
        waiting: list[Managed] = []
        number = -1
        for item, _ in self._order:
            if item.is_remote:
                waiting.append(item)
            else:
                number = found[item] = max(number, complete_with[item])
                found.update((other, number) for other in waiting if other.local.is_contiguous())
                waiting.clear()
        return found

    def begin(self) -> None:
        """Start a step; does nothing if it has already started in backward."""
        if self._begun:
            return
        self._begun, self._started = True, 0
        self._works.clear()
        own = [(place, item) for place, (item, _) in enumerate(self._order) if not item.is_remote]
        self._own_left, self._elements_left = deque(own), {item: item.local.numel() for _, item in own}

    def updated(self, unit: Unit) -> None:
        """The unit's update is queued: send the weights that it completes, in order."""
        for item, start, stop in unit.parts:
            if item in self._elements_left:
                self._elements_left[item] -= stop - start
        while self._own_left and self._elements_left[self._own_left[0][1]] <= 0:
            self._send(self._own_left.popleft()[0] + 1)

    def send_all(self) -> None:
        """Send all weights that were not sent yet, updated or not."""
        self._send(len(self._order))
        self._begun = False

    def arrive(self) -> list[Managed]:
        """Order the next work after the arrival of all weights; returns those that were copied, updated or not."""
        self.replicas.wait(self._works.values())
        copied = [item for item in self._row_major if item.is_remote]
        for item in copied:
            item.local.copy_(self._row_major[item])
        return copied

    def receive(self, items: Iterable[Managed]) -> None:
        """:meth:`arrive` for some weights whose communication has started. Own ones have been sent then."""
        self.replicas.wait(self._works.get(item) for item in items)

    def nbytes(self) -> int:
        """Size of the device memory between steps."""
        return sum(buffer.nbytes for buffer in self._row_major.values())

    def free(self) -> None:
        """Free that memory; the next step allocates it again."""
        self._works.clear()
        self._row_major.clear()

    def _send(self, stop: int) -> None:
        while self._started < stop:
            item, owner = self._order[self._started]
            self._started += 1
            self._works[item] = self.replicas.broadcast(self._sendable(item), owner)

    def _sendable(self, item: Managed) -> Tensor:
        """The weight itself, or a row-major buffer for it, which is kept for the next step."""
        if item.local.is_contiguous():
            return item.local
        if item not in self._row_major:
            self._row_major[item] = torch.empty_like(item.local, memory_format=torch.contiguous_format)
        buffer = self._row_major[item]
        return buffer if item.is_remote else buffer.copy_(item.local)

    # -- state seen from outside

    def gather(self, managed: Managed, own: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter from its owner, which passes it as ``own``; a collective over the replicas."""
        owner = self._owners[managed]
        described = {key: _Description.from_value(value) for key, value in own.items()}
        described = self.replicas.broadcast_object(described, owner)
        found = own or {key: description.make(managed.local.device) for key, description in described.items()}
        tensors = [found[key] for key, description in described.items() if description.is_tensor]
        tensors = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # in the order of their memory
        self.replicas.wait([self.replicas.broadcast(tensor, owner) for tensor in tensors if tensor.numel()])
        return found

    def close(self) -> None:
        """Release the process groups, and forget all parameters."""
        self.replicas.close()
        self._owners, self._order, self._begun = {}, [], False
        self.free()


def assign_owners(managed: Sequence[Managed], cost: Cost, known: Owners, replicas: int) -> dict[Managed, int]:
    """The owner of each parameter, the same on all replicas. The most costly new one goes to the least loaded replica.

    Parameters that the ranks of one replica update together are assigned first, so that they do not depend on the
    costs of others, which differ between these ranks.

    Args:
        known: owners of parameters that have one already, and keep it.
        replicas: number of replicas.
    """
    shared = {item: known[item] for item in managed if item in known}
    loads = [0] * replicas
    for listed in split_shared_updates(managed)[::-1]:
        for item in (item for item in listed if item in known):
            loads[known[item]] += cost(item)
        for item in sorted((item for item in listed if item not in known), key=cost, reverse=True):
            shared[item] = loads.index(min(loads))
            loads[shared[item]] += cost(item)
    return {item: shared[item] for item in managed}


def _description(item: Managed) -> dict[str, Any]:
    """What is equal on all replicas: the parameter, and the numbers among its group's settings."""
    settings = {key: value for key, value in item.group.items() if type(value) in (bool, int, float, str)}
    return {"parameter": item.name, "shape": tuple(item.local.shape), "dtype": item.local.dtype, **settings}


@dataclass(frozen=True)
class _Description:
    """The owner's description of a state entry: a tensor, which is sent next, or a plain value."""

    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    on_device: bool = False

    @classmethod
    def from_value(cls, value: Any) -> _Description:
        if not isinstance(value, Tensor):
            return cls(value)
        return cls(None, value.dtype, tuple(value.shape), value.stride(), value.device.type != "cpu")

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    def make(self, device: torch.device) -> Any:
        """The value, or uninitialised memory for the tensor."""
        if not self.is_tensor:
            return self.value
        place = device if self.on_device else torch.device("cpu")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=place)
