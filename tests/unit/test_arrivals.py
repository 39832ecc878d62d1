"""In which order units are expected: that in which the last backward completed their layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightstep.optimizer import arrivals as arrivals_module
from lightstep.optimizer.arrivals import Arrivals
from lightstep.state.schema import Managed, Unit

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
            item = self.items[name]
            number = self.arrivals.add_gradient(item, item.local, {})
            assert number == self.arrivals.layer_of[item]
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


def test_what_was_planned_holds_until_units_or_their_order_change() -> None:
    counted = Counted()
    counted.lay_out("embed", "a", "b", "norm", "head")
    seen = [counted.arrivals.changes]
    for completed in (AS_FSDP2, AS_FSDP2, [], ["norm", "a", "embed"], ["norm", "a", "embed"]):
        counted.backward(completed)
        seen.append(counted.arrivals.changes)
    counted.lay_out("embed a", "b", "norm head")
    seen.append(counted.arrivals.changes)
    assert [later - before for before, later in pairwise(seen)] == [1, 0, 0, 1, 0, 1]


def test_layers_that_are_staged_together_come_when_the_last_of_them_is_complete() -> None:
    counted = Counted()
    counted.lay_out("embed a", "b", "norm head")
    assert counted.expected() == ["2 norm head", "1 b", "0 embed a"]
    assert counted.backward(AS_FSDP2) == ["1 b", "0 embed a", "2 norm head"]
    assert counted.backward(["head", "a", "norm", "embed", "b"]) == ["2 norm head", "0 embed a", "1 b"]


class Stream:
    """A stream that says what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self._said = name, said

    def record_event(self, event: list[str]) -> None:
        event[:] = [self.name]

    def wait_event(self, event: list[str]) -> None:
        self._said.append(f"{self.name} waits for {event[0]}")


def test_gradients_of_several_streams_are_all_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued for a layer comes behind all of its gradients, on whatever streams they were finished."""
    said: list[str] = []
    main, side = Stream("main", said), Stream("side", said)
    on = dict(zip(LAYERS, [main, side, side, main, main], strict=True))
    weights = {name: nn.Parameter(torch.zeros(1, device="meta")) for name in LAYERS}
    items = {own: Managed(own, own.detach(), {}, name) for name, own in weights.items()}
    current = [main]
    for name, own in weights.items():  # they are called before those of `Arrivals`
        own.register_post_accumulate_grad_hook(lambda _, stream=on[name]: current.__setitem__(0, stream))
    made: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current[0])
    monkeypatch.setattr(arrivals_module.torch, "Event", lambda _: made.append([]) or made[-1])
    arrivals = Arrivals()
    unit = Unit(0, tuple((item, 0, 1) for item in items.values()))
    arrivals.set_layers([[*items.values()]], [unit], batched=True)
    for _ in range(2):
        said.clear()
        with arrivals.listening(lambda item: said.append(item.name)):
            for name in reversed(LAYERS):
                weights[name].sum().backward()
        assert said == [
            *("head", "norm", "side waits for main", "b", "a", "main waits for side", "embed"),
        ]
    assert len(made) == 1, "no event is made in the second backward"


def test_a_gradient_that_comes_twice_counts_once() -> None:
    """A layer is complete with the first gradient of its last parameter, and only then."""
    two = [Counted().items[name] for name in ("a", "b")]
    arrivals = Arrivals()
    arrivals.set_layers([two], [Unit(0, tuple((item, 0, 1) for item in two))], batched=True)
    arrived: dict[Managed, torch.Tensor] = {}
    given = [two[0], two[0], two[1], two[1]]
    assert [arrivals.add_gradient(item, item.local, arrived) for item in given] == [None, None, 0, None]
