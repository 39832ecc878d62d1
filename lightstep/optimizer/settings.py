"""Settings that are checked whenever somebody assigns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightstep.precision.loss_scale import LossScale

__all__ = ["Fixed", "OfEngine", "Setting", "check_loss_scale"]


class Setting:
    """An attribute of the engine.

    Args:
        check: returns the value, or raises.
    """

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else vars(instance)[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = self._check(value)


class Fixed(Setting):
    """One that cannot change any more once parameters have been taken charge of."""

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in vars(instance) and instance.is_set_up:
            raise AttributeError(
                f"{self._name} is {vars(instance)[self._name]!r} since the optimizer took charge of its parameters; "
                "to train on with another one, make a new optimizer and load this one's state_dict()"
            )
        super().__set__(instance, value)


class OfEngine:
    """An attribute of the optimizer that is its engine's.

    Lightning Fabric wraps an optimizer in an object that runs the optimizer's methods with itself as ``self``: the
    engine is the same for both.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.engine, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.engine, self._name, value)


def check_loss_scale(value: Any) -> LossScale:
    """Raises :class:`TypeError` for anything else."""
    if not isinstance(value, LossScale):
        raise TypeError(
            f"loss_scale is {value!r}; a lightstep.LossScale is needed, for example lightstep.DynamicLossScale()"
        )
    return value
