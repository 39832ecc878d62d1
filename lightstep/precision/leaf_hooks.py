"""Hooks on parameters, which an optimizer puts on in bulk and takes off with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

__all__ = ["LeafHooks"]

Hook = Callable[[Tensor], None]
Make = Callable[[Tensor], Hook]


class LeafHooks:
    """One tensor hook, one post-accumulate-grad hook or both on each of some parameters.

    Autograd calls a tensor hook with each new gradient before it is added to ``p.grad`` (``torch.autograd.grad`` does
    too, and then adds nothing), and a post-accumulate-grad hook with the parameter afterwards.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, list[RemovableHandle]] = {}

    def carry(self, parameters: Iterable[Tensor], before: Make | None = None, after: Make | None = None) -> None:
        """Exactly these carry hooks from now on, frozen ones too: they may be thawed at any time.

        Args:
            before, after: make the hook of one parameter, to which the hook must hold no reference of its own.
        """
        wanted = dict.fromkeys(parameters)
        for parameter in [parameter for parameter in self._handles if parameter not in wanted]:
            for handle in self._handles.pop(parameter):
                handle.remove()
        for parameter in wanted:
            if parameter not in self._handles:
                self._handles[parameter] = _registered(parameter, before, after)


def _registered(parameter: Tensor, before: Make | None, after: Make | None) -> list[RemovableHandle]:
    frozen = not parameter.requires_grad
    if frozen:  # torch takes hooks only of tensors that require gradients, and keeps them
        parameter.requires_grad_(True)
    try:
        handles = []
        if before is not None:
            handles.append(parameter.register_hook(_marked(before(parameter))))
        if after is not None:
            handles.append(parameter.register_post_accumulate_grad_hook(_marked(after(parameter))))
        return handles
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _marked(hook: Hook) -> Hook:
    """Neither saved with its parameter nor traced by compiled autograd."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark, without dynamo
    return unserializable_hook(hook)
