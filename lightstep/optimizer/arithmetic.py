"""The base optimizer's own arithmetic, run on segments of staged memory.

lightstep computes no update itself. The installed optimizer class does, on fp32 tensors that it is given for one call.
So every element-wise torch optimizer works, and stays exact when torch changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from lightstep.distributed import Rows, local_tensor, rows_of
from lightstep.error_text import error_text
from lightstep.optimizer.class_trial import (
    UntriedError,
    counts_steps,
    is_carried,
    is_torchs_own,
    needs_whole_tensors,
    rates_differ,
    read_settings,
    torchs_own_needs_whole_tensors,
    undecorated_step,
    written_settings,
)
from lightstep.optimizer.matrix_stack import Matrix, MatrixStack
from lightstep.optimizer.muon import is_installed_muon
from lightstep.optimizer.param_groups import plain_numbers
from lightstep.optimizer.undisturbed import undisturbed
from lightstep.optimizer.update import KEPT, GroupValues, copied, equal_settings, same_value, settings_of
from lightstep.precision.adam_kernel import fused_kernel_on
from lightstep.state.schema import EntrySpec, Schema
from lightstep.state.segment import Segment

ADAMS = (torch.optim.AdamW, torch.optim.Adam)
_CPU = torch.device("cpu")  # explicit everywhere: users may change torch's default device and dtype
_OWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults", "found_inf", "grad_scale"})
_LARGE_ENOUGH = 136  # rows and columns: classes that factor moments do so from 128 on
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"})


class ParameterLike(Protocol):
    """What the base optimizer sees as a parameter: a segment, or a matrix of one."""

    @property
    def master(self) -> Tensor: ...
    @property
    def group(self) -> dict[str, Any]: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...


class BaseArithmetic:
    """An optimizer class with its hyper-parameters, applied to segments.

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` subclass.
        hyperparameters: its keyword arguments.

    Attributes:
        whole_tensors: the class is not element-wise: segments are whole parameters.

    Raises:
        TypeError: not an optimizer class, or one that cannot update units one by one (it needs closures, sparse
            gradients, or something computed over all parameters).
        ValueError: the class refuses its hyper-parameters.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        _check_class(optimizer_class, hyperparameters)
        self.optimizer_class = optimizer_class
        self.hyperparameters = plain_numbers(hyperparameters)
        self.is_torchs_own, self._raw_step = is_torchs_own(optimizer_class), undecorated_step(optimizer_class)
        self.defaults: dict[str, Any] = _group_defaults(self._first_construction())
        if "fused" in self.defaults:
            self.defaults["fused"] = self.hyperparameters.get("fused")
        self._inner: dict[torch.device, torch.optim.Optimizer] = {}
        self._fresh: dict[torch.device, dict[str, Any]] = {}  # what the class keeps, as constructed
        self._default_fused: dict[torch.device, bool] = {}
        self._problems: dict[Any, str | None] = {}
        self.whole_tensors = self.is_torchs_own and torchs_own_needs_whole_tensors(optimizer_class)
        self._inspect([{}])

    @property
    def name(self) -> str:
        """The optimizer class's name."""
        return self.optimizer_class.__name__

    def inspect_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Update :attr:`whole_tensors` for these groups' settings; called at set-up."""
        if self.is_torchs_own:
            return
        own = {*self.defaults, "initial_lr", KEPT} | self._written_settings
        others = [{key: value for key, value in settings_of(group).items() if key not in own} for group in groups]
        known = ({*self.defaults, "initial_lr"} | read_settings(self, others)) - self._written_settings
        found: list[dict[str, Any]] = []
        for group in groups:
            settings = {key: value for key, value in settings_of(group).items() if key in known}
            if not any(equal_settings(settings, other) for other in found) or (
                len(found) == 1 and rates_differ([found[0], settings])
            ):
                found.append(settings)
        self._inspect(found)

    @functools.cached_property
    def _written_settings(self) -> set[str]:
        return written_settings(self)

    def _inspect(self, settings: list[dict[str, Any]]) -> None:
        if self.is_torchs_own:
            return
        try:
            whole = needs_whole_tensors(self, settings, _CPU)
        except UntriedError:
            if not torch.accelerator.is_available():
                raise
            device = torch.accelerator.current_accelerator(check_available=True)
            assert device is not None
            whole = needs_whole_tensors(self, settings, device)
        self.whole_tensors = whole or self.whole_tensors

    def prepared(self, hyperparameters: dict[str, Any], device: torch.device) -> BaseArithmetic:
        """A copy with other hyper-parameters and instances of the class of its own, for a trial."""
        new = copy.copy(self)
        new.hyperparameters, new._inner, new._fresh, new._default_fused = hyperparameters, {}, {}, {}
        new.prepare(device)
        return new

    def prepare(self, device: torch.device, low_precision: bool = False) -> None:
        """Find out how this class runs on ``device``; called at set-up, so that ``step()`` does not have to.

        Args:
            low_precision: some masters are 16-bit. On the CPU torch's fused SGD then leaves random numbers in the
                momentum (seen in 2.13), so the class is fused there only on request.
        """
        unfused = low_precision and device.type == "cpu"
        if device not in self._inner or (unfused and self._default_fused[device]):
            self._default_fused[device] = not unfused and self._prefers_fused(device)
            self._inner[device] = self._construct([self._probe(device)], self._default_fused[device])
            self._fresh[device] = copied(_kept_by(self._inner[device]))

    def skips_on_device(self, device: torch.device, group: Mapping[str, Any]) -> bool:
        """Whether the class takes ``found_inf`` in this group, and so can skip a step without the host."""
        inner = self._inner.get(device)
        if inner is None:  # it has no parameters there
            return True
        return bool(getattr(inner, "_step_supports_amp_scaling", False)) and self.is_fused(group, device)

    def is_fused(self, group: Mapping[str, Any], device: torch.device) -> bool:
        """Whether the class runs torch's fused version on ``device``: as the group says, or if torch has one."""
        if group.get("fused") is None and group.get("foreach") == self.defaults.get("foreach"):
            return self._default_fused[device]
        return bool(group.get("fused"))

    def is_fused_adam(self, group: Mapping[str, Any], device: torch.device) -> bool:
        """Whether it is torch's own AdamW or Adam, and runs fused."""
        return self.optimizer_class in ADAMS and self.is_fused(group, device)

    def has_one_pass_kernel(self, device: torch.device) -> bool:
        """Whether a kernel replaces this class's step together with scaling, joining and splitting."""
        return self.optimizer_class in ADAMS and self._default_fused[device] and fused_kernel_on(device) is not None

    def schema(self, device: torch.device, groups: Sequence[dict[str, Any]]) -> Schema:
        """The entries of the base optimizer's state under any of ``groups``, found by one update of small probes."""
        settings = [copy.deepcopy(self.resolved(group, device)) for group in groups]  # a class may change them
        with undisturbed(device), torch.no_grad():
            probed = [
                {**copied(setting), "params": [torch.zeros(shape, dtype=torch.float32, device=device)]}
                for setting in settings
                for shape in self._probe_shapes(setting)
            ]
            optimizer = self._construct(probed, self._default_fused[device])
            probes = [group["params"][0] for group in probed]
            for probe in probes:
                probe.grad = torch.zeros_like(probe)
            self._raw_step(optimizer)
        found: dict[str, EntrySpec] = {}
        for probe in probes:
            for key, value in optimizer.state[probe].items():
                spec = self._entry_spec(key, value, probe)
                varies = key in found and found[key].dtype != spec.dtype
                found[key] = replace(spec, dtype=None) if varies else spec
        return found

    def _probe_shapes(self, setting: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Some classes keep the state of large tensors in another dtype than that of small ones. Some take matrices
        only in groups of certain settings."""
        if self.is_torchs_own or not self.whole_tensors:
            return [self._probe_shape]
        if self._takes_matrices_only or not self._takes_probe((2,), setting):
            return [(2, 2), (64, 128)]
        return [self._probe_shape, (8192,)]

    def problem_without(
        self,
        missing: frozenset[str],
        entries: Mapping[str, Any],
        parameter: Tensor,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> str | None:
        """What goes wrong in an update of state that lacks these entries; ``None``: the class makes them again, or such
        a parameter does not have them.

        Args:
            entries: those that the state has. Whether the class makes one again may depend on its counters; those that
                are not given are as after one update.
        """
        setting, shape = copy.deepcopy(self.resolved(settings, device)), self._small_shape(parameter.shape)
        small = {key: _small(value, shape, parameter) for key, value in entries.items() if key != "master"}
        case = (missing, shape, device, repr(setting), repr(small))
        if case not in self._problems:
            found = self._try_without(missing, small, shape, setting, device)
            # If it fails with these entries, too, small tensors of zeros are not what the class needs.
            is_known = found is None or self._try_without(frozenset(), small, shape, setting, device) is None
            self._problems[case] = found if is_known else None
        return self._problems[case]

    def _small_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """That of a small tensor that has the same entries: which ones may depend on the dimensions (Adafactor), and
        on whether they are large."""
        if not self.whole_tensors:
            return self._probe_shape
        return tuple(min(size, _LARGE_ENOUGH) for size in self._updated_shape(shape))

    def _try_without(
        self,
        missing: frozenset[str],
        entries: Mapping[str, Any],
        shape: tuple[int, ...],
        setting: dict[str, Any],
        device: torch.device,
    ) -> str | None:
        probe = torch.zeros(shape, dtype=torch.float32, device=device)
        probe.grad = torch.zeros_like(probe)
        with undisturbed(device), torch.no_grad():
            optimizer = self._construct([{**setting, "params": [probe]}], self._default_fused[device])
            self._raw_step(optimizer)
            state = optimizer.state[probe]
            for key in missing & state.keys():
                del state[key]
            for key, value in copied(dict(entries)).items():
                own = state.get(key)
                if not isinstance(own, Tensor):
                    state[key] = value.to(device) if isinstance(value, Tensor) and value.dim() else value
                elif not own.dim() and isinstance(value, (Tensor, Real)):
                    state[key] = torch.as_tensor(value, dtype=own.dtype, device=own.device)
            try:
                self._raw_step(optimizer)
            except Exception as error:
                return error_text(error)
        return None

    def apply(
        self, segments: Sequence[Segment], gradients: Sequence[Tensor], overflow: Tensor, values: GroupValues
    ) -> None:
        """One update of ``segments``, all on one device.

        Segments that ranks update together are not among them (:mod:`~lightstep.optimizer.shared_updates`).

        Args:
            gradients: fp32, unscaled and clipped, in the segments' shapes.
            overflow: 0-dim fp32, for classes that take ``found_inf``: if it is 1, they change nothing.
        """
        pairs: list[tuple[ParameterLike, Tensor]] = []
        stacks = []
        for segment, gradient in zip(segments, gradients, strict=True):
            if segment.master.dim() == 3 and self._takes_matrices_only:
                stacks.append(MatrixStack(segment))
                pairs.extend(zip(stacks[-1].matrices, gradient.unbind(0), strict=True))
            else:
                pairs.append((segment, gradient))
        self.update(pairs, overflow, values)
        for stack in stacks:
            stack.merge_state()

    def update(self, pairs: Sequence[tuple[ParameterLike, Tensor]], overflow: Tensor, values: GroupValues) -> None:
        """:meth:`apply` for pairs of what the class sees as a parameter and its gradient."""
        self._create_eager_state([segment for segment, _ in pairs], values)
        batches: dict[bool, list[tuple[ParameterLike, Tensor]]] = {}
        for segment, gradient in pairs:
            batches.setdefault(bool(segment.state), []).append((segment, gradient))
        for batch in batches.values():  # torch's fused SGD cannot take first and later updates in one call
            self._apply_batch(batch, overflow, values)

    def _apply_batch(
        self, batch: Sequence[tuple[ParameterLike, Tensor | None]], overflow: Tensor, values: GroupValues
    ) -> None:
        segments = [segment for segment, _ in batch]
        device = segments[0].master.device
        inner = self._inner[device]
        groups = self._groups(segments, device, values)
        given = [dict(seen) for _, seen in groups]
        inner.param_groups = [seen for _, seen in groups]
        inner.state = defaultdict(dict, {segment.master: segment.state for segment in segments})
        on_device = all(self.skips_on_device(device, seen) for seen in inner.param_groups)
        inner.found_inf, inner.grad_scale = overflow if on_device else None, None  # type: ignore[attr-defined]
        places = [] if self.is_torchs_own else [segment.master.detach() for segment in segments]
        if not self.is_torchs_own:
            self._restore_kept(inner, device, values)
            for segment in segments:  # what the class sees behaves like the parameter
                vars(segment.master).update(segment.attributes)
                segment.master.requires_grad_()
        for segment, gradient in batch:
            segment.master.grad = gradient
        try:
            with torch.no_grad():
                self._raw_step(inner)
            _adopt_state(inner, segments)
            if not self.is_torchs_own:
                for segment, place in zip(segments, places, strict=True):
                    _adopt_data(segment, place)
                self._record_kept(inner, device, values)
                for (live, seen), before in zip(groups, given, strict=True):
                    values.record_writes(live, before, seen)
        finally:
            for segment in segments:
                segment.master.requires_grad_(False).grad = None
            inner.param_groups, inner.state = [], defaultdict(dict)

    def count(self, group: dict[str, Any], values: GroupValues) -> None:
        """A step without any gradient in ``group``: the class may count it there."""
        if self.is_torchs_own or not self._counts:
            return
        if not self._inner:
            self.prepare(_CPU)
        device = next(iter(self._inner))
        parameter = Matrix(self._probe(device), group, {})
        self._apply_batch([(parameter, None)], torch.zeros((), device=device), values)

    def _restore_kept(self, inner: torch.optim.Optimizer, device: torch.device, values: GroupValues) -> None:
        """What the class kept before the step: attributes, and state that is no parameter's."""
        fresh, kept = copied(self._fresh[device]), values.kept(self.kept_name)
        attributes = {**fresh["attributes"], **kept.get("attributes", {})}
        for added in _kept_by(inner)["attributes"].keys() - attributes.keys():
            delattr(inner, added)
        vars(inner).update(attributes)
        inner.state.update({**fresh["state"], **kept.get("state", {})})

    def _record_kept(self, inner: torch.optim.Optimizer, device: torch.device, values: GroupValues) -> None:
        now = _kept_by(inner)
        changed = {what: _changes(now[what], fresh) for what, fresh in self._fresh[device].items()}
        if any(changed.values()):
            values.record_kept(self.kept_name, changed)

    @property
    def kept_name(self) -> str:
        """Under which :class:`GroupValues` keeps what the class keeps."""
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"

    def check_parameter(self, name: str, parameter: Tensor, local: Tensor) -> Rows | None:
        """Check that a class that needs whole tensors can update this parameter.

        Args:
            local: this rank's part of it.

        Returns:
            How it is divided among the ranks that update it together; ``None``: this rank updates its part alone.

        Raises:
            ValueError: the parameter is sharded, or the class itself refuses its shape.
        """
        if not self.whole_tensors:
            return None
        shape, rows = parameter.shape, rows_of(parameter, local)
        if rows is None and shape != local.shape:
            raise ValueError(
                f"{name} of shape {tuple(shape)} is sharded along another dimension than the first (of a matrix: than "
                f"the first two), and {self.name} needs it whole. Use an element-wise optimizer (AdamW), or "
                "sharding.kind single or ddp"
            )
        stack = len(shape) == 3 and self._takes_matrices_only  # each rank has whole matrices of it
        if rows is not None and not stack and not self.sends_directions and self._counts:
            raise ValueError(
                f"{name} is sharded, and {self.name} counts in its groups or in attributes of its own: only the rank "
                "that gathers a tensor takes its step. Use sharding.kind single or ddp"
            )
        self.check_shape(name, shape)
        return None if stack else rows

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raises ``ValueError`` if the class needs whole tensors, and refuses this shape of one."""
        if not self.whole_tensors:
            return
        try:
            self._construct([torch.empty(self._updated_shape(shape), device="meta")], fused=False)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot update {name} of shape {tuple(shape)}: {error}") from error

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Construct the class with a group's settings, and update a small probe.

        Raises:
            TypeError, ValueError: the class refuses them. Errors of other types are left to the set-up, which knows the
                parameters' device.
        """
        given = {key: group[key] for key in inspect.signature(self.optimizer_class).parameters if key in group}
        given = copy.deepcopy({**self.hyperparameters, **settings_of(given)})
        if type(given.get("betas")) in (tuple, list):  # groups may have (0, 0.99), which torch's constructors refuse
            given["betas"] = tuple(float(b) if type(b) is int else b for b in given["betas"])
        probe = self._probe()
        probe.grad = torch.zeros_like(probe)
        try:
            with undisturbed(_CPU), torch.no_grad():
                self._raw_step(self.optimizer_class([probe], **given))
        except (TypeError, ValueError) as error:
            raise type(error)(f"a parameter group of {self.name}: {error}") from error
        except Exception:
            return

    @property
    def sends_directions(self) -> bool:
        """Whether ranks that share a tensor send only update directions (Muon), not gradient, master and state."""
        return is_installed_muon(self.optimizer_class)

    @functools.cached_property
    def _counts(self) -> bool:
        return counts_steps(self.optimizer_class, self.hyperparameters, self._probe_shape)

    def _probe(self, device: torch.device | None = None) -> Tensor:
        """A small tensor to run the class on; a matrix if the class takes nothing else."""
        return torch.zeros(self._probe_shape, dtype=torch.float32, device=device or _CPU)

    @functools.cached_property
    def _probe_shape(self) -> tuple[int, ...]:
        return (2,) if self._takes_probe((2,)) or not self._takes_probe((2, 2)) else (2, 2)

    def _takes_probe(self, shape: tuple[int, ...], setting: Mapping[str, Any] | None = None) -> bool:
        probe = torch.zeros(shape, dtype=torch.float32, device=_CPU)
        probe.grad = torch.ones_like(probe)
        try:
            with undisturbed(_CPU), torch.no_grad():
                own = probe if setting is None else {**copied(dict(setting)), "params": [probe]}
                self._raw_step(self._construct([own], fused=False))
        except Exception:
            return False
        return True

    @property
    def _takes_matrices_only(self) -> bool:
        return self._probe_shape == (2, 2)

    def _updated_shape(self, shape: torch.Size) -> torch.Size:
        """The shape that the class sees of a parameter: that of one matrix for stacked experts."""
        return torch.Size(shape[1:]) if len(shape) == 3 and self._takes_matrices_only else shape

    def _entry_spec(self, key: str, value: Any, probe: Tensor) -> EntrySpec:
        if not isinstance(value, Tensor):
            return EntrySpec(like_parameter=False, dtype=None, on_device=False)
        never_negative = key in getattr(self.optimizer_class, "never_negative", ()) or (
            key in _SQUARES and is_torchs_own(self.optimizer_class)
        )
        on_device = value.device.type == probe.device.type
        return EntrySpec(value.shape == probe.shape, value.dtype, on_device, never_negative)

    def _first_construction(self) -> torch.optim.Optimizer:
        try:
            return self._construct([self._probe()], fused=False)
        except (TypeError, ValueError) as error:  # they say what is missing or refused
            if self.is_torchs_own or self.name in str(error):
                raise
            raise type(error)(f"{self.name}: {error}") from error
        except Exception as error:
            raise TypeError(
                f"{self.name} cannot be made from a list of tensors ({error_text(error)}): lightstep gives "
                "the class parts of the model in each step, so classes that need the model, another optimizer or "
                "groups of a certain form cannot run; use one that takes a list of tensors"
            ) from error

    def _construct(self, params: list[Any], fused: bool) -> torch.optim.Optimizer:
        chosen = {"fused": True} if fused else {}
        return self.optimizer_class(params, **{**self.hyperparameters, **chosen})

    def _prefers_fused(self, device: torch.device) -> bool:
        """Whether torch has a fused version for this class and device, and neither ``fused`` nor ``foreach`` is set."""
        chosen = [self.hyperparameters.get(key) for key in ("fused", "foreach")]
        accepts = "fused" in inspect.signature(self.optimizer_class).parameters
        if not accepts or any(value is not None for value in chosen):
            return False
        probe = self._probe(device)
        probe.grad = torch.zeros_like(probe)
        try:
            with undisturbed(device), torch.no_grad():
                self._raw_step(self._construct([probe], fused=True))
        except (RuntimeError, ValueError, NotImplementedError):
            return False
        return True

    def _groups(
        self, segments: Sequence[ParameterLike], device: torch.device, values: GroupValues
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """``(live group, the group as the base optimizer sees it)`` for each group that has segments here."""
        groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for segment in segments:
            live = segment.group
            if id(live) not in groups:
                settings = values.settings(live, tensors=not self.is_torchs_own)
                groups[id(live)] = (live, self.resolved(settings, device))
            groups[id(live)][1]["params"].append(segment.master)
        return list(groups.values())

    def resolved(self, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """A group's settings as the class sees them on ``device``: ``fused`` decided, and without parameters."""
        group = settings_of(settings)
        if group.get("fused") is None and self.is_fused(group, device):
            group["fused"] = True
        group["params"] = []
        return group

    def _create_eager_state(self, segments: Sequence[ParameterLike], values: GroupValues) -> None:
        """Create the state of segments that have none, for classes that do so in their constructor (Adagrad)."""
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


def _group_defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A group's settings by default: the class's defaults, and plain values that its constructor adds to its groups."""
    added = {key: value for key, value in settings_of(optimizer.param_groups[0]).items() if is_carried(value)}
    return {**copied(added), **optimizer.defaults}


def _kept_by(inner: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What an instance keeps outside its groups and the state of parameters."""
    own = {key: value for key, value in vars(inner).items() if key not in _OWN_ATTRIBUTES and is_carried(value)}
    state: Mapping[Any, Any] = inner.state
    return {"attributes": own, "state": {key: value for key, value in state.items() if isinstance(key, str)}}


def _small(value: Any, shape: tuple[int, ...], parameter: Tensor) -> Any:
    """A state entry of a parameter for one of this shape: zeros; counters and plain values as they are."""
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        return local_tensor(value)
    is_like_it = value.shape in (parameter.shape, local_tensor(parameter).shape)
    sizes = shape if is_like_it else [min(size, _LARGE_ENOUGH) for size in value.shape]
    return torch.zeros(sizes, dtype=value.dtype, device=_CPU)


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in before or not same_value(value, before[key])}


def _adopt_state(inner: torch.optim.Optimizer, segments: Sequence[ParameterLike]) -> None:
    """Copy state back if the class has replaced a parameter's state dictionary instead of filling it."""
    for segment in segments:
        state = inner.state[segment.master]
        if state is not segment.state:
            segment.state.clear()
            segment.state.update(state)


def _adopt_data(segment: ParameterLike, place: Tensor) -> None:
    """Copy the new values back if the class has assigned to ``p.data``. It may have put the old ones into the state."""
    if segment.master.data_ptr() != place.data_ptr():
        for key, value in segment.state.items():
            if isinstance(value, Tensor) and value.data_ptr() == place.data_ptr():
                segment.state[key] = value.clone()
        place.copy_(segment.master.detach())
        segment.master.data = place


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
