"""Whether an optimizer class needs whole tensors: it says so, it is known, or it is tested on small tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightstep.optimizer.group_values import equal_settings, settings_of

__all__ = ["counts_steps", "is_torchs_own", "needs_whole_tensors", "undecorated_step"]

_NOT_ELEMENT_WISE = {"Adafactor", "Muon", "Shampoo", "SOAP", "Adam_mini"}
_CPU = torch.device("cpu")  # explicit everywhere: users may change torch's default device and dtype


def needs_whole_tensors(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], group: Mapping[str, Any]
) -> bool:
    """Whether an optimizer is not element-wise under the settings of one group.

    A class says so by ``whole_tensors = True`` or ``False``. A few classes are known. Others are tested: updating a
    matrix, and its two halves as flat tensors, must give the same bits.

    Raises:
        TypeError: the update of a parameter depends on the others, so that units cannot be updated one by one.
    """
    declared = getattr(optimizer_class, "whole_tensors", None)
    if declared is not None:
        return bool(declared)
    if optimizer_class.__name__ in _NOT_ELEMENT_WISE:
        return True
    return (
        not is_torchs_own(optimizer_class)
        and _ElementWiseTest(optimizer_class, hyperparameters, group).mixes_elements()
    )


def counts_steps(
    optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], shape: tuple[int, ...]
) -> bool:
    """Whether a step changes the optimizer's groups or numeric attributes, besides parameters and state.

    Args:
        shape: the shape of a parameter that the class takes.
    """
    parameter = torch.zeros(shape, dtype=torch.float32, device=_CPU)
    parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_class([parameter], **copy.deepcopy(dict(hyperparameters)))

    def numbers() -> tuple[dict[str, Any], dict[str, Any]]:
        kept = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float, bool)}
        return kept, copy.deepcopy(settings_of(optimizer.param_groups[0]))

    (kept, settings), _ = numbers(), undecorated_step(optimizer_class)(optimizer)
    now = numbers()
    return kept != now[0] or not equal_settings(settings, now[1]) or settings.get("lr") != now[1].get("lr")


def is_torchs_own(optimizer_class: type) -> bool:
    return optimizer_class.__module__.startswith("torch.optim.")


class _ElementWiseTest:
    """Two updates of small matrices: whole and in halves, in one optimizer and in two."""

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], hyperparameters: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        self._class, self._hyperparameters, self._group = optimizer_class, hyperparameters, settings_of(group)
        self.keeps_other_shapes = False
        numbers = torch.randn(
            2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device=_CPU
        )
        self._numbers = [list(own) for own in numbers]

    def mixes_elements(self) -> bool:
        """Whether the class is not element-wise; ``False`` if it cannot be tested, or draws random numbers."""
        first, second = self._numbers
        try:
            whole = self._updated([first])
            if self.keeps_other_shapes:  # such as row sums: flat data has no room for them
                return True
            random = not torch.equal(whole[0], self._updated([first], seed=1)[0])
            together, apart = self._updated([first, second]), [*whole, *self._updated([second])]
        except Exception:  # set-up raises whatever is wrong
            return False
        if random:
            return False
        if not all(torch.equal(*pair) for pair in zip(together, apart, strict=True)):
            raise TypeError(
                f"{self._class.__name__} computes something over all its parameters together (a norm of its own?), "
                "and lightstep applies it to one unit of parameters after the other; clip with clipping.max_norm, or "
                "use an optimizer whose update of a parameter depends on that parameter alone"
            )
        try:
            halves = self._updated([list(part) for part in zip(*(n.view(-1).split(128) for n in first), strict=True)])
        except Exception:  # it takes matrices only
            return True
        return not torch.equal(whole[0].view(-1), torch.cat(halves))

    def _updated(self, numbers: Sequence[Sequence[Tensor]], seed: int = 0) -> list[Tensor]:
        """The values after both updates, from ``[value, gradient, gradient]`` for each parameter of one optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parameters = [value.clone() for value, *_ in numbers]
            settings = copy.deepcopy(self._group)
            optimizer = self._class([{**settings, "params": parameters}], **copy.deepcopy(dict(self._hyperparameters)))
            for gradients in list(zip(*numbers, strict=True))[1:]:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.clone()
                with torch.no_grad():
                    undecorated_step(self._class)(optimizer)
            self.keeps_other_shapes = any(
                isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape
                for parameter in parameters
                for value in optimizer.state[parameter].values()
            )
        return parameters


def undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """``step`` without the wrapper that calls hooks: the outer optimizer calls them, once per step."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
