"""What ``python -m tests.faults`` measures for docs/reliability.md, in seconds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from lightstep.checkpoint import load_checkpoint, save_checkpoint, storage, verify_checkpoints
from tests import faults
from tests.checkpoint_runs import model_of, values_of

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_savers_and_a_clock_that_goes_back(tmp_path: Path) -> None:
    (tmp_path / "savers").mkdir()
    (tmp_path / "clocks").mkdir()
    counts = faults.two_savers(tmp_path / "savers", 2)
    nothing_bad(counts)
    assert counts["saved"] >= 4
    nothing_bad(faults.clocks(tmp_path / "clocks", 3))


class ShortReads(io.FileIO):
    """A file of which a call reads 1000 bytes at most; Linux reads less than 2 GiB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000])

    def read(self, size: int | None = -1) -> bytes:
        return super().read(1000 if size is None or size < 0 else min(size, 1000))


class ShortWrites(storage._SyncedFile):
    """A file to which a call writes 1000 bytes at most."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data).cast("B")[:1000])


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SyncedFile", ShortWrites)
    save_checkpoint(tmp_path / "step", model_of(1.0, count=40))
    open_file = io.open

    def shortly(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any) -> Any:
        if mode != "rb":
            return open_file(file, mode, buffering, *arguments)
        return ShortReads(file) if buffering == 0 else io.BufferedReader(ShortReads(file))

    monkeypatch.setattr(io, "open", shortly)
    (verified,) = verify_checkpoints(tmp_path / "step")
    assert not verified.damage and verified.nbytes > 2000
    load_checkpoint(tmp_path / "step", model := model_of(0.0, count=40))
    assert values_of(model) == {1.0}
