"""`lightstep bench` as tests run it: in this process, and on two ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from typer.testing import CliRunner, Result

from lightstep.cli import app
from tests.snippets import Script, run_script

COMMAND = "from lightstep.__main__ import main; main()"


def run_bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def bench_on_two_ranks(*arguments: str) -> str:
    """What the two ranks print."""
    with tempfile.TemporaryDirectory() as folder:
        script = Script(Path("bench"), 1, "python", 2, [COMMAND], ("bench", *arguments))
        status, output = run_script(script, Path(folder))
    assert status == 0, output
    return output
