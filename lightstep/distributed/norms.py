"""DTensors, device meshes and process groups: the only file of the optimizer that knows them.

A gradient's share of the global norm is added up over the ranks that hold different parts of it. One
:class:`NormReduction` is planned from the parameters (never from which of them have gradients), so every rank issues
the same collectives in the same order: one all-reduce over each mesh that shards something, one over all ranks for
the overflow flag, and none where nothing is sharded. On one mesh it is the all-reduce that torch's own norm of
DTensors makes, and another one where trainable parameters have no gradient on any rank.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def initialized() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if initialized() else 0


def world_size() -> int:
    """How many ranks train together; 1 without a process group."""
    return len(role_ranks())


def ranks_on_this_host() -> int:
    """How many ranks of the default group share this host's memory, as torchrun says; 1 without a group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if initialized() else 1


def end_process_group() -> None:
    """End the default process group and all others.

    gloo's threads still let go of the last tensors they sent, for which they need the interpreter: should it end
    before they are done, the process aborts (https://github.com/pytorch/pytorch/pull/179291). They are given a moment.
    """
    dist.destroy_process_group()
    time.sleep(0.1)


# -- the ranks of this process's role ---------------------------------------------------------------------------------

_role: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group for which roles were given out, and the group of this process's role."""


def form_role_group(ranks: Sequence[int]) -> None:
    """From now on these are the ranks that work together, this one among them, as long as the default group lives.

    Called by these ranks; those of other roles have a group of their own. Whatever spans "all ranks" in lightstep
    (meshes, norms, overflow flags, checkpoints) spans these.

    Raises:
        ValueError: this process is in another role's group already.
    """
    global _role
    ranks = tuple(ranks)
    known = role_group()
    if known is not None and ranks != role_ranks():
        raise ValueError(f"the ranks {list(ranks)} cannot work together: {list(role_ranks())} do so already")
    if known is None and len(ranks) < dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        _role = world, dist.new_group(list(ranks), use_local_synchronization=True)


def role_group() -> dist.ProcessGroup | None:
    """The group of :func:`form_role_group`; where all ranks are alike ``None``, torch's word for the default group."""
    return _role[1] if _role is not None and initialized() and _role[0] is dist.group.WORLD else None


def role_ranks() -> tuple[int, ...]:
    """The numbers in the default group of the ranks that work together, this one among them."""
    if not initialized():
        return (0,)
    group = role_group()
    return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """A mesh over the ranks that work together; called by all of them.

    Args:
        sizes: name and size of one or two dimensions, the outer one first.
    """
    names, shape = tuple(sizes), tuple(sizes.values())
    if role_group() is None:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    ranks = torch.tensor(role_ranks()).view(shape)
    place = (ranks == rank()).nonzero()[0].tolist()
    lines = [tuple(ranks.movedim(dim, -1)[tuple(place[:dim] + place[dim + 1 :])].tolist()) for dim in range(len(shape))]
    groups = [_made_group(line, torch.device(device_type)) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


# -- tensors ----------------------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor (which may still be replicated)."""
    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage and outside autograd; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_tensor(tensor)
    local = _arrived(tensor.to_local())
    return local.detach() if local.requires_grad else local


def mesh_ranks(tensor: Tensor) -> tuple[int, ...]:
    """The ranks that hold a DTensor together; this process alone for a plain tensor."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist()) if isinstance(tensor, DTensor) else (rank(),)


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as a DTensor placed like ``parameter`` (global shape and stride too); itself for a plain parameter.

    Nothing is sent or copied, and shards may be uneven or empty. State of GPU shards may lie on the host.
    """
    if not isinstance(parameter, DTensor):
        return local
    if local.device.type != parameter.device_mesh.device_type:
        return _on_another_device(parameter, local)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.size(),
        stride=parameter.stride(),
    )


