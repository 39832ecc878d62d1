"""Checkpoints saved on N ranks and loaded on M, between FSDP2, HSDP, DDP and one device: state bit for bit."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import lightstep
from lightstep import CheckpointError, WeightAverage
from lightstep.checkpoint import export_model, load, load_checkpoint, save, save_checkpoint
from lightstep.distributed import local_tensor
from tests.checkpoint_runs import OLD, Adapted, Tied, Unloadable, contents, limited_file_size, same
from tests.distributed.models import TinyTransformer, loss_of, tiny_llama
from tests.distributed.ranks import Pool
from tests.distributed.sharding_runs import full, same_weights, weights_of
from tests.patience import PATIENCE

Content = dict[str, dict[str, Tensor]]

FP16 = {"parameters": "float16", "loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "growth_interval": 2}}

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2-1": (1, {"kind": "fsdp2"}, {}),
    "fsdp2-2": (2, {"kind": "fsdp2"}, {"backend": "stream"}),
    "fsdp2-5": (5, {"kind": "fsdp2"}, {}),
    "hsdp-4": (4, {"kind": "fsdp2", "mesh": {"replicate": 2}}, {"backend": "bulk"}),
    "ddp-2": (2, {"kind": "ddp", "find_unused_parameters": True}, {}),
    "single": (1, {"kind": "single"}, {"backend": "stream"}),
}
"""World size, sharding, and where the state lives."""


class Run:
    """One model, optimizer and scheduler under one layout."""

    def __init__(self, layout: str, seed: int) -> None:
        _, sharding, state = LAYOUTS[layout]
        sections = {"sharding": sharding, "precision": FP16, "optimizer_state": state, "clipping": {"max_norm": 0.5}}
        self.strategy = lightstep.Strategy.load(sections)
        torch.manual_seed(seed)
        self.model = self.strategy.prepare_model(TinyTransformer())
        groups = self.strategy.unwrap_model(self.model).split()
        self.optimizer = self.strategy.create_optimizer(self.model, param_groups=groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=10)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.optimizer.backward(loss_of(self.model, step, 0, self.strategy.rank, self.strategy.device))
            if self.optimizer.step():
                self.scheduler.step()

    def content(self) -> Content:
        """Weights, masters and state of every parameter, whole, on the CPU."""
        self.optimizer.synchronize()
        found: Content = {}
        for name, parameter in self.strategy.unwrap_model(self.model).named_parameters():
            entries = dict(self.optimizer.state[parameter]) if parameter in self.optimizer.state else {}
            found[name] = {
                key: (full(value).cpu().clone() if isinstance(value, Tensor) else torch.tensor(value))
                for key, value in {"weight": parameter, **entries}.items()
            }
        return found

    def settings(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        scheduler = {k: v for k, v in self.scheduler.state_dict().items() if not k.startswith("_")}
        return {"groups": groups, "scheduler": scheduler, "loss_scale": self.optimizer.loss_scale.state_dict()}

    def save(self, folder: Path) -> None:
        self.strategy.save_checkpoint(folder, self.model, self.optimizer, self.scheduler, {"epoch": 3})

    def load(self, folder: Path) -> dict[str, Any]:
        return self.strategy.load_checkpoint(folder, self.model, self.optimizer, self.scheduler)


def check_save(rank: int, world_size: int, folder: str, layout: str) -> None:
    run = Run(layout, seed=0)
    run.train(3)
    run.save(Path(folder, layout))
    content, settings = run.content(), run.settings()
    torch.save(torch.rand(3), Path(folder, f"{layout}-{rank}.rng"))
    run.train(3)
    after = run.content()
    if rank == 0:
        torch.save({"content": content, "settings": settings, "after": after}, Path(folder, f"{layout}.pt"))


def check_load(rank: int, world_size: int, folder: str, layout: str, saved_by: list[str]) -> None:
    run = Run(layout, seed=1 + rank)
    for other in saved_by:
        expected = torch.load(Path(folder, f"{other}.pt"), weights_only=False)
        assert run.load(Path(folder, other)) == {"epoch": 3}, other
        check_content(f"{other} loaded by {layout}", run.content(), expected["content"])
        assert run.settings() == expected["settings"], other
        drawn = Path(folder, f"{other}-{rank}.rng")
        if drawn.exists():
            assert torch.equal(torch.rand(3), torch.load(drawn)), f"{other}: random numbers of rank {rank}"
        run.train(3 if other == layout else 1)
        if other == layout:
            check_content(f"{other} continued", run.content(), expected["after"])
        assert all(parameter.grad is None for parameter in run.model.parameters())


def check_content(where: str, found: Content, expected: Content) -> None:
    assert found.keys() == expected.keys()
    for name, entries in expected.items():
        assert found[name].keys() == entries.keys(), f"{where}: {name} has {sorted(found[name])}, not {sorted(entries)}"
        for key, value in entries.items():
            assert found[name][key].dtype == value.dtype, f"{where}: {key} of {name}"
            assert torch.equal(found[name][key], value), f"{where}: {key} of {name}"


@pytest.fixture(scope="module")
def checkpoints(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, (world_size, sharding, _) in LAYOUTS.items():
        pool.run(check_save, world_size, group=sharding["kind"] != "single", folder=str(folder), layout=layout)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_each_others_checkpoints(pool: Pool, checkpoints: Path, layout: str) -> None:
    """Each its own, and continues as the run did; that of one process, and those of two others."""
    world_size, sharding, _ = LAYOUTS[layout]
    group = sharding["kind"] != "single"
    names, number = list(LAYOUTS), list(LAYOUTS).index(layout)
    others = {layout: None, "single": None, **{names[(number + step) % len(names)]: None for step in (1, 3)}}
    arguments = {"folder": str(checkpoints), "layout": layout, "saved_by": list(others)}
    pool.run(check_load, world_size, group=group, **arguments)


def check_unfinished(rank: int, world_size: int, folder: str, layout: str) -> None:
    """A load drops gradients of an unfinished step, those inside FSDP2 too."""
    run = Run(layout, seed=0)
    run.train(2)
    run.save(Path(folder, layout))
    ends = []
    for last in (None, True, False):
        if last is not None:
            with run.strategy.accumulate(run.model, last=last):
                run.optimizer.backward(loss_of(run.model, 9, 0, rank, run.strategy.device))
        run.load(Path(folder, layout))
        run.train(2)
        ends.append(run.content())
        run.load(Path(folder, layout))
    for end in ends[1:]:
        check_content(layout, end, ends[0])


@pytest.mark.parametrize("layout", ["fsdp2-2", "ddp-2"])
def test_a_load_in_the_middle_of_a_step(pool: Pool, tmp_path: Path, layout: str) -> None:
    pool.run(check_unfinished, LAYOUTS[layout][0], folder=str(tmp_path), layout=layout)


def check_extra(rank: int, world_size: int, folder: str) -> list[str]:
    """The warnings of two saves: with the same ``extra`` on all ranks, and with another one on each."""
    said: list[str] = []
    with mock.patch.object(save.logger, "warning", lambda text, *values: said.append(text % values)):
        run = Run("fsdp2-2", seed=0)
        for number in (0, rank):
            extra = {"epoch": 3, "order": torch.arange(4), "place": number}
            run.strategy.save_checkpoint(Path(folder, "extra"), run.model, run.optimizer, extra=extra)
            said.append("saved")
    return said


def test_extra_that_differs_over_ranks_is_named(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(check_extra, 2, folder=str(tmp_path))
    assert [text.split(",")[0] for text in first] == ["saved", "extra differs over the ranks", "saved"]
    assert second == ["saved", "saved"]


def check_model_only(rank: int, world_size: int, folder: str) -> None:
    """Loading only the weights rebuilds the masters from them."""
    run = Run("fsdp2-2", seed=0)
    run.train(2)
    run.strategy.save_checkpoint(Path(folder, "model"), run.model)
    other = Run("fsdp2-2", seed=5)
    other.train(2)
    other.strategy.load_checkpoint(Path(folder, "model"), other.model)
    same_weights(weights_of(other.strategy, other.model), weights_of(run.strategy, run.model))
    before = {p: local_tensor(p).float().clone() for p in other.model.parameters()}
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    other.train(1)
    for parameter in other.model.parameters():
        if parameter in other.optimizer.state:
            assert torch.equal(
                local_tensor(other.optimizer.state[parameter]["master"]).to(before[parameter].device), before[parameter]
            )


def test_model_only_load_refreshes_the_masters(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_model_only, 2, folder=str(tmp_path))


def check_other_shapes(rank: int, world_size: int, folder: str) -> None:
    run = Run("fsdp2-2", seed=0)
    run.train(1)
    run.save(Path(folder, "narrow"))
    wide = run.strategy.prepare_model(TinyTransformer(width=9))
    before = weights_of(run.strategy, wide)
    with pytest.raises(CheckpointError, match="shape"):
        run.strategy.load_checkpoint(Path(folder, "narrow"), wide)
    same_weights(weights_of(run.strategy, wide), before)


def test_checkpoint_of_other_shapes(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_other_shapes, 2, folder=str(tmp_path))


def check_plain_torch(rank: int, world_size: int, folder: str) -> None:
    """A plain AdamW's state dict of one device, loaded by sharded and replicated optimizers."""
    saved = torch.load(Path(folder, "adamw.pt"))
    strategy = lightstep.Strategy.load({"sharding": {"kind": "ddp", "find_unused_parameters": True}})
    torch.manual_seed(0)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, param_groups=list(model.parameters()), lr=1.0)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for index, parameter in enumerate(model.parameters()):
        entries = saved["state"].get(index, {})
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameter][key]).cpu(), value), key


