"""The body of `lightstep bench`. torch is imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from lightstep.bench.run import Run

_CPU_DEFAULTS = {"params": 2e6, "steps": 4, "warmup": 1}
_GPU_DEFAULTS = {"params": 1e9, "steps": 8, "warmup": 2}

_Strategies = Annotated[
    str, typer.Option(help="Names or paths separated by commas; 'default' is resident, bulk and stream; 'none'.")
]
_Peers = Annotated[str, typer.Option(help="Peers to hold them against, separated by commas; 'all' or 'none'.")]
_Params = Annotated[
    float | None, typer.Option(help="Size of the stack, for example 1e9. Default: 1e9 on a GPU, 2e6 on a CPU.")
]
_Layers = Annotated[int | None, typer.Option(help="Transformer blocks. Default: as many as Llamas of that width have.")]
_Steps = Annotated[int | None, typer.Option(min=1, help="Timed steps per round. Default: 8 on a GPU, 4 on a CPU.")]
_Warmup = Annotated[int | None, typer.Option(min=1, help="Untimed steps before them. Default: 2 on a GPU, 1 on a CPU.")]
_Rounds = Annotated[int, typer.Option(min=1, help="How often each is built and timed, in alternating order.")]
_Output = Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")]
_Checkpoints = Annotated[
    Path | None, typer.Option(help="Also save every strategy's checkpoint in this folder, timed beside plain files.")
]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")]
_Seed = Annotated[int, typer.Option(help="Of weights and gradients.")]


def bench(
    strategies: _Strategies = "default",
    peers: _Peers = "all",
    params: _Params = None,
    layers: _Layers = None,
    steps: _Steps = None,
    warmup: _Warmup = None,
    rounds: _Rounds = 2,
    output: _Output = Path("runs/bench"),
    checkpoints: _Checkpoints = None,
    device: _Device = None,
    seed: _Seed = 0,
) -> None:
    """Measure strategies and peers side by side on this machine: one optimizer step on a Llama-shaped stack.

    Everybody does the same work: global norm, clipping, AdamW in fp32, new bf16 weights. Under torchrun all ranks
    measure at once, and each has its share of the cores.
    """
    from lightstep.config import ConfigError

    asked = {"params": params, "steps": steps, "warmup": warmup}
    try:
        measure(strategies, peers, asked, layers, rounds, output, device, seed, checkpoints)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


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
        with _Progress(ranks.is_main, output) as progress:
            measure_all(run, builds, progress.show)
        return _publish(run, output)
    finally:
        ranks.close()


class _Progress:
    """Says what is being measured, and saves the rows so far, so that an interrupted run keeps its figures."""

    def __init__(self, visible: bool, output: Path) -> None:
        self._console = Console(stderr=True, quiet=not visible)
        self._status = self._console.status("starting")
        self._output = output

    def __enter__(self) -> _Progress:
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(None, None, None)

    def show(self, sentence: str, run: Run) -> None:
        from lightstep.bench.report import as_json, write_json

        self._status.update(f"measuring {sentence}")
        if not self._console.is_terminal:
            self._console.print(f"measuring {sentence}", highlight=False)
        values = as_json(run)
        if run.ranks.is_main:
            write_json(values, self._output / "bench.json")


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
