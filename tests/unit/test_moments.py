"""Moments in bf16 and 8 bits: their codes and their noise, and what becomes of them in checkpoints.

That a run has the bits of a plain loop that keeps them so is shown by ``test_programs.py``.
"""

from __future__ import annotations

import copy
import functools
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import lightstep
from lightstep.checkpoint.errors import CheckpointError
from lightstep.distributed import Window
from lightstep.optimizer.moments import Moments
from lightstep.plan.cost import cost
from lightstep.precision import moments_int8
from lightstep.precision.moments import BFloat16
from lightstep.precision.moments_int8 import Int8
from lightstep.precision.noise import Noise, numbered
from lightstep.precision.split import probe_masters
from tests.covering import every_pair, every_value
from tests.reference.own_classes import EachParameter
from tests.reference.pair import (
    TWO_GROUPS,
    Pair,
    check_state,
    through_bytes,
)
from tests.reference.plain_loop import ReferenceLoop
from tests.reference.short_moments import (
    Int8Moments,
    NearestMoments,
    StochasticInt8Moments,
    StochasticMoments,
    block_of,
    in_eight_bits,
    stochastically_rounded,
)
from tests.reference.tiny_model import TinyModel, loss_of, representable
from tests.training import OnVectors, assert_same

KINDS = {
    ("bfloat16", "nearest"): NearestMoments,
    ("bfloat16", "stochastic"): StochasticMoments,
    ("int8", "nearest"): Int8Moments,
    ("int8", "stochastic"): StochasticInt8Moments,
}
"""The reference for ``optimizer_state.moments`` and ``moments_rounding``."""


class ModelWithBlocks(TinyModel):
    """Most rows can be divided into blocks, of 16 elements or more; those of ``dead`` cannot."""

    def __init__(self) -> None:
        super().__init__(32, 80)


SEEDS = [0, 2]
"""``precision.rounding_seed``; elements are counted from a negative number with the second one."""


class ShortPair(Pair):
    """Both with moments in fewer bits; the seed is that of noise, where there is some."""

    references: Mapping[tuple[str, str], type[ReferenceLoop]] = KINDS

    def __init__(self, *args: Any, kind: tuple[str, str], rounding_seed: int = 0, **options: Any) -> None:
        if kind[1] == "stochastic" or not self.has_masters:
            options["rounding_seed"] = rounding_seed
        self.reference_class = self.references[kind]
        if kind[0] == "int8":
            options["make_model"] = ModelWithBlocks
        super().__init__(*args, moments=kind[0], moments_rounding=kind[1], **options)


CLASSES = {
    **{name: (*TWO_GROUPS[name], {}) for name in ("AdamW", "Adam-amsgrad", "SGD-momentum", "RMSprop")},
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}, {"lr": 0.1}, {}),
}


PLACES = ["bulk", "resident", "stream-overlap-resident-in-part", "stream-in-backward-and-forward"]


# -- large tensors, cut and whole ones ---------------------------------------------------------------------------------


STREAM = {"backend": "stream", "ring_mib": 8}
SHAPES = [(700, 613), (700, 640), (40, 48), (300, 17), (5,), (1,), (0, 4), (2, 3, 64)]
SMALL = SHAPES[2:]


homes_and_moments = pytest.mark.parametrize(
    ("state", "moments"), [({"backend": "bulk"}, "bfloat16"), ({**STREAM, "update": "next_forward"}, "int8")]
)


