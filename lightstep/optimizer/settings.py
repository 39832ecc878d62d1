"""Descriptors for settings of the engine, checked on assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightstep.error_text import value_text
from lightstep.precision.loss_scale import LossScale

__all__ = ["EngineAttribute", "FixedSetting", "Setting", "check_loss_scale"]


class Setting:
    """A checked attribute of the engine.

    Args:
        check: returns the value to store, or raises.
        after: called with the engine when it has the value.
    """

    def __init__(self, check: Callable[[Any], Any], after: Callable[[Any], object] | None = None) -> None:
        self._check, self._after = check, after

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else vars(instance)[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._check(value)
        if self._after is not None:
            self._after(instance)


class FixedSetting(Setting):
    """A setting that cannot change after the set-up."""

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in vars(instance) and instance.is_set_up:
            raise AttributeError(
                f"{self._name} is {vars(instance)[self._name]!r} and cannot change once the optimizer has been set up; "
                "to continue with another value, make a new optimizer and load this one's state_dict()"
            )
        super().__set__(instance, value)


class EngineAttribute:
    """An attribute of the optimizer that is stored in its engine.

    Lightning Fabric wraps an optimizer in an object that runs the optimizer's methods with itself as ``self``. Both
    have the same engine.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.engine, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.engine, self._name, value)


def check_loss_scale(value: Any) -> LossScale:
    """``value`` itself; raises ``TypeError`` if it is not a :class:`LossScale`."""
    if not isinstance(value, LossScale):
        raise TypeError(
            f"loss_scale is {value_text(value)}; a lightstep.LossScale is needed, for example "
            "lightstep.DynamicLossScale()"
        )
    return value
