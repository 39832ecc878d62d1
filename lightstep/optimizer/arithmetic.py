"""The base optimizer's own arithmetic, run on segments of staged memory.

lightstep computes no update itself: the installed optimizer class does, on fp32 tensors that are handed to it for the
duration of one call. So every element-wise torch optimizer works, and stays exact when torch changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, Rows, rows_of
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.optimizer.sharded_muon import is_known, update_rows
from lightstep.state.backend import EntrySpec, Managed, Schema
from lightstep.state.segment import Segment

_NOT_ELEMENT_WISE = {"Adafactor", "Muon", "Shampoo", "SOAP", "Adam_mini"}
_CPU = torch.device("cpu")  # said wherever tensors are made: torch's defaults are the user's to set
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})


def needs_whole_tensors(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], group: Mapping[str, Any]
) -> bool:
    """Whether an optimizer is not element-wise under the settings of one group.

    A class says so by ``whole_tensors = True`` (or ``False``), a few are known, and others are tried out: a matrix and
    its two halves, flattened, must come to the same.

    Raises:
        TypeError: the class mixes parameters, and cannot be applied to one unit after the other.
    """
    declared = getattr(optimizer_class, "whole_tensors", None)
    if declared is not None:
        return bool(declared)
    if optimizer_class.__name__ in _NOT_ELEMENT_WISE:
        return True
    return not _is_torchs_own(optimizer_class) and _Trial(optimizer_class, hyperparameters, group).mixes_elements()


def _is_torchs_own(optimizer_class: type) -> bool:
    return optimizer_class.__module__.startswith("torch.optim.")


class _Trial:
    """Two updates of small matrices, whole and in pieces, apart and together."""

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        self._class, self._hyperparameters, self._group = optimizer_class, hyperparameters, _settings(group)
        self.keeps_other_shapes = False
        numbers = torch.randn(
            2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device=_CPU
        )
        self._numbers = [list(own) for own in numbers]

    def mixes_elements(self) -> bool:
        """``False`` where the class cannot be tried out, or draws random numbers."""
        first, second = self._numbers
        try:
            whole = self._updated([first])
            if self.keeps_other_shapes:  # row sums, a seed: flat data has no place for them
                return True
            random = not torch.equal(whole[0], self._updated([first], seed=1)[0])
            together, apart = self._updated([first, second]), [*whole, *self._updated([second])]
        except Exception:  # whatever it is that this class needs, set-up will say
            return False
        if random:
            return False
        if not all(torch.equal(*pair) for pair in zip(together, apart, strict=True)):
            raise TypeError(
                f"{self._class.__name__} computes something over all its parameters together (a norm of its own?), "
                "and lightstep applies it to one unit of parameters after the other; clip with clipping.max_norm, or "
                "use an optimizer whose update of a parameter depends on that parameter alone"
            )
        try:
            halves = self._updated([list(part) for part in zip(*(n.view(-1).split(128) for n in first), strict=True)])
        except Exception:  # it takes matrices only
            return True
        return not torch.equal(whole[0].view(-1), torch.cat(halves))

    def _updated(self, numbers: Sequence[Sequence[Tensor]], seed: int = 0) -> list[Tensor]:
        """Each ``[value, gradient, gradient]``'s value after the updates, all in one optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parameters = [value.clone() for value, *_ in numbers]
            settings = copy.deepcopy(self._group)
            optimizer = self._class([{**settings, "params": parameters}], **copy.deepcopy(dict(self._hyperparameters)))
            for gradients in list(zip(*numbers, strict=True))[1:]:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                with torch.no_grad():
                    _undecorated_step(self._class)(optimizer)
            self.keeps_other_shapes = any(
                isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape
                for parameter in parameters
                for value in optimizer.state[parameter].values()
            )
        return parameters


