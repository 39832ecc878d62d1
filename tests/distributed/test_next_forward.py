"""Updates that finish during the next forward, on several ranks: each gathers and receives what is up to date."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import lightstep
from lightstep.distributed import local_tensor
from lightstep.optimizer import queue
from tests.distributed.models import Block, TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of
from tests.distributed.test_exactness import OWN_BUCKETS
from tests.reference.pair import FP16_SCALE
from tests.unit.test_stream import random_delays, random_sleeps

DEFERRED = {"backend": "stream", "update": "next_forward", "ring_mib": 0.01}
CLIPPING = {"max_norm": 0.5}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"kind": "fsdp2"}),
    "fsdp2-kept-gathered": (2, {"kind": "fsdp2", "reshard_after_forward": False}),
    "fsdp2-checkpointed": (2, {"kind": "fsdp2", "activation_checkpointing": True}),
    "fsdp2-named-units": (2, {"kind": "fsdp2", "wrap": ["Block", "embed", "head"]}),
    "ddp": (2, {"kind": "ddp", "bucket_mib": OWN_BUCKETS, "find_unused_parameters": True}),
    "hsdp": (4, {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}),
    "copies": (2, {"kind": "fsdp2", "mesh": {"replicate": 2, "shard": 1}}),
}

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"parameters": "bfloat16"},
    "bf16-reduced-in-bf16": {"parameters": "bfloat16", "reduce": "parameters"},
    "fp16": {"parameters": "float16", "loss_scale": FP16_SCALE},
    "fp32": {"parameters": "float32"},
}

# -- what the ranks do


class Skipping(TinyTransformer):
    """Every second forward leaves out the block in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for block in list(self.blocks)[:: 2 - self.calls % 2]:
            hidden = block(hidden)
        return self.head(hidden)


class Training:
    """A tiny transformer under one strategy; batches depend on rank and step."""

    def __init__(
        self, rank: int, world_size: int, values: dict[str, Any], make: type[TinyTransformer] = TinyTransformer
    ) -> None:
        self.rank, self.device = rank, device_of(rank, world_size)
        self.strategy = lightstep.Strategy.load(values)
        torch.manual_seed(0)
        self.model = self.prepare(make())
        groups = self.inner.split()
        self.optimizer: Any = self.strategy.create_optimizer(
            self.model, torch.optim.AdamW, param_groups=groups, lr=1e-2
        )
        self.steps = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        return self.strategy.prepare_model(model)

    @property
    def inner(self) -> nn.Module:
        return self.strategy.unwrap_model(self.model)

    def step(self) -> list[float]:
        """Of one micro-batch, and of two."""
        losses = []
        more = self.steps % 2
        for micro in range(1 + more):
            with self.strategy.accumulate(self.model, last=micro == more):
                loss = loss_of(self.model, self.steps, micro, self.rank, self.device) / 2
                losses.append(loss.item())
                self.optimizer.backward(loss)
        self.optimizer.step()
        self.steps += 1
        return losses

    def evaluate(self) -> float:
        with torch.no_grad():
            return loss_of(self.model, 0, 0, self.rank, self.device).item()

    def snapshot(self) -> dict[str, Tensor]:
        """This rank's weights and state by name."""
        found = {}
        self.optimizer.synchronize()
        for name, parameter in self.inner.named_parameters():
            found[name] = local_tensor(parameter).detach().cpu().clone()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = local_tensor(torch.as_tensor(value)).cpu().clone()
        return found

    def delay(self, seed: int, longest: float = 2e-3) -> None:
        """Slow lanes: threads that sleep, on a GPU sleep kernels in the streams."""
        lanes = self.optimizer._backend.lanes
        if self.device.type == "cpu":
            random_delays(lanes, seed, longest)
        else:
            random_sleeps(lanes, seed, int(longest * 2e9))


def prefetch_forward(model: nn.Module) -> None:
    """Each block's shards are gathered while the block before it runs, and those of the one behind it too."""
    for first, second in pairwise(model.blocks):
        first.set_modules_to_forward_prefetch([second])