def _on_another_device(parameter: DTensor, local: Tensor) -> DTensor:
    """What FSDP2 makes for offloaded shards; ``from_local`` would copy the tensor to the mesh's device."""
    meta = TensorMeta(parameter.size(), parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(parameter.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def local_gradient(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """``parameter.grad`` as the plain tensor that belongs to ``local_tensor(parameter)``.

    A gradient that is not placed like its parameter is brought there first: a partial one (tensor parallel norms and
    biases) is summed over its mesh, in ``dtype`` when that is given, so that nothing is rounded on the way.
    """
    if not isinstance(parameter.grad, DTensor):
        return None if parameter.grad is None else parameter.grad.detach()
    if isinstance(parameter, DTensor) and _same_placements(parameter.grad, parameter):
        return local_tensor(parameter.grad)
    gradient = cast(DTensor, parameter.grad.detach())
    if isinstance(parameter, DTensor):
        if dtype is not None and any(placement.is_partial() for placement in gradient.placements):
            gradient = cast(DTensor, gradient.to(dtype))
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    else:
        gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    return local_tensor(gradient)


def _same_placements(gradient: DTensor, parameter: DTensor) -> bool:
    return gradient.device_mesh == parameter.device_mesh and tuple(gradient.placements) == tuple(parameter.placements)


def _arrived(tensor: Tensor) -> Tensor:
    """The tensor itself, waited for when a functional collective is still filling it."""
    return (
        torch.ops._c10d_functional.wait_tensor(tensor.elem)
        if hasattr(tensor, "elem") and hasattr(tensor, "wait")
        else tensor
    )


# -- the reduction of partial norms ------------------------------------------------------------------------------------


class NormReduction:
    """Adds partial norms over the ranks that hold different parts of the parameters.

    Made once from the parameters (all ranks of a mesh at the same time, because process groups may be created);
    then :meth:`total` and :meth:`total_and_overflow` create nothing and never wait for the device.

    A plain tensor and a replicated DTensor are the same on all ranks and count once. A DTensor counts once on its own
    mesh; slices of one mesh along the same dimension (``mesh["tp"]`` of a ``dp × tp`` mesh) hold copies of each other.
    A DTensor on a mesh of its own that does not cover all ranks (experts), and any parameter that carries a true
    attribute ``differs_across_ranks``, is a different one on the other ranks, and is added up over all of them. What
    is taken for copies is compared once, in the first :meth:`refuse_unequal_copies`.

    Args:
        parameters: the optimizer's parameters, in one order on all ranks that share a mesh.
        everywhere: whether the overflow flag is agreed upon by all ranks that work together. ``None``: if some
            parameter is a DTensor on more than one rank.

    Attributes:
        device: where norms are added up.
        as_torch: whether torch defines the norm of such parameters: plain tensors on one device, or DTensors of one
            mesh with one dimension that shards. Then :meth:`over_shards` takes the place of :meth:`total`.
        sharded: whether they are DTensors.
        places: for each parameter the index of the partial sum that its gradient on this rank belongs to.
        sums: how many partial sums there are: what is alike on all ranks, one for each mesh, what differs on all ranks,
            and copies. A copy (of ranks that hold the same, all but the first) is looked at for overflow only.
    """

    def __init__(self, parameters: Sequence[Tensor], everywhere: bool | None = None) -> None:
        meshes = _meshes(parameters)
        self._taken_for_copies = [p for p in parameters if _on_a_slice(p)]
        self._own_parts = any(differs_across_ranks(p) for p in parameters)
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
        index = {key: number for number, key in enumerate(reduced, start=1)}
        self.sums = len(reduced) + 3
        self.places = [self._place(parameter, index) for parameter in parameters]
        self.sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self.as_torch, self._shards = self._torchs_way(parameters)
        self._world = _world_group(self.device) if self.everywhere or self._own_parts else None

    def _place(self, parameter: Tensor, index: dict[_MeshKey, int]) -> int:
        own_part, copy = self.sums - 2, self.sums - 1
        if differs_across_ranks(parameter):
            return own_part if _first_copy(parameter) else copy
        if not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is None:
            return 0
        number = index.get(_mesh_key(parameter.device_mesh), 0)
        return number if number == 0 or _first_copy(parameter) else copy

    def _torchs_way(self, parameters: Sequence[Tensor]) -> tuple[bool, dist.ProcessGroup | None]:
        """:attr:`as_torch`, and the ranks that hold different shards of one parameter."""
        kinds = {
            (_mesh_key(p.device_mesh), tuple(placed.is_replicate() for placed in p.placements))
            if isinstance(p, DTensor)
            else None
            for p in parameters
        }
        devices = {local_tensor(parameter).device for parameter in parameters}
        if self._own_parts or len(kinds) > 1 or len(devices) > 1:
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
        return True, group if _carries(group, self.device) else _made_group(ranks, self.device)

    def over_shards(self, norms: Tensor, present: Sequence[bool], norm_type: float) -> Tensor:
        """Norms of whole parameters from those of this rank's shards, as DTensor's ``_NormPartial`` reduces them.

        1-dim, for each parameter that has a gradient on some rank. The last bits depend on how many are reduced
        together, and torch reduces just these.

        Args:
            norms: 1-dim fp32, one for each gradient.
            present: of each parameter that may have a gradient on some rank, whether it has one here.
            norm_type: p, finite.
        """
        if self._shards is None:
            return norms
        powers = norms**norm_type
        if all(present):
            dist.all_reduce(powers, group=self._shards)
        else:
            powers = self._over_shards_of_some(powers, present)
        return powers ** (1.0 / norm_type)

    def _over_shards_of_some(self, powers: Tensor, present: Sequence[bool]) -> Tensor:
        """Ranks that have all gradients take part in the first reduction only, and know so: nothing is missing then.

        -0.0 stands for a gradient that is not here: the sum is -0.0 where it is missing on every rank. The host waits.
        """
        here = [number for number, found in enumerate(present) if found]
        padded = powers.new_full((len(present),), -0.0)
        padded[torch.tensor(here, dtype=torch.int64, device=padded.device)] = powers
        reduced = padded.clone()
        dist.all_reduce(reduced, group=self._shards)
        missing = reduced.signbit() & (reduced == 0)
        if not missing.any():
            return reduced
        reduced = padded[~missing]
        if reduced.numel():
            dist.all_reduce(reduced, group=self._shards)
        return reduced

    def largest_of_shards(self, largest: Tensor) -> Tensor:
        """The same for ``p = inf``, from the 0-dim largest element of this rank's gradients."""
        if self._shards is None:
            return largest
        # The largest of a NaN and a number is either one, depending on the backend.
        largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._shards)
        return largest

    def anywhere(self, overflow: Tensor) -> Tensor:
        """0-dim fp32: 1 if it is true on any of the ranks that agree, else 0."""
        flag = overflow.float()
        if self._world is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._world)
        return flag

    def refuse_unequal_copies(self) -> None:
        """In the first call: compare what is taken for copies.

        Raises:
            ValueError: on all ranks: parameters on slices of a mesh are no copies of each other.
        """
        if self._taken_for_copies:
            _refuse_unequal(self._taken_for_copies, self.device)
            self._taken_for_copies = []

    def total(self, sums: Sequence[Tensor], norm_type: float) -> Tensor:
        """``sum_i |g_i| ** p`` over all ranks (the largest ``|g_i|`` for ``p = inf``), 0-dim fp64.

        Args:
            sums: this rank's partial sums, :attr:`sums` 0-dim fp64 tensors on :attr:`device`; consumed.
            norm_type: p.
        """
        parts, own, _ = self._over_meshes(sums, norm_type)
        if self._own_parts and self._world is not None:
            dist.all_reduce(own, op=_operation(norm_type), group=self._world)
        return _combined([*parts, own], norm_type)

    def total_and_overflow(self, sums: Sequence[Tensor], norm_type: float) -> tuple[Tensor, Tensor]:
        """:meth:`total`, and a 0-dim bool tensor: whether anything is not finite, the total included, on any rank."""
        parts, own, copies = self._over_meshes(sums, norm_type)
        overflow = ~_combined([*parts, own, copies], norm_type).isfinite()
        if self._world is None:
            return _combined([*parts, own], norm_type), overflow
        everywhere = torch.stack([overflow.to(own.dtype), own])
        dist.all_reduce(everywhere, op=_operation(norm_type), group=self._world)
        return _combined([*parts, everywhere[1]], norm_type), everywhere[0] > 0

    def _over_meshes(self, sums: Sequence[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor, Tensor]:
        """What this rank knows now in full, each mesh's sum among it; its part of what all ranks add up; its copies."""
        if math.isinf(norm_type):  # the largest of a NaN and a number is either one, depending on the backend
            sums = [part.nan_to_num(nan=math.inf, posinf=math.inf) for part in sums]
        *parts, own, copies = sums
        for part, group in zip(parts[1:], self._groups, strict=True):
            dist.all_reduce(part, op=_operation(norm_type), group=group)
        return parts, own, copies


_MeshKey = tuple[tuple[int, ...], tuple[int, ...]]


def _mesh_key(mesh: DeviceMesh) -> _MeshKey:
    """Ranks and shape: equal on all ranks of the mesh, and an order in which all of them reduce."""
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)


def _meshes(parameters: Sequence[Tensor]) -> dict[_MeshKey, DeviceMesh]:
    found = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    return {_mesh_key(mesh): mesh for mesh in found.values()}


def _sharded_on(parameter: Tensor, key: _MeshKey) -> bool:
    """Whether ranks of this mesh hold different parts of the parameter, to be added up over it."""
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


def differs_across_ranks(parameter: Tensor) -> bool:
    """Whether ranks outside the parameter's mesh (other ranks, of a plain one) hold other parameters in its place."""
    if not initialized() or world_size() == 1:
        return False
    if getattr(parameter, "differs_across_ranks", False):
        return True
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() >= world_size():
        return False
    return not _is_slice(parameter.device_mesh)


def _is_slice(mesh: DeviceMesh) -> bool:
    """Whether the mesh was cut out of a larger one. DeviceMesh has no public word for it."""
    return _root(mesh) is not mesh and _root(mesh).size() > mesh.size()


def _root(mesh: DeviceMesh) -> DeviceMesh:
    root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return root


def _on_a_slice(parameter: Tensor) -> bool:
    """Whether ranks outside the parameter's mesh are taken to hold copies of it."""
    if not isinstance(parameter, DTensor) or differs_across_ranks(parameter):
        return False
    return parameter.device_mesh.get_coordinate() is not None and _is_slice(parameter.device_mesh)


def _refuse_unequal(parameters: Sequence[Tensor], device: torch.device) -> None:
    """One gathering of checksums over each root mesh; the host waits."""
    by_root: dict[tuple[int, ...], list[DTensor]] = {}
    for parameter in cast(Sequence[DTensor], parameters):
        by_root.setdefault(tuple(_root(parameter.device_mesh).mesh.flatten().tolist()), []).append(parameter)
    for ranks, listed in sorted(by_root.items()):
        group = _group(ranks, _root(listed[0].device_mesh), device)
        everybody: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everybody, _parts(listed), group=group)
        first: dict[Any, tuple[int, int]] = {}
        for at, parts in zip(dist.get_process_group_ranks(group), everybody, strict=True):
            for place, (shape, checksum) in parts.items():
                other, expected = first.setdefault(place, (at, checksum))
                if checksum != expected:
                    raise ValueError(
                        f"a parameter of shape {shape} on a slice of a device mesh differs between ranks {other} and "
                        f"{at}, which are taken to hold copies of it: if each slice has a parameter of its own (an "
                        "expert), set parameter.differs_across_ranks = True on all ranks before the optimizer is "
                        "built; else start from equal weights"
                    )


