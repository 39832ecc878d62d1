"""Damage is found: in every file, by loading and by verifying, with the place and with what to load instead."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lightstep import crc32 as crc32_module
from lightstep.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, verify_checkpoints
from lightstep.checkpoint import load as load_module
from lightstep.checkpoint import read as read_module
from lightstep.cli import app
from tests.unit.test_checkpoint_promises import OLD, model_of, values_of

FILES = ["lightstep.json", "tensors.json", "state.pt", "__0_0_0.distcp"]


def with_optimizer(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(value, count=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def saved(folder: Path, value: float = 1.0) -> Path:
    save_checkpoint(folder, *with_optimizer(value), extra={"step": 3})
    return folder


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


def refused(folder: Path) -> str:
    """The error of loading; nothing was changed."""
    model, optimizer = with_optimizer(7.0)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, model, optimizer)
    assert values_of(model) == {7.0}
    assert all(torch.all(entries["momentum_buffer"] == 7.0) for entries in optimizer.state.values())
    return str(raised.value)


def found(folder: Path) -> list[str]:
    (verified,) = verify_checkpoints(folder)
    return verified.damage


@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "step")
    assert found(folder) == []
    file, seed = folder / name, random.Random(0)
    bits = range(8 * file.stat().st_size)
    for bit in seed.sample(bits, min(len(bits), 300)):
        flip(file, bit)
        assert found(folder), bit
        flip(file, bit)
    for bit in seed.sample(bits, 10 if name != ".metadata" else 0):  # torch's index is not read by a load
        flip(file, bit)
        assert name in refused(folder), bit
        flip(file, bit)
    load_checkpoint(folder, *with_optimizer(0.0))


@pytest.mark.parametrize("name", [*FILES, ".metadata"])
@pytest.mark.parametrize("damage", ["one byte less", "one byte more", "a sector of zeros", "gone"])
def test_other_damage_is_found_in_every_file(tmp_path: Path, name: str, damage: str) -> None:
    file = saved(tmp_path / "step") / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        start, end = len(content) // 2, len(content) // 2 + 512
        changed = {
            "one byte less": content[:-1],
            "one byte more": content + b"\0",
            "a sector of zeros": content[:start] + bytes(len(content[start:end])) + content[end:],
        }
        file.write_bytes(changed[damage])
    if (name, damage) == ("lightstep.json", "gone"):
        with pytest.raises(CheckpointError, match="holds no checkpoint of lightstep"):
            verify_checkpoints(file.parent)
    else:
        assert any(name in text for text in found(file.parent))
    if name != ".metadata" or damage != "a sector of zeros":
        assert name in refused(file.parent)


def test_the_error_names_tensor_and_offset(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step")
    index = json.loads((folder / "tensors.json").read_text())
    _, _, _, start, size = index["tensors"]["optimizer.1.weight.momentum_buffer"]["chunks"][0]
    flip(folder / "__0_0_0.distcp", 8 * (start + size // 2))
    expected = f"__0_0_0.distcp is damaged: 1.weight.momentum_buffer (optimizer) at byte {start}"
    assert expected in refused(folder)
    assert expected in found(folder)[0]
    load_checkpoint(folder, model := model_of(0.0, count=2))
    assert values_of(model) == {1.0}, "only what is read is compared"


def test_the_error_names_the_newest_older_checkpoint_that_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path / f"step-{step}")
    for step, name in ((2, "__0_0_0.distcp"), (3, "state.pt")):
        flip(tmp_path / f"step-{step}" / name, 4000)
    assert refused(tmp_path / "step-3").endswith(f"{tmp_path / 'step-1'} is undamaged: load that one")
    flip(tmp_path / "step-1" / "state.pt", 4000)
    assert refused(tmp_path / "step-3").endswith("no older checkpoint next to it is undamaged"), "step-4 is newer"
    os.truncate(tmp_path / "step-4" / "__0_0_0.distcp", 3)
    saved(tmp_path / "step-2")
    shutil.rmtree(tmp_path / "step-3")
    saved(tmp_path / "step-3")
    flip(tmp_path / "step-3" / "lightstep.json", 800)
    assert refused(tmp_path / "step-3").endswith(f"{tmp_path / 'step-2'} is undamaged: load that one")


def test_checkpoints_of_before_there_were_checksums_load_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(5, 3)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(OLD / "stream", model)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{OLD / 'stream'} has no checksums"
    ]
    (verified,) = verify_checkpoints(OLD / "stream")
    assert verified.unchecked and not verified.damage
    caplog.clear()
    save_checkpoint(tmp_path / "new", model)
    load_checkpoint(tmp_path / "new", model)
    assert not caplog.records


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", "verify", *map(str, arguments)])
    return result.exit_code, result.stdout + result.stderr


def test_verify_from_the_command_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / "run" / name)
    saved(tmp_path / "other")
    code, text = run(tmp_path / "run", tmp_path / "other")
    assert code == 0 and text.count("whole") == 3 and "5 files" in text
    flip(tmp_path / "run" / "a" / "__0_0_0.distcp", 5000)
    code, text = run(tmp_path / "run", tmp_path / "other")
    assert code == 1 and text.count("whole") == 2 and "__0_0_0.distcp is damaged" in text
    flip(tmp_path / "run" / "b" / "lightstep.json", 50)
    code, text = run(tmp_path / "run")
    assert code == 1 and "lightstep.json" in text and "b: damaged" in text.replace("\n", "")
    code, text = run(OLD / "stream")
    assert code == 0 and "no checksums" in text
    code, text = run(tmp_path / "nothing")
    assert code == 2 and "does not exist" in text


# -- one checksum, one reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["isal", "zlib"])
def test_the_checksum_is_the_same_with_and_without_the_faster_library(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setattr(crc32_module, "_fastest", crc32_module._fastest.__wrapped__)
    data = random.Random(0).randbytes(100_001)
    assert crc32_module.crc32(data) == zlib.crc32(data)
    assert crc32_module.crc32(memoryview(data)[7:], 5) == zlib.crc32(data[7:], 5)


def test_torch_makes_no_checksums_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the threads that write: torch keeps the option for each thread, and its sums take longer than the disk."""
    asked, save = [], torch.save

    def noted(value: Any, file: Any) -> None:
        if isinstance(value, torch.Tensor):
            asked.append(torch.serialization.get_crc32_options())
        save(value, file)

    monkeypatch.setattr(torch, "save", noted)
    saved(tmp_path / "a")
    assert asked and not any(asked) and torch.serialization.get_crc32_options()


@pytest.mark.parametrize(("room", "times"), [(1 << 30, 1), (0, 2)])
def test_a_load_reads_once_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, times: int
) -> None:
    saved(tmp_path / "a", 3.0)
    read, places = read_module.read_chunk, Counter[str]()

    def counted(folder: Path, key: str, chunk: Any) -> bytes:
        places[key] += 1
        return read(folder, key, chunk)

    monkeypatch.setattr(read_module, "read_chunk", counted)
    monkeypatch.setattr(load_module, "available_bytes", lambda: 3 * room)
    model, optimizer = with_optimizer(0.0)
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert values_of(model) == {3.0} and set(places.values()) == {times}
    assert all(torch.all(entries["momentum_buffer"] == 3.0) for entries in optimizer.state.values())
