"""The `lightstep` command. What a command needs is imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

BAD_INPUT, FAILED = 2, 1
"""Exit codes: something in the input is wrong; something went wrong on the way (a full disk)."""

app = typer.Typer(
    name="lightstep",
    help="Mixed-precision training with the optimizer state on the GPU or on the host, bit for bit the same weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training file, for example examples/train.yaml.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint of the run.")]
_Strategy = Annotated[str | None, typer.Option(help="A strategy's name or file, instead of the one in CONFIG.")]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of CONFIG; strategy.KEY of its strategy. Repeatable."
    ),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


@app.command()
def train(
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
    with _one_sentence(debug):
        from lightstep.trainer.config import load_config

        settings = load_config(config, strategy, assignments or ())
        from lightstep.trainer.session import train as run

        outcome = run(settings, resume)
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)


@app.command()
def strategies() -> None:
    """List the ready strategies, and what each costs per parameter."""
    from rich.console import Console

    with _one_sentence():
        table = _strategies_table()
    Console().print(table)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure strategies and peers side by side on this machine."""
    from lightstep.bench.command import bench as body

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(body)
    command(args=context.args, prog_name="lightstep bench")


def _strategies_table() -> Table:
    from rich.table import Table

    from lightstep.config import parse_config
    from lightstep.strategy.presets import available_strategies, read_source
    from lightstep.trainer.cost import cost

    table = Table(
        caption="bytes per parameter with AdamW, between steps: weights, master weights, state; gradients come on top",
        caption_justify="left",
    )
    for heading in ("name", "description", "sharding", "precision"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for place in ("device", "host"):
        table.add_column(f"{place}\nbytes", justify="right")
    for name in available_strategies():
        config = parse_config(read_source(name)[1], name)
        precision, scale = config.precision, config.precision.loss_scale.kind
        dtypes = precision.parameters + (f", {scale} loss scale" if scale != "none" else "")
        held = cost(config)
        table.add_row(name, config.description, config.sharding.kind, dtypes, held.text("device"), held.text("host"))
    return table


@contextmanager
def _one_sentence(debug: bool = False) -> Iterator[None]:
    """Errors that people can do something about become one sentence on stderr and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    formatted, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", 130, debug)
    except ValueError as error:  # ConfigError is one
        _fail(str(error), BAD_INPUT, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", FAILED, debug)
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":  # without importing torch for it
            raise
        _fail(str(error), FAILED, debug)
    finally:
        warnings.formatwarning = formatted


def _fail(sentence: str, code: int, debug: bool) -> None:
    if debug:
        raise
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else None
    sys.stderr.write(f"lightstep: {sentence}\n" if rank is None else f"lightstep, rank {rank}: {sentence}\n")
    raise typer.Exit(code)
