"""One step's update: which gradients, by which factor, with which hyper-parameters, and how it ended.

Gradients are multiplied by one over the loss scale, times the clip coefficient. Norms are those of unscaled gradients:
they have the same bits as if the scale were divided out first.

The norm is that of all gradients together, or with ``clip_layers`` that of each layer. A layer is a part of the model
(a transformer block, or a module outside the blocks), however its state is cut into units.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightstep.clipping import GradientNorm, clip_coefficient
from lightstep.distributed import differs_across_ranks, like, writes
from lightstep.precision.adam_batch import AdamCall, Scaling
from lightstep.precision.loss_scale import LossScale
from lightstep.precision.scale_kernel import scale_into
from lightstep.state.schema import Managed
from lightstep.state.units import group_by_layer

__all__ = [
    "CLASS",
    "KEPT",
    "GradientStage",
    "Gradients",
    "GroupValues",
    "Norms",
    "StepResult",
    "Update",
    "as_row",
    "copied",
    "equal_settings",
    "factors_of",
    "same_value",
    "scalable_in_place",
    "settings_of",
    "versions_of",
]

Gradients = dict[Managed, Tensor]

Factor = Tensor | None

CLASS = "optimizer_class"
"""An entry of a group: the name of its class, if that is not the optimizer's own."""
KEPT = "kept_by_class"
"""An entry of a group: what classes keep outside groups and parameters, by class (:meth:`GroupValues.kept`)."""

_PLAIN = frozenset({bool, int, float, str, type(None)})


@dataclass(eq=False)
class Update:
    """One step's update of the parameters that are scaled and skipped together: of all, or of one layer.

    Attributes:
        gradients: local gradients; each is dropped when its parameter is updated.
        divisor, factor: 0-dim fp32; the base optimizer sees ``gradient / divisor * factor``. ``None`` is 1.
        overflow: 0-dim fp32; if it is 1 nothing changes.
        values: the groups' hyper-parameters.
        elsewhere: the parameters that other replicas update and send.
        without_state: the parameters that had no state when the update was made.
        keep_gradients: the gradients must not be changed.
        scalings: what :meth:`scaling_on` has made; updates with the same scaling share it.
    """

    gradients: Gradients
    divisor: Tensor | None
    factor: Tensor | None
    overflow: Tensor
    values: GroupValues
    elsewhere: list[Managed] = field(init=False)
    without_state: list[Managed] = field(init=False)
    keep_gradients: bool = False
    scalings: dict[torch.device, Scaling] = field(default_factory=dict, repr=False)
    versions: dict[Managed, tuple[int, int]] = field(default_factory=dict)
    """Of gradient and weight, where the update is deferred: nobody else may write to them before it."""

    def __post_init__(self) -> None:
        self.elsewhere = [item for item in self.gradients if item.is_remote]
        self.without_state = [item for item in self.gradients if not item.updated]

    def scaling_on(self, device: torch.device) -> Scaling:
        """Divisor, factor and overflow on a device: the same object for all units, which are updated in one lane."""
        if device not in self.scalings:
            divisor, factor = (None if value is None else value.to(device) for value in (self.divisor, self.factor))
            overflow = self.overflow.to(device)
            self.scalings[device] = Scaling(divisor, factor, overflow, 1 - overflow)
        return self.scalings[device]

    def note_versions(self) -> None:
        """From now on :meth:`refuse_written` finds gradients and weights that somebody else writes to."""
        weights = versions_of(self.gradients)
        pairs = zip(self.gradients.items(), weights, strict=True)
        self.versions = {item: (gradient._version, weight) for (item, gradient), weight in pairs}

    def note_own_writes(self, items: Iterable[Managed]) -> None:
        """These weights have their present versions from their own update.

        On the CPU, where updates run in a thread, one of them may be from a write of the user that came meanwhile. It
        cannot be told apart: how many writes an update makes depends on its class and on how the weight is cut.
        """
        known = [item for item in items if item in self.versions]
        for item, weight in zip(known, versions_of(known), strict=True):
            self.versions[item] = self.versions[item][0], weight

    def refuse_written(self, items: Iterable[Managed]) -> None:
        """Raise ``RuntimeError`` if somebody has written to these gradients or weights after ``step()``."""
        known = [item for item in items if item in self.versions and item in self.gradients]
        for item, now in zip(known, versions_of(known), strict=True):
            gradient, weight = self.versions[item]
            is_gradient = self.gradients[item]._version != gradient
            if is_gradient or now != weight:
                raise RuntimeError(
                    f"{f'the gradient of {item.name}' if is_gradient else item.name} was written to after step(), "
                    "before its deferred update (optimizer_state.update) had run: call optimizer.synchronize() before "
                    "you write to it"
                )

    def drop_gradients(self, items: list[Managed]) -> None:
        """Drop the gradients of these parameters, which are not read any more."""
        for item in items:
            if item in self.gradients:
                del self.gradients[item]


