"""Attributes that stay with the optimizer when something that wraps it runs the optimizer's methods as its own."""

from __future__ import annotations

from typing import Any


class KeptInside:
    """A changing attribute, kept in the dictionary ``instance._inside`` instead of on the instance.

    Lightning Fabric wraps an optimizer in an object whose class inherits from the optimizer's. Methods run with the
    wrapper as ``self``: it finds the optimizer's attributes, but what it sets would stay on the wrapper.

    Args:
        default: the value before the first assignment.
    """

    def __init__(self, default: Any = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance._inside.get(self._name, self._default)

    def __set__(self, instance: Any, value: Any) -> None:
        instance._inside[self._name] = value
