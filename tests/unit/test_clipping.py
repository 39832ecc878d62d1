"""One global norm over everything, held against fp64, and the factor it turns into."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightstep
from lightstep import Strategy, clip_grad_norm_, global_grad_norm
from lightstep.distributed import NormReduction
from tests.reference.pair import strategy_values
from tests.reference.plain_loop import check_norm
from tests.training import made

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]

norm_types = pytest.mark.parametrize("norm_type", NORM_TYPES)


def with_grads(*grads: Tensor | None) -> list[nn.Parameter]:
    """Parameters of any shape with exactly these gradients."""
    parameters = []
    for grad in grads:
        parameter = nn.Parameter(torch.zeros(3) if grad is None else torch.zeros_like(grad))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def mixed(seed: int = 0) -> list[nn.Parameter]:
    """bf16, fp16 and fp32 gradients, an empty one, a 0-dim one, a strided one and a missing one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return with_grads(
        normal(37, 11).bfloat16(),
        None,
        normal(129).half(),
        normal(4, 5, 6) * 1e-3,
        torch.zeros(0, 7),
        torch.zeros(0, dtype=torch.bfloat16),
        normal(1)[0],
        normal(8, 9).t(),
    )


def grads_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def test_norms_on_several_devices_are_brought_to_one() -> None:
    """As no list that torch stacks."""
    here, there = torch.zeros(3), torch.zeros(3, device="meta")
    assert NormReduction([here]).as_torch and NormReduction([there]).as_torch
    assert not NormReduction([here, there]).as_torch


@norm_types
@pytest.mark.parametrize("seed", range(2))
def test_the_norm_of_mixed_gradients_is_that_of_fp64(norm_type: float, seed: int) -> None:
    parameters = mixed(seed)
    check_norm(global_grad_norm(parameters, norm_type=norm_type), grads_of(parameters), norm_type)


