"""The optimizer classes of an optimizer's groups: usually one, or one for each group that names its own.

A group names its class by ``"optimizer_class"``. Users give the class itself; it is replaced by its name, so that
groups can be saved and compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.distributed import MatrixExchange, Rows
from lightstep.error_text import value_text
from lightstep.optimizer.arithmetic import BaseArithmetic
from lightstep.optimizer.update import CLASS, GroupValues
from lightstep.state.schema import Managed
from lightstep.state.segment import Segment

__all__ = ["GroupClasses", "class_name", "constructor_arguments", "kept_by_class"]

_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
_NO_SETTINGS = frozenset({"params", "param_names", "name", CLASS}) | _SCHEDULERS
Group = Mapping[str, Any]


class GroupClasses:
    """An optimizer's own class, for groups that name none, and those that groups name.

    Args:
        optimizer_class: the optimizer's own.
        hyperparameters: its keyword arguments. Groups of other classes have the defaults of those.

    Attributes:
        own: the arithmetic of the optimizer's own class.
        own_is_used: a new group may name no class, and has the optimizer's own then.
        in_backward: updates run in backward, where ranks cannot update a parameter together.
        version: another number after each :meth:`prepare`.
        may_write_groups: some class may write to its groups in a step, or count steps elsewhere: torch's own do not.
        exchanges: between ranks that do so, by process group; they exist from the set-up on.

    Raises:
        TypeError, ValueError: see :class:`~lightstep.optimizer.arithmetic.BaseArithmetic`.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> None:
        self.own, self.own_is_used = BaseArithmetic(optimizer_class, hyperparameters), True
        self.in_backward, self.version = False, 0
        self.exchanges: dict[Any, MatrixExchange] = {}
        self._named: dict[str, BaseArithmetic] = {class_name(optimizer_class): self.own}
        self.may_write_groups = not self.own.is_torchs_own

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
        """Each class with its keyword arguments; the optimizer's own first."""
        return [(arithmetic.optimizer_class, arithmetic.hyperparameters) for arithmetic in self._named.values()]

    def add_class(
        self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]
    ) -> BaseArithmetic:
        """Add a class that groups may name; returns its arithmetic."""
        name = class_name(optimizer_class)
        if name not in self._named:
            self._named[name] = BaseArithmetic(optimizer_class, hyperparameters)
            self.may_write_groups |= not self._named[name].is_torchs_own
        return self._named[name]

    def defaults_for(self, group: dict[str, Any]) -> dict[str, Any]:
        """The defaults for a new group. A class in it is added, and replaced by its name.

        Raises:
            TypeError: it names something that is no optimizer class, or has a setting that the class does not have.
            ValueError: a hyper-parameter without a default is missing, or the class refuses one.
        """
        defaults = self._defaults_for(group)
        self.arithmetic_for(group).check_settings({**defaults, **group})
        return defaults

    def _defaults_for(self, group: dict[str, Any]) -> dict[str, Any]:
        given = group.get(CLASS)
        if given is None and not self.own_is_used and len(self._named) > 1:
            raise TypeError(
                f"the groups of this optimizer name their classes ({self.name}), and a new one does not: add "
                "'optimizer_class' to it"
            )
        if given is None:
            return self.own.defaults
        if isinstance(given, str) and given in self._named:
            return self._named[given].defaults
        if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
            raise TypeError(
                f"a parameter group's optimizer_class is {value_text(given)}; a subclass of torch.optim.Optimizer is "
                "needed, for example torch.optim.Muon (the class, not an instance)"
            )
        group[CLASS], arguments = class_name(given), constructor_arguments(given, group)
        kept, known = kept_by_class(given, group), self.add_class(given, arguments)
        _refuse_unknown(known, group)
        theirs = {key: value for key, value in known.hyperparameters.items() if key not in known.defaults}
        if kept != theirs and (kept or known is not self.own):
            raise ValueError(
                f"two parameter groups of {given.__name__} differ in settings that the class has for all its groups "
                f"({theirs} and {kept}): give both the same"
            )
        return known.defaults

    def arithmetic_for(self, group: Group) -> BaseArithmetic:
        """The arithmetic of a group's class."""
        name = group.get(CLASS)
        return self.own if name is None else self._named[name]

    def keeps_other_shapes(self, group: Group) -> bool:
        """Whether the group's state may have shapes of its own, such as row sums; Muon's has none."""
        arithmetic = self.arithmetic_for(group)
        return arithmetic.whole_tensors and not arithmetic.sends_directions

    def by_class(self, groups: Iterable[Group]) -> dict[BaseArithmetic, list[Group]]:
        """The groups of each class that has any."""
        found: dict[BaseArithmetic, list[Group]] = {}
        for group in groups:
            found.setdefault(self.arithmetic_for(group), []).append(group)
        return found

    def close(self) -> None:
        """Release the process groups."""
        for exchange in self.exchanges.values():
            exchange.close()
        self.exchanges.clear()

    # -- set-up

    def inspect_groups(self, groups: Sequence[Group]) -> None:
        """See :meth:`BaseArithmetic.inspect_groups`."""
        for arithmetic, own in self.by_class(groups).items():
            arithmetic.inspect_groups(own)

    def check_parameter(self, name: str, parameter: Tensor, local: Tensor, group: Group) -> Rows | None:
        """See :meth:`BaseArithmetic.check_parameter`."""
        arithmetic = self.arithmetic_for(group)
        rows = arithmetic.check_parameter(name, parameter, local)
        if rows is not None and self.in_backward:
            raise ValueError(
                f"{name} is sharded, and {arithmetic.name} gathers it from all ranks, which optimizer_state.update "
                "in_backward cannot do: set at_step, next_forward or overlap"
            )
        return rows

    def prepare(self, items: Sequence[Managed], groups: Sequence[Group]) -> None:
        """Find out how the classes run on the parameters' devices, and set each parameter's schema."""
        schemas = {}
        self.version += 1
        for arithmetic, own in self.by_class(groups).items():
            updated = [item for item in items if self.arithmetic_for(item.group) is arithmetic]
            for device in {item.local.device for item in items}:  # each class is prepared for all devices
                low = any(not item.has_fp32_updates for item in updated)
                arithmetic.prepare(device, low_precision=low)
            if updated:
                schemas[arithmetic] = arithmetic.schema(updated[0].local.device, own)  # type: ignore[arg-type]
        for item in items:
            arithmetic = self.arithmetic_for(item.group)
            item.schema, item.whole_tensors = schemas[arithmetic], arithmetic.whole_tensors
            item.reads_attributes = not arithmetic.is_torchs_own
            item.fused_update = arithmetic.has_one_pass_kernel(item.local.device)
        for exchange in self.exchanges.values():
            exchange.retain(frozenset(items))
        for item in items:
            if item.rows is not None and item.rows.group not in self.exchanges:
                self.exchanges[item.rows.group] = MatrixExchange(item.rows.group)
                self.exchanges[item.rows.group].open(item.local.device)

    def problem_without(
        self, item: Managed, missing: frozenset[str], entries: Mapping[str, Any], settings: Group
    ) -> str | None:
        """See :meth:`BaseArithmetic.problem_without`."""
        arithmetic = self.arithmetic_for(item.group)
        return arithmetic.problem_without(missing, entries, item.param, item.local.device, settings)

    # -- one step; until the next `prepare`, the answers depend on :attr:`GroupValues.kinds` alone

    def skips_on_device(self, device: torch.device, groups: Sequence[Group]) -> bool:
        """Whether all classes can skip a step on the device, without the host."""
        return all(self.arithmetic_for(group).skips_on_device(device, group) for group in groups)

    def fused_adam(self, group: Group, device: torch.device) -> type[torch.optim.Optimizer] | None:
        """The group's class if it is torch's own AdamW or Adam, fused on the device."""
        arithmetic = self.arithmetic_for(group)
        return arithmetic.optimizer_class if arithmetic.is_fused_adam(group, device) else None

    def apply(
        self, segments: Sequence[Segment], gradients: Sequence[Tensor], overflow: Tensor, values: GroupValues
    ) -> None:
        """Update each segment by its class; see :meth:`BaseArithmetic.apply`."""
        batches: dict[BaseArithmetic, tuple[list[Segment], list[Tensor]]] = {}
        for segment, gradient in zip(segments, gradients, strict=True):
            batch = batches.setdefault(self.arithmetic_for(segment.group), ([], []))
            batch[0].append(segment)
            batch[1].append(gradient)
        for arithmetic, batch in batches.items():
            arithmetic.apply(*batch, overflow, values)

    def write_back(self, values: GroupValues) -> None:
        """The step is over: write what the classes have changed to the groups, of those without gradients, too."""
        for group in values.not_updated():
            self.arithmetic_for(group).count(group, values)
        values.write_back()