def versions_of(items: Iterable[Managed]) -> list[int]:
    """The count of in-place writes to each parameter. Several are read in each step: plain ones without a call."""
    return [item.param._version if type(item.param) is nn.Parameter else writes(item.param) for item in items]


class GroupValues:
    """The hyper-parameters of every group at the beginning of a step, and what the base optimizer writes into them.

    All units of a step see the values of its beginning. So a class that counts in its groups (schedule-free methods
    do), in attributes of its own, or in ``self.state["k"]`` (MADGRAD does), counts steps and not units.

    Args:
        groups: the live groups.
        deferred: the step ends after ``step()`` has returned, and must not see what is written then to the groups'
            tensors (a learning rate) and lists (betas): they are copied.

    Attributes:
        initial: each group's settings at the beginning, by the group's ``id``; only to be read.
        kinds: what decides how each group's class runs, likewise: its name, ``fused`` and ``foreach``.
        calls: what the kernel of AdamW needs in this step, by the ``id`` of group and scaling; ``None``: it cannot run.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], deferred: bool = False) -> None:
        self._groups = list(groups)
        self.initial = {id(group): settings_of(group) for group in groups}
        for settings in self.initial.values() if deferred else ():
            settings.update({key: copied(value) for key, value in settings.items() if type(value) not in _PLAIN})
        self.kinds = {id(group): (group.get(CLASS), group.get("fused"), group.get("foreach")) for group in groups}
        self.calls: dict[tuple[int, int], AdamCall | None] = {}
        self._written: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()
        self._noted: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def note_tensors(self) -> None:
        """For :meth:`changed`: tensors on an accelerator that are still the same, unwritten, need no comparison."""
        for group in self._groups:
            tensors = {key: value for key, value in settings_of(group).items() if isinstance(value, Tensor)}
            self._noted |= {(id(group), key): (value, writes(value)) for key, value in tensors.items()}

    def changed(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """The names of ``deferred`` settings that somebody has changed since."""
        known = [(group, self.initial[id(group)]) for group in groups if id(group) in self.initial]
        return sorted(
            {
                key
                for group, then in known
                for key, now in settings_of(group).items()
                if not (key in then and self._is_unchanged(group, key, now))
            }
        )

    def _is_unchanged(self, group: dict[str, Any], key: str, now: Any) -> bool:
        """The host waits for a tensor on an accelerator only if somebody has put it there, or written to it."""
        then = self.initial[id(group)][key]
        if not (isinstance(now, Tensor) and isinstance(then, Tensor) and _is_on_accelerator(now)):
            return same_value(now, then)
        noted, version = self._noted.get((id(group), key), (then, 0))
        is_same = now is noted and writes(now) == version
        return is_same or (now.device == then.device and torch.equal(now, then))

    def settings(self, group: dict[str, Any], tensors: bool = False) -> dict[str, Any]:
        """A copy of one group's settings, lists included: the base optimizer may write into it.

        Args:
            tensors: copy tensors, too. torch's own classes only read them.
        """
        mutable = (list, dict, Tensor) if tensors else (list, dict)
        settings = {key: copied(v) if type(v) in mutable else v for key, v in self.initial[id(group)].items()}
        settings.pop(KEPT, None)
        return settings

    def kept(self, name: str) -> dict[str, Any]:
        """A copy of what a class keeps: the entries of its ``state`` under keys that are no parameters, and the
        attributes that its steps have changed. They are saved with a group."""
        return copied(self.initial[id(self._keeper(name))].get(KEPT, {}).get(name, {}))

    def record_kept(self, name: str, kept: Mapping[str, Any]) -> None:
        """Record what the class keeps after an update."""
        keeper = id(self._keeper(name))
        before = self._written.setdefault(keeper, {}).get(KEPT, self.initial[keeper].get(KEPT, {}))
        self._written[keeper][KEPT] = {**before, name: kept}

    def _keeper(self, name: str) -> dict[str, Any]:
        """The group that has it: the first one, until a checkpoint with groups in another order is loaded."""
        return next((group for group in self._groups if name in group.get(KEPT, {})), self._groups[0])

    def record_writes(self, group: dict[str, Any], given: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
        """Record what the base optimizer has changed in the settings that it was given for a group.

        Args:
            given: what :meth:`settings` returned: the values that ``seen`` began with.
            seen: the dictionary that the optimizer had.
        """
        self._updated.add(id(group))
        initial = self.initial[id(group)]
        changed = {
            key: value
            for key, value in seen.items()
            if key not in ("params", "fused") and not _is_as_given(value, given.get(key), initial.get(key))
        }
        self._written.setdefault(id(group), {}).update(changed)

    def not_updated(self) -> list[dict[str, Any]]:
        """The groups of which nothing had a gradient."""
        return [group for group in self._groups if id(group) not in self._updated]

    def matches(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a step that begins now would see the same values."""
        now = [settings_of(group) for group in groups]
        then = [self.initial.get(id(group), {}) for group in groups]
        return len(groups) == len(self._groups) and all(
            a.keys() == b.keys() and all(a[key] is b[key] or same_value(a[key], b[key]) for key in a)
            for a, b in zip(now, then, strict=True)
        )

    def write_back(self) -> None:
        """The step is over: write what the base optimizer has changed to the live groups."""
        for group in self._groups:
            group.update(self._written.get(id(group), {}))


