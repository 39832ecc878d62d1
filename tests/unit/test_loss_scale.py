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


GOOD, OVER = False, True


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({}, [GOOD] * 10, [256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]),
        ({"init_scale": 16.0}, [OVER] * 8, [8, 4, 2, 1, 1, 1, 1, 1]),
        ({"init_scale": 16.0, "hysteresis": 2}, [OVER] * 8, [16, 8, 4, 2, 1, 1, 1, 1]),
        ({"growth_interval": 3}, [GOOD, GOOD, OVER, GOOD, GOOD, GOOD], [256, 256, 128, 128, 128, 256]),
        # The first overflow is forgiven, a single good step refills nothing, growth does.
        ({"hysteresis": 2}, [OVER, GOOD, OVER, GOOD, GOOD, OVER, OVER], [256, 256, 128, 128, 256, 256, 128]),
        ({"max_scale": 600.0}, [GOOD] * 6 + [OVER], [256, 512, 512, 600, 600, 600, 300]),
        ({"max_scale": 256.0, "hysteresis": 2}, [OVER, GOOD, GOOD, OVER, OVER], [256, 256, 256, 256, 128]),
    ],
    ids=["growth", "backoff", "hysteresis", "a new interval", "refilled", "the maximum", "refilled at the maximum"],
)
def test_sequences(changes: dict[str, Any], steps: list[bool], expected: list[float]) -> None:
    assert scales(DynamicLossScale(**DYNAMIC | changes), steps) == expected


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


@settings(max_examples=80, deadline=None)
@given(configurations, st.lists(st.booleans(), max_size=12))
def test_any_run_follows_the_plain_model(configuration: dict[str, Any], overflows: list[bool]) -> None:
    model = ReferenceScale({"kind": "dynamic", **configuration})
    found = scales(DynamicLossScale(**configuration), overflows)
    assert found == scales(model, overflows)
    assert all(configuration["min_scale"] <= scale <= configuration["max_scale"] for scale in found)


@settings(max_examples=40, deadline=None)
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


def test_good_steps_of_a_longer_interval_count_in_a_shorter_one() -> None:
    original, shorter = (DynamicLossScale(**DYNAMIC | {"growth_interval": interval}) for interval in (4, 2))
    scales(original, [GOOD] * 3)
    shorter.load_state_dict(original.state_dict())
    assert scales(shorter, [GOOD, GOOD, GOOD]) == [512, 512, 1024]


def test_a_run_without_scaling_leaves_a_dynamic_scale_where_it_starts() -> None:
    """From 1 it would take thousands of steps to the scale that fp16 needs."""
    loss_scale = DynamicLossScale(init_scale=4096.0)
    loss_scale.load_state_dict(through_bytes(ConstantLossScale().state_dict()))
    assert loss_scale.scale == 4096.0
    loss_scale.load_state_dict(through_bytes(ConstantLossScale(16.0).state_dict()))
    assert loss_scale.scale == 16.0


BAD: dict[str, tuple[float, ...]] = {
    "init_scale": (0.0, -1.0, math.nan, math.inf),
    "growth_factor": (1.0, 0.5, math.nan),
    "backoff_factor": (1.0, 0.0, 2.0, math.nan),
    "growth_interval": (0, -3),
    "hysteresis": (0,),
    "min_scale": (512.0, -1.0, math.nan),
    "max_scale": (128.0, math.nan),
}
BAD_DYNAMIC = [{name: value} for name, values in BAD.items() for value in values]


@pytest.mark.parametrize("bad", [{"min_scale": 8.0, "max_scale": 4.0}, *BAD_DYNAMIC], ids=str)
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
