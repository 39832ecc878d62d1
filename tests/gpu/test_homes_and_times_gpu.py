"""Every home of the state with every update time on a GPU, under sleeps: the bits of state on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.covering import every_pair, every_value
from tests.gpu.test_next_forward_gpu import Training
from tests.unit.test_homes_and_times import HOMES, LIMITS, TIMES, expected_of, make
from tests.unit.test_next_forward import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_units")]


@every_pair(home=HOMES, time=TIMES, limit=LIMITS, parameters=["bfloat16", "float16", "float32"])
def test_the_same_bits(home: str, time: str, limit: str, parameters: str) -> None:
    expected = expected_of(time, limit, parameters, Training)
    losses, wanted = expected.train(8), expected.snapshot()
    for seed in range(3):
        tested: Any = make(home, time, limit, parameters, Training)
        tested.assert_bits(losses, wanted, seed, before=2)


@every_value(home=HOMES, parameters=["bfloat16", "float32"])
def test_a_model_that_is_moved_keeps_its_state(home: str, parameters: str) -> None:
    """Between the GPU and the CPU; steps with a rate of 0 change moments, and neither weights nor masters."""
    tested: Any = make(home, "at_step", "not clipped", parameters, Training)
    tested.train(2)
    before = tested.snapshot()
    for group in tested.optimizer.param_groups:
        group["lr"] = 0.0
    for device in ("cpu", "cuda", "cpu", "cuda"):
        tested.model.to(device)
        for parameter in tested.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        tested.optimizer.step()
        after = tested.snapshot()
        kept = [name for name in before if not name.endswith(("exp_avg", "exp_avg_sq", "step"))]
        assert_same({name: after[name] for name in kept}, {name: before[name] for name in kept})


def test_bulk_frees_its_slots_while_copies_are_under_way() -> None:
    expected, tested = (make("bulk", "at_step", "not clipped", "bfloat16", Training) for _ in range(2))
    losses = expected.train(7)
    assert tested.train(3) == losses[:3]
    tested.delays(3)
    for number in range(3, 7):
        assert tested.train(1) == losses[number : number + 1]
        for _ in range(64):  # others take the memory that was freed
            torch.full((1 << 13,), 7.0, device="cuda")
    assert_same(tested.snapshot(), expected.snapshot())


@pytest.mark.parametrize("home", HOMES)
def test_the_host_does_not_wait_in_a_steady_step(home: str) -> None:
    tested = make(home, "at_step", "not clipped", "bfloat16", Training)
    tested.train(3)
    tested.optimizer.backward(tested.loss())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tested.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
