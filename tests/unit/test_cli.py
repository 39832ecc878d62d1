"""The command: one sentence and an exit code for every mistake, the strategies' table, a signal while training."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner, Result

import lightstep
from lightstep import Strategy, available_strategies, cli
from lightstep.checkpoint.tensors import IncompleteTensorError
from lightstep.cli import app
from lightstep.config import StrategyConfig, parse_config
from lightstep.distributed import LostRankError
from lightstep.plan.cost import cost
from lightstep.presets import read_source
from lightstep.trainer.config import load_config
from lightstep.trainer.loop import Interrupt
from tests.one_pass_on_cpu import one_pass_fixture
from tests.python import python
from tests.training_files import training_values

__all__ = ["one_pass_fixture"]

ROOT = Path(lightstep.__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A training file of a tiny run."""
    small = {"steps": 4, "batch": {"sequences": 2, "length": 32}, "scheduler": {}}
    small["sample"] = {"prompts": ["line"], "tokens": 3}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(training_values(tmp_path, **small)))
    return path


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def _sentence(result: Result, code: int) -> str:
    """The one line that a mistake gets."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("lightstep: ")
    return line


# -- train


def test_train_and_resume(file: Path, tmp_path: Path) -> None:
    result = _run("train", file, "--strategy", "resident", "--set", "name=a", "--set", "strategy.clipping.max_norm=0.5")
    assert result.exit_code == 0, result.output
    expected = ("strategy resident", "planned: ", "step 4/4", "measured: ", "sample 1 of 1")
    assert all(said in result.stdout for said in (*expected, "validation loss before", "validation loss after"))
    settings = yaml.safe_load((tmp_path / "runs/a/config.yaml").read_text())
    assert settings["strategy"] == "resident" and settings["strategy_overrides"] == {"clipping.max_norm": 0.5}
    again = _run("train", file, "--resume", "--set", "name=a", "--set", "steps=5")
    assert again.exit_code == 0 and "checkpoint-4" in again.stdout and "step 5/5" in again.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--strategy residnt", "'residnt' is neither a strategy nor a file, did you mean 'resident'"),
        ("stepz=3", "unknown key 'stepz' (value 3), did you mean 'steps'"),
        ("steps=many", "'steps' is 'many'"),
        ("steps", "--set steps: key=value is needed"),
        ("steps=[1", "is not a valid YAML value"),
        ("clipping.max_norm=1", "write --set strategy.clipping.max_norm=1"),
        ("strategy.clipping.max_norm=0", "'clipping.max_norm' is 0"),
        ("strategy.cliping.max_norm=1", "unknown key 'cliping'"),
        ("data=nowhere", "data.path nowhere does not exist"),
        ("scheduler={name: constant, warmup_steps: 2}", "constant has no warmup_steps (2); set name: constant_with_"),
        ("scheduler={name: constant, arguments: {min_lr: 1}}", "constant takes no arguments (min_lr)"),
        ("model.path=x", "give either config (a new model) or path"),
        ("model.config.model_type=3", "config needs model_type"),
        ("name=../x", "'name' is '../x': letters, digits, '_', '.' and '-' are allowed"),
        ("optimizer=AdamW", "'optimizer' is 'AdamW': a mapping is needed, write optimizer: {name: ...}"),
        ("output=s3://bucket/runs", "'output' is 's3://bucket/runs': s3://bucket/runs is a URL, and a run wri"),
        ("sample.prompts=['']", "sample.prompts: '' has no tokens; at least one is needed"),
        ("trackers=[wnadb]", "'trackers' is 'wnadb', did you mean 'wandb'"),
        ("strategy=3", "'strategy' is 3: text is needed, or a mapping is needed"),
        ("strategy.cpu=resident", "strategy is 'fp32', one for every device; write --set strategy=NAME"),
        ("strategy.cpu.clipping.max_norm=1", "strategy.cpu is not a mapping; write --set strategy.clip"),
        ("--resume", "holds no complete checkpoint; start without --resume"),
        ("optimizer.name=Adamm; data=nowhere", "optimizer.name is 'Adamm', did you mean"),
        ("optimizer.arguments.bettas=1; data=nowhere", "optimizer: AdamW got an unexpected keyword argument 'bett"),
        ("scheduler.name=cosin; data=nowhere", "scheduler.name is 'cosin', did you mean 'cosine'"),
        ("scheduler.arguments.low=1; data=nowhere", "got an unexpected keyword argument 'low'"),
        ("strategy={cuda: resident}", "a strategy for each of cpu, cuda is needed"),
        ("--strategy fsdp2", "in its environment); start it with: torchrun --nproc-per-node"),
    ],
)
def test_a_mistake_gets_one_sentence(file: Path, tmp_path: Path, settings: str, message: str) -> None:
    """``settings``: options of the command, or values for ``--set``."""
    words = [word.split() if word.startswith("--") else ("--set", word) for word in settings.split("; ")]
    assert message in _sentence(_run("train", file, *itertools.chain(*words)), 2)
    assert not (tmp_path / "runs").exists(), "nothing is written before everything is known to be usable"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give the path of a training file"),
        ("model: [", "is not valid YAML: line 1, column 9: while parsing a flow node"),
        ("3", "holds the value 3; a mapping of keys is needed"),
        ("", "is empty; a mapping of keys is needed"),
        ("\ufeff\udcff", "is not a text file in UTF-8; a YAML file is needed"),
        ("steps: 0", "'steps' is 0: at least 1 is needed"),
        ("ema: 2", "'ema' is 2: less than 1 is needed"),
        ("steps: 3", "'model' is missing: a value is needed"),
    ],
)
def test_an_unusable_file_gets_one_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "train.yaml"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    assert message in _sentence(_run("train", path), 2)


def test_too_little_host_memory_gets_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSTEP_HOST_MEMORY_CHECK", "0.000001")
    sentence = _sentence(_run("train", file, "--strategy", "stream"), 1)
    assert "GiB of host memory are needed and 0.00 GiB are free" in sentence


def test_only_one_rank_of_a_machine_tells(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = _run("train", file, "--set", "data=nowhere")
    assert (result.exit_code, result.stderr) == (2, "")


def test_debug_shows_where_an_error_comes_from(file: Path) -> None:
    assert isinstance(_run("train", file, "--set", "data=nowhere", "--debug").exception, lightstep.ConfigError)


def test_what_a_short_form_says_stays_when_a_key_is_added(file: Path) -> None:
    config = load_config(file, None, ["ema=0.9", "ema.every=5", "data.validation=0.1"])
    assert config.ema is not None and (config.ema.decay, config.ema.every) == (0.9, 5)
    assert config.data.path.endswith("text.txt")


def test_a_strategy_for_each_kind_of_device(file: Path) -> None:
    config = load_config(file, None, ["strategy={cuda: resident, cpu: fp32}", "strategy.cpu=bulk"])
    assert (config.strategy_for("cpu"), config.strategy_for("cuda")) == ("bulk", "resident")
    config = load_config(file, None, ["strategy={cuda: fp16, cpu: {clipping: {}}}", "strategy.cpu.clipping.max_norm=2"])
    assert config.strategy_for("cpu") == {"clipping": {"max_norm": 2}}
    config = load_config(file, "fp16", ["strategy.precision.loss_scale.init_scale=256"])
    assert config.strategy_for("cpu") == "fp16"
    assert config.strategy_overrides == {"precision.loss_scale.init_scale": 256}


def test_the_example_is_valid_and_uses_ready_strategies() -> None:
    config = load_config(EXAMPLE)
    assert {config.strategy_for("cpu"), config.strategy_for("cuda")} <= set(available_strategies())
    assert config.data.path == "stdlib"


def test_resume_auto_takes_the_newest_that_is_undamaged(file: Path, tmp_path: Path) -> None:
    folder, longer = tmp_path / "runs/train", ("--set", "steps=6")
    assert _run("train", file, "--resume", "auto", "--set", "checkpoint.weights_every=3").exit_code == 0, "a new run"
    assert {path.name for path in folder.glob("*-*")} == {"checkpoint-2", "checkpoint-4", "weights-3"}
    for tensors in (folder / "checkpoint-4").glob("*.distcp"):
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    sentence = _sentence(_run("train", file, "--resume", *longer), 2)
    assert "checkpoint-4 was not loaded" in sentence and "is damaged" in sentence
    assert f"{folder / 'checkpoint-2'} is undamaged: load that one; --resume auto continues" in sentence
    resumed = _run("train", file, "--resume", "auto", *longer, "--set", "checkpoint.keep_every=2")
    assert resumed.exit_code == 0 and f"continuing from {folder / 'checkpoint-2'}" in resumed.stdout.replace("\n", "")
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        (folder / name / "state.pt").write_bytes(bytes((folder / name / "state.pt").stat().st_size))
    assert "all checkpoints in" in _sentence(_run("train", file, "--resume=auto", *longer), 2)


@pytest.fixture
def own_signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT interrupts, as in a process that is no background process."""
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_signal")
def test_a_signal_saves_and_exits(file: Path, tmp_path: Path) -> None:
    """SIGTERM does in test_trainer.py, and under torchrun."""

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    result = _run("train", file, "--set", "steps=100000", "--set", "checkpoint.every=0")
    thread.join()
    said = " ".join(result.output.split())
    assert result.exit_code == 128 + signal.SIGINT, result.output
    found = re.search(r"SIGINT: stopped after step (\d+); continue from .*checkpoint-\1 with --resume", said)
    assert found and (tmp_path / "runs/train" / f"checkpoint-{found[1]}" / "lightstep.json").is_file()


