"""What the rest of this folder knows of parameters, their state, and the units in which they are updated."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightstep.distributed import Window

if TYPE_CHECKING:
    from lightstep.distributed import Rows
    from lightstep.state.host_weights import WeightHome

__all__ = [
    "ALIGNMENT",
    "Codec",
    "Coded",
    "EntrySpec",
    "Managed",
    "Schema",
    "Unit",
    "adopt_entry",
    "aligned",
    "entry_dtype",
]


class Codec(Protocol):
    """How fp32 values are kept between updates, in fewer bytes; see ``lightstep.precision.moments``.

    Decoded values have the same codes again, to nearest and with any noise. Of entries that are never negative the sign
    bit is kept as it is: it may carry a bit of the master.

    Attributes:
        dtype: of the values as users read and load them. A first plane of this dtype is the values themselves.
        planes: what is kept in the record: suffix of the field's name, dtype, and elements for each item.
        block: how many elements share a scale; 1: there are no scales.
        is_stochastic: an update rounds stochastically.
    """

    dtype: torch.dtype
    planes: Sequence[tuple[str, torch.dtype, int]]
    block: int

    @property
    def is_stochastic(self) -> bool: ...
    def at(self, planes: Sequence[Tensor]) -> Coded:
        """The values that are kept in this memory, flat."""


class Coded(Protocol):
    """Values in the memory of a record.

    Attributes:
        planes: that memory, for a kernel that decodes and encodes by itself.
    """

    planes: Sequence[Tensor]

    def decode(self, out: Tensor) -> None:
        """Write the values to ``out`` (fp32, flat)."""

    def encode(self, value: Tensor) -> None:
        """Keep ``value`` (fp32, flat), rounded to nearest."""

    def encode_update(self, value: Tensor, entry: str, step: Any, numbers: Tensor | Window) -> None:
        """Keep ``value``, rounded stochastically.

        Args:
            entry: name of the state entry.
            step: number of updates of the parameter: a 0-dim tensor on any device, or a Python number.
            numbers: the elements' numbers in their whole parameters, modulo 2^32 (int32, flat), or their window.
        """


@dataclass(eq=False)
class EntrySpec:
    """One entry of the base optimizer's state, as seen on a probe parameter at set-up.

    Attributes:
        like_parameter: it has the parameter's shape; otherwise it is a scalar (``step``) or a plain Python value.
        dtype: of the tensor; ``None`` if the entry is not a tensor.
        on_device: torch keeps it on the parameter's device. A fused optimizer's ``step`` is there, others' are not.
        never_negative: its sign bit carries no information: second moments of known classes, or declared ones.
        codec: how fp32 values are kept between updates; ``None``: as they are.
    """

    like_parameter: bool
    dtype: torch.dtype | None
    on_device: bool
    never_negative: bool = False
    codec: Codec | None = None


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
        own_master: the parameter is its own master: it is fp32, or there are no others.
        rounding: how the fp32 result of an update is rounded to the weight, in the place of a master: stochastically.
        schema: the entries of its base optimizer's state.
        whole_tensors: its base optimizer is not element-wise. The parameter is never cut, and is updated by itself.
        reads_attributes: its base optimizer may read attributes of the parameter (``p._no_weight_decay``). It is
            updated as one with such parameters only as have the same.
        rows: how it is sharded over the ranks that update it together; ``None``: this rank updates its shard alone.
        norm_group: parameters with the same number are clipped and skipped by one norm of their own, and are not
            updated as one with others; ``None``: by the norm of all.
        window: where its local elements are in the whole parameter. Stochastic rounding depends on it.
        fused_update: a fused kernel joins and splits its masters, so nothing else needs them whole.
        updated: its state exists, from an update or from a checkpoint.
        provisional: its state is a placeholder that a checkpoint is about to replace; no update made it.
        home: where its weight rests on the host; ``None`` if it stays on the device. ``local`` is then on the device
            that updates it, and has the weight while it is held there.
        is_remote: another replica owns its state and updates it; this one only receives the weight. Set by the backend.
        has_equal_sizes: two of its dimensions are as large, so that it may be transposed and keep its shape.
    """

    param: Tensor
    local: Tensor
    group: dict[str, Any]
    name: str
    layer: Hashable = None
    own_master: bool = False
    rounding: Codec | None = None
    schema: Schema = field(default_factory=dict)
    whole_tensors: bool = False
    reads_attributes: bool = False
    rows: Rows | None = None
    norm_group: int | None = None
    window: Window = _WHOLE
    fused_update: bool = False
    updated: bool = False
    provisional: bool = False
    is_remote: bool = False
    home: WeightHome | None = None

    def __post_init__(self) -> None:
        sizes = [size for size in self.local.shape if size > 1]
        self.has_equal_sizes = len({*sizes}) < len(sizes)

    @property
    def resting(self) -> Tensor:
        """The weight where it is between steps."""
        return self.local if self.home is None else self.home.on_host

    def settle(self) -> None:
        """Block the host until :attr:`resting` is complete there and may be read and written."""
        if self.home is not None:
            self.home.group.weights.settle()

    def write(self, values: Tensor) -> None:
        """Write to the weight, as its user does."""
        if self.home is None:
            self.local.copy_(values)
        else:
            self.home.group.write(self.home.number, values)

    @property
    def has_fp32_updates(self) -> bool:
        """Whether the base optimizer sees fp32 numbers: a master, an fp32 weight, or a weight that is widened."""
        return not self.own_master or self.rounding is not None or self.local.dtype == torch.float32

    def __repr__(self) -> str:
        """Without elements and groups: errors of dictionaries print their keys."""
        return f"<{self.name} of shape {tuple(self.local.shape)} and {self.local.dtype}>"

    @property
    def planned_elements(self) -> int:
        """Elements to plan with: the same number on all ranks that update it together."""
        return self.local.numel() if self.rows is None else self.rows.most


