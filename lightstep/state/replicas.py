"""State sharded over replicas: each updates its share of the parameters and broadcasts the new weights.

Replicas (ranks under DDP, the copies of HSDP) have equal gradients and would all do the same update. Here each
parameter has one owner among them. Only the owner has its masters and state, fetches them, updates them and writes them
back; the other replicas receive the new weight. Host memory and traffic over each link fall by the number of replicas.

All replicas must have gradients for the same parameters. DDP and FSDP2 ensure that.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightstep.distributed import Replicas
from lightstep.error_text import error_text
from lightstep.state.backend import PinnedState, StateBackend
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.lanes import Lanes
from lightstep.state.record import ExpectedLayouts
from lightstep.state.schema import Managed, Unit
from lightstep.state.segment import Segment
from lightstep.state.stream import StreamBackend
from lightstep.state.units import group_by_layer, split_shared_updates

__all__ = ["ReplicaShardedBackend", "assign_owners"]

Cost = Callable[[Managed], int]
Owners = Mapping[Managed, int]


class ReplicaShardedBackend(StateBackend):
    """Gives ``inner`` this replica's share of the parameters, and receives the weights of the others.

    A step broadcasts every parameter's weight once, updated or not, in the same order on all replicas. Set-up
    communicates whether every replica could allocate its share, :meth:`gather` the state of one parameter.

    Args:
        inner: the backend that keeps and updates the share.
        replicas: the ranks that hold the same part of the model.
    """

    name: ClassVar[str] = "stream"
    compares_weights = True
    peers_wait = True

    def __init__(self, inner: StreamBackend, replicas: Replicas) -> None:
        self.inner, self.supports_lanes = inner, inner.supports_lanes
        self._replicas = replicas
        self._owners: dict[Managed, int] = {}
        self._broadcasts = _WeightBroadcasts(replicas)

    def fresh(self) -> ReplicaShardedBackend:
        return type(self)(self.inner.fresh(), self._replicas.copy())

    # -- set-up

    def register(self, managed: Sequence[Managed]) -> None:
        layouts = ExpectedLayouts()

        def cost(item: Managed) -> int:
            return layouts.record_bytes(item, item.planned_elements)

        self._owners = assign_owners(managed, cost, self._owners, self._replicas.size)
        for item, owner in self._owners.items():
            item.is_remote = owner != self._replicas.rank
        own = [item for item in managed if not item.is_remote]
        self._broadcasts.plan(managed, self._owners, cost)
        # A replica without a share has lanes, too: it receives the others' weights in them.
        device = managed[0].local.device if managed else None
        self._run_on_all_replicas(lambda: self.inner.register(own, device) if managed else self.inner.close())

    def _run_on_all_replicas(self, step: Callable[[], None]) -> None:
        """Run ``step``. If it fails on one replica, all of them raise, so that none waits for another's weights."""
        failure: Exception | None = None
        try:
            step()
        except Exception as error:
            failure = error
        texts = self._replicas.gather_objects(None if failure is None else error_text(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"replica {rank} could not allocate its share of the optimizer state: {text}")

    # -- one step

    @property
    def is_lane_thread(self) -> bool:
        return self.inner.is_lane_thread

    @property
    def lanes(self) -> Lanes:
        """The lanes of this replica."""
        return self.inner.lanes

    def units(self) -> Sequence[Unit]:
        """The units of this replica's own parameters."""
        return self.inner.units()

    def prepare(self) -> None:
        """Nothing: ``begin`` does it. A single replica must not fail before the others have decided on the step."""

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        self._broadcasts.begin()
        self.inner.begin([item for item in managed if not item.is_remote], order)

    def acquire(self, unit: Unit, active: Collection[Managed]) -> list[Segment]:
        return self.inner.acquire(unit, active)

    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        is_speculative = self.inner.is_speculative(unit)
        self.inner.release(unit, updated)
        if not is_speculative:
            self._broadcasts.updated(unit)

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        return self.inner.ahead(managed, entry)

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        return self.inner.look_ahead(unit, active)

    def arrival_jobs(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        return self._broadcasts.arrival_jobs(complete_with, end)

    def receive(self, managed: Iterable[Managed]) -> None:
        self._broadcasts.receive(managed)

    def finish(self, next_order: Sequence[Unit] | None = None) -> None:
        self._broadcasts.send_all()
        self.inner.finish(next_order)
        self._broadcasts.arrive()

    def reserve_speculation(self, units: Collection[Unit]) -> Sequence[Unit]:
        return self.inner.reserve_speculation(units) if units else ()

    def prefer_resident(self, units: Sequence[Unit]) -> None:
        self.inner.prefer_resident(units)

    def speculate(self, unit: Unit) -> None:
        self.inner.speculate(unit)

    def is_speculative(self, unit: Unit) -> bool:
        return self.inner.is_speculative(unit)

    def commit(self, unit: Unit) -> None:
        self.inner.commit(unit)
        self._broadcasts.updated(unit)

    def roll_back(self, unit: Unit) -> None:
        self.inner.roll_back(unit)

    def drop_speculation(self, unit: Unit) -> None:
        self.inner.drop_speculation(unit)

    def abandon(self) -> None:
        """Send what the others wait for, so that their step ends and the next collective matches on all replicas."""
        with contextlib.suppress(Exception):
            self._broadcasts.send_all()
            self._broadcasts.arrive()

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        return {} if managed.is_remote else self.inner.entries(managed)

    def describe(self, managed: Managed) -> dict[str, Any]:
        return {} if managed.is_remote else self.inner.describe(managed)

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Copies of the owner's :meth:`entries`; a collective over the replicas."""
        owner = self._owners[managed]
        kept = {} if managed.is_remote else self.inner.gather(managed)
        described = {key: _Description.from_value(value) for key, value in kept.items()}
        described = self._replicas.broadcast_object(described, owner)
        found = kept or {key: description.make(managed.local.device) for key, description in described.items()}
        tensors = [found[key].contiguous() for key, description in described.items() if description.is_tensor]
        self._replicas.wait([self._replicas.broadcast(tensor, owner) for tensor in tensors if tensor.numel()])
        return found

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> PinnedState | None:
        return self.inner.pin({item: keys for item, keys in wanted.items() if not item.is_remote}, weight_of, copies)

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        if not managed.is_remote:
            self.inner.load(managed, entries)

    def refresh(self, managed: Managed) -> None:
        if not managed.is_remote:
            self.inner.refresh(managed)

    def set_initial_master(self, managed: Managed, master: Tensor) -> None:
        if not managed.is_remote:
            self.inner.set_initial_master(managed, master)

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        return self.inner.changed([item for item in items if not item.is_remote])

    def memory(self) -> dict[str, int]:
        """Sizes on this replica."""
        held = self.inner.memory()
        return {**held, "ring_bytes": held["ring_bytes"] + self._broadcasts.nbytes()}

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """Set it for this replica; each may have another size."""
        self.inner.set_residency(gib)

    def release_device_memory(self) -> None:
        self.inner.release_device_memory()
        self._broadcasts.free()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def close(self) -> None:
        self.inner.close()
        self._replicas.close()
        self._owners, self._broadcasts = {}, _WeightBroadcasts(self._replicas)


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


class _WeightBroadcasts:
    """Broadcasts of one step's weights from their owners.

    Weights are broadcast in the order in which equally fast replicas complete them. Receiving starts with the next
    weight that this replica sends, so that on a GPU no receiving kernel waits from the start of the step.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._order: list[tuple[Managed, int]] = []
        self._begun = False  # a step has, and has not ended
        self._started = 0  # of those in the order
        self._own_left: deque[tuple[int, Managed]] = deque()
        self._elements_left: dict[Managed, int] = {}  # of own ones, that are not updated yet
        self._works: dict[Managed, Any] = {}
        self._row_major: dict[Managed, Tensor] = {}

    def plan(self, managed: Sequence[Managed], owners: Owners, cost: Cost) -> None:
        """Plan the broadcasts of these parameters."""
        reached: list[tuple[int, int, Managed]] = []
        for replica in range(self._replicas.size):
            progress = 0
            for layer in group_by_layer([item for item in managed if owners[item] == replica]):
                for item in layer:
                    progress += cost(item)
                    reached.append((progress, replica, item))
        reached.sort(key=lambda entry: entry[:2])
        self._order = [(item, replica) for _, replica, item in reached if item.local.numel()]
        self._begun = False
        self._row_major = {item: buffer for item, buffer in self._row_major.items() if item in owners}

    def arrival_jobs(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """Others' weights are received with the next own one in the order, which waits for all own ones before it.

        Weights that are not contiguous arrive in row-major copies, and are copied at the end of the step.
        """
        found = {item: end for item, _ in self._order if item.is_remote}
        waiting: list[Managed] = []
        number = -1
        for item, _ in self._order:
            if item.is_remote:
                waiting.append(item)
            else:
                number = max(number, complete_with[item])
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

    def arrive(self) -> None:
        """Order the next work after the arrival of all weights."""
        self._replicas.wait(self._works.values())
        for item, buffer in self._row_major.items():
            if item.is_remote:
                item.local.copy_(buffer)

    def receive(self, items: Iterable[Managed]) -> None:
        """:meth:`arrive` for some weights whose communication has started."""
        self._replicas.wait(self._works.get(item) for item in items)

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
            self._works[item] = self._replicas.broadcast(self._sendable(item), owner)

    def _sendable(self, item: Managed) -> Tensor:
        """The weight itself, or a row-major buffer for it, which is kept for the next step."""
        if item.local.is_contiguous():
            return item.local
        if item not in self._row_major:
            self._row_major[item] = torch.empty_like(item.local, memory_format=torch.contiguous_format)
        buffer = self._row_major[item]
        return buffer if item.is_remote else buffer.copy_(item.local)


@dataclass(frozen=True)
class _Description:
    """The owner's description of a state entry: a tensor, which is sent next, or a plain value."""

    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    on_device: bool = False

    @classmethod
    def from_value(cls, value: Any) -> _Description:
        if not isinstance(value, Tensor):
            return cls(value)
        return cls(None, value.dtype, tuple(value.shape), value.device.type != "cpu")

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    def make(self, device: torch.device) -> Any:
        """The value, or uninitialised memory for the tensor."""
        if not self.is_tensor:
            return self.value
        return torch.empty(self.shape, dtype=self.dtype, device=device if self.on_device else "cpu")