def class_name(optimizer_class: type) -> str:
    """The name under which a class is imported: ``torch.optim.Muon``, whatever file of torch's it is in."""
    module = optimizer_class.__module__
    public = getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class
    return f"{'torch.optim' if public else module}.{optimizer_class.__qualname__}"


def constructor_arguments(optimizer_class: type[torch.optim.Optimizer], group: Group) -> dict[str, Any]:
    """Those of a group's settings that the class's constructor needs: without a default, or not stored in groups.

    Raises:
        ValueError: one without a default is missing.
    """
    required = [p.name for p in _parameters_of(optimizer_class) if p.default is p.empty]
    missing = [name for name in required if name not in group]
    if missing:
        name = optimizer_class.__name__
        raise ValueError(
            f"a parameter group of {name} has no {' and no '.join(missing)}, and {name} has no default for it: put it "
            f"into the group, {{'params': [...], 'optimizer_class': {name}, '{missing[0]}': ...}}"
        )
    return {name: group[name] for name in required} | kept_by_class(optimizer_class, group)


def _refuse_unknown(arithmetic: BaseArithmetic, group: Group) -> None:
    known = [parameter.name for parameter in _parameters_of(arithmetic.optimizer_class)]
    unknown = [key for key in group if key not in {*known, *arithmetic.defaults, *_NO_SETTINGS}]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(arithmetic.optimizer_class).parameters.values())
    if unknown and not takes_any:
        raise TypeError(
            f"a parameter group of {arithmetic.name} has {unknown[0]!r}, which the class does not have; it has "
            f"{', '.join(known)}"
        )


def kept_by_class(optimizer_class: type[torch.optim.Optimizer], group: Group) -> dict[str, Any]:
    """Those of a group's settings that the class stores once, for all its groups."""
    parameters = _parameters_of(optimizer_class)
    required = {p.name: group[p.name] for p in parameters if p.default is p.empty and p.name in group}
    in_groups = optimizer_class([torch.zeros(2, 2, device="cpu")], **required).defaults
    return {p.name: group[p.name] for p in parameters if p.name in group and p.name not in in_groups}


def _parameters_of(optimizer_class: type[torch.optim.Optimizer]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(optimizer_class).parameters.values())[1:]
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
