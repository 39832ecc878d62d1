"""bf16 weights without masters, rounded stochastically: the bits of a plain loop, and what cannot go with them.

More of the bits are in ``test_programs.py``.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightstep
from lightstep import ConfigError
from lightstep.state import segment
from tests.covering import every_value
from tests.one_pass_on_cpu import few_probes, one_pass_fixture
from tests.reference.rounded_weights import (
    RoundedWeights,
    RoundedWithNearestMoments,
    RoundedWithStochasticInt8Moments,
    RoundedWithStochasticMoments,
)
from tests.unit import test_moments as with_masters
from tests.unit.test_moments import CLASSES, PLACES, ShortPair, homes_and_moments

__all__ = ["few_probes", "one_pass_fixture"]

KINDS = {
    ("float32", "nearest"): RoundedWeights,
    ("bfloat16", "nearest"): RoundedWithNearestMoments,
    ("bfloat16", "stochastic"): RoundedWithStochasticMoments,
    ("int8", "stochastic"): RoundedWithStochasticInt8Moments,
}
"""The reference for ``optimizer_state.moments`` and ``moments_rounding``."""

COUNTING = {name: given for name, given in CLASSES.items() if name != "SGD-momentum"}


class RoundedPair(ShortPair):
    """Both without masters."""

    has_masters = False
    references = KINDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"parameters": "bfloat16", "master_weights": "stochastic", **options})


@every_value(backend=PLACES, kind=KINDS, amsgrad=[False, True])
@pytest.mark.usefixtures("few_probes")
def test_one_kernel_does_all_of_it(
    backend: str, kind: tuple[str, str], amsgrad: bool, one_pass_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    options = {"backend": backend, "kind": kind, "rounding_seed": 2, "max_norm": 0.35, "overflow_at": (2,)}
    pair = RoundedPair(torch.optim.AdamW, settings, {**settings, "lr": 1e-3}, **options)
    pair.train(2)
    with monkeypatch.context() as steady:
        refused = lambda *_: pytest.fail("weights were rounded apart from the update")  # noqa: E731
        steady.setattr(segment.Segment, "_round", refused)
        pair.train(4)
    pair.resume()
    pair.train(2)
    assert one_pass_on_cpu["rounded"] > 0


def by_hand(state: dict[str, Any], **options: Any) -> Any:
    """A run on gradients from nowhere beside its reference: the optimizer."""
    state = {"moments_rounding": "stochastic", **state}
    return with_masters.by_hand(state, rounding_seed=2, master_weights="stochastic", references=KINDS, **options)


@homes_and_moments
def test_large_tensors_whole_and_cut(state: dict[str, Any], moments: str) -> None:
    optimizer = by_hand({**state, "moments": moments}, lr=1e-2, betas=(0.9, 0.999))
    assert with_masters.are_cut(optimizer) or state.get("backend") != "stream"


# -- from one setting to another ---------------------------------------------------------------------------------------


@every_value(
    backend=["resident", "stream"], order=[(True, "stochastic"), ("stochastic", True), ("stochastic", "stochastic")]
)
def test_checkpoints_convert(tmp_path: Path, order: tuple[Any, Any], backend: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    before, after = ({"precision": {"master_weights": kept}, "backend": backend} for kept in order)
    strategy, model, optimizer = with_masters.trained("bfloat16", steps=3, **before)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    _, loaded, other = with_masters.trained("bfloat16", tmp_path / "a", **after)
    for mine, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        state = dict(other.state[theirs]) if theirs in other.state else {}
        assert ("master" in state) is (order[1] is True and bool(state))
        if order == ("stochastic", True) and state:
            assert torch.equal(state["master"], mine.float())
    assert ("loaded masters" in caplog.text) is (order == (True, "stochastic"))
    with_masters.go_on(model, optimizer, range(3, 5))
    with_masters.go_on(loaded, other, range(3, 5))
    if order[0] == order[1]:
        assert all(map(torch.equal, model.parameters(), loaded.parameters()))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision.parameters": "float16"}, "with parameters float16: weights are rounded to bfloat16"),
        ({"precision.parameters": "float32"}, "with parameters float32: weights are rounded to bfloat16"),
        ({"precision.master_weights": "always"}, "'always': true or false is needed; also allowed: stochastic"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lightstep.Strategy.load("resident", overrides={"precision.master_weights": "stochastic", **changes})


def test_a_class_that_counts_no_steps_is_refused() -> None:
    strategy = lightstep.Strategy.load("resident", overrides={"precision.master_weights": "stochastic"})
    model = strategy.prepare_model(nn.Linear(4, 4))
    optimizer = strategy.create_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(ValueError, match=r"SGD \(momentum_buffer\), which updates .* counts no steps in its state"):
        optimizer.step()


def test_other_dtypes_and_values_are_refused() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    optimizer = lightstep.MixedPrecisionOptimizer([weight], torch.optim.AdamW, {}, master_weights="stochastic")
    with pytest.raises(TypeError, match=r"is in float16: weights are rounded to bfloat16"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"master_weights is 'nearest'; allowed: True, False, 'stochastic'"):
        lightstep.MixedPrecisionOptimizer([weight], torch.optim.AdamW, {}, master_weights="nearest")  # type: ignore[arg-type]
