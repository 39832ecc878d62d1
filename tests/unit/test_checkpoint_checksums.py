"""Damage is found: in every file, by loading and by verifying, with the place and with what to load instead."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lightstep import crc32 as crc32_module
from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoints,
)
from lightstep.checkpoint import load as load_module
from lightstep.checkpoint import tensors as read_module
from lightstep.cli import app
from tests.checkpoint_runs import content, flip, model_of, same, trained, values_of
from tests.covering import every_pair
from tests.reference.pair import BACKENDS

FILES = ["lightstep.json", "tensors.json", "state.pt", "__0_0_0.distcp", ".metadata"]


def zeroed(content: bytes, start: int) -> bytes:
    return content[:start] + bytes(len(content[start : start + 512])) + content[start + 512 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None,
    "empty": lambda content: b"",
    "one byte less": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "a sector of zeros": lambda content: zeroed(content, len(content) // 2),
    "the last sector of zeros": lambda content: zeroed(content, len(content) - 200),
}


def with_optimizer(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(value, count=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def saved(folder: Path, value: float = 1.0) -> Path:
    save_checkpoint(folder, *with_optimizer(value), extra={"step": 3})
    return folder


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


@every_pair(name=FILES, backend=BACKENDS)
def test_damage_in_any_file_is_found_and_changes_nothing(tmp_path: Path, name: str, backend: str) -> None:
    """By verify; and by a load of what it reads (all but torch's index, of which it knows the size)."""
    strategy, model, optimizer = trained(backend, steps=4)
    folder = tmp_path / "step"
    strategy.save_checkpoint(folder, model, optimizer)
    file, chance = folder / name, random.Random(0)
    content_before = file.read_bytes()
    strategy, model, optimizer = trained(backend)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=10)
    before, drawn = content(model, optimizer), torch.get_rng_state()

    def refused(damage: str) -> None:
        with pytest.raises(CheckpointError, match=r"step was not loaded: ") as raised:
            strategy.load_checkpoint(folder, model, optimizer, scheduler)
        assert name in str(raised.value), damage
        same(content(model, optimizer), before)
        assert torch.equal(torch.get_rng_state(), drawn), damage

    for damage, change in DAMAGE.items():
        changed = change(content_before)
        file.unlink(missing_ok=True)
        if changed is not None:
            file.write_bytes(changed)
        if (name, damage) == ("lightstep.json", "gone"):
            with pytest.raises(CheckpointError, match="holds no checkpoint of lightstep"):
                verify_checkpoints(folder)
        else:
            assert any(name in text for text in found(folder)), damage
        if name != ".metadata" or len(changed or b"") != len(content_before):
            refused(damage)
            assert latest_checkpoint(tmp_path) is None or len(changed or b"") == len(content_before), damage
    file.write_bytes(content_before)
    for number, bit in enumerate(chance.sample(range(8 * len(content_before)), 100)):
        flip(file, bit)
        assert found(folder), bit
        if number < 5 and name != ".metadata":
            refused(f"bit {bit}")
        flip(file, bit)
    strategy.save_checkpoint(tmp_path / "other", model, optimizer)  # no refused load has marked the model
    strategy.load_checkpoint(folder, model, optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_with_nan_is_refused_by_name_and_changes_nothing(tmp_path: Path, backend: str) -> None:
    strategy, model, optimizer = trained("resident", steps=4)
    optimizer.state[model.weight]["exp_avg_sq"].view(-1)[-1] = torch.nan
    strategy.save_checkpoint(tmp_path / "a", model, optimizer)
    strategy, model, optimizer = trained(backend)
    before = content(model, optimizer)
    with pytest.raises(CheckpointError, match=r"state 'exp_avg_sq' of weight holds 1 NaN .*load an"):
        strategy.load_checkpoint(tmp_path / "a", model, optimizer)
    same(content(model, optimizer), before)


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


def test_weights_alone_are_suggested_to_a_load_of_weights_alone(tmp_path: Path) -> None:
    saved(tmp_path / "step-1")
    save_checkpoint(tmp_path / "step-2", *with_optimizer(1.0), weights_only=True)
    flip(saved(tmp_path / "step-3") / "state.pt", 4000)
    assert refused(tmp_path / "step-3").endswith(f"{tmp_path / 'step-1'} is undamaged: load that one")
    with pytest.raises(CheckpointError, match=r"step-2 is undamaged: load that one$"):
        load_checkpoint(tmp_path / "step-3", with_optimizer(7.0)[0])


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
    code, text = run(tmp_path / "nothing")
    assert code == 2 and "does not exist" in text


# -- one checksum, one reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["isal", "zlib"])
def test_the_checksum_is_the_same_with_and_without_the_faster_library(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "zlib":
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    crc32 = runpy.run_path(crc32_module.__file__)["crc32"]
    data = random.Random(0).randbytes(100_001)
    assert crc32.__module__ == ("zlib" if library == "zlib" else "isal.isal_zlib")
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[7:], 5) == zlib.crc32(data[7:], 5)


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
