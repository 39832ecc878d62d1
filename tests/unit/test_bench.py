"""`lightstep bench` at sizes where times mean nothing: that all do the same work, what it writes, what it refuses."""

from __future__ import annotations

import gc
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM
from typer.testing import CliRunner, Result

from lightstep.bench import iteration, machine, models, report, run, tensors
from lightstep.bench.iteration import IterationTask, TimelineTask
from lightstep.bench.machine import Ranks, StepProfile, pinned_bytes
from lightstep.bench.models import LlamaShape, MoeShape
from lightstep.bench.run import Contender, Skipped
from lightstep.bench.step import StepTask, measure_saving
from lightstep.bench.strategies import parse_strategies
from lightstep.cli import app
from lightstep.config import ConfigError
from lightstep.plan.timing import MeasuredLink
from lightstep.strategy import Strategy
from tests.snippets import Script, run_script

Values = dict[str, Any]

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
TINY = ("--params", "60000", "--layers", "2", "--device", "cpu")
STEP = (*TINY, "--steps", "2", "--warmup", "1")
ITERATION = ("--iteration", *TINY, "--tokens", "64,32", "--sequence", "16")
HERE = {"layer-stream", "cpu-adamw", "deepspeed", "torch", "torch-fp32-grads", "torch-offload"}
"""Peers that need nothing but torch, or a class that stands in."""


@pytest.fixture(autouse=True)
def imports_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run thaws what it froze, and all that tests have imported with it: each full collection takes a second then."""
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


def measured(folder: Path, *arguments: object, code: int = 0, draws: bool = False) -> tuple[Values, str]:
    """The values and the output of a run that writes to ``folder``.

    Times mean nothing here, so the collector does not run between contenders, which takes longer than their steps.

    Args:
        draws: draw the chart too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda *_: 0)
        if not draws:
            patch.setattr(report, "draw", lambda *_: None)
        done = bench(*arguments, "--output", folder)
    assert done.exit_code == code, done.output
    (file,) = folder.glob("*.json")
    assert not list(folder.glob("*.part"))
    return json.loads(file.read_text()), done.output


def on_two_ranks(folder: Path, *arguments: object) -> tuple[Values, str]:
    quick = "import gc; gc.collect = lambda *_: 0; from lightstep.bench import report, step; "
    quick += "step._REPEATS = 2; step._QUIET_STEPS = 1; report.draw = lambda *_: None; "
    code = f"{quick}from lightstep.__main__ import main; main()"
    given = ("bench", *map(str, arguments), "--output", str(folder / "out"))
    status, output = run_script(Script(Path("bench"), 1, "python", 2, [code], given), folder)
    assert status == 0, output
    (file,) = (folder / "out").glob("*.json")
    return json.loads(file.read_text()), output


def rows_of(values: Values, tokens: int | None = None) -> dict[str, Values]:
    return {row["name"]: row for row in values["rows"] if row.get("tokens") == tokens}


def good_rows(values: Values, tokens: int | None = None) -> dict[str, Values]:
    """Rows that nothing is noted about."""
    rows = rows_of(values, tokens)
    assert {name: row["note"] for name, row in rows.items() if row["note"]} == {}
    return rows


