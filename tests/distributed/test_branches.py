"""Micro-batches that use different parts of a model: branches, dropped layers, routing, several heads.

torch's FSDP2 cannot add them up between two reductions: a first gradient beside sums of another dtype, or a block that
was never called, is an error there.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import lightstep
from lightstep.distributed import local_tensor
from tests.covering import every_value
from tests.distributed.models import CLASSES, TinyTransformer, loss_of
from tests.distributed.ranks import Pool, device_of, on_ranks
from tests.distributed.test_exactness import OWN_BUCKETS, DistributedPair
from tests.distributed.training import DDP, FSDP2, HSDP
from tests.reference.pair import FP16_SCALE


class Branches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, used: str) -> Tensor:
        for name in used:
            hidden = hidden + torch.tanh(getattr(self, name)(hidden))
        return hidden


class Branching(TinyTransformer):
    """``uses``: the branches of each block (none: the block is dropped), and the head."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(width)
        self.blocks = nn.ModuleList(Branches(width) for _ in range(3))
        self.other_head = nn.Linear(width, CLASSES)
        self.uses = ("ab", "ab", "ab", "head")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.gain
        for block, used in zip(self.blocks, self.uses, strict=False):
            hidden = block(hidden, used) if used else hidden
        return getattr(self, self.uses[-1])(hidden)


FIRST_STEPS = [
    [("a", "a", "a", "head"), ("ab", "ab", "ab", "head")],  # b is first used in the last micro-batch
    [("ab", "", "a", "head"), ("b", "", "", "other_head"), ("", "a", "b", "head")],
    [("a", "", "", "head"), ("", "", "", "head")],  # only the first micro-batch has gradients of a block
]
NEVER_CALLED = [[("", "", "", "head"), ("ab", "ab", "ab", "other_head")]]


def random_steps(count: int) -> list[list[tuple[str, ...]]]:
    chosen = random.Random(1)
    blocks, heads = ["", "a", "b", "ab"], ["head", "other_head"]
    micro_batches = [chosen.randint(1, 4) for _ in range(count)]
    return [[(*chosen.choices(blocks, k=3), chosen.choice(heads)) for _ in range(number)] for number in micro_batches]


def train(pair: DistributedPair, steps: list[list[tuple[str, ...]]]) -> None:
    """With a generation between two micro-batches, which uses everything."""
    models: list[Any] = [pair.strategy.unwrap_model(pair.model), pair.replica]
    for step, uses in enumerate(steps):
        for micro, used in enumerate(uses):
            if step % 3 == 2:
                models[0].uses = ("ab", "ab", "ab", "head")
                with torch.no_grad():
                    loss_of(pair.model, step, micro, pair.rank, pair.device)
            for model in models:
                model.uses = used
            with pair.strategy.accumulate(pair.model, last=micro == len(uses) - 1):
                pair.optimizer.backward(loss_of(pair.model, step, micro, pair.rank, pair.device) / len(uses))
            pair.reference.backward(loss_of(pair.replica, step, micro, pair.rank, pair.device) / len(uses))
        assert pair.reference.step(pair.optimizer.step().grad_norm)
        if step % 3 == 2 or step == len(steps) - 1:
            pair.check(step)


def check_branches(rank: int, world_size: int, case: dict[str, Any], sharding: dict[str, Any], never: bool) -> None:
    pair = DistributedPair(rank, world_size, case, sharding, Branching)
    train(pair, [*(NEVER_CALLED if never else FIRST_STEPS), *random_steps(2)])


