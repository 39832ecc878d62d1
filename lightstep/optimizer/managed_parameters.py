"""The parameters that an optimizer trains, and their state as it is seen from outside."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightstep.distributed import like, local_tensor
from lightstep.optimizer.changed_weights import ChangedWeights
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.param_groups import Place
from lightstep.optimizer.rounded_weights import MasterWeights, rounding_of, set_up_rounding
from lightstep.optimizer.state_edits import Edit
from lightstep.optimizer.update import versions_of
from lightstep.state.entries import equals_rounded, was_rounded_from
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_weights import HostWeights
from lightstep.state.schema import EntrySpec, Managed
from lightstep.state.snapshot import Snapshot
from lightstep.state.store import Store

logger = logging.getLogger(__name__)

Places = Callable[[], Mapping[Tensor, Place]]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


InitialMasters = Callable[..., Tensor | None]
"""Called with a parameter; returns its fp32 values if they are known, and with ``keep=True`` keeps them."""


class Look(NamedTuple):
    """How parameters are now, compared with the last :meth:`ManagedParameters.record`.

    Attributes:
        converted: they have another shape, dtype or device, or their elements in another order (``weight.t_()``).
        touched: those with another version or address, and their local tensors.
        compared: those whose weights are compared with their masters in every step.
    """

    converted: list[Managed]
    touched: dict[Managed, Tensor]
    compared: list[Managed]


class ManagedParameters:
    """The parameters of an optimizer's groups that are trained, or have been; set up as late as possible.

    What others write to weights is found by version counters and addresses, at no cost: every in-place operation
    increments a tensor's version counter, and another storage has another address. A write through ``p.data`` does not
    increment it. On the CPU all weights are therefore compared with their masters, which costs little compared to the
    step. On an accelerator call ``optimizer.refresh_master_weights()`` after such writes.

    Args:
        classes: the optimizer classes of the groups.
        backend: keeps the parameters' state.
        master_weights: whether 16-bit parameters get fp32 masters, or are rounded stochastically without.
        places: called at set-up for the name and layer of each parameter.
        initial_masters: called at set-up for the fp32 values (of the local shard) that a parameter was rounded from.
        moments: the dtype in which moments are kept.
        weights: those that rest on the host.
        rounding_seed: of the noise for stochastic rounding.

    Attributes:
        by_parameter: the records, in the order of the model.
        changed: is told what others have written, if somebody asked for what changes.
        provisional: the parameters with state for a checkpoint to fill.
    """

    def __init__(
        self,
        classes: GroupClasses,
        backend: Store,
        master_weights: MasterWeights,
        places: Places | None,
        initial_masters: InitialMasters | None = None,
        moments: Moments | None = None,
        weights: HostWeights | None = None,
        rounding_seed: int = 0,
    ) -> None:
        self._weights = weights
        self._classes = classes
        self._moments, self._rounding_seed = moments or Moments(), rounding_seed
        self._backend = backend
        self._has_masters, self._rounding = master_weights is True, rounding_of(master_weights)
        self._places = places
        self._initial_masters = initial_masters
        self._loaded_masters: dict[Tensor, Tensor] = {}  # loaded before the set-up, without other state
        self._seen: dict[Managed, tuple[int, int]] = {}  # version and address
        self._loaded: dict[Managed, tuple[int, int]] = {}  # the same when state was loaded that no step has used
        self.changed: ChangedWeights | None = None
        self._has_lost_masters = False
        self.provisional: list[Managed] = []
        self.by_parameter: dict[Tensor, Managed] = {}  # replaced and never changed
        self._looked_up: tuple[dict[Tensor, Managed], dict[int, Managed]] = {}, {}
        """The same by the parameter's id, and what it was made from: hashing a tensor is slower."""
        self._covered: list[Any] = []  # at the last set-up: each group, followed by its trained parameters
        self._copies: weakref.ref[HostCopyPool] | None = None  # of the last save; the model owns them

    def __iter__(self) -> Iterator[Managed]:
        return iter(self.by_parameter.values())

    def __len__(self) -> int:
        return len(self.by_parameter)

    def get(self, parameter: object) -> Managed | None:
        """The record of one parameter; ``None`` if it is not managed (yet)."""
        return self.by_parameter.get(parameter)  # type: ignore[call-overload]

    def lookup(self, parameters: Iterable[Tensor]) -> list[Managed]:
        """The records of those parameters that are managed."""
        items, by_id = self._looked_up
        if items is not self.by_parameter:
            items, by_id = self._looked_up = (
                self.by_parameter,
                {id(param): item for param, item in self.by_parameter.items()},
            )
        return [item for item in map(by_id.get, map(id, parameters)) if item is not None]

    @property
    def devices(self) -> set[torch.device]:
        return {item.local.device for item in self}

    # -- set-up

    def places(self) -> Mapping[Tensor, Place]:
        """Name and layer of the model's parameters, in the order of their use; empty if they are not known."""
        return self._places() if self._places is not None else {}

    def set_up(self, groups: Sequence[dict[str, Any]], also: Collection[Tensor] = ()) -> bool:
        """Manage the groups' trainable parameters, and the frozen ones in ``also``; ``True`` if some of them are new.

        A parameter that is frozen later keeps its state, and continues from it when it is unfrozen. One that is frozen
        after its gradient has arrived is updated once more, as in torch.
        """
        covered = _groups_and_trained(groups)
        new = self._manage_all(groups, {*self.by_parameter, *also})
        self._covered = covered
        return new

    def _manage_all(self, groups: Sequence[dict[str, Any]], wanted: Collection[Tensor]) -> bool:
        wanted = {*wanted, *filter(torch.is_tensor, _groups_and_trained(groups))}
        listed = [(p, group) for group in groups for p in group["params"] if p in wanted]
        for parameter, group in listed:
            self._refuse_other_class(parameter, group)
        for parameter, group in listed:  # users may replace groups
            if parameter in self.by_parameter:
                self.by_parameter[parameter].group = group
        if not listed or (len(listed) == len(self.by_parameter) and all(p in self.by_parameter for p, _ in listed)):
            return False
        self._classes.inspect_groups(groups)
        places = self.places()
        known = self.by_parameter
        items = [known.get(p) or self._manage(p, group, places.get(p), i) for i, (p, group) in enumerate(listed)]
        refuse_shared_memory((item.name, item.resting) for item in items)
        if self._weights is not None:
            self._weights.refuse_memory_of_weights((item.name, item.local) for item in items if item.home is None)
        new = [item for item in items if item.param not in known]
        self._classes.prepare(items, groups)
        self._moments.set_up(items, self._classes, self._rounding_seed)
        set_up_rounding(items, self._classes, self._rounding_seed)
        place = {parameter: index for index, parameter in enumerate(places)}
        in_order_of_use = sorted(items, key=lambda item: place.get(item.param, len(place)))
        self._backend.register(in_order_of_use)  # all of them, or it raises
        items.sort(key=lambda item: places[item.param].number if item.param in places else len(places))
        self.by_parameter = {item.param: item for item in items}
        self._record_written(new)
        for item in new:
            self._init_master(item)
        return True

    def state_of_removed(self, groups: Sequence[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """The state of managed parameters that are in none of the groups any more."""
        listed = {parameter for group in groups for parameter in group["params"]}
        removed = [item for item in self if item.param not in listed and item.updated]
        if removed:
            self._backend.synchronize()
        return {item.param: self.state_of(item) for item in removed}

    def _refuse_other_class(self, parameter: Tensor, group: dict[str, Any]) -> None:
        item, theirs = self.by_parameter.get(parameter), self._classes.arithmetic_for(group)
        if item is not None and self._classes.arithmetic_for(item.group) is not theirs:
            raise ValueError(
                f"{item.name} was moved to a parameter group of {theirs.name}, and its state is that of "
                f"{self._classes.arithmetic_for(item.group).name}: move it back, or make a new optimizer"
            )

    def _init_master(self, item: Managed) -> None:
        """The master starts from the fp32 values that the weight was rounded from, if they are known and still fit."""
        unrounded = None if self._initial_masters is None else self._initial_masters(item.param)
        master = self._loaded_masters.pop(item.param, unrounded)
        if not item.own_master and master is not None and equals_rounded(item.resting, master):
            self._backend.set_initial_master(item, master)

    def keep_initial_master(self, parameter: Tensor, master: Tensor) -> None:
        """Before the set-up: the parameter's master starts from ``master`` (local shard), if that rounds to it."""
        self._loaded_masters[parameter] = master.detach().float().clone()

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter that is not managed yet: its initial master, unless that is the weight itself."""
        local, master = local_tensor(parameter).detach(), self._loaded_masters.get(parameter)
        if master is None and self._initial_masters is not None:
            master = self._initial_masters(parameter, keep=True)
        if master is None or not self._has_masters or local.dtype == torch.float32 or local.is_meta:
            return {}
        fits = local.shape == master.shape and was_rounded_from(local, master)
        return {"master": like(parameter, master.clone())} if fits else {}

    def _manage(self, parameter: Tensor, group: dict[str, Any], place: Place | None, index: int) -> Managed:
        local = local_tensor(parameter).detach()
        name = place.name if place else f"parameter {index} of shape {tuple(parameter.shape)}"
        if local.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device; materialise the model (strategy.prepare_model) before the first step"
            )
        if local.dtype not in _DTYPES:
            raise TypeError(
                f"{name} has dtype {local.dtype}; bfloat16, float16 and float32 parameters can be optimized"
            )
        rows = self._classes.check_parameter(name, parameter, local, group)
        rounding = None if local.dtype == torch.float32 else self._rounding
        layer = place.layer if place else None
        home = None if self._weights is None else self._weights.home_of(parameter)
        if home is not None:
            local = home.on_device
        own_master = self.is_own_master(local)
        return Managed(
            parameter, local, group, name, layer, own_master=own_master, rounding=rounding, rows=rows, home=home
        )

    def is_own_master(self, parameter: Tensor) -> bool:
        """Whether updates work on the parameter itself: who replaces its master writes to it."""
        return not self._has_masters or parameter.dtype == torch.float32

    # -- masters follow the model

    def record(self, items: Iterable[Managed]) -> None:
        """Record that the optimizer has written the parameters (to ``item.local``, even if they have moved since)."""
        listed = list(items)
        resting = [item.local if item.home is None else item.home.on_host for item in listed]
        found = zip(versions_of(listed), map(Tensor.data_ptr, resting), strict=True)
        self._seen.update(zip(listed, found, strict=True))
        for item in listed if self._loaded else ():
            self._loaded.pop(item, None)

    def _record_written(self, items: Collection[Managed]) -> None:
        """:meth:`record` after somebody else has written the parameters."""
        self.record(items)
        self._mark(items)

    def _mark(self, items: Iterable[Managed]) -> None:
        if self.changed is not None:
            self.changed.mark(items)

    def covers(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether all parameters that the groups train are managed, and each is in the group that it was in."""
        now = _groups_and_trained(groups)
        return len(now) == len(self._covered) and all(map(operator.is_, now, self._covered))  # no tensors' elements

    def in_other_groups(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether some managed parameter has another group than at the last set-up."""
        listed = ((self.by_parameter.get(p), group) for group in groups for p in group["params"])
        return any(item is not None and item.group is not group for item, group in listed)

    def _look(self, items: Iterable[Managed]) -> Look:
        """It runs in every step: for plain parameters it calls next to nothing."""
        seen, listed = self._seen, list(items)
        parameters = [item.param for item in listed]
        locals_now = [p if type(p) is nn.Parameter else local_tensor(p) for p in parameters]
        compared = [
            item
            for item, local in zip(listed, locals_now, strict=True)
            if item.home is None and local.device.type == "cpu"
        ]
        look = Look([], {}, compared)
        present = zip(listed, locals_now, versions_of(listed), map(Tensor.data_ptr, locals_now), strict=True)
        for item, local, version, address in present:
            known = item.local if item.home is None else item.home.on_host
            if (
                local.dtype != known.dtype
                or local.device != known.device
                or local.shape != known.shape
                or (item.has_equal_sizes and local.stride() != known.stride())
            ):
                look.converted.append(item)
            if item not in seen or seen[item] != (version, address):
                look.touched[item] = local
        return look

    def find_written(self, items: Iterable[Managed]) -> list[Managed]:
        """The parameters that somebody else has written to, cast or transposed since :meth:`record`, as far as versions
        and addresses tell."""
        look = self._look(items)
        found = dict.fromkeys([*look.converted, *look.touched])
        return [*found, *self._backend.changed([item for item in look.compared if item not in found])]

    def adopt_writes(self, written: Sequence[Managed], used: Container[Managed]) -> bool:
        """Rebuild the masters of weights that somebody else has written to in place, while others are updated.

        Args:
            written: what :meth:`find_written` returned.

        Returns ``False``, and changes nothing, if one of them is in ``used``, or was moved or cast.
        """
        if any(item in used for item in written) or not self.are_unmoved(written):
            return False
        self._record_written(written)
        for item in self._backend.changed(written):
            self._backend.refresh(item)
        return True

    def are_unmoved(self, items: Iterable[Managed]) -> bool:
        """Whether these parameters have the memory, shape and dtype that they had in the last step."""
        listed = list(items)
        return not self._look(listed).converted and all(
            local_tensor(item.param).data_ptr() == item.resting.data_ptr() for item in listed
        )

    def adopt_outside_changes(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Rebuild the masters of weights that somebody else has written; ``True`` if some records were replaced."""
        look = self._look(self.by_parameter.values())
        is_converted = bool(look.converted)
        if is_converted:
            self._convert(groups, look.converted)
            look = self._look(self.by_parameter.values())
        if look.touched:
            self._adopt_moved(look.touched)
            self._record_written(look.touched)
        suspects = dict.fromkeys([*look.compared, *look.touched])
        written = self._backend.changed(suspects) if suspects else []
        if written:
            self._mark(written)
        for item in written:
            self._backend.refresh(item)
        return is_converted

    def _adopt_moved(self, touched: Mapping[Managed, Tensor]) -> None:
        """Some of these parameters may have other memory than in the last step.

        Where weights rest on the host, whoever holds them takes what is in other memory there.
        """
        moved = {item: local for item, local in touched.items() if self._has_moved(item, local)}
        if moved:
            refuse_shared_memory((item.name, local_tensor(item.param)) for item in self)
        for item, local in moved.items():
            if item.home is None:
                item.local = local.detach()

    def _has_moved(self, item: Managed, local: Tensor) -> bool:
        """Whether a parameter has another address than at the last :meth:`record`, or none, since it is empty."""
        seen = self._seen.get(item)
        return seen is None or seen[1] != local.data_ptr() or not local.numel()

    def _convert(self, groups: Sequence[dict[str, Any]], converted: Sequence[Managed]) -> None:
        """Carry state over to parameters whose dtype or device has changed (``model.float()``, ``model.to(...)``).

        After a cast, masters are made of the weights. Converted parameters get new records.

        Raises:
            ValueError: a parameter with state has got another shape; nothing has been changed then.
        """
        for old in converted:
            _refuse_new_shape(old)
        self._backend.synchronize()
        carried = {item: self._backend.gather(item) for item in converted}
        before = self.by_parameter
        self.by_parameter = {parameter: item for parameter, item in before.items() if item not in carried}
        for item in converted:
            self._seen.pop(item, None)
        try:
            self._manage_all(groups, {*self.by_parameter, *(item.param for item in converted)})
        except BaseException:
            self.by_parameter = before
            raise
        for old, entries in carried.items():
            new = self.by_parameter.get(old.param)
            if new is None:  # no longer in the groups
                continue
            if new.local.dtype != old.local.dtype:
                entries.pop("master", None)
            self.load_state(new, entries)

    def refresh(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Rebuild all masters from the weights; ``True`` if some records were replaced."""
        converted = self._look(self).converted
        if converted:
            self._convert(groups, converted)
        for item in self:
            if item.home is None:
                item.local = local_tensor(item.param).detach()
            else:
                item.home.group.adopt_replaced()
                item.home.group.expect_writes()
            self._backend.refresh(item)
        self._record_written(list(self))
        return bool(converted)

    # -- state as it is seen from outside

    def state_of(self, item: Managed, kept_only: bool = False) -> dict[str, Any]:
        """Copies of the entries, with ``"master"``; DTensors if the parameter is one.

        If replicas share the work, all of them call this. With ``kept_only`` it returns what this process keeps,
        without communication, and not as copies.
        """
        entries = self._backend.entries(item) if kept_only else self._backend.gather(item)
        if "master" in entries and self._was_edited(item, entries["master"]):
            place = entries["master"].device
            entries["master"] = local_tensor(item.param).detach().to(place, torch.float32, copy=True)
        return {key: _as_parameter(item, value) for key, value in entries.items()}

    def _was_edited(self, item: Managed, master: Tensor) -> bool:
        """Whether the weight is no longer its master rounded. What is read and saved then follows the weight.

        The master itself is not changed: the weights may be replaced for a while only (averages swapped in and out), or
        state has just been loaded and its weights come next. Until somebody writes to the weight, that state is read as
        it was loaded, so that it may be copied or loaded back meanwhile.
        """
        look = self._look([item])
        if not look.compared and not look.touched:
            return False
        local = local_tensor(item.param)
        if item in self._loaded:
            if self._loaded[item] == _version_and_address(item):
                return False
        elif self._backend.compares_weights and local.data_ptr() == item.resting.data_ptr():
            return False  # the backend has compared them itself
        return not equals_rounded(local, master)

    def pin(
        self,
        wanted: Mapping[Tensor, Collection[str]],
        weight_of: Callable[[Tensor], Callable[[], Tensor]],
        copies: HostCopyPool | None,
    ) -> Snapshot | None:
        """See :meth:`Store.pin`; parameters replaced, moved or cast since the last step are left out."""
        found = ((self.by_parameter.get(parameter), keys) for parameter, keys in wanted.items())
        kept = {item: keys for item, keys in found if item is not None and self.are_unmoved([item])}
        self._copies = self._copies if copies is None else weakref.ref(copies)
        return self._backend.pin(kept, weight_of, copies)

    def saving_bytes(self) -> int:
        """Bytes of the host memory for copies that :meth:`pin` was given last, while it exists."""
        copies = None if self._copies is None else self._copies()
        return 0 if copies is None else copies.nbytes

    def check_state(self, item: Managed, entries: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> None:
        """Raises ``ValueError`` for an entry of another shape than the parameter's local shard, for one that is
        missing, and for a moment that would not be kept in fewer bits, as the others are.

        Args:
            settings: what will be loaded into the parameter's group; which entries there are depends on it.
        """
        self._check_shapes(item, entries)
        self.check_complete(item, entries.keys(), entries, settings or {})
        self.check_names(item, entries, settings or {})

    def check_names(self, item: Managed, entries: Collection[str], settings: Mapping[str, Any]) -> None:
        """:meth:`check_state` as far as it depends on the names of the entries alone."""
        self._moments.refuse_late(item, entries, self._classes, settings)

    def _check_shapes(self, item: Managed, entries: Mapping[str, Any], remedy: str = "") -> None:
        for key, entry in entries.items():
            value = local_tensor(entry) if isinstance(entry, Tensor) else entry
            if isinstance(value, Tensor) and not self.accepts(item.group, key, value, item.local.shape):
                raise ValueError(
                    f"state {key!r} of {item.name} has shape {tuple(value.shape)}; the parameter's local shape is "
                    f"{tuple(item.local.shape)}{remedy}"
                )

    def check_edit(self, item: Managed, new: Mapping[str, Any], edit: Edit) -> None:
        """Raises ``ValueError`` if a parameter cannot have the state that an edit makes of its own."""
        remedy = (
            ". Cut or pad it as the parameter, or delete it: a master that is deleted starts from the weight, and "
            "after del optimizer.state[parameter] the whole state starts anew"
        )
        self._check_shapes(item, new, remedy)
        if edit.whole or not item.updated:
            self.check_complete(item, new.keys(), new, {})
            return
        # What an update has dropped is not missing. Where another replica keeps the entries, this one knows no values.
        kept = item.schema if item.is_remote else self._backend.describe(item)
        dropped = item.schema.keys() - kept.keys()
        self.check_complete(item, {*edit.applied_to(lambda: kept), *dropped}, new, {})

    def check_complete(
        self, item: Managed, names: Collection[str], values: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """Refuse state without an entry that the class does not make again: the step would fail halfway. So it would
        with ``None`` in the place of a tensor, for most classes.

        Args:
            names: those of the entries.
            values: of these, as far as they are known; meta tensors will do for those that have dimensions.
        """
        known = {} if item.is_remote else values  # another replica has them
        schema = item.schema.items()
        missing = [key for key, spec in schema if key not in names or _is_no_number(spec, known.get(key, 0))]
        if not missing or not {*names} - {"master"}:
            return
        problem = self._classes.problem_without(item, frozenset(missing), known, {**item.group, **settings})
        if problem is not None:
            raise ValueError(
                f"the state of {item.name} has {', '.join(sorted({*names} - {*missing}))} and no "
                f"{' and no '.join(missing)}, which "
                f"{self._classes.arithmetic_for(item.group).name} does not make again ({problem}). Assign what is "
                "missing, or delete the whole state: with del optimizer.state[parameter] it starts anew"
            )

    def edits_weight(self, parameter: Tensor, edit: Edit) -> bool:
        """Whether an edit of this parameter's state writes to the parameter, which is its own master."""
        return "master" in edit.entries and self.is_own_master(parameter)

    def load_state(self, item: Managed, entries: Mapping[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it.

        Entries are kept in the order in which the base optimizer makes them, whatever order they are given in: ranks
        iterate over them with collectives.

        Raises:
            ValueError: an entry has another shape than the parameter's local shard, or is missing; nothing has been
                changed then.
        """
        self.check_state(item, entries)
        order = [*(key for key in item.schema if key in entries), *sorted(entries.keys() - item.schema.keys())]
        local = {key: local_tensor(entries[key]) if isinstance(entries[key], Tensor) else entries[key] for key in order}
        if item.own_master and "master" in local:
            item.write(local.pop("master"))
            if item.rounding is not None:
                self._log_lost_masters()
        if local and not item.updated:  # plain torch's state has no masters
            local = {**self._backend.entries(item), **local}
        self._moments.log_conversion(item, local)
        # If the class has state, a master alone belongs to a parameter that has never been updated.
        initial = local.pop("master") if item.schema and [*local] == ["master"] else None
        self._backend.load(item, local)
        item.updated, item.provisional = bool(local), False
        if initial is not None:
            self._backend.set_initial_master(item, initial.detach().float().clone())
        # The next step compares master and weight: the model may be loaded before or after its optimizer.
        self._seen.pop(item, None)
        self._loaded[item] = _version_and_address(item)
        self._mark([item])

    def _log_lost_masters(self) -> None:
        if not self._has_lost_masters:
            logger.info("loaded masters are rounded to the weights, to nearest, and are not kept from here on")
            self._has_lost_masters = True

    def accepts(self, group: Mapping[str, Any], key: str, entry: Tensor, shape: torch.Size) -> bool:
        """Whether a parameter of this group and local shape can have this (local) state entry."""
        return entry.dim() == 0 or entry.shape == shape or (key != "master" and self._classes.keeps_other_shapes(group))

    def mark_provisional(self, items: Sequence[Managed]) -> None:
        """The state of these was made for a checkpoint to fill; without one, the first update starts from scratch."""
        for item in items:
            entries = self.state_of(item, kept_only=True)
            if isinstance(entries.get("step"), Tensor):
                self.load_state(item, {**entries, "step": torch.zeros_like(entries["step"])})
            item.provisional = True
            self.provisional.append(item)

    def drop_provisional_state(self) -> None:
        for item in self.provisional:
            if item.provisional and self.by_parameter.get(item.param) is item:
                master = {key: value for key, value in self._backend.entries(item).items() if key == "master"}
                self.load_state(item, _copied(master))
        self.provisional = []


def _groups_and_trained(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Each group, followed by the parameters in it that are trained, or have been: they have a gradient."""
    found: list[Any] = []
    for group in groups:
        found.append(group)
        found += [parameter for parameter in group["params"] if parameter.requires_grad or parameter.grad is not None]
    return found


def _version_and_address(item: Managed) -> tuple[int, int]:
    return versions_of([item])[0], local_tensor(item.param).data_ptr()


def _as_parameter(item: Managed, value: Any) -> Any:
    """A local entry of the parameter's shape as a DTensor if the parameter is one; any other entry as it is."""
    if isinstance(value, Tensor) and value.dim() and value.shape == item.local.shape:
        return like(item.param, value)
    return value


def _refuse_new_shape(item: Managed) -> None:
    shape = local_tensor(item.param).shape
    if item.updated and shape != item.local.shape:
        raise ValueError(
            f"{item.name} has shape {tuple(shape)} now (a resized embedding?), and its optimizer state has "
            f"{tuple(item.local.shape)}: reset it with `del optimizer.state[parameter]`, or make a new optimizer"
        )


def _is_no_number(spec: EntrySpec, value: Any) -> bool:
    """Whether an update makes a tensor of one dtype, and this is neither a tensor nor a number."""
    return spec.dtype is not None and not isinstance(value, (Tensor, Real))


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}


def refuse_shared_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that share memory (``a.data = b.data``): each update would undo the other's.

    Raises:
        ValueError: with the names of two such parameters.
    """
    entries = [(local.data_ptr(), name, local) for name, local in named if local.numel()]
    entries.sort(key=lambda entry: (str(entry[2].device), entry[0]))
    for (start, one, first), (other_start, other, second) in pairwise(entries):
        overlaps = first.device == second.device and other_start < start + first.nbytes
        if overlaps and (start == other_start or (first.is_contiguous() and second.is_contiguous())):
            raise ValueError(
                f"{one} and {other} share memory (one's .data is the other's): each would have a master and undo the "
                "other's update. Tie them by making them one parameter (b.weight = a.weight) before the optimizer is "
                "made"
            )
