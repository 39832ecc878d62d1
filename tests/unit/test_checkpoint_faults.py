"""What ``python -m tests.faults`` measures for docs/reliability.md, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults

BAD = {
    "left a damaged checkpoint",
    "resumed to other bits",
    "lost the checkpoint before",
    "saved all the same",
    "not found by verify",
    "not found by load",
    "changed something",
    "left rubbish",
    "left a mixture",
    "took another for the newest",
    "waited for a dead rank",
}


def nothing_bad(counts: faults.Counts) -> None:
    assert not {what: count for what, count in counts.items() if count and (what in BAD or "failed" in what)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("ranks", "count", "asynchronous", "alone"),
    [(1, 3, False, False), (2, 1, False, False), (1, 3, True, False), (2, 1, True, False), (2, 1, True, True)],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, ranks: int, count: int, asynchronous: bool, alone: bool
) -> None:
    counts = faults.kills(tmp_path, count, ranks, asynchronous=asynchronous, alone=alone)
    nothing_bad(counts)
    assert counts["killed while saving"] + counts["killed besides"] + counts["had finished"] == count


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_at_any_stage_loses_nothing(tmp_path: Path, asynchronous: bool) -> None:
    counts = faults.full_disks(tmp_path, 12, asynchronous)
    nothing_bad(counts)
    assert counts["tried"] == 12


def test_a_zeroed_sector_and_a_byte_less_are_found_everywhere(tmp_path: Path) -> None:
    counts = faults.cut_and_zeroed(tmp_path)
    nothing_bad(counts)
    assert counts["tried"] > 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_savers_and_a_clock_that_goes_back(tmp_path: Path) -> None:
    (tmp_path / "savers").mkdir()
    (tmp_path / "clocks").mkdir()
    counts = faults.two_savers(tmp_path / "savers", 2)
    nothing_bad(counts)
    assert counts["saved"] >= 4
    nothing_bad(faults.clocks(tmp_path / "clocks", 3))