@pytest.mark.usefixtures("own_signal")
def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.received() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setenv("RANK", "0")  # torchrun sends its workers what they have got already
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize(
    ("noted", "error", "raised"),
    [
        (True, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), KeyboardInterrupt),
        (False, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), RuntimeError),
        (True, LostRankError("rank 1 on a no longer answers"), KeyboardInterrupt),
    ],
)
def test_a_collective_that_fails_after_a_signal_ends_at_once(
    noted: bool, error: Exception, raised: type[BaseException]
) -> None:
    """torchrun ends the ranks that are left when one is gone, and waits for them before it starts them again."""

    def fail() -> None:
        with Interrupt():
            if noted:
                signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(raised):
        fail()


# -- paths


@pytest.mark.parametrize(
    "arguments",
    [
        "train missing",
        f"train {EXAMPLE} --set model=missing",
        "params missing",
        "strategies missing",
        "plan missing",
        "plan Llama-3.2-3B --strategy missing.yaml",
        "checkpoint verify missing",
        "checkpoint verify .",
        "checkpoint inspect missing",
        "checkpoint inspect .",
        "checkpoint convert missing new --to torch",
        "checkpoint convert . ../new --to torch",
        "checkpoint convert missing new --to torch --names missing.json",
        "checkpoint convert missing s3://missing/run.pt --to torch",
        "checkpoint convert memory://missing new --to torch",
        "checkpoint verify memory://missing",
    ],
)
def test_a_path_that_does_not_exist_is_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run(*arguments.split())
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert not [*tmp_path.iterdir()], "nothing was changed"


