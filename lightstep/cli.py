"""The `lightstep` command. Each command imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from lightstep.bench.command import bench, whole_number

if TYPE_CHECKING:
    from lightstep.checkpoint.saved import Verified

BAD_INPUT, FAILED = 2, 1
"""Exit codes: the input is wrong; the command failed later (for example because of a full disk)."""

app = typer.Typer(
    name="lightstep",
    help="Mixed-precision training with the optimizer state on the GPU or on the host, bit for bit the same weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training file, for example examples/train.yaml.")]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the newest complete checkpoint of the run. --resume auto: from the newest undamaged one, "
        "or from the beginning if there is none.",
    ),
]
_Strategy = Annotated[str | None, typer.Option(help="Name or file of a strategy, instead of the one in CONFIG.")]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of CONFIG, or strategy.KEY for a key of its strategy. Repeatable.",
    ),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(asked: bool) -> None:
    if asked:
        from lightstep.version import __version__

        sys.stdout.write(f"lightstep {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print lightstep's version.")
    ] = False,
) -> None:
    pass


class _TrainCommand(TyperCommand):
    """``--resume`` is a flag that accepts the optional value ``auto``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        split = [part for arg in args for part in (("--resume", "auto") if arg == "--resume=auto" else (arg,))]
        follows = [before == "--resume" and arg == "auto" for before, arg in zip(["", *split], split, strict=False)]
        ctx.meta[_AUTO] = any(follows)
        return super().parse_args(ctx, [arg for arg, is_value in zip(split, follows, strict=True) if not is_value])


_AUTO = "lightstep.resume_auto"


@app.command(cls=_TrainCommand)
def train(
    context: typer.Context,
    config: _Config,
    resume: _Resume = False,
    strategy: _Strategy = None,
    assignments: _Set = None,
    debug: _Debug = False,
) -> None:
    """Train a language model as CONFIG says; write checkpoints, logs, a loss curve and the model to runs/<name>.

    Ctrl-C or SIGTERM finishes the step, saves a checkpoint and exits. Several devices:
    torchrun --nproc-per-node 2 -m lightstep train CONFIG --strategy NAME
    """
    with _reporting_errors(debug):
        from lightstep.trainer.config import load_config

        settings = load_config(config, strategy, assignments or ())
        from lightstep.trainer.session import train as run

        outcome = run(settings, "auto" if context.meta[_AUTO] else resume)
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)


@app.command()
def strategies(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show the file of this strategy instead.")] = None,
    debug: _Debug = False,
) -> None:
    """List the ready strategies and their bytes per parameter with AdamW."""
    with _reporting_errors(debug):
        from lightstep.config import parse_config
        from lightstep.plan.cost import strategies_text
        from lightstep.presets import available_strategies, preset_text, read_source

        if name is None:
            text = strategies_text({each: parse_config(read_source(each)[1], each) for each in available_strategies()})
        else:
            text = preset_text(name)
    sys.stdout.write(text)


@app.command()
def params(config: _Config, assignments: _Set = None, debug: _Debug = False) -> None:
    """Show the optimizer class and settings of each parameter under CONFIG. No weights are loaded."""
    with _reporting_errors(debug):
        from lightstep.trainer.config import load_config
        from lightstep.trainer.session import describe_params

        text = describe_params(load_config(config, None, assignments or ()))
    sys.stdout.write(f"{text}\n")


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, a config.json, module:factory, or a name such as Llama-3.1-8B.",
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Names or files, separated by commas. Default: all that fit the number of GPUs.")
    ] = None,
    gpus: Annotated[int, whole_number("Number of GPUs.")] = 1,
    gpus_per_node: Annotated[int | None, whole_number("GPUs of each node. Default: all are on one.")] = None,
    network: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="GB/s between nodes: each way, of each GPU's network interface. 50 is 400 Gb/s per GPU.",
        ),
    ] = None,
    tokens: Annotated[int, whole_number("Tokens per micro-batch on each GPU.", 2)] = 16_384,
    sequence: Annotated[int, whole_number("Tokens per sequence.", 2)] = 4096,
    micro_batches: Annotated[int, whole_number("Micro-batches per optimizer step.")] = 1,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="A class of torch.optim, or its import path. Muon gets the hidden matrices, and AdamW the rest.",
        ),
    ] = "AdamW",
    no_checkpointing: Annotated[
        bool, typer.Option("--no-checkpointing", help="Plan without activation checkpointing.")
    ] = False,
    fused_loss: Annotated[
        bool, typer.Option("--fused-loss", help="The loss computes the logits of 1024 tokens at a time.")
    ] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            help="Memory of each GPU in GB. Default: the profile's, or that of this machine's GPU if it is less.",
        ),
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Memory of the host (of each node) in GB. Default: no limit.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="H100, H200, A100, B200 or GH200; H100+pcie4 selects another link. Default: this machine's GPU, or "
            "H100."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure and save this machine's rates first, in less than a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a chart: .png, .pdf or .svg.")] = None,
    debug: _Debug = False,
) -> None:
    """Show how much memory and time each strategy needs for a model. No weights are loaded."""
    options = {name: value for name, value in locals().items() if name != "debug"}
    with _reporting_errors(debug):
        from lightstep.plan.command import PlanOptions, plan_text

        text = plan_text(PlanOptions(**options))
    sys.stdout.write(text)