def _parts(parameters: Sequence[DTensor]) -> dict[Any, tuple[tuple[int, ...], int]]:
    """Number, slice and place in it, by which copies find each other -> shape, and the sum of the local bits."""
    sums = torch.stack([_bits(local_tensor(parameter)).sum(dtype=torch.int64) for parameter in parameters]).tolist()
    meshes = [parameter.device_mesh for parameter in parameters]
    places = [(i, mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ())) for i, mesh in enumerate(meshes)]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    return dict(zip(places, zip(shapes, sums, strict=True), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(-1).view(integer)


def _reduction_device(parameters: Sequence[Tensor]) -> torch.device:
    """Where norms are added up: the accelerator if any parameter is there."""
    devices = {local_tensor(p).device for p in parameters}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _operation(norm_type: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def _combined(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    stacked = torch.stack(list(parts))
    return stacked.amax() if math.isinf(norm_type) else stacked.sum()


# -- replicas ----------------------------------------------------------------------------------------------------------


class Replicas:
    """The ranks that hold the same part of the model, and what they send each other.

    Each method that sends is called by all of them, in the same order, with tensors of equal shapes.

    Args:
        group: these ranks, and this one among them.
        apart: send through process groups of one's own. Needed when sending goes on beside the model's forward and
            other optimizers' updates: what a group sends, it sends in one order.

    Attributes:
        rank: this process's place among them.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup, apart: bool = False) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._ranks, self._apart = group, tuple(dist.get_process_group_ranks(group)), apart
        self._carriers: dict[str, dist.ProcessGroup] = {}
        self._number = 0

    def again(self) -> Replicas:
        """The same ranks, for another optimizer."""
        return Replicas(self._group, self._apart)

    def close(self) -> None:
        """Others may send through the groups that were made for this; all of them call it, in the same order."""
        _senders.get(self._ranks, set()).discard(self._number)
        self._carriers, self._number = {}, 0

    @classmethod
    def of_shards(cls, parameters: Iterable[Tensor], apart: bool = False) -> Replicas | None:
        """Those with the same shards: all parameters are DTensors, with copies along one dimension of one mesh."""
        listed = list(parameters)
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in listed}
        mesh = meshes.pop() if len(meshes) == 1 else None
        if mesh is None:
            return None
        placements = zip(*(cast(DTensor, parameter).placements for parameter in listed), strict=True)
        copied = [dim for dim, placed in enumerate(placements) if all(one.is_replicate() for one in placed)]
        return cls(mesh.get_group(copied[0]), apart) if len(copied) == 1 else None

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work | None:
        """Start to fill ``tensor`` (contiguous, any dtype and device) with the owner's values; to be waited for."""
        values = tensor.view(-1).view(torch.uint8)
        return dist.broadcast(values, group=self._carrier(tensor.device), group_src=owner, async_op=True)

    @staticmethod
    def wait(works: Iterable[dist.Work | None]) -> None:
        """What is done next sees the values: the current stream waits, on the CPU the caller does."""
        for work in works:
            if work is not None:
                work.wait()

    def broadcast_object(self, value: Any, owner: int) -> Any:
        """The owner's ``value``, which can be pickled. The host waits."""
        values = [value]
        dist.broadcast_object_list(values, group=self._carrier(torch.device("cpu")), group_src=owner)
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank. The host waits."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._carrier(torch.device("cpu")))
        return values

    def _carrier(self, device: torch.device) -> dist.ProcessGroup:
        """The group, or one over the same ranks that can send tensors of this device."""
        if device.type not in self._carriers:
            if self._apart and not self._number:
                taken = _senders.setdefault(self._ranks, set())
                self._number = next(number for number in itertools.count(1) if number not in taken)
                taken.add(self._number)
            shared = _carries(self._group, device) and not self._apart
            self._carriers[device.type] = self._group if shared else _made_group(self._ranks, device, self._number)
        return self._carriers[device.type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer whose replicas share the work cannot be pickled: save optimizer.state_dict(), or a checkpoint"
        )


# -- process groups that this file had to make, once each --------------------------------------------------------------

_made_groups: dict[tuple[tuple[int, ...], str | None, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_senders: dict[tuple[int, ...], set[int]] = {}
"""The numbers of the replicas that send through groups of their own, by ranks."""


def _group(ranks: tuple[int, ...], mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup:
    """One group over all ranks of the mesh that can reduce tensors of this device."""
    if ranks == role_ranks():
        return _world_group(device)
    if mesh.ndim == 1 and _carries(mesh.get_group(), device):
        return mesh.get_group()
    return _made_group(ranks, device)


def _world_group(device: torch.device) -> dist.ProcessGroup:
    group = role_group() or dist.group.WORLD
    assert group is not None
    return group if _carries(group, device) else _made_group(role_ranks(), device)


def _made_group(ranks: tuple[int, ...], device: torch.device, sender: int = 0) -> dist.ProcessGroup:
    """A new group over ``ranks``, made by these ranks alone and kept as long as the default group lives.

    One for everybody who needs such a group, and one for each sender of replicas' weights that has a number.
    """
    world = dist.group.WORLD
    assert world is not None
    backend = None if _carries(world, device) else "gloo" if device.type == "cpu" else "nccl"
    owner, group = _made_groups.get((ranks, backend, sender), (None, None))
    if owner is not world or group is None:
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        _made_groups[ranks, backend, sender] = (world, group)
    return group


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors of this device."""
    backends = dist.get_backend_config(group)
    return f"{device.type}:" in backends or (":" not in backends and (backends == "gloo") == (device.type == "cpu"))
