"""Experts on a mesh of their own: the bits of the textbook loop, wherever the state is."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from tests.distributed.ranks import Pool, device_of, on_ranks
from tests.unit.test_homes_and_times import HOMES, LIMITS
from tests.unit.test_stream import random_delays, random_sleeps

GROUPS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def tokens_for(model: MoETransformer, step: int) -> None:
    """Step by step: all experts may get tokens, half of them do and a block is left out, a rank's get none."""
    forbidden = [(), (0, 2, 4), tuple(range(EXPERTS // 2))][step]
    for block in model.blocks:
        block.moe.forbidden = forbidden
    model.left_out = (1,) if step == 1 else ()


class Run:
    """One model, sharded by hand or by the strategy."""

    def __init__(self, rank: int, world_size: int, values: dict[str, Any], by_strategy: bool) -> None:
        self.rank, self.device = rank, device_of(rank, world_size)
        self.strategy = lightstep.Strategy.load({**values, "sharding": {"kind": "fsdp2" if by_strategy else "single"}})
        torch.manual_seed(0)
        model = MoETransformer().to(self.device, torch.bfloat16)
        self.replica = copy.deepcopy(model)
        keep_own_experts(self.replica)
        shard_experts(model, self.device.type)
        if by_strategy:
            model = self.strategy.prepare_model(model)
        else:
            shard_rest(model, self.device.type)
        gather_ahead(model)
        self.model = model
        self.optimizer: Any = self.strategy.create_optimizer(model, torch.optim.AdamW, **GROUPS)
        self.steps = 0

    def reference(self, max_norm: float) -> ExpertLoop:
        parts = [[*block.moe.experts.parameters()] for block in self.replica.blocks]
        experts = {parameter for part in parts for parameter in part}
        blocks = [[p for p in block.parameters() if p not in experts] for block in self.replica.blocks]
        inside = experts.union(*blocks)
        rest = [parameter for parameter in self.replica.parameters() if parameter not in inside]
        return ExpertLoop(
            self.replica,
            [{"params": list(self.replica.parameters())}],
            torch.optim.AdamW,
            units=[*parts, *blocks, rest],
            max_norm=max_norm,
            **GROUPS,
        )

    def loss(self, model: nn.Module, micro: int) -> Tensor:
        tokens_for(model, self.steps)
        return loss_of(model, self.steps, micro, self.rank, self.device) / 2

    def step(self, micros: int = 2, loop: ExpertLoop | None = None) -> list[float]:
        losses = []
        for micro in range(micros):
            with self.strategy.accumulate(self.model, last=micro == micros - 1):
                loss = self.loss(self.model, micro)
                self.optimizer.backward(loss)
                losses.append(loss.item())
            if loop is not None:
                expected = self.loss(self.replica, micro)
                assert expected.item() == losses[-1]
                loop.backward(expected)
        result = self.optimizer.step()
        self.rolled_back = result.rolled_back
        if loop is not None:
            assert loop.step(result.grad_norm) is bool(result)
        self.steps += 1
        return losses

    def snapshot(self) -> dict[str, Tensor]:
        self.optimizer.synchronize()
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = local_tensor(parameter).detach().cpu().clone()
            state = self.optimizer.state[parameter].items() if parameter in self.optimizer.state else ()
            found |= {f"{name}/{key}": local_tensor(torch.as_tensor(value)).cpu().clone() for key, value in state}
        return found

    def delay(self, seed: int) -> None:
        weights = self.optimizer.engine._host_weights
        for lanes in [self.optimizer._backend.lanes, *([] if weights is None else [weights.lanes])]:
            if self.device.type == "cpu":
                random_delays(lanes, seed, 2e-3)
            else:
                random_sleeps(lanes, seed, int(4e6))


def check_textbook(rank: int, world_size: int, limit: str, by_strategy: bool) -> None:
    values = {"clipping": {"max_norm": LIMITS[limit]}, "optimizer_state": {"backend": "resident"}}
    run = Run(rank, world_size, values, by_strategy)
    loop = run.reference(LIMITS[limit])
    for _ in range(3):
        run.step(micros=2, loop=loop)
        run.optimizer.synchronize()
        for (name, parameter), expected in zip(run.model.named_parameters(), run.replica.parameters(), strict=True):
            assert torch.equal(local_tensor(parameter), loop.part(expected)), (run.steps, name)
            state = run.optimizer.state.get(parameter, {})
            for key, value in loop.state(expected).items():
                assert torch.equal(local_tensor(state[key]), value), (run.steps, name, key)


@every_value(ranks=[2, 4], limit=LIMITS, by_strategy=[False, True])
def test_equal_to_the_textbook_loop(pool: Pool, ranks: int, limit: str, by_strategy: bool) -> None:
    pool.run(check_textbook, ranks, limit=limit, by_strategy=by_strategy)


def settings(home: str, time: str, limit: str, mib: float | None) -> dict[str, Any]:
    clipping = {"max_norm": LIMITS[limit], **({"scope": "unit"} if time == "in_backward" else {})}
    weights = {} if mib is None else {"weights": {"placement": "host", "device_mib": mib}}
    return {"clipping": clipping, "optimizer_state": {**HOMES[home], "update": time}, **weights}


def check_same_bits(
    rank: int, world_size: int, home: str, time: str, limit: str, by_strategy: bool, mib: float | None
) -> None:
    """Those of a run whose state stays on the device."""
    micros = 1 if mib is not None else 2  # on the host every micro-batch is reduced by itself
    plain = settings("resident", "in_backward" if time == "in_backward" else "at_step", limit, None)
    expected = Run(rank, world_size, plain, by_strategy)
    losses, wanted = [expected.step(micros) for _ in range(3)], expected.snapshot()
    tested = Run(rank, world_size, settings(home, time, limit, mib), by_strategy)
    found = [tested.step(micros)]
    tested.delay(rank)
    found += [tested.step(micros) for _ in losses[1:]]
    assert found == losses
    snapshot = tested.snapshot()
    assert snapshot.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(snapshot[key], value)] == []
    assert tested.rolled_back == 0, "nobody has written to a gradient or a weight"
    tested.optimizer.close()


@pytest.mark.parametrize(
    ("ranks", "home", "time", "limit", "mib"),
    [
        (2, "resident", "next_forward", "clipped", 0.001),
        (2, "stream", "overlap", "clipped", None),
        (2, "stream, some resident", "in_backward", "not clipped", None),
        (4, "stream", "overlap", "not clipped", 0.001),
        (4, "bulk", "in_backward", "clipped", 64.0),
    ],
)
def test_the_same_bits(pool: Pool, ranks: int, home: str, time: str, limit: str, mib: float | None) -> None:
    """All weights of a model that rests on the host are sharded by the strategy.

    In the next forward, with weights on the device: ``test_next_forward.py``.
    """
    by_strategy = mib is not None or ranks == 4
    pool.run(check_same_bits, ranks, home=home, time=time, limit=limit, by_strategy=by_strategy, mib=mib)


@on_ranks(2, ("home", "mib"), [("resident", 64.0), ("stream", 0.001)])
def test_gradients_of_earlier_micro_batches_count(rank: int, world_size: int, home: str, mib: float) -> None:
    """The last micro-batch leaves out a block, whose gradients are those of the first."""

    def step(run: Run, in_backward: bool) -> None:
        for micro in range(2):
            run.model.left_out = (1,) if micro else ()
            loss = loss_of(run.model, run.steps, micro, rank, run.device) / 2
            if in_backward:
                with run.strategy.accumulate(run.model, last=micro == 1):
                    run.optimizer.backward(loss)
            else:
                run.optimizer.backward(loss)  # each is reduced, as on the host
        run.optimizer.step()
        run.steps += 1

    found = []
    for values in ({"optimizer_state": {"backend": "resident"}}, settings(home, "in_backward", "clipped", mib)):
        run = Run(rank, world_size, {**values, "clipping": {"max_norm": None}}, by_strategy=True)
        for _ in range(3):
            step(run, in_backward="weights" in values)
        found.append(run.snapshot())
        run.optimizer.close()
    assert [key for key, value in found[0].items() if not torch.equal(value, found[1][key])] == []


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
