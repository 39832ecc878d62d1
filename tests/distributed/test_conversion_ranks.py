"""Conversions from and to DeepSpeed and LightRFT, with files that several processes wrote; all of them on the CPU."""

from __future__ import annotations

import functools
import json
import random
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightstep import DynamicLossScale, Strategy
from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.formats import convert_checkpoint, read_checkpoint
from lightstep.checkpoint.formats.state import TrainingState, scale_from_deepspeed
from tests.distributed import deepspeed_runs, lightrft_runs
from tests.distributed.ranks import Pool
from tests.reference.converted_run import AFTER, BEFORE, Run, differences, make_net
from tests.unit.test_conversion import Plain, names_of

RUNS = {
    f"{stage}-{dtype}": (stage, dtype)
    for stage, dtype in ((1, "bfloat16"), (2, "float16"), (3, "bfloat16"), (3, "float16"))
}
UNUSED = ("unused.weight", "unused.bias")
"""DeepSpeed decays what has no gradient, torch's and our optimizers leave it alone."""

Saved = tuple[Path, dict[str, tuple[Any, Any]]]


@pytest.fixture(scope="module", name="pool")
def pool_without_gpus(pool: Pool) -> Any:
    """Both sides of a comparison run on the CPU, also where the machine has GPUs."""
    return types.SimpleNamespace(run=functools.partial(pool.run, cpu=True))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "device", torch.device("cpu"))


