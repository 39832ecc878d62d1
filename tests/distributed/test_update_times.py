"""Updates in the next forward or in backward, on several ranks with slow lanes: the bits of updates in ``step()``."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from lightstep.distributed import local_tensor
from lightstep.optimizer import queue
from lightstep.optimizer.in_backward import FinalUpdates
from lightstep.optimizer.overlap import SpeculativeUpdates
from lightstep.optimizer.unit_updater import UnitUpdater
from lightstep.state.record import Record
from lightstep.state.ring import Ring, Slot
from tests.distributed.models import CLASSES, Block, TinyTransformer
from tests.distributed.programs import Program
from tests.distributed.ranks import on_ranks
from tests.distributed.training import (
    COPIES,
    DEFERRED,
    FSDP2,
    LAYOUTS,
    OVERLAP,
    PRECISIONS,
    RESIDENT,
    STREAM,
    Training,
    assert_same_bits,
    same_tensors,
)
from tests.patience import PATIENCE

CLIPPING = {"max_norm": 0.5}
NEVER_PAUSES = mock.patch.object(SpeculativeUpdates, "_update_pause", lambda updates: setattr(updates, "_pause", 0))


OFTEN_OVERFLOWS = {"kind": "dynamic", "init_scale": 2.0**17, "growth_interval": 1}


@on_ranks(
    LAYOUTS,
    ("layout", "precision", "max_norm", "expected"),
    [
        ("fsdp2-checkpointed", PRECISIONS["bf16"], 1e6, ["commit"]),
        ("fsdp2-named-units", PRECISIONS["bf16-reduced-in-bf16"], 0.05, ["redo"]),
        ("copies", PRECISIONS["fp32"], 0.05, ["redo"]),
        ("ddp", PRECISIONS["bf16"], 1e6, []),
        ("ddp-alone", PRECISIONS["bf16"], 1e6, []),
        ("fsdp2", {"parameters": "float16", "loss_scale": OFTEN_OVERFLOWS}, 1e6, ["commit", "drop"]),
        ("copies", {"parameters": "float16", "loss_scale": OFTEN_OVERFLOWS}, 1e6, ["commit", "drop"]),
    ],
)
def test_what_becomes_of_updates(
    sharding: dict[str, Any], precision: dict[str, Any], max_norm: float, expected: list[str]
) -> None:
    """DDP reduces at the end of backward: nothing is tried, and on one rank neither."""
    found: Counter[str] = Counter()
    apply_verdict, roll_back = SpeculativeUpdates._apply_verdict, SpeculativeUpdates._roll_back

    def applied(self: SpeculativeUpdates, speculation: Any, update: Any) -> None:
        found[self._verdict.read()] += bool(speculation.submitted)
        apply_verdict(self, speculation, update)

    def rolled_back(self: SpeculativeUpdates, reason: str) -> Any:
        found["rolled back"] += bool(self.speculation is not None and self.speculation.submitted)
        return roll_back(self, reason)

    patches: Any = {"_apply_verdict": applied, "_roll_back": rolled_back}
    with NEVER_PAUSES, mock.patch.multiple(SpeculativeUpdates, **patches):
        case = {"optimizer_state": OVERLAP, "precision": precision, "clipping": {"max_norm": max_norm}}
        Program(sharding, case, "micro step micro step evaluate micro step").run()
    assert [verdict for verdict, number in sorted(found.items()) if number] == expected, found


# -- who waits for what


@on_ranks(
    LAYOUTS,
    ("layout", "update"),
    [("fsdp2", "next_forward"), ("fsdp2", "overlap"), ("hsdp", "overlap")],
)
def test_gathering_after_somebody_has_waited_for_everything(rank: int, sharding: dict[str, Any], update: str) -> None:
    """In the middle of a forward somebody waits for all updates; nothing waits for the device between steps."""
    found = []
    for state in (RESIDENT, {**DEFERRED, "update": update}):
        training = Training({"sharding": sharding, "clipping": CLIPPING, "optimizer_state": state})
        deferred = "update" in state
        if deferred and "mesh" not in sharding:  # replicas that send weights wait for the end of the step anyway
            training.inner.blocks[0].register_forward_pre_hook(lambda *_, of=training: of.optimizer.wait_for_update())
        losses = []
        for step in range(4):
            loss = training.loss()
            losses.append(loss.detach())
            training.optimizer.backward(loss)
            training.optimizer.step()
            training.steps += 1
            if deferred and step == 0:
                training.delay(rank, 2e-2)
        found.append(({str(step): loss for step, loss in enumerate(losses)}, training.snapshot()))
    for tested, expected in zip(found[1], found[0], strict=True):
        same_tensors(tested, expected)


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch shards a module over one mesh"
)
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(rank: int) -> None:
    """Blocks with experts on a mesh of their own inside the same ``fully_shard``: collectives for each mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "experts"))
    whole = FSDPMeshInfo(dist.init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
    experts = FSDPMeshInfo(mesh["experts"], shard_mesh_dim=0)

    class ByHand(Training):
        def loss(self, micro: int = 0) -> Tensor:
            groups = self.optimizer.param_groups  # a read of the model's parameters waits for their updates
            grads = [p.grad.dtype for group in groups for p in group["params"] if p.grad is not None]
            assert {*grads} <= {torch.float32}, "of the micro-batch before"
            return super().loss(micro)

        def prepare(self, model: nn.Module) -> nn.Module:
            apart = {block.down.weight for block in model.bfloat16().blocks}
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for module in (*model.blocks, model):
                fully_shard(
                    module,
                    mesh=whole.mesh,
                    mp_policy=policy,
                    shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), experts if p in apart else whole),
                )
            for first, second in pairwise(model.blocks):
                first.set_modules_to_forward_prefetch([second])
            return model

    def run(state: dict[str, Any]) -> ByHand:
        return ByHand({"sharding": {"kind": "single"}, "optimizer_state": state, "clipping": {"max_norm": 1e6}})

    for number, update in enumerate(("next_forward", "overlap")):
        tested = run({**DEFERRED, "update": update})
        assert_same_bits(tested, run(RESIDENT), "step", "step", "step", seed=rank + 4 * number, longest=5e-3)


