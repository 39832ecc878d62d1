"""``python -m tests.mutants`` has faults that can be made."""

from __future__ import annotations

import ast
import functools
import shutil
from pathlib import Path

import pytest

from tests.mutants import ROOT, Fault, faults


@functools.cache
def code_of(file: Path) -> str:
    return ast.dump(ast.parse(file.read_text()))


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.room}: {fault.what}")
def test_every_fault_can_be_made(fault: Fault, tmp_path: Path) -> None:
    """In code that is there, and the tests that are to find it are there as well."""
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, copy)
    fault.apply(tmp_path)
    assert code_of(copy) != code_of(ROOT / fault.file)
    for name in fault.tests.split():
        if name.startswith("tests/"):
            assert (ROOT / name.partition("::")[0]).exists(), name
