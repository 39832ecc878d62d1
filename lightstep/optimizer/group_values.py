"""The hyper-parameters of an optimizer's groups, as one step reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["GroupValues", "equal_settings", "settings_of"]


class GroupValues:
    """The hyper-parameters of every group as one step reads them, and what the base optimizer writes into them.

    All units of a step see the values it began with. So a class that counts in its groups (schedule-free methods do),
    or in attributes of its own, counts steps and not units.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = list(groups)
        self._read = {id(group): settings_of(group) for group in groups}
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
        now = [settings_of(group) for group in groups]
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


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer_class")}


def equal_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
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
