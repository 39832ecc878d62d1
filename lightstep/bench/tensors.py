"""`lightstep bench --tensors`: models of many tiny tensors, whose steps measure the overhead of Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.bench.machine import elapsed, synchronize
from lightstep.bench.peers import TorchEmptyHooks, TorchForeach, TorchResident
from lightstep.bench.report import Column, Panel, Values, View
from lightstep.bench.run import Measurement, Row, Run, Spread, Task

_WIDTH, _RANK, _EXPERT = 64, 8, 16
_WEIGHT_STD = 0.02


class Adapter(nn.Module):
    """A LoRA adapter of rank 8: two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(_WIDTH, _RANK, bias=False), nn.Linear(_RANK, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class Expert(nn.Module):
    """A gated feed-forward: three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_WIDTH, _EXPERT, bias=False) for _ in range(2))
        self.down = nn.Linear(_EXPERT, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layers(nn.Module):
    """Layers of equal parts, each used once in a forward; the loss is the sum of the output."""

    def __init__(self, layers: int, parts: int, part: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*(part() for _ in range(parts))) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


SIZES: dict[str, tuple[int, Callable[[], Layers]]] = {
    "lora": (448, lambda: Layers(32, 7, Adapter)),
    "moe": (9216, lambda: Layers(24, 128, Expert)),
}
"""Name: number of tensors and model. 32 layers with seven adapters each; 24 layers of 128 experts."""


@dataclass(frozen=True)
class TensorsTask(Task):
    """Forward, backward and step of a model of `case` tensors; backward and step are timed by the host's clock.

    The time of a step includes all its deferred work. Each time, the same backward also runs on a plain copy of the
    model, so the cost of hooks is measured in pairs.
    """

    stem = "tiny"
    case_name = "tensors"
    threads = 1  # the tensors are too small for more
    peers = (TorchForeach, TorchResident, TorchEmptyHooks)

    def model(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        build = next(build for tensors, build in SIZES.values() if tensors == self.case)
        torch.manual_seed(self.seed)
        with self.device:
            model = build()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=_WEIGHT_STD)
        return model.to(dtype)

    def measure(self, measurement: Measurement) -> None:
        contender, effort = measurement.contender, measurement.run.effort
        plain = self.model(contender.gradient_dtype)
        batch = torch.ones(1, _WIDTH, dtype=contender.gradient_dtype, device=self.device)

        def update() -> None:
            contender.update()
            contender.finish()

        steps, hooked, without = [], [], []
        for _ in range(1 + effort.warmup + effort.steps):
            loss = plain(batch)
            without.append(self._timed(loss.backward))
            plain.zero_grad()
            with contender.accumulate():
                loss = contender.model(batch)
                hooked.append(self._timed(partial(contender.backward, loss)))
                steps.append(self._timed(update))
        measurement.row.windows.append(steps[1 + effort.warmup :])
        for key, times in (("first_ms", steps[:1]), ("backward_ms", hooked), ("plain_backward_ms", without)):
            measurement.row.extra.setdefault(key, []).extend(times[-effort.steps :])

    def _timed(self, work: Callable[[], object]) -> float:
        """ms until host and device are done."""
        return elapsed(work, partial(synchronize, self.device)) * 1e3

    def head(self, run: Run) -> Values:
        return {"tensors": run.cases, "steps": run.effort.steps}

    def figures(self, run: Run, row: Row) -> Values:
        """Medians over all rounds, of the slowest rank."""
        spreads = {key: Spread.of(times, statistics.median, run.ranks) for key, times in row.extra.items()}
        hooks = spreads["backward_ms"].middle / spreads["plain_backward_ms"].middle - 1
        return {
            **Spread.of(row.times, statistics.median, run.ranks).values("step_ms"),
            **{key: spread.middle for key, spread in spreads.items()},
            "windows_ms": row.windows,
            "hooks_percent": 100 * hooks,
        }

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        measured = [shown for shown in values if "step_ms" in shown]
        by_hand = next((shown["step_ms"] for shown in measured if shown["name"] == TorchForeach.name), None)
        for shown in measured:
            shown["times_by_hand"] = None if by_hand is None else shown["step_ms"] / by_hand


def tensor_counts(text: str) -> tuple[int, ...]:
    """`--tensors`: `tiny` for all, or names of them.

    Raises:
        ValueError: an unknown name.
    """
    names = list(SIZES) if text == "tiny" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SIZES:
            raise ValueError(f"--tensors {name}: allowed are tiny (all of them), {', '.join(SIZES)}")
    return tuple(sorted({SIZES[name][0] for name in names}))


# -- how it is shown --------------------------------------------------------------------------------------------------


def _title(values: Values, count: Any) -> str:
    where = f"{values['hardware']['device']}, torch {values['versions']['torch']}"
    return f"One optimizer step: {count} small tensors, {where}"


TensorsTask.view = View(
    key="step_ms",
    columns=(
        Column("first\nstep, ms", "first_ms", priority=5),
        Column("step\nms", "step_ms", priority=9),
        Column("from – to\nms", "step_ms_range", priority=7),
        Column("×\nby hand", "times_by_hand", ".2f", 8),
        Column("backward\nms", "backward_ms", priority=4),
        Column("hooks\n% of it", "hooks_percent", "+.1f", 6),
    ),
    panels=(
        Panel("ms per step", "step_ms", spread="step_ms_range"),
        Panel("ms per backward", "backward_ms", base="plain_backward_ms", base_label="backward without hooks"),
    ),
    title=_title,
    footnotes=lambda values: [
        f"Medians. A step includes its deferred work. By hand: {TorchForeach.name}. Hooks: how much longer a",
        "backward takes than that of a plain copy of the model.",
    ],
    case="tensors",
)