ALIGNMENT = 16  # elements; keeps vectorised kernels on their fast path, and bitmaps of parts on whole bytes


def aligned(elements: int) -> int:
    """How much of its unit's flat order a part of so many elements takes up, in elements."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Unit:
    """Parameters, or ranges of them, whose state is fetched, updated and written back together.

    Attributes:
        owners: the parameter of each part.
        elements: length of its flat order.
        label: names of the first and the last parameter, for messages.
    """

    index: int
    parts: tuple[tuple[Managed, int, int], ...]
    owners: list[Managed] = field(init=False)
    elements: int = field(init=False)
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.owners = [owner for owner, _, _ in self.parts]
        self.elements = sum(aligned(stop - start) for _, start, stop in self.parts)
        first, last = self.parts[0][0].name, self.parts[-1][0].name
        self.label = first if first == last else f"{first} … {last}"


def entry_dtype(spec: EntrySpec, owner: Managed) -> torch.dtype | None:
    """The dtype in which this parameter's entry is read and loaded. Specs come from fp32 probes; some masters are not
    fp32."""
    follows = spec.like_parameter and not owner.has_fp32_updates and spec.dtype == torch.float32
    dtype = owner.local.dtype if follows else spec.dtype
    return dtype if dtype != torch.float32 or spec.codec is None else spec.codec.dtype


def adopt_entry(spec: EntrySpec | None, value: Any, owner: Managed) -> Any:
    """A new value for ``owner`` from a loaded entry of any device, with the dtype and device of the base optimizer."""
    device = owner.local.device
    if spec is None or spec.dtype is None:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(device=device if value.dim() else value.device, copy=True)
    dtype, target = entry_dtype(spec, owner), device if spec.on_device else torch.device("cpu")
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device=target) if isinstance(value, Real) else value
    return value.detach().to(device=target, dtype=dtype, copy=True)
