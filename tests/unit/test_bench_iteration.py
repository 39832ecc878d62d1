"""`lightstep bench --iteration` and `--timeline` at sizes where times mean nothing: rows, notes, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from lightstep.bench import llama as model_module
from lightstep.bench import timeline as timeline_module
from lightstep.bench.chart import draw as draw_chart
from lightstep.bench.command import plan
from lightstep.bench.contender import FORWARD, STEP, Contender, Task
from lightstep.bench.entries import Entry, parse_overrides, parse_strategies
from lightstep.bench.iteration import IterationTask, token_counts
from lightstep.bench.llama import Llama, LlamaShape
from lightstep.bench.ranks import Ranks
from lightstep.bench.report import as_json, print_table
from lightstep.bench.run import Effort, Run, measure_all
from lightstep.bench.timeline import TimelineTask, copies_in_forward, draw, phases
from lightstep.bench.trace import (
    COLLECTIVES,
    MAIN,
    OTHERS,
    TO_DEVICE,
    TO_HOST,
    UPDATES,
    merged,
    read_timeline,
)
from lightstep.config import ConfigError, StrategyConfig, merge_overrides, parse_config
from lightstep.presets import read_source
from tests.unit.bench_runs import bench_on_two_ranks, run_bench

CPU = torch.device("cpu")
TINY = ("--params", "60000", "--layers", "2", "--tokens", "64,32", "--sequence", "16", "--device", "cpu")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """The values, the folder and the output of one small run of everything."""
    folder = tmp_path_factory.mktemp("iteration")
    names = "resident,stream,stream-overlap,stream:optimizer_state.ring_mib=4"
    peers = "torch,cpu-adamw,fsdp2-offload"
    done = run_bench("--iteration", *TINY, "--strategies", names, "--peers", peers, "--output", str(folder))
    assert done.exit_code == 0, done.output
    return json.loads((folder / "iteration.json").read_text()), folder, done.output


def rows_of(values: dict[str, Any], tokens: int = 64) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in values["rows"] if row["tokens"] == tokens}


# -- the whole command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [32, 64])
def test_every_contender_is_measured_at_every_number_of_tokens(
    result: tuple[dict[str, Any], Path, str], tokens: int
) -> None:
    rows = rows_of(result[0], tokens)
    ours = ["resident", "stream", "stream-overlap", "stream:optimizer_state.ring_mib=4"]
    assert list(rows) == ["no optimizer", *ours, "torch", "cpu-adamw", "fsdp2-offload"]
    for name, row in rows.items():
        assert row["note"] is None, f"{name}: {row['note']}"
        assert [len(window) for window in row["windows_ms"]] == [2]
        assert row["iteration_ms"] == pytest.approx(sum(row["windows_ms"][0]) / 2)
        assert row["exposed_ms"] == pytest.approx(row["iteration_ms"] - rows["no optimizer"]["iteration_ms"])
        assert row["times_resident"] == pytest.approx(row["iteration_ms"] / rows["resident"]["iteration_ms"])
        assert row["tokens_per_s"] == pytest.approx(tokens / row["iteration_ms"] * 1e3)


def test_all_strategies_train_the_same(result: tuple[dict[str, Any], Path, str]) -> None:
    rows = rows_of(result[0])
    for name in ("stream", "stream-overlap", "stream:optimizer_state.ring_mib=4"):
        assert rows[name]["loss"] == rows["resident"]["loss"], name
        assert rows[name]["grad_norm"] == rows["resident"]["grad_norm"], name
        assert rows[name]["clipped_steps"] == rows["resident"]["clipped_steps"], name
    for name in ("torch", "cpu-adamw", "fsdp2-offload"):
        assert rows[name]["loss"] == pytest.approx(rows["resident"]["loss"], rel=0.02), name
    assert rows["no optimizer"]["grad_norm"] is rows["no optimizer"]["clipped_steps"] is None
    assert rows["resident"]["clipped_steps"] >= (rows["resident"]["grad_norm"] > 1)
    assert rows["no optimizer"]["loss"] > rows["resident"]["loss"], "the others learn their tokens by heart"


def test_steps_that_are_clipped_now_and_then(tmp_path: Path) -> None:
    how = ("--max-norm", "1e9", "--clip-every", "3", "--warmup", "1", "--steps", "4", "--tokens", "32")
    overlap = "stream-overlap:optimizer_state.resident_gib=0:optimizer_state.ring_mib=1"
    chosen = ("--strategies", f"resident,{overlap}", "--peers", "torch")
    done = run_bench("--iteration", *TINY, *how, *chosen, "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    values = json.loads((tmp_path / "iteration.json").read_text())
    rows = rows_of(values, 32)
    assert values["optimizer"]["clip_every"] == 3
    assert [rows[name]["clipped_steps"] for name in ("no optimizer", "resident", overlap, "torch")] == [None, 2, 2, 2]
    redone = [rows[name]["redone_steps"] for name in ("no optimizer", "resident", overlap)]
    assert redone == [None, 0, 1]  # the last step's is not known yet
    assert rows[overlap]["loss"] == rows["resident"]["loss"]
    assert rows["torch"]["loss"] == pytest.approx(rows["resident"]["loss"], rel=0.02), "peers clip as often"


def test_memory_is_told(result: tuple[dict[str, Any], Path, str]) -> None:
    rows, parameters = rows_of(result[0]), result[0]["model"]["parameters"]
    assert rows["resident"]["weight_bytes"] == rows["no optimizer"]["weight_bytes"] == 2 * parameters
    assert rows["resident"]["host_bytes"] == rows["no optimizer"]["host_bytes"] == 0
    assert rows["stream"]["host_bytes"] >= 10 * parameters
    assert rows["fsdp2-offload"]["host_bytes"] >= 12 * parameters
    assert rows["resident"]["peak_device_bytes"] is None and rows["resident"]["host_syncs"] is None


def test_the_json_says_what_was_trained_and_how(result: tuple[dict[str, Any], Path, str]) -> None:
    values = result[0]
    assert values["command"].startswith("lightstep") and values["hardware"]["device"] == "CPU"
    assert values["versions"]["torch"] == torch.__version__ and values["versions"]["transformers"]
    assert values["model"]["layers"] == 2 and values["model"]["activation_checkpointing"] is True
    assert values["tokens_per_rank"] == [32, 64] and values["sequence"] == 16
    assert (values["iterations"], values["warmup"], values["rounds"], values["ranks"]) == (2, 1, 1, 1)
    assert values["optimizer"]["max_norm"] == 1.0


def test_the_table_shows_labels_and_what_exposed_means(result: tuple[dict[str, Any], Path, str]) -> None:
    output = result[2]
    assert "stream ring_mib=4" in output and "no optimizer" in output
    assert output.count("One iteration of") == 2 and "beyond forward and backward" in " ".join(output.split())


def test_the_chart_is_a_png(result: tuple[dict[str, Any], Path, str], tmp_path: Path) -> None:
    data = (result[1] / "iteration.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    assert not list(result[1].glob("*.part"))
    memory = {"peak_device_bytes": 10**9, "peak_device_bytes_beyond_weights": 8 * 10**8, "weight_bytes": 2 * 10**8}
    rows = [{**row, **memory} for row in result[0]["rows"]]
    draw_chart({**result[0], "rows": rows}, IterationTask.view, tmp_path / "gpu.png")
    draw_chart({**result[0], "rows": []}, IterationTask.view, tmp_path / "empty.png")
    assert (tmp_path / "gpu.png").stat().st_size > len(data) and (tmp_path / "empty.png").is_file()


def test_two_ranks_train_together(tmp_path: Path) -> None:
    names = ["--strategies", "fsdp2,fsdp2-stream", "--peers", "fsdp2-offload"]
    output = bench_on_two_ranks("--iteration", *TINY, *names, "--output", str(tmp_path / "out"))
    values = json.loads((tmp_path / "out" / "iteration.json").read_text())
    rows = rows_of(values)
    assert values["ranks"] == 2 and output.count("One iteration of") == 2
    assert list(rows) == ["no optimizer", "fsdp2", "fsdp2-stream", "fsdp2-offload"]
    assert all(row["note"] is None for row in rows.values()), {name: row["note"] for name, row in rows.items()}
    assert rows["fsdp2"]["weight_bytes"] == pytest.approx(values["model"]["parameters"], rel=0.02)  # half of 2 bytes
    assert rows["fsdp2"]["times_resident"] == 1.0 and rows["fsdp2"]["loss"] == rows["fsdp2-stream"]["loss"]
    assert rows["fsdp2"]["tokens_per_s"] == pytest.approx(2 * 64 / rows["fsdp2"]["iteration_ms"] * 1e3)


# -- contenders that cannot --------------------------------------------------------------------------------------


def tiny_tasks(*tokens: int) -> list[IterationTask]:
    return [IterationTask(CPU, 0, LlamaShape.nearest(60_000, 2), sequence=16, case=count) for count in tokens]


def test_what_this_version_refuses_is_a_row_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("not in this version")

    tasks = tiny_tasks(32, 64)
    entries = parse_strategies("stream", tasks[0])
    monkeypatch.setattr("lightstep.bench.entries.Strategy.load", refuse)
    run = Run.create(tasks, Effort(1, 1, 2), Ranks(CPU), entries)
    measure_all(run, lambda sentence: None)
    values = as_json(run)
    assert [row["note"] for row in values["rows"]] == ["not in this version"] * 4
    console = Console(width=130, force_terminal=True, color_system=None)
    with console.capture() as output:
        print_table(values, run.task.view, console)
    assert output.get().count("stream: not in this version") == 1 and "failed" in output.get()


class InfiniteForMany(torch.nn.Linear):
    """Its loss is infinite for more than 32 tokens."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(torch.ones(1)).sum()
        return loss if tokens.numel() <= 32 else loss * torch.inf


