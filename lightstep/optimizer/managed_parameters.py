"""Which parameters an optimizer is in charge of, and their state as the rest of the world sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import like, local_tensor
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.param_groups import Place
from lightstep.precision.master_weights import ModelWatch
from lightstep.state.backend import Managed, Schema, StateBackend
from lightstep.state.kept_records import same_rounding

Places = Callable[[], Mapping[Tensor, Place]]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ManagedParameters:
    """The trainable parameters of an optimizer's groups, set up as late as possible.

    Args:
        arithmetic: told about each device parameters are found on.
        backend: told which parameters it is in charge of.
        master_weights: whether 16-bit parameters get fp32 masters.
        places: called at set-up for the name and layer of each parameter.
    """

    def __init__(
        self, arithmetic: BaseArithmetic, backend: StateBackend, master_weights: bool, places: Places | None
    ) -> None:
        self._arithmetic = arithmetic
        self._backend = backend
        self._master_weights = master_weights
        self._places = places
        self._watch = ModelWatch()
        self._items: dict[Tensor, Managed] = {}
        self._schema: Schema = {}

    def __iter__(self) -> Iterator[Managed]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def get(self, parameter: object) -> Managed | None:
        """The record of one parameter, or ``None`` for one that is not managed (yet)."""
        return self._items.get(parameter)  # type: ignore[call-overload]

    @property
    def devices(self) -> set[torch.device]:
        return {item.local.device for item in self}

    # -- who is in charge of what

    def places(self) -> Mapping[Tensor, Place]:
        """Name and layer of the model's parameters, in the order of their use; empty where nobody says."""
        return self._places() if self._places is not None else {}

    def set_up(self, groups: Sequence[dict[str, Any]], also: Collection[Tensor] = ()) -> bool:
        """Take charge of the groups' trainable parameters, and of these frozen ones; ``True`` when anything was new.

        A parameter that is frozen later keeps its state, and continues from it when it is thawed.
        """
        every = [(p, group) for group in groups for p in group["params"]]
        wanted = {*self._items, *also}
        listed = [(p, group) for p, group in every if p.requires_grad or p in wanted]
        for parameter, group in listed:  # groups are the user's to exchange
            if parameter in self._items:
                self._items[parameter].group = group
        if len(listed) == len(self._items) and all(p in self._items for p, _ in listed):
            return False
        if not listed:
            raise ValueError("the optimizer has no trainable parameter: requires_grad is False on all of them")
        self._arithmetic.consider(groups)
        places = self.places()
        items = [self._items.get(p) or self._manage(p, group, places.get(p), i) for i, (p, group) in enumerate(listed)]
        new = [item for item in items if item.param not in self._items]
        for device in {item.local.device for item in items}:
            low = any(item.own_master and item.local.dtype != torch.float32 for item in items)
            self._arithmetic.prepare(device, low_precision=low)
        schema = self._arithmetic.schema(items[0].local.device, groups)
        place = {parameter: index for index, parameter in enumerate(places)}
        in_model_order = sorted(items, key=lambda item: place.get(item.param, len(place)))
        self._backend.register(in_model_order, schema, self._arithmetic.whole_tensors)  # refuses, or takes them all
        self._items, self._schema = {item.param: item for item in items}, schema
        for item in new:
            self.record(item)
        return True

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
        self._arithmetic.check_parameter(name, parameter.shape, local.shape)
        masters = self._master_weights and local.dtype != torch.float32
        return Managed(parameter, local, group, name, place.layer if place else None, own_master=not masters)

    # -- masters follow the model

    def record(self, item: Managed) -> None:
        """The parameter is now as the optimizer left it: what it wrote to, should the storage be another by now."""
        self._watch.record(item.param, item.local)

    def adopt_outside_changes(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Weights that somebody else wrote since the last step become the masters; ``True`` if items are others now."""
        converted = self._take_over_converted(groups)
        suspects = [item for item in self if self._watch.suspicious(item.param, local_tensor(item.param))]
        for item in suspects:
            local = local_tensor(item.param)
            if self._watch.moved(item.param, local):
                item.local = local.detach()
                if item.own_master:
                    self._backend.refresh(item)
        for item in self._backend.changed(suspects):
            self._backend.refresh(item)
        for item in suspects:
            self.record(item)
        return converted

    def _take_over_converted(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Parameters of another dtype or on another device now (``model.float()``, ``model.to(...)``) keep their state.

        After a cast masters are made of the weights. They are other items then: ``True``.

        Raises:
            ValueError: one with state has another shape; nothing has been changed then.
        """
        converted = [item for item in self if not _is_alike(local_tensor(item.param), item.local)]
        if not converted:
            return False
        for old in converted:
            _refuse_new_shape(old)
        self._backend.synchronize()
        carried = {item: _copied(self._backend.gather(item)) for item in converted}
        before = self._items
        self._items = {parameter: item for parameter, item in before.items() if item not in carried}
        try:
            self.set_up(groups, also=[item.param for item in converted])
        except BaseException:
            self._items = before
            raise
        for old, entries in carried.items():
            item = self._items.get(old.param)
            if item is None:  # it has left the groups
                continue
            if item.local.dtype != old.local.dtype:
                entries.pop("master", None)
            self.load_state(item, entries)
        return True

    def refresh(self, groups: Sequence[dict[str, Any]]) -> bool:
        """All masters become the parameters' values; ``True`` when items are others now."""
        converted = self._take_over_converted(groups)
        for item in self:
            item.local = local_tensor(item.param).detach()
            self._backend.refresh(item)
            self.record(item)
        return converted

    # -- state as the rest of the world sees it

    def state_of(self, item: Managed, kept_only: bool = False) -> dict[str, Any]:
        """Live entries where they can be, ``"master"`` among them; DTensors where the parameter is one.

        Where replicas share the work, all of them call this, unless ``kept_only``: what this process keeps.
        """
        entries = self._backend.entries(item) if kept_only else self._backend.gather(item)
        if "master" in entries and self._was_edited(item, entries["master"]):
            entries["master"] = local_tensor(item.param).detach().float()
        return {key: _placed_like(item, value) for key, value in entries.items()}

    def _was_edited(self, item: Managed, master: Tensor) -> bool:
        """Whether somebody else wrote to the weight since the last step: what is read and saved follows it.

        Nothing is changed here: the weights may be others only while somebody looks (averages swapped in and out). And
        state that was just loaded may still wait for the weights that go with it.
        """
        local = local_tensor(item.param)
        if not self._watch.knows(item.param) or not self._watch.suspicious(item.param, local):
            return False
        if not self._backend.hands_out_state and local.data_ptr() == item.local.data_ptr():
            return False  # the backend has looked itself, at the memory that it knows
        return not same_rounding(local, master)

    def load_state(self, item: Managed, entries: Mapping[str, Any]) -> None:
        """Replace one parameter's state; ``{}`` removes it.

        Entries are kept in the order in which the base optimizer makes them, whatever order they arrive in: ranks walk
        through them with collectives.

        Raises:
            ValueError: an entry has another shape than the parameter's local shard; nothing has been changed then.
        """
        order = [*(key for key in self._schema if key in entries), *sorted(entries.keys() - self._schema.keys())]
        local = {key: local_tensor(entries[key]) if isinstance(entries[key], Tensor) else entries[key] for key in order}
        for key, value in local.items():
            if isinstance(value, Tensor) and not self.takes(value, item.local.shape):
                raise ValueError(
                    f"state {key!r} of {item.name} has shape {tuple(value.shape)}; the parameter's local shape is "
                    f"{tuple(item.local.shape)}"
                )
        if item.own_master and "master" in local:
            item.local.copy_(local.pop("master"))
        self._backend.load(item, local)
        item.updated, item.provisional = bool(local), False
        # The next step looks whether master and weight agree: the model may be loaded before or after its optimizer.
        self._watch.forget(item.param)

    def takes(self, entry: Tensor, shape: torch.Size) -> bool:
        """Whether a state entry (local) can belong to a parameter of this local shape."""
        return entry.dim() == 0 or entry.shape == shape or self._arithmetic.whole_tensors  # row sums and the like

    def mark_provisional(self, items: Sequence[Managed]) -> None:
        """The state of these was made only for a checkpoint to fill; without one, the first update starts afresh."""
        for item in items:
            entries = self.state_of(item, kept_only=True)
            if isinstance(entries.get("step"), Tensor):
                self.load_state(item, {**entries, "step": torch.zeros_like(entries["step"])})
            item.provisional = True

    def drop_provisional_state(self) -> None:
        for item in self:
            if item.provisional:
                self._backend.load(item, {})
                item.updated = item.provisional = False


def _placed_like(item: Managed, value: Any) -> Any:
    """A local entry of the parameter's shape as a DTensor where the parameter is one; others as they are."""
    if isinstance(value, Tensor) and value.dim() and value.shape == item.local.shape:
        return like(item.param, value)
    return value


def _is_alike(local: Tensor, known: Tensor) -> bool:
    return (local.shape, local.dtype, local.device) == (known.shape, known.dtype, known.device)


def _refuse_new_shape(item: Managed) -> None:
    shape = local_tensor(item.param).shape
    if item.updated and shape != item.local.shape:
        raise ValueError(
            f"{item.name} has shape {tuple(shape)} now (a resized embedding?), and its optimizer state has "
            f"{tuple(item.local.shape)}: start it anew with `del optimizer.state[parameter]`, or make a new optimizer"
        )


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}


