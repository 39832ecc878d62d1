"""The optimizer classes of an optimizer's groups: usually one, or one for each group that names its own.

A group names its class by ``"optimizer_class"``: a class when it is handed over, its name from then on, so that groups
can be saved and compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, Rows
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.group_values import GroupValues
from lightstep.state.backend import Managed
from lightstep.state.segment import Segment

__all__ = ["GroupClasses", "class_name", "constructor_arguments", "kept_by_class"]

CLASS = "optimizer_class"
Group = Mapping[str, Any]


class GroupClasses:
    """An optimizer's own class, for groups that name none, and those that groups name.

    Args:
        optimizer_class: the optimizer's own.
        hyperparameters: its keyword arguments. Groups of other classes have the defaults of theirs.

    Attributes:
        own: the arithmetic of the optimizer's own class.
        in_backward: updates run in backward, where ranks cannot update a parameter together.
        exchanges: between ranks that do, by process group; they exist from the set-up on.

    Raises:
        TypeError, ValueError: see :class:`~lightstep.optimizer.arithmetic.BaseArithmetic`.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        self.own, self.in_backward = BaseArithmetic(optimizer_class, hyperparameters), False
        self.exchanges: dict[Any, MatrixExchange] = {}
        self._named: dict[str, BaseArithmetic] = {class_name(optimizer_class): self.own}

    @property
    def name(self) -> str:
        """The classes' names."""
        return " + ".join(arithmetic.name for arithmetic in self._named.values())

    @property
    def whole_tensors(self) -> bool:
        """Whether any of them is not element-wise."""
        return any(arithmetic.whole_tensors for arithmetic in self._named.values())

    @property
    def classes(self) -> list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
        """Each with its keyword arguments; the optimizer's own first."""
        return [(arithmetic.optimizer_class, arithmetic.hyperparameters) for arithmetic in self._named.values()]

    def know(self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> BaseArithmetic:
        """The arithmetic of a class that groups may name."""
        name = class_name(optimizer_class)
        if name not in self._named:
            self._named[name] = BaseArithmetic(optimizer_class, hyperparameters)
        return self._named[name]

    def adopt(self, group: dict[str, Any]) -> dict[str, Any]:
        """The defaults for a new group, whose class is replaced by its name.

        Raises:
            TypeError: what it names is no optimizer class.
            ValueError: a hyper-parameter without a default is missing.
        """
        given = group.get(CLASS)
        if given is None:
            return self.own.defaults
        if isinstance(given, str) and given in self._named:
            return self._named[given].defaults
        if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
            raise TypeError(
                f"a parameter group's optimizer_class is {given!r}; a subclass of torch.optim.Optimizer is needed, "
                "for example torch.optim.Muon (the class, not an instance)"
            )
        group[CLASS], arguments = class_name(given), constructor_arguments(given, group)
        kept, known = kept_by_class(given, group), self.know(given, arguments)
        theirs = {key: value for key, value in known.hyperparameters.items() if key not in known.defaults}
        if kept != theirs and (kept or known is not self.own):
            raise ValueError(
                f"two parameter groups of {given.__name__} differ in what the class keeps for all its groups ({theirs} "
                f"and {kept}): give both the same"
            )
        return known.defaults

    def of(self, group: Group) -> BaseArithmetic:
        """The arithmetic of a group's class."""
        name = group.get(CLASS)
        return self.own if name is None else self._named[name]

    def keeps_other_shapes(self, group: Group) -> bool:
        """Whether the state of the group's parameters may have row sums and the like; Muon's has not."""
        arithmetic = self.of(group)
        return arithmetic.whole_tensors and not arithmetic.sends_directions

    def by_class(self, groups: Iterable[Group]) -> dict[BaseArithmetic, list[Group]]:
        """The groups of each class that has any."""
        found: dict[BaseArithmetic, list[Group]] = {}
        for group in groups:
            found.setdefault(self.of(group), []).append(group)
        return found

    def close(self) -> None:
        """Give process groups back."""
        for exchange in self.exchanges.values():
            exchange.close()
        self.exchanges.clear()

    # -- set-up

    def consider(self, groups: Sequence[Group]) -> None:
        """See :meth:`BaseArithmetic.consider`."""
        for arithmetic, own in self.by_class(groups).items():
            arithmetic.consider(own)

    def check_parameter(self, name: str, parameter: Tensor, local: Tensor, group: Group) -> Rows | None:
        """See :meth:`BaseArithmetic.check_parameter`."""
        arithmetic = self.of(group)
        rows = arithmetic.check_parameter(name, parameter, local)
        if rows is not None and self.in_backward:
            raise ValueError(
                f"{name} is sharded, and {arithmetic.name} brings it together from all ranks, which "
                "optimizer_state.update in_backward cannot: set at_step, next_forward or overlap"
            )
        return rows

    def prepare(self, items: Sequence[Managed], groups: Sequence[Group]) -> None:
        """Find out how the classes run where these parameters are, and tell each of them what its state will be."""
        schemas = {}
        for arithmetic, own in self.by_class(groups).items():
            updated = [item for item in items if self.of(item.group) is arithmetic]
            for device in {item.local.device for item in items}:  # all know all devices, whoever is on them
                low = any(item.own_master and item.local.dtype != torch.float32 for item in updated)
                arithmetic.prepare(device, low_precision=low)
            if updated:
                schemas[arithmetic] = arithmetic.schema(updated[0].local.device, own)  # type: ignore[arg-type]
        for item in items:
            arithmetic = self.of(item.group)
            item.schema, item.whole_tensors = schemas[arithmetic], arithmetic.whole_tensors
            item.joined_in_update = arithmetic.one_pass(item.local.device)
        for exchange in self.exchanges.values():
            exchange.keep(frozenset(items))
        for item in items:
            if item.rows is not None and item.rows.group not in self.exchanges:
                self.exchanges[item.rows.group] = MatrixExchange(item.rows.group)
                self.exchanges[item.rows.group].open(item.local.device)

    # -- one step

    def skips_on_device(self, device: torch.device, groups: Sequence[Group]) -> bool:
        """Whether all of them can leave out a step without a word from the host."""
        return all(
            arithmetic.skips_on_device(device, own)  # type: ignore[arg-type]
            for arithmetic, own in self.by_class(groups).items()
        )

    def apply(
        self, segments: Sequence[Segment], gradients: Sequence[Tensor], overflow: Tensor, values: GroupValues
    ) -> None:
        """Each segment's update by its class; see :meth:`BaseArithmetic.apply`."""
        batches: dict[BaseArithmetic, tuple[list[Segment], list[Tensor]]] = {}
        for segment, gradient in zip(segments, gradients, strict=True):
            batch = batches.setdefault(self.of(segment.group), ([], []))
            batch[0].append(segment)
            batch[1].append(gradient)
        for arithmetic, batch in batches.items():
            arithmetic.apply(*batch, overflow, values)


def class_name(optimizer_class: type) -> str:
    """``torch.optim.Muon``: the name under which it is imported, whatever file of torch's it is in."""
    module = optimizer_class.__module__
    public = getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class
    return f"{'torch.optim' if public else module}.{optimizer_class.__qualname__}"


def constructor_arguments(optimizer_class: type[torch.optim.Optimizer], group: Group) -> dict[str, Any]:
    """Of a group's settings those that a class is constructed with: what has no default, and what no group holds.

    Raises:
        ValueError: one without a default is missing.
    """
    required = [one.name for one in _parameters_of(optimizer_class) if one.default is one.empty]
    missing = [name for name in required if name not in group]
    if missing:
        name = optimizer_class.__name__
        raise ValueError(
            f"a parameter group of {name} has no {' and no '.join(missing)}, and {name} has no default for it: put it "
            f"into the group, {{'params': [...], 'optimizer_class': {name}, '{missing[0]}': ...}}"
        )
    return {name: group[name] for name in required} | kept_by_class(optimizer_class, group)


def kept_by_class(optimizer_class: type[torch.optim.Optimizer], group: Group) -> dict[str, Any]:
    """Of a group's settings those that the class has once, for all its groups."""
    parameters = _parameters_of(optimizer_class)
    required = {one.name: group[one.name] for one in parameters if one.default is one.empty and one.name in group}
    in_groups = optimizer_class([torch.zeros(2, 2, device="cpu")], **required).defaults
    return {one.name: group[one.name] for one in parameters if one.name in group and one.name not in in_groups}


def _parameters_of(optimizer_class: type[torch.optim.Optimizer]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(optimizer_class).parameters.values())[1:]
    return [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
