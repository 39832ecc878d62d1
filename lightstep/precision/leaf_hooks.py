"""Hooks on parameters, registered and removed together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

__all__ = ["LeafHooks", "runs_compiled"]

Hook = Callable[[Tensor], None]


class LeafHooks:
    """A hook before each new gradient, a hook after it or both, on each of several parameters.

    Autograd calls the first one before it adds a gradient to ``p.grad`` (``torch.autograd.grad`` does too, and then
    adds nothing), and the second one, a post-accumulate-grad hook, afterwards.

    There are no weak references to the parameters: ``torch.utils.swap_tensors`` refuses tensors that have some, and
    ``model.to(...)`` swaps DTensors.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, list[RemovableHandle]] = {}
        self._by_id: dict[int, Tensor] = {}
        self._attributes: dict[Tensor, dict[str, Any]] = {}  # ``vars(p)`` when its hooks were registered

    def set_parameters(
        self,
        parameters: Iterable[Tensor],
        before: Hook | None = None,
        after: Hook | None = None,
        sums_only: bool = False,
    ) -> None:
        """Keep hooks on exactly these parameters; on frozen ones too, which may be unfrozen at any time.

        Args:
            before, after: functions that are called with the parameter; they must not refer to one.
            sums_only: the first one is not called if there is no gradient to add to.
        """
        wanted = dict.fromkeys(parameters)
        for parameter in [parameter for parameter in self._handles if parameter not in wanted]:
            del self._by_id[id(parameter)], self._attributes[parameter]
            for handle in self._handles.pop(parameter):
                handle.remove()
        for parameter in wanted:
            if parameter not in self._handles:
                self._by_id[id(parameter)], self._attributes[parameter] = parameter, vars(parameter)
                self._handles[parameter] = self._register(parameter, before, after, sums_only)

    def restore(self) -> list[Tensor]:
        """Make autograd call the hooks of parameters that have been swapped (``model.to`` of DTensors): a swap takes
        the tensor from its hooks, and its attributes too. Returns these parameters."""
        swapped = [p for p, attributes in self._attributes.items() if p.__dict__ is not attributes]
        for parameter in swapped:
            _register_again(parameter)
            self._attributes[parameter] = vars(parameter)
        return swapped

    def put_last(self) -> None:
        """Have post-accumulate-grad hooks called after those that others have registered since, which may still change
        the gradient."""
        for parameter, handles in self._handles.items():
            hooks = parameter._post_accumulate_grad_hooks
            for handle in handles:
                if handle.id in hooks and [*hooks][-1] != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)

    def _register(
        self, parameter: Tensor, before: Hook | None, after: Hook | None, sums_only: bool
    ) -> list[RemovableHandle]:
        frozen = not parameter.requires_grad
        if frozen:  # torch registers hooks only on tensors that require gradients, and keeps them
            parameter.requires_grad_(True)
        handles: list[RemovableHandle] = []
        try:
            if before is not None:
                hook = _called_with_parameter(weakref.ref(self), id(parameter), before, sums_only)
                handles.append(parameter.register_hook(_excluded(hook)))
            if after is not None:
                handles.append(parameter.register_post_accumulate_grad_hook(_excluded(after)))
            return handles
        except BaseException:  # an interrupt: else the next attempt would have them called twice
            for handle in handles:
                handle.remove()
            raise
        finally:
            if frozen:
                parameter.requires_grad_(False)


def _called_with_parameter(reference: weakref.ref[LeafHooks], number: int, hook: Hook, sums_only: bool) -> Hook:
    """A tensor hook, which autograd calls with the gradient; ``number`` is the parameter's ``id``."""

    def with_parameter(_: Tensor) -> None:
        hooks = reference()
        if hooks is not None and number in hooks._by_id:
            parameter = hooks._by_id[number]
            if not sums_only or parameter.grad is not None:
                hook(parameter)

    return with_parameter


def runs_compiled() -> bool:
    """Whether compiled autograd runs backwards: hooks are then called after it has read ``p.grad``."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and (module.compiled_autograd_enabled or module.in_compiled_autograd_region)


def _register_again(parameter: Tensor) -> None:
    """Setting torch's tables of hooks registers them with autograd."""
    hooks, later = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if hooks is not None:
        parameter._backward_hooks = hooks
    if later is not None:
        parameter._post_accumulate_grad_hooks = later


def _excluded(hook: Hook) -> Hook:
    """Exclude the hook from serialization and from tracing by compiled autograd."""
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark, without dynamo
    return unserializable_hook(hook)
