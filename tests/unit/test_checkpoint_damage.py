"""Damage in any file is found by loads and by verify, with its place and what to load instead. Nothing is executed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import runpy
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lightstep import crc32 as crc32_module
from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoints,
)
from lightstep.checkpoint.layout import seal
from lightstep.cli import app
from tests import faults
from tests.checkpoint_runs import Run, flip, model_of, same, values_of
from tests.covering import every_value
from tests.reference.pair import BACKENDS

FILES = ["lightstep.json", "tensors.json", "state.pt", "__0_0_0.distcp", ".metadata"]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda text: None,
    "one byte less": lambda text: text[:-1],
    "one byte more": lambda text: text + b"\0",
    "a flipped bit": lambda text: text[:-300] + bytes([text[-300] ^ 4]) + text[-299:],
    "the last sector of zeros": lambda text: text[:-200] + bytes(200),
}
"""``test_what_reliability_measures`` has more bits and sectors."""


@every_value(name=FILES, backend=BACKENDS, scheme=["", "file://"])
def test_damage_in_any_file_is_found_and_changes_nothing(tmp_path: Path, name: str, backend: str, scheme: str) -> None:
    """By verify; and by a load of what it reads (all but torch's index, of which it knows the size)."""
    folder = f"{scheme}{tmp_path}/step"
    Run(backend, steps=4).save(folder)
    (file,) = (tmp_path / "step").rglob(name)
    before, run = file.read_bytes(), Run(backend)
    scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.5, total_iters=10)
    expected, drawn = run.content(), torch.get_rng_state()
    for damage, change in DAMAGE.items():
        changed = change(before)
        file.unlink()
        if changed is not None:
            file.write_bytes(changed)
        if (name, damage) == ("lightstep.json", "gone"):
            with pytest.raises(CheckpointError, match="holds no checkpoint of lightstep"):
                verify_checkpoints(folder)
        else:
            (verified,) = verify_checkpoints(folder)
            assert any(name in text for text in verified.damage), damage
        if name != ".metadata" or len(changed or b"") != len(before):
            with pytest.raises(CheckpointError, match=r"step was not loaded: ") as raised:
                run.load(folder, scheduler=scheduler)
            assert name in str(raised.value), damage
            same(run.content(), expected)
            assert torch.equal(torch.get_rng_state(), drawn), damage
        if len(changed or b"") != len(before):
            assert latest_checkpoint(f"{scheme}{tmp_path}") is None, damage
        file.write_bytes(before)
    run.save(tmp_path / "other")  # no refused load has marked the model
    run.load(folder)


# -- what the error says -----------------------------------------------------------------------------------------------


def saved(folder: Path, **options: Any) -> Path:
    save_checkpoint(folder, *faults.model_of(1.0), extra={"step": 3}, **options)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, *faults.model_of(7.0))
    return str(raised.value)


