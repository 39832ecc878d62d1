"""``python -m tests.mutants`` has faults that can be made."""

from __future__ import annotations

import ast

from tests.mutants import ROOT, faults


def test_every_fault_can_be_made() -> None:
    """In code that is there once and stays code, and the tests that are to find it are there as well."""
    for fault in faults():
        text = (ROOT / fault.file).read_text()
        assert text.count(fault.old) == 1 and fault.new != fault.old, fault
        ast.parse(text.replace(fault.old, fault.new))
        for name in fault.tests.split():
            if name.startswith("tests/"):
                assert (ROOT / name.partition("::")[0]).exists(), name
