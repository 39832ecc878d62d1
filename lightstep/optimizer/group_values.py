"""The hyper-parameters of an optimizer's groups during one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CLASS", "KEPT", "GroupValues", "copied", "equal_settings", "same_value", "settings_of"]

CLASS = "optimizer_class"
"""An entry of a group: the name of its class, if that is not the optimizer's own."""
KEPT = "kept_by_class"
"""An entry of a group: what classes keep outside groups and parameters, by class (:meth:`GroupValues.kept`)."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_IMMUTABLE = (*_PLAIN, tuple)


class GroupValues:
    """The hyper-parameters of every group at the beginning of a step, and what the base optimizer writes into them.

    All units of a step see the values of its beginning. So a class that counts in its groups (schedule-free methods
    do), in attributes of its own, or in ``self.state["k"]`` (MADGRAD does), counts steps and not units.

    Attributes:
        initial: each group's settings at the beginning, by the group's ``id``; only to be read.
        kinds: what decides how each group's class runs, likewise: its name, ``fused`` and ``foreach``.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = list(groups)
        self.initial = {id(group): settings_of(group) for group in groups}
        self.kinds = {id(group): (group.get(CLASS), group.get("fused"), group.get("foreach")) for group in groups}
        self._written: dict[int, dict[str, Any]] = {}
        self._updated: set[int] = set()

    def changed(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """The names of settings that somebody has changed since. A tensor on an accelerator counts as unchanged: the
        host does not wait for it."""
        known = [(group, self.initial[id(group)]) for group in groups if id(group) in self.initial]
        return sorted(
            {
                key
                for group, then in known
                for key, now in settings_of(group).items()
                if not (isinstance(now, Tensor) and now.device.type != "cpu")
                and not (key in then and same_value(now, then[key]))
            }
        )

    def copy_mutable(self) -> None:
        """Copy the groups' tensors (a learning rate) and lists (betas): later writes to them do not reach this step."""
        for settings in self.initial.values():
            settings.update({key: copied(value) for key, value in settings.items() if type(value) not in _PLAIN})

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
            if key not in ("params", "fused")
            and not (type(value) in _IMMUTABLE and key in given and value is given[key])  # most of them
            and not _is_as_given(value, given.get(key), initial.get(key))
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
