"""The textbook loop over several ranks, written by hand with plain tensors and five collectives.

Every rank holds the whole model in its training dtype and computes its own gradients; they are brought to fp32, added
over the micro-batches, and averaged over the ranks in fp32. ``ShardedLoop`` keeps a shard of the masters and of the
optimizer state per rank (``shard`` ranks apart, ``replicate`` copies); ``ReplicatedLoop`` keeps all of them everywhere.
Nothing here imports lightstep, FSDP or DDP.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.reference.plain_loop import ReferenceScale, check_same_norm, has_fused, in_order
from tests.reference.several_classes import SeveralClasses


def units_of(model: Any) -> list[list[Tensor]]:
    """The parameters of each block, and the rest; of FSDP2's groups, a module's own come after those below it."""
    blocks = [_from_below(block) for block in model.blocks]
    inside = {parameter for block in blocks for parameter in block}
    return [*blocks, [parameter for parameter in _from_below(model) if parameter not in inside]]


def _from_below(module: nn.Module) -> list[Tensor]:
    own = [parameter for child in module.children() for parameter in _from_below(child)]
    return list(dict.fromkeys([*own, *module.parameters(recurse=False)]))


class DistributedLoop(ABC):
    """What both loops share: local gradients in, updated weights out.

    Args:
        model: this rank's whole model.
        param_groups: groups of its parameters.
        units: its parameters as they are reduced together, in the order of the reduction.
        initial: fp32 values to start from, whole; without them the masters start from the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        param_groups: Iterable[Mapping[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        units: Sequence[Sequence[Tensor]],
        loss_scale: str | Mapping[str, Any] = "none",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        reduce: str = "float32",
        initial: Mapping[Tensor, Tensor] | None = None,
        **hyperparameters: Any,
    ) -> None:
        self.model, self.units, self.initial = model, units, initial or {}
        self.reduce_dtype = torch.float32 if reduce == "float32" else None
        self.max_norm, self.norm_type = max_norm, norm_type
        self.loss_scale = ReferenceScale(loss_scale)
        self.sums: dict[Tensor, Tensor] = {}
        self.reduced: dict[Tensor, Tensor] = {}
        groups = [dict(group) for group in param_groups]
        listed = [p for group in groups for p in group["params"]]
        self.masters = {p: self.part(self.initial.get(p, p.detach())).float().clone() for p in listed}
        device = next(iter(self.masters.values())).device
        if not {"fused", "foreach"} & hyperparameters.keys() and has_fused(optimizer_class, device):
            hyperparameters["fused"] = True
        self.optimizer = optimizer_class(
            [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups], **hyperparameters
        )

    @abstractmethod
    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that it has whole."""

    @abstractmethod
    def average(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """This rank's parts of the gradients averaged over all ranks."""

    @abstractmethod
    def restore(self, parameter: Tensor, part: Tensor) -> None:
        """Write the whole parameter from the ranks' parts."""

    @abstractmethod
    def norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """torch's own norm of the parts of all ranks."""

    def backward(self, loss: Tensor) -> None:
        (loss * self.loss_scale.scale).backward()
        for parameter in self.masters:
            if parameter.grad is not None:
                gradient = parameter.grad.to(self.reduce_dtype or parameter.dtype)
                self.sums[parameter] = self.sums[parameter] + gradient if parameter in self.sums else gradient.clone()
                parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """The last backward was one that reduces: what the ranks have added up is averaged, and added to the rest."""
        used: list[Any] = [None] * dist.get_world_size()
        listed = list(self.masters)
        dist.all_gather_object(used, [number for number, p in enumerate(listed) if p in self.sums])
        for parameter in (listed[number] for number in sorted(set().union(*used))):
            if parameter not in self.sums:  # another rank has a gradient
                self.sums[parameter] = torch.zeros_like(parameter, dtype=self.reduce_dtype)
        averaged = self.average(self.sums)
        self.sums = {}
        for parameter, part in averaged.items():
            total = self.reduced[parameter] + part if parameter in self.reduced else part
            self.reduced[parameter] = total.to(self.reduce_dtype or parameter.dtype).to(total.dtype)

    @torch.no_grad()
    def step(self, reported: Tensor) -> bool:
        """Finish the step; False when it is skipped. ``reported`` is the tested norm, which must have torch's bits."""
        scale = self.loss_scale.scale
        if self.sums:
            self.reduce()
        averaged, self.reduced = self.reduced, {}
        gradients = {p: averaged[p].float().div_(scale) for p in in_order(averaged, self.model.parameters())}
        norm = self.norm(gradients)
        check_same_norm(reported, norm)
        applied = math.isfinite(float(norm))
        if applied:
            updated = [tensor for p, gradient in gradients.items() for tensor in self.with_gradient(p, gradient)]
            if self.max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(updated, self.max_norm, norm)
            self.optimizer.step()
            for tensor in updated:
                tensor.grad = None
            for parameter, master in self.masters.items():
                self.restore(parameter, master.to(parameter.dtype))
        self.loss_scale.update(overflow=not applied)
        return applied

    def with_gradient(self, parameter: Tensor, gradient: Tensor) -> list[Tensor]:
        """What the optimizer updates by this rank's part of a gradient."""
        self.masters[parameter].grad = gradient
        return [self.masters[parameter]]

    def adopt(self, parameter: Tensor) -> None:
        """The user changed it: its master starts again from it."""
        self.masters[parameter].copy_(self.part(parameter))

    def master(self, parameter: Tensor) -> Tensor:
        """This rank's part of it."""
        return self.masters[parameter]

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """This rank's part of it."""
        return dict(self.optimizer.state.get(self.masters[parameter], {}))


class ShardedLoop(DistributedLoop):
    """Shards along dimension 0 over groups of ``shard`` consecutive ranks; the groups are copies of each other."""

    def __init__(self, *arguments: Any, shard: int | None = None, **keywords: Any) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self.shard = shard or world_size
        self.copies = world_size // self.shard
        self.shards, self.replicas = self._groups(rank, world_size)
        device = "cpu" if arguments[0].head.weight.device.type == "cpu" else "cuda"
        self.mesh = init_device_mesh(device, (world_size,) if self.copies == 1 else (self.copies, self.shard))
        super().__init__(*arguments, **keywords)

    def _groups(self, rank: int, world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        rows = [list(range(first, first + self.shard)) for first in range(0, world_size, self.shard)]
        columns = [list(range(place, world_size, self.shard)) for place in range(self.shard)]
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in [*rows, *columns]}
        mine = [next(ranks for ranks in kind if rank in ranks) for kind in (rows, columns)]
        return groups[tuple(mine[0])], groups[tuple(mine[1])]

    def _shards_of(self, whole: Tensor) -> dist.ProcessGroup:
        """The ranks that hold its parts."""
        return self.shards

    def _rows(self, whole: Tensor) -> int:
        return -(-whole.shape[0] // self._shards_of(whole).size())

    def part(self, whole: Tensor) -> Tensor:
        rows, place = self._rows(whole), self._shards_of(whole).rank()
        return whole[place * rows : (place + 1) * rows]

    def average(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        averaged: dict[Tensor, Tensor] = {}
        for unit in self.units:
            members = [parameter for parameter in unit if parameter in gradients]
            if members:
                averaged |= self._average_unit(members, gradients)
        return averaged

    def _average_unit(self, members: list[Tensor], gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        padded = [self._padded(gradients[parameter]) for parameter in members]
        sent = torch.cat([rows.flatten(1) for rows in padded], dim=1).contiguous()
        received = torch.empty_like(sent[0])
        if self.shard == 1:
            received.copy_(sent[0])
        else:
            only = self.copies == 1
            dist.reduce_scatter_tensor(
                received, sent.flatten(), op=dist.ReduceOp.AVG, group=None if only else self.shards
            )
        if self.copies > 1:
            dist.all_reduce(received, op=dist.ReduceOp.AVG, group=self.replicas)
        # Views of one buffer, as FSDP2's are: on a GPU the last bits of a norm depend on where a gradient begins.
        parts = received.float().split([rows[0].numel() for rows in padded])
        return {p: part[: self.part(p).numel()].view_as(self.part(p)) for p, part in zip(members, parts, strict=True)}

    def _padded(self, gradient: Tensor) -> Tensor:
        """[shard, rows * ...]: zero rows at the end."""
        rows = self._rows(gradient)
        padded = gradient.new_zeros((self.shard * rows, *gradient.shape[1:]))
        padded[: gradient.shape[0]] = gradient
        return padded.view(self.shard, rows, *gradient.shape[1:])

    def restore(self, parameter: Tensor, part: Tensor) -> None:
        rows = self._rows(parameter)
        padded = parameter.new_zeros((rows, *parameter.shape[1:]))
        padded[: part.shape[0]] = part
        group = self._shards_of(parameter)
        gathered = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(gathered, padded, group=group)
        parameter.copy_(torch.cat(gathered)[: parameter.shape[0]])

    def norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        if math.isinf(self.norm_type):  # torch refuses that of empty shards; the largest of all is no matter of order
            largest = torch.stack([part.abs().amax() for part in gradients.values() if part.numel()]).amax()
            dist.all_reduce(largest.nan_to_num_(nan=math.inf), op=dist.ReduceOp.MAX)
            return largest
        total = torch.nn.utils.get_total_norm([self._placed(p, part) for p, part in gradients.items()], self.norm_type)
        return total.full_tensor()

    def _placed(self, parameter: Tensor, part: Tensor) -> DTensor:
        """As FSDP2 places it."""
        placements = [Shard(0)] if self.copies == 1 else [Replicate(), Shard(0)]
        return DTensor.from_local(
            part, self.mesh, placements, run_check=False, shape=parameter.size(), stride=parameter.stride()
        )


class ReplicatedLoop(DistributedLoop):
    """The whole optimizer on every rank; one all-reduce per unit."""

    def part(self, whole: Tensor) -> Tensor:
        return whole

    def average(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        averaged: dict[Tensor, Tensor] = {}
        for unit in self.units:
            for parameter in unit:
                if parameter in gradients:
                    gradient, ranks = gradients[parameter], dist.get_world_size()
                    by_torch = parameter.dtype == torch.float32  # DDP itself multiplies; by a third, these differ
                    averaged[parameter] = gradient * (1 / ranks) if by_torch else gradient / ranks
                    dist.all_reduce(averaged[parameter])
        return averaged

    def restore(self, parameter: Tensor, part: Tensor) -> None:
        parameter.copy_(part)

    def norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients.values(), self.norm_type)


class GatheringLoop(ShardedLoop):
    """Every rank gathers the gradients of classes that need whole tensors, and updates whole masters by them.

    Other classes see shards. The groups name their classes (``"optimizer_class"``). For Muon, each matrix of a tensor
    of three dimensions is a parameter of its own.

    Args:
        short: state is kept in bf16 between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        param_groups: Iterable[Mapping[str, Any]],
        *arguments: Any,
        whole: Iterable[type],
        short: bool = False,
        **keywords: Any,
    ) -> None:
        groups = [dict(group) for group in param_groups]
        shards = [{**group, "optimizer_class": torch.optim.AdamW} for group in groups]
        super().__init__(model, shards, SeveralClasses, *arguments, **keywords)  # type: ignore[arg-type]
        self.gathered = {p for group in groups if group["optimizer_class"] in whole for p in group["params"]}
        self.masters |= {p: self.initial.get(p, p.detach()).float().clone() for p in self.gathered}
        self.matrices = {p: [master] for p, master in self.masters.items()}
        muons = [p for group in groups if group["optimizer_class"] is torch.optim.Muon for p in group["params"]]
        self.matrices |= {p: list(self.masters[p]) for p in muons if p.dim() == 3}
        updated = [{**group, "params": [m for p in group["params"] for m in self.matrices[p]]} for group in groups]
        self.optimizer, self.short = SeveralClasses(updated), short  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, reported: Tensor) -> bool:
        applied = super().step(reported)
        for state in self.optimizer.state.values() if self.short else ():
            for key, value in state.items():
                value.copy_(value if key == "step" else value.bfloat16())
        return applied

    def with_gradient(self, parameter: Tensor, gradient: Tensor) -> list[Tensor]:
        if parameter not in self.gathered:
            return super().with_gradient(parameter, gradient)
        whole = torch.empty_like(parameter, dtype=gradient.dtype)
        super().restore(whole, gradient)
        matrices = self.matrices[parameter]
        for matrix, own in zip(matrices, whole if len(matrices) > 1 else [whole], strict=True):
            matrix.grad = own
        return matrices

    def restore(self, parameter: Tensor, part: Tensor) -> None:
        if parameter in self.gathered:
            parameter.copy_(part)
        else:
            super().restore(parameter, part)

    def adopt(self, parameter: Tensor) -> None:
        self.masters[parameter].copy_(parameter if parameter in self.gathered else self.part(parameter))

    def master(self, parameter: Tensor) -> Tensor:
        return self.part(self.masters[parameter]) if parameter in self.gathered else self.masters[parameter]

    @torch.no_grad()
    def state(self, parameter: Tensor) -> dict[str, Any]:
        """This rank's part of what has the parameter's shape."""
        states = [self.optimizer.state.get(matrix, {}) for matrix in self.matrices[parameter]]
        found = states[0] if len(states) == 1 else {key: torch.stack([own[key] for own in states]) for key in states[0]}
        parts = {}
        for key, value in found.items():
            cut = parameter in self.gathered and isinstance(value, Tensor) and value.shape == parameter.shape
            parts[key] = self.part(value) if cut else value
            if self.short and key != "step":
                parts[key] = parts[key].bfloat16()
        return parts