def test_the_home_folder_stands_for_a_tilde_everywhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    file.rename(home / "train.yaml")
    shutil.copy(tmp_path / "text.txt", home)
    (home / "mine.yaml").write_text((ROOT / "strategies/fp32.yaml").read_text())
    trained = _run("train", "~/train.yaml", "--strategy", "~/mine.yaml", "--set", "output=~/runs")
    assert trained.exit_code == 0, trained.output
    run = "~/runs/train"
    for arguments in (
        "train ~/train.yaml --resume --set output=~/runs",
        f"train ~/train.yaml --set model={run}/model --set data=~/text.txt --set output=~/b",
        "params ~/train.yaml",
        f"plan {run}/model --strategy ~/mine.yaml --tokens 32 --plot ~/plan.png",
        f"checkpoint verify {run}/checkpoint-4",
        f"checkpoint inspect {run}/checkpoint-4 --model {run}/model",
        f"checkpoint convert {run}/checkpoint-4 ~/a.pt --to torch",
        "checkpoint convert ~/a.pt ~/a --to lightstep --strategy ~/mine.yaml",
    ):
        result = _run(*arguments.split())
        assert result.exit_code == 0, (arguments, result.output)
    assert {"a", "a.pt", "plan.png", "runs", "b"} <= {entry.name for entry in home.iterdir()}
    assert "~" not in [entry.name for entry in tmp_path.iterdir()]