def _is_on_accelerator(value: Tensor) -> bool:
    return value.device.type != "cpu"


def _is_as_given(value: Any, given: Any, initial: Any) -> bool:
    """Whether a value is the one that was given, and was not written to."""
    if type(value) in (list, dict):
        return same_value(value, initial)
    copy = isinstance(value, Tensor) and given is not initial
    return value is given and not (copy and value._version)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", CLASS)}


def equal_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two groups' settings are equal, apart from the learning rate: it scales updates and mixes nothing."""
    keys = (first.keys() | second.keys()) - {"lr", "initial_lr"}
    return all(key in first and key in second and _same(first[key], second[key]) for key in keys)


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second) or isinstance(first, Tensor):
        return False
    try:
        return bool(first == second)
    except RuntimeError:  # a container that holds tensors, such as a class's queue of gradients
        return False


def copied(value: Any) -> Any:
    """A copy of a tensor, or of a tuple (betas), list or dictionary with what it holds."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    is_plain = type(value) is tuple and _PLAIN.issuperset(map(type, value))
    return type(value)(map(copied, value)) if type(value) in (tuple, list) and not is_plain else value


def same_value(now: Any, then: Any) -> bool:
    """Tensors are compared by value on the CPU; on an accelerator that would make the host wait, so they differ."""
    if type(now) is type(then) and type(now) in (tuple, list):
        return len(now) == len(then) and all(map(same_value, now, then))
    if type(now) is type(then) is dict:
        return now.keys() == then.keys() and all(same_value(now[key], then[key]) for key in now)
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.device.type == then.device.type == "cpu" and torch.equal(now, then)
    return _same(now, then)


class Norms:
    """The norms of one optimizer's gradients, and the factors by which the gradients are multiplied.

    A new object is made when its parameters change.

    It sets :attr:`Managed.norm_group`.

    Args:
        managed: the parameters, in the order of ``model.parameters()``: the last bits of the norm depend on it.
        norm_type: p of the norms.
        everywhere: whether all ranks of the process group agree on overflow; ``None`` decides by the parameters.
        clip_layers: clip each layer by its own norm.
        layer_by_layer: gradients exist one layer at a time: :meth:`add_norms` and :meth:`layer_factors` are used.

    Attributes:
        layers: the parameters of each layer.
    """

    def __init__(
        self,
        managed: Iterable[Managed],
        norm_type: float,
        everywhere: bool | None = None,
        *,
        clip_layers: bool = False,
        layer_by_layer: bool = False,
    ) -> None:
        self._managed = list(managed)
        self._norm_type, self._clip_layers = norm_type, clip_layers
        parameters = [item.param for item in self._managed]
        self._global_norm = GradientNorm(_measured(self._managed), norm_type, everywhere, parameters, whole=True)
        self._half = all(item.local.dtype == torch.float16 for item in self._managed)
        self.layers = group_by_layer(self._managed)
        by_layer = self.layers if clip_layers or layer_by_layer else []
        for number, layer in enumerate(by_layer):
            for item in layer:
                item.norm_group = number
        self._layer_norms = [GradientNorm(_measured(layer), norm_type, False) for layer in by_layer]
        self._norms: dict[Managed, Tensor] = {}

    def norm(
        self, gradients: Mapping[Managed, Tensor], loss_scale: LossScale, layer: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of the gradients divided by the loss scale, and the overflow flag: 0-dim fp32.

        Norms that have been stored are not measured again.

        Args:
            layer: that of this layer's gradients; ``None``: that of all.
        """
        norm_of, items = self._global_norm, self._managed
        if layer is not None:
            norm_of, items = self._layer_norms[layer], self.layers[layer]
        norms: Sequence[Tensor | None]
        if not self._norms:
            norms = self._tensor_norms(list(map(gradients.get, items)), loss_scale)
        else:
            left = [item for item in items if item in gradients and item not in self._norms]
            found = dict(zip(left, self._tensor_norms([gradients[item] for item in left], loss_scale), strict=True))
            norms = [found.get(item, self._norms.get(item)) if item in gradients else None for item in items]
        norm, overflow = norm_of.combine(norms)
        if not loss_scale.is_identity and self._divided_later(loss_scale):
            norm = norm / loss_scale.tensor(norm.device)
        return norm, overflow

    def _tensor_norms(self, gradients: Sequence[Tensor | None], loss_scale: LossScale) -> Sequence[Tensor | None]:
        """Each gradient's own norm."""
        if loss_scale.is_identity or self._divided_later(loss_scale):
            return self._global_norm.tensor_norms(gradients)
        divided = (None if g is None else g.float() / loss_scale.tensor(g.device) for g in gradients)
        return [self._global_norm.tensor_norms([gradient])[0] for gradient in divided]  # one copy at a time

    def _divided_later(self, loss_scale: LossScale) -> bool:
        """Whether dividing the norm by the scale, not the gradients, gives the same bits.

        Division by a power of two is exact, and squares of fp16 numbers stay in the range of fp32 with and without the
        scale. Squares of other dtypes may leave it, and roots other than the first and second of a power of two are
        rounded.
        """
        exact = self._half and self._norm_type in (1, 2, math.inf)
        return exact and loss_scale.power_of_two

    def factors(
        self, gradients: Gradients, norm: Tensor, loss_scale: LossScale, scale: Factor, max_norm: float | None
    ) -> list[tuple[Gradients, Factor, Factor]]:
        """The gradients that are scaled alike, with ``(divisor, factor)`` of :class:`Update`: all, or each layer's.

        Args:
            norm: the global norm, unscaled.
            loss_scale: the scale of the gradients.
            scale: its value in this step, 0-dim fp32; ``None`` is 1.
            max_norm: ``None`` clips nothing.
        """
        if max_norm is None or not self._clip_layers:
            coefficient = None if max_norm is None else clip_coefficient(norm, max_norm)
            return [(gradients, *factors_of(scale, loss_scale, coefficient))]
        found = []
        for number, layer in enumerate(self.layers):
            layer_norm = self.norm(gradients, loss_scale, number)[0].to(norm.device)
            own = {item: gradients[item] for item in layer if item in gradients}
            found.append((own, *factors_of(scale, loss_scale, clip_coefficient(layer_norm, max_norm))))
        return found

    # -- one layer at a time

    def reset_norms(self) -> None:
        """Forget the norms of an earlier step."""
        self._norms.clear()

    def forget_norms(self, items: Iterable[Managed]) -> None:
        """Forget the norms of gradients that have been dropped."""
        for item in items:
            self._norms.pop(item, None)

    def add_norms(self, gradients: Gradients, loss_scale: LossScale) -> None:
        """Store the norms of gradients that will be freed before the end of the step."""
        norms = self._tensor_norms(list(gradients.values()), loss_scale)
        for item, norm in zip(gradients, norms, strict=True):
            assert norm is not None
            self._norms[item] = norm

    @property
    def stored_norms(self) -> Collection[Managed]:
        """The parameters whose norms have been stored since :meth:`reset_norms`."""
        return self._norms.keys()

    def total_norm(self, loss_scale: LossScale) -> tuple[Tensor, Tensor]:
        """:meth:`norm` of all gradients whose norms have been stored."""
        return self.norm(self._norms, loss_scale)

    def layer_factors(
        self, number: int, gradients: Gradients, loss_scale: LossScale, max_norm: float | None
    ) -> tuple[Factor, Factor, Tensor]:
        """``(divisor, factor, overflow)`` of one layer whose norms are stored; the same on all ranks that share it."""
        device = next(iter(gradients.values())).device
        norm = self.norm(gradients, loss_scale, number)[0].to(device)
        scale = None if loss_scale.is_identity else loss_scale.tensor(device)
        coefficient = None if max_norm is None else clip_coefficient(norm, max_norm)
        return *factors_of(scale, loss_scale, coefficient), (~norm.isfinite()).float()


