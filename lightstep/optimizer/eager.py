"""Contexts and decorators that keep ``torch.compile`` and inference mode out of the library's own work."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

__all__ = ["eager", "eager_backward", "no_grad_no_inference"]

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` without importing ``torch._dynamo``, which takes as long as ``import torch``."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*arguments, **keywords)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo checks before it traces a function
    return cast(Function, call)


@contextlib.contextmanager
def eager_backward() -> Iterator[None]:
    """Switch compiled autograd off: it cannot trace hooks, or gradients with another dtype than their parameter's.

    The backward of a compiled forward stays compiled.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    with contextlib.nullcontext() if compiled is None else compiled._disable():
        yield


@contextlib.contextmanager
def no_grad_no_inference() -> Iterator[None]:
    """``torch.no_grad()`` with inference mode switched off.

    Tensors made under ``torch.inference_mode()`` cannot be written to outside of it. Evaluation and generation run
    under it, and may call into the library, which then allocates memory that later steps write to.
    """
    switched_off = torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
    with switched_off, torch.no_grad():
        yield
