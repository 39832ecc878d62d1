"""Checkpoints saved on N ranks and loaded on M, between FSDP2, HSDP, DDP and one device: state bit for bit."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightstep import CheckpointError, Strategy, WeightAverage
from lightstep.checkpoint import save
from lightstep.checkpoint.errors import UnreadableError
from lightstep.checkpoint.storage import LocalStorage
from lightstep.distributed import local_tensor
from lightstep.state.store import Store
from tests.checkpoint_runs import (
    OLD,
    Adapted,
    Run,
    Unloadable,
    at_read,
    broken_disk,
    content,
    contents,
    flip,
    full_disk,
    same,
)
from tests.distributed.models import TinyTransformer, loss_of
from tests.distributed.ranks import Pool, on_ranks
from tests.distributed.training import DDP, FSDP2, OVERLAP, Training, same_tensors, weights_of
from tests.faults import disk_of
from tests.patience import PATIENCE
from tests.reference.plain_loop import ReferenceAverage

FP16 = {"parameters": "float16", "loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 2}}

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2-1": (1, {"kind": "fsdp2"}, {}),
    "fsdp2-2": (2, {"kind": "fsdp2"}, {"backend": "stream"}),
    "fsdp2-3": (3, {"kind": "fsdp2"}, {"backend": "bulk"}),
    "hsdp-4": (4, {"kind": "fsdp2", "mesh": {"replicate": 2}}, {"backend": "stream", "ring_mib": 0.01}),
    "ddp-2": (2, {"kind": "ddp", "find_unused_parameters": True}, {"backend": "stream"}),
    "single": (1, {"kind": "single"}, {}),
}
"""World size, sharding, and where the state lives: under stream, replicas share it."""

NOBODY_GATHERS = mock.patch.object(Store, "gather", side_effect=AssertionError("the state of a parameter was gathered"))


class LayoutRun(Run):
    """One model, optimizer and scheduler under one layout."""

    def __init__(self, layout: str, seed: int) -> None:
        _, sharding, state = LAYOUTS[layout]
        sections = {"sharding": sharding, "precision": FP16, "optimizer_state": state, "clipping": {"max_norm": 0.5}}
        self.strategy = Strategy.load(sections)
        torch.manual_seed(seed)
        self.model = self.strategy.prepare_model(TinyTransformer())
        groups = self.strategy.unwrap_model(self.model).split()
        self.optimizer = self.strategy.create_optimizer(self.model, param_groups=groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=10)

    def train(self, steps: int = 1) -> Run:
        for step in range(steps):
            self.optimizer.backward(loss_of(self.model, step, 0, self.strategy.rank, self.strategy.device))
            if self.optimizer.step():
                self.scheduler.step()
        return self

    def save(self, path: Any, **options: Any) -> Any:
        return super().save(path, scheduler=self.scheduler, **options)

    def load(self, path: Any, **options: Any) -> dict[str, Any]:
        return super().load(path, scheduler=self.scheduler, **options)

    def content(self) -> dict[str, Tensor]:
        return content(self.strategy.unwrap_model(self.model), self.optimizer)

    def settings(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = {k: v for k, v in self.scheduler.state_dict().items() if not k.startswith("_")}
        return {"groups": groups, "scheduler": scheduler, "loss_scale": self.optimizer.loss_scale.state_dict()}


def save_layout(rank: int, folder: str, layout: str) -> None:
    run = LayoutRun(layout, seed=0)
    with NOBODY_GATHERS:
        run.train(2).save(Path(folder, layout), extra={"epoch": 3})
    at = {"content": run.content(), "settings": run.settings()}
    torch.save(torch.rand(3), Path(folder, f"{layout}-{rank}.rng"))
    after = run.train(2).content()
    if rank == 0:
        torch.save({**at, "after": after}, Path(folder, f"{layout}.pt"))


def load_layouts(rank: int, folder: str, layout: str, saved_by: list[str]) -> None:
    run = LayoutRun(layout, seed=1 + rank)
    for other in saved_by:
        expected = torch.load(Path(folder, f"{other}.pt"), weights_only=False)
        with NOBODY_GATHERS:
            assert run.load(Path(folder, other)) == {"epoch": 3}, other
        same(run.content(), expected["content"])
        assert run.settings() == expected["settings"], other
        drawn = Path(folder, f"{other}-{rank}.rng")
        if drawn.exists():
            assert torch.equal(torch.rand(3), torch.load(drawn)), f"{other}: random numbers of rank {rank}"
        if other == layout:
            same(run.train(2).content(), expected["after"])


@pytest.fixture(scope="module")
def checkpoints(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, (world_size, sharding, _) in LAYOUTS.items():
        pool.run(save_layout, world_size, group=sharding["kind"] != "single", folder=str(folder), layout=layout)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_each_others_checkpoints(pool: Pool, checkpoints: Path, layout: str) -> None:
    """Each its own, and continues as the run did; and those of one other, uneven shards of two others."""
    world_size, sharding, _ = LAYOUTS[layout]
    names, number = list(LAYOUTS), list(LAYOUTS).index(layout)
    others = [names[(number + step) % len(names)] for step in ((0, 1, 3) if number in (1, 2) else (0, 3))]
    arguments = {"folder": str(checkpoints), "layout": layout, "saved_by": others}
    pool.run(load_layouts, world_size, group=sharding["kind"] != "single", **arguments)


# -- what two ranks promise each other ---------------------------------------------------------------------------------


def sharded(steps: int, module: nn.Module | None = None) -> Run:
    return Run("stream", steps, module, sharding={"kind": "fsdp2"})


@on_ranks(2)
def test_a_load_drops_gradients_of_an_unfinished_step(rank: int, tmp_path: Path) -> None:
    """Those inside FSDP2 too."""
    for layout in ("fsdp2-2", "ddp-2"):
        run, ends = LayoutRun(layout, seed=0), []
        run.train(2).save(tmp_path / layout)
        for last in (None, True, False):
            if last is not None:
                with run.strategy.accumulate(run.model, last=last):
                    run.optimizer.backward(loss_of(run.model, 9, 0, rank, run.strategy.device))
            run.load(tmp_path / layout)
            ends.append(run.train().content())
        for end in ends[1:]:
            same(end, ends[0])


@on_ranks(2)
def test_extra_that_differs_is_named(rank: int, tmp_path: Path) -> None:
    """By the first rank."""
    said: list[str] = []
    with mock.patch.object(save.logger, "warning", lambda text, *values: said.append((text % values).split(",")[0])):
        run = sharded(1)
        for number in (0, rank):
            run.save(tmp_path / "extra", extra={"epoch": 3, "order": torch.arange(4), "place": number})
            said.append("saved")
    assert said == ["saved", *(["extra differs over the ranks"] if rank == 0 else []), "saved"]


@on_ranks(2)
def test_weights_alone_rebuild_the_masters(tmp_path: Path) -> None:
    run, other = LayoutRun("fsdp2-2", seed=0), LayoutRun("fsdp2-2", seed=5)
    run.train(2).strategy.save_checkpoint(tmp_path / "model", run.model)
    other.train(2).strategy.load_checkpoint(tmp_path / "model", other.model)
    expected = weights_of(run.strategy, run.model)
    same_tensors(weights_of(other.strategy, other.model), expected)
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    found = other.train(1).content()
    for name, weight in expected.items():
        master = found.get(f"{name}.master", weight.cpu())
        assert torch.equal(master, weight.cpu().to(master.dtype)), name


@on_ranks(2)
def test_checkpoints_of_the_previous_version_load(tmp_path: Path) -> None:
    run = sharded(1)
    for name in ("stream", "fsdp2-2"):
        assert run.load(OLD / name) == {"epoch": 3}
        same(run.content(), load_file(OLD / f"{name}.safetensors"))


@on_ranks(2)
def test_a_save_fails_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """The second one's disk is full, or what it has cannot be saved; what was there is still there."""
    run, path = sharded(2), tmp_path / "step"
    run.save(path)
    random.seed(rank)
    run.save(path)
    drawn, expected = random.random(), run.content()
    run.train()
    said = "No space left on device"
    full = disk_of(100) if rank == 1 else nullcontext()
    with full, pytest.raises(CheckpointError, match=said if rank == 1 else f"rank 1: {said}"):
        run.save(path)
    with pytest.raises(TypeError, match=r"step was not saved: .*extra\['a'\] is a"):
        run.save(path, extra={"a": Unloadable()} if rank == 1 else {})
    dist.barrier()
    assert contents(path.parent) == ["step"]
    run.load(path)
    assert random.random() == drawn, "each rank has its own"
    same(run.content(), expected)


