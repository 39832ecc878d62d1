"""Process groups: the default one, that of the ranks which work together, and those that had to be made."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
    groups = [made_group(line, torch.device(device_type)) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


# -- groups that had to be made, once each -----------------------------------------------------------------------------

_made_groups: dict[tuple[tuple[int, ...], str | None, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def world_group(device: torch.device) -> dist.ProcessGroup:
    group = role_group() or dist.group.WORLD
    assert group is not None
    return group if carries(group, device) else made_group(role_ranks(), device)


def made_group(ranks: tuple[int, ...], device: torch.device, sender: int = 0) -> dist.ProcessGroup:
    """A new group over ``ranks``, made by these ranks alone and kept as long as the default group lives.

    One for everybody who needs such a group, and one for each sender of replicas' weights that has a number.
    """
    world = dist.group.WORLD
    assert world is not None
    backend = None if carries(world, device) else "gloo" if device.type == "cpu" else "nccl"
    owner, group = _made_groups.get((ranks, backend, sender), (None, None))
    if owner is not world or group is None:
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        _made_groups[ranks, backend, sender] = (world, group)
    return group


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors of this device."""
    backends = dist.get_backend_config(group)
    return f"{device.type}:" in backends or (":" not in backends and (backends == "gloo") == (device.type == "cpu"))
