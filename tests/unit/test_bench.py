"""`lightstep bench` at sizes where times mean nothing: its rows, that all do the same work, what it writes, refuses."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from lightstep.bench import muon_bounds
from lightstep.bench.chart import draw
from lightstep.bench.command import plan
from lightstep.bench.contender import Contender, Skipped, Task
from lightstep.bench.entries import Entry
from lightstep.bench.llama import Llama, LlamaShape
from lightstep.bench.probes import pinned_bytes
from lightstep.bench.ranks import Ranks, local_device
from lightstep.bench.report import as_json, label, print_table, size
from lightstep.bench.run import Effort, Run, measure_all, unlisted_pinned_bytes
from lightstep.bench.step import StepTask, random_gradients
from lightstep.bench.tiny import SIZES, Adapter, Expert, Layers
from lightstep.bench.trace import PROFILED_RANGE, StepProfile, profile_step, read_step_profile
from lightstep.plan.measure import MeasuredLink
from tests.unit.bench_runs import bench_on_two_ranks, run_bench

CPU = torch.device("cpu")
TINY = ("--params", "60000", "--layers", "2", "--steps", "2", "--warmup", "1", "--device", "cpu")
PEERS = {peer.name: peer for peer in StepTask.peers}
HERE = {"layer-stream", "cpu-adamw", "torch", "torch-fp32-grads", "fsdp2-offload"}  # peers that need nothing but torch


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """The values, the folder and the output of one small run of everything."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed.ops.adam", None)  # would be compiled for a minute where it can be
        done = run_bench(*TINY, "--strategies", "resident,bulk", "--output", str(folder))
    assert done.exit_code == 0, done.output
    return json.loads((folder / "bench.json").read_text()), folder, done.output


def rows_of(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in values["rows"]}


# -- the whole command -------------------------------------------------------------------------------------------


def test_every_strategy_and_peer_has_a_row(result: tuple[dict[str, Any], Path, str]) -> None:
    values, _, output = result
    assert list(rows_of(values)) == ["resident", "bulk", *PEERS]
    assert all(name in output for name in rows_of(values))


def test_what_can_run_here_was_measured(result: tuple[dict[str, Any], Path, str]) -> None:
    values, _, _ = result
    for name in HERE | {"resident", "bulk"}:
        row = rows_of(values)[name]
        assert row["note"] is None, f"{name}: {row['note']}"
        assert row["step_ms"] > 0 and len(row["step_ms_all"]) == 2
        assert row["ms_per_1e9_parameters"] == pytest.approx(row["step_ms"] / row["parameters_per_rank"] * 1e9)
        assert row["parameters_per_rank"] == values["model"]["parameters"]


def test_a_peer_that_is_not_installed_is_skipped_visibly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("deepspeed", "deepspeed.ops.adam"):  # the second is there already when it was measured before
        monkeypatch.setitem(sys.modules, module, None)
    done = run_bench(*TINY, "--strategies", "none", "--peers", "deepspeed", "--output", str(tmp_path))
    row = json.loads((tmp_path / "bench.json").read_text())["rows"][0]
    assert done.exit_code == 0 and "skipped" in done.output and "deepspeed: not installed" in done.output
    assert row["skipped"] and row["note"] == "not installed"


