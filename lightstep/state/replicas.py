"""Replicas share the work: each keeps and streams the state of its share of the parameters, and sends the weights on.

Replicas (ranks under DDP, the copies of HSDP) have equal gradients and would all do the same update. Here each
parameter has one owner among them. The owner alone keeps its masters and state, fetches, updates and writes them back;
the others receive the new weight. So host memory and traffic over each link fall by the number of replicas.

All replicas must have gradients for the same parameters, as DDP and FSDP2 see to.
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
from lightstep.state.backend import Managed, PinnedState, StateBackend, Unit
from lightstep.state.kept_copies import KeptCopies
from lightstep.state.lanes import Lanes
from lightstep.state.record import ExpectedLayouts
from lightstep.state.segment import Segment
from lightstep.state.units import apart, group_by_layer

__all__ = ["SharedByReplicas", "assign_owners"]

Cost = Callable[[Managed], int]
Owners = Mapping[Managed, int]


class SharedByReplicas(StateBackend):
    """``inner`` with this replica's share of the parameters; the others' weights are received.

    A step communicates every parameter's weight once, whatever happened to it, in one order on all replicas. Set-up
    communicates whether every replica could take its share; :meth:`gather` the state of one parameter.

    Args:
        inner: keeps and updates the share.
        replicas: the ranks that hold the same part of the model.
        speculates: units may be tried in backward. What was tried is sent when it counts.
    """

    name: ClassVar[str] = "stream"
    hands_out_state = False
    awaited_by_others = True

    def __init__(self, inner: StateBackend, replicas: Replicas, speculates: bool = False) -> None:
        self.inner, self.in_lanes = inner, inner.in_lanes
        self._replicas, self._speculates = replicas, speculates
        self._owners: dict[Managed, int] = {}
        self._own: list[Managed] = []
        self._broadcasts = _WeightBroadcasts(replicas)

    def fresh(self) -> SharedByReplicas:
        return type(self)(self.inner.fresh(), self._replicas.again(), self._speculates)

    # -- set-up

    def register(self, managed: Sequence[Managed]) -> None:
        layouts = ExpectedLayouts()

        def cost(item: Managed) -> int:
            return layouts.record_bytes(item, item.planned)

        self._owners = assign_owners(managed, cost, self._owners, self._replicas.size)
        for item, owner in self._owners.items():
            item.elsewhere = owner != self._replicas.rank
        self._own = [item for item in managed if not item.elsewhere]
        self._broadcasts.plan(managed, self._owners, cost)
        self._run_on_all_replicas(self._register_own)

    def _register_own(self) -> None:
        if self._own:
            self.inner.register(self._own)
        else:
            self.inner.close()

    def _run_on_all_replicas(self, step: Callable[[], None]) -> None:
        """Run ``step``; when it fails on one replica all of them raise, and none waits for the weights of another."""
        failure: Exception | None = None
        try:
            step()
        except Exception as error:
            failure = error
        texts = self._replicas.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"replica {rank} could not take its share of the optimizer state: {text}")

    # -- one step

    @property
    def lanes(self) -> Lanes:
        """This replica's."""
        return self.inner.lanes

    def units(self) -> Sequence[Unit]:
        """Those of this replica's own parameters."""
        return self.inner.units()

    def prepare(self) -> None:
        """Left to ``begin``: one replica alone must not break off before the others have decided about the step."""

    def begin(self, managed: Collection[Managed], order: Sequence[Unit] | None = None) -> None:
        self._broadcasts.begin()
        if self._own:
            self.inner.begin([item for item in managed if not item.elsewhere], order)

    def acquire(
        self, unit: Unit, active: Collection[Managed], apart: Mapping[Managed, object] | None = None
    ) -> list[Segment]:
        return self.inner.acquire(unit, active, apart)

    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        tried = self.inner.tried(unit)
        self.inner.release(unit, updated)
        if not tried:
            self._broadcasts.updated(unit)

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        return self.inner.ahead(managed, entry)

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        return self.inner.look_ahead(unit, active)

    def arriving_with(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        return self._broadcasts.arriving_with(complete_with, end)

    def receive(self, managed: Iterable[Managed]) -> None:
        self._broadcasts.receive(managed)

    def finish(self) -> None:
        self._broadcasts.send_all()
        if self._own:
            self.inner.finish()
        self._broadcasts.arrive()

    def can_try(self, units: Collection[Unit]) -> Sequence[Unit]:
        return self.inner.can_try(units) if self._speculates and units else ()

    def keep_first(self, units: Sequence[Unit]) -> None:
        self.inner.keep_first(units)

    def attempt(self, unit: Unit) -> None:
        self.inner.attempt(unit)

    def tried(self, unit: Unit) -> bool:
        return self.inner.tried(unit)

    def commit(self, unit: Unit) -> None:
        self.inner.commit(unit)
        self._broadcasts.updated(unit)

    def take_back(self, unit: Unit) -> None:
        self.inner.take_back(unit)

    def abandon(self) -> None:
        """Send what the others wait for: their step ends, and the next collective means the same on all replicas."""
        with contextlib.suppress(Exception):
            self._broadcasts.send_all()
            self._broadcasts.arrive()

    # -- state seen from outside

    def entries(self, managed: Managed) -> dict[str, Any]:
        return {} if managed.elsewhere else self.inner.entries(managed)

    def describe(self, managed: Managed) -> dict[str, Any]:
        return {} if managed.elsewhere else self.inner.describe(managed)

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Copies of the owner's :meth:`entries`; every replica calls this."""
        owner = self._owners[managed]
        kept = {} if managed.elsewhere else self.inner.gather(managed)
        described = {key: _Description.of(value) for key, value in kept.items()}
        described = self._replicas.broadcast_object(described, owner)
        found = kept or {key: description.make(managed.local.device) for key, description in described.items()}
        tensors = [found[key].contiguous() for key, description in described.items() if description.is_tensor]
        self._replicas.wait([self._replicas.broadcast(tensor, owner) for tensor in tensors if tensor.numel()])
        return found

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: KeptCopies | None,
    ) -> PinnedState | None:
        return self.inner.pin({item: keys for item, keys in wanted.items() if not item.elsewhere}, weight_of, copies)

    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        if not managed.elsewhere:
            self.inner.load(managed, entries)

    def refresh(self, managed: Managed) -> None:
        if not managed.elsewhere:
            self.inner.refresh(managed)

    def start_from(self, managed: Managed, master: Tensor) -> None:
        if not managed.elsewhere:
            self.inner.start_from(managed, master)

    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        return self.inner.changed([item for item in items if not item.elsewhere])

    def memory(self) -> dict[str, int]:
        """This replica's."""
        held = self.inner.memory()
        return {**held, "ring_bytes": held["ring_bytes"] + self._broadcasts.nbytes()}

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """This replica's: each may have its own."""
        self.inner.set_residency(gib)

    def release_device_memory(self) -> None:
        self.inner.release_device_memory()
        self._broadcasts.free()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def close(self) -> None:
        self.inner.close()
        self._replicas.close()
        self._owners, self._own, self._broadcasts = {}, [], _WeightBroadcasts(self._replicas)


