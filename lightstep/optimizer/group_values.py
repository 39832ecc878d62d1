"""The hyper-parameters of an optimizer's groups during one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["GroupValues", "equal_settings", "settings_of"]


class GroupValues:
    """The hyper-parameters of every group at the beginning of a step, and what the base optimizer writes into them.

    All units of a step see the values of its beginning. So a class that counts in its groups (schedule-free methods
    do), or in attributes of its own, counts steps and not units.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = list(groups)
        self._initial = {id(group): settings_of(group) for group in groups}
        self._written: dict[int, dict[str, Any]] = {}
        self._attributes: dict[torch.optim.Optimizer, dict[str, Any]] = {}

    def changed(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """The names of settings that somebody has changed since. A tensor on an accelerator counts as unchanged: the
        host does not wait for it."""
        known = [(group, self._initial[id(group)]) for group in groups if id(group) in self._initial]
        return sorted(
            {
                key
                for group, then in known
                for key, now in settings_of(group).items()
                if not (isinstance(now, Tensor) and now.device.type != "cpu")
                and not (key in then and _same_value(now, then[key]))
            }
        )

    def copy_mutable(self) -> None:
        """Copy the groups' tensors (a learning rate) and lists (betas): later writes to them do not reach this step."""
        for settings in self._initial.values():
            settings.update({key: _copied(value) for key, value in settings.items()})

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """A copy of one group's settings, lists included: the base optimizer may write into it."""
        return {key: _copied(v) if type(v) in (list, dict) else v for key, v in self._initial[id(group)].items()}

    def restore_attributes(self, optimizer: torch.optim.Optimizer) -> None:
        """Set numbers that a class keeps as attributes (``self.t += 1``) back to their values before the step."""
        numbers = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}
        before = self._attributes.setdefault(optimizer, numbers)
        for added in numbers.keys() - before.keys():
            delattr(optimizer, added)
        vars(optimizer).update(before)

    def record_writes(self, group: dict[str, Any], seen: Mapping[str, Any]) -> None:
        """Record what the base optimizer has changed in the settings that it was given for a group."""
        initial = self._initial[id(group)]
        changed = {
            key: value
            for key, value in seen.items()
            if key not in ("params", "fused")
            and initial.get(key) is not value
            and not (type(value) in (list, dict) and _same_value(value, initial.get(key)))
        }
        self._written.setdefault(id(group), {}).update(changed)

    def matches(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a step that begins now would see the same values."""
        now = [settings_of(group) for group in groups]
        then = [self._initial.get(id(group), {}) for group in groups]
        return len(groups) == len(self._groups) and all(
            a.keys() == b.keys() and all(_same_value(a[key], b[key]) for key in a)
            for a, b in zip(now, then, strict=True)
        )

    def roll_back(self) -> None:
        """The step did not take place: classes that count in attributes of their own have not counted it."""
        for optimizer in self._attributes:
            self.restore_attributes(optimizer)

    def write_back(self) -> None:
        """The step is over: write what the base optimizer has changed to the live groups."""
        for group in self._groups:
            group.update(self._written.get(id(group), {}))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer_class")}


def equal_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two groups' settings are equal, apart from the learning rate: it scales updates and mixes nothing."""
    keys = (first.keys() | second.keys()) - {"lr", "initial_lr"}
    return all(key in first and key in second and _same(first[key], second[key]) for key in keys)


def _same(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and not isinstance(first, Tensor) and bool(first == second))


def _copied(value: Any) -> Any:
    """A copy of a tensor, or of a tuple (betas), list or dictionary with what it holds."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _same_value(now: Any, then: Any) -> bool:
    """Tensors are compared by value on the CPU; on an accelerator that would make the host wait, so they differ."""
    if type(now) is type(then) and type(now) in (tuple, list):
        return len(now) == len(then) and all(map(_same_value, now, then))
    if type(now) is type(then) is dict:
        return now.keys() == then.keys() and all(_same_value(now[key], then[key]) for key in now)
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.device.type == then.device.type == "cpu" and torch.equal(now, then)
    return _same(now, then)
