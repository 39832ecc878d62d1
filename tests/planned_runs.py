"""Plans beside what was measured, for each row in the stored results of `lightstep bench --iteration`:
``python -m tests.planned_runs`` prints the table of docs/plan.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightstep.config import StrategyConfig, merge_overrides, parse_config, read_yaml
from lightstep.plan.memory import rules_for, state_by_rules
from lightstep.plan.model import SHAPES, load_shape
from lightstep.plan.planning import Planner, Workload
from lightstep.plan.timing import Link, profile_of_device
from lightstep.presets import read_source

MEMORY_GOAL, TIME_GOAL = 0.05, 0.10
_CLASSES = {"AdamW": torch.optim.AdamW, "Muon + AdamW": torch.optim.Muon}
"""By `optimizer.class` in a result."""

shape = cache(load_shape)
"""Planning changes no model."""


@dataclass(frozen=True)
class Comparison:
    """One row: planned and measured bytes and milliseconds. ``planned_ms`` is ``None`` if no time is planned."""

    file: str
    device: str
    model: str
    tokens: int
    strategy: str
    planned_bytes: int
    measured_bytes: int
    planned_ms: float | None
    measured_ms: float

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.measured_bytes - 1

    @property
    def time_error(self) -> float | None:
        return None if self.planned_ms is None else self.planned_ms / self.measured_ms - 1

    @property
    def within(self) -> bool:
        return abs(self.memory_error) <= MEMORY_GOAL and abs(self.time_error or 0.0) <= TIME_GOAL


def compare(folder: Path) -> list[Comparison]:
    """Compare every row of a lightstep strategy in the folder's JSON files of GPU iterations."""
    rows: list[Comparison] = []
    for file in sorted(folder.glob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        is_result = isinstance(values, dict) and {"iterations", "rows"} <= set(values)
        if is_result and "name" in values["model"] and values["optimizer"]["class"] in _CLASSES:
            rows += _compare_file(file.name, values)
    return rows


def _compare_file(file: str, values: Mapping[str, Any]) -> Iterator[Comparison]:
    profile = profile_of_device(values["hardware"]["device"])
    model = values["model"]
    if profile is None or model["name"] not in SHAPES:
        return
    profile = replace(profile, link=_measured_link(values["link_gb_per_s"]))
    classes = values["optimizer"]["class"]
    named = shape(model["name"])
    optimizer = state_by_rules(named, rules_for(_CLASSES[classes]))
    planners: dict[int, Planner] = {}
    for row in values["rows"]:
        if row["kind"] != "lightstep" or not row.get("iteration_ms"):
            continue
        tokens, clips = row["tokens"], _was_clipped(row, values)
        if clips is None:  # a plan is for steps that are all clipped, or none
            continue
        work = Workload(tokens, values["sequence"], 1, True, model["loss_chunk_tokens"])
        if tokens not in planners:
            planners[tokens] = Planner(named, work, profile, values["ranks"], optimizer=optimizer)
        label = row["label"] + ("" if classes == "AdamW" else ", Muon")
        config = _parse_label(row["label"])
        if config.sharding.kind == "deepspeed":
            continue
        plan = planners[tokens].plan(label, config)
        time = plan.clipped_time if clips else plan.time
        ranks = f"{values['ranks']} × " if values["ranks"] > 1 else ""
        planned_ms = None if time is None else time.iteration
        measured = row["peak_device_bytes"], planned_ms, row["iteration_ms"]
        yield Comparison(file, ranks + profile.name, model["name"], tokens, label, plan.memory.peak, *measured)


def _measured_link(rates: Mapping[str, float]) -> Link:
    """The link of a run, which measures it on every rank at once before the first contender."""
    alone = min(rates["to_device"], rates["to_host"])
    return Link(alone, rates["duplex"], None, "measured at the beginning of the run")


def _was_clipped(row: Mapping[str, Any], values: Mapping[str, Any]) -> bool | None:
    """Whether the measured steps were clipped (``clipped_steps`` is null without a limit); ``None``: only some."""
    clipped: int = row["clipped_steps"] or 0
    return None if 0 < clipped < values["iterations"] else clipped > 0


def _parse_label(label: str) -> StrategyConfig:
    """Parse a label such as ``stream scope=unit``: a strategy, and overrides without their sections."""
    name, *assignments = label.split()
    values = parse_config(read_source(name)[1], name).model_dump()
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        section = next(part for part, keys in values.items() if isinstance(keys, dict) and key in keys)
        values = merge_overrides(values, {f"{section}.{key}": read_yaml(text)})
    return parse_config(values, label)


def as_markdown(rows: list[Comparison]) -> str:
    """A Markdown table for the documentation."""
    lines = [
        "| device | model | tokens | strategy | peak, GB: planned | measured | off by "
        "| step, ms: planned | measured | off by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        planned, measured = row.planned_bytes / 1e9, row.measured_bytes / 1e9
        memory = f"{planned:.1f} | {measured:.1f} | {_percent(row.memory_error, MEMORY_GOAL)}"
        time = f"– | {row.measured_ms:,.0f} | –"
        if row.planned_ms is not None and row.time_error is not None:
            time = f"{row.planned_ms:,.0f} | {row.measured_ms:,.0f} | {_percent(row.time_error, TIME_GOAL)}"
        name = f"[{row.device}](benchmarks/{row.file})"
        lines.append(f"| {name} | {row.model} | {row.tokens:,} | `{row.strategy}` | {memory} | {time} |")
    return "\n".join(lines) + "\n"


def _percent(error: float, goal: float) -> str:
    text = f"{100 * error:+.1f} %"
    return text if abs(error) <= goal else f"**{text}**"


RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"


if __name__ == "__main__":
    sys.stdout.write(as_markdown(compare(RESULTS)))
