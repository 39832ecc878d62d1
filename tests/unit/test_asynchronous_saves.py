"""Asynchronous saves of the Trainer and of accelerate: the bits of the step that was saved, whole folders only."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_utils import get_last_checkpoint

from lightstep import CheckpointError, ConfigError
from lightstep.checkpoint import save
from lightstep.checkpoint.background import finish_pending
from lightstep.checkpoint.saved import FILE_LIST
from lightstep.distributed import Ranks
from lightstep.integrations.folders import PendingFolder
from lightstep.integrations.trainer_checkpoints import CHECKPOINTS, is_read_on_save
from lightstep.integrations.transformers import LightstepTrainer
from tests.checkpoint_runs import DISK_IS_FULL, full_disk
from tests.patience import PATIENCE
from tests.reference.tiny_llama import Rows, make_llama, training_arguments
from tests.unit.test_accelerate import VALUES, Training, fresh_state

__all__ = ["fresh_state"]

STATES: dict[str, dict[str, Any]] = {
    "resident": {"backend": "resident"},
    "stream": {"backend": "stream", "ring_mib": 0.05},
    "stream-overlap": {"backend": "stream", "ring_mib": 0.05, "update": "overlap"},
}


@pytest.fixture(autouse=True)
def on_the_cpu(fresh_state: None) -> Iterator[None]:
    yield
    with contextlib.suppress(CheckpointError):
        finish_pending()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers begin after a moment, in which training goes on."""
    write, moments = save.write_tensors, random.Random(0)

    def late(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(moments.uniform(0.02, 0.1))
        return write(*arguments)

    monkeypatch.setattr(save, "write_tensors", late)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Each release lets one writer begin."""
    write, go = save.write_tensors, threading.Semaphore(0)

    def waits(*arguments: Any) -> Any:
        assert threading.current_thread() is threading.main_thread() or go.acquire(timeout=PATIENCE)
        return write(*arguments)

    monkeypatch.setattr(save, "write_tensors", waits)
    yield go
    go.release(100)


def make(
    folder: Path, backend: str = "stream", *, model: Any = None, seed: int = 0, asynchronous_saves: bool = True,
    callbacks: Any = None, **options: Any,
) -> LightstepTrainer:  # fmt: skip
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4} | options
    data = Rows()
    return LightstepTrainer(
        model or make_llama(seed),
        training_arguments(folder, **arguments),
        strategy={"clipping": {"max_norm": 0.5}, "optimizer_state": STATES[backend]},
        train_dataset=data,
        eval_dataset=data,
        asynchronous_saves=asynchronous_saves,
        callbacks=callbacks,
    )


def at(event: str, call: Callable[[int], object]) -> TrainerCallback:
    """Calls ``call`` with the number of the step."""

    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        call(state.global_step)

    made: TrainerCallback = type("At", (TrainerCallback,), {event: method})()
    return made


def content(trainer: LightstepTrainer) -> dict[str, Any]:
    """All that a checkpoint has of a run."""
    return {
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "optimizer": trainer.optimizer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
    }


def resumed(folder: Path, backend: str, checkpoint: Path) -> dict[str, Any]:
    """What a resumed run begins with."""
    found: dict[str, Any] = {}
    look = at("on_epoch_begin", lambda step: found.update(step=step, **content(trainer)))
    trainer = make(folder, backend, seed=1, callbacks=[look], save_strategy="no")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return found


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir() if path.name != "runs")


# -- the Trainer


def test_each_checkpoint_is_that_of_a_synchronous_save(tmp_path: Path, slow: None) -> None:
    backend = "stream-overlap"
    make(tmp_path / "waited", backend, asynchronous_saves=False, max_steps=3).train()
    make(tmp_path / "asked", backend, max_steps=3).train()
    assert names(tmp_path / "asked") == [f"checkpoint-{step}" for step in range(1, 4)]
    for step in (1, 3):  # the first, beside whose writing training goes on, and the last
        folders = [tmp_path / name / f"checkpoint-{step}" for name in ("waited", "asked")]
        expected, found = (resumed(folder.parent, backend, folder) for folder in folders)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # bit for bit, nested
        assert found["step"] == step
        drawn = [torch.load(folder / "rng_state.pth", weights_only=False)["cpu"] for folder in folders]
        assert torch.equal(*drawn)
        weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
        assert weights[0] == weights[1]
        own = ["model.safetensors", "rng_state.pth", "trainer_state.json", "training_args.bin"]
        assert all((folders[1] / name).is_file() for name in own)
        assert (folders[1] / "lightstep" / "lightstep.json").is_file()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, held: threading.Semaphore) -> None:
    """The folder appears when it is whole; the older one stays until then; training ends when all is written."""
    seen: dict[int, list[str]] = {}

    def look(step: int) -> None:
        hidden = [file.name for file in tmp_path.glob(".checkpoint-*.saving-*/*/*")]
        assert "model.safetensors" not in hidden and ("config.json" in hidden) is (step > 1)
        seen[step] = [path.name for path in tmp_path.glob("checkpoint-*")]
        last = get_last_checkpoint(tmp_path)
        assert ([] if last is None else [Path(last).name]) == seen[step]
        for _ in range({3: 1, 5: 1, 7: 2}.get(step, 0)):
            held.release()

    make(tmp_path, save_steps=2, max_steps=8, save_total_limit=1, callbacks=[at("on_step_begin", look)]).train()
    whole = [[], [], [], [], ["checkpoint-2"], ["checkpoint-2"], ["checkpoint-4"], ["checkpoint-4"]]
    assert seen == dict(enumerate(whole))
    assert names(tmp_path) == ["checkpoint-8"]


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path, slow: None) -> None:
    trainer = make(
        tmp_path,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=3,
        load_best_model_at_end=True,
        save_total_limit=1,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first is the best
    )
    trainer.train()
    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    assert names(tmp_path) == ["checkpoint-1"]
    assert f'"best_model_checkpoint": "{best}"' in (best / "trainer_state.json").read_text()
    saved = load_file(best / "model.safetensors")
    assert saved and all(torch.equal(trainer.model.get_parameter(name), value) for name, value in saved.items())


def test_callbacks_that_read_the_folder_find_it_whole(tmp_path: Path, slow: None) -> None:
    found: list[bool] = []

    def read(step: int) -> None:
        found.append((tmp_path / f"checkpoint-{step}" / "lightstep" / "lightstep.json").is_file())

    make(tmp_path, callbacks=[at("on_save", read)], max_steps=2).train()
    assert found == [True] * 2


def test_reporting_callbacks_that_upload_nothing_are_not_waited_for() -> None:
    """They are known by their names in transformers; with others' a save is waited for."""

    def on_save(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError

    def named(name: str, module: str = integration_utils.__name__, **attributes: Any) -> TrainerCallback:
        return type(name, (TrainerCallback,), {"on_save": on_save, "__module__": module, **attributes})()

    assert not is_read_on_save(TrainerCallback())
    assert not is_read_on_save(named("WandbCallback", _log_model=integration_utils.WandbLogModel.FALSE))
    assert is_read_on_save(named("WandbCallback", _log_model=integration_utils.WandbLogModel.CHECKPOINT))
    assert is_read_on_save(named("WandbCallback", module="mine"))
    for name in ("WandbCallback", "MLflowCallback", "TrackioCallback", "SwanLabCallback"):
        assert hasattr(integration_utils, name)


@pytest.mark.parametrize(
    ("fails", "options"),
    [
        ("at once", {"save_steps": 1}),
        ("before a save", {"save_steps": 2}),
        ("at the end", {"save_steps": 4}),
        ("weights", {"save_steps": 2}),
    ],
)
def test_an_error_of_the_writer_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, options: dict[str, int]
) -> None:
    """Of the checkpoint's or the model's; it leaves no folder, and the next call trains on and saves."""
    written, complete, save_pretrained = threading.Event(), PendingFolder._complete, PreTrainedModel.save_pretrained

    def full_disk(*given: Any, **keywords: Any) -> Any:
        if fails == "weights" and threading.current_thread() is threading.main_thread():
            return save_pretrained(*given, **keywords)
        assert fails in ("at once", "weights") or written.wait(PATIENCE)
        raise DISK_IS_FULL

    def late(pending: PendingFolder, writers: Ranks) -> None:
        """The error is known for a while before the hidden folder is removed."""
        time.sleep(0.1)
        complete(pending, writers)

    last = at("on_step_end", lambda step: written.set() if step == 4 else None)
    trainer = make(tmp_path, callbacks=[last], **options)
    with monkeypatch.context() as patch:
        place, name = (PreTrainedModel, "save_pretrained") if fails == "weights" else (save, "write_tensors")
        patch.setattr(place, name, full_disk)
        patch.setattr(PendingFolder, "_complete", late)
        with pytest.raises(CheckpointError, match=r"checkpoint-\d.* was not saved: No space left on device"):
            trainer.train()
    assert names(tmp_path) == []
    trainer.train()
    assert "checkpoint-4" in names(tmp_path)


def train_until_killed(folder: Path) -> int:
    """In a fork, which dies when the second of three checkpoints has been written in part; how it ended."""
    child = os.fork()
    if child == 0:
        write = save.write_tensors

        def dies(path: Path, *arguments: Any) -> Any:
            index = write(path, *arguments)
            if "checkpoint-4" in str(path):
                os.kill(os.getpid(), signal.SIGKILL)
            return index

        save.write_tensors = dies
        with contextlib.suppress(BaseException):
            make(folder, save_steps=2, max_steps=6).train()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks
def test_a_run_that_was_killed_while_it_saved_is_continued(tmp_path: Path) -> None:
    assert train_until_killed(tmp_path / "a") == -signal.SIGKILL
    assert names(tmp_path / "a")[-1] == "checkpoint-2"
    assert len([*(tmp_path / "a").glob(".checkpoint-4.saving-*")]) == 1
    broken = tmp_path / "a" / "checkpoint-4"
    shutil.copytree(tmp_path / "a" / "checkpoint-2", broken)  # as the plain Trainer leaves it: half of it
    (broken / FILE_LIST).unlink()
    shutil.rmtree(broken / "lightstep")
    with pytest.raises(CheckpointError, match=r"no optimizer state .*checkpoint-2 is whole: resume_from_checkpoint='"):
        make(tmp_path / "a", seed=1).train(resume_from_checkpoint=str(broken))
    shutil.rmtree(broken)
    again = make(tmp_path / "a", seed=1, save_steps=2, max_steps=6)
    again.train(resume_from_checkpoint=True)
    through = make(tmp_path / "b", save_steps=2, max_steps=6)
    through.train()
    torch.testing.assert_close(content(again), content(through), rtol=0, atol=0)
    assert names(tmp_path / "a") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_only_model": True}, r"asynchronous_saves=True and save_only_model=True"),
        ({"push_to_hub": True}, r"hub_strategy='every_save'.* set hub_strategy='end'"),
    ],
)
def test_what_cannot_be_asynchronous(
    tmp_path: Path, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LightstepTrainer, "init_hf_repo", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **arguments)
    make(tmp_path, push_to_hub=True, hub_strategy="end")


