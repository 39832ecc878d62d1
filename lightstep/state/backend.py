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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from lightstep.distributed import Window
from lightstep.state.lanes import Lanes

if TYPE_CHECKING:
    from lightstep.distributed import Rows
    from lightstep.state.host_copy_pool import HostCopyPool
    from lightstep.state.segment import Segment


class Rounding(Protocol):
    """Rounds fp32 values to a shorter dtype, other than to nearest; see ``lightstep.precision.moments``."""

    def round(self, value: Tensor, out: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None: ...


@dataclass(eq=False)
class EntrySpec:
    """One entry of the base optimizer's state, as seen on a probe parameter at set-up.

    Attributes:
        like_parameter: it has the parameter's shape; otherwise it is a scalar (``step``) or a plain Python value.
        dtype: of the tensor; ``None`` if the entry is not a tensor.
        on_device: torch keeps it on the parameter's device. A fused optimizer's ``step`` is there, others' are not.
        never_negative: its sign bit carries no information: second moments of known classes, or declared ones.
        kept: the dtype to which fp32 values are rounded after each update, and in which they are stored; ``None``:
            they stay fp32.
        rounding: how they are rounded; ``None``: to nearest.
    """

    like_parameter: bool
    dtype: torch.dtype | None
    on_device: bool
    never_negative: bool = False
    kept: torch.dtype | None = None
    rounding: Rounding | None = None


Schema = Mapping[str, EntrySpec]


_WHOLE = Window()


@dataclass(eq=False, repr=False)
class Managed:
    """One trainable parameter managed by a backend.

    Attributes:
        param: the model's own (D)Tensor: bf16, fp16 or fp32.
        local: its local shard as a plain tensor: a detached alias of the same storage.
        group: its live entry of ``optimizer.param_groups``.
        name: its name in the model if known, else its position in the parameter groups.
        layer: parameters with equal ``layer`` belong to one transformer block or FSDP module; ``None`` if unknown.
        own_master: the parameter is its own master (fp32, or master weights are off).
        schema: the entries of its base optimizer's state.
        whole_tensors: its base optimizer is not element-wise. The parameter is never cut, and is updated by itself.
        reads_attributes: its base optimizer may read attributes of the parameter (``p._no_weight_decay``). It is
            updated as one with such parameters only as have the same.
        rows: how it is sharded over the ranks that update it together; ``None``: this rank updates its shard alone.
        window: where its local elements are in the whole parameter. Stochastic rounding depends on it.
        fused_update: a fused kernel joins and splits its masters, so nothing else needs them whole.
        updated: its state exists, from an update or from a checkpoint.
        provisional: its state is a placeholder that a checkpoint is about to replace; no update made it.
        is_remote: another replica owns its state and updates it; this one only receives the weight. Set by the backend.
    """

    param: Tensor
    local: Tensor
    group: dict[str, Any]
    name: str
    layer: Hashable = None
    own_master: bool = False
    schema: Schema = field(default_factory=dict)
    whole_tensors: bool = False
    reads_attributes: bool = False
    rows: Rows | None = None
    window: Window = _WHOLE
    fused_update: bool = False
    updated: bool = False
    provisional: bool = False
    is_remote: bool = False

    def __repr__(self) -> str:
        """Without elements and groups: errors of dictionaries print their keys."""
        return f"<{self.name} of shape {tuple(self.local.shape)} and {self.local.dtype}>"

    @property
    def planned_elements(self) -> int:
        """Elements to plan with: the same number on all ranks that update it together."""
        return self.local.numel() if self.rows is None else self.rows.most


AHEAD = 2
"""How many units that ranks update together may be started ahead of the current one, if there is room for them."""


@dataclass(eq=False)
class Unit:
    """Parameters, or ranges of them, whose state is fetched, updated and written back together."""

    index: int
    parts: tuple[tuple[Managed, int, int], ...]

    @property
    def label(self) -> str:
        """Names of the first and the last parameter, for messages."""
        first, last = self.parts[0][0].name, self.parts[-1][0].name
        return first if first == last else f"{first} … {last}"


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
    def acquire(
        self, unit: Unit, active: Collection[Managed], apart: Mapping[Managed, object] | None = None
    ) -> list[Segment]:
        """Masters and state of the unit's ``active`` parameters on the device, ready for work on the current stream.

        Args:
            apart: a key for each parameter; parameters with different keys are in different segments.
        """

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


def entry_dtype(spec: EntrySpec, owner: Managed) -> torch.dtype | None:
    """The dtype in which this parameter's entry is stored. Specs come from fp32 probes; some masters are not fp32."""
    follows = spec.like_parameter and owner.own_master and spec.dtype == torch.float32
    dtype = owner.local.dtype if follows else spec.dtype
    return storage_dtype(spec, dtype)


def storage_dtype(spec: EntrySpec | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which an entry is stored that the base optimizer has in ``dtype``."""
    return dtype if spec is None or spec.kept is None or dtype != torch.float32 else spec.kept


def adopt_entry(spec: EntrySpec | None, value: Any, owner: Managed) -> Any:
    """A new value for ``owner`` from a loaded entry of any device, with the dtype and device of the base optimizer."""
    device = owner.local.device
    if spec is None or spec.dtype is None:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device=device if value.dim() else value.device, copy=True)
    dtype, target = entry_dtype(spec, owner), device if spec.on_device else torch.device("cpu")
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device=target)
    return value.detach().to(device=target, dtype=dtype, copy=True)
