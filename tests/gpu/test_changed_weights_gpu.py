"""The bits that updates set on a GPU, beside the kernel of AdamW, on streams that sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightstep.optimizer.changed_weights import ChangedWeights, Changes
from tests.covering import every_pair
from tests.unit import test_changed_weights as on_cpu
from tests.unit.test_changed_weights import CREATE, Run
from tests.unit.test_publishing import STATES
from tests.unit.test_stream import random_sleeps

pytestmark = pytest.mark.gpu


@every_pair(state=STATES, optimizer=CREATE, sleeps=[False, True])
def test_updates_set_the_bits_of_what_they_change(
    state: str, optimizer: str, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(STATES[state], optimizer, lr=1e-2 if optimizer == "sgd" else 1e-4)
    run.step()
    if sleeps and state != "resident":
        random_sleeps(run.optimizer.engine.backend.lanes, 0)
    compared: list[Any] = []
    monkeypatch.setattr("lightstep.rollout.staged_weights.changed_words", lambda *given: compared.append(given))
    run.publish()
    before, deltas = run.weights(), 0
    for _ in range(5):
        run.step()
        run.publish()
        now = run.weights()
        assert on_cpu.same(run.receiver.weights, now)
        assert run.receiver.words == sum(int((now[name] != before[name]).sum()) for name in run.receiver.as_deltas)
        deltas += len(run.receiver.as_deltas)
        before = now
    assert deltas > 10 and not compared
    run.strategy.close()


def test_sets_follow_steps_that_nobody_waits_for() -> None:
    """The bits are taken, and set again, while the device is still at earlier work."""
    run = Run(STATES["overlap"])
    run.step()
    random_sleeps(run.optimizer.engine.backend.lanes, 1)
    for _ in range(12):
        run.step()
        expected = run.weights()
        run.publish(wait=False)
        run.step()
        run.strategy.wait_for_publication()
        assert on_cpu.same(run.receiver.weights, expected)
    run.strategy.close()


def test_a_thread_reads_the_bits_behind_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have long been copied; the device is late with the bits alone."""
    run = Run(STATES["overlap"])
    take = ChangedWeights.take

    def late(changed: ChangedWeights) -> Changes:
        torch.cuda._sleep(100_000_000)
        return take(changed)

    monkeypatch.setattr(ChangedWeights, "take", late)
    run.step()
    run.publish()
    for _ in range(3):
        run.step()
        expected = run.weights()
        run.publish(wait=False)
        run.strategy.wait_for_publication()
        assert on_cpu.same(run.receiver.weights, expected) and run.receiver.as_deltas
    run.strategy.close()