class Tail(LlamaForCausalLM):
    """With tied weights, and a persistent buffer."""

    def __init__(self, config: Any) -> None:
        config.tie_word_embeddings = True
        super().__init__(config)
        self.register_buffer("seen", torch.arange(3))


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_llama(0)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


@pytest.mark.parametrize("kind", [Tail, Plain, "sharded files"])
def test_weights_are_those_that_the_trainer_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """In the same files. What the caller changes in the configuration meanwhile is not in them."""
    if kind == "sharded files":
        original = PreTrainedModel.save_pretrained
        small = lambda *given, **options: original(*given, **options, max_shard_size="5KB")  # noqa: E731
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", small)
    files = []
    for mode in (False, True):
        torch.manual_seed(0)
        model: Any = Plain() if kind is Plain else Tail(make_llama(0).config) if kind is Tail else make_llama(0)
        if kind is Tail:
            model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")

        def edit(step: int, model: Any = model) -> None:
            if hasattr(model, "config") and step == 2:
                model.config.pad_token_id = 7

        callbacks = [at("on_step_end", edit)]
        make(tmp_path / str(mode), model=model, max_steps=2, asynchronous_saves=mode, callbacks=callbacks).train()
        folder = tmp_path / str(mode) / "checkpoint-1"
        found = [file for pattern in ("model*", "config.json") for file in folder.glob(pattern)]
        files.append({file.name: file.read_bytes() for file in found})
    ours = files[1]
    assert ours == files[0]
    assert len(ours) > 2 if kind == "sharded files" else "model.safetensors" in ours


