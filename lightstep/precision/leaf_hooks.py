"""Hooks on parameters, registered and removed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

__all__ = ["LeafHooks"]

Hook = Callable[[Tensor], None]
Make = Callable[[Tensor], Hook]


class LeafHooks:
    """A tensor hook, a post-accumulate-grad hook or both on each of several parameters.

    Autograd calls a tensor hook with each new gradient before it is added to ``p.grad`` (``torch.autograd.grad`` does
    too, and then adds nothing), and a post-accumulate-grad hook with the parameter afterwards.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, list[RemovableHandle]] = {}

    def set_parameters(
        self, parameters: Iterable[Tensor], before: Make | None = None, after: Make | None = None
    ) -> None:
        """Keep hooks on exactly these parameters; on frozen ones too, which may be unfrozen at any time.

        Args:
            before, after: return the hook for a parameter; it must not refer to the parameter.
        """
        wanted = dict.fromkeys(parameters)
        for parameter in [parameter for parameter in self._handles if parameter not in wanted]:
            for handle in self._handles.pop(parameter):
                handle.remove()
        for parameter in wanted:
            if parameter not in self._handles:
                self._handles[parameter] = _register(parameter, before, after)

    def put_last(self) -> None:
        """Have post-accumulate-grad hooks called after those that others have registered since, which may still change
        the gradient."""
        for parameter, handles in self._handles.items():
            hooks = parameter._post_accumulate_grad_hooks
            for handle in handles:
                if handle.id in hooks and next(reversed(hooks)) != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)


def _register(parameter: Tensor, before: Make | None, after: Make | None) -> list[RemovableHandle]:
    frozen = not parameter.requires_grad
    if frozen:  # torch registers hooks only on tensors that require gradients, and keeps them
        parameter.requires_grad_(True)
    try:
        handles = []
        if before is not None:
            handles.append(parameter.register_hook(_excluded(before(parameter))))
        if after is not None:
            handles.append(parameter.register_post_accumulate_grad_hook(_excluded(after(parameter))))
        return handles
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _excluded(hook: Hook) -> Hook:
    """Exclude the hook from serialization and from tracing by compiled autograd."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark, without dynamo
    return unserializable_hook(hook)