@on_ranks(2)
def test_a_checkpoint_that_is_replaced_is_loaded_by_no_rank(rank: int, tmp_path: Path) -> None:
    """Before a read of one rank: all ranks are told to load again, and get the new one."""
    for moment in (1, 3):
        path, newer, other = tmp_path / f"step-{moment}", tmp_path / f"newer-{moment}", sharded(0)
        sharded(1).save(path)
        (expected := sharded(3)).save(newer)

        def replace(path: Path = path, newer: Path = newer) -> None:
            path.rename(path.with_suffix(".aside"))
            newer.rename(path)

        fault = at_read(moment, replace) if rank == 1 else nullcontext()
        sentence = "was replaced or removed while it was read; load again"
        with fault, pytest.raises(CheckpointError, match=sentence):
            other.load(path)
        other.load(path)
        same(other.content(), expected.content())


@on_ranks(2)
def test_a_rank_that_cannot_read_stops_all(rank: int, tmp_path: Path) -> None:
    """No rank has changed anything, or all of them are marked."""
    run, other = sharded(3), sharded(1)
    run.save(tmp_path / "a")
    before = other.content()
    for when in (1, 3):
        fault = at_read(when, broken_disk) if rank == 1 else nullcontext()
        with fault, pytest.raises(CheckpointError, match="Input/output error"):
            other.load(tmp_path / "a")
        if when == 1:
            same(other.content(), before)
            other.save(tmp_path / "b")
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        other.save(tmp_path / "b")
    other.load(tmp_path / "a")
    same(other.content(), run.content())
    other.save(tmp_path / "b")