def sentence(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


# -- one step --------------------------------------------------------------------------------------------------------


class CPUAdam(torch.optim.AdamW):
    """In the place of DeepSpeed's, which would be compiled for a minute, and examines the CPU whenever one is made."""

    made = 0

    def __init__(self, masters: Any, adamw_mode: bool, **settings: Any) -> None:
        super().__init__(masters, **settings)
        assert adamw_mode
        CPUAdam.made += 1


def test_every_contender_does_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=CPUAdam))
    monkeypatch.setattr(CPUAdam, "made", 0)
    values, output = measured(tmp_path, *STEP, "--strategies", "resident,bulk", draws=True)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = rows_of(values)
    assert list(rows) == ["resident", "bulk", *(peer.name for peer in StepTask.peers)]
    assert all(name in output for name in rows) and "No GPU" in output
    assert CPUAdam.made == values["rounds"], "one for all tensors"
    for name in HERE | {"resident", "bulk"}:
        row = rows[name]
        assert row["note"] is None, f"{name}: {row['note']}"
        assert len(row["step_ms_all"]) == 2, "of each round's two steps the first is left out"
        assert row["step_ms"] == statistics.median(row["step_ms_all"]) > 0 and row["block_ms"] > 0
        assert row["step_ms_range"] == [min(row["step_ms_all"]), max(row["step_ms_all"])]
        assert row["ms_per_1e9_parameters"] == pytest.approx(row["step_ms"] / row["parameters_per_rank"] * 1e9)
        assert row["parameters_per_rank"] == values["model"]["parameters"]
        # Weights near 0.02 · 4: one unit of bf16's last place there is 2⁻¹¹. The reference itself moves by up to 10⁻³.
        assert row["largest_weight_difference"] <= 2**-11, name
    assert rows["resident"]["largest_weight_difference"] == 0.0
    assert rows["torch"]["host_bytes_per_parameter"] == 0
    assert 10 <= rows["bulk"]["host_bytes_per_parameter"] < 13  # half of the master and two moments, in whole pages
    assert rows["layer-stream"]["host_bytes_per_parameter"] == pytest.approx(8, rel=0.01)
    assert rows["cpu-adamw"]["host_bytes_per_parameter"] >= 16
    assert values["command"].startswith("lightstep") and values["versions"]["torch"] == torch.__version__
    assert values["hardware"]["device"] == "CPU" and values["link_gb_per_s"] is None
    assert [values[key] for key in ("steps", "warmup", "rounds", "ranks")] == [2, 1, 2, 1]
    again = bench(*STEP, "--output", tmp_path)
    assert again.exit_code == 2 and "from an earlier run" in sentence(again.output)


class Lazy(Contender):
    """Does nothing."""

    name = about = "lazy"

    def __init__(self, task: run.Task) -> None:
        self._weights = list(task.model().parameters())

    def step(self, gradients: Any) -> None:
        return

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach() for weight in self._weights]


class Failing(Lazy):
    name = about = "failing"

    def step(self, gradients: Any) -> None:
        raise MemoryError("no room\nat all")


class Absent(Lazy):
    name = about = "absent"

    def __init__(self, task: run.Task) -> None:
        raise Skipped("not for this machine")