def by_hand(
    state: dict[str, Any],
    steps: int = 2,
    optimizer_class: Any = torch.optim.AdamW,
    rounding_seed: int = 0,
    master_weights: bool | str = True,
    references: Mapping[tuple[str, str], type[ReferenceLoop]] = KINDS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **options: Any,
) -> Any:
    """A run on gradients from nowhere beside its reference: optimizer, parameters."""
    state = {"moments": "bfloat16", **state}
    precision = {"rounding_seed": rounding_seed, "master_weights": master_weights}
    values = {"precision": precision, "clipping": {"max_norm": None}, "optimizer_state": state}
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)
    strategy = lightstep.Strategy.load(values)
    model = strategy.prepare_model(representable(model))
    twin = copy.deepcopy(model)
    optimizer = strategy.create_optimizer(model, optimizer_class, **options)
    rounding = state.get("moments_rounding") or ("stochastic" if state["moments"] == "int8" else "nearest")
    loop = references[state["moments"], rounding]
    reference = loop([{"params": list(twin.parameters())}], optimizer_class, rounding_seed=rounding_seed, **options)
    for _ in range(steps):
        for tested, expected in zip(model.parameters(), twin.parameters(), strict=True):
            expected.grad = torch.randn(expected.shape, generator=generator).to(expected)
            tested.grad = expected.grad.clone()
        reference.collect()
        optimizer.step()
        reference.step()
    optimizer.synchronize()
    for tested, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(tested, expected)
        master = reference.masters[expected] if master_weights is True else None
        check_state("", dict(optimizer.state[tested]), reference.state(expected), master)
    return optimizer


def are_cut(optimizer: Any) -> bool:
    return any(start for unit in optimizer._backend.units() for _, start, _ in unit.parts)


@homes_and_moments
def test_large_tensors_whole_and_cut(state: dict[str, Any], moments: str) -> None:
    state = {**state, "moments": moments, "moments_rounding": "stochastic"}
    optimizer = by_hand(state, rounding_seed=2, lr=1e-2, betas=(0.9, 0.999))
    assert are_cut(optimizer) or state.get("backend") != "stream"


@every_value(moments=["bfloat16", "int8"], state=[{}, STREAM])
def test_rounding_by_default_and_as_given(state: dict[str, Any], moments: str) -> None:
    """8-bit moments stochastically, bf16 to nearest; a given value counts."""
    for rounding in (None, "nearest", "stochastic"):
        by_hand({**state, "moments": moments, "moments_rounding": rounding}, shapes=SMALL, lr=1e-2, betas=(0.9, 0.999))