# -- strategies, bench, help


SINGLE = [name for name in available_strategies() if parse_config(read_source(name)[1], name).sharding.kind == "single"]


def test_the_list_has_every_strategy_with_its_costs_in_80_columns_and_in_the_order_of_choosing() -> None:
    result = _run("strategies")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := line.split())}
    assert set(available_strategies()) <= set(rows)
    assert rows["resident"] == ["2", "2", "10", "0"] and rows["stream"] == ["2", "2", "0", "10"]
    assert rows["ddp"] == ["2", "6", "10", "0"] and rows["fsdp2-stream"] == ["2/ranks", "4/ranks", "0", "10/ranks"]
    assert rows["hsdp"] == ["2/shards", "4/shards", "10/shards", "0"]
    listed = [name for name in rows if name in available_strategies()]
    assert listed[:4] == ["resident", "stream", "stream-overlap", "bulk"] and listed[-1] == "deepspeed-zero3-offload"


def test_one_strategy_is_shown_with_its_comments() -> None:
    assert _run("strategies", "stream").stdout == (ROOT / "strategies/stream.yaml").read_text()
    assert "'steam' is not a ready strategy, did you mean 'stream'" in _sentence(_run("strategies", "steam"), 2)


def test_the_version_and_the_environment() -> None:
    assert _run("--version").stdout == f"lightstep {lightstep.__version__}\n"
    said = _run("env").stdout
    assert f"lightstep: {lightstep.__version__}\n" in said and f"torch: {torch.__version__}" in said
    assert str(ROOT) not in said and str(Path.home()) not in said


@pytest.mark.parametrize("name", SINGLE)
def test_costs_are_what_the_optimizer_reports(name: str, one_pass_on_cpu: Counter[str]) -> None:
    """On a device where the update runs in one pass, as it does on a GPU."""
    strategy = Strategy.load(name)
    model = strategy.prepare_model(nn.Linear(512, 512))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-3)
    first = next(model.parameters())
    optimizer.backward(model(torch.ones(2, 512, dtype=first.dtype, device=first.device)).float().mean())
    held = cost(strategy.config)
    on_host = strategy.config.weights.placement == "host"
    if on_host:
        assert first.grad is None and not (held.weights.count or held.gradients.count)
    else:
        assert first.element_size() == held.weights.count
        assert first.grad is not None and first.grad.element_size() == held.gradients.count
    assert optimizer.step()
    report = optimizer.memory_report()
    assert on_host or report["device_bytes_per_parameter"] == held.device_state.count
    assert report["host_bytes_per_parameter"] == pytest.approx(held.host_state.count, rel=0.01), "but for whole pages"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sharding": {"kind": "fsdp2"}}, "2/ranks 4/ranks 10/ranks 0"),
        ({"sharding": {"kind": "fsdp2"}, "precision": {"reduce": "parameters"}}, "2/ranks 2/ranks 10/ranks 0"),
        ({"sharding": {"kind": "fsdp2"}, "precision": {"parameters": "float32"}}, "4/ranks 4/ranks 8/ranks 0"),
        ({"sharding": {"kind": "ddp"}}, "2 6 10 0"),
        ({"sharding": {"kind": "ddp"}, "precision": {"parameters": "float32"}}, "4 4 8 0"),
        ({"optimizer_state": {"backend": "stream"}}, "2 2 0 10"),
        ({"sharding": {"kind": "deepspeed", "stage": 1}}, "2 4 12/ranks 0"),
        ({"sharding": {"kind": "deepspeed", "stage": 2}}, "2 4/ranks 12/ranks 0"),
        ({"sharding": {"kind": "deepspeed", "stage": 3, "offload": "cpu"}}, "2/ranks 4/ranks 0 12/ranks"),
    ],
)
def test_costs_of_sharded_and_streamed_strategies(values: dict[str, Any], expected: str) -> None:
    held = cost(StrategyConfig.model_validate(values))
    assert f"{held.weights} {held.gradients} {held.device_state} {held.host_state}" == expected


