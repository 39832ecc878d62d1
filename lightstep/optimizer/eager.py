"""Keeping ``torch.compile`` out: the library's own work is nothing to trace."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

__all__ = ["eager", "eager_backward", "own_work"]

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """``torch.compiler.disable`` without importing ``torch._dynamo``, which takes as long as ``import torch``."""
    untraced: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*arguments, **keywords)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what it asks of a function before it traces it
    return cast(Function, call)


@contextlib.contextmanager
def eager_backward() -> Iterator[None]:
    """Without compiled autograd, which can trace neither hooks nor gradients of another dtype than their parameter's.

    Backwards of compiled forwards stay compiled.
    """
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    with contextlib.nullcontext() if compiled is None else compiled._disable():
        yield


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Without gradients; and what is made in here may be written to afterwards.

    Tensors made under ``torch.inference_mode()`` may not, outside of it. Evaluation and generation run under it, and
    what they call takes memory that later steps use.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