def test_a_checkpoint_is_uploaded_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread uploads it, so it must not be renamed after that; its list of files goes with it."""
    uploaded = []

    def push(trainer: Any, folder: str) -> None:
        uploaded.append((Path(folder), (Path(folder) / FILE_LIST).is_file()))

    monkeypatch.setattr(LightstepTrainer, "init_hf_repo", lambda *_, **__: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    make(tmp_path, asynchronous_saves=False, push_to_hub=True, max_steps=2).train()
    assert uploaded == [(tmp_path / f"checkpoint-{step}", True) for step in (1, 2)]


# -- rotation


def test_checkpoints_are_rotated_by_their_numbers(tmp_path: Path) -> None:
    """Whatever the clock says, and nothing but ``checkpoint-N`` is removed."""
    theirs = ["checkpoint-1-notes", "checkpoint-best", "my-checkpoint-1"]
    for name in theirs:
        (tmp_path / name).mkdir()

    def set_clock_back(step: int) -> None:
        for path in tmp_path.iterdir():
            hour = time.time() + 3600 * (10 - step)
            if (path / "trainer_state.json").exists() and path.stat().st_mtime < time.time() + 1800:
                os.utime(path, (hour, hour))

    callbacks = [at("on_step_begin", set_clock_back)]
    make(tmp_path, asynchronous_saves=False, save_total_limit=2, callbacks=callbacks).train()
    assert names(tmp_path) == sorted([*theirs, "checkpoint-3", "checkpoint-4"])
    again = make(tmp_path, asynchronous_saves=False, save_total_limit=1, max_steps=5)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert names(tmp_path) == sorted([*theirs, "checkpoint-5"])


def fake(folder: Path, content: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in content.items():
        (folder / name).write_text(text)
    return folder


WEIGHTS_ONLY = {"trainer_state.json": "{}"}


def test_what_rotation_keeps(tmp_path: Path) -> None:
    """Whole ones up to the saved one count; the best, the newest to resume from and later ones stay."""
    for step in (1, 2, 4, 5, 9):
        fake(tmp_path / f"checkpoint-{step}", WEIGHTS_ONLY)
    fake(tmp_path / "checkpoint-3", {"optimizer.pt": "half"} | WEIGHTS_ONLY)
    fake(tmp_path / "checkpoint-0", {"model.safetensors": "no state"})
    with zipfile.ZipFile(tmp_path / "checkpoint-2" / "optimizer.pt", "w"):
        pass
    CHECKPOINTS.rotate(tmp_path / "checkpoint-5", 4)
    assert "checkpoint-0" in names(tmp_path)  # four are whole
    CHECKPOINTS.rotate(tmp_path / "checkpoint-5", 1, os.path.relpath(tmp_path / "checkpoint-1"))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-5", "checkpoint-9"]


def test_a_checkpoint_tells_whether_a_folder_without_a_list_is_whole(tmp_path: Path) -> None:
    """The user may remove the list."""
    make(tmp_path, max_steps=1).train()
    folder = tmp_path / "checkpoint-1"
    (folder / FILE_LIST).unlink()
    assert CHECKPOINTS.is_whole(folder)
    next((folder / "lightstep").glob("*.distcp")).unlink()
    assert not CHECKPOINTS.is_whole(folder)


# -- accelerate


def after_a_step(**options: Any) -> Training:
    """A run of accelerate."""
    training = Training(VALUES | {"optimizer_state": STATES["stream"]}, **options)
    training.train(range(1))
    return training


def in_project(folder: Path, **options: Any) -> tuple[Training, ProjectConfiguration, Path]:
    """A run whose states get numbers; and their folder."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **options)
    return after_a_step(project_config=project), project, folder / "checkpoints"


