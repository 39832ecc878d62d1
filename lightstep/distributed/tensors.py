"""DTensors to local tensors and back, and where a shard's elements are in the whole tensor.

Parameters that DeepSpeed has divided among the ranks (stage 3) count too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightstep.distributed.groups import initialized, rank, role_ranks, world_size


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor (which may still be replicated)."""
    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, with the same storage and outside autograd; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_tensor(tensor)
    local = _waited_for(tensor.to_local())
    return local.detach() if local.requires_grad else local


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor. One that DeepSpeed has divided is empty itself."""
    return getattr(tensor, "ds_shape", tensor.shape)


def is_divided(tensor: Tensor) -> bool:
    """Whether DeepSpeed has divided the parameter among the ranks."""
    return hasattr(tensor, "ds_id")


def fill_local(tensor: Tensor, part: Tensor) -> None:
    """Copy ``part`` to this rank's part of the tensor. Of a divided one it is the whole, and all ranks call this."""
    if not is_divided(tensor):
        local_tensor(tensor).copy_(part)
        return
    with _gathered(tensor, modifier_rank=0):
        tensor.copy_(part)


def _gathered(tensor: Tensor, modifier_rank: int | None = None) -> Any:
    """In the block a divided parameter is whole. Afterwards every rank keeps its part of what ``modifier_rank`` had."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor], modifier_rank=modifier_rank)


def writes(parameter: Tensor) -> int:
    """The count of in-place writes: torch counts those to a DTensor there, and those to its local tensor here."""
    if not isinstance(parameter, DTensor):
        return parameter._version
    return parameter._version + parameter._local_tensor._version


def mesh_ranks(tensor: Tensor) -> tuple[int, ...]:
    """The ranks that hold a DTensor together; this process alone for a plain tensor."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist()) if isinstance(tensor, DTensor) else (rank(),)


def layout_of(tensor: Tensor) -> Hashable:
    """Equal for two tensors of one shape that ranks share alike."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh, tuple(tensor.placements)
    return getattr(tensor, "differs_across_ranks", False)


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """``local`` as a DTensor placed like ``parameter`` (global shape and stride too); itself for a plain parameter.

    Nothing is communicated or copied, and shards may be uneven or empty. State of GPU shards may be on the host.
    """
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.size(), parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(parameter.placements), tensor_meta=meta)
    return DTensor(
        local, spec, requires_grad=False
    )  # as FSDP2; `from_local` would move the tensor to the mesh's device


def dense_strides(like: Tensor) -> tuple[int, ...]:
    """The strides of a copy, which has no gaps, and its dimensions in the same order in memory."""
    return torch.empty_like(like, device="meta").stride()


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's dimensions as ``torch.Tensor.clone`` keeps them in memory, the outermost one first.

    A part of it in this order, of one row or empty, has the order, too.
    """
    strides = dense_strides(tensor)
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -tensor.shape[dim])))


def empty_in_order(
    shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """New memory without gaps for a tensor of this shape, whose dimensions are in this :func:`memory_order`."""
    strides, inner = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim], inner = inner, inner * max(shape[dim], 1)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)


def gather_tensor(
    tensor: Tensor,
    sender: int | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The whole tensor, on every rank. Called by all ranks: an all-gather if it is sharded, and perhaps a broadcast.

    A parameter that DeepSpeed has divided is gathered into new memory, too.

    Args:
        sender: the rank that broadcasts a tensor of which some ranks have no part; ``None``: all of them have one.
        group: the ranks that call this.
        dtype: sharded tensors of a wider dtype are cast to it before the all-gather.
    """
    if is_divided(tensor):
        with _gathered(tensor):
            return tensor.detach().clone()
    tensor = tensor.detach()
    if dtype is not None and is_sharded(tensor) and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full if sender is None else _broadcast(full, tensor, sender, group)


def _broadcast(full: Tensor, sharded: Tensor, sender: int, group: dist.ProcessGroup | None) -> Tensor:
    """The sender's ``full`` on every rank. On ranks outside the mesh ``full_tensor()`` has returned an empty tensor."""
    if rank() not in mesh_ranks(sharded):
        full = torch.empty(sharded.shape, dtype=sharded.dtype, device=full.device)
    full = full.contiguous()
    dist.broadcast(full.view(-1).view(torch.uint8), src=sender, group=group)
    return full


def local_gradient(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """``parameter.grad`` as the plain tensor that belongs to ``local_tensor(parameter)``.

    A gradient that is not placed like its parameter is redistributed first. A partial one (tensor-parallel norms and
    biases) is summed over its mesh in ``dtype``, if that is given, so that the sum is not rounded.
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


def _waited_for(tensor: Tensor) -> Tensor:
    """The tensor itself; if a functional collective is still filling it, after waiting for that."""
    if hasattr(tensor, "elem") and hasattr(tensor, "wait"):
        return torch.ops._c10d_functional.wait_tensor(tensor.elem)
    return tensor


def differs_across_ranks(parameter: Tensor) -> bool:
    """Whether ranks outside the parameter's mesh (for a plain parameter: all other ranks) hold different parameters."""
    if not initialized() or world_size() == 1:
        return False
    if getattr(parameter, "differs_across_ranks", False):
        return True
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() >= world_size():
        return False
    return not is_slice(parameter.device_mesh)


def is_slice(mesh: DeviceMesh) -> bool:
    """Whether the mesh is a slice of one with more ranks of this process's role."""
    return root_mesh(mesh) is not mesh and len(ranks_of_root(mesh)) > mesh.size()


def ranks_of_root(mesh: DeviceMesh) -> tuple[int, ...]:
    """Those of the mesh from which this one was sliced that have this process's role."""
    own = role_ranks()
    return tuple(number for number in root_mesh(mesh).mesh.flatten().tolist() if number in own)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh from which this one was sliced, or itself. DeviceMesh has no public attribute for it."""
    root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return root


class Window(NamedTuple):
    """Element ``e`` of a shard (row-major) is element ``start + e + e // inner * jump`` of the whole tensor.

    ``jump`` is 0 for a tensor that is sharded along its first dimension, or not at all.
    """

    start: int = 0
    inner: int = 1
    jump: int = 0
    first: int = 0
    """The first element of the range in question."""

    def at(self, elements: int) -> tuple[int, int]:
        """The position in the whole tensor of the element that many behind ``first``, and its offset in its row."""
        rows, rest = divmod(self.first + elements, self.inner)
        return self.start + self.first + elements + rows * self.jump, rest

    def numbers(self, first: int, stop: int) -> Tensor:
        """The positions in the whole tensor of elements ``first`` to ``stop``: int32 on the host, modulo 2^32."""
        elements = torch.arange(first, stop, dtype=torch.int64, device="cpu")
        return (elements + self.start + elements // self.inner * self.jump).to(torch.int32)


def window_of(parameter: Tensor) -> Window:
    """The window of this rank's shard; for a plain tensor the whole.

    Raises:
        ValueError: it is sharded along more than one dimension behind the first.
    """
    if not isinstance(parameter, DTensor):
        return Window()
    shape = parameter.shape
    local, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    if not math.prod(local):
        return Window()
    divided = [dim for dim in range(1, len(shape)) if local[dim] != shape[dim] and math.prod(local[:dim]) > 1]
    if len(divided) > 1:
        raise ValueError(f"its shape {tuple(shape)} is sharded along {len(divided)} dimensions behind the first")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if not divided:
        return Window(start)
    (dim,) = divided
    inner, whole = local[dim] * strides[dim], shape[dim] * strides[dim]
    return Window(start, inner, whole - inner)