def _measured(items: Sequence[Managed]) -> list[Tensor]:
    """The parameters, on the devices of their gradients. There is nothing to be read in those that rest on the host."""
    found: list[Tensor] = []
    for item in items:
        if item.home is None:
            found.append(item.param)
            continue
        found.append(like(item.param, item.local.detach()).requires_grad_(item.param.requires_grad))
        found[-1].differs_across_ranks = differs_across_ranks(item.param)  # type: ignore[attr-defined]
    return found


def factors_of(scale: Factor, loss_scale: LossScale, coefficient: Factor) -> tuple[Factor, Factor]:
    """``(divisor, factor)``: one multiplication, unless dividing by the scale is inexact.

    Args:
        scale: 0-dim fp32, the value of ``loss_scale`` in this step; ``None`` is 1.
        coefficient: by which gradients are clipped; ``None`` is 1.
    """
    if scale is None:
        return None, coefficient
    if not loss_scale.power_of_two:
        return scale, coefficient
    return None, scale.reciprocal() if coefficient is None else coefficient / scale


class Run(Protocol):
    """Parameters whose gradients are adjacent in the unit's flat order.

    ``first``, ``stop``: their range of elements; ``ranges``: the range of each, counted from ``first``.
    """

    first: int
    stop: int
    ranges: list[tuple[int, int]]

    def parts_of(self, row: Tensor) -> list[Tensor]:
        """A view of each parameter in a row, in its shape."""