@pytest.fixture(scope="module")
def zero(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Checkpoints of two ranks in each stage and dtype, and what was in them."""
    folder = tmp_path_factory.mktemp("zero")
    return folder, pool.run(deepspeed_runs.save_stages, 2, folder=str(folder), runs=RUNS)[0]


def lightstep_state(run: Run) -> dict[str, Any]:
    """Without step counts, which DeepSpeed has once for a group."""
    return {n: {k: v for k, v in entries.items() if k != "step"} for n, entries in run.content()["state"].items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_deepspeed_run_continues_under_lightstep(zero: Saved, pool: Pool, name: str, tmp_path: Path) -> None:
    folder, contents = zero
    at, after = contents[name]
    convert_checkpoint(folder / name, tmp_path / "converted", "lightstep")
    run = Run(RUNS[name][1], deepspeed_runs.WINDOW)
    extra = run.load(tmp_path / "converted")
    assert extra["epoch"] == 3
    assert extra["deepspeed"]["global_steps"] == 3
    assert not differences(lightstep_state(run), at["state"])
    assert {int(entries["step"]) for entries in run.content()["state"].values()} == set(at["steps"])
    for mine, theirs in zip(run.optimizer.param_groups, at["groups"], strict=True):
        assert not differences({key: mine[key] for key in theirs}, theirs)
    assert run.optimizer.loss_scale.scale == at["scale"]
    assert run.scheduler.state_dict() == at["scheduler"]
    run.train(AFTER)
    state = lightstep_state(run)
    assert not differences(*[{n: e for n, e in s.items() if n not in UNUSED} for s in (state, after["state"])])
    assert run.optimizer.loss_scale.scale == after["scale"]
    assert run.scheduler.state_dict() == after["scheduler"]
    rounded = {n: e["master"].to(run.strategy.parameter_dtype) for n, e in state.items()}
    assert not differences({n: run.model.get_parameter(n).detach() for n in rounded}, rounded)


@pytest.mark.parametrize(
    ("stage", "dtype", "world_size", "offload"),
    [(1, "bfloat16", 2, "none"), (2, "float16", 2, "cpu"), (3, "bfloat16", 2, "cpu"), (3, "float16", 1, "none")],
)
def test_a_lightstep_run_continues_under_deepspeed(
    pool: Pool, stage: int, dtype: str, world_size: int, offload: str, tmp_path: Path
) -> None:
    run = Run(dtype, deepspeed_runs.WINDOW).train(BEFORE)
    with torch.no_grad():  # what is not trained is loaded, too
        run.model.frozen.bias.add_(1.0)
        run.model.seen.add_(1.0)
    source, at = run.save(tmp_path / "step-3"), lightstep_state(run)
    arguments = {"stage": stage, "dtype": dtype, "offload": offload, "before": range(7, 8), "steps": AFTER}
    extra, loaded, continued, weights = pool.run(
        deepspeed_runs.under_strategy, world_size, load=str(source), **arguments
    )[0]
    assert extra["epoch"] == 3
    assert not differences({n: e for n, e in loaded["state"].items() if n in at}, at)
    assert all(not loaded["state"][name]["exp_avg"].any() for name in UNUSED), "what was never updated has zeros"
    assert loaded["steps"] == [3]
    assert loaded["global_steps"] == 3
    assert loaded["scheduler"] == run.scheduler.state_dict()
    assert (loaded["scale"] or 1.0) == run.optimizer.loss_scale.scale
    assert loaded["grown_in"] == (5 if dtype == "float16" else None)
    run.train(AFTER)
    expected = lightstep_state(run)
    assert not differences({n: e for n, e in continued["state"].items() if n in expected}, expected)
    assert (continued["scale"] or 1.0) == run.optimizer.loss_scale.scale
    assert continued["scheduler"] == run.scheduler.state_dict()
    kept = {name: tensor for name, tensor in run.model.state_dict().items() if name not in UNUSED}
    assert not differences({name: weights[name] for name in kept}, kept)


def test_of_an_engine_that_has_trained_nothing_is_left_by_a_load(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint is of a run before its first step, and has no state."""
    arguments = {"stage": 2, "load": str(Run("bfloat16").save(tmp_path / "step-0")), "steps": BEFORE}
    expected, found = [pool.run(deepspeed_runs.under_strategy, 2, before=b, **arguments)[0][2] for b in ((), AFTER)]
    for content in (expected, found):
        del content["global_steps"]
    assert not differences(found, expected)


def test_zero_continues_at_another_stage_as_it_would_have(zero: Saved, pool: Pool, tmp_path: Path) -> None:
    """Stage 3 of two ranks becomes stage 1, and stage 1 becomes stage 3: unused parameters and scaler included."""
    folder, contents = zero
    for source, stage in (("3-float16", 1), ("1-bfloat16", 3)):
        convert_checkpoint(folder / source, tmp_path / source, "lightstep")
        arguments = {"load": str(tmp_path / source), "stage": stage, "dtype": RUNS[source][1], "steps": AFTER}
        extra, loaded, continued, _ = pool.run(deepspeed_runs.under_strategy, 2, **arguments)[0]
        assert extra["order"] == [1, 2]
        assert not differences((loaded, continued), contents[source])


@pytest.mark.parametrize("name", ["1-bfloat16", "3-float16"])
def test_zero_to_torch_keeps_every_bit(zero: Saved, name: str, tmp_path: Path) -> None:
    folder, contents = zero
    convert_checkpoint(folder / name, tmp_path / "run.pt", "torch")
    file = torch.load(tmp_path / "run.pt", weights_only=True, mmap=True)
    at = contents[name][0]
    assert not differences({n: file["model"][n] for n in at["state"]}, {n: e["master"] for n, e in at["state"].items()})
    assert file["model"]["head.weight"].data_ptr() == file["model"]["embedding.weight"].data_ptr()
    assert not differences(read_all(read_checkpoint(tmp_path / "run.pt")), read_all(read_checkpoint(folder / name)))


def test_the_trainers_schedule_beside_the_files_of_deepspeed_is_kept(zero: Saved, tmp_path: Path) -> None:
    """In ``checkpoint-N`` under DeepSpeed, whose own files have no scheduler then."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(zero[0] / "1-bfloat16", folder)
    torch.save({"last_epoch": 7, "base_lrs": [0.1]}, folder / "scheduler.pt")
    for is_the_trainers in (False, True):
        for path in (folder, folder / "global_step3"):
            state = read_checkpoint(path)
            assert ((state.scheduler or {}).get("last_epoch") == 7) == is_the_trainers
            assert ("trainer_state" in state.extra) == is_the_trainers
        (folder / "trainer_state.json").write_text('{"global_step": 3}')


def read_all(state: TrainingState) -> dict[str, Any]:
    weights = {name: weight.read() for name, weight in state.weights.items()}
    entries = {n: {k: v.read() for k, v in entries.items()} for n, entries in state.entries.items()}
    groups = [(group.names, group.settings) for group in state.groups or ()]
    rest = (groups, state.aliases, state.loss_scale, state.scheduler, state.extra)
    return {"weights": weights, "entries": entries, "rest": rest}


def test_other_layouts_of_deepspeed(pool: Pool, tmp_path: Path) -> None:
    contents = pool.run(deepspeed_runs.save_variants, 3, folder=str(tmp_path))[0]
    kept = {name: tensor for name, tensor in make_net().state_dict().items() if name.startswith(("frozen", "seen"))}
    for name in contents:
        state = read_checkpoint(tmp_path / name)
        found = read_all(state)
        trained = {n: {**found["entries"][n], "master": state.master(n).read()} for n in state.optimized()}
        expected = contents[name]["state"]
        assert not differences({n: {k: entries[k] for k in expected[n]} for n, entries in trained.items()}, expected), (
            name
        )
        for parameter, weight in found["weights"].items():
            source = trained[parameter]["master"] if parameter in trained else kept[parameter]
            assert torch.equal(weight, source.to(weight.dtype)), (name, parameter)
        assert [group.names for group in state.groups or ()] == names_of(Plain())


def test_checkpoints_of_the_deepspeed_strategy_go_both_ways(pool: Pool, tmp_path: Path) -> None:
    """Ours with DeepSpeed's files in it, to another strategy and back to DeepSpeed on another number of ranks.

    DeepSpeed makes its masters of weights that are rounded already, so the run beside it starts from rounded ones too.
    """
    pool.run(deepspeed_runs.under_strategy, 2, stage=2, steps=BEFORE, save=str(tmp_path / "engine"))
    run = Run("bfloat16", weights=torch.bfloat16).train(BEFORE)
    state = convert_checkpoint(tmp_path / "engine", tmp_path / "converted", "lightstep")
    loaded = Run("bfloat16")
    assert loaded.load(tmp_path / "converted") == {"epoch": 3, "deepspeed": state.extra["deepspeed"]}
    for mine, theirs in ((loaded, run), (loaded.train(AFTER), run.train(AFTER))):
        found, expected = mine.content(), theirs.content()
        assert not differences(found["groups"], expected["groups"])
        assert found["scheduler"] == expected["scheduler"]
        for name, entries in expected["state"].items():
            if name not in UNUSED:
                assert not differences(found["state"][name], entries), name
    trained = {n: p.detach() for n, p in run.model.named_parameters() if n not in UNUSED}
    for world_size, stage in ((1, 1), (2, 3)):
        arguments = {"stage": stage, "steps": AFTER, "load": str(tmp_path / "converted")}
        weights = pool.run(deepspeed_runs.under_strategy, world_size, **arguments)[0][-1]
        assert not differences({name: weights[name] for name in trained}, trained)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("1-bfloat16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("2-float16", "mp_rank_00_model_states.pt"),
        ("3-float16", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("3-float16", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_or_truncated_file_of_a_rank_is_named(zero: Saved, name: str, file: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(zero[0] / name / "global_step3", source)
    damaged = source / file
    whole = damaged.read_bytes()
    damaged.unlink()
    with pytest.raises(CheckpointError, match=f"(missing: .*{file}|{file} is missing).*copy the missing files"):
        convert_checkpoint(source, tmp_path / "x", "lightstep")
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        convert_checkpoint(source, tmp_path / "x", "lightstep")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_files_of_a_run_of_other_ranks_are_refused(zero: Saved, pool: Pool, tmp_path: Path) -> None:
    pool.run(deepspeed_runs.save_stages, 1, folder=str(tmp_path), runs={"1-bfloat16": (1, "bfloat16")})
    mixed = tmp_path / "1-bfloat16" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copytree(zero[0] / "1-bfloat16", tmp_path / "two")
    shutil.copy(mixed, tmp_path / "two" / "global_step3")
    with pytest.raises(CheckpointError, match=r"ranks is \[1, 1\] in .* and 2 in .*: files of two runs are mixed"):
        convert_checkpoint(tmp_path / "two", tmp_path / "x", "torch")
    single = read_checkpoint(tmp_path / "1-bfloat16")
    double = read_checkpoint(zero[0] / "1-bfloat16")
    assert {n: w.shape for n, w in single.weights.items()} == {n: w.shape for n, w in double.weights.items()}
    assert all(torch.equal(w.read(), double.weights[n].read()) for n, w in single.weights.items())


def test_loss_scales_go_on_alike(pool: Pool) -> None:
    """Our scale and DeepSpeed's, started from each other's state, go through the same values.

    Until the good step after the next overflow: from there on DeepSpeed waits for one good step more than we do.
    """
    chance, histories, expected = random.Random(0), [], []
    for _ in range(60):
        interval, hysteresis = chance.randint(1, 6), chance.randint(1, 3)
        scale = DynamicLossScale(2.0**20, growth_interval=interval, hysteresis=hysteresis, max_scale=2.0**120)
        for _ in range(chance.randint(0, 12)):
            scale.update(chance.random() < 0.2)
        settings = {"scale_window": interval, "delayed_shift": hysteresis, "cur_iter": chance.randint(0, 50)}
        state = {**settings, **scale.state_dict()}
        overflows = [False] * chance.randint(0, 15) + [True] * chance.randint(0, 4)
        histories.append((state, overflows))
        expected.append(_values(scale, overflows))
    ends = pool.run(deepspeed_runs.scale_histories, 1, histories=histories)[0]
    assert [values for values, _ in ends] == expected
    continued = [(end, [False] * chance.randint(0, 15) + [True] * chance.randint(0, 4)) for _, end in ends]
    theirs = pool.run(deepspeed_runs.scale_histories, 1, histories=continued)[0]
    for (end, overflows), (values, _) in zip(continued, theirs, strict=True):
        interval, hysteresis = end["scale_window"], end["delayed_shift"]
        scale = DynamicLossScale(growth_interval=interval, hysteresis=hysteresis, max_scale=2.0**120)
        scale.load_state_dict(scale_from_deepspeed(types.SimpleNamespace(**end)) or {})
        assert _values(scale, overflows) == values


def _values(scale: DynamicLossScale, overflows: list[bool]) -> list[float]:
    values = []
    for overflow in overflows:
        scale.update(overflow)
        values.append(scale.scale)
    return values


@pytest.mark.parametrize("named", [False, True], ids=["names from shapes", "names given"])
def test_a_lightrft_run_continues_under_lightstep(pool: Pool, named: bool, tmp_path: Path) -> None:
    source, names = tmp_path / "step_3", tmp_path / "names.json"
    at, groups = pool.run(lightrft_runs.save, 2, folder=str(source), frozen=named)[0]
    names.write_text(json.dumps(groups))
    if named:
        with pytest.raises(CheckpointError, match="does not name them"):
            convert_checkpoint(source, tmp_path / "x", "lightstep")
    convert_checkpoint(source, tmp_path / "converted", "lightstep", names=names if named else None)
    run = Run("bfloat16", frozen=named)
    assert run.load(tmp_path / "converted") == {"epoch": 3}
    found = run.content()
    for name in UNUSED:  # a master that is the weight itself says nothing
        assert torch.equal(at["state"].pop(name)["master"], found["model"][name].float())
    assert not differences({key: found[key] for key in ("model", "state", "groups")}, at)
    (source / "optim_states" / "_rank1").unlink()
    with pytest.raises(CheckpointError, match="missing: _rank1"):
        convert_checkpoint(source, tmp_path / "x", "lightstep")
    assert not (tmp_path / "x").exists()


def test_the_order_in_which_ranks_wrote_names_no_parameters(pool: Pool, tmp_path: Path) -> None:
    """``dcp.save`` divides what all ranks have among them, and lists one rank's tensors after the other's."""
    pool.run(lightrft_runs.save_copies, 2, folder=str(tmp_path / "step_1"))
    with pytest.raises(CheckpointError, match=r"does not name them\. Pass --names FILE"):
        read_checkpoint(tmp_path / "step_1")
    (tmp_path / "names.json").write_text(json.dumps([f"{number}.weight" for number in range(4)]))
    state = convert_checkpoint(tmp_path / "step_1", tmp_path / "x", "lightstep", names=tmp_path / "names.json")
    for number in range(4):
        expected = torch.full((4, 4), 0.1 * number)
        assert torch.allclose(state.entries[f"{number}.weight"]["exp_avg"].read(), expected), number


def test_groups_that_several_ranks_wrote_are_as_many_as_there_were(pool: Pool, tmp_path: Path) -> None:
    pool.run(lightrft_runs.save_groups, 3, folder=str(tmp_path / "dcp"))
    state = read_checkpoint(tmp_path / "dcp")
    found = sorted((group.settings["lr"], sorted(group.names)) for group in state.groups or ())
    kinds = ((1e-3, "bias"), (0.1, "weight"))
    assert found == [(lr, [f"{number}.{kind}" for number in range(3)]) for lr, kind in kinds]