def test_one_that_does_less_or_fails_is_seen_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy that needs several ranks among them."""
    monkeypatch.setattr(StepTask, "peers", (*StepTask.peers, Lazy, Failing, Absent))
    monkeypatch.setattr(report, "RUNS", tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = bench(*STEP, "--strategies", "fsdp2", "--peers", "failing,torch,absent,lazy,deepspeed")
    assert done.exit_code == 1 and "failed" in done.output and "torchrun" in done.output
    (folder,) = tmp_path.iterdir()
    rows = rows_of(json.loads((folder / "bench.json").read_text()))
    assert folder.name.endswith("-step") and rows["fsdp2"]["note"] and rows["torch"]["step_ms"] > 0
    assert rows["failing"]["note"] == "MemoryError: no room" and not rows["failing"]["skipped"]
    for name, note in (("absent", "not for this machine"), ("deepspeed", "not installed")):
        assert rows[name]["note"] == note and rows[name]["skipped"]
    assert rows["lazy"]["largest_weight_difference"] > 0
    order = [line.rpartition(": ")[2] for line in done.output.splitlines() if line.startswith("measuring round")]
    forth = ["fsdp2", "failing", "torch", "absent", "lazy", "deepspeed"]
    assert order == [*forth, "lazy", "torch"], "forth and back, and no failure again"


class MuonOfDion(torch.optim.Optimizer):
    """Takes what dion's class takes, and does torch's arithmetic."""

    def __init__(self, groups: list[dict[str, Any]], **given: Any) -> None:
        assert given.pop("distributed_mesh") is None and given.pop("nesterov") and given.pop("adjust_lr") == "rms_norm"
        matrices, rest = (dict(group) for group in groups)
        assert rest.pop("algorithm") == "adamw"
        rest |= {"betas": (rest.pop("beta1"), rest.pop("beta2")), "eps": rest.pop("epsilon")}
        muon = {"momentum": given.pop("mu"), "adjust_lr_fn": "match_rms_adamw", **given}
        self._both = [torch.optim.Muon(matrices["params"], **muon), torch.optim.AdamW([rest], fused=True)]
        super().__init__([*matrices["params"], *rest["params"]], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self._both:
            optimizer.step()


def test_muon_beside_the_loop_by_hand_and_dion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=MuonOfDion))
    names = ("--optimizer", "muon", "--peers", "torch,cpu-adamw,dion,dion-triton", "--rounds", "1")
    values, output = measured(tmp_path, *STEP, *names)
    rows = rows_of(values)
    assert "by hand" in output and values["optimizer"]["class"] == "Muon + AdamW"
    assert rows["cpu-adamw"]["note"] == "supports --optimizer adamw only, not muon"
    assert rows["dion-triton"]["skipped"] and rows["dion-triton"]["note"] == "needs a GPU"
    for name in ("resident", "stream", "stream-overlap", "dion"):
        assert rows[name]["largest_weight_difference"] == 0.0, name
        assert rows[name]["times_by_hand"] == pytest.approx(rows[name]["step_ms"] / rows["torch"]["step_ms"])


def test_two_ranks_step_and_save_together(tmp_path: Path) -> None:
    names = ("--strategies", "fsdp2-stream", "--peers", "torch-offload,torch,torch-fsdp2")
    values, output = on_two_ranks(tmp_path, *STEP, "--rounds", "1", *names, "--checkpoints", tmp_path / "saved")
    rows = good_rows(values)
    assert values["ranks"] == 2 and output.count("One optimizer step") == 1
    assert rows["torch"]["parameters_per_rank"] == values["model"]["parameters"]
    for name in ("fsdp2-stream", "torch-offload", "torch-fsdp2"):
        assert rows[name]["parameters_per_rank"] == pytest.approx(values["model"]["parameters"] / 2, rel=0.01), name
    assert rows["torch"]["checkpoint"] is None
    whole = rows["fsdp2-stream"]["checkpoint"]  # fp32 masters and both moments, bf16 weights, over all ranks
    assert whole["gb"] * 1e9 == pytest.approx(14 * values["model"]["parameters"], rel=0.7)
    assert whole["gb_per_s"] == pytest.approx(whole["gb"] / whole["save_s"]) and whole["plain_files_gb_per_s"] > 0
    assert whole["stall_percent"] == pytest.approx(100 * whole["stall_s"] / whole["save_s"])
    for prefix in ("", "torch_async_save_"):
        names = ("stall_s", "first_stall_s", "steps_meanwhile", "lost_s", "first_lost_s")
        stall, first, steps, *_ = (whole[f"{prefix}{name}"] for name in names)
        assert 0 < stall <= first and steps > 0
    assert "asynchronous: training continues after" in output and "torch's async_save: training is blocked" in output
    assert "fsdp2-stream: checkpoint of 0.00 GB saved at" in output
    assert list((tmp_path / "saved").iterdir()) == []


def test_traffic_is_compared_with_the_faster_of_two_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = iter([MeasuredLink(55.0, 53.0, 40.0, True), MeasuredLink(54.0, 54.0, 50.0, True)])
    monkeypatch.setattr(Ranks, "measure_link", lambda _: next(links))
    seen = StepProfile(10 * 10**9, 9 * 10**9, 2, "cudaStreamSynchronize in aten::item")
    monkeypatch.setattr(run, "profile_step", lambda *_: seen)
    values, output = measured(tmp_path, *STEP, "--rounds", "1", "--strategies", "resident", "--peers", "none")
    (row,) = values["rows"]
    assert values["link_gb_per_s"] == {"to_device": 55, "to_host": 54, "duplex": 50, "page_locked": True}
    assert (row["gb_to_device"], row["gb_to_host"], row["host_syncs"]) == (10, 9, 2)
    assert row["gb_per_s_to_device"] == pytest.approx(10 / row["step_ms"] * 1e3)
    assert row["percent_of_duplex"] == pytest.approx(100 * row["gb_per_s_to_device"] / 50), "of the busier direction"
    text = " ".join(output.split())  # lines are as long as the terminal is wide
    assert "page-locked" in text and "first by cudaStreamSynchronize in aten::item" in text


# -- whole iterations ------------------------------------------------------------------------------------------------


def test_every_contender_trains_the_same_at_every_number_of_tokens(tmp_path: Path) -> None:
    ours = ["resident", "stream", "stream-overlap", "stream:optimizer_state.ring_mib=4"]
    peers = ["torch", "cpu-adamw", "torch-offload"]
    values, output = measured(tmp_path, *ITERATION, "--strategies", ",".join(ours), "--peers", ",".join(peers))
    parameters = values["model"]["parameters"]
    for tokens in (32, 64):
        rows = good_rows(values, tokens)
        assert list(rows) == ["no optimizer", *ours, *peers]
        alone, resident = rows["no optimizer"], rows["resident"]
        for row in rows.values():
            assert [len(window) for window in row["windows_ms"]] == [2]
            assert row["iteration_ms"] == pytest.approx(sum(row["windows_ms"][0]) / 2)
            assert row["exposed_ms"] == pytest.approx(row["iteration_ms"] - alone["iteration_ms"])
            assert row["times_resident"] == pytest.approx(row["iteration_ms"] / resident["iteration_ms"])
            assert row["tokens_per_s"] == pytest.approx(tokens / row["iteration_ms"] * 1e3)
        for name in ours:
            for key in ("loss", "grad_norm", "clipped_steps"):
                assert rows[name][key] == resident[key], name
        for name in peers:
            assert rows[name]["loss"] == pytest.approx(resident["loss"], rel=0.02), name
        assert alone["loss"] > resident["loss"], "the others learn their tokens by heart"
        assert alone["grad_norm"] is alone["clipped_steps"] is None
        assert resident["clipped_steps"] >= (resident["grad_norm"] > 1)
        assert resident["weight_bytes"] == alone["weight_bytes"] == 2 * parameters
        assert resident["host_bytes"] == alone["host_bytes"] == 0
        assert rows["stream"]["host_bytes"] >= 10 * parameters
        assert rows["torch-offload"]["host_bytes"] >= 12 * parameters
        assert resident["peak_device_bytes"] is None and resident["host_syncs"] is None
    assert values["model"]["layers"] == 2 and values["model"]["activation_checkpointing"] is True
    assert values["tokens_per_rank"] == [32, 64] and values["sequence"] == 16 and values["optimizer"]["max_norm"] == 1
    assert [values[key] for key in ("iterations", "warmup", "rounds", "ranks")] == [2, 1, 1, 1]
    assert "stream ring_mib=4" in output and output.count("One iteration of") == 2


def test_steps_that_are_clipped_now_and_then(tmp_path: Path) -> None:
    how = ("--max-norm", "1e9", "--clip-every", "3", "--warmup", "1", "--steps", "4", "--tokens", "32")
    overlap = "stream-overlap:optimizer_state.resident_gib=0:optimizer_state.ring_mib=1"
    names = ("--strategies", f"resident,{overlap}", "--peers", "torch")
    values, _ = measured(tmp_path, *ITERATION, *how, *names)
    rows = rows_of(values, 32)
    assert values["optimizer"]["clip_every"] == 3
    assert [rows[name]["clipped_steps"] for name in ("no optimizer", "resident", overlap, "torch")] == [None, 2, 2, 2]
    redone = [rows[name]["redone_steps"] for name in ("no optimizer", "resident", overlap)]
    assert redone == [None, 0, 1]  # the last step's is not known yet
    assert rows[overlap]["loss"] == rows["resident"]["loss"]
    assert rows["torch"]["loss"] == pytest.approx(rows["resident"]["loss"], rel=0.02), "peers clip as often"


MIXTURE = ("--iteration", "--model", "qwen3-moe", "--params", "200000", "--device", "cpu", "--tokens", "32")


def test_two_ranks_train_together(tmp_path: Path) -> None:
    names = ["fsdp2", "fsdp2-stream"]
    values, output = on_two_ranks(tmp_path, *ITERATION, "--strategies", ",".join(names), "--peers", "torch-offload")
    rows = good_rows(values, 64)
    assert values["ranks"] == 2 and output.count("One iteration of") == len(values["tokens_per_rank"])
    assert list(rows)[:4] == ["no optimizer", *names, "torch-offload"]
    assert rows["fsdp2"]["weight_bytes"] == pytest.approx(values["model"]["parameters"], rel=0.02)  # half of 2 bytes
    assert rows["fsdp2"]["times_resident"] == 1.0 and {rows[name]["loss"] for name in names} == {rows["fsdp2"]["loss"]}
    assert rows["fsdp2"]["tokens_per_s"] == pytest.approx(2 * 64 / rows["fsdp2"]["iteration_ms"] * 1e3)


def test_a_mixture_of_experts_trains_the_same(tmp_path: Path) -> None:
    """Its stacked experts and router, also where weights rest on the host and are freed between visits."""
    names = ["resident", "stream-overlap", "offload", "offload:optimizer_state.resident_gib=1:weights.device_mib=1"]
    values, output = measured(tmp_path, *MIXTURE, "--sequence", "16", "--strategies", ",".join(names))
    rows = good_rows(values, 32)
    assert {rows[name]["loss"] for name in names} == {rows["resident"]["loss"]} and "Qwen3-MoE" in output
    assert rows["resident"]["weight_bytes"] == 2 * values["model"]["parameters"]


def test_small_models_beside_the_loop_by_hand(tmp_path: Path) -> None:
    small = ("--small", "--device", "cpu", "--tokens", "32", "--sequence", "16", "--rounds", "2")
    values, output = measured(tmp_path, *small)
    assert [values["model"][name]["adapted"] != [] for name in ("dense", "lora", "moe")] == [False, True, False]
    for model in ("dense", "lora", "moe"):
        rows = {row["name"]: row for row in values["rows"] if row["model"] == model}
        assert list(rows) == ["no optimizer", "resident", "stream-overlap", "torch"] and f"{model}: one" in output
        assert not any(row["note"] for row in rows.values())
        assert rows["stream-overlap"]["loss"] == rows["resident"]["loss"]
        assert rows["torch"]["loss"] == pytest.approx(rows["resident"]["loss"], rel=1e-2)  # its norm adds up otherwise
        assert rows["torch"]["times_by_hand"] == 1.0 and rows["torch"]["times_by_hand_range"] == [1.0, 1.0]
        low, high = rows["resident"]["times_by_hand_range"]
        assert 0 < low < high and low <= rows["resident"]["times_by_hand"] <= high
        assert [len(window) for window in rows["resident"]["windows_ms"]] == [2, 2]


def test_small_models_are_recomputed_alike_by_all() -> None:
    tasks = iteration.small_models(CPU, 0, 16, 32)
    (entry,) = parse_strategies("resident", tasks[0])

    def is_recomputed(model: Any) -> bool:
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    recomputed = {task.case: is_recomputed(entry.build(task).model) for task in tasks}
    assert recomputed == {task.case: is_recomputed(task.model_for_peers()) for task in tasks}
    assert recomputed == {"dense": True, "lora": False, "moe": False}


class InfiniteForMany(torch.nn.Linear):
    """Its loss is infinite for more than 32 tokens."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(torch.ones(1)).sum()
        return loss if tokens.numel() <= 32 else loss * torch.inf