class GroupValues:
    """The hyper-parameters of every group as one step reads them, and what the base optimizer writes into them.

    All units of a step see the values it began with. So a class that counts in its groups (schedule-free methods do),
    or in attributes of its own, counts steps and not units.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = list(groups)
        self._read = {id(group): _settings(group) for group in groups}
        self._written: dict[int, dict[str, Any]] = {}
        self._attributes: dict[torch.optim.Optimizer, dict[str, Any]] = {}

    def detach(self) -> None:
        """What happens to the groups' tensors (a learning rate) from now on is not seen by this step."""
        for settings in self._read.values():
            settings.update({k: v.clone() for k, v in settings.items() if isinstance(v, Tensor)})

    def of(self, live: dict[str, Any]) -> dict[str, Any]:
        """A copy of one group's settings, to be handed out."""
        return dict(self._read[id(live)])

    def attributes_at_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Set numbers that a class keeps on itself (``self.t += 1``) back to what the step began with."""
        numbers = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}
        before = self._attributes.setdefault(optimizer, numbers)
        for born in numbers.keys() - before.keys():
            delattr(optimizer, born)
        vars(optimizer).update(before)

    def note(self, live: dict[str, Any], seen: Mapping[str, Any]) -> None:
        """The settings of one group, as the base optimizer left them."""
        read = self._read[id(live)]
        changed = {k: v for k, v in seen.items() if k not in ("params", "fused") and read.get(k) is not v}
        self._written.setdefault(id(live), {}).update(changed)

    def still_holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a step that begins now would read the same."""
        now = [_settings(group) for group in groups]
        then = [self._read.get(id(group), {}) for group in groups]
        return len(groups) == len(self._groups) and all(
            a.keys() == b.keys() and all(_same_value(a[key], b[key]) for key in a)
            for a, b in zip(now, then, strict=True)
        )

    def take_back(self) -> None:
        """The step did not take place: classes that count in attributes of their own have not counted it."""
        for optimizer in self._attributes:
            self.attributes_at_start(optimizer)

    def give_back(self) -> None:
        """The step is over: the live groups take over what was written."""
        for group in self._groups:
            group.update(self._written.get(id(group), {}))


class Updated(Protocol):
    """What the base optimizer takes for a parameter: a segment, or a matrix of one."""

    @property
    def master(self) -> Tensor: ...
    @property
    def group(self) -> dict[str, Any]: ...
    @property
    def state(self) -> dict[str, Any]: ...


