"""The command that tries published optimizer classes tells equal, whole and refused ones apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import optimizer_classes
from tests.optimizer_classes import BEGIN, END, Finding, examine, table, write


@pytest.mark.parametrize(("name", "outcome"), [("AdamW", "equal"), ("Adafactor", "whole"), ("LBFGS", "not run")])
def test_a_class_of_torch(name: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_classes, "STEPS", 3)
    assert examine(name, getattr(torch.optim, name)).outcome == outcome


def test_the_page_gets_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, table({"package 1.0": [Finding("B", "equal"), Finding("A", "equal"), Finding("C", "refused", "why")]}))
    assert page.read_text() == (
        f"before\n{BEGIN}\n| package | outcome | classes |\n|---|---|---|\n| package 1.0 | equal (2) | A, B |\n"
        f"| package 1.0 | refused (1) | C |\n{END}\nafter\n"
    )
