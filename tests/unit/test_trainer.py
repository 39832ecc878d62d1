"""Training runs: resumed ones equal uninterrupted ones, interrupted ones resume, and nothing is lost on the way."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console
from safetensors.torch import load_file, save_file
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor

from lightstep import CheckpointError, ConfigError
from lightstep.checkpoint import save
from lightstep.checkpoint.layout import is_complete
from lightstep.plan.planning import Plan, plan_one
from lightstep.trainer import output, session
from lightstep.trainer.config import TrainConfig
from lightstep.trainer.loop import Loop
from lightstep.trainer.output import TRAINING, VALIDATION, Display, Figures, read_scalars
from lightstep.trainer.session import Outcome, train
from tests.patience import PATIENCE
from tests.reference.pair import same_tree
from tests.training_files import BATCH, MODEL, training_values
from tests.unit.test_trainer_data import word_tokenizer

LOGGED = {"trackers": ["tensorboard"]}
EASY_OVERFLOW = {"kind": "dynamic", "init_scale": 2.0**19, "max_scale": 2.0**19, "growth_interval": 2}
FP16 = {"strategy": "fp16", "strategy_overrides": {"precision.loss_scale": EASY_OVERFLOW}}
"""Some of six steps are skipped, and some are not."""


Configured = Callable[..., TrainConfig]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """What the runs train on."""
    return Path(training_values(tmp_path)["data"])


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configured:
    """A tiny run of six steps, with changes. What a step takes is not planned: training such a model takes less."""
    monkeypatch.setattr(session, "plan_one", _no_plan)
    return lambda **changes: TrainConfig.model_validate(training_values(tmp_path, name="run") | changes)


def _no_plan(*_: Any) -> Plan:
    raise ValueError("not asked for")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """Every loop that was started, with all it trained."""
    started: list[Loop] = []
    run = session._run
    monkeypatch.setattr(session, "_run", lambda loop, tokenizer: (started.append(loop), run(loop, tokenizer))[1])
    return started


def _train(config: TrainConfig, resume: bool = False) -> tuple[Outcome, str]:
    console = Console(record=True, quiet=False, file=open("/dev/null", "w"), width=200)  # noqa: SIM115
    outcome = train(config, resume, console)
    return outcome, console.export_text()


def _everything(loop: Loop) -> dict[str, Any]:
    components = loop.components
    return {
        "model": components.model.state_dict(),
        "optimizer": components.optimizer.state_dict(),
        "scheduler": components.scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "average": dict(components.average.tensors) if components.average else {},
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int | None) -> None:
    """The process gets SIGTERM in the middle of a step."""
    accumulate = Loop._accumulate

    def interrupted(loop: Loop, micro_batches: Tensor) -> Tensor:
        if loop.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return accumulate(loop, micro_batches)

    monkeypatch.setattr(Loop, "_accumulate", interrupted)


def test_what_a_run_will_take_is_said_where_it_can_be_told(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "plan_one", plan_one)
    config = configured()
    strategy = session.load_strategy(config)
    architecture = session.model_config(config.model, session.load_tokenizer(config.model), config.batch.length)
    said = session.expectation(config, strategy, architecture, profile="H100")
    assert said.startswith("planned: ") and "of device memory at the peak" in said
    other = session.expectation(configured(optimizer={"name": "SGD"}), strategy, architecture, profile="H100")
    assert other.startswith("planned: ") and other.split(" MB")[0] < said.split(" MB")[0], "SGD keeps less"
    here = session.expectation(config, strategy, architecture)
    assert here.startswith("planned: ") and here.endswith("activations; no time, since this is a CPU")


def test_micro_batches_are_parts_of_one_batch(configured: Configured, loops: list[Loop]) -> None:
    plain = {"optimizer": {"name": "SGD", "lr": 0.1}, "strategy_overrides": {"clipping.max_norm": None}}
    plain |= {"model": {"config": MODEL | {"attention_dropout": 0.0}}, "steps": 3}
    for count in (1, 4):
        _train(configured(name=f"in-{count}", batch=BATCH | {"accumulation": count}, **plain))
    whole, parts = loops
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    weights = [[p.detach() for p in loop.components.model.parameters()] for loop in loops]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)


# -- resuming


def test_a_resumed_run_takes_the_files_settings_and_names_each_switch_that_stays(
    configured: Configured, loops: list[Loop]
) -> None:
    """Switches in every run, and not ``foreach``: a checkpoint does not decide how a run computes."""
    _, said = _train(configured(steps=2, optimizer={"lr": 0.01, "arguments": {"betas": [0.9, 0.95]}}, **LOGGED))
    assert "amsgrad" not in said
    lower = {"lr": 0.001, "weight_decay": 0.2, "arguments": {"betas": [0.9, 0.99], "amsgrad": True, "foreach": True}}
    for steps in (3, 4):
        _, said = _train(configured(steps=steps, optimizer=lower, scheduler={"name": "constant"}, **LOGGED), True)
        assert "optimizer: amsgrad stays False, as in the checkpoint; True needs a new run" in said
        assert "foreach stays" not in said
        for sentence in (
            "optimizer: lr is 0.001 from here on; until the checkpoint it was 0.01",
            "optimizer: weight_decay is 0.2 from here on; until the checkpoint it was 0.01",
            "optimizer: betas is [0.9, 0.99] from here on",
            "scheduler, from here on: name cosine → constant, warmup_steps 2 → 0",
        ):
            assert (sentence in said) is (steps == 3)
        (group,) = loops[-1].components.optimizer.param_groups
        assert (group["lr"], group["weight_decay"], group["betas"]) == (0.001, 0.2, (0.9, 0.99))
        assert not group["amsgrad"] and group["foreach"] is True
    rates = dict(read_scalars(configured().folder / "tensorboard", ("step/learning_rate",))["step/learning_rate"])
    assert rates[3] == pytest.approx(0.001), "the first step after the resume has it"


@pytest.mark.parametrize("strategy", ["fp32", "fp16"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    configured: Configured, loops: list[Loop], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """However often figures are read. A skipped step advances no schedule."""
    chosen = FP16 if strategy == "fp16" else {"strategy": strategy}
    chosen = {**chosen, "ema": {"decay": 0.9, "validation": True}}
    whole, said = _train(configured(name="whole", log_every=1, **chosen))
    uninterrupted, skipped = _everything(loops[-1]), loops[-1]._skipped
    assert loops[-1].components.scheduler.last_epoch == 6 - skipped
    assert 0 < skipped < 6 and f"{skipped} skipped" in said if strategy == "fp16" else not skipped
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        first, said = _train(configured(log_every=100, **chosen))
    assert first.stopped_by == signal.SIGTERM and first.step == 3 and "SIGTERM: stopped after step 3" in said
    torch.rand(7)  # nothing that happens in between matters
    second, said = _train(configured(log_every=100, **chosen), resume=True)
    assert "continuing from" in said and "checkpoint-3" in said and "warning" not in said
    assert first.losses | second.losses == whole.losses and set(second.losses) == {4, 5, 6}
    assert second.validation_after == whole.validation_after
    same_tree("run", _everything(loops[-1]), uninterrupted)


def test_the_average_is_exported_and_validated_with(configured: Configured, loops: list[Loop], tmp_path: Path) -> None:
    plain, _ = _train(configured(name="plain", strategy="stream-overlap"))
    averaged, _ = _train(configured(strategy="stream-overlap", ema={"decay": 0.99, "every": 3, "validation": True}))
    assert averaged.losses == plain.losses and averaged.validation_before == plain.validation_before
    assert plain.validation_after is not None and averaged.validation_after is not None
    assert plain.validation_after < averaged.validation_after < plain.validation_before, "the average follows slowly"
    average = loops[-1].components.average
    assert average is not None
    folder = tmp_path / "runs/run"
    for name, expected in (("model", loops[-1].components.model.state_dict()), ("model-ema", average.tensors)):
        written = load_file(folder / name / "model.safetensors")
        found = {key: value for key, value in written.items() if key in expected}
        same_tree(name, found, {key: expected[key].to(value.dtype) for key, value in found.items()})


@pytest.mark.parametrize(("update", "accumulation"), [("overlap", 2), ("in_backward", 1)])
def test_updates_in_backward_have_the_learning_rate_of_their_step(
    configured: Configured, loops: list[Loop], update: str, accumulation: int
) -> None:
    """A rate that changes between backward and step() is refused in backward, and costs overlap every update there."""
    clipping = {"clipping.scope": "unit"} if update == "in_backward" else {"clipping.max_norm": 1e6}
    batch = {"batch": BATCH | {"accumulation": accumulation}}
    for name in ("at_step", update):
        state = {"optimizer_state.update": name, "optimizer_state.ring_mib": 0.1}
        changes = {"strategy": "stream", "strategy_overrides": {**clipping, **state}}
        _train(configured(name=name, steps=4, log_every=100, **batch, **changes))
    same_tree("run", *map(_everything, loops))
    schedule: Any = loops[1].components.optimizer
    assert schedule.engine.queue.rolled_back == schedule.engine.queue.redone == 0


@pytest.mark.parametrize("lost", ["lightstep.json", "the end"])
def test_resuming_goes_past_an_incomplete_checkpoint(configured: Configured, tmp_path: Path, lost: str) -> None:
    """What is left of a checkpoint without its manifest is moved aside."""
    every = {"steps": 3, "checkpoint": {"every": 1, "keep": 3}}
    _train(configured(**every))
    folder = tmp_path / "runs/run"
    if lost == "the end":
        tensors = next((folder / "checkpoint-3").glob("*.distcp"))
        os.truncate(tensors, tensors.stat().st_size - 5)
    else:
        (folder / "checkpoint-3" / lost).unlink()
    outcome, said = _train(configured(**every), resume=True)
    assert "checkpoint-2" in said and set(outcome.losses) == {3} and is_complete(folder / "checkpoint-3")
    assert (f"it is now {folder / 'checkpoint-3.1'}" in said) == (lost == "lightstep.json")
    assert (folder / "checkpoint-3.1/state.pt").is_file() == (lost == "lightstep.json")


def test_a_finished_run_says_so_and_a_longer_one_follows_its_schedule_from_the_first_step_on(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash has left its last checkpoint under a temporary name, and a part of one."""
    rates: list[float] = []
    train_step = Loop._train_step

    def recorded(loop: Loop) -> None:
        train_step(loop)
        rates.append(loop._unlogged[-1].learning_rate)

    monkeypatch.setattr(Loop, "_train_step", recorded)
    _train(configured(steps=5, name="whole"))
    whole, rates[:] = rates[:], []
    _train(configured(steps=3))
    last, folder = tmp_path / "runs/run/checkpoint-3", tmp_path / "runs/run"
    last.rename(folder / ".checkpoint-3.saving-01234567")
    (folder / ".weights-2.saving-01234567").mkdir()
    outcome, said = _train(configured(steps=3), resume=True)
    assert "nothing left to train" in said and not outcome.losses
    assert outcome.checkpoint == last and last.is_dir() and not [*folder.glob(".*")]
    outcome, said = _train(configured(steps=5), resume=True)
    assert set(outcome.losses) == {4, 5} and "warning" not in said
    assert rates[3:] == whole[3:] and len(whole) == 5