class BaseArithmetic:
    """An optimizer class with its hyper-parameters, applied to whatever segments it is given.

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` subclass.
        hyperparameters: its keyword arguments.

    Attributes:
        whole_tensors: the class is not element-wise: segments are whole parameters.

    Raises:
        TypeError: not an optimizer class, or one that cannot work piece by piece (it needs closures, sparse gradients,
            something over all parameters).
        ValueError: what the class itself says of its hyper-parameters.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        _check_class(optimizer_class, hyperparameters)
        self.optimizer_class = optimizer_class
        self.hyperparameters = plain_numbers(hyperparameters)
        self.whole_tensors = needs_whole_tensors(optimizer_class, self.hyperparameters, {})
        self._considered: list[dict[str, Any]] = []
        self.defaults: dict[str, Any] = self._construct([self._probe()], fused=False).defaults
        self.defaults.update(
            {key: self.hyperparameters.get(key) for key in ("fused", "foreach") if key in self.defaults}
        )
        self._raw_step = _undecorated_step(optimizer_class)
        self._inner: dict[torch.device, torch.optim.Optimizer] = {}
        self._default_fused: dict[torch.device, bool] = {}
        self._exchanges: dict[Any, MatrixExchange] = {}

    @property
    def name(self) -> str:
        """The optimizer class's name."""
        return self.optimizer_class.__name__

    def consider(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Find out what these groups' settings mean for :attr:`whole_tensors`; called at set-up."""
        for group in groups:
            settings = {key: value for key, value in _settings(group).items() if key in self.defaults}
            if not any(settings is known or _equal_settings(settings, known) for known in self._considered):
                self._considered.append(settings)
                needs = needs_whole_tensors(self.optimizer_class, self.hyperparameters, settings)
                self.whole_tensors = self.whole_tensors or needs

    def prepare(self, device: torch.device, low_precision: bool = False) -> None:
        """Find out how this class runs on ``device``; called at set-up, so that ``step()`` does not have to.

        Args:
            low_precision: some masters are 16-bit. torch's fused SGD then leaves random numbers in the momentum on the
                CPU (seen in 2.13), so nothing is fused there unless it was asked for.
        """
        unfused = low_precision and device.type == "cpu"
        if device not in self._inner or (unfused and self._default_fused[device]):
            self._default_fused[device] = not unfused and self._prefers_fused(device)
            self._inner[device] = self._construct([self._probe(device)], self._default_fused[device])

    def skips_on_device(self, device: torch.device, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the class takes ``found_inf`` in all these groups: skipping then needs no word from the host."""
        inner = self._inner.get(device)
        if inner is None:  # none of its parameters is there
            return True
        if not getattr(inner, "_step_supports_amp_scaling", False):
            return False
        return all(self._resolved(group, device).get("fused") is not False for group in groups)

    def schema(self, device: torch.device, groups: Sequence[dict[str, Any]]) -> Schema:
        """The entries of the base optimizer's state under any of ``groups``, read off one update of small probes."""
        settings = [copy.deepcopy(self._resolved(group, device)) for group in groups]  # a class may change them
        probed = [{**setting, "params": [self._probe(device)]} for setting in settings]
        optimizer = self._construct(probed, self._default_fused[device])
        probes = [group["params"][0] for group in probed]
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        with torch.no_grad():
            self._raw_step(optimizer)
        states = (optimizer.state[probe] for probe in probes)
        return {key: self._entry_spec(key, value, probes[0]) for state in states for key, value in state.items()}

    def apply(
        self, segments: Sequence[Segment], gradients: Sequence[Tensor], overflow: Tensor, values: GroupValues
    ) -> None:
        """One update of ``segments`` (all on one device) by ``gradients`` (fp32, unscaled, clipped, in their shapes).

        ``overflow`` (0-dim fp32) is handed to classes that take ``found_inf``: with 1 they change nothing.
        """
        updated: list[tuple[Updated, Tensor]] = []
        stacks, together = [], []
        for segment, gradient in zip(segments, gradients, strict=True):
            if segment.parts[0].owner.rows is not None:
                together.append((segment, gradient))
            elif segment.master.dim() == 3 and self._takes_matrices_only:
                stacks.append(_Stack(segment))
                updated.extend(zip(stacks[-1].matrices, gradient.unbind(0), strict=True))
            else:
                updated.append((segment, gradient))
        self._create_eager_state([one for one, _ in updated], values)
        batches: dict[bool, list[tuple[Updated, Tensor]]] = {}
        for one, gradient in updated:
            batches.setdefault(bool(one.state), []).append((one, gradient))
        for batch in batches.values():  # torch's fused SGD cannot take first and later updates in one call
            self._apply_batch(batch, overflow, values)
        for stack in stacks:
            stack.put_together()
        if together:
            self._update_together(together, values)

    def _update_together(self, batch: list[tuple[Segment, Tensor]], values: GroupValues) -> None:
        """Muon's matrices that several ranks have rows of."""
        by_group: dict[Any, list[tuple[Segment, Tensor]]] = {}
        for segment, gradient in batch:
            by_group.setdefault(_rows_of(segment).group, []).append((segment, gradient))
        for group, own in by_group.items():
            segments, gradients = [segment for segment, _ in own], [gradient for _, gradient in own]
            settings = [values.of(segment.group) for segment in segments]
            with torch.no_grad():
                update_rows(segments, gradients, settings, [*map(_rows_of, segments)], self._exchanges[group])

    def _apply_batch(self, batch: list[tuple[Updated, Tensor]], overflow: Tensor, values: GroupValues) -> None:
        segments = [segment for segment, _ in batch]
        device = segments[0].master.device
        inner = self._inner[device]
        values.attributes_at_start(inner)
        groups = self._groups(segments, device, values)
        inner.param_groups = [inner_group for _, inner_group in groups]
        inner.state = defaultdict(dict, {segment.master: segment.state for segment in segments})
        on_device = self.skips_on_device(device, inner.param_groups)
        inner.found_inf, inner.grad_scale = overflow if on_device else None, None  # type: ignore[attr-defined]
        for segment, gradient in batch:
            segment.master.grad = gradient
        try:
            with torch.no_grad():
                self._raw_step(inner)
            _adopt_state(inner, segments)
        finally:
            for segment in segments:
                segment.master.grad = None
            inner.param_groups, inner.state = [], defaultdict(dict)
        for live, seen in groups:
            values.note(live, seen)

    def check_parameter(self, name: str, parameter: Tensor, local: Tensor) -> Rows | None:
        """Refuse what an optimizer that needs whole tensors cannot update.

        Args:
            local: the part of it on this rank.

        Returns:
            How the ranks that update it together share it; ``None``: this one updates what it has by itself.

        Raises:
            ValueError: the parameter is sharded, or the class itself refuses its shape.
        """
        if not self.whole_tensors:
            return None
        shape, rows = parameter.shape, rows_of(parameter)
        stack = len(shape) == 3 and self._takes_matrices_only and rows is not None
        together = rows is not None and len(shape) == 2 and is_known(self.optimizer_class)
        if not (stack or together) and (rows is not None or shape != local.shape):
            raise ValueError(
                f"{name} of shape {tuple(shape)} is sharded, and {self.name} needs whole tensors: it would take each "
                "shard for a tensor of its own. Use an element-wise optimizer (torch.optim.AdamW), torch.optim.Muon on "
                "matrices that are sharded by rows, or sharding.kind single or ddp"
            )
        try:
            self._construct([torch.empty(self._updated_shape(shape), device="meta")], fused=False)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot update {name} of shape {tuple(shape)}: {error}") from error
        return rows if together else None

    def open_exchanges(self, items: Sequence[Managed]) -> None:
        """Make the process groups for those that ranks update together; called at set-up, by all of them."""
        for item in items:
            if item.rows is not None and item.rows.group not in self._exchanges:
                self._exchanges[item.rows.group] = MatrixExchange(item.rows.group)
                self._exchanges[item.rows.group].open(item.local.device)

    def close(self) -> None:
        """Give the process groups back."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges = {}

    def _probe(self, device: torch.device | None = None) -> Tensor:
        """A small tensor to try the class out with; a matrix for classes that take no other."""
        return torch.zeros(self._probe_shape, dtype=torch.float32, device=device or _CPU)

    @functools.cached_property
    def _probe_shape(self) -> tuple[int, ...]:
        if self.whole_tensors:
            try:
                self._construct([torch.zeros(2, device=_CPU)], fused=False)
            except ValueError:
                return (2, 2)
        return (2,)

    @property
    def _takes_matrices_only(self) -> bool:
        return self._probe_shape == (2, 2)

    def _updated_shape(self, shape: torch.Size) -> torch.Size:
        """Of what the class is handed of a parameter: of experts one matrix after the other."""
        return torch.Size(shape[1:]) if len(shape) == 3 and self._takes_matrices_only else shape

    def _entry_spec(self, key: str, value: Any, probe: Tensor) -> EntrySpec:
        if not isinstance(value, Tensor):
            return EntrySpec(like_parameter=False, dtype=None, on_device=False)
        never_negative = key in getattr(self.optimizer_class, "never_negative", ()) or (
            key in _SQUARES and _is_torchs_own(self.optimizer_class)
        )
        on_device = value.device.type == probe.device.type
        return EntrySpec(value.shape == probe.shape, value.dtype, on_device, never_negative)

    def _construct(self, params: list[Any], fused: bool) -> torch.optim.Optimizer:
        chosen = {"fused": True} if fused else {}
        return self.optimizer_class(params, **{**self.hyperparameters, **chosen})

    def _prefers_fused(self, device: torch.device) -> bool:
        """Fused where torch has it for this class and device and neither ``fused`` nor ``foreach`` was asked for."""
        asked = [self.hyperparameters.get(key) for key in ("fused", "foreach")]
        accepts = "fused" in inspect.signature(self.optimizer_class).parameters
        if not accepts or any(value is not None for value in asked):
            return False
        probe = self._probe(device)
        probe.grad = torch.zeros_like(probe)
        try:
            optimizer = self._construct([probe], fused=True)
            with torch.no_grad():
                self._raw_step(optimizer)
        except (RuntimeError, ValueError, NotImplementedError):
            return False
        return True

    def _groups(
        self, segments: Sequence[Updated], device: torch.device, values: GroupValues
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """``(live group, what the base optimizer sees of it)`` for each group that has segments here."""
        groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for segment in segments:
            live = segment.group
            if id(live) not in groups:
                groups[id(live)] = (live, self._resolved(values.of(live), device))
            groups[id(live)][1]["params"].append(segment.master)
        return list(groups.values())

    def _resolved(self, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        group = _settings(settings)
        if self._default_fused[device] and group.get("fused") is None and group.get("foreach") is None:
            group["fused"] = True
        group["params"] = []
        return group

    def _create_eager_state(self, segments: Sequence[Updated], values: GroupValues) -> None:
        """Classes that create state in their constructor (Adagrad) do so here, for segments that have none yet."""
        new = [segment for segment in segments if not segment.state]
        if not (new and self._creates_state_eagerly):
            return
        device = new[0].master.device
        groups = [inner_group for _, inner_group in self._groups(new, device, values)]
        fresh = self._construct(groups, self._default_fused[device])
        for segment in new:
            segment.state.update(fresh.state[segment.master])

    @functools.cached_property
    def _creates_state_eagerly(self) -> bool:
        return bool(self._construct([self._probe()], fused=False).state)


class _Matrix(NamedTuple):
    master: Tensor
    group: dict[str, Any]
    state: dict[str, Any]


class _Stack:
    """A parameter of three dimensions (the experts of a layer), for a class that takes matrices only."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._shape = segment, segment.master.shape
        self.matrices = [
            _Matrix(segment.master[number], segment.group, self._state_of(number)) for number in range(self._shape[0])
        ]

    def _state_of(self, number: int) -> dict[str, Any]:
        state = self._segment.state.items()
        return {k: v[number] if _has_shape(v, self._shape) else copy.deepcopy(v) for k, v in state}

    def put_together(self) -> None:
        """The matrices' state is the segment's."""
        state = self._segment.state
        if not self.matrices:  # this rank has no expert, and state like the others'
            likes = (key for key, spec in self._segment.parts[0].owner.schema.items() if spec.like_parameter)
            state.update({key: torch.zeros_like(self._segment.master) for key in likes if key not in state})
            return
        for key, value in self.matrices[0].state.items():
            rows = [matrix.state[key] for matrix in self.matrices]
            if not _has_shape(value, self._shape[1:]):
                state[key] = value
            elif key not in state:
                state[key] = torch.stack(rows)
            elif any(row.data_ptr() != known.data_ptr() for row, known in zip(rows, state[key], strict=True)):
                torch.stack(rows, out=state[key])


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _rows_of(segment: Segment) -> Rows:
    rows = segment.parts[0].owner.rows
    assert rows is not None
    return rows


def _undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """``step`` without the wrapper that fires hooks: those belong to the outer optimizer, once per step."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _adopt_state(inner: torch.optim.Optimizer, segments: Sequence[Updated]) -> None:
    """Classes may replace a parameter's state dictionary instead of filling the one they were given."""
    for segment in segments:
        state = inner.state[segment.master]
        if state is not segment.state:
            segment.state.clear()
            segment.state.update(state)


def _equal_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Equal but for the learning rate, which schedules change and which mixes nothing."""
    keys = (first.keys() | second.keys()) - {"lr", "initial_lr"}
    return all(key in first and key in second and _same(first[key], second[key]) for key in keys)


def _same(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and not isinstance(first, Tensor) and bool(first == second))


def _same_value(now: Any, then: Any) -> bool:
    """Tensors may have been written to; one on an accelerator would make the host wait, and counts as another."""
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.device.type == then.device.type == "cpu" and torch.equal(now, then)
    return _same(now, then)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer_class")}


def _check_class(optimizer_class: Any, hyperparameters: Mapping[str, Any]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        given = (
            repr(optimizer_class) if isinstance(optimizer_class, type) else f"of type {type(optimizer_class).__name__}"
        )
        raise TypeError(
            f"optimizer_class is {given}; a subclass of torch.optim.Optimizer is needed, "
            "for example torch.optim.AdamW (the class, not an instance)"
        )
    if optimizer_class.__name__ in ("LBFGS", "SparseAdam"):
        raise TypeError(
            f"{optimizer_class.__name__} is not supported: it re-evaluates the loss or takes sparse gradients, which "
            "one global norm and fp32 masters cannot serve; use an element-wise optimizer such as torch.optim.AdamW"
        )
    if hyperparameters.get("differentiable"):
        raise ValueError("differentiable=True is not supported: the step runs on staged memory outside autograd")