@on_ranks(2)
def test_a_network_that_fails_one_rank_is_damage_to_none(rank: int, tmp_path: Path) -> None:
    """No rank is sent to an older checkpoint."""
    for step in (1, 2):
        sharded(step).save(tmp_path / f"step-{step}")
    other = sharded(0)
    before = other.content()
    timed_out = mock.patch.object(LocalStorage, "read", side_effect=TimeoutError(110, "Connection timed out"))
    with timed_out if rank == 1 else nullcontext(), pytest.raises(UnreadableError) as raised:
        other.load(tmp_path / "step-2")
    text = str(raised.value)
    assert "step-2 was not loaded: " in text and text.endswith("could not be read (Connection timed out); try again")
    same(other.content(), before)
    dist.barrier()


@on_ranks(2)
def test_an_adapter_has_no_base(tmp_path: Path) -> None:
    run, other, path = sharded(3, Adapted()), sharded(1, Adapted()), tmp_path / "a"
    run.save(path)
    dist.barrier()
    names = {key.split(".")[1] for key in json.loads((path / "tensors.json").read_text())["tensors"]}
    assert names == {"adapter", "norm"}
    other.load(path)
    same(other.content(), run.content())


@on_ranks(2)
def test_damage_is_told_to_all_and_a_url_is_written_by_all(rank: int, tmp_path: Path) -> None:
    """One manifest has the checksums of both ranks; whichever finds damage, all raise, and the first advises."""
    run = sharded(2)
    expected = run.content()
    for place in (str(tmp_path), f"file://{tmp_path}/at-a-url"):
        for number in (1, 2, 3):
            run.save(f"{place}/step-{number}", keep_last=2, extra={"at": number})
        other = sharded(1)
        assert other.load(f"{place}/step-3") == {"at": 3}
        same(other.content(), expected)
        written = sorted(Path(place.removeprefix("file://")).glob("step-3/**/*.distcp"))
        assert [file.name.split("_")[2] for file in written] == ["0", "1"], "each rank writes"
        assert {path.name for path in Path(place.removeprefix("file://")).glob("step-*")} == {"step-2", "step-3"}
        dist.barrier()
        if rank == 0:
            flip(written[1], 4 * written[1].stat().st_size)
        dist.barrier()
        with pytest.raises(CheckpointError) as raised:
            other.load(f"{place}/step-3")
        assert "__1_0_0.distcp is damaged" in str(raised.value)
        assert (f"{place}/step-2 is undamaged: load that one" in str(raised.value)) == (rank == 0)
        same(other.content(), expected)
        dist.barrier()


