"""The interface of a state backend, and the types it shares with ``step()``.

A step processes one unit at a time:

1. A *unit* is a few parameters, or a range of one. Its state is one :class:`~lightstep.state.record.Record`: a flat
   buffer that holds one field after another (``low | exp_avg | exp_avg_sq``), each with the values of all parameters.
2. ``acquire`` makes the record available on the device, in a :class:`~lightstep.state.record.Slot`: the record's own
   memory (``resident``), a copy for this step (``bulk``) or a slot of a ring (``stream``).
3. ``acquire`` returns *segments* (:mod:`lightstep.state.segment`): runs of parameters that an element-wise optimizer
   class updates as one. Each has one flat fp32 tensor of masters, joined from the weights and the record.
4. The base optimizer updates the segments.
5. ``release`` writes the masters to weights and record, and the record to where it lives.

A backend decides where records live between steps and when they are copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightstep.state.lanes import Lanes
from lightstep.state.schema import Managed, Unit

if TYPE_CHECKING:
    from lightstep.state.host_copy_pool import HostCopyPool
    from lightstep.state.segment import Segment


AHEAD = 2
"""How many units that ranks update together may be started ahead of the current one, if there is room for them."""


class PinnedState(Protocol):
    """State entries as they were at one moment, for another thread to read."""

    def __contains__(self, parameter: object) -> bool:
        """Whether the snapshot has entries of this parameter."""

    def begin(self) -> None:
        """Called once, by the thread that will take the entries, as soon as it runs: updates may be waiting for it."""

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry on the host, in the parameter's local shape. It may be taken once, and stays valid until
        :meth:`written`."""

    def written(self, parameter: Tensor, key: str) -> None:
        """The reader is done with an entry that it took. Any thread may call this."""

    def close(self) -> None:
        """Release the entries that nobody took."""