@on_ranks(LAYOUTS, "layout", ["hsdp"])
def test_two_optimizers_at_once(rank: int, world_size: int, sharding: dict[str, Any]) -> None:
    """An actor and a critic: the weights of both are sent while both go on, in an order of each rank's own.

    On a CPU the critic's updates begin when the actor's next forward has come to its blocks.
    """
    values = {"sharding": sharding, "clipping": CLIPPING}
    losses = Training(values).train(4)
    pair = [Training({**values, "optimizer_state": DEFERRED}) for _ in range(2)]
    found = [[training.step() for training in pair]]
    for number, training in enumerate(pair):
        training.delay(100 + world_size * number + rank, 5e-3)
    actor, critic = pair
    update, runs_forward = UnitUpdater.update, threading.Event()
    actor.inner.blocks[0].register_forward_pre_hook(lambda *_: runs_forward.set())

    def late(self: UnitUpdater, *given: Any) -> None:
        if self is critic.optimizer.engine.updater and threading.current_thread() is not threading.main_thread():
            assert runs_forward.wait(PATIENCE), "no update is deferred"
        update(self, *given)

    with mock.patch.object(UnitUpdater, "update", late):
        for _ in range(3):
            found.append([training.backward() for training in pair])
            runs_forward.clear()
            for training in pair:
                training.update()
        runs_forward.set()
        assert [list(each) for each in zip(*found, strict=True)] == [losses, losses]
        for training in pair:
            training.optimizer.close()


class Deep(TinyTransformer):
    """More blocks than a step submits units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(queue.SUBMIT_IN_STEP + 4))


@on_ranks(LAYOUTS, ("layout", "does"), [("ddp", "reads"), ("fsdp2", "reads"), ("copies", "collects")])
@mock.patch.multiple(queue, SUBMIT_IN_STEP=2, SUBMIT_AHEAD=1)
def test_one_rank_alone(rank: int, sharding: dict[str, Any], does: str) -> None:
    """What one rank does by itself waits for no work of others that nobody has begun."""
    runs = [Training({"sharding": sharding, "optimizer_state": state}, Deep) for state in ({}, DEFERRED)]
    for run in runs:
        run.train(2)
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


# -- what is tried in backward


class Wide(TinyTransformer):
    """Its matrices go through the ring in parts."""

    def __init__(self) -> None:
        super().__init__(width=40)


@on_ranks(2)
def test_parts_of_what_replicas_send(rank: int) -> None:
    """Each replica has room for other units; of a tensor whose last part was tried, the first may be left."""
    values = {"sharding": COPIES, "clipping": {"max_norm": 1e6}}
    tested, expected = (Training({**values, "optimizer_state": state}, Wide) for state in (OVERLAP, RESIDENT))
    tested.train(1)
    tested.delay(rank, 3e-4)
    units, able, partly = list(tested.backend.units()), tested.backend.reserve_speculation, 0
    for step in range(4):
        chosen = {unit for number, unit in enumerate(units) if (number + step + rank) % 2}
        with mock.patch.object(
            tested.backend, "reserve_speculation", lambda units, chosen=chosen: able(chosen & {*units})
        ):
            tested.train(1)
        left = {owner for unit in units if unit not in chosen for owner, _, _ in unit.parts}
        partly += any(owner in left for unit in chosen for owner, _, _ in unit.parts)
    assert partly and tested.optimizer.engine.queue.redone == 0
    last = tested.optimizer.engine.queue.early._arrivals.last_in_backward()
    assert [record.unit for record in tested.backend._residency._preferred] == last != []
    expected.train(5)
    same_tensors(tested.snapshot(), expected.snapshot(), f"rank {rank}")


def check_redone_twice(rank: int, world_size: int) -> None:
    """Once after a write through the gradients' ``.data``, and once because of clipping."""
    finals = []
    for state in (OVERLAP, STREAM):
        values = {"sharding": FSDP2, "clipping": {"max_norm": 1e6}, "optimizer_state": state}
        training = Training(values)
        parameters = list(training.inner.parameters())  # to read them between backward and step rolls back
        for step in range(6):
            if step == 1:
                training.delay(rank)
            training.optimizer.max_norm = 0.05 if step == 4 else 1e6
            training.optimizer.backward(training.loss())
            if step == 2:
                for gradient in [p.grad for p in parameters if p.grad is not None]:
                    local_tensor(gradient).data.mul_(0.5)
            result = training.optimizer.step()
            training.steps += 1
        finals.append(training.snapshot())
        redone = result.redone, result.rolled_back
        assert redone == ((2, 0) if state is OVERLAP else (0, 0)), redone
        training.optimizer.close()
    same_tensors(*finals)