def test_what_counts_no_steps_is_rounded_to_nearest_by_default(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    weights = [nn.Parameter(torch.ones(16, 64)) for _ in range(2)]
    optimizer = lightstep.MixedPrecisionOptimizer(
        weights, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, moments=Moments("int8")
    )
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradient = weights[0].grad.clone()
    optimizer.step()
    wanted = kept_in("int8", "momentum_buffer", gradient)
    assert torch.equal(optimizer.state[weights[0]]["momentum_buffer"], wanted)
    said = "moments of SGD (momentum_buffer) are rounded to nearest: their state counts no steps"
    assert [record.message for record in caplog.records].count(said) == 1


@pytest.mark.parametrize(
    ("name", "moments", "masters", "width"),
    [
        ("bulk", "bfloat16", True, 6),
        ("stream", "bfloat16", True, 6),
        ("stream", "int8", True, 2 + (1 + 4 / 128) + (1 + 4 / 128 + 1 / 8)),
        ("stream", "bfloat16", "stochastic", 4),
        ("resident", "int8", "stochastic", 2.1875),
    ],
)
def test_bytes_per_parameter(name: str, moments: str, masters: bool | str, width: float) -> None:
    changes = {"optimizer_state.moments": moments, "precision.master_weights": masters}
    strategy = lightstep.Strategy.load(name, overrides=changes)
    planned = cost(strategy.config)
    state = planned.device_state if name == "resident" else planned.host_state
    model = strategy.prepare_model(nn.Linear(512, 2048, bias=False))
    optimizer = strategy.create_optimizer(model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    held = sum(record.nbytes for record in optimizer._backend._records) / model.weight.numel()
    assert held == pytest.approx(width, rel=0.001)
    assert state.count == pytest.approx(width, rel=0.001) or (name == "resident" and masters is True)
    report = optimizer.memory_report()
    assert report["host_bytes_per_parameter"] == pytest.approx(0 if name == "resident" else width, rel=0.001)


@pytest.mark.parametrize("state", [{}, {**STREAM, "ring_mib": 32}])
def test_classes_that_need_whole_tensors(state: dict[str, Any]) -> None:
    by_hand(state, shapes=[(61, 47), (300, 17), (0, 4)], optimizer_class=torch.optim.Muon, lr=1e-2)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def in_codes(codec: BFloat16 | Int8, value: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The planes of ``value`` rounded to nearest, and what they say."""
    planes = [torch.empty(value.numel() // per, dtype=dtype) for _, dtype, per in codec.planes]
    coded, decoded = codec.at(planes), torch.empty_like(value)
    coded.encode(value)
    coded.decode(decoded)
    return planes, decoded


@pytest.mark.parametrize("block", [128, 16])
@pytest.mark.parametrize("never_negative", [False, True])
def test_decoded_values_have_their_own_codes_again(block: int, never_negative: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(400 * block, generator=generator).pow_(5).mul_(1e-5)
    value[: 2 * block] = 0.0
    value[2 * block : 3 * block] *= 1e-20  # denormal neighbours of the largest
    value = value.abs_() if never_negative else value
    codec = Int8(block, never_negative)
    planes, decoded = in_codes(codec, value)
    again, same = in_codes(codec, decoded)
    assert all(map(torch.equal, planes, again)) and torch.equal(decoded, same)
    expected = in_eight_bits(value.view(-1, block).numpy(), never_negative, "", None)
    assert torch.equal(decoded, torch.from_numpy(expected).view(-1))
    largest = value.view(-1, block).abs().amax(1)
    assert torch.equal(decoded.view(-1, block).abs().amax(1), largest), "scales are exact"
    if never_negative:
        assert torch.equal(decoded > 0, value > 0), "what is above zero stays there"


@pytest.mark.parametrize("never_negative", [False, True])
def test_no_noise_changes_a_decoded_value(never_negative: bool) -> None:
    """A step that is skipped on the device encodes what it has decoded."""
    steps, power = (255, 4) if never_negative else (127, 2)
    scales = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(40).sub(30).exp2()
    parts = torch.arange(steps + 1, dtype=torch.float64).div(steps).pow(power)
    value = (scales[:, None] * torch.cat([parts, parts[-1:].expand(512 - len(parts))])).float().view(-1)
    codec = Int8(128, never_negative, Noise())
    value.view(-1, 128)[:, 0] = scales.float().repeat_interleave(4)  # each block has its scale
    planes, decoded = in_codes(codec, value)
    before = [plane.clone() for plane in planes]
    for noise in (0, 0xFFFF):
        row = torch.full((1 << 18,), noise, dtype=torch.int32)
        scratch = mock.Mock(row=lambda numbers, start, count, row=row: (row[:count], None, None))
        moments_int8._encode(decoded, planes, 128, scratch, 0, Window())
        assert all(map(torch.equal, planes, before)), noise


def at_thresholds(never_negative: bool, noise: Noise | None, exponent: int) -> tuple[torch.Tensor, ...]:
    """Values that are a few units in the last place from where a code begins, and for each the part of a step that is
    rounded up and its part of the scale."""
    steps, count, generator = (255 if never_negative else 127), 1 << 18, torch.Generator().manual_seed(exponent)
    up = torch.full((count,), 0.5)
    if noise is not None:
        scratch = noise.at(torch.device("cpu"), 7)
        scratch.begin(zlib.crc32(b"exp_avg"))
        up = (scratch.row(Window(), 0, count)[0] >> 4).float().add(0.5).mul(2.0**-12)
    begins = moments_int8._power(torch.randint(1, steps + 1, (count,), generator=generator) - up, steps)
    scale = (torch.rand(count // 128, 1, generator=generator) + 1) * 2.0**exponent
    value = begins.view(-1, 128) * scale
    nudges = torch.randint(-2, 3, value.shape, generator=generator, dtype=torch.int32)
    value.view(torch.int32).add_(nudges).clamp_(min=0)
    value[:, :1] = scale
    part = (value / scale).view(-1)
    return (value if never_negative else value * torch.tensor([1.0, -1.0]).repeat(64)).view(-1), up, part


@every_pair(exponent=[0, -40, -115, 120], noise=[None, Noise()], never_negative=[False, True])
def test_a_code_is_the_largest_that_is_not_above_its_number(
    never_negative: bool, noise: Noise | None, exponent: int
) -> None:
    value, up, part = at_thresholds(never_negative, noise, exponent)
    codec = Int8(128, never_negative, noise)
    planes = [torch.empty(value.numel() // per, dtype=dtype) for _, dtype, per in codec.planes]
    if noise is None:
        codec.at(planes).encode(value)
    else:
        codec.at(planes).encode_update(value, "exp_avg", 7, Window())
    code = planes[0].float() if never_negative else planes[0].view(torch.int8).float().abs()
    steps = 255 if never_negative else 127
    least = value > 0 if never_negative else code < 0  # what is above zero has a code above zero
    is_above = moments_int8._power(code - up, steps) > part
    assert not (is_above & (code > least)).any() and (code >= least.float()).all()
    assert (moments_int8._power(code + 1 - up, steps) > part).all()


@pytest.mark.parametrize("noise", [None, Noise()])
@pytest.mark.parametrize("codec", [BFloat16, functools.partial(Int8, 128, True), functools.partial(Int8, 16, True)])
def test_every_number_keeps_its_sign_and_then_its_codes(codec: Any, noise: Noise | None) -> None:
    """Also infinities and NaN, whose sign may be that of a finite master."""
    value = probe_masters(torch.device("cpu"))
    value = value[: value.numel() // 128 * 128]
    planes, decoded = in_codes(codec(noise=noise), value)
    again, same = in_codes(codec(noise=noise), decoded)
    assert all(map(torch.equal, *([plane.view(torch.uint8) for plane in one] for one in (planes, again))))
    if noise is not None:
        coded = codec(noise=noise).at(again)
        coded.encode_update(value, "exp_avg_sq", 7, Window())
        coded.decode(same)
    for found in (decoded, same):
        assert torch.equal(found.view(torch.int32) < 0, value.view(torch.int32) < 0)


def test_a_block_that_is_not_finite_is_seen() -> None:
    value = torch.rand(256)
    for wrong in (float("nan"), float("inf")):
        value[3] = wrong
        for never_negative in (False, True):
            _, decoded = in_codes(Int8(128, never_negative), value)
            assert decoded[:128].isnan().all() and decoded[128:].isfinite().all()


# -- stochastic rounding -----------------------------------------------------------------------------------------------


def rounded(value: torch.Tensor, step: Any, numbers: Any, entry: str = "exp_avg_sq") -> torch.Tensor:
    out = torch.empty_like(value, dtype=torch.bfloat16)
    BFloat16(Noise()).at([out]).encode_update(value, entry, step, numbers)
    return out


WINDOWS = [
    Window(),
    Window(12345, first=77),
    Window((1 << 32) - 9, first=1 << 18),
    numbered(Window(3, inner=613, jump=1_000_003, first=611), seed=2),
]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_noise_is_that_of_step_entry_and_number(window: Window) -> None:
    value = probe_masters(torch.device("cpu"))
    value = torch.where(value.isnan() & (value.view(torch.int32) & 0x3F == 0), torch.tensor(-1.5), value)
    elements = np.arange(window.first, window.first + value.numel())
    numbers = (window.start + elements + elements // window.inner * window.jump) % 2**32
    expected = stochastically_rounded(value, "exp_avg_sq", 321, numbers=numbers)
    listed = window.numbers(window.first, window.first + value.numel())
    for step, given in [(torch.tensor(321.0), window), (321, listed), (torch.tensor(321), window)]:
        found = rounded(value, step, given)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(found.isnan(), value.isnan())
    whole = value.view(torch.int32) & 0xFFFF == 0
    assert torch.equal(found.float()[whole & ~value.isnan()], value[whole & ~value.isnan()])


# -- from one setting to another ---------------------------------------------------------------------------------------


def trained(
    moments: str, folder: Any = None, steps: int = 0, precision: dict[str, Any] | None = None, **state: Any
) -> tuple[Any, Any, Any]:
    """Strategy, model and optimizer, from a checkpoint or from the beginning, after so many steps."""
    strategy = lightstep.Strategy.load({"precision": precision or {}, "optimizer_state": {"moments": moments, **state}})
    torch.manual_seed(0)
    model = strategy.prepare_model(ModelWithBlocks())
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    if folder is not None:
        strategy.load_checkpoint(folder, model, optimizer)
    go_on(model, optimizer, range(steps))
    return strategy, model, optimizer


def go_on(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def kept_in(moments: str, key: str, value: torch.Tensor) -> torch.Tensor:
    """What is read of a loaded moment."""
    if moments != "int8":
        return value.to(getattr(torch, moments))
    block = block_of(value.shape)
    if not block:
        return value.float()
    rows = value.float().cpu().reshape(-1, block).numpy()
    return torch.from_numpy(in_eight_bits(rows, key == "exp_avg_sq", key, None)).view(value.shape)


@pytest.mark.parametrize(
    ("first", "then", "backend"),
    [
        ("bfloat16", "float32", "stream"),
        ("int8", "int8", "stream"),
        ("int8", "float32", "resident"),
        ("int8", "bfloat16", "stream"),
        ("float32", "int8", "stream"),
    ],
)
def test_what_a_conversion_loses_is_said(tmp_path: Any, caplog: Any, first: str, then: str, backend: str) -> None:
    """Once for each load. Its bits are those of programs in ``test_programs.py``."""
    caplog.set_level(logging.INFO)
    strategy, model, optimizer = trained(first, steps=1, backend=backend)
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    trained(then, tmp_path / "a", backend="stream")
    trained(then)[2].load_state_dict(through_bytes(optimizer.state_dict()))
    given = "float32" if first == "int8" else first
    lost = {
        "float32": "nothing is lost",
        "bfloat16": "to 8 significant bits",
        "int8": "saved from int8 moments are exact",
    }[then]
    said = f"loaded moments are {given}, and are kept in {then} from here on: "
    assert all(lost in record.message for record in caplog.records if said in record.message)
    assert sum(said in record.message for record in caplog.records) == (2 if given != then else 0)


def test_after_resuming_the_seed_is_that_of_the_strategy() -> None:
    pair = ShortPair(*TWO_GROUPS["AdamW"], kind=("int8", "stochastic"), rounding_seed=2)
    pair.train(3)
    pair.values["precision"]["rounding_seed"] = pair.reference.rounding_seed = 3
    pair.resume()
    pair.train(3)


# -- what cannot be ----------------------------------------------------------------------------------------------------


class OwnNames(EachParameter):
    """It says which of its entries are moments."""

    moments = ("velocity",)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("velocity", torch.zeros_like(p)).mul_(0.9).add_(grad)
        state.setdefault("anchor", p.clone())
        p.add_(state["velocity"], alpha=-group["lr"])


class Wide(OnVectors):
    width = 32


@pytest.mark.parametrize(
    ("optimizer_class", "given"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.RMSprop, {"centered": True, "momentum": 0.9})],
)
@pytest.mark.parametrize(("moments", "checkpoint"), [("bfloat16", False), ("int8", True)])
def test_moments_that_loaded_settings_bring(
    optimizer_class: Any, given: dict[str, Any], moments: str, checkpoint: bool, tmp_path: Path
) -> None:
    """They are kept in fewer bits as if the optimizer had been made with these settings, or refused."""

    def make(**settings: Any) -> Wide:
        state = {"moments": moments, "backend": "bulk"}
        return Wide(state, make=lambda: nn.Linear(32, 32), optimizer_class=optimizer_class, **settings)

    def load_expected(run: Wide) -> None:
        if checkpoint:
            run.strategy.load_checkpoint(tmp_path, run.model, run.optimizer)
        else:
            run.optimizer.load_state_dict(expected.optimizer.state_dict())
            run.model.load_state_dict(expected.model.state_dict())
        run.steps = 2

    expected, resumed, late = make(**given), make(), make()
    expected.train(2)
    expected.strategy.save_checkpoint(tmp_path, expected.model, expected.optimizer)
    load_expected(resumed)
    late.train(1)
    before, message = late.snapshot(), f"moments: {moments} cannot keep it in fewer bits any more"
    with pytest.raises((ValueError, CheckpointError), match=message):
        load_expected(late)
    assert_same(late.snapshot(), before)
    assert resumed.train(6) == expected.train(6)
    assert_same(resumed.snapshot(), expected.snapshot())


def test_a_class_says_what_its_moments_are() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = lightstep.MixedPrecisionOptimizer([weight], OwnNames, {"lr": 0.1}, moments=Moments("bfloat16"))
    weight.grad = torch.ones(5)
    optimizer.step()
    assert {key: value.dtype for key, value in optimizer.state[weight].items()} == {
        "velocity": torch.bfloat16,
        "anchor": torch.float32,
    }


@pytest.mark.parametrize(
    ("optimizer_class", "rounding", "message"),
    [
        (torch.optim.ASGD, "nearest", r"moments is bfloat16, and ASGD \(.*ax.*\) has no entry that is known"),
        (torch.optim.Rprop, "nearest", "has no entry that is known to be a moment"),
        (torch.optim.SGD, "stochastic", r"SGD \(momentum_buffer\) counts no steps in its state"),
    ],
)
def test_what_is_refused_at_set_up(optimizer_class: Any, rounding: Any, message: str) -> None:
    weight = nn.Parameter(torch.ones(5))
    settings = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = lightstep.MixedPrecisionOptimizer(
        [weight], optimizer_class, {"lr": 0.1, **settings}, moments=Moments("bfloat16", rounding)
    )
    weight.grad = torch.ones(5)
    with pytest.raises(ValueError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer_state": {"moments_rounding": "stochastic"}}, "moments is float32; set moments: bfloat16 or int8"),
        (
            {"precision": {"master_weights": False}, "optimizer_state": {"moments": "bfloat16"}},
            "the moments of bfloat16 parameters without masters are bfloat16 already",
        ),
        ({"optimizer_state": {"moments": "float16"}}, "moments"),
        ({"precision": {"rounding_seed": -1}}, "'precision.rounding_seed' is -1: at least 0 is needed"),
        ({"precision": {"rounding_seed": 2**32}}, "is 4294967296: at most 4294967295 is needed"),
        ({"precision": {"rounding_seed": True}}, "is True: a whole number is needed"),
        ({"precision": {"rounding_seed": 7}}, "rounding_seed 7 is the seed of stochastic rounding, and nothing is"),
        (
            {"precision": {"rounding_seed": 7}, "optimizer_state": {"moments": "int8", "moments_rounding": "nearest"}},
            "optimizer_state.moments int8 and moments_rounding nearest; leave it out",
        ),
        (
            {"sharding": {"kind": "deepspeed"}, "optimizer_state": {"moments": "bfloat16"}},
            "optimizer_state.moments bfloat16 cannot be followed",
        ),
    ],
)
def test_what_a_strategy_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(lightstep.ConfigError, match=message):
        lightstep.Strategy.load(values)


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.0, True])
def test_seeds_that_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"rounding_seed is {seed!r}; allowed: integers from 0 to 4294967295"):
        lightstep.MixedPrecisionOptimizer([nn.Parameter(torch.ones(5))], torch.optim.AdamW, rounding_seed=seed)
