"""Experts on a mesh of their own: the bits of the textbook loop, wherever the state is."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import lightstep
from lightstep.bench.models import DividedExperts, MoeShape
from lightstep.distributed import local_tensor
from lightstep.state.host_fields import Field
from tests.covering import every_value
from tests.distributed.expert_reference import (
    EXPERTS,
    ExpertLoop,
    MoETransformer,
    gather_ahead,
    keep_own_experts,
    shard_experts,
    shard_rest,
)
from tests.distributed.models import loss_of
from tests.distributed.ranks import device_of, on_ranks
from tests.distributed.sharded_reference import units_of
from tests.distributed.training import RESIDENT, Training, assert_same_bits, same_tensors
from tests.unit.test_homes_and_times import HOMES, LIMITS

GROUPS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def tokens_for(model: MoETransformer, step: int) -> None:
    """Step by step: all experts may get tokens, half of them do and a block is left out, a rank's get none."""
    forbidden = [(), (0, 2, 4), tuple(range(EXPERTS // 2))][step]
    for block in model.blocks:
        block.moe.forbidden = forbidden
    model.left_out = (1,) if step == 1 else ()


class Run(Training):
    """One model, sharded by hand or by the strategy; and its replica for the textbook loop."""

    def __init__(self, values: dict[str, Any], by_strategy: bool, micros: int = 2) -> None:
        self.by_strategy, self.micros = by_strategy, micros
        sharding = {"kind": "fsdp2" if by_strategy else "single"}
        groups = lambda model: [{"params": list(model.parameters())}]  # noqa: E731
        super().__init__({**values, "sharding": sharding}, MoETransformer, groups=groups, **GROUPS)

    def prepare(self, model: nn.Module) -> nn.Module:
        model.to(self.device, torch.bfloat16)
        self.replica = copy.deepcopy(model)
        keep_own_experts(self.replica)
        shard_experts(model, self.device.type)
        if self.by_strategy:
            model = super().prepare(model)
        else:
            shard_rest(model, self.device.type)
        gather_ahead(model)
        return model

    def micro_batches(self) -> int:
        tokens_for(self.model, self.steps)
        tokens_for(self.replica, self.steps)
        return self.micros

    def reference(self, max_norm: float) -> ExpertLoop:
        parts = [[*block.moe.experts.parameters()] for block in self.replica.blocks]
        experts = {parameter for part in parts for parameter in part}
        rest = [[p for p in unit if p not in experts] for unit in units_of(self.replica)]
        groups = [{"params": list(self.replica.parameters())}]
        more = {"units": [*parts, *rest], "max_norm": max_norm, **GROUPS}
        return ExpertLoop(self.replica, groups, torch.optim.AdamW, **more)


@every_value(ranks=[2, 4], limit=LIMITS, by_strategy=[False, True])
@on_ranks(None)
def test_equal_to_the_textbook_loop(rank: int, limit: str, by_strategy: bool) -> None:
    run = Run({"clipping": {"max_norm": LIMITS[limit]}, "optimizer_state": RESIDENT}, by_strategy)
    loop = run.reference(LIMITS[limit])
    for step in range(3):
        losses = run.step()
        expected = [loss_of(run.replica, step, micro, rank, run.device) / 2 for micro in range(2)]
        for loss in expected:
            loop.backward(loss)
        assert [loss.item() for loss in expected] == losses
        assert loop.step(run.result.grad_norm) is bool(run.result)
        run.optimizer.synchronize()
        for (name, parameter), wanted in zip(run.model.named_parameters(), run.replica.parameters(), strict=True):
            assert torch.equal(local_tensor(parameter), loop.part(wanted)), (step, name)
            state = run.optimizer.state.get(parameter, {})
            for key, value in loop.state(wanted).items():
                assert torch.equal(local_tensor(state[key]), value), (step, name, key)


def settings(home: str, time: str, limit: str, mib: float | None) -> dict[str, Any]:
    clipping = {"max_norm": LIMITS[limit], **({"scope": "unit"} if time == "in_backward" else {})}
    weights = {} if mib is None else {"weights": {"placement": "host", "device_mib": mib}}
    return {"clipping": clipping, "optimizer_state": {**HOMES[home], "update": time}, **weights}


@on_ranks(
    None,
    ("ranks", "home", "time", "limit", "mib"),
    [
        (2, "resident", "next_forward", "clipped", 0.001),
        (2, "stream", "overlap", "clipped", None),
        (2, "stream, some resident", "in_backward", "not clipped", None),
        (4, "stream", "overlap", "not clipped", 0.001),
        (4, "bulk", "in_backward", "clipped", 64.0),
    ],
)
def test_the_same_bits(rank: int, world_size: int, home: str, time: str, limit: str, mib: float | None) -> None:
    """Those of a run whose state stays on the device.

    All weights of a model that rests on the host are sharded by the strategy, and every micro-batch is reduced by
    itself. In the next forward, with weights on the device, where torch has it: ``test_update_times.py``.
    """
    by_strategy, micros = mib is not None or world_size == 4, 1 if mib is not None else 2
    plain = settings("resident", "in_backward" if time == "in_backward" else "at_step", limit, None)
    tested = Run(settings(home, time, limit, mib), by_strategy, micros)
    assert_same_bits(tested, Run(plain, by_strategy, micros), "step", "step", "step", seed=rank)
    assert tested.result.rolled_back == 0, "nobody has written to a gradient or a weight"
    tested.optimizer.close()


@on_ranks(2, ("home", "mib"), [("resident", 64.0), ("stream", 0.001)])
def test_gradients_of_earlier_micro_batches_count(rank: int, world_size: int, home: str, mib: float) -> None:
    """The last micro-batch leaves out a block, whose gradients are those of the first."""

    snapshots = []
    for values in ({"optimizer_state": RESIDENT}, settings(home, "in_backward", "clipped", mib)):
        run = Run({**values, "clipping": {"max_norm": None}}, by_strategy=True)
        for _ in range(3):
            for micro in range(2):
                run.model.left_out = (1,) if micro else ()
                with run.accumulate(micro == 1) if "weights" in values else nullcontext():  # each is reduced, as there
                    run.optimizer.backward(run.loss(micro) / 2)
            run.optimizer.step()
            run.steps += 1
        snapshots.append(run.snapshot())
        run.optimizer.close()
    same_tensors(snapshots[1], snapshots[0])


@on_ranks(2)
def test_the_benchs_experts_are_transformers_own(rank: int, world_size: int) -> None:
    shape = MoeShape.nearest(200_000)
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    whole = Qwen3MoeExperts(shape.config(num_experts=shape.experts, experts_implementation="grouped_mm"))
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    own = Qwen3MoeExperts(shape.config(num_experts=shape.experts // world_size, experts_implementation="grouped_mm"))
    for part, parameter in zip(own.parameters(), whole.parameters(), strict=True):
        part.data = parameter.detach().chunk(world_size)[rank].clone()
    divided = DividedExperts(own, mesh.get_group())
    torch.manual_seed(rank)
    hidden = torch.randn(20 + rank, shape.hidden, requires_grad=True)
    chosen = torch.stack([torch.randperm(shape.experts)[: shape.chosen] for _ in hidden])
    if rank == 0:
        chosen %= shape.experts // world_size  # none of the other's
    weights = torch.rand(chosen.shape)
    made, gradients = [], []
    for experts in (whole, divided):
        hidden.grad = None
        made.append(experts(hidden, chosen, weights))
        made[-1].square().sum().backward()
        gradients.append(hidden.grad)
    # Sums over a token's experts, and over the tokens of both ranks, have another order.
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*gradients)
    for part, parameter in zip(own.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(part.grad, parameter.grad.chunk(world_size)[rank])


@on_ranks(2, "marked", [True, False])
def test_experts_on_a_slice_are_marked_or_compared(rank: int, world_size: int, marked: bool) -> None:
    """Experts on a slice of a mesh differ if they are marked; otherwise they count as copies, and are compared."""
    norms, losses, device = [], [], device_of(rank, world_size)
    for weights in ({}, {"weights": {"placement": "host", "device_mib": 0.01}}):
        values = {"sharding": {"kind": "fsdp2", "activation_checkpointing": True}, "clipping": {"max_norm": 0.5}}
        strategy = lightstep.Strategy.load({**values, **weights, "optimizer_state": {"backend": "stream"}})
        model = MoeShape.nearest(200_000).make(device, torch.bfloat16, 0, 16)
        experts = [p for module in model.modules() if isinstance(module, DividedExperts) for p in module.parameters()]
        for parameter in experts:
            parameter.differs_across_ranks = marked
            with torch.no_grad():
                local_tensor(parameter).mul_(1 + rank)
        optimizer = strategy.create_optimizer(strategy.prepare_model(model), torch.optim.AdamW, **GROUPS)
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(rank)).to(device)
        norms.append([])
        losses.append([])
        for step in range(2):
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            optimizer.backward(loss)
            if not marked:
                with pytest.raises(ValueError, match="differs between ranks 0 and 1"):
                    optimizer.step()
                break
            if not step and not weights:
                squares = sum(local_tensor(p.grad).double().square().sum() for p in model.parameters())
                dist.all_reduce(squares)
                expected = squares.sqrt().item()
            norms[-1].append(optimizer.step().grad_norm.item())
            losses[-1].append(loss.item())
        optimizer.close()
    if marked:
        assert norms[0] == norms[1] and losses[0] == losses[1]
        assert norms[0][0] == pytest.approx(expected, rel=1e-5)  # added up in fp64, and in another order


@on_ranks(2)
def test_the_benchs_experts_are_brought_once(rank: int, world_size: int) -> None:
    """Backward brings the weights of each module at most once, where there is room for those of three."""
    shape, device = MoeShape.nearest(400_000, 4), device_of(rank, world_size)
    experts = shape.experts // world_size * 3 * shape.expert * shape.hidden * 2
    strategy = lightstep.Strategy.load(
        {
            "sharding": {"kind": "fsdp2", "activation_checkpointing": True},
            "weights": {"placement": "host", "device_mib": 3.5 * experts / 2**20},
            "optimizer_state": {"backend": "stream"},
        }
    )
    model = strategy.prepare_model(shape.make(device, torch.bfloat16, 0, 16))
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, **GROUPS)
    tokens = torch.randint(64, (2, 17), device=device)
    brought: Counter[str] = Counter()
    bring = Field.bring

    def counting(field: Field) -> None:
        brought[field.what] += 1
        bring(field)

    for _ in range(2):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        brought.clear()
        with patch.object(Field, "bring", counting):
            optimizer.backward(loss)
        optimizer.step()
    optimizer.close()
    assert sum("experts" in what for what in brought) >= shape.layers - 2  # not those that the forward has left there
    assert set(brought.values()) == {1}, brought