@on_ranks(2)
def test_both_write_while_they_train(tmp_path: Path) -> None:
    """With collectives of their own, while threads of both write what was there."""
    run, other = sharded(2), sharded(1)
    expected = run.content()
    pending = run.save(f"{tmp_path}/step-1", asynchronous=True, keep_last=1, extra={"at": 1})
    run.train(3)
    pending.result(PATIENCE)
    assert other.load(f"{tmp_path}/step-1") == {"at": 1}
    same(other.content(), expected)
    pending = run.save(f"{tmp_path}/step-2", asynchronous=True, keep_last=1)
    assert run.save(f"{tmp_path}/step-3", keep_last=1) is None
    assert pending.done()
    dist.barrier()
    assert contents(tmp_path) == ["step-3"]


@on_ranks(2)
def test_an_error_of_one_writer_is_raised_by_the_next_save_of_all(rank: int, tmp_path: Path) -> None:
    """No rank's step raises, so none waits for another."""
    run = sharded(2)
    run.save(f"{tmp_path}/step-1")
    for failing, raises in ((0, lambda: run.save(f"{tmp_path}/step-3")), (1, run.strategy.close)):
        with full_disk() if rank == failing else nullcontext():
            pending = run.save(f"{tmp_path}/step-2", asynchronous=True, keep_last=1)
            run.train()
            assert isinstance(pending.exception(PATIENCE), CheckpointError)
        run.train()
        expected = "No space left on device" if rank == failing else f"rank {failing}: No space left on device"
        with pytest.raises(CheckpointError, match=f"step-2 was not saved: {expected}$"):
            raises()
    run.save(f"{tmp_path}/step-4", asynchronous=True).result(PATIENCE)
    dist.barrier()
    assert contents(tmp_path) == ["step-1", "step-4"]