STREAM = {"backend": "stream", "ring_mib": 1}
FP16: dict[str, Any] = {"parameters": "float16", "loss_scale": FP16_SCALE}
FP32 = {"parameters": "float32"}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "bf16": (2, {}, FSDP2),
    "bf16-reduced-in-bf16": (2, {"precision": {"reduce": "parameters"}}, FSDP2),
    "fp16-next_forward": (2, {"precision": FP16, "optimizer_state": {**STREAM, "update": "next_forward"}}, FSDP2),
    "fp32-overlap": (2, {"precision": FP32, "optimizer_state": {**STREAM, "update": "overlap"}}, FSDP2),
    "in_backward": (2, {"optimizer_state": {**STREAM, "update": "in_backward"}, "clipping": {"max_norm": None}}, FSDP2),
    "hsdp": (4, {"optimizer_state": STREAM}, {**HSDP, "mesh": {"replicate": 2, "shard": 2}}),
    "ddp": (2, {}, {**DDP, "bucket_mib": OWN_BUCKETS}),
}


@every_value(never=[False, True], case=CASES)
def test_same_bits_as_the_plain_loop(pool: Pool, case: str, never: bool) -> None:
    world_size, values, sharding = CASES[case]
    pool.run(check_branches, world_size, case=values, sharding=sharding, never=never)


class Routing(Branching):
    """Without parameters that no rank uses: torch gives them zeros, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dead.requires_grad_(False)


@on_ranks(2)
def test_ranks_that_use_other_branches_of_a_block(rank: int, world_size: int) -> None:
    """torch's ``set_reduce_scatter_unused_params``, between two reductions, too."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # torch before 2.13 has no way to do this
    pair = DistributedPair(rank, world_size, {}, FSDP2, Routing)
    model: Any = pair.strategy.unwrap_model(pair.model)
    model.set_reduce_scatter_unused_params(True)
    own, others = ("a", "b", "a", "head"), ("b", "a", "ab", "other_head")
    steps = [[own, others], [own], [own, own, others]]
    train(pair, steps if rank == 0 else [[others, own], [others], [others, others, others]])


@every_value(update=["at_step", "next_forward", "overlap"], micros=[1, 2])
@on_ranks(2, cpu=True)
def test_an_unused_part_under_ddp_is_refused_before_the_step(
    rank: int, world_size: int, micros: int, update: str
) -> None:
    """DDP leaves out a bucket that lacks a gradient, and says so in the next forward: a step too late."""
    state = {"backend": "resident" if update == "at_step" else "stream", "update": update}
    values: dict[str, Any] = {"sharding": {"kind": "ddp"}, "optimizer_state": state}
    strategy = lightstep.Strategy.load(values)
    model: Any = strategy.prepare_model(Branching())
    strategy.unwrap_model(model).uses = ("ab", "ab", "ab", "head")  # other_head is not used
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for micro in range(micros):
        with strategy.accumulate(model, last=micro == micros - 1):
            optimizer.backward(loss_of(model, 0, micro, rank, torch.device("cpu")))
    with pytest.raises(RuntimeError, match=r"got no gradient in this backward.*sharding\.find_unused_parameters"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


class EqualBranches(Branching):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.a = nn.Linear(7, 7, bias=False)


@on_ranks(2, ("norm_type", "placement"), [(2.0, "device"), (math.inf, "device"), (2.0, "host"), (math.inf, "host")])
def test_ranks_that_use_other_branches_without_saying_so_are_refused(
    rank: int, world_size: int, norm_type: float, placement: str
) -> None:
    """The branches are equally large, and FSDP2 adds the gradients of one to those of the other."""
    values: dict[str, Any] = {"sharding": FSDP2, "clipping": {"norm_type": norm_type}}
    values |= {"weights": {"placement": placement}, "optimizer_state": {"backend": "stream"}}
    strategy, device = lightstep.Strategy.load(values), device_of(rank, world_size)
    model: Any = strategy.prepare_model(EqualBranches())
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    before = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    model.uses = ("a", "b", "a", "head") if rank == 0 else ("b", "b", "a", "head")
    optimizer.backward(loss_of(model, 0, 0, rank, device))
    with pytest.raises(RuntimeError, match="ranks have used different parameters of one FSDP module"):
        optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(local_tensor(parameter.detach()), old)
    optimizer.zero_grad()
    model.uses = ("a", "b", "a", "head")
    optimizer.backward(loss_of(model, 0, 0, rank, device))
    assert optimizer.step()
