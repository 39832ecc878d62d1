"""The bodies of `lightstep bench --iteration` and `lightstep bench --timeline`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightstep.bench.iteration import registry
from lightstep.bench.iteration.contender import Task
from lightstep.bench.iteration.registry import Entry
from lightstep.bench.iteration.shape import TrainedShape
from lightstep.bench.measure import Effort
from lightstep.bench.progress import Progress
from lightstep.bench.ranks import Ranks, local_device, share_cores

_CPU_DEFAULTS = {"params": 2e6, "tokens": "512,128", "sequence": 64, "steps": 2, "warmup": 1, "rounds": 1}
_TIMELINE_DEFAULTS = {"tokens": "65536", "steps": 2}  # beside those of a GPU
_GPU_DEFAULTS = {"params": 3e9, "tokens": "65536,16384", "sequence": 4096, "steps": 4, "warmup": 2, "rounds": 1}


@dataclass(frozen=True)
class Plan:
    """What the command line asks for, checked."""

    task: Task
    effort: Effort
    rounds: int
    entries: Sequence[Entry]


def plan(
    strategies: str,
    peers: str | None,
    asked: Mapping[str, Any],
    layers: int | None = None,
    device_name: str | None = None,
    seed: int = 0,
    timeline: bool = False,
) -> Plan:
    """From the options. `asked`: params, tokens, sequence, steps, warmup and rounds, None for the defaults.

    Raises:
        ConfigError, ValueError: an option is wrong; with what is allowed.
    """
    device = local_device(device_name)
    if timeline and device.type != "cuda":
        raise ValueError("--timeline needs a GPU: on a CPU there are no streams, and nothing crosses a link")
    defaults = _GPU_DEFAULTS if device.type == "cuda" else _CPU_DEFAULTS
    changed = {key: value for key, value in asked.items() if value is not None}
    given = {**defaults, **(_TIMELINE_DEFAULTS if timeline else {}), **changed}
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    entries = [*registry.chosen_strategies(strategies, sharded), *registry.chosen_peers(peers or "none")]
    if not entries:
        raise ValueError("--strategies none and no --peers: nothing to measure")
    sequence = int(given["sequence"])
    shape = TrainedShape.near(int(given["params"]), layers)
    task = Task(shape, device, seed, sequence, token_counts(str(given["tokens"]), sequence))
    return Plan(task, Effort(int(given["steps"]), int(given["warmup"])), int(given["rounds"]), entries)


def token_counts(text: str, sequence: int) -> tuple[int, ...]:
    """`--tokens`: whole numbers of sequences, ascending, each once.

    Raises:
        ValueError: no numbers, or no multiples of `sequence`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--tokens {text}: whole numbers separated by commas are needed, for example 65536,16384")
    for number in map(int, parts):
        if number < 1 or number % sequence:
            raise ValueError(f"--tokens {number}: a multiple of --sequence {sequence} is needed; change one of the two")
    return tuple(sorted(set(map(int, parts))))


def measure(plan: Plan, output: Path) -> dict[str, Any]:
    """`lightstep bench --iteration`: writes iteration.json and iteration.png to `output`; returns the JSON's values."""
    from lightstep.bench.iteration.chart import draw
    from lightstep.bench.iteration.report import as_json, print_table
    from lightstep.bench.iteration.run import Run, measure_all, start
    from lightstep.bench.report import write_json

    output.mkdir(parents=True, exist_ok=True)
    share_cores()
    ranks = Ranks(plan.task.device)

    def save(run: Run) -> dict[str, Any]:
        values = as_json(run)
        if ranks.is_main:
            write_json(values, output / "iteration.json")
        return values

    try:
        run = start(plan.task, plan.effort, plan.rounds, ranks, plan.entries)
        with Progress(ranks.is_main) as progress:

            def show(sentence: str) -> None:
                progress.show(sentence)
                save(run)

            measure_all(run, show)
        values = save(run)
        if ranks.is_main:
            draw(values, output / "iteration.png")
            console = Console()
            print_table(values, console)
            written = f"{output / 'iteration.json'} and {output / 'iteration.png'} written"
            console.print(written, highlight=False)
        return values
    finally:
        ranks.close()


def record(plan: Plan, output: Path) -> list[Path]:
    """`lightstep bench --timeline`: writes a trace and a picture for each contender; returns the pictures' paths."""
    from lightstep.bench.iteration.timeline import record_all

    output.mkdir(parents=True, exist_ok=True)
    share_cores()
    ranks = Ranks(plan.task.device)
    try:
        with Progress(ranks.is_main) as progress:
            recordings = record_all(plan.task, plan.effort, ranks, plan.entries, output, progress.show)
        if ranks.is_main:
            console = Console()
            for recording in recordings:
                for picture in recording.pictures:
                    console.print(f"{picture.with_suffix('.json')} and {picture} written", highlight=False)
                for sentence in recording.said:
                    console.print(sentence, highlight=False, markup=False)
                if recording.note is not None:
                    console.print(f"{recording.entry.label}: {recording.note}", highlight=False, markup=False)
        return [picture for recording in recordings for picture in recording.pictures]
    finally:
        ranks.close()
