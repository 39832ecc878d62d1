"""The interface of a state backend, and the vocabulary it shares with ``step()``.

How data goes through a step, unit by unit:

1. A *unit* is a few parameters, or a range of one. Its state is one :class:`~lightstep.state.record.Record`: a flat
   buffer, field after field (``low | exp_avg | exp_avg_sq``), in each field one parameter behind the other.
2. ``acquire`` makes the record available on the device, in a :class:`~lightstep.state.record.Slot`: the record's own
   memory (``resident``), a copy for this step (``bulk``) or a place in a ring (``stream``).
3. What is updated in it is handed out as *segments* (:mod:`lightstep.state.segment`): runs of parameters that an
   element-wise class takes for one. Weights are gathered, masters joined from them: one flat fp32 tensor per segment.
4. The base optimizer updates the segments.
5. ``release`` writes masters back to weights and record, and the record to where it lives.

A backend decides what is staged when, and where records live between steps.
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
    from lightstep.state.kept_copies import KeptCopies
    from lightstep.state.segment import Segment


class Rounding(Protocol):
    """fp32 numbers to a shorter dtype, otherwise than to nearest; see ``lightstep.precision.moments``."""

    def round(self, value: Tensor, out: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None: ...


@dataclass(eq=False)
class EntrySpec:
    """What one entry of the base optimizer's state looks like, read off a probe at set-up.

    Attributes:
        like_parameter: has the parameter's shape; otherwise it is a scalar (``step``) or a plain Python value.
        dtype: of the tensor; ``None`` when the entry is no tensor.
        on_device: whether torch keeps it on the parameter's device (a fused optimizer's ``step`` is, others' are not).
        never_negative: second moments of classes known for it, or declared: their sign bit carries no information.
        kept: what fp32 numbers are rounded to after each update, and kept in; ``None``: they stay what they are.
        rounding: how; ``None`` is to nearest.
    """

    like_parameter: bool
    dtype: torch.dtype | None
    on_device: bool
    never_negative: bool = False
    kept: torch.dtype | None = None
    rounding: Rounding | None = None


Schema = Mapping[str, EntrySpec]


_WHOLE = Window()


@dataclass(eq=False)
class Managed:
    """One trainable parameter in a backend's charge.

    Attributes:
        param: the model's own (D)Tensor: bf16, fp16 or fp32.
        local: its plain local shard: a detached alias of the same storage.
        group: its live entry of ``optimizer.param_groups``.
        name: its name in the model, when known; otherwise its place in the parameter groups.
        layer: parameters with equal ``layer`` belong to one transformer block or FSDP module; ``None`` when unknown.
        own_master: the parameter is its own master (fp32, or master weights are off).
        schema: the entries of its base optimizer's state.
        whole_tensors: its base optimizer is not element-wise: it is never cut, and updated by itself.
        rows: how it is divided among ranks that update it together; ``None``: this one updates what it has alone.
        window: where its local elements are in the whole parameter, for entries that are rounded by their number.
        joined_in_update: its class is updated by a kernel that joins and splits masters itself, so that nothing else
            needs them whole.
        updated: its state exists, from an update or from a checkpoint.
        provisional: its state only stands in for the one that a checkpoint is about to bring; no update made it.
        elsewhere: another replica keeps its state and updates it; here only its weight arrives. Set by the backend.
    """

    param: Tensor
    local: Tensor
    group: dict[str, Any]
    name: str
    layer: Hashable = None
    own_master: bool = False
    schema: Schema = field(default_factory=dict, repr=False)
    whole_tensors: bool = False
    rows: Rows | None = None
    window: Window = _WHOLE
    joined_in_update: bool = False
    updated: bool = False
    provisional: bool = False
    elsewhere: bool = False

    @property
    def planned(self) -> int:
        """Elements to plan with: alike on ranks that update it together."""
        return self.local.numel() if self.rows is None else self.rows.most


AHEAD = 2
"""Units that ranks update together are begun before so many others are done, where there is room for them."""


@dataclass(eq=False)
class Unit:
    """What is staged and updated together."""

    index: int
    parts: tuple[tuple[Managed, int, int], ...]

    @property
    def label(self) -> str:
        """First and last parameter, for messages."""
        first, last = self.parts[0][0].name, self.parts[-1][0].name
        return first if first == last else f"{first} … {last}"


class PinnedState(Protocol):
    """State entries as they were at one moment, read by another thread."""

    def __contains__(self, parameter: object) -> bool:
        """Whether its entries are here."""

    def take(self, parameter: Tensor, key: str) -> Tensor:
        """One entry of the parameter's local shape, on the host, once. Nobody writes to it until :meth:`written`."""

    def written(self, parameter: Tensor, key: str) -> None:
        """What was taken is not read any more; called by any thread."""

    def close(self) -> None:
        """Let go of what nobody has taken."""


