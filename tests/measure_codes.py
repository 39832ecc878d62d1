"""Codes for moments in 8 bits, compared in plain torch: ``python -m tests.measure_codes --device cuda --processes 16
--steps 2000 --seeds 3 --output h200-codes.json``.

AdamW in fp32 trains the transformer of :mod:`tests.measure_moments`. Between steps, its moments (those of matrices) are
kept in a code. Beside them, exact moments follow the same gradients. Two errors of an update are measured, relative to
the update by exact moments: ``once``, where the exact moments were coded after the previous step, and ``carried``,
where they have been coded after every step of the run. Losses are of held-out text, in nats per byte.

========== ==================================================================== =========================== =======
code       first moment                                                         second moment               block
========== ==================================================================== =========================== =======
int8       ``(code / 127)²``, lightstep's                                       ``(code / 255)⁴``, above 0  128
dynamic    table of 256 numbers, bitsandbytes'                                  table without a sign        256
companding ``φ(m) = 2m / (1 + |m|)`` is linear in the code, FlashOptim's         ``(code / 255)²``           32
linear     ``code / 127``                                                       ``(code / 255)²``           128
========== ==================================================================== =========================== =======

All are parts of a block's largest magnitude, which is kept in fp32. ``--output`` is written after each run, and
``--begun`` goes on from what a measurement has that was cut off.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.measure_moments import BATCH, LENGTH, Measurement, Model, add_arguments, texts
from tests.reference.short_moments import in_eight_bits

CODES = ("float32", "bfloat16", "int8", "dynamic", "companding", "linear")
ROUNDINGS = ("nearest", "stochastic")
LR, BETA1, BETAS, EPS, DECAY, MAX_NORM, WARM_UP = 3e-3, 0.9, (0.95, 0.999), 1e-8, 0.1, 1.0, 50

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Levels:
    """``to_code``: from parts of the scale, 0 to 1, to real numbers, of which integers are codes; ``to_part``: back.

    Attributes:
        smallest: the code of the smallest part above zero.
    """

    to_code: Map
    to_part: Map
    smallest: float = 0.0


def powers(steps: int, root: int, smallest: float = 0.0) -> Levels:
    return Levels(lambda part: steps * part ** (1 / root), lambda code: (code / steps) ** root, smallest)


def dynamic(signed: bool) -> Levels:
    """Seven decades with twice as many steps in each as in the one below, and 0 and 1 (arXiv:1511.04561)."""
    parts = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1, dtype=torch.float64)
        parts += ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
    table = functools.cache(lambda device: torch.tensor(sorted(parts), device=device))

    def to_code(part: Tensor) -> Tensor:
        here = table(part.device)
        below = torch.bucketize(part, here, right=True).sub_(1).clamp_(0, len(here) - 2)
        return below + (part - here[below]) / (here[below + 1] - here[below])

    return Levels(to_code, lambda code: table(code.device)[code.long()])


_COMPANDED = Levels(lambda part: 127 * (2 * part / (1 + part)), lambda code: code / (254 - code))
IN_8_BITS: dict[str, tuple[int, Levels, Levels]] = {
    "int8": (128, powers(127, 2), powers(255, 4, smallest=1.0)),
    "dynamic": (256, dynamic(signed=True), dynamic(signed=False)),
    "companding": (32, _COMPANDED, powers(255, 2)),
    "linear": (128, powers(127, 1), powers(255, 2)),
}
"""By code: elements of a block, and the levels of the first and the second moment."""


def coded(code: str, rounding: str, moment: int, value: Tensor) -> Tensor:
    """``value`` (fp32, flat) after coding and decoding, as the first (0) or the second moment (1)."""
    if code == "float32":
        return value.clone()
    if code == "bfloat16":
        if rounding == "nearest":
            return value.bfloat16().float()
        bits = value.view(torch.int32)
        return (bits + torch.randint_like(bits, 1 << 16)).bitwise_and_(-(1 << 16)).view(torch.float32)
    block, levels = IN_8_BITS[code][0], IN_8_BITS[code][1 + moment]
    magnitudes = value.abs().view(-1, block)
    scale = magnitudes.amax(1, keepdim=True)
    exact = levels.to_code(magnitudes / scale.clamp(min=torch.finfo(torch.float32).tiny))
    up = torch.rand_like(exact) if rounding == "stochastic" else 0.5
    largest = levels.to_code(torch.ones((), device=value.device)).round()
    codes = (exact + up).floor_().clamp_(max=largest)
    codes = torch.where(value.view(-1, block) < 0, codes.clamp(max=127), codes)  # the dynamic table has 1 and no -1
    codes = torch.where(magnitudes > 0, codes.clamp(min=levels.smallest), codes)
    return (levels.to_part(codes) * scale).view(-1).copysign(value)


def check_int8() -> None:
    """The code ``int8`` above is that of the reference to which lightstep's is held bit for bit."""
    value = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) ** 3 * 1e-4
    for moment, given in enumerate((value, value.abs())):
        expected = torch.from_numpy(in_eight_bits(np.asarray(given), moment == 1, "", None))
        torch.testing.assert_close(coded("int8", "nearest", moment, given.flatten()).view_as(given), expected)


