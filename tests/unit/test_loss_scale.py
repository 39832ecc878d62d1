"""Loss scales: the sequences of the issue, a plain-Python model of them, save and load, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightstep import ConstantLossScale, DynamicLossScale
from tests.reference.pair import through_bytes
from tests.reference.plain_loop import ReferenceScale

DYNAMIC: dict[str, Any] = {
    "init_scale": 256.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "hysteresis": 1,
    "min_scale": 1.0,
    "max_scale": 2.0**32,
}


def scales(loss_scale: Any, overflows: list[bool]) -> list[float]:
    seen = []
    for overflow in overflows:
        loss_scale.update(overflow)
        seen.append(float(loss_scale.scale))
    return seen


def test_ten_good_steps() -> None:
    expected = [256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]
    assert scales(DynamicLossScale(**DYNAMIC), [False] * 10) == expected


def test_eight_overflows() -> None:
    assert scales(DynamicLossScale(**{**DYNAMIC, "init_scale": 2.0**4}), [True] * 8) == [8, 4, 2, 1, 1, 1, 1, 1]


def test_eight_overflows_with_hysteresis() -> None:
    loss_scale = DynamicLossScale(**{**DYNAMIC, "init_scale": 2.0**4, "hysteresis": 2})
    assert scales(loss_scale, [True] * 8) == [16, 8, 4, 2, 1, 1, 1, 1]


def test_an_overflow_resets_the_growth_counter() -> None:
    loss_scale = DynamicLossScale(**{**DYNAMIC, "growth_interval": 3})
    assert scales(loss_scale, [False, False, True, False, False, False]) == [256, 256, 128, 128, 128, 256]


def test_hysteresis_refills_on_growth_and_not_on_a_good_step() -> None:
    loss_scale = DynamicLossScale(**{**DYNAMIC, "hysteresis": 2})
    # The first overflow is forgiven, a single good step refills nothing, growth does.
    steps = [True, False, True, False, False, True, True]
    assert scales(loss_scale, steps) == [256, 256, 128, 128, 256, 256, 128]


def test_the_maximum_holds_and_growth_at_it_still_counts() -> None:
    loss_scale = DynamicLossScale(**{**DYNAMIC, "max_scale": 600.0})
    assert scales(loss_scale, [False] * 6 + [True]) == [256, 512, 512, 600, 600, 600, 300]


def test_the_maximum_refills_hysteresis_like_any_growth() -> None:
    loss_scale = DynamicLossScale(**{**DYNAMIC, "max_scale": 256.0, "hysteresis": 2})
    assert scales(loss_scale, [True, False, False, True, True]) == [256, 256, 256, 256, 128]


@pytest.mark.parametrize("flag", [bool, lambda x: torch.tensor(float(x)), lambda x: torch.tensor(x)])
def test_the_flag_is_a_bool_or_a_zero_dim_tensor(flag: Any) -> None:
    loss_scale = DynamicLossScale(**DYNAMIC)
    for overflow in (False, False, True):
        loss_scale.update(flag(overflow))
    assert float(loss_scale.scale) == 256


# Factors with few mantissa bits and at most twelve steps: every product is exact in fp32 and in fp64 alike.
configurations = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 16.0, 256.0, 65536.0]),
        "growth_factor": st.sampled_from([1.5, 2.0, 4.0]),
        "backoff_factor": st.sampled_from([0.25, 0.5, 0.75]),
        "growth_interval": st.integers(1, 4),
        "hysteresis": st.integers(1, 4),
        "min_scale": st.sampled_from([0.0625, 1.0]),
        "max_scale": st.sampled_from([65536.0, 2.0**24]),
    }
)


@settings(max_examples=150, deadline=None)
@given(configurations, st.lists(st.booleans(), max_size=12))
def test_any_run_follows_the_plain_model(configuration: dict[str, Any], overflows: list[bool]) -> None:
    model = ReferenceScale({"kind": "dynamic", **configuration})
    assert scales(DynamicLossScale(**configuration), overflows) == scales(model, overflows)


@settings(max_examples=75, deadline=None)
@given(configurations, st.lists(st.booleans(), max_size=8), st.lists(st.booleans(), max_size=4))
def test_a_saved_scale_goes_on_as_if_nothing_happened(
    configuration: dict[str, Any], before: list[bool], after: list[bool]
) -> None:
    original = DynamicLossScale(**configuration)
    scales(original, before)
    copy = DynamicLossScale(**configuration)
    copy.load_state_dict(through_bytes(original.state_dict()))
    assert float(copy.scale) == float(original.scale)
    assert scales(copy, after) == scales(original, after)


@settings(max_examples=75, deadline=None)
@given(configurations, st.lists(st.booleans(), max_size=12))
def test_the_scale_never_leaves_its_bounds(configuration: dict[str, Any], overflows: list[bool]) -> None:
    low, high = configuration["min_scale"], configuration["max_scale"]
    assert all(low <= scale <= high for scale in scales(DynamicLossScale(**configuration), overflows))


def test_a_state_dict_is_a_snapshot() -> None:
    loss_scale = DynamicLossScale(**DYNAMIC)
    saved = loss_scale.state_dict()
    before = dict(saved)
    scales(loss_scale, [False] * 5)
    assert saved == before


def test_a_constant_scale_is_constant() -> None:
    loss_scale = ConstantLossScale(scale=1024.0)
    assert scales(loss_scale, [True, False, True, False]) == [1024.0] * 4
    copy = ConstantLossScale(scale=1024.0)
    copy.load_state_dict(through_bytes(loss_scale.state_dict()))
    assert float(copy.scale) == 1024.0


def test_a_run_without_scaling_leaves_a_dynamic_scale_where_it_starts() -> None:
    """From 1 it would take thousands of steps to the scale that fp16 needs."""
    loss_scale = DynamicLossScale(init_scale=4096.0)
    loss_scale.load_state_dict(through_bytes(ConstantLossScale().state_dict()))
    assert loss_scale.scale == 4096.0
    loss_scale.load_state_dict(through_bytes(ConstantLossScale(16.0).state_dict()))
    assert loss_scale.scale == 16.0


BAD_DYNAMIC: list[dict[str, Any]] = [
    {"min_scale": 8.0, "max_scale": 4.0},
    {"min_scale": 512.0},
    {"max_scale": 128.0},
    {"init_scale": 0.0},
    {"init_scale": -1.0},
    {"init_scale": math.nan},
    {"init_scale": math.inf},
    {"growth_factor": 1.0},
    {"growth_factor": 0.5},
    {"growth_factor": math.nan},
    {"backoff_factor": 1.0},
    {"backoff_factor": 0.0},
    {"backoff_factor": 2.0},
    {"backoff_factor": math.nan},
    {"growth_interval": 0},
    {"growth_interval": -3},
    {"hysteresis": 0},
    {"min_scale": -1.0},
    {"min_scale": math.nan},
    {"max_scale": math.nan},
]


@pytest.mark.parametrize("bad", BAD_DYNAMIC, ids=str)
def test_bad_arguments_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))) as error:
        DynamicLossScale(**{**DYNAMIC, **bad})
    text = str(error.value)
    assert any(f"{value:g}" in text for value in bad.values()), text
    assert "\n" not in text


@pytest.mark.parametrize("scale", [0.0, -2.0, math.nan, math.inf])
def test_a_bad_constant_is_named(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale.*{scale:g}"):
        ConstantLossScale(scale=scale)