def test_resuming_with_other_settings_or_text_warns_and_with_another_model_is_refused(
    configured: Configured, loops: list[Loop], text: Path
) -> None:
    _train(configured(steps=1, ema=0.9))
    text.write_text(text.read_text().replace("7", "8"))
    _, said = _train(configured(steps=2, seed=1, validation={"sequences": 2}), resume=True)
    assert "settings differ from the checkpoint's: ema (" in said
    assert ", seed (0 → 1), validation.sequences (4 → 2)" in said
    assert "the text differs from the one that the checkpoint was trained on" in said
    assert loops[-1].components.scheduler.base_lrs == [0.01]
    other = {"config": {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}}
    for change, message in (
        ({"name": "other"}, "holds no complete checkpoint; start without --resume"),
        ({"model": other}, "--resume: .*belongs to another model"),
    ):
        with pytest.raises(ConfigError, match=message):
            _train(configured(**change), resume=True)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TORCHELASTIC_MAX_RESTARTS", "3", r"\(--max-restarts 3\), and the run would begin anew; add --resume auto"),
        ("WORLD_SIZE", "2", "torchrun started 2 processes, and strategy fp32 is for one"),
    ],
)
def test_what_torchrun_may_not_start(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        _train(configured())


# -- what a run leaves behind


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("lightstep")]


