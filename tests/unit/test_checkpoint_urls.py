"""Checkpoints at URLs: whole or not there without renames, through fsspec."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightstep.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    layout,
    load_checkpoint,
    retention,
    save,
    save_checkpoint,
    verify_checkpoints,
)
from lightstep.checkpoint import storage as urls
from lightstep.checkpoint.background import finish_pending
from lightstep.checkpoint.formats import convert_checkpoint, describe_checkpoint
from lightstep.checkpoint.layout import remove_checkpoint
from lightstep.checkpoint.storage import UrlPath
from lightstep.extras import MissingLibraryError
from tests.checkpoint_runs import model_of, trained, values_of


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/run"
        return
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    fsspec.filesystem("memory").store.clear()


def files(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    return {} if not system.exists(root) else {path[len(root) :]: system.cat_file(path) for path in system.find(root)}


def test_a_checkpoint_is_replaced_by_its_manifest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that is written the one before is there; what is left of it then goes."""
    place = f"{url}/step"
    save_checkpoint(place, model_of(1.0))
    before = files(place)
    write = save.write_file

    def fails(path: Path, data: bytes) -> Any:
        if path.name == "state.pt":
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(save, "write_file", fails)
    monkeypatch.setattr("lightstep.checkpoint.saved.write_file", fails)
    with pytest.raises(CheckpointError, match=f"{place} was not saved: No space left"):
        save_checkpoint(place, model_of(2.0))
    assert files(place) == before
    monkeypatch.undo()
    save_checkpoint(place, model_of(2.0))
    load_checkpoint(place, model := model_of(0.0))
    assert values_of(model) == {2.0}
    assert len(files(place)) == len(before) and not (files(place).keys() & before.keys()) - {"/lightstep.json"}


def test_the_remains_of_a_crash_are_no_checkpoint_and_go(url: str) -> None:
    place = UrlPath(f"{url}/step") / "data-0123456789abcdef" / "__0_0_0.distcp"
    system, path = place.fsspec()
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, b"half")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_checkpoint(f"{url}/step", model_of(0.0))
    assert latest_checkpoint(url) is None
    save_checkpoint(f"{url}/step", model_of(1.0))
    assert b"half" not in files(url).values()
    load_checkpoint(f"{url}/step", model_of(0.0))


def test_of_two_savers_one_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, nested = save.write_tensors, []

    def and_another(*arguments: Any) -> Any:
        if not nested:
            nested.append(True)
            index = write(*arguments)
            save_checkpoint(f"{url}/step", model_of(2.0))
            return index
        return write(*arguments)

    monkeypatch.setattr(save, "write_tensors", and_another)
    with pytest.raises(CheckpointError, match="was not saved"):
        save_checkpoint(f"{url}/step", model_of(1.0))
    load_checkpoint(f"{url}/step", model := model_of(0.0))
    assert values_of(model) == {2.0}


def test_a_save_that_ends_while_another_begins_is_a_checkpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = urls._entries

    def after_another(path: Path) -> list[Path]:
        monkeypatch.undo()
        save_checkpoint(f"{url}/step", model_of(2.0))
        return inside(path)

    monkeypatch.setattr(urls, "_entries", after_another)
    save_checkpoint(f"{url}/step", model_of(1.0))
    load_checkpoint(f"{url}/step", model := model_of(0.0))
    assert values_of(model) == {1.0}


def test_damage_is_found_and_old_ones_are_removed(url: str) -> None:
    for number in (1, 2, 3):
        save_checkpoint(f"{url}/step-{number}", model_of(float(number)), keep_last=2)
    assert [str(each.path).rpartition("/")[2] for each in verify_checkpoints(url)] == ["step-3", "step-2"]
    system, root = fsspec.core.url_to_fs(f"{url}/step-3")
    (file,) = [path for path in system.find(root) if path.endswith("__0_0_0.distcp")]
    data = bytearray(system.cat_file(file))
    data[1000] ^= 4
    system.pipe_file(file, bytes(data))
    assert [bool(each.damage) for each in verify_checkpoints(url)] == [True, False]
    with pytest.raises(CheckpointError, match=f"is damaged: .*{url}/step-2 is undamaged: load that one"):
        load_checkpoint(f"{url}/step-3", model_of(0.0))
    remove_checkpoint(UrlPath(f"{url}/step-3"))  # type: ignore[arg-type]
    assert str(latest_checkpoint(url)) == f"{url}/step-2"


def names(url: str) -> list[str]:
    return sorted({path.split("/")[1] for path in files(url)})