class AdamW:
    """On all parameters in one flat tensor, matrices first. ``keep`` is applied to their moments after each step."""

    def __init__(self, model: torch.nn.Module, beta2: float, keep: Callable[[int, Tensor], Tensor]) -> None:
        parameters = sorted(model.parameters(), key=lambda parameter: parameter.dim() < 2)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros_like(self.weights)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, *both in zip(parameters, self.weights.split(sizes), self.gradients.split(sizes), strict=True):
            parameter.data, parameter.grad = (flat.view(parameter.shape) for flat in both)
        self._matrices = sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
        self._keep, self._betas, self.number = keep, (BETA1, beta2), 0
        self.exact, self.kept = ([torch.zeros_like(self.weights) for _ in range(2)] for _ in range(2))

    def step(self, lr: float, measures: bool) -> dict[str, float]:
        """One step, with the errors of its update if it ``measures``."""
        self.number += 1
        gradient = self.gradients.mul_((MAX_NORM / (self.gradients.norm() + 1e-6)).clamp(max=1.0))
        once = self._coded(self.exact) if measures else None
        for moments in (self.exact, self.kept, *([once] if once else [])):
            for moment, beta, value in zip(moments, self._betas, (gradient, gradient * gradient), strict=True):
                moment.lerp_(value, 1 - beta)
        update = self._update(self.kept)
        errors = {}
        if once is not None:
            right, *others = (self._update(one)[: self._matrices] for one in (self.exact, once, self.kept))
            ratios = [float((other - right).norm() / right.norm()) for other in others]
            errors = dict(zip(("once", "carried"), ratios, strict=True))
        self.weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)
        self.gradients.zero_()
        self.kept = self._coded(self.kept)
        return errors

    def _coded(self, moments: list[Tensor]) -> list[Tensor]:
        n = self._matrices
        return [torch.cat([self._keep(i, moment[:n]), moment[n:]]) for i, moment in enumerate(moments)]

    def _update(self, moments: list[Tensor]) -> Tensor:
        first, second = (m / (1 - beta**self.number) for m, beta in zip(moments, self._betas, strict=True))
        return first / second.sqrt_().add_(EPS)


def run(job: tuple[str, str, float, int, int, str]) -> dict[str, Any]:
    """One run: errors of updates at some steps, and held-out losses after each quarter."""
    code, rounding, beta2, seed, steps, name = job
    device = torch.device(name)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    model = Model().to(device)
    optimizer = AdamW(model, beta2, partial(coded, code, rounding))
    learned, held_out = texts(device)
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(LENGTH + 1, device=device)
    errors: dict[str, dict[str, float]] = {}
    losses = []
    for number in range(1, steps + 1):
        starts = torch.randint(len(learned) - LENGTH - 1, (BATCH, 1), generator=generator)
        model(learned[starts.to(device) + places].long()).backward()
        lr = LR * min(number / WARM_UP, 0.1 + 0.9 * (1 - (number - 1) / steps))
        found = optimizer.step(lr, number in (10, 100) or number % (steps // 4) == 0)
        if found:
            errors[str(number)] = found
        if number % (steps // 4) == 0:
            with torch.no_grad():
                losses.append(float(model(held_out)))
    return {"code": f"{code} {rounding}", "beta2": beta2, "seed": seed, "errors": errors, "held_out_loss": losses}


def spread(values: list[float], digits: int = 4) -> str:
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codes", nargs="+", default=CODES, choices=CODES)
    parser.add_argument("--betas", nargs="+", type=float, default=BETAS, help="beta2")
    add_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    check_int8()
    kinds = [(code, rounding) for code in given.codes for rounding in ROUNDINGS[: 1 + (code != "float32")]]
    cases = [(*kind, beta2) for beta2 in given.betas for kind in kinds]
    jobs = {
        (f"{code} {rounding}", beta2, seed): (code, rounding, beta2, seed, given.steps, given.device)
        for seed in range(given.seeds)
        for code, rounding, beta2 in cases
    }
    hardware = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    what = "relative errors of updates by step, and held-out losses (nats per byte) after each quarter"
    rows = Measurement(given, "tests.measure_codes", hardware, what, ("code", "beta2", "seed")).measure(run, jobs)
    for code, rounding, beta2 in cases:
        own = [row for row in rows if (row["code"], row["beta2"]) == (f"{code} {rounding}", beta2)]
        sys.stdout.write(f"{beta2} {code} {rounding}: loss {spread([row['held_out_loss'][-1] for row in own])}\n")
        for number in own[0]["errors"]:
            once, carried = ([row["errors"][number][kind] for row in own] for kind in ("once", "carried"))
            sys.stdout.write(f"    step {number:>5}: error once {spread(once)}, carried {spread(carried)}\n")


if __name__ == "__main__":
    main()