def test_save_state_goes_on_behind_training(tmp_path: Path, held: threading.Semaphore) -> None:
    first = after_a_step()
    first.accelerator.save_state(str(tmp_path / "waited"))
    pending = first.accelerator.save_state(str(tmp_path / "asked"), asynchronous=True)
    first.train(range(1, 4))
    assert not pending.done() and not (tmp_path / "asked").exists()
    held.release()
    assert pending.result(PATIENCE) == tmp_path / "asked"
    assert names(tmp_path) == ["asked", "waited"]
    loaded = []
    for folder in ("waited", "asked"):
        AcceleratorState._reset_state(reset_partial_state=True)
        training = after_a_step(seed=1)
        training.accelerator.load_state(str(tmp_path / folder))
        states = [one.state_dict() for one in (training.optimizer.optimizer, training.scheduler, training.model)]
        loaded.append([*states, torch.get_rng_state()])
    torch.testing.assert_close(loaded[1], loaded[0], rtol=0, atol=0)


def test_total_limit_and_the_newest_state(tmp_path: Path, held: threading.Semaphore) -> None:
    training, _, folder = in_project(tmp_path, total_limit=1)
    training.accelerator.save_state()
    pending = training.accelerator.save_state(asynchronous=True)
    assert [path.name for path in folder.glob("checkpoint_*")] == ["checkpoint_0"]
    held.release()
    assert pending.result(PATIENCE).name == "checkpoint_1"
    assert names(folder) == ["checkpoint_1"]
    training.accelerator.save_state(asynchronous=True)
    threading.Timer(0.1, held.release).start()
    training.accelerator.load_state()  # waits
    assert names(folder) == ["checkpoint_2"]
    training.accelerator.end_training()