def check_same_bits(
    rank: int,
    world_size: int,
    sharding: dict[str, Any],
    precision: dict[str, Any],
    compute: str,
    seed: int,
    prefetch: bool = False,
    make: type[TinyTransformer] = TinyTransformer,
    state: dict[str, Any] = DEFERRED,
    clipping: dict[str, Any] = CLIPPING,
) -> None:
    """Losses of forwards, and everything at the end, equal those of updates in ``step()``; lanes are slow."""
    if compute != "parameters":
        sharding = {**sharding, "compute": compute}
    values = {"sharding": sharding, "precision": precision, "clipping": clipping}
    resident = Training(rank, world_size, {**values, "optimizer_state": {"backend": "resident"}}, make)
    expected = [[resident.step() for _ in range(2)], resident.evaluate(), resident.step(), resident.snapshot()]
    tested = Training(rank, world_size, {**values, "optimizer_state": state}, make)
    if prefetch:
        prefetch_forward(tested.inner)
    losses = [tested.step()]
    if state["backend"] == "stream":
        tested.delay(seed * world_size + rank)
    with mock.patch.object(queue, "SUBMIT_IN_STEP", (1, 48)[seed % 2]):
        losses += [tested.step()]
        found = [losses, tested.evaluate(), tested.step(), tested.snapshot()]
    assert found[:3] == expected[:3], f"seed {seed}: {found[:3]}, expected {expected[:3]}"
    different = [key for key, value in expected[3].items() if not torch.equal(found[3][key], value)]
    assert found[3].keys() == expected[3].keys() and not different, f"seed {seed}: {different}"
    tested.optimizer.close()


# -- tests


def test_gathering_ahead_waits_for_its_own_shards(pool: Pool) -> None:
    settings = {"sharding": {"kind": "fsdp2"}, "precision": PRECISIONS["bf16"], "compute": "parameters"}
    pool.run(check_same_bits, 2, **settings, seed=2, prefetch=True)


def check_all_awaited(rank: int, world_size: int, sharding: dict[str, Any], update: str) -> None:
    """In the middle of a forward somebody waits for all updates; nothing waits for the device between steps."""
    values = {"sharding": sharding, "clipping": CLIPPING}
    found = []
    for state in ({"backend": "resident"}, {**DEFERRED, "update": update}):
        training = Training(rank, world_size, {**values, "optimizer_state": state})
        deferred = "update" in state
        if deferred and "mesh" not in sharding:  # replicas that send weights wait for the end of the step anyway
            training.inner.blocks[0].register_forward_pre_hook(lambda *_, of=training: of.optimizer.wait_for_update())
        losses = []
        for step in range(4):
            loss = loss_of(training.model, step, 0, rank, training.device)
            losses.append(loss.detach())
            training.optimizer.backward(loss)
            training.optimizer.step()
            if deferred and step == 0:
                training.delay(rank, 2e-2)
        found.append([[loss.item() for loss in losses], training.snapshot()])
    assert found[0][0] == found[1][0]
    different = [key for key, value in found[0][1].items() if not torch.equal(found[1][1][key], value)]
    assert found[0][1].keys() == found[1][1].keys() and not different, different


@pytest.mark.parametrize(("layout", "update"), [("fsdp2", "next_forward"), ("fsdp2", "overlap"), ("hsdp", "overlap")])
def test_gathering_after_somebody_has_waited_for_everything(pool: Pool, layout: str, update: str) -> None:
    world_size, sharding = LAYOUTS[layout]
    pool.run(check_all_awaited, world_size, sharding=sharding, update=update)