class StateBackend(ABC):
    """Where masters and optimizer state live between steps."""

    name: ClassVar[str]
    hands_out_state: ClassVar[bool] = True
    """Whether :meth:`gather` returns the state itself (see :meth:`is_live`); otherwise copies, and writing to them
    changes nothing."""
    in_lanes: bool = False
    """Whether units may be updated in :attr:`lanes`, beside the caller's own work."""
    awaited_by_others: bool = False
    """Whether other processes wait for units of this one, so that none may be left until somebody here asks for it."""

    def fresh(self) -> StateBackend:
        """A new backend with this one's settings and nothing in its charge."""
        return type(self)()

    @abstractmethod
    def register(self, managed: Sequence[Managed]) -> None:
        """Take charge of exactly these parameters: new ones join, those no longer listed leave with their state."""

    @property
    def lanes(self) -> Lanes:
        """Where updates beside the caller's own work are queued."""
        raise NotImplementedError(f"the {self.name} backend has no lanes")

    def arriving_with(self, complete_with: Mapping[Managed, int], end: int) -> dict[Managed, int]:
        """For weights that other replicas send: the number of the job with which each is asked for.

        Args:
            complete_with: the number of the job with which each own parameter is updated.
            end: that of the end of the step.
        """
        return {}

    def receive(self, managed: Iterable[Managed]) -> None:  # noqa: B027  (nothing is sent where there are no replicas)
        """What the caller does next finds these weights arrived; they have been asked for."""

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """All units, in update order."""

    def prepare(self) -> None:  # noqa: B027  (an optional hook; `begin` does it for who has not)
        """A step is about to be decided: take the device memory that it needs. No step may be under way.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed, and this may be called again.
        """

    def begin(  # noqa: B027  (an optional hook)
        self, managed: Collection[Managed], order: Sequence[Unit] | None = None
    ) -> None:
        """A step that updates these parameters starts.

        Args:
            order: in which units will be acquired; ``None`` is that of :meth:`units`. Any other is right, and slower.
        """

    @abstractmethod
    def acquire(
        self, unit: Unit, active: Collection[Managed], apart: Mapping[Managed, object] | None = None
    ) -> list[Segment]:
        """Masters and state of the unit's ``active`` parameters on the device, ready for work queued on the current
        stream.

        Args:
            apart: parameters with different objects here come in different segments.
        """

    @abstractmethod
    def release(self, unit: Unit, updated: Sequence[Segment]) -> None:
        """The unit is done: ``updated`` segments are written to their parameters and to where their state lives."""

    def ahead(self, managed: Collection[Managed], entry: str) -> int:
        """How many units behind the next :meth:`look_ahead` will be asked for; 0 unless all of these have ``entry``.

        Units that ranks update together alone are counted, since those are the same on all ranks.
        """
        return 0

    def look_ahead(self, unit: Unit, active: Collection[Managed]) -> list[tuple[Segment, Mapping[str, Tensor]]]:
        """The segments that :meth:`acquire` will hand out of a later unit, and their entries, to be worked on already.

        For work on the current stream. What is written to an entry is there when the unit is acquired.
        """
        raise NotImplementedError(f"the {self.name} backend knows no unit before it is acquired")

    def finish(self) -> None:  # noqa: B027  (an optional hook)
        """The step is over: order what is still under way before the caller's next work."""

    def can_try(self, units: Collection[Unit]) -> Sequence[Unit]:
        """Those that :meth:`attempt` has memory for, taken here if need be; no step may be under way."""
        return ()

    def keep_first(self, units: Sequence[Unit]) -> None:  # noqa: B027  (for backends that have a choice)
        """From the next step on, if some state stays on the device it is that of these units before others."""

    def attempt(self, unit: Unit) -> None:
        """The next :meth:`acquire` and :meth:`release` of this unit can be taken back."""
        raise NotImplementedError(f"the {self.name} backend has one version of its state")

    def tried(self, unit: Unit) -> bool:
        """Whether the unit was updated since :meth:`attempt`, and nothing was said of it yet."""
        return False

    def commit(self, unit: Unit) -> None:  # noqa: B027  (for backends that can try)
        """The update that was tried counts."""

    def take_back(self, unit: Unit) -> None:  # noqa: B027  (for backends that can try)
        """The update that was tried does not count: on the current stream the weights become what they were."""

    def abandon(self) -> None:  # noqa: B027  (an optional hook)
        """The step broke off with an error: do what other processes wait for. Raises nothing."""

    @abstractmethod
    def entries(self, managed: Managed) -> dict[str, Any]:
        """The state of one parameter: base optimizer's entries and ``"master"`` (unless it is its own).

        Tensors have the local shard's shape (or 0 dimensions) and are live where they can be. Before the first update
        only what :meth:`start_from` was given, if anything; ``{}`` where the state is elsewhere. Call
        :meth:`synchronize` first.
        """

    def describe(self, managed: Managed) -> dict[str, Any]:
        """:meth:`entries` without their numbers: tensors are on the meta device."""
        return {
            key: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
            for key, value in self.entries(managed).items()
        }

    def gather(self, managed: Managed) -> dict[str, Any]:
        """:meth:`entries` of whoever keeps them: where replicas share the work, every one of them calls this.

        The state itself or copies of it: see :attr:`hands_out_state`.
        """
        return self.entries(managed)

    def pin(
        self,
        wanted: Mapping[Managed, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: KeptCopies | None,
    ) -> PinnedState | None:
        """These entries as they are now, for another thread to read while updates go on; of some parameters.

        Nothing may be under way. The state of parameters that are not in the snapshot has to be read by other means.

        Args:
            weight_of: what returns a parameter's local weight of this moment on the host, when it is called.
            copies: host memory for copies until the snapshot is closed. ``None``: nothing is updated until then, and
                nothing has to be copied.
        """
        return None

    def is_live(self, managed: Managed, key: str) -> bool:
        """Whether the entry that :meth:`gather` has just returned is the state itself."""
        return self.hands_out_state

    @abstractmethod
    def load(self, managed: Managed, entries: Mapping[str, Any]) -> None:
        """Replace the state of one parameter; a missing ``"master"`` is rebuilt from the parameter.

        Nothing is done for one whose state is elsewhere: it is loaded there.
        """

    @abstractmethod
    def refresh(self, managed: Managed) -> None:
        """The master becomes the parameter's value, brought to fp32."""

    @abstractmethod
    def start_from(self, managed: Managed, master: Tensor) -> None:
        """Until its first update the parameter's fp32 master is ``master`` (local shape) and not the weight itself."""

    @abstractmethod
    def changed(self, items: Iterable[Managed]) -> list[Managed]:
        """Those that are no longer their masters rounded: somebody else wrote to them. May wait for the device."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """``device_bytes``, ``host_bytes`` and ``ring_bytes`` held between steps."""

    def set_residency(self, gib: float | Literal["auto"]) -> None:
        """State that stays on the device, in GiB; ``"auto"`` measures what is spare. Nothing may be under way.

        Raises:
            ValueError: this backend has no choice.
        """
        raise ValueError(
            f"set_residency: optimizer_state.backend is {self.name}, which does not divide the state between device "
            "and host; backend stream does"
        )

    def release_device_memory(self) -> None:  # noqa: B027  (some hold none between steps)
        """Give back all device memory; it is taken again at the next use. Nothing may be under way."""

    def synchronize(self) -> None:  # noqa: B027  (an optional hook)
        """Wait until all queued work has written_back in the parameters and the state."""

    def close(self) -> None:  # noqa: B027  (an optional hook)
        """Give all memory back."""


def entry_dtype(spec: EntrySpec, owner: Managed) -> torch.dtype | None:
    """In what an entry of this parameter is kept: specs are read off fp32 probes, and some masters are not fp32."""
    follows = spec.like_parameter and owner.own_master and spec.dtype == torch.float32
    dtype = owner.local.dtype if follows else spec.dtype
    return storage_dtype(spec, dtype)


def storage_dtype(spec: EntrySpec | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """In what an entry that the base optimizer has in ``dtype`` is kept."""
    return dtype if spec is None or spec.kept is None or dtype != torch.float32 else spec.kept


def adopt_entry(spec: EntrySpec | None, value: Any, owner: Managed) -> Any:
    """A loaded entry (from a checkpoint, of any device) as a new value that the base optimizer takes for ``owner``."""
    device = owner.local.device
    if spec is None or spec.dtype is None:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device=device if value.dim() else value.device, copy=True)
    dtype, target = entry_dtype(spec, owner), device if spec.on_device else torch.device("cpu")
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device=target)
    return value.detach().to(device=target, dtype=dtype, copy=True)