@on_ranks(2)
def test_writes_to_gradients_and_clipping_are_redone(rank: int, world_size: int) -> None:
    check_redone_twice(rank, world_size)


# -- updates in backward that are final


@on_ranks(2, "home", [STREAM, RESIDENT])
def test_gradients_of_two_blocks_at_a_time(home: dict[str, Any]) -> None:
    """Whenever a unit's gradients arrive, those of the unit before the last one are gone."""
    alive: list[tuple[str, weakref.ref[Tensor]]] = []
    layers: list[int] = []
    add_gradient = FinalUpdates.add_gradient

    def counting(self: FinalUpdates, item: Any, gradient: Tensor) -> None:
        alive.append((str(item.layer), weakref.ref(gradient)))
        add_gradient(self, item, gradient)
        del gradient
        layers.append(len({layer for layer, reference in alive if reference() is not None and "blocks" in layer}))

    state = {**home, "update": "in_backward"}
    with mock.patch.object(FinalUpdates, "add_gradient", counting):
        training = Training({"sharding": FSDP2, "clipping": {"max_norm": None}, "optimizer_state": state})
        for _ in range(3):
            training.step()
            gc.collect()
            alive.clear()
    assert layers and max(layers) <= 2


@on_ranks(
    LAYOUTS,
    ("layout", "clipping", "value", "home"),
    [
        ("fsdp2", {"max_norm": None}, "nan", RESIDENT),
        ("fsdp2", {"max_norm": 0.01, "norm_type": "inf", "scope": "unit"}, "nan", STREAM),
        ("hsdp", {"max_norm": 0.05, "scope": "unit"}, "inf", STREAM),
    ],
)
def test_a_shard_that_is_not_finite_leaves_its_whole_layer_alone(
    rank: int, sharding: dict[str, Any], clipping: dict[str, Any], value: str, home: dict[str, Any]
) -> None:
    """Of an embedding one row, on one rank, has a gradient that is not finite."""

    def spoiled(_: Any, gradients: tuple[Tensor]) -> tuple[Tensor]:
        gradient = gradients[0].clone()
        gradient[0, 0, 0] = float(value)
        return (gradient,)

    state = {**home, "update": "in_backward"}
    training = Training({"sharding": sharding, "clipping": clipping, "optimizer_state": state})
    training.step()
    before = training.snapshot()
    with training.strategy.accumulate(training.model, last=False):
        handle = training.inner.embed.register_full_backward_pre_hook(spoiled) if rank == 0 else None
        training.optimizer.backward(training.loss())
    if handle is not None:
        handle.remove()
    training.step()
    after = training.snapshot()
    assert all(tensor.isfinite().all() for tensor in after.values())
    left = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in left if name.startswith("embed.")} == {n for n in after if n.startswith("embed.")}
    assert not any(name.startswith("head.") for name in left)
    training.optimizer.close()


class LargeHead(TinyTransformer):
    """What is used behind the blocks, and reduced with the outermost module, fills the ring."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 24), nn.Linear(24, CLASSES, bias=False)
        self.head = nn.Sequential(*layers)  # type: ignore[assignment]


@on_ranks(2, ("update", "max_norm"), [("in_backward", None), ("overlap", 1e6)], cpu=True)
def test_each_record_is_fetched_once_in_a_step(update: str, max_norm: float | None) -> None:
    """In the order in which backward completes gradients, which with FSDP2 is not the model's reversed.

    Once that is known, each record is fetched once in a step, before somebody waits for it.
    """
    fetched: Counter[str] = Counter()
    missed: list[str] = []
    stage, take = Ring._fetch, Ring.acquire

    def staged(self: Ring, record: Record) -> None:
        fetched[record.unit.label] += 1
        stage(self, record)

    def taken(self: Ring, record: Record) -> Slot:
        missed.extend([] if record in self.staged() else [record.unit.label])
        return take(self, record)

    state = {**STREAM, "update": update, "prefetch_layers": 0}
    training = Training({"sharding": FSDP2, "clipping": {"max_norm": max_norm}, "optimizer_state": state}, LargeHead)
    with mock.patch.multiple(Ring, _fetch=staged, acquire=taken):
        for _ in range(2):  # the first two steps show the order: with overlap nothing is tried in the very first one
            fetched.clear()
            missed.clear()
            training.train(2)
            training.optimizer.synchronize()
    assert len(fetched) >= 6
    assert set(fetched.values()) == {2}, fetched
    assert not missed
