"""What a run shows where there is no terminal: lines by time and by step, of means."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from lightstep.trainer import output
from lightstep.trainer.output import Display, Figures


def _lines(monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int, take: float = 1.0) -> list[str]:
    """Of 20 steps with losses 1, 2, ..., looked at after every second one; each takes so many seconds."""
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    console = Console(record=True, file=open("/dev/null", "w"), width=200)  # noqa: SIM115
    shown = Display(console, True, seconds, steps)
    with shown.training(0, 20):
        for step in range(2, 21, 2):
            now += 2 * take
            shown.show(step, Figures([step - 1.0, float(step)], [1.0, math.inf], 1.0, 100.0, 1_500_000_000, skipped=1))
    return console.export_text().splitlines()


def test_the_first_and_the_last_look_have_a_line_whatever_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = _lines(monkeypatch, 1e9, 0)
    assert first == "step 2/20  loss 1.500  norm 1.00  100 tokens/s  1.5 GB  1 skipped  2 s"
    assert last.startswith("step 20/20  loss 11.500  "), "the mean of steps 3 to 20"


def test_lines_by_step_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(lines: list[str]) -> list[int]:
        return [int(line.split()[1].split("/")[0]) for line in lines]

    assert of(_lines(monkeypatch, 1e9, 5)) == [2, 8, 14, 20]
    assert of(_lines(monkeypatch, 10.0, 0)) == [2, 12, 20]
    assert of(_lines(monkeypatch, 10.0, 0, take=60)) == list(range(2, 21, 2))


def test_the_rate_is_that_of_all_tokens_in_all_of_their_time() -> None:
    """A hundred tokens in one second and as many in three seconds: 50 a second."""
    figures = [Figures([1.0], [1.0], 1.0, rate, 0) for rate in (100.0, 100 / 3)]
    assert "  50 tokens/s  " in output._summary(figures)
