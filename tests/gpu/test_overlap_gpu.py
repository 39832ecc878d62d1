"""Updates that are tried in backward, on a GPU: resident's bits with sleep kernels in every lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightstep.optimizer import overlap, queue
from lightstep.optimizer.overlap import SpeculativeUpdates
from tests.distributed.ranks import Pool
from tests.distributed.test_update_times import check_redone_twice
from tests.gpu.test_next_forward_gpu import Training
from tests.unit.test_next_forward import assert_same
from tests.unit.test_overlap import (
    BETWEEN,
    DEFERRED,
    LOOSE,
    NEVER,
    OVERLAP,
    RESIDENT,
    TIGHT,
    counted_verdicts,
    write_after_the_step,
)

pytestmark = pytest.mark.gpu
verdicts = pytest.fixture(name="verdicts")(counted_verdicts.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_LONGEST_PAUSE", 0)
    monkeypatch.setattr(SpeculativeUpdates, "_update_pause", lambda self: setattr(self, "_pause", 0))


@pytest.mark.parametrize("parameters", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("clipping", [NEVER, LOOSE, TIGHT], ids=["never", "sometimes", "always"])
@pytest.mark.usefixtures("no_pause")
def test_sleep_kernels_in_every_lane(
    parameters: str, clipping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, verdicts: Counter[str]
) -> None:
    half = parameters == "float16"
    scale = {"kind": "dynamic", "init_scale": 2.0**17, "growth_interval": 1} if half else None
    expected = Training(RESIDENT, parameters, clipping=clipping, loss_scale=scale)
    losses, wanted = expected.train(8), expected.snapshot()
    for seed in range(12):
        monkeypatch.setattr(queue, "SUBMIT_IN_STEP", (0, 1, 3, 48)[seed % 4])
        monkeypatch.setattr(queue, "SUBMIT_AHEAD", seed % 3)
        tested = Training(OVERLAP, parameters, clipping=clipping, loss_scale=scale)
        tested.optimizer.engine.queue.early._link_share.fraction = (1.0, 0.6, 0.3)[seed % 3]
        tested.assert_bits(losses, wanted, seed)
    assert verdicts["commit"] or clipping is TIGHT
    assert verdicts["redo"] or clipping is NEVER


@pytest.mark.parametrize("act", BETWEEN, ids=lambda act: act.__name__)
def test_what_happens_between_backward_and_step(act: Callable[[Any], None]) -> None:
    found = []
    for state in (OVERLAP, RESIDENT):
        training: Any = Training(state, clipping=NEVER)
        training.named = dict(training.model.named_parameters())
        training.train(3)
        if state is OVERLAP:
            training.delays(1)
        with training.strategy.accumulate(training.model, last=True):
            training.optimizer.backward(training.loss())
        act(training)
        training.optimizer.step()
        training.steps += 1
        training.train(2)
        found.append(training.snapshot())
    assert_same(*found)


def test_writes_to_gradients_and_clipping_are_redone_on_shards() -> None:
    """FSDP2 on one rank: gradients arrive on its own streams, behind its reduction."""
    ranks = Pool()
    try:
        ranks.run(check_redone_twice, 1)
    finally:
        ranks.close()


@pytest.mark.parametrize("what", ["weights", "gradients"])
@pytest.mark.parametrize("state", [OVERLAP, DEFERRED], ids=["overlap", "next_forward"])
def test_what_a_deferred_update_needs_is_not_written_to(state: dict[str, Any], what: str, tmp_path: Path) -> None:
    write_after_the_step(Training, state, what, tmp_path)
