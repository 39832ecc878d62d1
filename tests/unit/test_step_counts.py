"""``python -m tests.step_counts`` counts what one steady step touches."""

from __future__ import annotations

import pytest

from tests import step_counts


def test_the_command_counts_every_way_to_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_counts, "LAYERS", 3)
    step_counts.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    found = {
        name.strip(): [float(number) for number in numbers] for _, name, *numbers, _ in (r.split("|") for r in rows)
    }
    assert list(found) == ["by hand", *step_counts.PRESETS]
    functions, classes, files, calls = zip(*found.values(), strict=True)
    assert functions[0] == classes[0] == files[0] == 0
    assert 0 < functions[1] < functions[2] < functions[3]
    assert all(a > b > c for a, b, c in zip(functions[1:], classes[1:], files[1:], strict=True))
    assert 0 < calls[0] < min(calls[1:])