class StateView(MutableMapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: parameter → entries, read from the state backend whenever somebody looks.

    Assigning replaces a parameter's state, and so does assigning one of its entries. Whether a tensor that was read is
    the state itself or a copy is the backend's affair (``stream`` gives copies). Like torch's own it answers ``{}`` for
    a parameter without state.
    """

    def __init__(
        self,
        managed: ManagedParameters,
        read: Callable[[Tensor], dict[str, Any]],
        write: Callable[[Tensor, Mapping[str, Any]], None],
    ) -> None:
        self._managed = managed
        self._read = read
        self._write = write

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return _Entries(self._read(parameter), lambda new, gone: self._change(parameter, new, gone))

    def _change(self, parameter: Tensor, new: Mapping[str, Any], gone: Collection[str]) -> None:
        entries = {**self._read(parameter), **new}
        self._write(parameter, {key: value for key, value in entries.items() if key not in gone})

    def __setitem__(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        self._write(parameter, entries)

    def __delitem__(self, parameter: Tensor) -> None:
        self._write(parameter, {})

    def __contains__(self, parameter: object) -> bool:
        item = self._managed.get(parameter)
        return item is not None and item.updated

    def __iter__(self) -> Iterator[Tensor]:
        return (item.param for item in self._managed if item.updated)

    def __len__(self) -> int:
        return sum(item.updated for item in self._managed)


class _Entries(dict[str, Any]):
    """One parameter's entries as they were read; what is assigned here is written to the state, and only that.

    Args:
        change: called with the entries that are new and the names of those that go.
    """

    def __init__(
        self, entries: Mapping[str, Any], change: Callable[[Mapping[str, Any], Collection[str]], None]
    ) -> None:
        super().__init__(entries)
        self._change = change

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._change({}, [key])

    def update(self, *arguments: Any, **entries: Any) -> None:
        new = dict(*arguments, **entries)
        super().update(new)
        self._change(new, ())

    def __ior__(self, other: Any) -> _Entries:  # type: ignore[misc,override]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        gone = list(self)
        super().clear()
        self._change({}, gone)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