def test_logs_curve_checkpoints_samples_and_a_model_that_trains_on(configured: Configured, tmp_path: Path) -> None:
    sample = {"prompts": ["line ", "a"], "tokens": 5}
    seldom = {"checkpoint": {"every": 1, "keep": 2}, "validation": {"sequences": 4, "every": 3}}
    outcome, said = _train(configured(sample=sample, **seldom, **LOGGED))
    folder = tmp_path / "runs/run"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    scalars = read_scalars(folder / "tensorboard", (TRAINING, VALIDATION, "step/learning_rate"))
    assert dict(scalars[TRAINING]) == pytest.approx(dict(outcome.losses), rel=1e-6)
    assert [step for step, _ in scalars[VALIDATION]] == [0, 3, 6]
    rates = [rate for _, rate in scalars["step/learning_rate"]]
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01]) and rates[-1] < rates[3], "warm-up, then cosine"
    assert [text[:1] for text in outcome.samples] == ["l", "a"] and "sample 2 of 2" in said
    again, _ = _train(configured(name="again", steps=1, model=str(folder / "model")))
    assert again.validation_before == outcome.validation_after


def test_an_earlier_run_is_moved_aside(configured: Configured, tmp_path: Path) -> None:
    for _ in range(2):
        _train(configured(steps=1))
    _, said = _train(configured(steps=2))
    assert f"it is now {tmp_path / 'runs/run.2'}" in said
    assert [(tmp_path / "runs" / name / "checkpoint-1").is_dir() for name in ("run", "run.1", "run.2")] == [0, 1, 1]


