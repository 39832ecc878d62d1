"""Exports replace a folder whole: a crash leaves the old model or the new one, and the user's files stay."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightstep import Strategy
from lightstep.checkpoint import CheckpointError, export_model, load_checkpoint
from lightstep.checkpoint import huggingface as export
from lightstep.checkpoint.huggingface import load_pretrained
from lightstep.checkpoint.storage import LocalStorage
from tests.checkpoint_runs import dies_at, failing_calls


class Sharded(nn.Module):
    """Its ``save_pretrained`` writes two shards with an index, a configuration, and a file in a subfolder."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((3,), value)) for _ in range(2))

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        (folder / "templates").mkdir()
        for file in ("config.json", "templates/chat.jinja"):
            (folder / file).write_text(str(self.a[0].item()))
        names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(state_dict, 1)}
        for name, file in names.items():
            save_file({name: state_dict[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))


def exported_value(folder: Path) -> float:
    """The one value of all of the folder's files."""
    model = Sharded()
    load_pretrained(model, folder)
    texts = [(folder / file).read_text() for file in ("config.json", "templates/chat.jinja")]
    (value,) = {*model.a.tolist(), *model.b.tolist(), *map(float, texts)}
    return value


def user_files(folder: Path) -> None:
    (folder / "templates").mkdir(parents=True)
    (folder / "step-1" / "empty").mkdir(parents=True)
    for file in ("notes.txt", "templates/mine.jinja", "step-1/model.safetensors", "model.safetensors"):
        (folder / file).write_text("mine")


def has_user_files(folder: Path) -> bool:
    files = ("notes.txt", "templates/mine.jinja", "step-1/model.safetensors")
    return all((folder / file).read_text() == "mine" for file in files) and (folder / "step-1" / "empty").is_dir()


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_second_export_replaces_the_first_and_keeps_the_users_files(tmp_path: Path) -> None:
    user_files(tmp_path / "m")
    for value in (1.0, 2.0):
        export_model(tmp_path / "m", Sharded(value))
        assert exported_value(tmp_path / "m") == value
        assert has_user_files(tmp_path / "m")
        assert not (tmp_path / "m" / "model.safetensors").exists(), "the weights of an earlier export"
        assert entries(tmp_path) == ["m"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new_model_whole(tmp_path: Path) -> None:
    results, between = [], 0
    for count in range(1, 300):
        folder = tmp_path / str(count) / "m"
        user_files(folder)
        export_model(folder, Sharded(1.0))
        died = dies_at(count, folder.parent, lambda folder=folder: export_model(folder, Sharded(2.0)))
        if not folder.exists():  # a crash between the two renames; both models are whole beside it
            between += 1
            (old,), (new,) = folder.parent.glob(".m.replaced-*"), folder.parent.glob(".m.saving-*")
            assert exported_value(old) == 1.0 and has_user_files(old) and exported_value(new) == 2.0
        results.append(exported_value(folder) if folder.exists() else 1.0)
        export_model(folder, Sharded(3.0))
        assert exported_value(folder) == 3.0 and has_user_files(folder)
        assert entries(folder.parent) == ["m"], "what the crash left is gone after the next export"
        if not died:
            break
    else:
        pytest.fail("the export never finished")
    assert results == sorted(results) and set(results) == {1.0, 2.0}
    assert between == 1 and len(results) > 20


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_failing_call_leaves_the_earlier_export(tmp_path: Path, call: str) -> None:
    user_files(tmp_path / "m")
    for patch in failing_calls(call):
        export_model(tmp_path / "m", Sharded(1.0))
        assert has_user_files(tmp_path / "m") and entries(tmp_path) == ["m"], "what the failure left is gone"
        expected = 2.0
        with patch:
            try:
                export_model(tmp_path / "m", Sharded(2.0))
            except CheckpointError as error:
                assert str(error) == f"{tmp_path / 'm'} was not exported: No space left on device"
                expected = 1.0
        assert exported_value(tmp_path / "m") == expected


def test_every_file_is_on_the_disk_before_the_folder_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, commit = os.fsync, LocalStorage.commit

    def counted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(self: LocalStorage, folder: Path, *arguments: Any) -> None:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert len(files) == 5 and {file.stat().st_ino for file in files} <= synced
        commit(self, folder, *arguments)
        assert folder.parent.stat().st_ino in synced

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(LocalStorage, "commit", checked)
    export_model(tmp_path / "m", Sharded(1.0))


class Adapter(nn.Linear):
    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        save_file(state_dict, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")


def test_an_adapter_leaves_the_base_beside_it_and_a_whole_model_replaces_both(tmp_path: Path) -> None:
    export_model(tmp_path / "m", nn.Linear(2, 2))
    base = (tmp_path / "m" / "model.safetensors").read_bytes()
    export_model(tmp_path / "m", Adapter(2, 2))
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == base
    export_model(tmp_path / "m", nn.Linear(2, 2))
    assert entries(tmp_path / "m") == ["model.safetensors"], "from_pretrained would load the adapter instead"


def test_checkpoints_in_the_folder_stay_and_a_save_that_is_running_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = Strategy.load("fp32")
    model = strategy.prepare_model(nn.Linear(2, 2))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1.0)
    create, write = LocalStorage.create, export.write_export

    def slowly(self: LocalStorage, file: Path) -> Any:
        time.sleep(0.1)
        return create(self, file)

    def afterwards(*arguments: Any) -> None:
        assert pending is not None and pending.done()
        write(*arguments)

    monkeypatch.setattr(LocalStorage, "create", slowly)
    monkeypatch.setattr(export, "write_export", afterwards)
    pending = strategy.save_checkpoint(tmp_path / "run" / "step-1", model, optimizer, asynchronous=True)
    strategy.export_model(tmp_path / "run", model)
    assert entries(tmp_path / "run") == ["model.safetensors", "step-1"]
    load_checkpoint(tmp_path / "run" / "step-1", model, optimizer)
    assert torch.equal(load_file(tmp_path / "run" / "model.safetensors")["weight"], model.weight)


def test_places_that_cannot_be_replaced_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file was not exported: .*file exists and is not a folder; choose"):
        export_model(tmp_path / "file", nn.Linear(2, 2))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="here is the working directory, which cannot be replaced; choose"):
        export_model(".", nn.Linear(2, 2))
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path)
    export_model("link", Sharded(1.0))
    assert (tmp_path / "link").is_symlink() and exported_value(tmp_path / "here") == 1.0


@pytest.mark.parametrize("url", ["s3://bucket/model", "memory://model", Path("s3://bucket/model")])
def test_a_url_is_refused_before_anything_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightstep.checkpoint.huggingface.full_weights", lambda *_, **__: pytest.fail("gathered"))
    with pytest.raises(CheckpointError, match="is a URL, and save_pretrained writes to local folders; export to one"):
        export_model(url, nn.Linear(2, 2))
    assert not entries(tmp_path)