def of_fp32(seed: int) -> list[nn.Parameter]:
    """One of each kind and many small ones, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(300_001,), (), (128, 33), (7,), *[(16, 4)] * 50]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return with_grads(*values, None, torch.randn(80, 90, generator=generator).t(), torch.full((1_000_000,), 0.1))


@norm_types
@pytest.mark.parametrize("seed", range(2))
def test_fp32_gradients_have_the_bits_of_torchs_own_norm(norm_type: float, seed: int) -> None:
    ours, theirs = of_fp32(seed), of_fp32(seed)
    norm = clip_grad_norm_(ours, 0.5, norm_type=norm_type)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    assert all(torch.equal(mine, other) for mine, other in zip(grads_of(ours), grads_of(theirs), strict=True))


@norm_types
@pytest.mark.parametrize("magnitude", [1e-30, 1e-25, 1e25, 1e30])
def test_squares_that_fit_no_fp32(norm_type: float, magnitude: float) -> None:
    """As torch has it: powers below the range of fp32 are nothing, those above it an overflow."""
    values = torch.tensor([3.0, 4.0]) * magnitude, torch.tensor([-5.0]) * magnitude
    expected = torch.nn.utils.get_total_norm(values, norm_type)
    assert torch.equal(global_grad_norm(with_grads(*values), norm_type=norm_type), expected)


MAGNITUDES = st.just(0.0) | st.floats(2**-13, 2**13, width=32)  # whose powers fit fp32


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(MAGNITUDES | MAGNITUDES.map(lambda value: -value), max_size=9), min_size=1, max_size=5),
    st.sampled_from(NORM_TYPES),
)
def test_any_gradients(values: list[list[float]], norm_type: float) -> None:
    parameters = with_grads(*[torch.tensor(value, dtype=torch.float32) for value in values])
    check_norm(global_grad_norm(parameters, norm_type=norm_type), grads_of(parameters), norm_type)


@norm_types
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_bad_element_is_seen(norm_type: float, bad: float, dtype: torch.dtype) -> None:
    grad = torch.ones(100, dtype=dtype)
    grad[77] = bad
    norm = global_grad_norm(with_grads(torch.ones(5), grad, torch.ones(0)), norm_type=norm_type)
    assert not math.isfinite(float(norm))
    beside_larger = with_grads(torch.tensor([bad, 1e30]), torch.tensor([2e30]))
    assert not math.isfinite(float(global_grad_norm(beside_larger, norm_type=norm_type)))


@norm_types
@pytest.mark.parametrize("grads", [[], [None], [None, torch.zeros(0)], [torch.zeros(4)]], ids=str)
def test_nothing_has_norm_zero(norm_type: float, grads: list[Tensor | None]) -> None:
    norm = global_grad_norm(with_grads(*grads), norm_type=norm_type)
    assert norm.dim() == 0
    assert norm.dtype == torch.float32
    assert float(norm) == 0.0


def test_a_generator_and_a_single_tensor_will_do() -> None:
    parameters = mixed()
    assert torch.equal(global_grad_norm(p for p in parameters), global_grad_norm(parameters))
    check_norm(global_grad_norm(parameters[0]), [parameters[0].grad])


@norm_types
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_clip_returns_the_norm_before_and_scales_once(norm_type: float, max_norm: float | None) -> None:
    """A norm below ``max_norm`` is left alone; one that is only measured, too."""
    parameters = mixed()
    before = [grad.clone() for grad in grads_of(parameters)]
    if max_norm is None:
        norm = global_grad_norm(parameters, norm_type=norm_type)
    else:
        norm = clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    check_norm(norm, before, norm_type)
    coefficient = torch.clamp((max_norm or math.inf) / (norm + 1e-6), max=1.0)
    assert (coefficient < 1) == (max_norm == 0.5)
    for grad, old in zip(grads_of(parameters), before, strict=True):
        assert torch.equal(grad, old * coefficient)


@pytest.mark.parametrize("backend", ["resident", "bulk"])
def test_one_tensor_may_be_the_gradient_of_two_parameters(backend: str) -> None:
    """Each has memory of its own here, where gradients are scaled in place."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(600, 600)) for _ in range(2))
    _, model, optimizer = made(strategy_values("float32", backend, max_norm=1.0), model, torch.optim.SGD, lr=1.0)
    shared = torch.full((600, 600), 0.5)
    for parameter in model.parameters():
        parameter.grad = shared
    norm = optimizer.step().grad_norm
    expected = -torch.full((600, 600), 0.5) * (1.0 / (norm + 1e-6))
    optimizer.synchronize()
    assert all(torch.equal(parameter, expected) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("max_norm", bad) for bad in (0, 0.0, -1.0, math.nan, True, "x")),
        *(("norm_type", bad) for bad in (0.0, 0.5, -2.0, 20, math.nan, True, "2")),
    ],
)
def test_bad_norms_are_named(name: str, bad: Any) -> None:
    """By the functions, by a strategy and by an optimizer."""
    parameters = mixed()
    before = [grad.clone() for grad in grads_of(parameters)]
    with pytest.raises(ValueError, match=name):
        clip_grad_norm_(parameters, **{"max_norm": 1.0, name: bad})
    if name == "norm_type":
        with pytest.raises(ValueError, match=name):
            global_grad_norm(parameters, norm_type=bad)
    assert all(torch.equal(grad, old) for grad, old in zip(grads_of(parameters), before, strict=True))
    if not isinstance(bad, bool | str):
        with pytest.raises(lightstep.ConfigError, match=rf"clipping\.{name}"):
            Strategy.load({"clipping": {name: bad}})
    with pytest.raises(ValueError, match=name):
        lightstep.MixedPrecisionOptimizer(parameters, **{name: bad})


@pytest.mark.parametrize("written", ["inf", ".inf", math.inf])
def test_infinity_may_be_written_in_a_file(written: Any) -> None:
    """As a norm it is the largest element; as a limit it clips nothing, so updates in backward take it."""
    state = {"backend": "stream", "update": "in_backward"}
    clipping = {"max_norm": written, "norm_type": written}
    config = Strategy.load({"clipping": clipping, "optimizer_state": state}).config
    assert config.clipping.norm_type == math.inf and config.clipping.max_norm is None