class StateBackend(ABC):
    """Where masters and optimizer state live between steps."""

    name: ClassVar[str]
    compares_weights: ClassVar[bool] = False
    """Whether :meth:`entries` finds weights that somebody else wrote to, and returns masters that follow them."""
    supports_lanes: bool = False
    """Whether units may be updated in :attr:`lanes`, concurrently with the caller's own work."""
    peers_wait: bool = False
    """Whether other processes wait for updates made here. If so, no update may be postponed until it is needed here."""

    def fresh(self) -> StateBackend:
        """A new backend with the same settings and no parameters."""
        return type(self)()

    @abstractmethod
    def register(self, managed: Sequence[Managed]) -> None:
        """Manage exactly these parameters. New ones are added; those no longer listed are removed with their state."""

    @property
    def is_lane_thread(self) -> bool:
        """Whether the calling thread is one of the lanes."""
        return False

    @property
    def lanes(self) -> Lanes:
        """Streams (threads on the CPU) for updates that run concurrently with the caller's own work."""
        raise NotImplementedError(f"the {self.name} backend has no lanes")

    def arrival_jobs(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """The index of the job that starts to receive each weight which another replica updates.

        Args:
            complete_with: the index of the job that completes the update of each own parameter.
            end: the index of the job that ends the step.
        """
        return {}

    def receive(self, managed: Iterable[Managed]) -> None:  # noqa: B027  (nothing is sent where there are no replicas)
        """Order the caller's next work after the arrival of these weights, whose communication has started."""

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """All units, in update order."""

    def prepare(self) -> None:  # noqa: B027  (an optional hook; `begin` calls it if nobody else did)
        """Allocate the device memory that a step needs, before anything is changed. No step may be under way.

        Raises:
            torch.OutOfMemoryError: the device has no room. Nothing has changed, and this may be called again.
        """

    def begin(  # noqa: B027  (an optional hook)
        self, managed: Collection[Managed], order: Sequence[Unit] | None = None
    ) -> None:
        """Start a step that updates these parameters.

        Args:
            order: the expected order of :meth:`acquire`; ``None``: that of :meth:`units`. Units may be acquired in
                another order, which is slower.
        """

    @abstractmethod
    def acquire(self, unit: Unit, active: Collection[Managed]) -> list[Segment]:
        """Masters and state of the unit's ``active`` parameters on the device, ready for work on the current stream."""

    @abstractmethod
    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        """Finish the unit: write the ``updated`` segments to their parameters and to where their state lives."""

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        """How many units after the next one :meth:`look_ahead` can return; 0 unless all of these have ``entry``.

        Only units that ranks update together count, because those are the same on all ranks.
        """
        return 0

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        """The segments and entries that :meth:`acquire` will return for a later unit, for work on the current stream.

        A write to an entry is kept: :meth:`acquire` returns the new value.
        """
        raise NotImplementedError(f"the {self.name} backend cannot look ahead: a unit is available once it is acquired")

    def finish(self, next_order: Sequence[Unit] | None = None) -> None:  # noqa: B027  (an optional hook)
        """End the step: order the caller's next work after what is still under way.

        Args:
            next_order: the expected order of the next step; ``None``: that of this one.
        """

    def reserve_speculation(self, units: Collection[Unit]) -> Sequence[Unit]:
        """Allocate memory for speculative updates of these units; returns those with enough of it. No step may be
        under way."""
        return ()

    def prefer_resident(self, units: Sequence[Unit]) -> None:  # noqa: B027  (for backends that have a choice)
        """From the next step on, prefer the state of these units when choosing what stays on the device."""

    def speculate(self, unit: Unit) -> None:
        """Make the next update of this unit (:meth:`acquire` to :meth:`release`) speculative: it can be rolled back."""
        raise NotImplementedError(f"the {self.name} backend has one version of its state: no update can be speculative")

    def is_speculative(self, unit: Unit) -> bool:
        """Whether the unit has a speculative update that was neither committed nor rolled back."""
        return False

    def commit(self, unit: Unit) -> None:  # noqa: B027  (for backends that can speculate)
        """Make the unit's speculative update final."""

    def roll_back(self, unit: Unit) -> None:  # noqa: B027  (for backends that can speculate)
        """Undo the unit's speculative update; weights are restored by work on the current stream."""

    def drop_speculation(self, unit: Unit) -> None:  # noqa: B027  (for backends that can speculate)
        """Forget the unit's speculative update after a failure; its weights stay as they are."""

    def abandon(self) -> None:  # noqa: B027  (an optional hook)
        """The step failed: send what other processes wait for. Raises nothing."""

    @abstractmethod
    def entries(self, managed: Managed) -> dict[str, Any]:
        """The state of one parameter: the base optimizer's entries and ``"master"`` (unless it is its own master).

        Tensors have the local shard's shape (or 0 dimensions) and are live where possible. Before the first update
        there is only the master given to :meth:`set_initial_master`. ``{}`` if another replica owns the state. Call
        :meth:`synchronize` first.
        """

    def describe(self, managed: Managed) -> dict[str, Any]:
        """:meth:`entries` with all tensors on the meta device."""
        return {
            key: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
            for key, value in self.entries(managed).items()
        }

    def gather(self, managed: Managed) -> dict[str, Any]:
        """Copies of :meth:`entries`, from the replica that owns them. A collective where replicas shard the state."""
        return {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in self.entries(managed).items()
        }

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> PinnedState | None:
        """A snapshot of these entries, for another thread to read while updates go on.

        Nothing may be under way. The snapshot may lack some parameters, or be ``None``: read those by other means.

        Args:
            weight_of: for a parameter, a function that returns its present local weight on the host when it is called.
            copies: host memory for copies until the snapshot is closed. ``None``: nothing is updated before that, so
                nothing has to be copied.
        """
        return None

    @abstractmethod
    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        """Replace the state of one parameter; a missing ``"master"`` is rebuilt from the parameter.

        Does nothing if another replica owns the state.
        """

    @abstractmethod
    def refresh(self, managed: Managed) -> None:
        """Set the master to the parameter's value, in fp32."""

    @abstractmethod
    def set_initial_master(self, managed: Managed, master: Tensor) -> None:
        """Use ``master`` (fp32, local shape) instead of the weight as the master of the parameter's first update."""

    @abstractmethod
    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        """The parameters that no longer equal their rounded masters, because somebody else wrote to them. May wait for
        the device."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """``device_bytes``, ``host_bytes`` and ``ring_bytes`` allocated between steps."""

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """Set how many GiB of state stay on the device; ``"auto"`` measures what is free. Nothing may be under way.

        Raises:
            ValueError: this backend cannot keep a part of the state on the device.
        """
        raise ValueError(
            f"set_residency: optimizer_state.backend is {self.name}, which does not divide the state between device "
            "and host; backend stream does"
        )

    def release_device_memory(self) -> None:  # noqa: B027  (some allocate none between steps)
        """Free all device memory; it is allocated again at the next use. Nothing may be under way."""

    def synchronize(self) -> None:  # noqa: B027  (an optional hook)
        """Wait until all queued work has reached the parameters and the state."""

    def close(self) -> None:  # noqa: B027  (an optional hook)
        """Free all memory."""
