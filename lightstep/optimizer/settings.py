"""Settings of an optimizer that are checked whenever somebody assigns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightstep.optimizer.borrowed import KeptInside
from lightstep.precision.loss_scale import LossScale

__all__ = ["Fixed", "Setting", "check_loss_scale"]


class Setting(KeptInside):
    """An attribute of the optimizer, whatever wraps it.

    Args:
        check: returns the value, or raises.
    """

    def __init__(self, check: Callable[[Any], Any]) -> None:
        super().__init__()
        self._check = check

    def __set__(self, instance: Any, value: Any) -> None:
        super().__set__(instance, self._check(value))


class Fixed(Setting):
    """One that cannot change any more once the optimizer is set up."""

    def __set__(self, instance: Any, value: Any) -> None:
        if self._name in instance._inside and instance.is_set_up:
            raise AttributeError(
                f"{self._name} is {instance._inside[self._name]!r} since the optimizer took charge of its parameters; "
                "to train on with another one, make a new optimizer and load this one's state_dict()"
            )
        super().__set__(instance, value)


def check_loss_scale(value: Any) -> LossScale:
    """Raises :class:`TypeError` for anything else."""
    if not isinstance(value, LossScale):
        raise TypeError(
            f"loss_scale is {value!r}; a lightstep.LossScale is needed, for example lightstep.DynamicLossScale()"
        )
    return value