class Diverging(Lazy):
    name = about = "diverging"

    def __init__(self, task: run.Task) -> None:
        self.model = InfiniteForMany(1, 1)
        self._weights = list(self.model.parameters())


def test_what_diverges_or_is_refused_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Strategy.load

    def refuse(name: str, **given: Any) -> Strategy:
        if name == "stream":
            raise ConfigError("not in this version")
        return load(name, **given)

    monkeypatch.setattr(Strategy, "load", refuse)
    monkeypatch.setattr(IterationTask, "peers", (Diverging,))
    names = ("--strategies", "stream", "--peers", "diverging", "--rounds", "2")
    values, output = measured(tmp_path, *ITERATION, *names, code=1)
    small, large = (rows_of(values, tokens)["diverging"] for tokens in (32, 64))
    assert small["note"] is None and len(small["windows_ms"]) == 2
    assert large["note"].startswith("FloatingPointError: the loss is") and "iteration_ms" not in large
    assert {rows_of(values, tokens)["stream"]["note"] for tokens in (32, 64)} == {"not in this version"}
    assert output.count("stream: not in this version") == 1 and "failed" in output


# -- many small tensors ----------------------------------------------------------------------------------------------


def test_the_python_time_of_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(tensors.SIZES, "moe", (12, lambda: tensors.Layers(2, 2, tensors.Expert)))
    monkeypatch.setitem(tensors.SIZES, "lora", (8, lambda: tensors.Layers(2, 2, tensors.Adapter)))
    values, output = measured(tmp_path, "--tensors", "tiny", "--steps", "2", "--rounds", "2", "--device", "cpu")
    rows = values["rows"]
    names = ["resident", "stream", "stream-overlap", "torch-foreach", "torch", "torch-empty-hooks"]
    assert [(row["tensors"], row["name"]) for row in rows] == [(count, name) for count in (8, 12) for name in names]
    for row in rows:
        assert [len(window) for window in row["windows_ms"]] == [2, 2] and row["first_ms"] > 0
        assert row["hooks_percent"] == pytest.approx(100 * (row["backward_ms"] / row["plain_backward_ms"] - 1))
    assert rows[3]["times_by_hand"] == 1.0 and "12 small tensors" in output


