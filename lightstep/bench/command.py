"""The body of `lightstep bench`. torch is imported only when it runs, so that `--help` is fast."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from lightstep.bench.report import Values
    from lightstep.bench.run import Run, Task

FAILED = 1
"""The exit code when a contender failed."""

_ITERATION_CPU = {"params": 2e6, "tokens": "512,128", "sequence": 64, "steps": 2, "warmup": 1, "rounds": 1}
_ITERATION_GPU = {"params": 3e9, "tokens": "65536,16384", "sequence": 4096, "steps": 4, "warmup": 2, "rounds": 1}
_SMALL_CPU = {"tokens": "128", "sequence": 64, "steps": 2, "warmup": 1, "rounds": 1}
_SMALL_GPU = {"tokens": "4096", "sequence": 4096, "steps": 6, "warmup": 10, "rounds": 12}
_TINY = {"steps": 5, "warmup": 1, "rounds": 3}
_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": (
        {"params": 2e6, "steps": 4, "warmup": 1, "rounds": 2},
        {"params": 1e9, "steps": 8, "warmup": 2, "rounds": 2},
    ),
    "iteration": (_ITERATION_CPU, _ITERATION_GPU),
    "timeline": (_ITERATION_CPU, {**_ITERATION_GPU, "tokens": "65536", "steps": 2}),
    "small": (_SMALL_CPU, _SMALL_GPU),
    "tensors": (_TINY, _TINY),
}
"""Of each mode: on a CPU, and on a GPU."""

_MEASURED = {"strategies", "peers", "steps", "warmup"}
_TRAINED = {*_MEASURED, "optimizer", "model", "params", "layers", "tokens", "sequence", "max_norm"}
_ALLOWED = {
    "step": {*_MEASURED, "rounds", "params", "layers", "optimizer", "checkpoints"},
    "iteration": {*_TRAINED, "rounds", "clip_every", "iteration"},
    "timeline": {*_TRAINED, "timeline"},
    "small": {*_MEASURED, "rounds", "tokens", "sequence", "max_norm", "clip_every", "small"},
    "tensors": {*_MEASURED, "rounds", "tensors"},
}
_COMMON = {"output", "device", "seed"}


def whole_number(text: str, least: int = 1) -> Any:
    """An option that is a whole number."""
    return typer.Option(metavar="N", min=least, help=text)


def bench(
    strategies: Annotated[
        str,
        typer.Option(
            help="Names or paths, separated by commas; NAME:section.key=VALUE overrides a key. 'default' is resident, "
            "bulk and stream; with --iteration or --tensors it is resident, stream and stream-overlap, with --small "
            "resident and stream-overlap, and for iterations on several ranks the fsdp2 ones. 'none' leaves strategies "
            "out."
        ),
    ] = "default",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Libraries to compare with, separated by commas, or 'all' or 'none'. Default: all; "
            "with --iteration none; with --small torch, which is the loop by hand."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Iterations: llama, or qwen3-moe, whose experts the ranks divide among themselves. Default: llama."
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            help="Parameters of the model, for example 1e9. Default: 2e6 on a CPU, 1e9 on a GPU, 3e9 "
            "for iterations on a GPU."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Transformer blocks. Default: the usual number for a Llama of that width.")
    ] = None,
    steps: Annotated[
        int | None,
        whole_number(
            "Timed steps per round. Default: 8 on a GPU, 4 on a CPU; iterations 4 and 2; small models 6 and 2; "
            "tensors 5; timeline 2."
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        whole_number(
            "Untimed steps before them. Default: 2 on a GPU, 1 on a CPU and with --tensors; small models 10, 1, "
            "and 2 in later rounds."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        whole_number(
            "How many times each contender is built and timed, in turn. Default: 2; iterations 1; tensors 3. "
            "Small models stay in memory: 12 on a GPU, 1 on a CPU."
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="adamw, or muon: Muon for the hidden matrices and AdamW for the rest. Peers without Muon are skipped. "
            "Default: adamw."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the JSON file and the chart, or for traces. Default: a new one in runs/bench."),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Also time saving each strategy's checkpoint to this folder, against plain files of the same size."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for weights, gradients and tokens.")] = 0,
    iteration: Annotated[
        bool,
        typer.Option("--iteration", help="Measure whole training iterations: forward, backward and step."),
    ] = False,
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="Measure iterations of three small models, whose time is Python's as much as the device's, beside the "
            "loop by hand: a dense one, adapters, and a mixture of experts.",
        ),
    ] = False,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Write a profiler trace of a few iterations of each, for ui.perfetto.dev, and say how much of the "
            "copies ran beside the computation, and what that waited for. Needs a GPU.",
        ),
    ] = False,
    tensors: Annotated[
        str | None,
        typer.Option(
            help="Measure the Python time of a step and of backward hooks: lora (448 small tensors), "
            "moe (9216), tiny (both)."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Iterations: tokens per step and rank, separated by commas. Default: 65536,16384 on a "
            "GPU, 512,128 on a CPU; timeline 65536; small models, one number, 4096 and 128."
        ),
    ] = None,
    sequence: Annotated[
        int | None, whole_number("Iterations: tokens per sequence. Default: 4096 on a GPU, 64 on a CPU.")
    ] = None,
    max_norm: Annotated[
        float | None,
        typer.Option(help="Iterations: the global norm to clip to. Default: 1, which clips the first steps."),
    ] = None,
    clip_every: Annotated[int | None, whole_number("Iterations: clip every N-th step, whatever its norm.")] = None,
) -> None:
    """Measure strategies and other libraries side by side on this machine. Default: one optimizer step of a Llama.

    All of them do the same work: global norm, clipping, AdamW in fp32, new
    bf16 weights. Under torchrun all ranks measure at the same time, and each
    gets its share of the cores.

    --iteration trains a model with activation checkpointing and compares time
    and memory with the same iterations without an optimizer; --small does so
    with three small models, beside the loop by hand. --tensors uses tensors
    so small that only Python takes time. --timeline writes traces for
    ui.perfetto.dev.

    Exit code 1: at least one contender failed; the figures of the others are complete.
    """
    options = dict(locals())
    from lightstep.bench.report import result_folder
    from lightstep.config import ConfigError

    if strategies == "default":
        options["strategies"] = None
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    try:
        mode = _mode(given)
        folder = result_folder(given.get("output"), mode, {"step": "bench", "tensors": "tiny"}.get(mode, mode))
        values = measure(plan(mode, given, folder), folder)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if any(row.get("note") and not row["skipped"] for row in values["rows"]):
        raise typer.Exit(FAILED)


def _mode(given: Mapping[str, Any]) -> str:
    """The mode that the options select.

    Raises:
        ValueError: two modes at once, or an option that has no effect in this mode.
    """
    params = given.get("params", 1.0)
    if not math.isfinite(params):
        raise ValueError(f"--params {params}: a number of parameters is needed, for example 1e9")
    modes = [name for name in ("iteration", "small", "timeline", "tensors") if name in given]
    if len(modes) > 1:
        raise ValueError(f"--{modes[0]} and --{modes[1]} cannot be combined; give one of them")
    mode = modes[0] if modes else "step"
    for name in (name for name in given if name not in _ALLOWED[mode] | _COMMON):
        what = "one optimizer step" if mode == "step" else f"--{mode}"
        also = "; it belongs to --iteration" if name in _ALLOWED["iteration"] and mode == "step" else ""
        raise ValueError(f"--{name.replace('_', '-')} {given[name]} has no effect on {what}{also}; leave it out")
    return mode


def plan(mode: str, given: Mapping[str, Any], folder: Path) -> Run:
    """A run that has measured nothing yet, from the given options and the defaults of the others.

    Args:
        mode: `step`, `iteration`, `small`, `timeline` or `tensors`.
        folder: where the timeline task writes its files.

    Raises:
        ConfigError, ValueError: an option is wrong; the message says what is allowed.
    """
    from lightstep.bench.machine import Ranks, local_device, share_cores
    from lightstep.bench.run import Effort, Run, parse_peers
    from lightstep.bench.strategies import parse_strategies
    from lightstep.paths import local_path

    device = local_device(given.get("device"))
    options = {**_DEFAULTS[mode][device.type == "cuda"], **given}
    tasks = _tasks(mode, options, device, folder)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ours = parse_strategies(options.get("strategies", "default"), tasks[0], world_size)
    entries = [*ours, *parse_peers(options.get("peers"), tasks[0])]
    if not entries:
        raise ValueError("--strategies none and no --peers: nothing to measure")
    share_cores(tasks[0].threads)
    effort = Effort(int(options["steps"]), int(options["warmup"]), int(options["rounds"]))
    folder_of_saves = given.get("checkpoints")
    if folder_of_saves is not None:
        folder_of_saves = local_path(folder_of_saves, "checkpoints are timed on local folders")
    return Run.create(tasks, effort, Ranks(device), entries, folder_of_saves)


def _tasks(mode: str, options: Mapping[str, Any], device: torch.device, folder: Path) -> Sequence[Task]:
    """One task for each size."""
    seed = int(options.get("seed", 0))
    if mode == "tensors":
        from lightstep.bench.tensors import TensorsTask, tensor_counts

        return [TensorsTask(device, seed, case=count) for count in tensor_counts(options["tensors"])]
    from lightstep.bench.iteration import IterationTask, TimelineTask, small_models, token_counts
    from lightstep.bench.models import LlamaShape, MoeShape
    from lightstep.bench.run import MAX_NORM, OPTIMIZERS
    from lightstep.bench.step import StepTask

    sequence = int(options.get("sequence", 1))
    counts = token_counts(str(options["tokens"]), sequence) if "tokens" in options else ()
    clipping = {"max_norm": float(options.get("max_norm", MAX_NORM)), "clip_every": int(options.get("clip_every", 0))}
    if mode == "small":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("--small is for one process: start it without torchrun")
        if len(counts) > 1:
            raise ValueError(f"--tokens {options['tokens']}: --small measures one number of tokens; give one")
        return small_models(device, seed, sequence, counts[0], **clipping)
    name = str(options.get("model", "llama"))
    shapes: dict[str, Any] = {
        "llama": partial(LlamaShape.nearest, released=mode != "step"),
        "qwen3-moe": MoeShape.nearest,
    }
    if name not in shapes:
        raise ValueError(f"--model {name}: allowed are {' and '.join(shapes)}")
    if name != "llama" and options.get("peers", "none") != "none":
        raise ValueError(f"--peers {options['peers']}: they cannot train --model {name}; write --peers none")
    shape = shapes[name](int(options["params"]), options.get("layers"))
    optimizer = str(options.get("optimizer", "adamw"))
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {optimizer}: allowed are {', '.join(OPTIMIZERS)}")
    if mode == "step":
        return [StepTask(device, seed, shape, optimizer=optimizer)]
    settings: dict[str, Any] = {**clipping, "optimizer": optimizer}
    if mode == "iteration":
        return [IterationTask(device, seed, shape, sequence, case=count, **settings) for count in counts]
    if device.type != "cuda":
        raise ValueError("--timeline needs a GPU: a CPU has no streams and no link")
    return [TimelineTask(device, seed, shape, sequence, folder, case=count, **settings) for count in counts]


def measure(run: Run, folder: Path) -> Values:
    """Measure, write the result to `folder` and print it. Returns the values of the JSON file."""
    from lightstep.bench.report import progress, write_json
    from lightstep.bench.run import as_json, measure_all

    is_main, file = run.ranks.is_main, folder / f"{run.task.stem}.json"
    try:
        for needed in (folder if is_main else None, run.checkpoints):
            if needed is not None:
                needed.mkdir(parents=True, exist_ok=True)
        with progress(is_main) as say:

            def report_progress(sentence: str) -> None:
                """Report progress, and save the rows so far, so that an interrupted run keeps its figures."""
                say(sentence)
                values = as_json(run)
                if is_main and run.task.view is not None:
                    write_json(values, file)

            measure_all(run, report_progress)
            report_progress("done")
        values = as_json(run)
        if is_main:
            _publish(run, values, file)
        return values
    finally:
        run.ranks.close()


def _publish(run: Run, values: Values, file: Path) -> None:
    from rich.console import Console

    from lightstep.bench.report import label, publish

    if run.task.view is not None:
        publish(values, run.task.view, file)
        return
    console = Console()
    for row in (row for row in run.rows if row.note is None):
        console.print("\n".join(row.extra["said"]), highlight=False, markup=False)
    for shown in (shown for shown in values["rows"] if shown["note"] is not None):
        console.print(f"{label(shown)}: {shown['note']}", highlight=False, markup=False)