class _Row:
    """Views of a run's range in the stage: all of it, each parameter, and the padding between them."""

    def __init__(self, run: Run, buffer: Tensor) -> None:
        self.flat = buffer[run.first : run.stop]
        self.parts = run.parts_of(self.flat)
        gaps = [self.flat[stop:start] for (_, stop), (start, _) in pairwise(run.ranges)]
        self.gaps = [gap for gap in gaps if gap.numel()]


class GradientStage:
    """Scaled gradients in the unit's flat order. The memory grows to the largest unit and is kept, so later steps
    allocate nothing.

    Attributes:
        is_reserved: memory is allocated.
    """

    def __init__(self) -> None:
        self.is_reserved = False
        self._buffer: Tensor | None = None
        self._rows: WeakKeyDictionary[Run, _Row] = WeakKeyDictionary()  # in the buffer

    def nbytes(self) -> int:
        """Bytes allocated between steps."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def free(self) -> None:
        """Free the memory; the next use allocates it again."""
        self._buffer, self.is_reserved = None, False
        self._rows.clear()

    def reserve(self, elements: int, device: torch.device) -> None:
        """Allocate the memory for a unit of ``elements`` elements.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        if self._buffer is not None and self._buffer.numel() >= elements and self._buffer.device == device:
            return
        if self._buffer is not None and self._buffer.device.type != "cpu":
            # Deferred updates use it on another stream than the one on which it was allocated.
            self._buffer.record_stream(torch.accelerator.current_stream(self._buffer.device))
        self.free()
        self._buffer = torch.empty(elements, dtype=torch.float32, device=device)
        self.is_reserved = True

    def gathered(self, run: Run, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients of one run in one row, not scaled; the padding between them is zero.

        If the run is a single contiguous gradient, the row is that gradient, in its own dtype. Others are copied to the
        stage.
        """
        if len(gradients) == 1 and gradients[0].is_contiguous():
            return as_row(gradients[0])
        place = self._rows.get(run) or self._new_row(run, gradients[0].device)
        torch._foreach_copy_(place.parts, list(gradients))
        if place.gaps:
            torch._foreach_zero_(place.gaps)
        return place.flat

    def scaled(
        self,
        runs: Sequence[Run],
        gradients: Sequence[Sequence[Tensor]],
        divisor: Tensor | None,
        factor: Tensor | None,
        in_place: bool = True,
    ) -> list[Tensor]:
        """``gradients / divisor * factor`` in fp32, one row for each run; the padding between gradients is zero.

        If a run is a single contiguous fp32 gradient, it is scaled in place, since the step consumes it. Others are
        written to the stage.

        Args:
            gradients: for each run those of its parameters, in their shapes, of any float dtype, contiguous or not.
            divisor: 0-dim fp32 loss scale, or ``None``.
            factor: 0-dim fp32, or ``None``.
            in_place: whether gradients may be written to.
        """
        results, unscaled = [], []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for run, own in zip(runs, gradients, strict=True):
            single = own[0] if len(own) == 1 else None
            if single is not None and in_place and scalable_in_place(single):
                row = as_row(single.data)  # its version says whether somebody else writes to it
            elif single is not None and divisor is None and factor is not None:
                results.append(row := (self._rows.get(run) or self._new_row(run, single.device)).flat)
                scale_into(single.device)(single.contiguous().view(-1), factor.reshape(1), row)
                continue
            else:
                place = self._rows.get(run) or self._new_row(run, own[0].device)
                row = place.flat
                targets += place.parts
                sources += own
                if place.gaps:
                    torch._foreach_zero_(place.gaps)
            results.append(row)
            unscaled.append(row)
        if targets:
            torch._foreach_copy_(targets, sources)
        if unscaled and divisor is not None:
            torch._foreach_div_(unscaled, divisor)
        if unscaled and factor is not None:
            torch._foreach_mul_(unscaled, factor)
        return results

    def _new_row(self, run: Run, device: torch.device) -> _Row:
        self.reserve(run.stop, device)
        assert self._buffer is not None
        row = self._rows[run] = _Row(run, self._buffer)
        return row


def scalable_in_place(gradient: Tensor) -> bool:
    """Whether the gradient can be scaled in place, without memory of the stage."""
    return gradient.dtype == torch.float32 and gradient.is_contiguous()


def as_row(gradient: Tensor) -> Tensor:
    """The gradient's elements in row-major order; a copy only if they are not in this order in memory.

    ``view(-1)`` would keep the stride of up to one element, which may be any: FSDP2's empty shards have 0, and torch's
    fused kernels refuse gradients with other strides than the parameter's. ``reshape(-1)`` would keep gaps.
    """
    return gradient.contiguous().as_strided((gradient.numel(),), (1,))


@dataclass(eq=False, repr=False, slots=True)
class StepResult:
    """The outcome of one :meth:`BaseOptimizer.step`; true when the step was applied.

    Creating one waits for nothing. Reading ``applied`` (also ``bool(result)``), ``loss_scale`` or the value of
    ``grad_norm`` (``.item()``, ``print``) makes the host wait until the device has measured the step's norm. A loop
    that never reads the result never waits, so the host can queue the next iteration meanwhile.

    Attributes:
        grad_norm: 0-dim fp32 tensor on the gradients' device: the global norm, unscaled, before clipping.
        overflow: 0-dim tensor there; not 0 if the step was skipped.
        scale: 0-dim fp32 tensor with the loss scale that this step used; ``None`` is 1.
        loss: what the closure returned, or ``None``.
        redone: with ``optimizer_state.update: overlap``, the number of steps before this one whose updates in backward
            were rolled back and run again when the norm was known: mostly because gradients had to be clipped.
        rolled_back: with ``overlap``, how often so far updates in backward were rolled back before ``step()``, which
            then ran them: a weight was read, or a gradient or hyper-parameter changed. The log of
            ``lightstep.optimizer.overlap`` has each reason (level ``INFO``), also of ``redone``.
    """

    grad_norm: Tensor
    overflow: Tensor
    scale: Tensor | None
    loss: Any = None
    redone: int = 0
    rolled_back: int = 0

    @property
    def applied(self) -> bool:
        """Whether the weights were updated; reading it waits for the device."""
        return not bool(self.overflow)

    @property
    def loss_scale(self) -> float:
        """The scale this step used; reading it waits for the device."""
        return 1.0 if self.scale is None else float(self.scale)

    def __bool__(self) -> bool:
        return self.applied

    def __repr__(self) -> str:
        return (
            f"StepResult(applied={self.applied}, grad_norm={float(self.grad_norm):.6g}, loss_scale={self.loss_scale:g})"
        )
