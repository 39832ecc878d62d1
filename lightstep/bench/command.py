"""The body of `lightstep bench`. torch is imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from lightstep.bench.contender import Task
    from lightstep.bench.report import Values
    from lightstep.bench.run import Run

FAILED = 1
"""The exit code when a contender failed."""

_ITERATION_CPU = {"params": 2e6, "tokens": "512,128", "sequence": 64, "steps": 2, "warmup": 1, "rounds": 1}
_ITERATION_GPU = {"params": 3e9, "tokens": "65536,16384", "sequence": 4096, "steps": 4, "warmup": 2, "rounds": 1}
_TINY = {"steps": 5, "warmup": 1, "rounds": 3}
_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": (
        {"params": 2e6, "steps": 4, "warmup": 1, "rounds": 2},
        {"params": 1e9, "steps": 8, "warmup": 2, "rounds": 2},
    ),
    "iteration": (_ITERATION_CPU, _ITERATION_GPU),
    "timeline": (_ITERATION_CPU, {**_ITERATION_GPU, "tokens": "65536", "steps": 2}),
    "tensors": (_TINY, _TINY),
}
"""On a CPU and on a GPU."""

_MEASURED = {"strategies", "peers", "steps", "warmup"}
_USED = {
    "step": {*_MEASURED, "rounds", "params", "layers", "optimizer", "checkpoints"},
    "iteration": {
        *_MEASURED,
        "optimizer",
        "rounds",
        "params",
        "layers",
        "tokens",
        "sequence",
        "max_norm",
        "clip_every",
        "iteration",
    },
    "timeline": {*_MEASURED, "optimizer", "params", "layers", "tokens", "sequence", "max_norm", "timeline"},
    "tensors": {*_MEASURED, "rounds", "tensors"},
    "roles": {"params", "layers", "roles"},
}
_ANYWHERE = {"output", "device", "seed"}


def bench(
    strategies: Annotated[
        str,
        typer.Option(
            help="Names or paths, separated by commas; NAME:section.key=VALUE overrides a key. 'default': resident, "
            "bulk and stream; with --iteration or --tensors resident, stream and stream-overlap; in iterations on "
            "several ranks those of fsdp2. 'none': no strategy."
        ),
    ] = "default",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Libraries to compare with, separated by commas; 'all' or 'none'. Default: all, in iterations none."
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            help="Size of the model, for example 1e9. Default: 2e6 on a CPU; on a GPU 1e9, in whole iterations 3e9."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Transformer blocks. Default: as many as Llamas of that width have.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Timed steps per round. Default: 8 on a GPU, 4 on a CPU; iterations: 4 and 2; in a timeline 2."
        ),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=1, help="Untimed steps before them. Default: 2 on a GPU, 1 on a CPU.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How often each is built and timed, in turn. Default: 2, in iterations 1, with --tensors 3.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="What everybody steps with: adamw, or muon on the hidden matrices and AdamW on the rest; peers that "
            "cannot are skipped. Default: adamw."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the JSON file and the chart, or the timelines. Default: a new one in runs/bench."
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Also save every strategy's checkpoint in this folder, timed beside plain files."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, and of gradients or tokens.")] = 0,
    iteration: Annotated[
        bool, typer.Option("--iteration", help="Whole training iterations of a Llama: forward, backward and step.")
    ] = False,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline", help="A profiler's trace of some iterations of each, and a picture of its lanes. Needs a GPU."
        ),
    ] = False,
    tensors: Annotated[
        str | None,
        typer.Option(
            help="The Python time of a step and of backward hooks: lora (448 small tensors), moe (9216), tiny (both)."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Whole iterations: tokens per step and rank, separated by commas. "
            "Default: 65536,16384 on a GPU, 512,128 on a CPU; in a timeline the first of them."
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(min=1, help="Whole iterations: tokens per sequence. Default: 4096 on a GPU, 64 on a CPU."),
    ] = None,
    max_norm: Annotated[
        float | None,
        typer.Option(
            help="Whole iterations, without peers: limit of the global norm. Default: 1, which clips the first steps."
        ),
    ] = None,
    clip_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Whole iterations, without peers: every N-th step is clipped, whatever the limit of the others is.",
        ),
    ] = None,
    roles: Annotated[
        bool, typer.Option("--roles", help="Memory of a worker that only generates, with the role for it and without.")
    ] = False,
) -> None:
    """Measure strategies and other libraries side by side on this machine: one optimizer step on a Llama-shaped stack.

    All do the same work: global norm, clipping, AdamW in fp32, new bf16 weights. With --optimizer muon the matrices of
    the blocks go to Muon. Under torchrun all ranks measure at once, and each has its share of the cores.

    With --iteration all train a Llama, with activation checkpointing, and the time and memory of whole iterations are
    shown beside those without an optimizer. With --tensors the tensors are so small that only Python takes time. With
    --roles the memory of one rollout worker is measured.

    Exit code 1: a contender failed; the others have their figures.
    """
    options = dict(locals())
    from lightstep.config import ConfigError

    if strategies == "default":
        options["strategies"] = None
    asked = {name: value for name, value in options.items() if value is not None and value is not False}
    try:
        values = _run(_mode(asked), asked)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if any(row.get("note") and not row["skipped"] for row in values["rows"]):
        raise typer.Exit(FAILED)


def _mode(asked: Mapping[str, Any]) -> str:
    """What is measured.

    Raises:
        ValueError: two things at once, or an option that would do nothing.
    """
    params = asked.get("params", 1.0)
    if not math.isfinite(params):
        raise ValueError(f"--params {params}: a number of parameters is needed, for example 1e9")
    modes = [name for name in ("roles", "iteration", "timeline", "tensors") if name in asked]
    if len(modes) > 1 and modes[0] != "roles":
        raise ValueError(f"--{modes[0]} and --{modes[1]} are two runs; give one of them")
    mode = modes[0] if modes else "step"
    for name in (name for name in asked if name not in _USED[mode] | _ANYWHERE):
        what = "one optimizer step" if mode == "step" else f"--{mode}"
        also = "; it belongs to --iteration" if name in _USED["iteration"] and mode == "step" else ""
        raise ValueError(f"--{name.replace('_', '-')} {asked[name]} does nothing for {what}{also}; leave it out")
    return mode


def _run(mode: str, asked: Mapping[str, Any]) -> Values:
    from lightstep.bench.report import result_folder

    stem = {"step": "bench", "tensors": "tiny"}.get(mode, mode)
    folder = result_folder(asked.get("output"), mode, stem)
    if mode == "roles":
        from lightstep.bench.roles import measure as measure_roles

        return measure_roles(asked.get("params"), asked.get("layers"), folder, asked.get("device"), asked["seed"])
    return measure(plan(mode, asked, folder), folder)


def plan(mode: str, asked: Mapping[str, Any], folder: Path) -> Run:
    """From the options that were given; others have their defaults. Nothing is measured yet.

    Args:
        mode: `step`, `iteration`, `timeline` or `tensors`.
        folder: for what a task itself writes.

    Raises:
        ConfigError, ValueError: an option is wrong; with what is allowed.
    """
    from lightstep.bench.entries import chosen_peers, chosen_strategies
    from lightstep.bench.ranks import Ranks, local_device, share_cores
    from lightstep.bench.run import Effort, Run

    device = local_device(asked.get("device"))
    options = {**_DEFAULTS[mode][device.type == "cuda"], **asked}
    tasks = _tasks(mode, options, device, folder)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ours = chosen_strategies(options.get("strategies", "default"), tasks[0], world_size)
    entries = [*ours, *chosen_peers(options.get("peers"), tasks[0])]
    if not entries:
        raise ValueError("--strategies none and no --peers: nothing to measure")
    share_cores(tasks[0].threads)
    effort = Effort(int(options["steps"]), int(options["warmup"]), int(options["rounds"]))
    return Run.of(tasks, effort, Ranks(device), entries, asked.get("checkpoints"))


def _tasks(mode: str, options: Mapping[str, Any], device: torch.device, folder: Path) -> Sequence[Task]:
    """One for each size."""
    seed = int(options.get("seed", 0))
    if mode == "tensors":
        from lightstep.bench.tiny import TinyTask, tensor_counts

        return [TinyTask(device, seed, case=count) for count in tensor_counts(options["tensors"])]
    from lightstep.bench.contender import MAX_NORM
    from lightstep.bench.iteration import IterationTask, token_counts
    from lightstep.bench.llama import LlamaShape
    from lightstep.bench.optimizers import OPTIMIZERS
    from lightstep.bench.step import StepTask
    from lightstep.bench.timeline import TimelineTask

    shape = LlamaShape.near(int(options["params"]), options.get("layers"), released=mode != "step")
    optimizer = str(options.get("optimizer", "adamw"))
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {optimizer}: allowed are {', '.join(OPTIMIZERS)}")
    if mode == "step":
        return [StepTask(device, seed, shape, optimizer=optimizer)]
    sequence = int(options["sequence"])
    counts = token_counts(str(options["tokens"]), sequence)
    max_norm = float(options.get("max_norm", MAX_NORM))
    if max_norm != MAX_NORM and options.get("peers", "none") != "none":
        raise ValueError(f"--max-norm {max_norm:g} with --peers {options['peers']}: peers clip to {MAX_NORM:g}")
    clip_every = int(options.get("clip_every", 0))
    if clip_every and options.get("peers", "none") != "none":
        raise ValueError(
            f"--clip-every {clip_every} with --peers {options['peers']}: peers have one limit for all steps"
        )
    settings: dict[str, Any] = {"max_norm": max_norm, "optimizer": optimizer}
    if mode == "iteration":
        settings["clip_every"] = clip_every
        return [IterationTask(device, seed, shape, sequence, case=count, **settings) for count in counts]
    if device.type != "cuda":
        raise ValueError("--timeline needs a GPU: on a CPU there are no streams, and nothing crosses a link")
    return [TimelineTask(device, seed, shape, sequence, folder, case=count, **settings) for count in counts]


def measure(run: Run, folder: Path) -> Values:
    """Measure what was planned, write it to `folder`, show it; returns the JSON's values."""
    from lightstep.bench.report import as_json, progress, write_json
    from lightstep.bench.run import measure_all

    is_main, file = run.ranks.is_main, folder / f"{run.task.stem}.json"
    try:
        for needed in (folder if is_main else None, run.checkpoints):
            if needed is not None:
                needed.mkdir(parents=True, exist_ok=True)
        with progress(is_main) as say:

            def show(sentence: str) -> None:
                """Also save the rows so far, so that an interrupted run keeps its figures."""
                say(sentence)
                values = as_json(run)
                if is_main and run.task.stem != "timeline":
                    write_json(values, file)

            measure_all(run, show)
            show("done")
        values = as_json(run)
        if is_main:
            _publish(run, values, file)
        return values
    finally:
        run.ranks.close()


def _publish(run: Run, values: Values, file: Path) -> None:
    from rich.console import Console

    from lightstep.bench.report import label, publish

    if run.task.stem != "timeline":
        publish(values, run.task.view, file)
        return
    console = Console()
    for row in (row for row in run.rows if row.note is None):
        written = row.seen["picture"]
        console.print(f"{written.with_suffix('.json')} and {written} written", highlight=False)
        console.print("\n".join(row.seen["said"]), highlight=False, markup=False)
    for shown in (shown for shown in values["rows"] if shown["note"] is not None):
        console.print(f"{label(shown)}: {shown['note']}", highlight=False, markup=False)