def assign_owners(managed: Sequence[Managed], cost: Cost, known: Owners, replicas: int) -> dict[Managed, int]:
    """The owner of each parameter, the same on all replicas: of the new ones the most costly goes to who has least.

    Those that the ranks of one replica update together come first: what costs more on one of these ranks than on
    another has no say in them.

    Args:
        known: owners of parameters that have one already; they keep it.
        replicas: how many there are.
    """
    shared = {item: known[item] for item in managed if item in known}
    loads = [0] * replicas
    for listed in apart(managed)[::-1]:
        for item in (item for item in listed if item in known):
            loads[known[item]] += cost(item)
        for item in sorted((item for item in listed if item not in known), key=cost, reverse=True):
            shared[item] = loads.index(min(loads))
            loads[shared[item]] += cost(item)
    return {item: shared[item] for item in managed}


class _WeightBroadcasts:
    """The weights of one step on their way from their owners to everybody.

    They are sent in the order in which the replicas get done with them when all work equally fast. Others' weights wait
    for the next one of this replica's own, so that on a GPU no receiving kernel stands waiting from the beginning.
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
        """These parameters from now on."""
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

    def arriving_with(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """Others' weights are sent with the next own one in the order, and that when all own ones before it are done.

        Row-major copies are put in their places at the end of the step.
        """
        found = {item: end for item, _ in self._order if item.elsewhere}
        waiting: list[Managed] = []
        number = -1
        for item, _ in self._order:
            if item.elsewhere:
                waiting.append(item)
            else:
                number = max(number, complete_with[item])
                found.update((other, number) for other in waiting if other.local.is_contiguous())
                waiting.clear()
        return found

    def begin(self) -> None:
        """A step begins; again in one that has begun in backward, where nothing changes."""
        if self._begun:
            return
        self._begun, self._started = True, 0
        self._works.clear()
        own = [(place, item) for place, (item, _) in enumerate(self._order) if not item.elsewhere]
        self._own_left, self._elements_left = deque(own), {item: item.local.numel() for _, item in own}

    def updated(self, unit: Unit) -> None:
        """What is done with this unit is queued; send what is complete with it when it is its turn."""
        for item, start, stop in unit.parts:
            if item in self._elements_left:
                self._elements_left[item] -= stop - start
        while self._own_left and self._elements_left[self._own_left[0][1]] <= 0:
            self._send(self._own_left.popleft()[0] + 1)

    def send_all(self) -> None:
        """Whatever has not been sent yet, updated or not."""
        self._send(len(self._order))
        self._begun = False

    def arrive(self) -> None:
        """What is queued next finds all weights in their places."""
        self._replicas.wait(self._works.values())
        for item, buffer in self._row_major.items():
            if item.elsewhere:
                item.local.copy_(buffer)

    def receive(self, items: Iterable[Managed]) -> None:
        """The same as :meth:`arrive` for some whose sending has started."""
        self._replicas.wait(self._works.get(item) for item in items)

    def nbytes(self) -> int:
        """Device memory held between steps."""
        return sum(buffer.nbytes for buffer in self._row_major.values())

    def free(self) -> None:
        """Give that memory back; the next step takes it again."""
        self._works.clear()
        self._row_major.clear()

    def _send(self, stop: int) -> None:
        while self._started < stop:
            item, owner = self._order[self._started]
            self._started += 1
            self._works[item] = self._replicas.broadcast(self._sendable(item), owner)

    def _sendable(self, item: Managed) -> Tensor:
        """The weight itself, or a row-major copy that is kept for the next step."""
        if item.local.is_contiguous():
            return item.local
        if item not in self._row_major:
            self._row_major[item] = torch.empty_like(item.local, memory_format=torch.contiguous_format)
        buffer = self._row_major[item]
        return buffer if item.elsewhere else buffer.copy_(item.local)


@dataclass(frozen=True)
class _Description:
    """A state entry as the owner tells of it: a tensor that follows, or a plain value."""

    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    on_device: bool = False

    @classmethod
    def of(cls, value: Any) -> _Description:
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