def test_plain_torch_state_dict(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0, 0, 0, torch.device("cpu")).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "adamw.pt")
    pool.run(check_plain_torch, 2, folder=str(tmp_path))


def check_export(rank: int, world_size: int, folder: str, sharding: dict[str, Any]) -> None:
    """One folder that ``from_pretrained`` reads, equal to the model."""
    strategy = lightstep.Strategy.load({"sharding": sharding})
    torch.manual_seed(0)
    model = strategy.prepare_model(tiny_llama())
    strategy.export_model(Path(folder, "out"), model)
    expected = {name: value.cpu() for name, value in weights_of(strategy, model).items()}
    dist.barrier()
    read: nn.Module = type(tiny_llama()).from_pretrained(Path(folder, "out"), dtype="auto")
    same_weights({name: p.detach() for name, p in read.named_parameters()}, expected)
    assert json.loads(Path(folder, "out", "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("sharding", [{"kind": "fsdp2"}, {"kind": "ddp"}], ids=["fsdp2", "ddp"])
def test_export(pool: Pool, tmp_path: Path, sharding: dict[str, Any]) -> None:
    pool.run(check_export, 2, folder=str(tmp_path), sharding=sharding)


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

    def content(self, optimizer: Any) -> Content:
        entries = {
            name: {"weight": parameter.detach(), **optimizer.state[parameter]}
            for name, parameter in self.named_parameters()
        }
        return {
            name: {key: local_tensor(value).clone() for key, value in found.items()} for name, found in entries.items()
        }


def expert_run(rank: int, world_size: int, kind: str, seed: int, steps: int) -> tuple[Any, Experts, Any]:
    strategy = lightstep.Strategy.load("fp32")
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
    check_content(f"{kind} on rank {rank}", other.content(fresh), model.content(optimizer))
    assert not Path(folder, "weights").exists()
    with pytest.raises(CheckpointError, match=r"weights was not exported.*expert is another tensor on ranks"):
        strategy.export_model(Path(folder, "weights"), model)


def check_experts_elsewhere(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Two experts on two meshes of one rank are loaded; where their number differs the checkpoint is refused."""
    strategy, model, optimizer = expert_run(rank, world_size, kind, seed=2, steps=1)
    if kind == "marked":
        before = model.content(optimizer)
        names = rf"not in the checkpoint: expert\[{rank} of 2\]; not in the model: expert\[0 of 4\], expert\[1 of 4\]"
        with pytest.raises(CheckpointError, match=names):
            strategy.load_checkpoint(Path(folder, "all"), model, optimizer)
        check_content("refused", model.content(optimizer), before)
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


def check_ranks_without_a_part(rank: int, world_size: int, folder: str) -> None:
    strategy = lightstep.Strategy.load("fp32")
    for holders in ([0], [1], [1, 2]):
        model = Elsewhere(holders)
        strategy.export_model(Path(folder, "weights"), model)
        dist.barrier()
        assert torch.equal(load_file(Path(folder, "weights", "model.safetensors"))["held"], model.whole), holders
        optimizer = strategy.create_optimizer(model, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        strategy.save_checkpoint(Path(folder, "all"), model, optimizer)
        other = Elsewhere(holders, seed=1)
        fresh = strategy.create_optimizer(other, lr=0.1)
        strategy.load_checkpoint(Path(folder, "all"), other, fresh)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_tensor(mine), local_tensor(its))
            for key, value in optimizer.state[mine].items():
                assert torch.equal(local_tensor(value), local_tensor(fresh.state[its][key])), key


def test_ranks_outside_the_mesh_of_a_weight(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_ranks_without_a_part, 3, folder=str(tmp_path))


def check_full_disk(rank: int, world_size: int, root: str) -> None:
    """A sharded model saved by two ranks; then the second one's disk is full, and both raise."""
    torch.manual_seed(3)
    model, mesh = Tied(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    folder = Path(root) / "checkpoints" / "step"
    random.seed(rank)
    save_checkpoint(folder, model, optimizer)
    drawn = random.random()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.embed.weight.zero_()
    full = limited_file_size(100 if rank == 1 else resource.RLIM_INFINITY)
    with full, pytest.raises(CheckpointError, match="File too large" if rank == 1 else "rank 1: File too large"):
        save_checkpoint(folder, model, optimizer)
    with pytest.raises(TypeError, match=r"step was not saved: .*extra\['a'\] is a"):
        save_checkpoint(folder, model, optimizer, extra={"a": Unloadable()} if rank == 1 else {})
    dist.barrier()
    assert contents(folder.parent) == ["step"]
    load_checkpoint(folder, model, optimizer)
    assert random.random() == drawn
    assert all(torch.equal(value.to_local(), before[name].to_local()) for name, value in model.state_dict().items())
    export_model(Path(root) / "export", model)


def test_two_ranks_save_together_and_fail_together(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_full_disk, 2, cpu=True, root=str(tmp_path))
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    random.seed(5)
    load_checkpoint(tmp_path / "checkpoints" / "step", model, optimizer)
    torch.manual_seed(3)
    expected = Tied()
    reference = torch.optim.AdamW(expected.parameters(), lr=0.1)
    expected(torch.arange(5)).square().sum().backward()
    reference.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())
    random.seed(0)
    assert random.random() == pytest.approx(0.8444218515250481), "rank 0 started from its own seed"


# -- what several ranks promise each other ----------------------------------------------------------------------------


def made(module: nn.Module, steps: int, width: int) -> tuple[Any, nn.Module, Any]:
    strategy = lightstep.Strategy.load({"sharding": {"kind": "fsdp2"}, "optimizer_state": {"backend": "stream"}})
    model = strategy.prepare_model(module)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        rows = torch.randn(4, width, dtype=torch.bfloat16, device=strategy.device)
        optimizer.backward(model(rows).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


def content(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    optimizer.synchronize()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter).detach().cpu().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = full(torch.as_tensor(value)).cpu().clone()
    return found


def check_old(rank: int, world_size: int) -> None:
    strategy, model, optimizer = made(nn.Linear(5, 3), 1, 5)
    for name in ("stream", "fsdp2-2"):
        assert strategy.load_checkpoint(OLD / name, model, optimizer) == {"epoch": 3}
        same(content(model, optimizer), load_file(OLD / f"{name}.safetensors"))


def test_checkpoints_of_the_previous_version_load_to_the_same_bits(pool: Pool) -> None:
    pool.run(check_old, 2)


def check_replaced(rank: int, world_size: int, folder: str) -> None:
    """The checkpoint is replaced after one rank has read it: all ranks are told to load again, and get the new one."""
    path = Path(folder, "step")
    strategy, model, optimizer = made(nn.Linear(5, 3), 1, 5)
    strategy.save_checkpoint(path, model, optimizer)
    newer, model2, optimizer2 = made(nn.Linear(5, 3), 3, 5)
    expected, read, calls = content(model2, optimizer2), load.read_tensors, []
    newer.save_checkpoint(Path(folder, "newer"), model2, optimizer2)

    def replacing(*arguments: Any) -> None:
        calls.append(arguments)
        read(*arguments)
        if len(calls) == moments[0] and rank == 1:
            path.rename(path.with_name("aside"))
            Path(folder, "newer").rename(path)

    moments = [1, 2, 3]  # after which reading it is replaced
    while moments:
        other, model3, optimizer3 = made(nn.Linear(5, 3), 0, 5)
        load.read_tensors = replacing
        try:
            with pytest.raises(CheckpointError, match="step was replaced or removed while it was read; load again"):
                other.load_checkpoint(path, model3, optimizer3)
        finally:
            load.read_tensors = read
        other.load_checkpoint(path, model3, optimizer3)
        same(content(model3, optimizer3), expected)
        dist.barrier()
        if rank == 1:
            path.rename(Path(folder, "newer"))
            path.with_name("aside").rename(path)
        calls.clear()
        moments.pop(0)
        dist.barrier()


def test_all_ranks_load_one_save(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_replaced, 2, folder=str(tmp_path))


def check_failing(rank: int, world_size: int, folder: str) -> None:
    """One rank cannot read its part: no rank has changed anything, or all of them are marked."""
    strategy, model, optimizer = made(nn.Linear(5, 3), 3, 5)
    strategy.save_checkpoint(Path(folder, "a"), model, optimizer)
    other, model2, optimizer2 = made(nn.Linear(5, 3), 1, 5)
    before, read, calls = content(model2, optimizer2), load.read_tensors, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if rank == 1 and len(calls) == when:
            raise OSError(5, "Input/output error")
        read(*arguments)

    for when in (1, 3):
        calls.clear()
        load.read_tensors = failing
        try:
            with pytest.raises(CheckpointError, match="Input/output error"):
                other.load_checkpoint(Path(folder, "a"), model2, optimizer2)
        finally:
            load.read_tensors = read
        if when == 1:
            same(content(model2, optimizer2), before)
            other.save_checkpoint(Path(folder, "b"), model2, optimizer2)
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        other.save_checkpoint(Path(folder, "b"), model2, optimizer2)
    other.load_checkpoint(Path(folder, "a"), model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))
    other.save_checkpoint(Path(folder, "b"), model2, optimizer2)


def test_a_rank_that_cannot_read_stops_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_failing, 2, folder=str(tmp_path))


def check_adapter(rank: int, world_size: int, folder: str) -> None:
    strategy, model, optimizer = made(Adapted(), 3, 6)
    path = Path(folder, "a")
    strategy.save_checkpoint(path, model, optimizer)
    dist.barrier()
    names = {key.split(".")[1] for key in json.loads((path / "tensors.json").read_text())["tensors"]}
    assert names == {"adapter", "norm"}
    other, model2, optimizer2 = made(Adapted(), 1, 6)
    other.load_checkpoint(path, model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))


def test_an_adapter_without_its_base(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_adapter, 2, folder=str(tmp_path))


def check_damage_and_urls(rank: int, world_size: int, folder: str) -> None:
    """One manifest has the checksums of both ranks; whichever finds damage, all raise, and the first advises."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    for place in (folder, f"file://{folder}/at-a-url"):
        for number in (1, 2, 3):
            strategy.save_checkpoint(f"{place}/step-{number}", model, optimizer, keep_last=2, extra={"at": number})
        expected = content(model, optimizer)
        other, model2, optimizer2 = made(nn.Linear(6, 4), 1, 6)
        assert other.load_checkpoint(f"{place}/step-3", model2, optimizer2) == {"at": 3}
        same(content(model2, optimizer2), expected)
        written = sorted(Path(place.removeprefix("file://")).glob("step-3/**/*.distcp"))
        assert [file.name.split("_")[2] for file in written] == ["0", "1"], "each rank writes"
        assert {path.name for path in Path(place.removeprefix("file://")).glob("step-*")} == {"step-2", "step-3"}
        dist.barrier()
        if rank == 0:
            data = bytearray(written[1].read_bytes())
            data[len(data) // 2] ^= 1
            written[1].write_bytes(bytes(data))
        dist.barrier()
        before = content(model2, optimizer2)
        with pytest.raises(CheckpointError) as raised:
            other.load_checkpoint(f"{place}/step-3", model2, optimizer2)
        assert "__1_0_0.distcp is damaged" in str(raised.value)
        assert (f"{place}/step-2 is undamaged: load that one" in str(raised.value)) == (rank == 0)
        same(content(model2, optimizer2), before)
        dist.barrier()


def test_damage_is_told_to_all_ranks_and_a_url_is_written_by_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_damage_and_urls, 2, folder=str(tmp_path))


def check_asynchronous(rank: int, world_size: int, folder: str) -> None:
    """Both ranks train on, with collectives of their own, while threads of both write what was there."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    expected = content(model, optimizer)
    for number in (1, 2):
        pending = strategy.save_checkpoint(
            f"{folder}/step-{number}", model, optimizer, asynchronous=True, keep_last=1, extra={"at": number}
        )
        for step in range(3 if number == 1 else 0):
            torch.manual_seed(step)
            rows = torch.randn(4, 6, dtype=torch.bfloat16, device=strategy.device)
            optimizer.backward(model(rows).float().square().sum())
            optimizer.step()
        if number == 1:
            pending.result(PATIENCE)
            other, model2, optimizer2 = made(nn.Linear(6, 4), 1, 6)
            assert other.load_checkpoint(f"{folder}/step-1", model2, optimizer2) == {"at": 1}
            same(content(model2, optimizer2), expected)
    assert strategy.save_checkpoint(f"{folder}/step-3", model, optimizer, keep_last=1) is None
    assert pending.done()
    dist.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["step-3"]


def test_two_ranks_write_while_they_train(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_asynchronous, 2, folder=str(tmp_path))


def check_asynchronous_error(rank: int, world_size: int, folder: str, failing: int) -> None:
    """The writer of one rank fails: no rank's step raises, so none waits for another; the next save of each does."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    strategy.save_checkpoint(f"{folder}/step-1", model, optimizer)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def train() -> None:
        optimizer.backward(model(torch.ones(4, 6, dtype=torch.bfloat16, device=strategy.device)).float().sum())
        optimizer.step()

    expected = "No space left on device" if rank == failing else f"rank {failing}: No space left on device"
    for raises in (lambda: strategy.save_checkpoint(f"{folder}/step-3", model, optimizer), strategy.close):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(save, "write_tensors", fails)
            pending = strategy.save_checkpoint(f"{folder}/step-2", model, optimizer, asynchronous=True, keep_last=1)
            train()
            assert isinstance(pending.exception(PATIENCE), CheckpointError)
        train()
        with pytest.raises(CheckpointError, match=f"step-2 was not saved: {expected}$"):
            raises()
    strategy.save_checkpoint(f"{folder}/step-4", model, optimizer, asynchronous=True).result(PATIENCE)
    dist.barrier()
    assert {path.name for path in Path(folder).iterdir()} == {"step-1", "step-4"}
    dist.barrier()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_writer_is_raised_by_the_next_save_of_all_ranks(
    pool: Pool, tmp_path: Path, failing: int
) -> None:
    pool.run(check_asynchronous_error, 2, folder=str(tmp_path), failing=failing)