class Diverging(Contender):
    name = about = "diverging"

    def __init__(self, task: Task) -> None:
        self.model = InfiniteForMany(1, 1)

    def step(self, gradients: Any) -> None:
        return


def test_a_loss_that_is_not_finite_is_no_measurement() -> None:
    entry = Entry("diverging", "diverging", "peer", "", Diverging)
    run = Run.create(tiny_tasks(32, 64), Effort(1, 1, 2), Ranks(CPU), [entry])
    seen: list[str] = []
    measure_all(run, seen.append)
    small, large = (rows_of(as_json(run), tokens)["diverging"] for tokens in (32, 64))
    assert small["note"] is None and len(small["windows_ms"]) == 2
    assert large["note"].startswith("FloatingPointError: the loss is") and "iteration_ms" not in large
    assert (small["note"], large["skipped"]) == (None, False)
    order = ["no optimizer", "diverging"] * 2 + ["no optimizer", "diverging", "no optimizer"]  # one is not tried again
    assert [sentence.split(": ")[-1] for sentence in seen[1:]] == order


# -- what is asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strategy", "overrides"),
    [
        ("stream", "stream", {}),
        ("stream-overlap:optimizer_state.resident_gib=8", "stream-overlap", {"optimizer_state.resident_gib": 8}),
        ("./a:b/c.yaml:clipping.max_norm=null", "./a:b/c.yaml", {"clipping.max_norm": None}),
        ("a:x.y=1:x.z=two", "a", {"x.y": 1, "x.z": "two"}),
    ],
)
def test_a_strategy_may_bring_overrides(text: str, strategy: str, overrides: dict[str, Any]) -> None:
    assert parse_overrides(text, {}) == (strategy, overrides)