@app.command()
def env() -> None:
    """Print what a bug report needs: versions, devices, host memory. No names, no paths."""
    from lightstep.environment import describe_environment

    sys.stdout.write(describe_environment())


app.command()(bench)

_checkpoints = typer.Typer(help="Inspect, verify and convert checkpoints.", no_args_is_help=True)
app.add_typer(_checkpoints, name="checkpoint")

_Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of lightstep, DeepSpeed, torch or LightRFT.")]
_Model = Annotated[
    Path | None,
    typer.Option(help="Folder with the model's config.json, if the checkpoint does not name its parameters."),
]
_Names = Annotated[
    Path | None,
    typer.Option(help="JSON list of parameter names in the optimizer's order, if the checkpoint does not name them."),
]


@_checkpoints.command()
def convert(
    source: _Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder; for torch a file, such as run.pt.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="The format of DST: lightstep or torch.")],
    model: _Model = None,
    names: _Names = None,
    strategy: Annotated[str | None, typer.Option(help="The strategy of the run, for its dynamic loss scale.")] = None,
    debug: _Debug = False,
) -> None:
    """Convert a checkpoint: weights, masters, optimizer state, groups, loss scale, scheduler and extra, bit for bit."""
    with _reporting_errors(debug):
        from lightstep.checkpoint.formats import convert_checkpoint
        from lightstep.strategy import Strategy

        scale = None if strategy is None else Strategy.load(strategy).config.precision.loss_scale
        state = convert_checkpoint(source, destination, to, model=model, names=names, loss_scale=scale)
    for note in state.notes:
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write(f"{source} ({state.format}) → {destination} ({to})\n")


@_checkpoints.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint's folder, or its file.")],
    model: _Model = None,
    names: _Names = None,
    debug: _Debug = False,
) -> None:
    """Show the contents of a checkpoint and whether it is complete."""
    with _reporting_errors(debug):
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from lightstep.checkpoint.formats import describe_checkpoint

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
        for row in describe_checkpoint(folder, model=model, names=names):
            table.add_row(*row)
    Console().print(table)


@_checkpoints.command()
def verify(
    folders: Annotated[list[str], typer.Argument(metavar="DIR", help="Checkpoints, or folders of checkpoints.")],
    debug: _Debug = False,
) -> None:
    """Compare every byte of checkpoints with their checksums. Exit code 1: one is damaged."""
    damaged = False
    with _reporting_errors(debug):
        from lightstep.checkpoint import verify_checkpoints

        for folder in folders:
            for each in verify_checkpoints(folder):
                damaged = damaged or bool(each.damage)
                sys.stdout.write(f"{each.path}: {_verdict(each)}\n")
    if damaged:
        raise typer.Exit(FAILED)


def _verdict(verified: Verified) -> str:
    if verified.damage:
        return "\n    ".join(["damaged", *verified.damage])
    size = f"{verified.files} files, {verified.nbytes / 2**20:,.1f} MiB"
    return f"whole, {size}"


@contextmanager
def _reporting_errors(debug: bool = False) -> Iterator[None]:
    """Report expected errors as one sentence on stderr, with an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    formatted, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", 130, debug)
    except ValueError as error:  # ConfigError is one
        _fail(str(error), BAD_INPUT, debug)
    except MemoryError as error:
        _fail(str(error) or "out of host memory", FAILED, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", FAILED, debug)
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}  # without importing torch for the classes
        if kinds.isdisjoint(("CheckpointError", "RemoteRankError")):
            raise
        _fail(str(error), BAD_INPUT if "NotFoundError" in kinds else FAILED, debug)
    finally:
        warnings.formatwarning = formatted


def _warning(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"warning: {message}\n" if _is_local_main() else ""


def _fail(sentence: str, code: int, debug: bool) -> None:
    """Exit with ``code``. Under torchrun all ranks fail, and one rank per machine reports why."""
    if debug:
        raise
    if _is_local_main():
        sys.stderr.write(f"lightstep: {sentence}\n")
    raise typer.Exit(code)


def _is_local_main() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
