"""``python -m tests.step_counts`` counts what one steady step touches."""

from __future__ import annotations

from pathlib import Path

from tests.python import python

CODE = "from tests import step_counts; step_counts.BLOCKS = 3; step_counts.main()"

MOST = {"resident": (93, 18, 16), "stream": (110, 23, 18), "stream-overlap": (169, 32, 22)}
"""Functions, classes and files: who raises one says what that bought."""


def test_the_command_counts_every_way_to_train() -> None:
    """In a process of its own: threads of other tests would be counted."""
    done = python("-c", CODE, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    found = {
        name.strip(): [float(number) for number in numbers] for _, name, *numbers, _ in (r.split("|") for r in rows)
    }
    assert list(found) == ["by hand", "resident", "stream", "stream-overlap"]
    functions, classes, files, calls = zip(*found.values(), strict=True)
    assert functions[0] == classes[0] == files[0] == 0
    assert 0 < functions[1] < min(functions[2:])
    assert all(a > b > c for a, b, c in zip(functions[1:], classes[1:], files[1:], strict=True))
    assert 0 < calls[1] < calls[2] < calls[3]
    assert calls[0] > 0
    for preset, most in MOST.items():
        assert all(count <= bound for count, bound in zip(found[preset], most, strict=False)), (preset, found[preset])
