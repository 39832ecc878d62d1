"""docs/commands.md, made from the program: ``python -m tests.commands_page`` writes it."""

from __future__ import annotations

import re
from typing import Any

import typer

from lightstep.cli import app
from tests.snippets import CHECKOUT

PAGE = CHECKOUT / "docs" / "commands.md"

HEAD = """# Commands

Every command with its arguments and options. `lightstep COMMAND --help` prints the same in a terminal.

```bash
lightstep plan Llama-3.1-8B --gpus 2     # what fits, and what it costs
lightstep train examples/train.yaml      # train from a file
```

`python -m lightstep` is the same as `lightstep`; `torchrun --nproc-per-node N -m lightstep COMMAND` runs a command on
several processes. `lightstep --version` prints the version.

| exit code | |
|---|---|
| 0 | the command did its work |
| 1 | it failed on the way: a full disk, a damaged checkpoint, a contender of `bench` that failed |
| 2 | the input is wrong, for example a path that does not exist; nothing was changed |
| 128 + a signal's number | it was stopped by that signal; `train` saves a checkpoint first |
"""

COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "[Training from a file](training.md) describes the file and the output.",
        "lightstep train examples/train.yaml --set steps=100",
    ),
    "params": (
        "See [Optimizers](optimizers.md#several-classes-in-one-optimizer).",
        "lightstep params examples/muon.yaml",
    ),
    "strategies": (
        "See [Choosing a strategy](choosing-a-strategy.md).",
        "lightstep strategies stream-overlap > my-strategy.yaml",
    ),
    "plan": (
        "[Planning](plan.md) says how a plan is computed.",
        "lightstep plan Llama-3.2-3B --strategy resident,stream-overlap",
    ),
    "bench": (
        "See [Benchmarks](benchmarks.md#how-it-is-measured).",
        "lightstep bench --iteration --params 3e9 --tokens 16384",
    ),
    "checkpoint verify": ("See [Checkpoints](checkpoints.md#damage).", "lightstep checkpoint verify runs/train"),
    "checkpoint inspect": ("", "lightstep checkpoint inspect runs/train/checkpoint-500"),
    "checkpoint convert": (
        "See [Converting checkpoints](converting-checkpoints.md).",
        "lightstep checkpoint convert runs/train/checkpoint-500 run.pt --to torch",
    ),
    "env": ("", "lightstep env"),
}
"""Where to read more, and an example. The order is that of the page."""


def text() -> str:
    """The page.

    Raises:
        KeyError: the program has a command that the page has not, or the other way round.
    """
    commands = _commands()
    if unknown := sorted(commands.keys() ^ COMMANDS.keys()):
        raise KeyError(f"commands of the program or of COMMANDS alone: {', '.join(unknown)}")
    return "\n".join([HEAD, *(_section(name, commands[name]) for name in COMMANDS)])


def _commands() -> dict[str, Any]:
    """By name."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for part, each in getattr(command, "commands", {"": command}).items():
            found[f"{name} {part}".strip()] = each
    return found


def _section(name: str, command: Any) -> str:
    more, example = COMMANDS[name]
    shown = [param for param in command.params if not param.hidden and param.name != "help"]
    given = [param for param in shown if param.param_type_name == "argument"]
    usage = " ".join(
        ["lightstep", name, *(_usage(param) if param.required else f"[{_usage(param)}]" for param in given)]
    )
    paragraphs = [_as_markdown(" ".join(each.split())) for each in command.help.split("\n\n")] + (
        [more] if more else []
    )
    rows = "".join(f"| `{_usage(param)}` | {_help(param)} |\n" for param in shown)
    table = f"\n| `{usage}` | |\n|---|---|\n{rows}" if rows else ""
    return f"## `{name}`\n\n" + "\n\n".join(paragraphs) + f"\n\n```bash\n{example}\n```\n" + table


def _usage(param: Any) -> str:
    value = param.metavar or param.name.upper()
    if param.param_type_name == "argument":
        return value
    return param.opts[-1] if param.is_flag else f"{param.opts[-1]} {value}"


def _help(param: Any) -> str:
    plain = param.default is None or callable(param.default) or param.default is False or "Default:" in param.help
    default = "" if plain or param.default == "default" else f" Default: {param.default}."
    return _as_markdown(param.help) + default


def _as_markdown(text: str) -> str:
    """Options and commands in backticks."""
    return re.sub(r"torchrun --.*|runs/<name>|--[a-z-]+( auto)?", r"`\g<0>`", text)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
