"""The body of `lightstep bench`. torch is imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lightstep.bench.progress import Progress

if TYPE_CHECKING:
    from lightstep.bench.run import Run

_CPU_DEFAULTS = {"params": 2e6, "steps": 4, "warmup": 1}
_GPU_DEFAULTS = {"params": 1e9, "steps": 8, "warmup": 2}

_Strategies = Annotated[
    str,
    typer.Option(
        help="Names or paths separated by commas, each with keys laid over it if need be: "
        "stream-overlap:optimizer_state.ring_mib=256. 'default' is resident, bulk and stream, in whole iterations "
        "resident, stream and stream-overlap, with several ranks those of fsdp2; 'none'."
    ),
]
_Peers = Annotated[
    str | None,
    typer.Option(
        help="Peers to hold them against, separated by commas; 'all' or 'none'. Default: all, in whole iterations "
        "none; there is one there, fsdp2-offload."
    ),
]
_Params = Annotated[
    float | None,
    typer.Option(
        help="Size of the model, for example 1e9. Default: 2e6 on a CPU; on a GPU 1e9, in whole iterations 3e9."
    ),
]
_Layers = Annotated[int | None, typer.Option(help="Transformer blocks. Default: as many as Llamas of that width have.")]
_Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Timed steps per round. Default: 8 on a GPU, 4 on a CPU; iterations: 4 and 2; in a timeline 2.",
    ),
]
_Warmup = Annotated[int | None, typer.Option(min=1, help="Untimed steps before them. Default: 2 on a GPU, 1 on a CPU.")]
_Rounds = Annotated[
    int | None,
    typer.Option(
        min=1, help="How often each is built and timed, in alternating order. Default: 2, in whole iterations 1."
    ),
]
_Output = Annotated[
    Path,
    typer.Option(
        help="Folder for bench.json and bench.png, iteration.json and iteration.png, roles.json and .png, or timelines."
    ),
]
_Checkpoints = Annotated[
    Path | None, typer.Option(help="Also save every strategy's checkpoint in this folder, timed beside plain files.")
]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")]
_Seed = Annotated[int, typer.Option(help="Of weights, and of gradients or tokens.")]
_Iteration = Annotated[
    bool, typer.Option("--iteration", help="Whole training iterations of a Llama: forward, backward and step.")
]
_Timeline = Annotated[
    bool,
    typer.Option(
        "--timeline", help="A profiler's trace of some iterations of each, and a picture of its lanes. Needs a GPU."
    ),
]
_Tokens = Annotated[
    str | None,
    typer.Option(
        help="Whole iterations: tokens per step and rank, separated by commas. "
        "Default: 65536,16384 on a GPU, 512,128 on a CPU; in a timeline the first of them."
    ),
]
_Roles = Annotated[
    bool,
    typer.Option("--roles", help="Memory of a worker that only generates, with the role for it and without."),
]
_Sequence = Annotated[
    int | None,
    typer.Option(min=1, help="Whole iterations: tokens per sequence. Default: 4096 on a GPU, 64 on a CPU."),
]


def bench(
    strategies: _Strategies = "default",
    peers: _Peers = None,
    params: _Params = None,
    layers: _Layers = None,
    steps: _Steps = None,
    warmup: _Warmup = None,
    rounds: _Rounds = None,
    output: _Output = Path("runs/bench"),
    checkpoints: _Checkpoints = None,
    device: _Device = None,
    seed: _Seed = 0,
    iteration: _Iteration = False,
    timeline: _Timeline = False,
    tokens: _Tokens = None,
    sequence: _Sequence = None,
    roles: _Roles = False,
) -> None:
    """Measure strategies and peers side by side on this machine: one optimizer step on a Llama-shaped stack.

    Everybody does the same work: global norm, clipping, AdamW in fp32, new bf16 weights. Under torchrun all ranks
    measure at once, and each has its share of the cores. With --iteration everybody trains a Llama instead, with
    activation checkpointing, and the time and memory of whole iterations are shown beside those without an optimizer.
    With --roles nobody trains: the memory of one rollout worker is measured.
    """
    from lightstep.config import ConfigError

    asked: dict[str, Any] = {"params": params, "steps": steps, "warmup": warmup}
    whole: dict[str, Any] = {"tokens": tokens, "sequence": sequence}
    try:
        if params is not None and not math.isfinite(params):
            raise ValueError(f"--params {params}: a number of parameters is needed, for example 1e9")
        if roles:
            others = {**asked, **whole, "rounds": rounds, "checkpoints": checkpoints, "peers": peers}
            others |= {"strategies": None if strategies == "default" else strategies}
            _refuse_with_roles({**others, "iteration": iteration or None, "timeline": timeline or None})
            return _measure_roles(params, layers, output, device, seed)
        _refuse_idle(iteration, timeline, {**whole, "checkpoints": checkpoints, "rounds": rounds})
        if iteration or timeline:
            asked = {**asked, **whole, "rounds": rounds}
            _train(timeline, strategies, peers, asked, layers, output, device, seed)
        else:
            measure(strategies, peers or "all", asked, layers, rounds or 2, output, device, seed, checkpoints)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _refuse_idle(iteration: bool, timeline: bool, options: dict[str, Any]) -> None:
    """Options that would do nothing."""
    if iteration and timeline:
        raise ValueError("--iteration and --timeline are two runs; give one of them")
    mode = "--iteration" if iteration else "--timeline" if timeline else "one optimizer step"
    idle = {"--iteration": ("checkpoints",), "--timeline": ("checkpoints", "rounds")}.get(mode, ("tokens", "sequence"))
    for name in idle:
        if options[name] is not None:
            also = "; it belongs to --iteration" if name != "checkpoints" else ""
            raise ValueError(f"--{name} {options[name]} does nothing for {mode}{also}; leave it out")


def _refuse_with_roles(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None and name != "params":
            raise ValueError(f"--{name} {value} does nothing for --roles; leave it out")


def _measure_roles(params: float | None, layers: int | None, output: Path, device: str | None, seed: int) -> None:
    from lightstep.bench import roles

    roles.measure(params, layers, output, device, seed)
    Console().print(f"{output / 'roles.json'} and {output / 'roles.png'} written", highlight=False)


def _train(
    timeline: bool,
    strategies: str,
    peers: str | None,
    asked: dict[str, Any],
    layers: int | None,
    output: Path,
    device_name: str | None,
    seed: int,
) -> None:
    from lightstep.bench.iteration import command

    plan = command.plan(strategies, peers, asked, layers, device_name, seed, timeline)
    if timeline:
        command.record(plan, output)
    else:
        command.measure(plan, output)


def measure(
    strategies: str,
    peers: str,
    asked: dict[str, Any],
    layers: int | None,
    rounds: int,
    output: Path,
    device_name: str | None,
    seed: int,
    checkpoints: Path | None = None,
) -> dict[str, Any]:
    """What `bench` does; returns `bench.json`'s values. `asked`: params, steps and warmup, None for the defaults."""
    from lightstep.bench import registry
    from lightstep.bench.contender import Setup
    from lightstep.bench.measure import Effort
    from lightstep.bench.model import LlamaShape
    from lightstep.bench.ranks import Ranks, local_device, share_cores
    from lightstep.bench.run import measure_all, start

    device = local_device(device_name)
    defaults = _GPU_DEFAULTS if device.type == "cuda" else _CPU_DEFAULTS
    sizes = {**defaults, **{key: value for key, value in asked.items() if value is not None}}
    ours, others = registry.chosen_strategies(strategies), registry.chosen_peers(peers)
    builds = {**ours, **others}
    if not builds:
        raise ValueError("--strategies none --peers none: nothing to measure")
    setup = Setup(LlamaShape.near(int(sizes["params"]), layers), device, seed)
    for folder in (output, *([checkpoints] if checkpoints is not None else [])):
        folder.mkdir(parents=True, exist_ok=True)
    share_cores()
    ranks = Ranks(device)
    try:
        kinds = {name: "lightstep" if name in ours else "peer" for name in builds}
        effort = Effort(int(sizes["steps"]), int(sizes["warmup"]))
        run = start(setup, effort, rounds, ranks, kinds, checkpoints)
        with Progress(ranks.is_main) as progress:
            measure_all(run, builds, lambda sentence, run: _show(progress, sentence, run, output))
        return _publish(run, output)
    finally:
        ranks.close()


def _show(progress: Progress, sentence: str, run: Run, output: Path) -> None:
    """Say it, and save the rows so far, so that an interrupted run keeps its figures."""
    from lightstep.bench.report import as_json, write_json

    progress.show(sentence)
    values = as_json(run)
    if run.ranks.is_main:
        write_json(values, output / "bench.json")


def _publish(run: Run, output: Path) -> dict[str, Any]:
    from lightstep.bench.chart import draw
    from lightstep.bench.report import as_json, print_table, write_json

    values = as_json(run)
    if run.ranks.is_main:
        write_json(values, output / "bench.json")
        draw(values, output / "bench.png")
        console = Console()
        print_table(values, console)
        console.print(f"{output / 'bench.json'} and {output / 'bench.png'} written", highlight=False)
    return values
