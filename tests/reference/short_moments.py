"""The textbook loop whose moments have fewer bits between steps: widened, torch's own step in fp32, rounded.

The noise of stochastic rounding is written out in plain unsigned arithmetic. Nothing here imports lightstep.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.reference.plain_loop import ReferenceLoop

KEPT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta")


class NearestMoments(ReferenceLoop):
    """fp32 masters; moments are rounded to nearest after every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[Tensor, dict[str, Tensor]] = {}
        self.optimizer.register_step_pre_hook(lambda *_: self._widen())
        self.optimizer.register_step_post_hook(lambda *_: self._round())

    @torch.no_grad()
    def _widen(self) -> None:
        for master, kept in self.kept.items():
            for key, value in kept.items():
                self.optimizer.state[master][key] = value.float()

    @torch.no_grad()
    def _round(self) -> None:
        for master, state in self.optimizer.state.items():
            if master.grad is None and master not in self.kept:  # Adagrad has made its state already
                continue
            found = {key: value for key, value in state.items() if key in KEPT and isinstance(value, Tensor)}
            self.kept[master] = {key: self.rounded(key, value, state) for key, value in found.items()}

    def rounded(self, key: str, value: Tensor, state: dict[str, Any]) -> Tensor:
        return torch.empty_like(value, dtype=torch.bfloat16).copy_(value)

    def state(self, param: Tensor) -> dict[str, Any]:
        return {**super().state(param), **self.kept.get(self.masters[param], {})}


class StochasticMoments(NearestMoments):
    """Moments are rounded by noise of seed, step, entry and element; to nearest where the class counts no steps."""

    def rounded(self, key: str, value: Tensor, state: dict[str, Any]) -> Tensor:
        if "step" not in state:
            return super().rounded(key, value, state)
        return stochastically_rounded(value, key, int(state["step"]), self.rounding_seed)


class Int8Moments(NearestMoments):
    """8-bit codes of roots, with a scale for each block of a row; parameters without such rows stay in fp32."""

    stochastic = False

    def rounded(self, key: str, value: Tensor, state: dict[str, Any]) -> Tensor:
        block = block_of(value.shape)
        if not block:
            return value.clone()
        step = int(state["step"]) if self.stochastic and "step" in state else None
        flat = value.contiguous().cpu().numpy().reshape(-1, block)
        found = in_eight_bits(flat, key in NEVER_NEGATIVE, key, step, self.rounding_seed)
        return torch.empty_like(value).copy_(torch.from_numpy(found).view(value.shape))


class StochasticInt8Moments(Int8Moments):
    stochastic = True


NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta")


def block_of(shape: torch.Size) -> int:
    """The largest of 128, 64, 32 and 16 that divides the rows of a matrix; else 0."""
    blocks = (block for block in (128, 64, 32, 16) if len(shape) > 1 and shape[-1] and not shape[-1] % block)
    return next(blocks, 0)


def in_eight_bits(value: np.ndarray, never_negative: bool, key: str, step: int | None, seed: int = 0) -> np.ndarray:
    """``value`` (fp32, ``[blocks, elements]``) after coding and decoding."""
    scale = np.abs(value).max(1, keepdims=True)
    part = np.abs(value) / np.where(scale > 0, scale, np.float32(1))
    up = np.full(value.shape, 0.5, np.float32)
    if step is not None:
        bits = noise(key, step, seed, np.arange(value.size)) >> 4
        up = ((bits.astype(np.float32) + np.float32(0.5)) / np.float32(4096)).reshape(value.shape)

    def power(code: np.ndarray) -> np.ndarray:
        root = code * np.float32(1 / 255 if never_negative else 1 / 127)
        return (root * root) * (root * root) if never_negative else root * root

    largest = np.float32(255 if never_negative else 127)
    root = np.sqrt(np.sqrt(part)) if never_negative else np.sqrt(part)
    least = np.nan_to_num(np.clip(np.floor(root * largest) - 2, 0, largest))  # the root is a few bits off, not a code
    assert np.all((least == 0) | (power(least - up) <= part))
    code = least
    for candidate in (np.minimum(least + np.float32(further), largest) for further in range(1, 6)):
        code = np.where(power(candidate - up) <= part, candidate, code)
    assert np.all((code < least + 5) | (code == largest))
    if never_negative:
        code = np.where(value > 0, np.maximum(code, np.float32(1)), np.float32(0))
    return np.copysign(power(code) * scale, 1 if never_negative else value)


def stochastically_rounded(
    value: Tensor, key: str, step: int, seed: int = 0, numbers: np.ndarray | None = None
) -> Tensor:
    """``value`` (fp32) in bf16."""
    bits = value.contiguous().cpu().numpy().view(np.uint32)
    places = np.arange(bits.size) if numbers is None else numbers
    codes = (bits.astype(np.uint64) + noise(key, step, seed, places).reshape(bits.shape)) >> 16
    codes = np.where(np.isnan(bits.view(np.float32)), (bits >> 16) | 0x40, codes)
    rounded = torch.from_numpy(codes.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.empty_like(value, dtype=torch.bfloat16).copy_(rounded)  # with its strides, which torch insists on


def noise(key: str, step: int, seed: int, numbers: np.ndarray) -> np.ndarray:
    """16 bits for each element; the seed says which number the first one has."""
    a = mixed((step * 0x85EBCA77 + zlib.crc32(key.encode())) % 2**32)
    b = mixed((a + 0xC2B2AE3D) % 2**32)
    x = ((numbers.astype(np.uint64) + mixed(seed)) % 2**32 * 0x9E3779B1 + a) % 2**32
    x ^= x >> 16
    x = (x * 0x7FEB352D + b) % 2**32
    x ^= x >> 15
    return (x * 0x846CA68B) % 2**32 >> 16


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16
