"""Reduction of partial norms over the ranks that hold different parts of the parameters.

A :class:`NormReduction` is planned from the parameters, whichever of them have gradients. So every rank issues the same
collectives in the same order: one all-reduce per mesh that shards a parameter, one over all ranks for the overflow
flag, and none if nothing is sharded. On a single mesh it is the all-reduce of torch's own norm of DTensors, and a
second one if trainable parameters have no gradient on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightstep.distributed.groups import get_or_make_group, initialized, role_ranks, supports, world_group, world_size
from lightstep.distributed.tensors import differs_across_ranks, is_slice, local_tensor, ranks_of_root, root_mesh


class NormReduction:
    """Adds partial norms over the ranks that hold different parts of the parameters.

    Made once from the parameters, by all ranks of a mesh at the same time, because process groups may be created. After
    that :meth:`total` and :meth:`total_and_overflow` create nothing and never wait for the device.

    A plain tensor and a replicated DTensor are the same on all ranks and count once. A DTensor counts once on its own
    mesh; slices of one mesh along the same dimension (``mesh["tp"]`` of a ``dp × tp`` mesh) hold copies of each other.
    A DTensor on a mesh of its own that does not cover all ranks (experts), and any parameter whose attribute
    ``differs_across_ranks`` is true, is a different parameter on the other ranks, and is added up over all of them.
    Assumed copies are compared once, by :meth:`check_copies`.

    Args:
        parameters: the optimizer's parameters, in one order on all ranks that share a mesh.
        everywhere: whether all ranks of this process's role share the overflow flag. ``None``: if some parameter is a
            DTensor on more than one rank.
        compared: what is compared in their place, if their weights cannot be read there.

    Attributes:
        device: the device on which norms are added up.
        as_torch: whether torch defines the norm of these parameters: plain tensors on one device, or DTensors on one
            mesh that is sharded along one dimension. Then :meth:`sum_over_shards` replaces :meth:`total`.
        sharded: whether any of them is a DTensor.
        has_shards: whether :meth:`sum_over_shards` and :meth:`max_over_shards` have anything to reduce.
        everywhere: whether :meth:`anywhere` has.
        assumed_copies: weights that :meth:`check_copies` has to compare.
        sum_of: for each parameter, the index of the partial sum to which its local gradient belongs.
        num_sums: the number of partial sums. The first is of parameters that are equal on all ranks. Then follow one
            per mesh, one of parameters that differ on all ranks, and one of copies. Copies (on all but the first of the
            ranks that hold the same part) count for overflow only.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        everywhere: bool | None = None,
        compared: Sequence[Tensor] | None = None,
    ) -> None:
        meshes = _meshes(parameters)
        pairs = zip(parameters, compared or parameters, strict=True)
        self.assumed_copies = [weight for parameter, weight in pairs if _on_a_slice(parameter)]
        self._ranks = {number for ranks, _ in meshes for number in ranks}
        self._differing = any(differs_across_ranks(p) for p in parameters)
        self.everywhere = (
            initialized()
            and world_size() > 1
            and (any(mesh.size() > 1 for mesh in meshes.values()) if everywhere is None else everywhere)
        )
        self.device = _reduction_device(parameters)
        reduced = {
            key: mesh
            for key, mesh in sorted(meshes.items())
            if mesh.get_coordinate() is not None and any(_sharded_on(p, key) for p in parameters)
        }
        self._groups = [_group(key[0], mesh, self.device) for key, mesh in reduced.items()]
        self._members = [[n for n, p in enumerate(parameters) if _sharded_on(p, key)] for key in reduced]
        index = {key: number for number, key in enumerate(reduced, start=1)}
        self.num_sums = len(reduced) + 3
        self.sum_of = [self._sum_index(parameter, index) for parameter in parameters]
        self.sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self.as_torch, self._shards = self._plan_as_torch(parameters)
        self.has_shards = self._shards is not None
        self._world = world_group(self.device) if self.everywhere or self._differing else None

    def _sum_index(self, parameter: Tensor, index: dict[_MeshKey, int]) -> int:
        differing, copy = self.num_sums - 2, self.num_sums - 1
        if differs_across_ranks(parameter):
            return differing if _first_copy(parameter) else copy
        if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is None:
            return 0
        number = index.get(_mesh_key(parameter.device_mesh), 0)
        return number if number == 0 or _first_copy(parameter) else copy

    def _plan_as_torch(self, parameters: Sequence[Tensor]) -> tuple[bool, dist.ProcessGroup | None]:
        """:attr:`as_torch`, and the group of ranks that hold different shards of one parameter."""
        kinds = {
            (_mesh_key(p.device_mesh), tuple(placed.is_replicate() for placed in p.placements))
            if isinstance(p, DTensor)
            else None
            for p in parameters
        }
        devices = {local_tensor(parameter).device for parameter in parameters}
        if self._differing or len(kinds) > 1 or len(devices) > 1:
            return False, None
        if not self.sharded:
            return True, None
        first = cast(DTensor, parameters[0])
        mesh, placements = first.device_mesh, first.placements
        dims = [d for d, placed in enumerate(placements) if not placed.is_replicate() and mesh.size(d) > 1]
        if mesh.get_coordinate() is None or len(dims) > 1:
            return False, None
        if not dims:
            return True, None
        group = mesh.get_group(dims[0])
        ranks = tuple(dist.get_process_group_ranks(group))
        return True, group if supports(group, self.device) else get_or_make_group(ranks, self.device)

    def sum_over_shards(
        self,
        norms: Tensor,
        present: Sequence[bool],
        norm_type: float,
        on_partial: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> Tensor:
        """The norms of whole parameters from those of this rank's shards, reduced as by DTensor's ``_NormPartial``.

        The result is 1-dim, with one norm for each parameter that has a gradient on some rank. torch reduces exactly
        these together, and the last bits depend on their number.

        Args:
            norms: 1-dim fp32, one for each gradient.
            present: for each parameter that may have a gradient on some rank, whether it has one here.
            norm_type: p, finite.
            on_partial: called with the positions in ``present`` of parameters with a gradient on other ranks alone.
        """
        powers = norms**norm_type
        if all(present):
            dist.all_reduce(powers, group=self._shards)
        else:
            powers = self._sum_over_shards_with_missing(powers, present, on_partial)
        return powers ** (1.0 / norm_type)

    def _sum_over_shards_with_missing(
        self, powers: Tensor, present: Sequence[bool], on_partial: Callable[[Sequence[int]], None]
    ) -> Tensor:
        """The same if this rank lacks some gradients; the host waits.

        A missing gradient counts as -0.0, so that the sum is -0.0 exactly if it is missing on every rank. A second
        reduction leaves out such gradients. If some rank has all gradients, none is missing everywhere: there is no
        second reduction, on any rank.
        """
        here = [number for number, found in enumerate(present) if found]
        padded = powers.new_full((len(present),), -0.0)
        padded[torch.tensor(here, dtype=torch.int64, device=padded.device)] = powers
        reduced = padded.clone()
        dist.all_reduce(reduced, group=self._shards)
        missing = reduced.signbit() & (reduced == 0)
        nowhere = missing.tolist()
        elsewhere = [n for n, (found, none) in enumerate(zip(present, nowhere, strict=True)) if not (found or none)]
        if elsewhere:
            on_partial(elsewhere)
        if not any(nowhere):
            return reduced
        reduced = padded[~missing]
        if reduced.numel():
            dist.all_reduce(reduced, group=self._shards)
        return reduced

    def max_over_shards(
        self, norms: Tensor, present: Sequence[bool], on_partial: Callable[[Sequence[int]], None] = lambda _: None
    ) -> Tensor:
        """:meth:`sum_over_shards` for ``p = inf``; a parameter that has no gradient anywhere has the norm 0.

        If this rank lacks some gradients, the host waits.
        """
        # The maximum of NaN and a number is either of them, depending on the backend.
        largest = norms.nan_to_num(nan=math.inf, posinf=math.inf)
        if not all(present):
            here = [number for number, found in enumerate(present) if found]
            padded = largest.new_full((len(present),), -1.0)
            padded[torch.tensor(here, dtype=torch.int64, device=padded.device)] = largest
            largest = padded
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._shards)
        if not all(present):
            somewhere = (largest >= 0).tolist()
            elsewhere = [n for n, found in enumerate(present) if somewhere[n] and not found]
            if elsewhere:
                on_partial(elsewhere)
        return largest.clamp_(min=0)

    def anywhere(self, overflow: Tensor) -> Tensor:
        """The overflow flag, 0-dim fp32: 1 if it is 1 on any rank that shares the flag, else 0; reduced in place."""
        self._reduce_over_role(overflow, dist.ReduceOp.MAX)
        return overflow

    def _reduce_over_role(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        try:
            dist.all_reduce(values, op=operation, group=self._world)
        except RuntimeError as error:
            self._name_other_ranks(error)
            raise

    def _name_other_ranks(self, error: RuntimeError) -> None:
        """Say which ranks were waited for though no parameter here is on them: they may not train at all."""
        others = sorted(set(role_ranks()) - self._ranks)
        if self._ranks and others:
            error.add_note(
                f"the parameters here are on ranks {sorted(self._ranks)}, and ranks {others} have to step, too: a "
                "DTensor on a mesh that does not cover all ranks counts in the norm as a different parameter, or a "
                "copy, on the others. If these do not train, say so in the strategy of the ranks that do: "
                f"roles: {{rollout: {{mode: async, ranks: {others}}}}}"
            )

    def check_copies(self) -> None:
        """Compare :attr:`assumed_copies`.

        Raises:
            ValueError: on all ranks: parameters on slices of a mesh are not copies of each other.
        """
        try:
            _check_equal(self.assumed_copies, self.device)
        except RuntimeError as error:
            self._name_other_ranks(error)
            raise
        self.assumed_copies = []

    def total(self, sums: Sequence[Tensor], norm_type: float) -> Tensor:
        """``sum_i |g_i| ** p`` over all ranks (the largest ``|g_i|`` for ``p = inf``), 0-dim fp64.

        Args:
            sums: this rank's partial sums, :attr:`num_sums` 0-dim fp64 tensors on :attr:`device`; consumed.
            norm_type: p.
        """
        parts, differing, _ = self._reduce_over_meshes(sums, norm_type)
        if self._differing and self._world is not None:
            self._reduce_over_role(differing, _operation(norm_type))
        return _combined([*parts, differing], norm_type)

    def total_and_overflow(
        self,
        sums: Sequence[Tensor],
        norm_type: float,
        present: Sequence[bool | None],
        on_partial: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`total`, and whether it or any part of it is not finite on any rank (0-dim bool).

        If this rank lacks some gradients of shards, the host waits.

        Args:
            present: for each parameter, whether it has a gradient here; ``None``: it can have none on any rank.
            on_partial: called with the numbers of sharded parameters with a gradient on other ranks alone.
        """
        parts, differing, copies = self._reduce_over_meshes(sums, norm_type, present, on_partial)
        overflow = ~_combined([*parts, differing, copies], norm_type).isfinite()
        if self._world is None:
            return _combined([*parts, differing], norm_type), overflow
        everywhere = torch.stack([overflow.to(differing.dtype), differing])
        self._reduce_over_role(everywhere, _operation(norm_type))
        return _combined([*parts, everywhere[1]], norm_type), everywhere[0] > 0

    def _reduce_over_meshes(
        self,
        sums: Sequence[Tensor],
        norm_type: float,
        present: Sequence[bool | None] = (),
        on_partial: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Reduce each mesh's partial sum; returns these with the first one, the differing part, and the copies.

        With each sum goes, for each of its parameters, whether it has a gradient.
        """
        if math.isinf(norm_type):  # as in `max_over_shards`
            sums = [part.nan_to_num(nan=math.inf, posinf=math.inf) for part in sums]
        *parts, differing, copies = sums
        elsewhere: list[int] = []
        for number, (group, members) in enumerate(zip(self._groups, self._members, strict=True), start=1):
            listed = [member for member in members if present and present[member] is not None]
            missing = [member for member in listed if not present[member]]
            found = parts[number].new_ones(1 + len(listed))
            if missing:
                found[1:] = torch.tensor([bool(present[member]) for member in listed])
            found[0] = parts[number]
            dist.all_reduce(found, op=_operation(norm_type), group=group)
            parts[number] = found[0]
            if missing:
                somewhere = dict(zip(listed, found[1:].tolist(), strict=True))
                elsewhere += [member for member in missing if somewhere[member]]
        if elsewhere:
            on_partial(elsewhere)
        return parts, differing, copies


_MeshKey = tuple[tuple[int, ...], tuple[int, ...]]


def _mesh_key(mesh: DeviceMesh) -> _MeshKey:
    """Ranks and shape: equal on all ranks of the mesh, and sortable, so that all ranks reduce in one order."""
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)


def _meshes(parameters: Sequence[Tensor]) -> dict[_MeshKey, DeviceMesh]:
    found = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    return {_mesh_key(mesh): mesh for mesh in found.values()}


def _sharded_on(parameter: Tensor, key: _MeshKey) -> bool:
    """Whether ranks of this mesh hold different parts of the parameter, whose norms are added up."""
    if not isinstance(parameter, DTensor) or _mesh_key(parameter.device_mesh) != key or differs_across_ranks(parameter):
        return False
    return any(size > 1 for size in _sharded_sizes(parameter))


def _sharded_sizes(parameter: DTensor) -> list[int]:
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}; partial parameters "
            "have no norm: redistribute it to Replicate() or Shard(dim) first"
        )
    mesh = parameter.device_mesh
    return [mesh.size(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]


def _first_copy(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of the parameter."""
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        at == 0 for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    )


def _on_a_slice(parameter: Tensor) -> bool:
    """Whether ranks outside the parameter's mesh are assumed to hold copies of it."""
    if not isinstance(parameter, DTensor) or differs_across_ranks(parameter):
        return False
    return parameter.device_mesh.get_coordinate() is not None and is_slice(parameter.device_mesh)


def _check_equal(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Gather checksums over each root mesh and compare them; the host waits."""
    by_root: dict[tuple[int, ...], list[DTensor]] = {}
    for parameter in cast(Sequence[DTensor], parameters):
        by_root.setdefault(ranks_of_root(parameter.device_mesh), []).append(parameter)
    for ranks, listed in sorted(by_root.items()):
        group = _group(ranks, root_mesh(listed[0].device_mesh), device)
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, _checksums(listed), group=group)
        first: dict[Any, tuple[int, int]] = {}
        for at, parts in zip(dist.get_process_group_ranks(group), gathered, strict=True):
            for place, (shape, checksum) in parts.items():
                other, expected = first.setdefault(place, (at, checksum))
                if checksum != expected:
                    raise ValueError(
                        f"a parameter of shape {shape} on a slice of a device mesh differs between ranks {other} and "
                        f"{at}, which are assumed to hold copies of it: if each slice has a parameter of its own (an "
                        "expert), set parameter.differs_across_ranks = True on all ranks before the optimizer is "
                        "built; else start from equal weights"
                    )


def _checksums(parameters: Sequence[DTensor]) -> dict[Any, tuple[tuple[int, ...], int]]:
    """Number, slice, and place in the slice (equal for copies) -> shape, and the sum of the local bits."""
    sums = torch.stack([_bits(local_tensor(parameter)).sum(dtype=torch.int64) for parameter in parameters]).tolist()
    meshes = [parameter.device_mesh for parameter in parameters]
    places = [(i, mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ())) for i, mesh in enumerate(meshes)]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return dict(zip(places, zip(shapes, sums, strict=True), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(integer)


def _reduction_device(parameters: Sequence[Tensor]) -> torch.device:
    """The device on which norms are added up: the accelerator if any parameter is there."""
    devices = {local_tensor(p).device for p in parameters}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _operation(norm_type: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def _combined(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    stacked = torch.stack(list(parts))
    return stacked.amax() if math.isinf(norm_type) else stacked.sum()


def _group(ranks: tuple[int, ...], mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup:
    """A group over all ranks of the mesh that supports tensors of this device."""
    if ranks == role_ranks():
        return world_group(device)
    if mesh.ndim == 1 and supports(mesh.get_group(), device):
        return mesh.get_group()
    return get_or_make_group(ranks, device)
