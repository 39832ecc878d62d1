"""How many units are tried in backward, by what the device's events tell about the last one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightstep.optimizer import arrivals
from lightstep.optimizer.arrivals import LinkShare, evenly_spaced

LAYERS = 10
LATE, ON_TIME, EARLY = 4.0, 0.25, -0.25
"""How many layers the lane is behind the backward."""


class Event:
    at: float
    reached = True

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at

    def query(self) -> bool:
        return self.reached


class Lane:
    """Its work so far is over at ``now``."""

    now = 0.0

    def record(self, event: Event) -> None:
        event.at = self.now


class Share(LinkShare):
    """On a device whose clock the test sets; one layer takes one unit of time."""

    def __init__(self, fraction: float = 1.0) -> None:
        self.main, self.compute = Lane(), Lane()
        self.store = SimpleNamespace(host_weights=None)
        super().__init__(self.store)  # type: ignore[arg-type]
        self.device, self.fraction = torch.device("cuda"), fraction
        self.backward(LATE)  # the first one

    def backward(
        self,
        behind: float,
        layers: int = LAYERS,
        with_the_last: Sequence[float] = (),
        end: float = 0.0,
        over: bool = True,
        failed: bool = False,
    ) -> float:
        """What is tried after one with so many batches.

        Args:
            behind: in layers; each batch is tried so much later than the one behind it is complete.
            with_the_last: batches that are complete so much later than the last layer, and tried long after that.
            end: the backward goes on so much longer, in layers whose state stays on the device.
            over: all of it was waited for.
            failed: it raised.
        """
        self.main.now = 0.0
        self.mark(self.main)  # type: ignore[arg-type]
        for ready in range(1, layers + 1):
            self._batch(ready, ready + 1 + behind)
        for after in with_the_last:
            self._batch(layers + after, layers + 50)
        self.main.now += end
        if not failed:
            self.mark(self.main)  # type: ignore[arg-type]
        Event.reached = over
        self.adapt()
        return self.fraction

    def _batch(self, ready: float, done: float) -> None:
        self.main.now, self.compute.now = ready, done
        self.mark(self.main)  # type: ignore[arg-type]
        self.mark(self.compute)  # type: ignore[arg-type]


def test_less_is_tried_when_the_lane_is_behind() -> None:
    share = Share()
    assert share.backward(LATE) == pytest.approx(LAYERS / (LAYERS + LATE))
    assert share.backward(100.0) == pytest.approx(LAYERS / (LAYERS + LATE) / 2), "not less than half at a time"
    assert [share.backward(100.0) for _ in range(5)][-1] == 0.05


@pytest.mark.parametrize(("behind", "part"), [(LATE, 0.38), (ON_TIME, 0.5), (EARLY, 0.55)])
def test_what_is_complete_with_the_last_layer_does_not_count(behind: float, part: float) -> None:
    """It is complete within half a layer, and the lane is through with it long after backward."""
    assert Share(0.5).backward(behind, with_the_last=(0.01, 0.02, 0.03)) == pytest.approx(part, abs=0.03)


def test_more_and_more_is_tried_while_the_lane_is_early() -> None:
    share = Share(0.1)
    assert [share.backward(EARLY) for _ in range(5)] == pytest.approx([0.15, 0.25, 0.45, 0.85, 1.0])
    share.fraction = 0.1
    assert share.backward(EARLY) == pytest.approx(0.5), "in steps of 0.4 at the most"
    assert share.backward(ON_TIME) == pytest.approx(0.5)
    late = share.backward(LATE)
    assert {share.backward(EARLY) for _ in range(15)} == {late}, "not soon after it was late"
    assert [share.backward(EARLY) - late for _ in range(2)] == pytest.approx([0.05, 0.15])


def test_the_end_of_backward_counts_and_not_that_of_its_updates() -> None:
    assert Share(0.5).backward(LATE, end=6.0) == pytest.approx(0.55), "a layer earlier than it must be"
    late = Share(0.5).backward(LATE, end=2.0)
    assert late == pytest.approx(0.5 * 12 / 15), "it is three layers late"


@pytest.mark.parametrize("settings", [{"layers": 2}, {"layers": 0}, {"over": False}, {"failed": True}])
def test_a_backward_that_says_nothing(settings: dict[str, Any]) -> None:
    share = Share(0.5)
    assert share.backward(LATE, **settings) == share.backward(EARLY, **settings) == 0.5
    assert share.backward(EARLY) == pytest.approx(0.55)


class HostWeights:
    """The model waits in each backward so long, in layers, for weights and gradients that rest on the host."""

    def __init__(self) -> None:
        self.of_each: float | None = 0.0

    def waited(self) -> float | None:
        return self.of_each


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals.torch, "Event", lambda *_, **__: Event())


@pytest.fixture
def share() -> Share:
    share = Share()
    share.store.host_weights = HostWeights()
    return share


def test_what_the_model_waits_for_weights_counts(share: Share) -> None:
    """The lane is in time, but only because backward itself was held up by four tenths."""
    share.store.host_weights.of_each = 4.0
    assert share.backward(EARLY) == pytest.approx(0.6)
    assert share.backward(LATE) == pytest.approx(0.6 * 6 / (LAYERS + LATE), abs=0.05), "and so does the lane"


def test_what_rests_on_the_host_together_is_updated_together() -> None:
    def unit(group: object) -> Any:
        home = None if group is None else SimpleNamespace(group=group)
        return SimpleNamespace(owners=[SimpleNamespace(home=home)])

    alone = [unit(None) for _ in range(8)]
    assert len(evenly_spaced(alone, 0.5)) == 4
    groups = [object() for _ in range(4)]
    together = [unit(group) for group in groups for _ in range(3)]
    chosen = [groups.index(one.owners[0].home.group) for one in evenly_spaced(together, 0.5)]
    assert chosen in ([0, 0, 0, 2, 2, 2], [1, 1, 1, 3, 3, 3])
    assert len(evenly_spaced(together, 1.0)) == 12
