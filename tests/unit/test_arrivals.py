"""In which order units are expected: that in which the last backward completed their layers."""

from __future__ import annotations

import torch
from torch import nn

from lightstep.optimizer.arrivals import Arrivals
from lightstep.state.backend import Managed, Unit

LAYERS = ["embed", "a", "b", "norm", "head"]
AS_FSDP2 = ["b", "a", "embed", "norm", "head"]
"""What lies outside of the blocks comes last, in the order of the model."""


class Counted:
    """Layers of one parameter each, in units that are named after what is in them."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        parameters = {name: nn.Parameter(torch.zeros(1)) for name in LAYERS}
        self.items = {name: Managed(own, own.detach(), {}, name) for name, own in parameters.items()}
        self.units: list[Unit] = []

    def lay_out(self, *units: str) -> None:
        """A backward begins, with these units; without any with those of before."""
        if units:
            self.units = [Unit(n, tuple((self.items[name], 0, 1) for name in u.split())) for n, u in enumerate(units)]
        self.arrivals.set_layers([[item] for item in self.items.values()], self.units, batched=True)

    def backward(self, completed: list[str]) -> list[str]:
        """Layers are complete in this order; the units as the next backward expects them."""
        for name in completed:
            number = self.arrivals.layer_of(self.items[name])
            assert self.arrivals.count_gradient(number)
            self.arrivals.count_layer(number)
        self.lay_out()
        return self.expected()

    def expected(self) -> list[str]:
        return [_told(unit) for unit in self.arrivals.backward_order()]

    def last_in_backward(self) -> list[str]:
        return [_told(unit) for unit in self.arrivals.last_in_backward()]


def _told(unit: Unit) -> str:
    return f"{unit.index} {' '.join(owner.name for owner, _, _ in unit.parts)}"


def test_units_are_expected_as_the_last_backward_completed_them() -> None:
    counted = Counted()
    counted.lay_out("embed", "a", "a", "b", "norm", "head")
    reversed_order = ["5 head", "4 norm", "3 b", "2 a", "1 a", "0 embed"]
    assert counted.expected() == reversed_order
    in_that_of_fsdp2 = ["3 b", "2 a", "1 a", "0 embed", "4 norm", "5 head"]
    assert counted.backward(AS_FSDP2) == in_that_of_fsdp2
    assert counted.backward([]) == in_that_of_fsdp2, "nothing was complete, and nothing is known about the next one"
    assert counted.backward(["norm", "a", "embed"]) == ["4 norm", "2 a", "1 a", "0 embed", "5 head", "3 b"]
    counted.lay_out("embed", "a", "b", "norm", "head")
    assert counted.expected() == ["4 head", "3 norm", "2 b", "1 a", "0 embed"], "other units"


def test_what_is_complete_last_and_used_first() -> None:
    counted = Counted()
    counted.lay_out("embed", "a", "a", "b", "norm", "head")
    assert counted.last_in_backward() == ["0 embed"], "of the first backward, the reversed order is expected"
    counted.backward(AS_FSDP2)
    assert counted.last_in_backward() == [], "norm and head come last, but are not used first"
    counted.lay_out("embed", "norm", "head", "a", "a", "b")  # as FSDP2's root is gathered
    counted.backward(AS_FSDP2)
    assert counted.last_in_backward() == ["0 embed", "1 norm", "2 head"]
    counted.backward(["b", "norm", "a", "head"])
    assert counted.last_in_backward() == [], "neither is used first nor comes with what is"
    counted.backward(["embed", "norm", "head", "a", "b"])
    assert len(counted.last_in_backward()) == 6, "all of it, where one module is reduced as a whole"


def test_layers_that_are_staged_together_come_when_the_last_of_them_is_complete() -> None:
    counted = Counted()
    counted.lay_out("embed a", "b", "norm head")
    assert counted.expected() == ["2 norm head", "1 b", "0 embed a"]
    assert counted.backward(AS_FSDP2) == ["1 b", "0 embed a", "2 norm head"]
    assert counted.backward(["head", "a", "norm", "embed", "b"]) == ["2 norm head", "0 embed a", "1 b"]