# -- tensors that not all ranks have -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A router that all ranks share, and an expert that is another one on each half (on each rank) of them."""

    def __init__(self, rank: int, world_size: int, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(4, 3)
        half = world_size // 2
        torch.manual_seed(100 * seed + (rank // half if kind == "meshes" else rank))
        weight = torch.randn(6, 4)
        if kind == "meshes":
            meshes = [DeviceMesh("cpu", list(range(first, first + half))) for first in (0, half)]
            weight = distribute_tensor(weight, meshes[rank // half], [Shard(0)], src_data_rank=None)
        self.expert = nn.Parameter(weight)
        self.again = self.expert
        if kind == "marked":
            self.expert.differs_across_ranks = True


def expert_run(rank: int, world_size: int, kind: str, seed: int, steps: int) -> tuple[Any, Experts, Any]:
    strategy = Strategy.load("fp32")
    model = Experts(rank, world_size, kind, seed)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank // 2 if parameter is model.expert else 1.0)
        optimizer.step()
    return strategy, model, optimizer


def check_experts(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Each rank gets its own expert and its average back; a folder of weights has no room for all of them."""
    strategy, model, optimizer = expert_run(rank, world_size, kind, seed=0, steps=2)
    average = WeightAverage(model)
    strategy.save_checkpoint(Path(folder, "all"), model, optimizer)
    again, other, fresh = expert_run(rank, world_size, kind, seed=1, steps=1)
    restored = WeightAverage(other)
    again.load_checkpoint(Path(folder, "all"), other, fresh)
    for name, tensor in average.tensors.items():
        assert torch.equal(local_tensor(restored.tensors[name]), local_tensor(tensor)), name
    same(content(other, fresh), content(model, optimizer))
    assert not Path(folder, "weights").exists()
    with pytest.raises(CheckpointError, match=r"weights was not exported.*expert is another tensor on ranks"):
        strategy.export_model(Path(folder, "weights"), model)


def check_experts_elsewhere(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Two experts on two meshes of one rank are loaded; where their number differs the checkpoint is refused."""
    strategy, model, optimizer = expert_run(rank, world_size, kind, seed=2, steps=1)
    if kind == "marked":
        before = content(model, optimizer)
        names = rf"not in the checkpoint: expert\[{rank} of 2\]; not in the model: expert\[0 of 4\], expert\[1 of 4\]"
        with pytest.raises(CheckpointError, match=names):
            strategy.load_checkpoint(Path(folder, "all"), model, optimizer)
        same(content(model, optimizer), before)
        return
    strategy.load_checkpoint(Path(folder, "all"), model, optimizer)
    torch.manual_seed(rank)
    expected = torch.randn(6, 4)
    assert torch.allclose(local_tensor(model.expert), expected, atol=0.5)  # two steps of lr 0.1 away


@pytest.mark.parametrize("kind", ["meshes", "marked"])
def test_experts_that_differ_over_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(check_experts, 4, folder=str(tmp_path), kind=kind)
    pool.run(check_experts_elsewhere, 2, folder=str(tmp_path), kind=kind)


class Elsewhere(nn.Module):
    """A weight that only some of the ranks hold."""

    def __init__(self, ranks: list[int], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 4)
        self.whole = torch.randn(4, 4)
        self.held = nn.Parameter(
            distribute_tensor(self.whole, DeviceMesh("cpu", ranks), [Shard(0)], src_data_rank=None)
        )


@on_ranks(3)
def test_ranks_outside_the_mesh_of_a_weight(tmp_path: Path) -> None:
    strategy = Strategy.load("fp32")
    for holders in ([1], [1, 2]):
        model = Elsewhere(holders)
        strategy.export_model(tmp_path / "weights", model)
        dist.barrier()
        assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["held"], model.whole), holders
        optimizer = strategy.create_optimizer(model, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        strategy.save_checkpoint(tmp_path / "all", model, optimizer)
        other = Elsewhere(holders, seed=1)
        fresh = strategy.create_optimizer(other, lr=0.1)
        strategy.load_checkpoint(tmp_path / "all", other, fresh)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_tensor(mine), local_tensor(its))
            for key, value in optimizer.state[mine].items():
                assert torch.equal(local_tensor(value), local_tensor(fresh.state[its][key])), key


# -- averages ---------------------------------------------------------------------------------------------------------


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in tensors.items()}


def check_average(rank: int, folder: str, sharding: dict[str, Any]) -> None:
    run = Training({"sharding": sharding, "clipping": {"max_norm": None}, "optimizer_state": OVERLAP})
    average = WeightAverage(run.model, 0.9)

    def weights() -> dict[str, Tensor]:
        run.strategy._reshard(run.model)
        return {name: value for name, value in weights_of(run.strategy, run.model).items() if name in average.tensors}

    values = weights()
    expected = ReferenceAverage(values.values(), 0.9)
    for step in range(3):
        for micro in range(2):
            with run.accumulate(last=micro == 1):
                loss = run.loss(micro)
                if step and not micro:
                    average.update()
                run.optimizer.backward(loss / 2)
        run.optimizer.step()
        run.steps += 1
        if step < 2:
            expected.parameters = list(weights().values())
            expected.update()
        own = weights()
        with average.applied():
            run.evaluate()
            assert not step or not torch.equal(weights()["head.weight"], own["head.weight"])
        same_tensors(weights(), own)
    found = _whole(average.tensors)
    assert all(torch.equal(one, two) for one, two in zip(found.values(), expected.values, strict=True))
    run.strategy.save_checkpoint(folder, run.model, run.optimizer)
    if rank == 0:
        torch.save(found, f"{folder}.pt")


def check_loaded(folder: str, values: dict[str, Any]) -> None:
    strategy = Strategy.load(values)
    model = strategy.prepare_model(TinyTransformer())
    average = WeightAverage(model)
    strategy.load_checkpoint(folder, model)
    same_tensors(_whole(average.tensors), torch.load(f"{folder}.pt", map_location=strategy.device))


def test_the_average_of_shards(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_average, 2, folder=str(tmp_path / "fsdp2"), sharding=FSDP2)
    pool.run(check_average, 2, folder=str(tmp_path / "ddp"), sharding=DDP)
    pool.run(check_loaded, 2, folder=str(tmp_path / "ddp"), values={"sharding": {"kind": "fsdp2"}})
    pool.run(check_loaded, 1, folder=str(tmp_path / "fsdp2"), values={"sharding": {"kind": "single"}})