def test_asynchronous_saves_keep_the_newest_ones(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is written last. Older checkpoints go after it, and none goes if the save fails."""
    strategy, model, optimizer = trained("stream")
    done: list[str] = []
    write, remove = layout.write_file, retention.remove_checkpoint

    def written(path: Path, data: bytes) -> Any:
        assert path.name == "lightstep.json" and len(files(url)) % 5 == 4, "the four other files are there"
        assert not any(name.startswith(f"/{path.parent.name}/lightstep") for name in files(url))
        done.append(f"write {path.parent.name}")
        return write(path, data)

    def removed(path: Path) -> None:
        done.append(f"remove {path.name}")
        remove(path)

    monkeypatch.setattr(layout, "write_file", written)
    monkeypatch.setattr(retention, "remove_checkpoint", removed)
    for number in range(1, 5):
        strategy.save_checkpoint(f"{url}/step-{number}", model, optimizer, asynchronous=True, keep_last=2)
        optimizer.backward(model(torch.ones(4, 5).to(torch.bfloat16)).float().sum())
        optimizer.step()
        finish_pending()
    order = ["write step-1", "write step-2", "write step-3", "remove step-1", "write step-4", "remove step-2"]
    assert done == order and names(url) == ["step-3", "step-4"]
    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        strategy.save_checkpoint(f"{url}/step-5", model, optimizer, asynchronous=True, keep_last=1)
        with pytest.raises(CheckpointError, match="No space left on device"):
            finish_pending()
    assert done == [*order, "remove step-3"] and names(url) == ["step-4"], "keep_last=1 makes room first"
    _, other, optimizer2 = trained("resident", steps=1)
    strategy.load_checkpoint(f"{url}/step-4", other, optimizer2)


def test_an_asynchronous_save_makes_no_room_by_the_last_undamaged_checkpoint(url: str) -> None:
    for number in (1, 2, 3):
        save_checkpoint(f"{url}/step-{number}", model_of(float(number)))
    for number in (2, 3):
        system, root = fsspec.core.url_to_fs(f"{url}/step-{number}")
        (file,) = [path for path in system.find(root) if path.endswith(".distcp")]
        data = bytearray(system.cat_file(file))
        data[1000] ^= 4
        system.pipe_file(file, bytes(data))
    write, seen = save.write_tensors, []

    def writes(*arguments: Any) -> Any:
        seen.append(names(url))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_tensors", writes)
        save_checkpoint(f"{url}/step-4", model_of(4.0), asynchronous=True, keep_last=1)
        finish_pending()
    assert "step-1" in seen[0] and names(url) == ["step-4"]


def test_what_is_no_checkpoint_is_not_replaced(url: str) -> None:
    system, path = UrlPath(f"{url}/step/thesis.tex").fsspec()
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, b"precious")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save_checkpoint(f"{url}/step", model_of(1.0))
    assert list(files(url).values()) == [b"precious"]


def test_a_downloaded_checkpoint_loads(tmp_path: Path) -> None:
    save_checkpoint(f"file://{tmp_path}/step", model_of(1.0), extra={"a": torch.ones(2)})
    model = model_of(0.0)
    assert torch.equal(load_checkpoint(tmp_path / "step", model)["a"], torch.ones(2))
    assert values_of(model) == {1.0}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nonsense://a/b was not saved: .*nonsense"):
        save_checkpoint("nonsense://a/b", model_of(1.0))
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError("No module named 'fsspec'", name="fsspec")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises((CheckpointError, MissingLibraryError), match=r"pip install 'lightstep-optim\[urls\]'"):
        save_checkpoint("memory://a/b", model_of(1.0))


def test_checkpoints_of_lightstep_are_converted_from_and_to_urls(url: str, tmp_path: Path) -> None:
    save_checkpoint(f"{url}/step-1", model_of(1.0), extra={"epoch": 3})
    convert_checkpoint(f"{url}/step-1", tmp_path / "run.pt", "torch")
    convert_checkpoint(tmp_path / "run.pt", f"{url}/step-2", "lightstep")
    assert load_checkpoint(f"{url}/step-2", model := model_of(0.0)) == {"epoch": 3}
    assert values_of(model) == {1.0}
    assert dict(describe_checkpoint(f"{url}/step-2"))["format"] == "lightstep"
    with pytest.raises(CheckpointError, match="lie in each other"):
        convert_checkpoint(f"{url}/step-2", f"{url}/step-2/inside", "lightstep")
    for to in ("torch", "deepspeed-universal"):
        with pytest.raises(
            ValueError, match=f"is a URL, and {to} is written to local paths; write to one, and copy it"
        ):
            convert_checkpoint(f"{url}/step-1", f"{url}/converted", to)
    with pytest.raises(
        CheckpointError, match="no checkpoint of lightstep; copy one of another format to a local folder"
    ):
        convert_checkpoint(url, tmp_path / "x", "lightstep")


def test_a_path_that_was_made_of_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a local folder named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    where = Path("s3://bucket/run/step-1")
    for call in (
        lambda: save_checkpoint(where, model_of(1.0)),
        lambda: load_checkpoint(where, model_of(1.0)),
        lambda: latest_checkpoint(where),
        lambda: verify_checkpoints(where),
        lambda: convert_checkpoint(where, tmp_path / "x", "lightstep"),
        lambda: describe_checkpoint(where),
    ):
        with pytest.raises(
            CheckpointError, match=r"is a pathlib\.Path that was made of a URL; pass the URL as a string"
        ):
            call()
    assert not [*tmp_path.iterdir()]
