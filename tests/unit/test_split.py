"""fp32 = bf16 + 16 bits + 1 bit: exactly, for every kind of number, in both places for the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightstep.precision import split, split_triton
from lightstep.precision.split import Splitter, probe_masters

CPU = torch.device("cpu")
PLACES = ("sign", "bitmap")


def from_bits(bits: Tensor) -> Tensor:
    """int64 bit patterns 0 … 2^32-1 as fp32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def extra_for(place: str, n: int) -> Tensor:
    """Somewhere to keep n bits: never-negative fp32 numbers, or bytes."""
    if place == "bitmap":
        return torch.full((-(-n // 8),), 0xA5, dtype=torch.uint8)
    moments = torch.rand(n, generator=torch.Generator().manual_seed(n))
    moments[::7] = 0.0
    return moments


def split_of(master: Tensor, place: str, splitter: Splitter | None = None) -> tuple[Tensor, Tensor, Tensor]:
    n = master.numel()
    weight, low, extra = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16), extra_for(place, n)
    (splitter or Splitter(CPU)).split(master, weight, low, extra)
    return weight, low, extra


def assert_exact(master: Tensor, place: str, splitter: Splitter | None = None) -> None:
    splitter = splitter or Splitter(CPU)
    before = master.clone()
    weight, low, extra = split_of(master, place, splitter)
    assert torch.equal(master.view(torch.int32), before.view(torch.int32)), "split changed its input"
    rounded, nan = before.to(torch.bfloat16), before.isnan()
    assert torch.equal(weight.view(torch.int16)[~nan], rounded.view(torch.int16)[~nan])
    assert torch.equal(weight.isnan(), nan)
    back, signed = torch.empty_like(master), extra.clone()
    splitter.join(weight, low, extra, back)
    assert torch.equal(back.view(torch.int32), before.view(torch.int32))
    if place == "sign":
        back, magnitudes, kept = torch.empty_like(master), torch.empty_like(extra), signed.clone()
        splitter.join(weight, low, signed, back, magnitudes)
        assert torch.equal(back.view(torch.int32), before.view(torch.int32)) and torch.equal(magnitudes, extra)
        assert torch.equal(signed.view(torch.int32), kept.view(torch.int32)), "the second moment was to stay"
        assert torch.equal(extra, extra_for(place, master.numel())), "the second moment did not come back"


UPPER = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF]
LOW = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
EVERY_HALF = torch.arange(2**16)
MASTERS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "all low halves under zeros, denormals, ordinary, largest, infinite and NaN ones": lambda: (
        from_bits((upper << 16) | EVERY_HALF) for u in UPPER for upper in (u, u | 0x8000)
    ),
    "all upper halves over those that matter": lambda: (from_bits((EVERY_HALF << 16) | low) for low in LOW),
    "random bits": lambda: [probe_masters(CPU)],
    "any length": lambda: (probe_masters(CPU)[-n - 1 : -1].clone() for n in (0, 1, 7, 8, 9, 63, 1000)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MASTERS)
def test_masters_come_back_as_they_were(kind: str, place: str) -> None:
    splitter = Splitter(CPU)
    for masters in MASTERS[kind]():
        assert_exact(masters, place, splitter)


@pytest.mark.parametrize("place", PLACES)
def test_several_chunks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_CHUNK_ON_CPU", 64)
    splitter = Splitter(CPU)
    for n in (64, 65, 127, 64 * 5 + 3):
        assert_exact(probe_masters(CPU)[:n].clone(), place, splitter)


def test_zeroed_low_bits_make_the_weight_the_master() -> None:
    weight = probe_masters(CPU).to(torch.bfloat16)
    low, moments, master = (torch.zeros(weight.numel(), dtype=d) for d in (torch.int16, torch.float32, torch.float32))
    Splitter(CPU).join(weight, low, moments, master)
    finite = ~weight.isnan()
    assert torch.equal(master[finite].view(torch.int32), weight.float()[finite].view(torch.int32))


def test_a_sign_that_a_moment_should_not_have_does_no_harm() -> None:
    """-0.0 and negative NaN (x86's default) appear in second moments; the bit must be the master's all the same."""
    master = from_bits(torch.tensor([0x3F800000, 0x3F80FFFF, 0x3F800001]))
    weight, low = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    moments = torch.tensor([-0.0, -0.0, -torch.nan])
    back = torch.empty(3)
    Splitter(CPU).split(master, weight, low, moments)
    Splitter(CPU).join(weight, low, moments, back)
    assert torch.equal(back, master)
    assert torch.equal(moments[:2], torch.zeros(2))


def test_nothing_is_allocated_after_the_first_call() -> None:
    splitter, master = Splitter(CPU), probe_masters(CPU)
    parts = split_of(master, "bitmap", splitter)
    mark = torch.empty(1, dtype=torch.int32)
    splitter.fingerprints(parts[0], 0, [(0, parts[0].numel())], mark)
    scratch, held = splitter._scratch, splitter.nbytes()
    with torch.profiler.profile(profile_memory=True) as profile:
        splitter.split(master, *parts)
        splitter.fingerprints(parts[0], 0, [(0, parts[0].numel())], mark)
        splitter.join(*parts, master)
    assert splitter._scratch is scratch
    assert splitter.nbytes() == held < 10 << 20
    assert (
        max((abs(event.cpu_memory_usage) for event in profile.events()), default=0) <= 64
    )  # scalars of the dispatcher


# ---- fingerprints


def test_fingerprints_of_rows_are_those_of_each_and_others_stay() -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = [
        (weight[:300], 0, [(0, 300)], 4),
        (weight[300:300], 7, [(0, 0)], 0),
        (weight[301:], 1 << 33, [(0, 5), (8, 699)], 1),
    ]
    found = torch.full((6,), 9, dtype=torch.int32)
    Splitter(CPU).fingerprint_rows(rows, found)
    expected = torch.full((6,), 9, dtype=torch.int32)
    for weights, first, ranges, index in rows:
        Splitter(CPU).fingerprints(weights, first, ranges, expected[index : index + len(ranges)])
    assert torch.equal(found, expected) and found[3] == found[5] == 9 and found[0] == 0
    alone = torch.full((1,), 9, dtype=torch.int32)
    Splitter(CPU).fingerprint_rows([(*rows[0][:3], 0)], alone)
    assert torch.equal(alone, expected[4:5])


# -----------------------------------------------------------------------------------------------------------


def fingerprint_of(weight: Tensor) -> int:
    mark = torch.full((1,), 7, dtype=torch.int32)
    Splitter(CPU).fingerprints(weight, 0, [(0, weight.numel())], mark)
    return int(mark)


def signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def expected_fingerprint(weight: Tensor) -> int:
    total = 0
    for place, code in enumerate(weight.view(torch.int16).tolist()):
        mixed = signed(place * 0x1E3779B1 + code * 0x05EBCA77)
        for shift, factor in ((15, 0x7FEB352D), (13, 0x046CA68B)):
            mixed = signed((mixed ^ (mixed >> shift)) * factor)
        total += mixed ^ (mixed >> 16)
    return signed(total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fingerprint_is_the_sum_it_says_it_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert fingerprint_of(weight) == expected_fingerprint(weight)
    monkeypatch.setattr(split, "_CHUNK_ON_CPU", 64)
    assert fingerprint_of(weight) == expected_fingerprint(weight)
    assert fingerprint_of(weight[:0]) == 0


@pytest.mark.parametrize("chunk", [64, 1 << 18])
def test_fingerprints_of_many_ranges_are_those_of_each(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between ranges counts for nothing; places count from where the row begins."""
    monkeypatch.setattr(split, "_CHUNK_ON_CPU", chunk)
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ranges = [(0, 3), (16, 16), (16, 63), (64, 65), (80, 700), (704, 1000)]
    found = torch.full((len(ranges),), 7, dtype=torch.int32)
    Splitter(CPU).fingerprints(weight, 5, ranges, found)
    for (a, b), mark in zip(ranges, found.tolist(), strict=True):
        alone = torch.zeros(1, dtype=torch.int32)
        Splitter(CPU).fingerprints(weight[a:b], 5 + a, [(0, b - a)], alone)
        assert int(alone) == mark
    weight[63] += 1
    again = torch.empty_like(found)
    Splitter(CPU).fingerprints(weight, 5, ranges, again)
    assert torch.equal(again, found)


def test_a_fingerprint_notices_edits_that_undo_each_other_in_a_linear_one() -> None:
    identity = torch.eye(64, dtype=torch.bfloat16)
    mark = fingerprint_of(identity.view(-1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        first, second, third, fourth = torch.randperm(64, generator=generator)[:4].tolist()
        exchanged = identity.clone()
        exchanged[[first, second]] = identity[[second, first]]
        rectangle = identity.clone()
        codes = rectangle.view(torch.int16)
        codes[first, third] += 1
        codes[second, fourth] += 1
        codes[first, fourth] -= 1
        codes[second, third] -= 1
        assert fingerprint_of(exchanged.view(-1)) != mark != fingerprint_of(rectangle.view(-1))


# ---- the fused twin steps aside
# -----------------------------------------------------------------------------------------------


def test_a_twin_that_agrees_is_accepted() -> None:
    random_state = torch.get_rng_state()
    assert split._matches_torch(split._plain(CPU), CPU)
    assert torch.equal(torch.get_rng_state(), random_state), "a run's dropout depends on nothing of this"


@pytest.mark.parametrize("wrong", ["split", "join", "fingerprints", "fingerprint_rows"])
def test_a_twin_that_differs_in_one_bit_is_refused(wrong: str) -> None:
    plain = split._plain(CPU)

    def off_by_one_bit(*arguments: Tensor) -> None:
        getattr(plain, wrong)(*arguments)
        target = arguments[{"split": 2, "join": 3, "fingerprints": 3, "fingerprint_rows": 1}[wrong]]
        target.view(-1).view(torch.uint8)[-4] ^= 1

    names = ("split", "join", "fingerprints", "fingerprint_rows")
    twin = SimpleNamespace(**{name: getattr(plain, name) for name in names} | {wrong: off_by_one_bit})
    assert not split._matches_torch(twin, CPU)


@pytest.mark.parametrize("failure", ["absent", "differs", "raises"])
def test_without_a_usable_twin_the_torch_version_works_and_says_so(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def agrees(*_: object) -> bool:
        if failure == "raises":
            raise RuntimeError("no compiler")
        return False

    monkeypatch.setattr(split_triton, "available", failure != "absent")
    monkeypatch.setattr(split, "_matches_torch", agrees)
    split._checked_kernels.cache_clear()
    splitter = Splitter(torch.device("cuda"))  # makes no CUDA tensor before its first use
    split._checked_kernels.cache_clear()
    assert splitter._fused is None
    expected = {"absent": "Triton is not installed", "differs": "they differ", "raises": "RuntimeError: no compiler"}
    assert expected[failure] in caplog.text


def test_autograd_notices_what_the_twin_has_written() -> None:
    """A kernel raises no version counter, as torch's in-place operations do."""
    splitter, plain = Splitter(CPU), split._plain(CPU)
    twin: Any = SimpleNamespace(split=lambda master, weight, *rest: plain.split(master, weight.data, *rest))
    splitter._fused = twin
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    squares = (weight * weight).sum()
    splitter.split(torch.rand(64), weight.detach(), torch.empty(64, dtype=torch.int16), torch.rand(64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