def test_the_error_names_tensor_and_offset(tmp_path: Path) -> None:
    folder = saved(tmp_path / "step")
    index = json.loads((folder / "tensors.json").read_text())
    _, _, _, start, size = index["tensors"]["optimizer.1.weight.momentum_buffer"]["chunks"][0]
    flip(folder / "__0_0_0.distcp", 8 * (start + size // 2))
    expected = f"__0_0_0.distcp is damaged: 1.weight.momentum_buffer (optimizer) at byte {start}"
    assert expected in refused(folder) and expected in verify_checkpoints(folder)[0].damage[0]
    load_checkpoint(folder, model := faults.model_of(0.0)[0])
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
    saved(tmp_path / "step-2", weights_only=True)
    flip(saved(tmp_path / "step-3") / "state.pt", 4000)
    assert refused(tmp_path / "step-3").endswith(f"{tmp_path / 'step-1'} is undamaged: load that one")
    with pytest.raises(CheckpointError, match=r"step-2 is undamaged: load that one$"):
        load_checkpoint(tmp_path / "step-3", faults.model_of(7.0)[0])


def test_verify_from_the_command_line(tmp_path: Path) -> None:
    def run(*paths: Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["checkpoint", "verify", *map(str, paths)])
        return result.exit_code, result.stdout + result.stderr

    for name in ("run/a", "run/b", "other"):
        saved(tmp_path / name)
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


# -- malice: whoever wrote the files made all checksums right ----------------------------------------------------------

_fired: list[str] = []


class Evil:
    """Runs when unpickled."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return fire, (self.where,)


def fire(where: str) -> None:
    _fired.append(where)


@pytest.fixture(autouse=True)
def nothing_fires() -> Iterator[None]:
    _fired.clear()
    yield
    assert _fired == []


def evil_tensor(folder: Path, index: dict[str, Any]) -> None:
    torch.save(Evil("tensor"), folder / "__0_0_0.distcp")
    text = (folder / "__0_0_0.distcp").read_bytes()
    for tensor in index["tensors"].values():
        tensor["chunks"][0][3:] = [0, len(text)]
        tensor["crc32"] = [zlib.crc32(text)]


def too_long(folder: Path, index: dict[str, Any]) -> None:
    for tensor in index["tensors"].values():
        tensor["chunks"][0][-1] = 2**40


def outside(folder: Path, index: dict[str, Any]) -> None:
    (folder / "__0_0_0.distcp").rename(folder.parent / "outside.distcp")
    index["files"] = ["../outside.distcp"]


MALICE: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str | None]] = {
    "a pickle as torch's index, which is not read": (
        lambda folder, _: (folder / ".metadata").write_bytes(pickle.dumps(Evil("metadata"))),
        None,
    ),
    "a pickle as the state": (
        lambda folder, _: torch.save({"extra": Evil("state")}, folder / "state.pt"),
        r"state\.pt cannot be read: it is damaged, or holds more than plain",
    ),
    "a pickle as a tensor": (evil_tensor, r"Unpickl|Weights only"),
    "bytes that a file does not have": (too_long, r"__0_0_0\.distcp has fewer bytes than the \d+ that it names"),
    "a file outside": (outside, r"'\.\./outside\.distcp', which is not a file name"),
}


@pytest.mark.parametrize("what", MALICE)
def test_a_stranger_runs_nothing_and_leads_nowhere(tmp_path: Path, what: str) -> None:
    assert (pickle.loads(pickle.dumps(Evil("trap"))), _fired.pop()) == (None, "trap"), "the trap works"
    save_checkpoint(tmp_path / "a", model_of(1.0), extra={"epoch": 1})
    forging, sentence = MALICE[what]
    index = json.loads((tmp_path / "a" / "tensors.json").read_text())
    forging(tmp_path / "a", index)
    (tmp_path / "a" / "tensors.json").write_text(json.dumps(index))
    files = dict.fromkeys(("../outside.distcp", "tensors.json", "state.pt", ".metadata"), 1)
    faults.forge(tmp_path / "a", **({"files": files} if what == "a file outside" else {}))
    model = model_of(0.0)
    if sentence is None:
        assert load_checkpoint(tmp_path / "a", model) == {"epoch": 1} and values_of(model) == {1.0}
        return
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint(tmp_path / "a", model)
    assert values_of(model) == {0.0}


STRANGE = [None, -1, 2**62, 2**70, 1.5, True, "x", "../x", "\ud800", [], [[]], ["a"], {}, {"a": 1}]


def replaced(content: Any, chance: random.Random) -> Any:
    """The content with something in it replaced by something else."""
    if isinstance(content, dict | list) and content and chance.random() < 0.8:
        changed: Any = copy.copy(content)
        key = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        changed[key] = replaced(content[key], chance)
        return changed
    return chance.choice(STRANGE)


@pytest.mark.parametrize("name", ["lightstep.json", "tensors.json"])
def test_a_strangers_manifest_or_index_is_refused_and_stops_nobody_else(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        save_checkpoint(tmp_path / f"step-{number}", *faults.model_of(float(number)))
    folder, chance = tmp_path / "step-2", random.Random(0)
    files = {each: json.loads((folder / each).read_text()) for each in ("lightstep.json", "tensors.json")}
    del files["lightstep.json"]["crc32"]
    for number in range(40):
        changed = files | {name: replaced(files[name], chance)}
        manifest, text = changed["lightstep.json"], json.dumps(changed["tensors.json"]).encode()
        if not isinstance(manifest, dict):
            continue
        if name == "tensors.json":
            (folder / name).write_bytes(text)
            manifest = manifest | {
                "files": manifest["files"] | {name: len(text)},
                "checksums": manifest["checksums"] | {name: zlib.crc32(text)},
            }
        (folder / "lightstep.json").write_bytes(seal(manifest))
        with suppress(CheckpointError):
            load_checkpoint(folder, faults.model_of(0.0)[0])
        with suppress(CheckpointError):
            verify_checkpoints(folder)
        assert latest_checkpoint(tmp_path) in {tmp_path / "step-1", folder}
        if number % 10 == 0:
            save_checkpoint(tmp_path / "step-3", model_of(0.0))
            shutil.rmtree(tmp_path / "step-3")
