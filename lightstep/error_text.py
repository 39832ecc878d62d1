"""Values and errors as text for messages, without the elements of tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["error_text", "value_text"]

_LONGEST = 1000


def error_text(error: BaseException) -> str:
    """Type and message of an error. A ``KeyError`` of a parameter, for example, would print all of its elements."""
    holds_values = any(isinstance(argument, (Tensor, list, tuple, dict)) for argument in error.args)
    text = ", ".join(map(value_text, error.args)) if holds_values else str(error)
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else f'{text[:_LONGEST]} ...'}"


def value_text(value: Any, longest: int = 200) -> str:
    """``repr(value)``, shortened; tensors by shape and dtype."""
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        shown = [value_text(each) for each in value[:3]]
        return f"[{', '.join(shown)}{', ...' if len(value) > 3 else ''}]"
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]} ..."