def test_labels_are_for_people() -> None:
    text = "stream,stream-overlap:optimizer_state.resident_gib=8:clipping.max_norm=null"
    labels = [entry.label for entry in parse_strategies(text, tiny_tasks(32)[0])]
    assert labels == ["stream", "stream-overlap resident_gib=8 max_norm=None"]


def test_overrides_lie_over_the_settings_of_the_bench() -> None:
    settings = {"clipping.max_norm": 1.0, "sharding.activation_checkpointing": True}

    def config_of(text: str) -> StrategyConfig:
        strategy, overrides = parse_overrides(text, settings)
        return parse_config(merge_overrides(read_source(strategy)[1], overrides), strategy)

    config = config_of("stream:clipping.max_norm=0.5")
    assert config.clipping.max_norm == 0.5 and getattr(config.sharding, "activation_checkpointing", None) is True
    config = config_of("stream:sharding.kind=ddp")
    assert (config.sharding.kind, getattr(config.sharding, "activation_checkpointing", None)) == ("ddp", True)
    assert config_of("stream:optimizer_state.ring_mib=64").optimizer_state.ring_mib == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--iteration", "--strategies", "strem"], "did you mean 'stream'"),
        (["--iteration", "--strategies", "stream:optimizer_state.ring=4"], "unknown key 'optimizer_state.ring'"),
        (["--iteration", "--strategies", "stream:optimizer_state.ring_mib=-1"], "ring_mib"),
        (["--iteration", "--strategies", ":a.b=4"], "strategy's name is missing"),
        (["--iteration", "--strategies", "stream:clipping.max_norm=[1"], "not a valid YAML value"),
        (["--iteration", "--peers", "torhc"], "allowed are all, none and torch, torch-fsdp2, cpu-adamw, fsdp2-offload"),
        (["--iteration", "--strategies", "none"], "nothing to measure"),
        (["--iteration", "--tokens", "100"], "a multiple of --sequence 64"),
        (["--iteration", "--tokens", "many"], "whole numbers separated by commas"),
        (["--iteration", "--params", "100"], "smallest stack"),
        (["--iteration", "--timeline"], "give one of them"),
        (["--iteration", "--checkpoints", "ckpt"], "--checkpoints ckpt has no effect on --iteration"),
        (["--timeline", "--rounds", "3"], "--rounds 3 has no effect on --timeline"),
        (["--tokens", "64"], "has no effect on one optimizer step; it belongs to --iteration"),
        (["--timeline"], "--timeline needs a GPU"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_bench(*arguments, "--device", "cpu", "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_token_counts_ascend() -> None:
    assert token_counts("64, 16,64", 16) == (16, 64)


def test_defaults_are_what_the_device_can_do() -> None:
    run = plan("iteration", {"device": "cpu"}, Path())
    assert run.cases == [128, 512] and run.effort == Effort(steps=2, warmup=1, rounds=1)
    entries = [row.entry for row in run.rows if row.task is run.task]
    assert [entry.name for entry in entries][:4] == ["no optimizer", "resident", "stream", "stream-overlap"]
    assert [entry.resident for entry in entries] == [False, True, False, False, False]


# -- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "name", "exact"),
    [(3 * 10**9, "Llama-3.2-3B", 3_212_749_824), (8 * 10**9, "Llama-3.1-8B", 8_030_261_248)],
)
def test_released_llamas_are_taken_where_they_are_near(parameters: int, name: str, exact: int) -> None:
    shape = LlamaShape.nearest(parameters, released=True)
    assert (shape.name, shape.parameters) == (name, exact)


@pytest.mark.parametrize(("parameters", "layers"), [(60_000, 2), (2_000_000, None), (2 * 10**9, None), (3 * 10**9, 8)])
def test_other_sizes_are_scaled(parameters: int, layers: int | None) -> None:
    shape = LlamaShape.nearest(parameters, layers, released=True)
    assert shape.name == "a scaled Llama" and shape.parameters == pytest.approx(parameters, rel=0.3)
    assert shape.hidden % shape.heads == 0 and shape.heads % shape.key_value_heads == 0
    assert layers is None or shape.layers == layers


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_in_chunks_is_the_models_own(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(model_module, "LOSS_CHUNK", 10)
    shape = LlamaShape("test", 32, 64, 16, 2, 64, 8, tied)
    model = Llama.make(shape, CPU, torch.float32, seed=3)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    tokens, targets = tiny_tasks(32)[0].batch(0)
    tokens, targets = tokens % 64, targets % 64
    model(tokens, targets).backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    logits = LlamaForCausalLM.forward(model, tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for gradient, parameter in zip(own, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_weights_and_tokens_are_the_same_for_everybody() -> None:
    (task,) = tiny_tasks(64)
    first, second = (Llama.make(task.shape, CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.get_default_dtype() == torch.float32
    tokens, targets = task.batch(0)
    assert tokens.shape == targets.shape == (4, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, task.batch(0)[0]) and not torch.equal(tokens, task.batch(1)[0])


# -- timelines ---------------------------------------------------------------------------------------------------


def event(cat: str, name: str, stream: int, start: float, length: float, launch: int = 0) -> dict[str, Any]:
    """Times in ms."""
    args = {"correlation": launch} if launch else {}
    return {"cat": cat, "name": name, "tid": stream, "ts": start * 1e3 + 5e6, "dur": length * 1e3, "args": args}


TRACE = [
    event("cpu_op", "aten::mm", 1, 0, 100),
    event("user_annotation", STEP, 1, -3, 1),  # of the iteration before the trace
    event("user_annotation", FORWARD, 1, 0, 4),
    event("user_annotation", STEP, 1, 8, 2),
    event("cuda_runtime", "cudaLaunchKernel", 1, -2.5, 0.1, launch=1),
    event("cuda_runtime", "cudaLaunchKernel", 1, 1, 0.1, launch=2),
    event("cuda_driver", "cuLaunchKernelEx", 1, 2, 0.1, launch=3),
    event("cuda_runtime", "cudaLaunchKernel", 1, 3, 0.1, launch=4),
    event("cuda_runtime", "cudaLaunchKernel", 2, 5, 0.1, launch=5),
    event("cuda_runtime", "cudaLaunchKernel", 1, 9, 0.1, launch=6),
    event("kernel", "clip", 7, 0, 2, launch=1),
    event("kernel", "gemm", 7, 10, 20, launch=2),
    event("gpu_memset", "Memset (Device)", 7, 29, 1, launch=3),
    event("kernel", "ncclDevKernel_AllGather", 9, 11, 90, launch=4),
    event("kernel", "gemm_backward", 7, 30, 40, launch=5),
    event("kernel", "norm", 7, 70, 5, launch=6),
    event("kernel", "multi_tensor_apply<FusedAdamMathFunctor>", 13, 12, 4),
    event("kernel", "split_with_sizes_copy", 11, 20, 1),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 14, 5, 10),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 14, 25, 10),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 15, 16, 3),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 13, 16, 1),
    {"name": "process_name", "ph": "M"},
]


def test_a_trace_is_read_lane_by_lane() -> None:
    timeline = read_timeline(TRACE)
    assert timeline.lanes == {
        MAIN: [(0, 2), (10, 30), (29, 30), (30, 70), (70, 75)],
        UPDATES: [(12, 16), (16, 17)],
        TO_DEVICE: [(5, 15), (25, 35)],
        TO_HOST: [(16, 19)],
        COLLECTIVES: [(11, 101)],
        OTHERS: [(20, 21)],
    }
    assert (timeline.forwards, timeline.steps, timeline.end) == ([(10, 30)], [(0, 2), (70, 75)], 101)
    assert phases(timeline) == [("forward", (10, 30)), ("backward", (30, 70)), ("step", (70, 75))]


def test_copies_under_the_forward_are_added_up() -> None:
    timeline = read_timeline(TRACE)
    assert timeline.overlap(TO_DEVICE, timeline.forwards) == 10
    assert timeline.overlap(TO_HOST, timeline.forwards) == 3
    assert timeline.overlap("no such lane", timeline.forwards) == 0
    assert copies_in_forward(timeline) == [
        "10 of 20 ms of copies host → device in a forward",
        "3 of 3 ms of copies device → host in a forward",
    ]
    assert timeline.busy(MAIN) == 67, "what overlaps counts once"


def test_a_trace_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="recorded nothing on the device"):
        read_timeline(TRACE[:2])


def test_close_spans_are_drawn_as_one() -> None:
    assert merged([(0, 1), (1.1, 2), (1.2, 1.5), (4, 5)], 0.5) == [(0, 2), (4, 5)]


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    draw(read_timeline(TRACE), tmp_path / "lanes.png", "stream-overlap, 64 tokens")
    without_phases = [event for event in TRACE if event.get("cat") != "user_annotation"]
    draw(read_timeline(without_phases), tmp_path / "plain.png", "stream-overlap, 64 tokens")
    sizes = [(tmp_path / name).stat().st_size for name in ("lanes.png", "plain.png")]
    assert sizes[0] > sizes[1] > 5_000


def test_contenders_are_recorded_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler sees no device here, so it is told what it saw."""
    iterations: list[int] = []

    def trace(contender: Contender, batch: Any, count: int, path: Path) -> None:
        iterations.append(count)
        path.write_text(json.dumps({"traceEvents": TRACE}))

    monkeypatch.setattr(timeline_module, "_trace", trace)
    task = TimelineTask(CPU, 0, LlamaShape.nearest(60_000, 2), 16, tmp_path, case=32)
    entries = parse_strategies("stream:optimizer_state.ring_mib=4", task)
    entries.append(Entry("absent", "absent", "peer", "", lambda task: 1 / 0))  # type: ignore[arg-type, return-value]
    run = Run.create([task], Effort(2, 1), Ranks(CPU), entries)
    measure_all(run, lambda sentence: None)
    recorded, absent = run.rows
    assert (recorded.note, absent.note) == (None, "ZeroDivisionError: division by zero")
    picture = recorded.extra["picture"]
    assert picture.name == "stream-optimizer_state.ring_mib=4-32-timeline.png"
    assert recorded.extra["said"][0].startswith("stream ring_mib=4, 32 tokens: 10 of 20 ms")
    assert picture.is_file() and picture.with_suffix(".json").is_file()
    assert iterations == [2]
