"""Experts on a mesh of their own, as torchtitan has them, and the textbook loop of such a model.

Of ``world_size`` ranks, ``EXPERT_PARALLEL`` consecutive ones hold different experts and exchange tokens; the experts of
each are sharded over the ranks that hold the same ones. Everything else is sharded over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.models import CLASSES, VOCABULARY
from tests.distributed.sharded_reference import ShardedLoop

EXPERT_PARALLEL = 2
EXPERTS = 6
"""Three on each rank of an exchange: uneven shards over two ranks."""


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received, group = ctx.splits
        return _exchange(gradient.contiguous(), received, sent, group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows, received, sent, group=group)
    return found


class Experts(nn.Module):
    """[experts, ...] weights, stacked. ``forward`` takes rows sorted by expert, and how many each one gets."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.3)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = zip(rows.split(counts), up, down, strict=True)
        return torch.cat([torch.tanh(part @ one.T) @ two.T for part, one, two in parts])


class MoE(nn.Module):
    """A router, and experts of which this rank has a part; the nearest ranks have the others.

    Attributes:
        forbidden: experts that get no tokens.
    """

    def __init__(self, width: int, experts: int = EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts)
        self.group: Any = None
        self.forbidden: tuple[int, ...] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        scores = self.router(rows).float()
        if self.forbidden:
            scores = scores.index_fill(1, torch.tensor(self.forbidden, device=scores.device), -torch.inf)
        weight, chosen = scores.softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        per_expert = chosen.bincount(minlength=scores.shape[1])
        sent = per_expert.view(EXPERT_PARALLEL, -1)  # [rank, expert of that rank]
        told = torch.empty_like(sent)
        dist.all_to_all_single(told, sent, group=self.group)
        splits = sent.sum(1).tolist(), told.sum(1).tolist()
        arrived = _Exchange.apply(rows[order], *splits, self.group)
        # By sender, then by expert; the experts take theirs together.
        experts = torch.arange(told.shape[1], device=told.device).repeat(len(told)).repeat_interleave(told.flatten())
        by_expert = experts.argsort(stable=True)
        made = self.experts(arrived[by_expert], told.sum(0).tolist())
        returned = _Exchange.apply(made[by_expert.argsort()], *reversed(splits), self.group)
        return (returned[order.argsort()] * weight.to(rows.dtype)[:, None]).view_as(hidden)


class MoEBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.moe = MoE(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + torch.tanh(self.dense(hidden))
        return hidden + self.moe(self.norm(hidden))


class MoETransformer(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, classes].

    Attributes:
        left_out: blocks that the forward leaves out.
    """

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(MoEBlock(width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.left_out: tuple[int, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.left_out:
                hidden = block(hidden)
        return self.head(hidden)


def keep_own_experts(model: MoETransformer) -> None:
    """The textbook's model: this rank's experts alone, as plain tensors."""
    groups = _groups_of_neighbours()
    place = dist.get_rank() % EXPERT_PARALLEL
    for block in model.blocks:
        block.moe.group = groups
        for name, weight in block.moe.experts.named_parameters():
            setattr(block.moe.experts, name, nn.Parameter(weight.detach().chunk(EXPERT_PARALLEL)[place].clone()))


def _groups_of_neighbours(apart: bool = False) -> dist.ProcessGroup:
    """Of this rank: those with which it exchanges tokens; ``apart``: those that hold the same experts."""
    world_size = dist.get_world_size()
    rows = [list(range(first, first + EXPERT_PARALLEL)) for first in range(0, world_size, EXPERT_PARALLEL)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    made = {tuple(ranks): dist.new_group(ranks) for ranks in (columns if apart else rows)}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


def shard_experts(model: MoETransformer, device: str) -> None:
    """Experts over (shards, exchange), torchtitan's way: first to the ranks that exchange tokens, then FSDP2."""
    sizes = dist.get_world_size() // EXPERT_PARALLEL, EXPERT_PARALLEL
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("efsdp", "ep"))
    for block in model.blocks:
        block.moe.group = mesh.get_group("ep")
        for name, weight in block.moe.experts.named_parameters():
            placed = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            setattr(block.moe.experts, name, nn.Parameter(placed))
        fully_shard(block.moe.experts, mesh=mesh["efsdp"], mp_policy=_policy())
        block.moe.experts.set_gradient_divide_factor(float(dist.get_world_size()))
        if sizes[0] > 1:  # on one rank torch 2.13 would divide twice
            block.moe.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it adds


def shard_rest(model: MoETransformer, device: str) -> None:
    """Everything else over all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=_policy())


def _policy() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(reduce_dtype=torch.float32)


def gather_ahead(model: MoETransformer) -> None:
    """As torchtitan: a block and its experts are gathered while the one before it runs, both ways."""
    for blocks, name in ((list(model.blocks), "forward"), (list(model.blocks)[::-1], "backward")):
        for first, second in pairwise(blocks):
            assert isinstance(first, FSDPModule)
            getattr(first, f"set_modules_to_{name}_prefetch")([second, second.moe.experts])


class ExpertLoop(ShardedLoop):
    """Tensors of three dimensions are this rank's experts, in shards over the ranks that hold the same ones."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._same = _groups_of_neighbours(apart=True)
        super().__init__(*arguments, **keywords)

    def _shards_of(self, whole: Tensor) -> dist.ProcessGroup:
        return self._same if whole.dim() == 3 else super()._shards_of(whole)

    def _average_unit(self, members: list[Tensor], gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        if members[0].dim() != 3:
            return super()._average_unit(members, gradients)
        averaged = {}
        for parameter in members:
            total = gradients[parameter].clone()
            dist.all_reduce(total, group=self._same)  # of two ranks at most, whose order does not matter
            averaged[parameter] = self.part(total) / dist.get_world_size()
        return averaged

    def norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Of the shards of all ranks, which together are each parameter once: torch has no such norm."""
        total = sum((part.double().square().sum() for part in gradients.values()), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(total)
        return total.sqrt().float()