def check_several_meshes(rank: int, world_size: int) -> None:
    """Blocks with experts on a mesh of their own inside the same ``fully_shard``: collectives for each mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "experts"))
    whole = FSDPMeshInfo(dist.init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    experts = FSDPMeshInfo(mesh["experts"], shard_mesh_dim=0)
    found = []
    for state in ({"backend": "resident"}, *({**DEFERRED, "update": update} for update in ("next_forward", "overlap"))):
        torch.manual_seed(0)
        model = TinyTransformer().bfloat16()
        apart = {block.down.weight for block in model.blocks}
        for module in (*model.blocks, model):
            fully_shard(
                module,
                mesh=whole.mesh,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
                shard_placement_fn=lambda p, own=apart: ShardPlacementResult(Shard(0), experts if p in own else whole),
            )
        prefetch_forward(model)
        strategy = lightstep.Strategy.load({"optimizer_state": state, "clipping": {"max_norm": 1e6}})
        optimizer: Any = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
        losses = []
        for step in range(3):
            loss = loss_of(model, step, 0, rank, torch.device("cpu"))
            losses.append(loss.item())
            optimizer.backward(loss)
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
            optimizer.step()
            if state["backend"] == "stream" and step == 0:
                random_delays(optimizer._backend.lanes, rank + 4 * len(found), 5e-3)
        optimizer.synchronize()
        found.append((losses, [local_tensor(parameter).clone() for parameter in model.parameters()]))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(map(torch.equal, weights, found[0][1]))


def test_experts_on_a_mesh_of_their_own(pool: Pool) -> None:
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("this torch shards a module over one mesh")
    pool.run(check_several_meshes, 4)


def check_readers(rank: int, world_size: int, sharding: dict[str, Any], folder: Path) -> None:
    """Whoever reads between or right after steps sees what an optimizer without deferred updates shows.

    Those who read weights alone: ``test_reads_while_updates_are_deferred``.
    """
    values = {"sharding": sharding, "precision": {"parameters": "bfloat16"}, "clipping": {"max_norm": 0.5}}
    seen: list[dict[str, Any]] = []
    for name, state in {"at_step": {"backend": "stream", "ring_mib": 0.01}, "next_forward": DEFERRED}.items():
        training = Training(rank, world_size, {**values, "optimizer_state": state})
        training.step()
        training.delay(rank)
        found: dict[str, Any] = {}
        for number, read in enumerate((_optimizer_state, _saved, _resumed)):
            training.step()
            found[read.__name__] = read(training, folder / name / str(number))
        found["end"] = training.snapshot()
        seen.append(found)
    assert same(*seen)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(local_tensor(one), local_tensor(other)) if isinstance(one, Tensor) else bool(one == other)


def _optimizer_state(training: Training, folder: Path) -> Any:
    return training.optimizer.state_dict()


def _saved(training: Training, folder: Path) -> Any:
    training.strategy.save_checkpoint(folder, training.model, training.optimizer)
    training.step()
    training.strategy.load_checkpoint(folder, training.model, training.optimizer)
    return training.evaluate()


def _resumed(training: Training, folder: Path) -> Any:
    """A new model and optimizer go on from a checkpoint that was written with updates under way."""
    training.strategy.save_checkpoint(folder, training.model, training.optimizer)
    world_size = training.strategy.world_size
    again = Training(training.rank, world_size, training.strategy.config.model_dump())
    again.strategy.load_checkpoint(folder, again.model, again.optimizer)
    again.steps = training.steps
    return [again.step(), again.snapshot()]


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_readers_between_steps(pool: Pool, layout: str, tmp_path: Path) -> None:
    world_size, sharding = LAYOUTS[layout]
    pool.run(check_readers, world_size, sharding=sharding, folder=tmp_path)


def check_two_optimizers(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """An actor and a critic: the weights of both are sent while both go on, in an order of each rank's own."""
    values = {"sharding": sharding, "clipping": CLIPPING}
    expected = Training(rank, world_size, values)
    losses = [expected.step() for _ in range(3)]
    pair = [Training(rank, world_size, {**values, "optimizer_state": DEFERRED}) for _ in range(2)]
    found = [[training.step() for training in pair]]
    for number, training in enumerate(pair):
        training.delay(100 + world_size * number + rank, 5e-3)
    found += [[training.step() for training in pair] for _ in range(2)]
    assert [list(each) for each in zip(*found, strict=True)] == [losses, losses]
    for training in pair:
        training.optimizer.close()


def test_two_optimizers_at_once(pool: Pool) -> None:
    world_size, sharding = LAYOUTS["hsdp"]
    pool.run(check_two_optimizers, world_size, sharding=sharding)


class Deep(TinyTransformer):
    """More blocks than a step submits units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(queue.SUBMIT_IN_STEP + 4))


@mock.patch.multiple(queue, SUBMIT_IN_STEP=2, SUBMIT_AHEAD=1)
def check_one_alone(rank: int, world_size: int, sharding: dict[str, Any], does: str) -> None:
    """What one rank does by itself waits for no work of others that nobody has begun."""
    runs = [Training(rank, world_size, {"sharding": sharding, "optimizer_state": s}, Deep) for s in ({}, DEFERRED)]
    for run in runs:
        run.step()
        run.step()
    expected, tested = runs
    assert tested.optimizer.has_deferred_updates
    if does == "reads":
        if rank == 0:
            tested.inner.state_dict()
        dist.barrier()
    else:
        gc.disable()  # else the collector may be at work in a lane meanwhile
        cycle: list[Any] = [tested.optimizer]
        cycle.append(cycle)
        tested.optimizer._backend.lanes.synchronize()
        del tested.optimizer, cycle
        if rank == 0:
            gc.collect()
        dist.barrier()
        gc.enable()
        gc.collect()
    for (name, one), other in zip(tested.inner.named_parameters(), expected.inner.parameters(), strict=True):
        assert torch.equal(local_tensor(one), local_tensor(other)), name


@pytest.mark.parametrize(("layout", "does"), [("ddp", "reads"), ("fsdp2", "reads"), ("copies", "collects")])
def test_one_rank_alone(pool: Pool, layout: str, does: str) -> None:
    world_size, sharding = LAYOUTS[layout]
    pool.run(check_one_alone, world_size, sharding=sharding, does=does)