# -- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--peers torhc", "did you mean 'torch'"),
        ("--strategies none --peers none", "nothing to measure"),
        ("--params 100", "smallest stack"),
        ("--params nan", "a number of parameters is needed"),
        ("--device meta", "allowed are cpu, cuda"),
        ("--device cuda:99", "GPU"),
        ("--steps 0", "'--steps'"),
        ("--optimizer sgd", "--optimizer sgd: allowed are adamw, muon"),
        ("--tokens 64", "has no effect on one optimizer step; it belongs to --iteration"),
        ("--tensors large", "--tensors large: allowed are tiny (all of them), lora, moe"),
        ("--timeline --device cpu", "--timeline needs a GPU"),
        ("--timeline --rounds 3", "--rounds 3 has no effect on --timeline"),
        ("--small --tokens 64,128", "--small measures one number of tokens"),
        ("--small", "--small is for one process: start it without torchrun"),
        ("--iteration --timeline", "give one of them"),
        ("--iteration --checkpoints ckpt", "--checkpoints ckpt has no effect on --iteration"),
        ("--iteration --strategies strem", "did you mean 'stream'"),
        ("--iteration --strategies stream:optimizer_state.ring=4", "unknown key 'optimizer_state.ring'"),
        ("--iteration --strategies stream:optimizer_state.ring_mib=-1", "ring_mib"),
        ("--iteration --strategies :a.b=4", "strategy's name is missing"),
        ("--iteration --strategies stream:clipping.max_norm=[1", "not a valid YAML value"),
        ("--iteration --sequence 64 --tokens 100", "a multiple of --sequence 64"),
        ("--iteration --tokens many", "whole numbers separated by commas"),
        ("--iteration --model mixtral", "--model mixtral: allowed are llama and qwen3-moe"),
        ("--iteration --model qwen3-moe --params 1e5", "smallest mixture of experts"),
        ("--iteration --model qwen3-moe --peers torch-fsdp2", "cannot train --model qwen3-moe"),
        ("--model qwen3-moe", "it belongs to --iteration"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments == "--small":
        monkeypatch.setenv("WORLD_SIZE", "2")
    done = bench(*arguments.split(), "--output", tmp_path / "out")
    assert done.exit_code == 2 and message in sentence(done.output)
    assert not (tmp_path / "out").exists()


def test_the_defaults_of_iterations_on_a_cpu(tmp_path: Path) -> None:
    """Tokens ascend, and without --strategies there are the row without an optimizer and four of ours."""
    few = ("--params", "60000", "--layers", "1", "--device", "cpu", "--steps", "1", "--tokens", "64, 16,64")
    values, _ = measured(tmp_path, "--iteration", *few, "--sequence", "16")
    assert values["tokens_per_rank"] == [16, 64]
    rows = [row for row in values["rows"] if row["tokens"] == 16]
    labels = ["no optimizer", "resident", "stream", "stream-overlap", "stream-overlap resident_gib=8"]
    assert [row["label"] for row in rows] == labels and [row["resident"] for row in rows] == [False, True, *[False] * 3]


# -- the model -------------------------------------------------------------------------------------------------------


def test_models_have_the_size_that_is_asked_for() -> None:
    sizes = {"Llama-3.2-3B": 3_212_749_824, "Llama-3.1-8B": 8_030_261_248}
    released = [LlamaShape.nearest(parameters, released=True) for parameters in (3 * 10**9, 8 * 10**9)]
    assert {each.name: each.parameters for each in released} == sizes
    for parameters, layers in ((60_000, 2), (2_000_000, None), (2 * 10**9, None), (3 * 10**9, 8)):
        shape = LlamaShape.nearest(parameters, layers, released=parameters > 10**9)
        assert shape.name == "a scaled Llama" and shape.parameters == pytest.approx(parameters, rel=0.3)
        assert shape.heads % shape.key_value_heads == 0 and layers in (None, shape.layers)
    whole, small = MoeShape.nearest(30_500_000_000), MoeShape.nearest(4_000_000_000)
    with torch.device("meta"):
        made = Qwen3MoeForCausalLM(whole.config(num_experts=whole.experts))
    assert (whole.name, whole.layers) == ("Qwen3-30B-A3B", 48)
    assert sum(parameter.numel() for parameter in made.parameters()) == whole.parameters
    assert small.layers == 5 and small.name.startswith("5 blocks of")


def small_task(tokens: int) -> IterationTask:
    return IterationTask(CPU, 0, LlamaShape.nearest(60_000, 2), sequence=16, case=tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_chunks_is_the_models_own(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(models, "LOSS_CHUNK", 10)
    shape = LlamaShape("test", 32, 64, 16, 2, 64, 8, tied)
    model = shape.make(CPU, torch.float32, seed=3)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    tokens, targets = (words % 64 for words in small_task(32).batch(0))
    model(tokens, targets).backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    logits = LlamaForCausalLM.forward(model, tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for gradient, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_every_rank_has_tokens_of_its_own() -> None:
    task = small_task(64)
    tokens, targets = task.batch(0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, task.batch(0)[0]) and not torch.equal(tokens, task.batch(1)[0])


# -- how results are shown -------------------------------------------------------------------------------------------


def shown(values: Values, width: int) -> str:
    whole = iteration.SmallModelTask if "dense" in values.get("model", ()) else IterationTask
    view = (whole if "iterations" in values else tensors.TensorsTask if "tensors" in values else StepTask).view
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as output:
        report.print_table(values, view, console)
    return output.get()


KEPT = [file for file in sorted(BENCHMARKS.rglob("*.json")) if {"rounds", "rows"} <= set(json.loads(file.read_text()))]


def test_results_that_are_kept_can_be_shown() -> None:
    assert len(KEPT) >= 15
    for file in KEPT:
        values = json.loads(file.read_text())
        table = shown(values, 200)
        assert all(report.label(row).split()[0] in table for row in values["rows"]), file.name


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_and_cuts_no_number(width: int) -> None:
    values = json.loads((BENCHMARKS / "h200-1b.json").read_text())
    table = shown(values, width)
    lines = table.split("Link,")[0].splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in table
    row = rows_of(values)["layer-stream"]
    assert f"{row['step_ms']:.1f}" in table and "{:.1f} – {:.1f}".format(*row["step_ms_range"]) in table
    assert ("for lack of room" in table) == (width < 100)


# -- what is only measurable on a GPU --------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float = 0, dur: float = 1, tid: int = 1, **args: Any) -> Values:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


COPIES = [
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", bytes=100),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", bytes=30),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", bytes=7),
    event("cpu_op", "aten::copy_"),
]
WAITS = [
    event("user_annotation", machine.PROFILED_RANGE, 10, 20),
    event("cuda_runtime", "cudaDeviceSynchronize", 5),
    event("cuda_runtime", "cudaEventSynchronize", 25, tid=2),
    event("cuda_runtime", "cudaLaunchKernel", 12),
    event("cuda_runtime", "cudaStreamSynchronize", 13),
    event("cpu_op", "aten::item", 11, 4),
    event("cpu_op", "aten::_local_scalar_dense", 12, 2),
    event("cuda_runtime", "cudaDeviceSynchronize", 31),
]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (COPIES, StepProfile(100, 30, 0, None)),
        ([event("kernel", "k")], StepProfile(0, 0, 0, None)),
        (COPIES[3:], None),
        (WAITS, StepProfile(0, 0, 2, "cudaStreamSynchronize in aten::item")),
    ],
    ids=["copies", "a kernel", "no device", "waits"],
)
def test_traffic_and_host_waits_are_read_from_a_trace(events: list[Values], expected: StepProfile | None) -> None:
    """Waits of all threads, in the step alone; of autograd's, too: FSDP2 waits there for gradients to the host."""
    assert machine.read_step_profile(events) == expected


TIMELINE = [  # in µs
    event("cpu_op", "aten::mm", 0, 100_000),
    event("kernel", "gemm", 10_000, 20_000, stream=7),
    event("kernel", "gemm", 29_000, 1_000, stream=7),
    event("cuda_runtime", "cudaLaunchKernel", 33_000, 1_000, correlation=2),
    event("kernel", "gemm_backward", 40_000, 20_000, stream=7, correlation=2),
    event("kernel", "ncclDevKernel_AllGather", 11_000, 90_000, stream=9),
    event("kernel", "multi_tensor_apply<FusedAdamMathFunctor>", 12_000, 4_000, stream=13),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5_000, 10_000, stream=14),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 25_000, 10_000, stream=14),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 45_000, 3_000, stream=15),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 16_000, 1_000, stream=13),
    {"name": "process_name", "ph": "M"},
]