def test_states_are_rotated_up_to_the_saved_one_and_the_newest_whole_one_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was resumed from an earlier state does not remove what it has just saved, nor the user's folders."""
    training, project, folder = in_project(tmp_path)
    for _ in range(3):
        training.accelerator.save_state()
    (folder / "checkpoint_notes").mkdir()
    shutil.rmtree(folder / "checkpoint_1")
    (folder / ".checkpoint_7.replaced-0123abcd").mkdir()  # a removal that was killed
    project.total_limit, project.iteration = 1, 1
    training.accelerator.save_state()
    assert names(folder) == ["checkpoint_1", "checkpoint_2", "checkpoint_notes"]
    training.accelerator.load_state()
    (folder / "checkpoint_2" / "lightstep" / "lightstep.json").unlink()
    training.accelerator.load_state()
    assert "checkpoint_2 was interrupted" in caplog.text
    (folder / "checkpoint_1" / "lightstep" / "lightstep.json").unlink()
    with pytest.raises(CheckpointError, match="no whole state among 2"):
        training.accelerator.load_state()


def test_a_save_over_a_state_replaces_it_at_once(tmp_path: Path) -> None:
    """If it fails, the state before is whole. A folder with the user's files is written to in place."""
    training = after_a_step()
    assert training.accelerator.save_state(str(tmp_path / "a")) == tmp_path / "a"
    before = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    training.train(range(1, 2))
    with full_disk(), pytest.raises(CheckpointError, match="No space left on device"):
        training.accelerator.save_state(str(tmp_path / "a"))
    assert before == {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    (tmp_path / "a").rename(tmp_path / ".a.replaced-0123abcd")  # a crash between the two renames
    (tmp_path / ".a.saving-0123abcd" / "a").mkdir(parents=True)
    training.accelerator.load_state(str(tmp_path / "a"))
    assert names(tmp_path) == ["a"]
    (tmp_path / "a" / "log.txt").write_text("mine")
    inode = (tmp_path / "a").stat().st_ino
    training.accelerator.save_state(str(tmp_path / "a"))
    assert (tmp_path / "a").stat().st_ino == inode
    assert names(tmp_path) == ["a"]


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = after_a_step()
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    for _ in range(2):
        training.accelerator.save_state(".")
        training.accelerator.save_state("b/../../c")
        training.accelerator.load_state(".")
        assert Path.cwd() == tmp_path / "a"
    assert names(tmp_path) == ["a", "c"]


def test_what_save_state_refuses(tmp_path: Path) -> None:
    training = after_a_step()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a state that save_state wrote"):
        training.accelerator.save_state(str(tmp_path), asynchronous=True)
    with pytest.raises(ValueError, match="needs output_dir"):
        training.accelerator.save_state(asynchronous=True)
    training.accelerator.free_memory()
    with pytest.raises(RuntimeError, match="without a model and an optimizer"):
        training.accelerator.save_state(str(tmp_path / "a"), asynchronous=True)
    assert names(tmp_path) == ["notes.txt"]