def test_deepspeed_has_one_optimizer_for_all_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class CPUAdam(torch.optim.AdamW):  # DeepSpeed's examines the CPU for a second whenever one is made
        made = 0

        def __init__(self, masters: Any, adamw_mode: bool, **settings: Any) -> None:
            super().__init__(masters, **settings)
            assert adamw_mode
            CPUAdam.made += 1

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=CPUAdam))
    done = run_bench(*TINY, "--strategies", "none", "--peers", "torch,deepspeed", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    rows = rows_of(json.loads((tmp_path / "bench.json").read_text()))
    assert CPUAdam.made == 2  # for the times, and for the other figures
    assert rows["deepspeed"]["largest_weight_difference"] <= 2**-11


def test_all_do_the_same_work(result: tuple[dict[str, Any], Path, str]) -> None:
    values, _, _ = result
    measured = {name: row for name, row in rows_of(values).items() if row["note"] is None}
    for name, row in measured.items():
        # Weights near 0.02 · 4: one unit of bf16's last place there is 2⁻¹¹. The reference itself moves by up to 10⁻³.
        assert row["largest_weight_difference"] <= 2**-11, name
    assert measured["resident"]["largest_weight_difference"] == 0.0


def test_a_contender_that_does_less_is_seen(tmp_path: Path) -> None:
    class Lazy(PEERS["torch"]):  # type: ignore[misc, name-defined]
        def step(self, gradients: Any) -> None:
            pass

    run = tiny_run({"torch": PEERS["torch"], "lazy": Lazy})
    measure_all(run, lambda _: None)
    assert rows_of(as_json(run))["lazy"]["largest_weight_difference"] > 0


def test_host_memory_is_told(result: tuple[dict[str, Any], Path, str]) -> None:
    rows = rows_of(result[0])
    assert rows["torch"]["host_bytes_per_parameter"] == 0
    assert 12 <= rows["bulk"]["host_bytes_per_parameter"] < 16  # master and two moments, in whole pages
    assert rows["layer-stream"]["host_bytes_per_parameter"] == pytest.approx(8, rel=0.01)
    assert rows["cpu-adamw"]["host_bytes_per_parameter"] >= 16


def test_the_json_says_where_and_how(result: tuple[dict[str, Any], Path, str]) -> None:
    values, _, _ = result
    assert values["command"].startswith("lightstep")
    assert values["versions"]["torch"] == torch.__version__
    assert values["hardware"]["device"] == "CPU" and values["hardware"]["cores"] >= 1
    assert values["steps"] == 2 and values["warmup"] == 1 and values["rounds"] == 2 and values["ranks"] == 1
    assert values["link_gb_per_s"] is None and "No GPU" in result[2]


def test_the_chart_is_a_png(result: tuple[dict[str, Any], Path, str]) -> None:
    data = (result[1] / "bench.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    assert not list(result[1].glob("*.part"))


def test_the_chart_shows_memory_and_the_link_where_there_are_any(
    result: tuple[dict[str, Any], Path, str], tmp_path: Path
) -> None:
    link = {"to_device": 53.0, "to_host": 55.0, "duplex": 46.0, "page_locked": True}
    rows = [{**row, "peak_device_bytes_per_parameter": 12} for row in result[0]["rows"]]
    draw({**result[0], "rows": rows, "link_gb_per_s": link}, StepTask.view, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > (result[1] / "bench.png").stat().st_size
    draw({**result[0], "rows": []}, StepTask.view, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").is_file()


def test_muon_beside_the_loop_by_hand(tmp_path: Path) -> None:
    names = ["--strategies", "default", "--peers", "torch,cpu-adamw", "--rounds", "1"]
    done = run_bench(*TINY, "--optimizer", "muon", *names, "--output", str(tmp_path))
    values = json.loads((tmp_path / "bench.json").read_text())
    rows = rows_of(values)
    assert done.exit_code == 0 and "14 hidden matrices" in done.output
    assert rows["cpu-adamw"]["note"] == "supports --optimizer adamw only, not muon"
    assert values["optimizer"]["class"] == "Muon + AdamW"
    for name in ("resident", "stream", "stream-overlap"):
        assert rows[name]["largest_weight_difference"] == 0.0, name
        assert rows[name]["times_by_hand"] == pytest.approx(rows[name]["step_ms"] / rows["torch"]["step_ms"])
    with pytest.raises(ValueError, match="--optimizer sgd: allowed are adamw, muon"):
        plan("step", {"optimizer": "sgd", "params": 6e4, "device": "cpu"}, tmp_path)


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


def test_dion_is_given_the_same_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [*TINY, "--optimizer", "muon", "--strategies", "none", "--peers", "torch,dion,dion-triton", "--rounds", "1"]
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=MuonOfDion))
    assert run_bench(*names, "--output", str(tmp_path / "a")).exit_code == 0
    rows = rows_of(json.loads((tmp_path / "a" / "bench.json").read_text()))
    assert rows["dion"]["note"] is None and rows["dion"]["largest_weight_difference"] == 0.0
    assert rows["dion-triton"]["skipped"] and rows["dion-triton"]["note"] == "needs a GPU"
    monkeypatch.setitem(sys.modules, "dion", None)
    assert run_bench(*names, "--output", str(tmp_path / "b")).exit_code == 0
    rows = rows_of(json.loads((tmp_path / "b" / "bench.json").read_text()))
    assert {row["note"] for name, row in rows.items() if name != "torch"} == {"not installed"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_step_of_muon_cannot_do_without(ranks: int) -> None:
    shape = LlamaShape("two blocks", 8, 16, 4, 2, 64, 4)
    run = tiny_run({})
    run.tasks = [replace(run.task, optimizer="muon")]
    run.link, run.exchange, run.ranks.world_size = MeasuredLink(50.0, 50.0, 25.0, True), 100.0, ranks
    shown = {"kind": "lightstep", "parameters_per_rank": shape.parameters // ranks, "step_ms": 30.0}
    rows = [
        {
            **shown,
            "name": "resident" if ranks == 1 else "fsdp2",
            "step_ms": 12.0,
            "gb_to_device": 0.0,
            "gb_to_host": 0.0,
        },
        {**shown, "name": "stream", "gb_to_device": 0.5, "gb_to_host": 0.6},
        {**shown, "name": "torch", "kind": "peer", "parameters_per_rank": shape.parameters, "step_ms": 10.0},
        {**shown, "name": "dion", "kind": "peer"},
        {**shown, "name": "torch-fsdp2", "kind": "peer"},
    ]
    muon_bounds.add_bounds(run, shape, rows, "step_ms")
    sent = sum(2 * 2 * rows * columns // 4 for rows, columns in shape.matrices)  # half of a half, there and back
    bounds = [None, 0.6 / 25 * 1e3] if ranks == 1 else [10 / 2 + sent / 100e9 * 1e3, 24.0]
    assert [row.get("bound_ms") for row in rows[:2]] == [
        bound if bound is None else pytest.approx(bound) for bound in bounds
    ]
    assert rows[1]["times_bound"] == pytest.approx(30 / 24) and "bound_ms" not in rows[2]
    assert [row.get("bound_ms") for row in rows[3:]] == [None if ranks == 1 else bounds[0], None]
    one = 2 * sum(4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3 for m in [(8, 8)] * 2 + [(4, 8)] * 2 + [(16, 8)] * 3)
    assert muon_bounds.newton_schulz_tflop(shape) == pytest.approx(5 * one / 1e12)


def test_two_ranks_measure_together(tmp_path: Path) -> None:
    names = ["--strategies", "resident,fsdp2-stream", "--peers", "fsdp2-offload,torch,torch-fsdp2"]
    saving = ["--checkpoints", str(tmp_path / "saved")]
    output = bench_on_two_ranks(*TINY, "--rounds", "1", *names, *saving, "--output", str(tmp_path / "out"))
    values = json.loads((tmp_path / "out" / "bench.json").read_text())
    rows = rows_of(values)
    assert values["ranks"] == 2 and output.count("One optimizer step") == 1
    assert all(row["note"] is None for row in rows.values())
    assert rows["resident"]["parameters_per_rank"] == values["model"]["parameters"]
    for name in ("fsdp2-stream", "fsdp2-offload", "torch-fsdp2"):
        assert rows[name]["parameters_per_rank"] == pytest.approx(values["model"]["parameters"] / 2, rel=0.01), name
    assert rows["torch"]["checkpoint"] is None
    whole = rows["fsdp2-stream"]["checkpoint"]  # fp32 masters and both moments, bf16 weights, over all ranks
    assert whole["gb"] * 1e9 == pytest.approx(14 * values["model"]["parameters"], rel=0.7)
    assert whole["gb_per_s"] > 0 and whole["plain_files_gb_per_s"] > 0
    for prefix in ("", "torch_async_save_"):
        assert 0 < whole[f"{prefix}stall_s"] <= whole[f"{prefix}first_stall_s"]
        assert {f"{prefix}lost_s", f"{prefix}first_lost_s"} <= whole.keys()
    assert "asynchronous: training continues after" in output and "torch's async_save: training is blocked" in output
    assert "fsdp2-stream: checkpoint of 0.00 GB saved at" in output
    assert list((tmp_path / "saved").iterdir()) == []


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.set_num_threads(1)  # as torchrun's OMP_NUM_THREADS=1 does
    try:
        done = run_bench(*TINY, "--rounds", "1", "--strategies", "none", "--peers", "torch", "--output", str(tmp_path))
        assert done.exit_code == 0, done.output
        assert json.loads((tmp_path / "bench.json").read_text())["hardware"]["torch_threads"] == 3
    finally:
        torch.set_num_threads(before)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "torhc"], "did you mean torch?"),
        (["--strategies", "residnet"], "residnet"),
        (["--strategies", "none", "--peers", "none"], "nothing to measure"),
        (["--params", "100"], "smallest stack"),
        (["--params", "nan"], "a number of parameters is needed"),
        (["--params", "inf", "--roles"], "a number of parameters is needed"),
        (["--layers", "0"], "at least 1"),
        (["--device", "meta"], "allowed are cpu, cuda"),
        (["--device", "gpu", "--roles"], "allowed are cpu, cuda"),
        (["--device", "cuda:99"], "GPU"),
        (["--steps", "0"], "'--steps'"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_bench(*arguments, "--output", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there to be had")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    for requested in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match="no GPU here"):
            local_device(requested)


# -- one failing contender ---------------------------------------------------------------------------------------


TASK = StepTask(CPU, 0, LlamaShape.nearest(60_000, 2))


def tiny_run(contenders: dict[str, type[Contender]], rounds: int = 1) -> Run:
    entries = [Entry(name, name, "peer", "", contender) for name, contender in contenders.items()]
    return Run.create([TASK], Effort(steps=2, warmup=1, rounds=rounds), Ranks(CPU), entries)


class Counting(Contender):
    """Does nothing but count."""

    name = about = "counting"
    built: list[str]

    def __init__(self, task: Task) -> None:
        self._weights = [torch.zeros(4)]

    def step(self, gradients: Any) -> None:
        return

    def weights(self) -> list[torch.Tensor]:
        return self._weights


class Failing(Counting):
    def step(self, gradients: Any) -> None:
        raise MemoryError("no room\nat all")


class Absent(Counting):
    def __init__(self, task: Task) -> None:
        raise Skipped("not for this machine")


def test_a_failure_is_a_row_and_the_run_goes_on() -> None:
    run = tiny_run({"a": Failing, "b": Absent, "c": Counting}, rounds=2)
    seen: list[str] = []
    measure_all(run, seen.append)
    rows = rows_of(as_json(run))
    assert rows["a"]["note"] == "MemoryError: no room" and not rows["a"]["skipped"]
    assert rows["b"]["note"] == "not for this machine" and rows["b"]["skipped"]
    assert rows["c"]["note"] is None and len(rows["c"]["step_ms_all"]) == 2
    assert sum("a" in sentence.split(": ")[-1] for sentence in seen if "round" in sentence) == 1  # not tried again


def test_rounds_run_forth_and_back() -> None:
    run = tiny_run({"a": Counting, "b": Counting}, rounds=2)
    seen: list[str] = []
    measure_all(run, lambda sentence: seen.append(sentence.split(": ")[-1]))
    assert [name for name in seen if name in "ab"] == ["a", "b", "b", "a"]


# -- the model ---------------------------------------------------------------------------------------------------


def test_eight_billion_parameters_are_llama_3s() -> None:
    shape = LlamaShape.nearest(8_030_000_000, 32)
    assert (shape.hidden, shape.feed_forward, shape.key_value, shape.vocabulary) == (4096, 14_336, 1024, 128_256)
    assert shape.parameters == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize(("parameters", "layers"), [(60_000, 2), (2_000_000, None), (10**9, None), (3 * 10**9, 28)])
def test_a_stack_is_about_as_large_as_asked_for(parameters: int, layers: int | None) -> None:
    shape = LlamaShape.nearest(parameters, layers)
    assert shape.parameters == pytest.approx(parameters, rel=0.25)
    assert layers is None or shape.layers == layers


def test_the_model_has_the_shapes_size_and_the_same_weights_in_every_dtype() -> None:
    shape = LlamaShape.nearest(60_000, 2)
    model, wide = Llama.make(shape, CPU), Llama.make(shape, CPU, torch.float32)
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == shape.parameters
    assert sorted(i for layer in model.layer_indices() for i in layer) == list(range(len(parameters)))
    assert all(bool(parameter.any()) for parameter in parameters)
    for low, high in zip(parameters, wide.parameters(), strict=True):
        assert (low.dtype, high.dtype) == (torch.bfloat16, torch.float32) and torch.equal(low.float(), high)


def test_gradients_are_random_fresh_and_the_same_for_every_dtype() -> None:
    weights = [torch.zeros(3, 5), torch.zeros(7)]
    low = random_gradients(weights, torch.bfloat16, CPU, 1)
    high = random_gradients(weights, torch.float32, CPU, 1)
    assert all(torch.equal(a.float(), b) for a, b in zip(low[0], high[0], strict=True))
    assert not torch.equal(low[0][0], low[1][0]) and bool(low[0][1].any())
    assert not torch.equal(low[0][0], random_gradients(weights, torch.bfloat16, CPU, 2)[0][0])


# -- the figures -------------------------------------------------------------------------------------------------


def test_percent_of_the_link_is_the_busier_ways() -> None:
    run = tiny_run({"x": Counting, "y": Counting})
    measured, absent = run.rows
    measured.parameters = measured.peak_bytes = 10**9
    measured.windows, measured.remaining_ms = [[240.0, 200.0, 250.0, 220.0]], [10.0]  # the first step is left out
    measured.profile = StepProfile(10 * 10**9, 9 * 10**9, 2, "cudaStreamSynchronize in aten::item")
    absent.note, absent.skipped = "not installed", True
    run.link = MeasuredLink(to_device=55.0, to_host=54.0, duplex=50.0, page_locked=True)
    values = as_json(run)
    row = values["rows"][0]
    assert row["step_ms"] == 220.0
    assert row["ms_per_1e9_parameters"] == pytest.approx(220.0 / run.task.shape.parameters * 1e9)
    assert row["block_ms"] == 230.0 and row["step_ms_range"] == [200.0, 250.0]
    assert row["gb_per_s_to_device"] == pytest.approx(10 / 0.22) and row["gb_to_host"] == 9.0
    assert row["percent_of_duplex"] == pytest.approx(100 * (10 / 0.22) / 50)
    with (console := Console(width=200, force_terminal=True)).capture() as output:
        print_table(values, StepTask.view, console)
    assert "91" in output.get() and "page-locked" in output.get() and "200.0 – 250.0" in output.get()


@pytest.mark.parametrize(("ranks", "floor"), [(1, 250.0), (2, 125.0)])
def test_ranks_share_the_bytes_of_the_model(ranks: int, floor: float) -> None:
    mark = StepTask.view.panels[0].mark
    assert mark is not None
    found = mark({"link_gb_per_s": {"duplex": 40.0}, "ranks": ranks})
    assert found is not None and found[0] == floor and ("shared by 2 ranks" in found[1]) == (ranks == 2)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_and_cuts_no_number(width: int, result: tuple[dict[str, Any], Path, str]) -> None:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as output:
        print_table(result[0], StepTask.view, console)
    table = output.get()
    assert all(len(line) <= width for line in table.splitlines()) and "…" not in table
    assert all(label(row).split()[0] in table for row in result[0]["rows"]), "whose figures these are"
    row = rows_of(result[0])["layer-stream"]
    assert f"{row['step_ms']:.1f}" in table and "{:.1f} – {:.1f}".format(*row["step_ms_range"]) in table
    assert ("for lack of room" in table) == (width < 100)


def test_sizes_are_written_for_people() -> None:
    assert (size(1_003_000_000), size(1_814_624)) == ("1 B", "1.81 M")


def test_the_faster_link_counts() -> None:
    fast = MeasuredLink(50, 40, 45, True).or_faster(MeasuredLink(49, 41, 44, True))
    assert (fast.to_device, fast.to_host, fast.duplex) == (50, 41, 45)


# -- what is only measurable on a GPU ----------------------------------------------------------------------------


def test_a_cpu_has_no_link_and_nothing_to_watch() -> None:
    assert Ranks(CPU).measure_link() is None
    assert profile_step(lambda: None, lambda: None, CPU) is None


def event(cat: str, name: str, ts: float = 0, dur: float = 1, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_traffic_is_read_from_a_trace() -> None:
    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", bytes=100),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", bytes=30),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", bytes=7),
        event("cpu_op", "aten::copy_"),
    ]
    assert read_step_profile(events) == StepProfile(100, 30, 0, None)
    assert read_step_profile([event("kernel", "k")]) == StepProfile(0, 0, 0, None)
    assert read_step_profile(events[3:]) is None


def test_host_waits_of_all_threads_are_counted_in_the_step_alone() -> None:
    """Autograd's threads among them: FSDP2 waits there for gradients on their way to the host."""
    seen = read_step_profile(
        [
            event("user_annotation", PROFILED_RANGE, 10, 20),
            event("cuda_runtime", "cudaDeviceSynchronize", 5),
            event("cuda_runtime", "cudaEventSynchronize", 25, tid=2),
            event("cuda_runtime", "cudaLaunchKernel", 12),
            event("cuda_runtime", "cudaStreamSynchronize", 13),
            event("cpu_op", "aten::item", 11, 4),
            event("cpu_op", "aten::_local_scalar_dense", 12, 2),
            event("cuda_runtime", "cudaDeviceSynchronize", 31),
        ]
    )
    assert seen == StepProfile(0, 0, 2, "cudaStreamSynchronize in aten::item")


def test_page_locked_memory_is_what_the_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"active_bytes.current": 560, "allocated_bytes.current": 160}  # 2.11: freed blocks stay active
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats, raising=False)
    assert pinned_bytes(torch.device("cuda")) == 160 and pinned_bytes(CPU) == 0


def test_page_locked_memory_that_nobody_lists_counts() -> None:
    class Listing(Counting):
        def host_tensors(self) -> list[torch.Tensor]:
            return [torch.zeros(3), *([torch.zeros(2).pin_memory()] if torch.cuda.is_available() else [])]

    contender = Listing(TASK)
    listed = 8 if torch.cuda.is_available() else 0
    assert unlisted_pinned_bytes(contender, 100) == 100 - listed
    assert unlisted_pinned_bytes(contender, 0) == 0


# -- where results go, and exit codes ----------------------------------------------------------------------------


def test_a_failed_contender_is_an_exit_code_and_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightstep.bench.report.RUNS", tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = run_bench(*TINY, "--rounds", "1", "--strategies", "fsdp2", "--peers", "torch")
    assert done.exit_code == 1 and "failed" in done.output and "torchrun" in done.output
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("-step")
    rows = rows_of(json.loads((folder / "bench.json").read_text()))
    assert rows["fsdp2"]["note"] and rows["torch"]["step_ms"] > 0
    again = run_bench(*TINY, "--strategies", "none", "--peers", "torch", "--output", str(folder))
    assert again.exit_code == 2 and "from an earlier run" in " ".join(again.output.replace("│", " ").split())


# -- tiny tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora", "moe"])
def test_tiny_models_have_as_many_tensors_as_they_say(name: str) -> None:
    count, build = SIZES[name]
    model = build()
    assert len(list(model.parameters())) == count
    model(torch.ones(1, 64)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_python_time_of_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SIZES, "moe", (12, lambda: Layers(2, 2, Expert)))
    monkeypatch.setitem(SIZES, "lora", (8, lambda: Layers(2, 2, Adapter)))
    few = ("--steps", "2", "--rounds", "2", "--device", "cpu", "--output", str(tmp_path))
    done = run_bench("--tensors", "tiny", *few)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "tiny.json").read_text())["rows"]
    names = ["resident", "stream", "stream-overlap", "torch-foreach", "torch", "torch-empty-hooks"]
    assert [(row["tensors"], row["name"]) for row in rows] == [(count, name) for count in (8, 12) for name in names]
    for row in rows:
        assert [len(window) for window in row["windows_ms"]] == [2, 2] and row["first_ms"] > 0
        assert row["hooks_percent"] == pytest.approx(100 * (row["backward_ms"] / row["plain_backward_ms"] - 1))
    assert rows[3]["times_by_hand"] == 1.0 and "12 small tensors" in done.output