def test_a_timeline_is_written_and_says_which_copies_were_hidden_and_what_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler sees no device here, so it is told what it saw."""

    def write(iterate: Any, iterations: int, path: Path) -> None:
        iterate()
        path.write_text(json.dumps({"traceEvents": TIMELINE}))

    monkeypatch.setattr(iteration, "write_timeline", write)
    task = TimelineTask(CPU, 0, LlamaShape.nearest(60_000, 2), 16, tmp_path, case=32)
    entries = parse_strategies("stream:optimizer_state.ring_mib=4", task)
    (row,) = (made := run.Run.create([task], run.Effort(2, 1), Ranks(CPU), entries)).rows
    run.measure_all(made, lambda _: None)
    written = tmp_path / "stream-optimizer_state.ring_mib-4-32-timeline.json"
    assert row.note is None and written.is_file()
    assert row.extra["said"] == [
        f"{written} written",
        "stream ring_mib=4, 32 tokens: 10.0 of 20.0 ms of copies host → device beside the main stream's kernels",
        "stream ring_mib=4, 32 tokens: 3.0 of 3.0 ms of copies device → host beside the main stream's kernels",
        "stream ring_mib=4, 32 tokens: the main stream waited 4.0 ms for launches and 6.0 ms for other work",
    ]
    with pytest.raises(ValueError, match="recorded nothing on the device"):
        machine.read_timeline(TIMELINE[:1])


def test_page_locked_memory_is_what_the_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"active_bytes.current": 560, "allocated_bytes.current": 160}  # 2.11: freed blocks stay active
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats, raising=False)
    assert pinned_bytes(torch.device("cuda")) == 160 and pinned_bytes(CPU) == 0


def test_saves_are_measured_in_a_new_folder(tmp_path: Path) -> None:
    """What is in the folder stays there, whatever it is called."""
    (tmp_path / "bench-checkpoint").mkdir()
    (tmp_path / "bench-checkpoint" / "notes.txt").write_text("mine")
    (tmp_path / "bench-plain-0").write_text("mine")

    class Saves:
        def save(self, path: Path) -> None:
            path.mkdir()
            (path / "weights").write_bytes(bytes(64))

        def save_async(self, path: Path) -> Any:
            self.save(path)
            return SimpleNamespace(done=lambda: True, result=lambda: None)

        def saved_tensors(self) -> dict[str, torch.Tensor]:
            return {"weights": torch.zeros(4)}

    ranks = Ranks(CPU)
    try:
        measure_saving(Saves(), lambda: None, tmp_path, ranks)
    finally:
        ranks.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bench-checkpoint", "bench-plain-0"]
    assert (tmp_path / "bench-checkpoint" / "notes.txt").read_text() == "mine"