def test_help_imports_no_more_than_the_package() -> None:
    script = (
        "import sys; from lightstep.cli import app\n"
        "try: app(['train', '--help'])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert not {'transformers', 'matplotlib', 'tensorboard', 'lightstep.bench.run'} & set(sys.modules)"
    )
    done = python("-c", script, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "") and "--resume" in done.stdout


@pytest.mark.parametrize(
    ("body", "environment", "expected"),
    [
        ("print('2 × cpu')", {"PYTHONIOENCODING": "ascii"}, (0, "2 ? cpu\n", "")),
        ("atexit.register(signal.raise_signal, signal.SIGINT)", {}, (-signal.SIGINT, "", "")),
    ],
    ids=["a terminal without ×", "a signal while Python exits"],
)
def test_how_the_console_script_ends(body: str, environment: dict[str, str], expected: tuple[int, str, str]) -> None:
    """With ``body`` in place of a command."""
    script = "import atexit, signal; from lightstep import __main__, cli\n"
    script += f"cli.app = lambda **_: {body}\n__main__.main()"
    given = {"env": os.environ | environment, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([sys.executable, "-c", script], **given)
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize(
    ("words", "rest", "auto"),
    [
        ("automatic.yaml --resume", ["automatic.yaml", "--resume"], False),
        ("--resume automatic.yaml", ["--resume", "automatic.yaml"], False),
        ("--resume auto automatic.yaml", ["--resume", "automatic.yaml"], True),
        ("auto --resume=auto", ["auto", "--resume"], True),
        ("--resume=automatic a.yaml", ["--resume=automatic", "a.yaml"], False),
        ("--set name=--resume auto", ["--set", "name=--resume", "auto"], False),
        ("", [], False),
    ],
)
def test_resume_takes_the_word_auto_and_no_part_of_another(
    monkeypatch: pytest.MonkeyPatch, words: str, rest: list[str], auto: bool
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(cli.TyperCommand, "parse_args", lambda self, ctx, args: seen.append(args) or args)
    context = SimpleNamespace(meta={})
    cli._TrainCommand("train").parse_args(context, words.split())
    assert seen == [rest] and context.meta[cli._AUTO] is auto


def test_verify_is_told_a_file(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "plain.pt")
    said = _sentence(_run("checkpoint", "verify", tmp_path / "plain.pt"), 2)
    assert "plain.pt is a file; a folder is needed (lightstep checkpoint inspect reads other formats)" in said


def test_every_error_of_a_checkpoint_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = mock.Mock(side_effect=IncompleteTensorError("the checkpoint does not hold all of model.w"))
    monkeypatch.setattr("lightstep.checkpoint.formats.convert.read_checkpoint", incomplete)
    result = _run("checkpoint", "inspect", "a")
    assert result.exit_code == 1 and "lightstep: a was not read: the checkpoint does not hold all" in result.output
