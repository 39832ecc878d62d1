"""`lightstep train` on a GPU: it is used, the model learns, streamed and resident state give the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from lightstep.cli import app

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.yaml"


def run(folder: Path, *arguments: str, **changed: Any) -> str:
    """What a short run of the example prints."""
    values: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    values |= {"output": str(folder), "steps": 60, "checkpoint": {"every": 20, "keep": 3}, "sample": None} | changed
    config = folder / "train.yaml"
    config.write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(app, ["train", str(config), *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(folder.rglob("model.safetensors")))


@pytest.mark.parametrize("strategy", ["resident", "stream", "fp16", "fp32-stream"])
def test_the_example_learns_on_the_gpu(tmp_path: Path, strategy: str) -> None:
    output = run(tmp_path, "--strategy", strategy)
    assert f"strategy {strategy} on cuda:0" in output
    after, before = map(float, re.findall(r"after: ([\d.]+) nats per byte \(before: ([\d.]+)\)", output)[0])
    assert before > 5 and after < 3.5, output


def test_streamed_and_resident_runs_end_with_the_same_weights(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("resident", "stream")}
    for name, folder in folders.items():
        folder.mkdir()
        run(folder, "--strategy", name)
    streamed, resident = (weights(folder) for folder in folders.values())
    assert streamed.keys() == resident.keys()
    assert all(torch.equal(streamed[key], value) for key, value in resident.items())


def test_a_run_that_was_cut_short_is_continued_to_the_same_weights(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    constant = {"name": "constant"}
    run(whole, "--strategy", "stream", scheduler=constant)
    run(cut, "--strategy", "stream", scheduler=constant, steps=40)
    output = run(cut, "--strategy", "stream", "--resume", scheduler=constant)
    assert "continuing from" in output and "validation loss after" in output
    continued = weights(cut)
    assert all(torch.equal(continued[key], value) for key, value in weights(whole).items())