def test_a_full_disk_keeps_the_checkpoint_before_and_the_logs_are_one_curve(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", _fails_after(save.write_tensors, 1))
        with pytest.raises(CheckpointError, match=r"checkpoint-4 was not saved: No space left .*checkpoint-2 is kept"):
            _train(configured(**LOGGED))
    assert sorted(p.name for p in (tmp_path / "runs/run").glob("*checkpoint*")) == ["checkpoint-2"]
    resumed, _ = _train(configured(**LOGGED), resume=True)
    assert set(resumed.losses) == {3, 4, 5, 6}
    scalars = read_scalars(tmp_path / "runs/run/tensorboard", (TRAINING,))[TRAINING]
    assert [step for step, _ in scalars] == [1, 2, 3, 4, 5, 6]
    assert dict(scalars)[3] == pytest.approx(resumed.losses[3], rel=1e-6)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_full_disk_keeps_the_settings_of_the_run(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def half(path: Path, content: str, **options: Any) -> int:
        write(path, content[:9], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    output.start_run(configured(), resume=False)
    written = (file := configured().folder / "config.yaml").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space left"):
            output.start_run(configured(steps=7), resume=True)
    assert file.read_text() == written and [*file.parent.iterdir()] == [file]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_while_a_checkpoint_is_written(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The writer of the first waits for the step after it, or has ended before it."""
    write, began, meanwhile = save.write_tensors, Loop._train_step, []
    next_step = threading.Event()

    def held(*arguments: Any) -> Any:
        meanwhile.append(not asynchronous or next_step.wait(PATIENCE))
        return write(*arguments)

    def step(loop: Loop) -> None:
        if loop.step == 2:
            next_step.set()
        began(loop)

    monkeypatch.setattr(save, "write_tensors", held)
    monkeypatch.setattr(Loop, "_train_step", step)
    settings = {"every": 2, "keep": 3, "asynchronous": asynchronous, "weights_every": 6}
    outcome, said = _train(configured(checkpoint=settings, log_every=1))
    assert meanwhile == [True] * 4 and outcome.checkpoint == tmp_path / "runs/run/checkpoint-6"
    folders = {path.name for path in (tmp_path / "runs/run").glob("[cw]*-*") if is_complete(path)}
    assert folders == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "weights-6"}
    assert asynchronous or "saving" not in said


def test_a_signal_in_the_middle_of_a_save_waits_for_it(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, saves = save.write_tensors, []

    def signalled(*arguments: Any) -> Any:
        saves.append(arguments)
        if len(saves) == 1:
            signal.raise_signal(signal.SIGTERM)  # Python has the main thread handle it
        return write(*arguments)

    monkeypatch.setattr(save, "write_tensors", signalled)
    outcome, _ = _train(configured(checkpoint={"every": 2, "keep": 9}))
    assert outcome.stopped_by == signal.SIGTERM and outcome.step < 6
    found = [path.name for path in (tmp_path / "runs/run").glob("*checkpoint-*") if is_complete(path)]
    due = {f"checkpoint-{step}" for step in (2, 4) if step <= outcome.step}  # a busy machine gets to 4 meanwhile
    assert sorted(found) == sorted({*due, f"checkpoint-{outcome.step}"})
    assert len(list((tmp_path / "runs/run").glob("*checkpoint-*"))) == len(found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread tells, too
def test_logs_that_cannot_be_written_stop_nothing(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RecordWriter, "write", _fails_after(RecordWriter.write, 3))
    outcome, _ = _train(configured(**LOGGED))
    assert outcome.step == 6 and is_complete(tmp_path / "runs/run/checkpoint-6")
    (warning,) = _warnings(caplog)
    assert "No space left on device; nothing more is logged" in warning


class _Service(GeneralTracker):
    """Keeps what it is told, until its connection breaks."""

    name, requires_logging_directory = "mlflow", True
    said: ClassVar[list[Any]] = []

    def __init__(self, run: str, folder: Path) -> None:
        super().__init__()
        self.said.append((run, folder))

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        if step == 5:
            raise ConnectionError("nobody answers")
        self.said.append((step, sorted(values)))


def test_figures_go_to_the_services_that_are_named(
    configured: Configured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", _Service)
    monkeypatch.setattr(output, "_installed", lambda: ["mlflow"])
    with pytest.raises(ConfigError, match="trackers: wandb is not installed"):
        _train(configured(trackers=["mlflow", "wandb"]))
    try:
        _train(configured(trackers=["mlflow"]))
    finally:
        PartialState._reset_state()
    folder = tmp_path / "runs/run"
    assert _Service.said[0] == ("run", folder) and _Service.said[1]["optimizer.lr"] == 0.01
    assert (4, [TRAINING, "step/gradient_norm", "step/learning_rate", "step/loss_scale"]) in _Service.said
    assert not (folder / "tensorboard").exists() and not (folder / "loss.png").exists()
    (warning,) = _warnings(caplog)
    assert "mlflow: nobody answers; nothing more is logged there" in warning and is_complete(folder / "checkpoint-6")


def _fails_after(function: Callable[..., Any], good_calls: int) -> Callable[..., Any]:
    calls = iter(range(10**6))

    def limited(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= good_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments, **options)

    return limited


# -- models


def _llama(tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = {key: value for key, value in MODEL.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=tied, **keys))


def test_a_hugging_face_folder_with_its_own_tokenizer(configured: Configured, tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "pretrained"
    _llama().save_pretrained(folder)
    with pytest.raises(ConfigError, match="has no tokenizer; save one there"):
        _train(configured(model=str(folder)))
    word_tokenizer().save_pretrained(folder)
    text.write_text("red green blue " * 400)
    outcome, _ = _train(configured(model=str(folder), steps=3, sample={"prompts": ["red"], "tokens": 3}))
    assert outcome.validation_before == pytest.approx(torch.tensor(16.0).log().item() / 5, rel=0.1), "per byte"
    assert outcome.validation_after is not None and outcome.validation_after < outcome.validation_before
    assert outcome.samples[0].startswith("red")
    text.write_text("red " * 4750 + "green " * 167)  # validation has longer words
    first, _ = _train(configured(model=str(folder), name="words", steps=1, sample=None))
    in_nats = first.losses[1] * len("red "), first.validation_before * len("green ")
    assert in_nats == pytest.approx([math.log(16)] * 2, rel=0.05), "each by its own text's bytes"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_would_be_random_are_refused(
    configured: Configured, tmp_path: Path, text: Path, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers makes missing weights new ones, and says so in a report that is hidden here."""
    text.write_text("red green blue " * 400)
    _llama(tied).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "more.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    _train(configured(model=str(tmp_path / "model"), steps=1))
    assert "the model has no such weights: more.weight" in caplog.text
    missing = "model.layers.0.mlp.up_proj.weight" if tied else "lm_head.weight"
    save_file({name: w for name, w in weights.items() if name != missing}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"has no {re.escape(missing)}, which would begin with random values"):
        _train(configured(model=str(tmp_path / "model"), name="other"))


def _of_llama(**keys: Any) -> dict[str, Any]:
    return {"model": {"config": {"model_type": "llama", **keys}}}


def _by_rule(**rule: Any) -> dict[str, Any]:
    return {"optimizer": {"rules": [{"kinds": "rest", **rule}]}}


IN_QUOTES = ": .* in arguments: text; numbers are written without"
MIN_LR = {"name": "cosine_with_min_lr", "arguments": {"min_lr_rate": "0.1"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "nowhere"}, "model.path nowhere is not a folder"),
    ({"strategy": "deepspeed-zero2", "ema": 0.9}, "ema: strategy deepspeed-zero2 leaves the weights to DeepSpeed"),
    ({"model": {"config": {"model_type": "lama"}}}, "model.config.model_type is 'lama'"),
    (_of_llama(hiden_size=8), "llama has no key 'hiden_size', did you mean 'hidden_size'"),
    (_of_llama(hidden_size=10, num_attention_heads=3), "not a multiple"),
    (_of_llama(vocab_size=100), "vocab_size is 100; its tokenizer needs at least 259"),
    (_of_llama(max_position_embeddings=16), "batch.length is 32; the model reads at most 16"),
    ({"batch": BATCH | {"accumulation": 3}}, "multiple of 3"),
    ({"optimizer": {"name": "collections.OrderedDict"}}, "import path of an Optimizer class is needed"),
    ({"optimizer": {"name": "no.such.Thing"}}, "No module named 'no'"),
    (
        {"optimizer": _by_rule(name="SGD")["optimizer"] | {"weight_decay": 0.1}},
        r"optimizer\.weight_decay: for AdamW, and each of optimizer\.rules has another class",
    ),
    (_by_rule(kinds="norm"), r"optimizer.rules\[0\]: .*'norm' is not a kind of parameter"),
    (_by_rule(arguments={"beta": 1}), r"optimizer.rules\[0\]: .*AdamW has no 'beta'"),
    (_by_rule(kinds="norms"), "optimizer: .* is trained, and matches no rule"),
    (_by_rule(name="Moun"), r"^optimizer.rules\[0\].name is 'Moun', did you mean 'Muon'"),
    ({"optimizer": {"name": "SGD", "arguments": {"momentum": "9e-1"}}}, f"^optimizer{IN_QUOTES}"),
    ({"optimizer": {"arguments": {"betas": ["0.9", 0.95]}}}, f"^optimizer{IN_QUOTES}"),
    (_by_rule(arguments={"eps": "1e-8"}), rf"^optimizer\.rules\[0\]{IN_QUOTES}"),
    ({"scheduler": MIN_LR}, f"^scheduler{IN_QUOTES}"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_set_up_is_refused(
    configured: Configured, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _train(configured(**change))
    assert "model" not in change or ("\n" not in str(caught.value) and not (tmp_path / "runs").exists())


RULES = [
    {"kinds": "hidden_matrices", "name": "Muon", "lr": 0.02, "arguments": {"nesterov": False}},
    {"kinds": ["norms", "biases"], "weight_decay": 0.0},
    {"kinds": "rest", "name": "torch.optim.AdamW", "arguments": {"eps": 1e-6}},
]


def test_rules_give_each_parameter_its_class_and_settings(configured: Configured, loops: list[Loop]) -> None:
    wanted = {"lr": 0.003, "weight_decay": 0.1, "arguments": {"betas": [0.9, 0.95]}, "rules": RULES}
    _train(configured(steps=2, optimizer=wanted))
    muon, norms, rest = loops[-1].components.optimizer.param_groups
    assert muon["optimizer_class"] == "torch.optim.Muon" and muon["weight_decay"] == 0.1 and not muon["nesterov"]
    assert all(parameter.dim() == 2 for parameter in muon["params"])
    assert (norms["weight_decay"], norms["betas"], norms["eps"]) == (0.0, [0.9, 0.95], 1e-8)
    assert (rest["weight_decay"], rest["eps"], rest["initial_lr"]) == (0.1, 1e-6, 0.003)
    assert rest["betas"] == [0.9, 0.95]  # of the same class, by another name

    changed = {"lr": 0.001, "rules": [RULES[0] | {"lr": 0.01}, {"kinds": RULES[1]["kinds"]}, {"kinds": "rest"}]}
    _, said = _train(configured(steps=3, optimizer=changed, scheduler={"name": "constant"}), resume=True)
    for sentence in (
        "optimizer.rules[0]: lr is 0.01 from here on; until the checkpoint it was 0.02",
        "optimizer.rules[1]: weight_decay is 0.01 from here on; until the checkpoint it was 0.0",
        "optimizer.rules[2]: eps is 1e-08 from here on; until the checkpoint it was 1e-06",
    ):
        assert sentence in said
    groups = loops[-1].components.optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.01, 0.001, 0.001]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.01, 0.01]  # left out: each class's own
    assert groups[1]["betas"] == groups[2]["betas"] == (0.9, 0.999)


# -- what a run shows where there is no terminal: lines by time and by step, of means ----------------------------------


def _lines(monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int, take: float = 1.0) -> list[str]:
    """Of 20 steps with losses 1, 2, ..., looked at after every second one; each takes so many seconds."""
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    console = Console(record=True, file=open("/dev/null", "w"), width=200)  # noqa: SIM115
    shown = Display(console, True, seconds, steps)
    with shown.training(0, 20):
        for step in range(2, 21, 2):
            now += 2 * take
            shown.show(step, Figures([step - 1.0, float(step)], [1.0, math.inf], 1.0, 100.0, 1_500_000_000, skipped=1))
    return console.export_text().splitlines()


def test_lines_by_step_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last look have one whatever the interval."""

    def of(lines: list[str]) -> list[int]:
        return [int(line.split()[1].split("/")[0]) for line in lines]

    first, last = _lines(monkeypatch, 1e9, 0)
    assert of([first, last]) == [2, 20] and "loss 1.500  norm 1.00  100 tokens/s" in first
    assert "loss 11.500  " in last, "the mean of steps 3 to 20"
    assert of(_lines(monkeypatch, 1e9, 5)) == [2, 8, 14, 20]
    assert of(_lines(monkeypatch, 10.0, 0)) == [2, 12, 20]
    assert of(_lines(monkeypatch, 10.0, 0, take=60)) == list(range(2, 21, 2))
