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

from lightstep.distributed import local_tensor
from tests.distributed.models import CLASSES, TinyTransformer
from tests.distributed.programs import Program
from tests.distributed.ranks import on_ranks
from tests.distributed.training import DEFERRED, FSDP2, LAYOUTS, OVERLAP, PRECISIONS, STREAM, Training


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


ALL = "ab.ab.ab.head"
FIRST_STEPS = (
    f"sum:uses=a.a.a.head micro:uses={ALL} step "  # b is first used in the last micro-batch
    "sum:uses=ab..a.head sum:uses=b...other_head micro:uses=.a.b.head step "
    f"evaluate:{ALL} sum:uses=a...head evaluate:{ALL} micro:uses=...head step:check "  # the last one uses no block
)
NEVER_CALLED = "sum:uses=...head micro:uses=ab.ab.ab.other_head step "


def random_steps(count: int) -> str:
    chosen, words = random.Random(1), list[str]()
    for _ in range(count):
        micro_batches = [".".join(chosen.choices(["", "a", "b", "ab"], k=3)) for _ in range(chosen.randint(1, 4))]
        uses = [f"uses={blocks}.{chosen.choice(['head', 'other_head'])}" for blocks in micro_batches]
        words += [*(f"sum:{own}" for own in uses[1:]), f"micro:{uses[0]}", "step"]
    return " ".join(words)


UNCLIPPED = {"clipping": {"max_norm": None}}


@on_ranks(
    LAYOUTS,
    ("layout", "case", "never"),
    [
        ("fsdp2", {}, False),
        ("fsdp2", {"precision": PRECISIONS["bf16-reduced-in-bf16"]}, True),
        ("fsdp2", {"precision": PRECISIONS["fp16"], "optimizer_state": DEFERRED}, False),
        ("fsdp2", {"precision": PRECISIONS["fp32"], "optimizer_state": OVERLAP}, True),
        ("fsdp2", {"optimizer_state": {**STREAM, "update": "in_backward"}, **UNCLIPPED}, False),
        ("hsdp", {"optimizer_state": STREAM}, True),
        ("ddp", {}, False),
    ],
)
def test_same_bits_as_the_plain_loop(sharding: dict[str, Any], case: dict[str, Any], never: bool) -> None:
    """With a generation between two micro-batches, which uses everything."""
    Program(sharding, case, (NEVER_CALLED if never else FIRST_STEPS) + random_steps(2), make=Branching).run()


class Routing(Branching):
    """Without parameters that no rank uses: torch gives them zeros, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dead.requires_grad_(False)


@on_ranks(2)
def test_ranks_that_use_other_branches_of_a_block() -> None:
    """torch's ``set_reduce_scatter_unused_params``, between two reductions, too."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # torch before 2.13 has no way to do this
    own, others = "a.b.a.head", "b.a.ab.other_head"
    one, two, both = f"uses={own}/{others}", f"uses={others}/{own}", f"uses={others}"
    text = f"sum:{one} micro:{two} step micro:{one} step sum:{one} sum:{one} micro:{both} step"
    program = Program(FSDP2, {}, text, make=Routing)
    program.inner.set_reduce_scatter_unused_params(True)
    program.run()


@on_ranks(2, ("update", "micros"), [("at_step", 1), ("next_forward", 2), ("overlap", 1)], cpu=True)
def test_an_unused_part_under_ddp_is_refused_before_the_step(update: str, micros: int) -> None:
    """DDP leaves out a bucket that lacks a gradient, and says so in the next forward: a step too late."""
    state = {"backend": "resident" if update == "at_step" else "stream", "update": update}
    run = Training({"sharding": {"kind": "ddp"}, "optimizer_state": state}, Branching)  # other_head is not used
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    for micro in range(micros):
        with run.accumulate(last=micro == micros - 1):
            run.optimizer.backward(run.loss(micro))
    with pytest.raises(RuntimeError, match=r"got no gradient in this backward.*sharding\.find_unused_parameters"):
        run.optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, run.model.parameters(), strict=True))


class EqualBranches(Branching):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.a = nn.Linear(7, 7, bias=False)


@on_ranks(2, ("norm_type", "placement"), [(2.0, "device"), (math.inf, "device"), (2.0, "host"), (math.inf, "host")])
def test_ranks_that_use_other_branches_without_saying_so_are_refused(
    rank: int, norm_type: float, placement: str
) -> None:
    """The branches are equally large, and FSDP2 adds the gradients of one to those of the other."""
    values = {"weights": {"placement": placement}, "optimizer_state": {"backend": "stream"}}
    run = Training({**values, "sharding": FSDP2, "clipping": {"norm_type": norm_type}}, EqualBranches)
    before = [local_tensor(parameter.detach()).clone() for parameter in run.model.parameters()]
    run.inner.uses = ("a", "b", "a", "head") if rank == 0 else ("b", "b", "a", "head")
    run.optimizer.backward(run.loss())
    with pytest.raises(
        RuntimeError, match=r"different parameters of one FSDP module.*or p\.grad was set to None on some"
    ):
        run.optimizer.step()
    for parameter, old in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(local_tensor(parameter.detach()), old)
    run.optimizer.zero_grad()
    run.inner.uses = ("a", "b", "a", "head")
    run.optimizer.backward(run.loss())
    assert run.optimizer.step()
