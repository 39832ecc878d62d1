"""Process groups: the default one, that of this process's role, and those that are made on demand."""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

_GLOO_FREES_TENSORS_S = 0.1


initialized: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Whether a default process group exists."""


def rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if initialized() else 0


def world_size() -> int:
    """How many ranks this process's role has; 1 without a process group."""
    return len(role_ranks())


def ranks_on_this_host() -> int:
    """How many ranks of the default group share this host's memory, as torchrun says; 1 without a group."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if initialized() else 1


@functools.cache
def let_gloo_finish_at_exit() -> None:
    """Wait a moment before the interpreter ends, if it ends after a process group was used.

    gloo's threads may still be freeing the last tensors that they sent, for which they need the interpreter. If it ends
    before they are done, the process aborts (https://github.com/pytorch/pytorch/pull/179291), also where the group has
    been destroyed.
    """
    atexit.register(time.sleep, _GLOO_FREES_TENSORS_S)


# -- the ranks of this process's role ---------------------------------------------------------------------------------

_role: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group at the time of :func:`form_role_group`, and the group of this process's role."""


def form_role_group(ranks: Sequence[int]) -> None:
    """Make these ranks, this one among them, one role; it lasts as long as the default group.

    Called by these ranks alone; other roles have groups of their own. "All ranks" means the ranks of the role
    everywhere in lightstep: in meshes, norms, overflow flags and checkpoints.

    Raises:
        ValueError: this process is in the group of another role already.
    """
    global _role
    ranks = tuple(ranks)
    known = role_group()
    if known is not None and ranks != role_ranks():
        raise ValueError(
            f"the ranks {list(ranks)} cannot form a role: this process is in that of {list(role_ranks())} already"
        )
    if known is None and len(ranks) < dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        _role = world, new_group(ranks)


def role_group() -> dist.ProcessGroup | None:
    """The group of :func:`form_role_group`; ``None``, torch's value for the default group, if there are no roles."""
    return _role[1] if _role is not None and initialized() and _role[0] is dist.group.WORLD else None


def role_ranks() -> tuple[int, ...]:
    """The ranks (in the default group) of this process's role, this one among them."""
    if not initialized():
        return (0,)
    group = role_group()
    return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))


def make_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """A mesh over the ranks of this process's role; called by all of them.

    Args:
        sizes: name and size of one or two dimensions, the outer one first.
    """
    names, shape = tuple(sizes), tuple(sizes.values())
    if role_group() is None:
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            _limit_time(group)
        return mesh
    ranks = torch.tensor(role_ranks()).view(shape)
    place = (ranks == rank()).nonzero()[0].tolist()
    lines = [tuple(ranks.movedim(dim, -1)[tuple(place[:dim] + place[dim + 1 :])].tolist()) for dim in range(len(shape))]
    groups = [get_or_make_group(line, torch.device(device_type)) for line in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A group that its ranks alone make. They wait for each other as long as in the default group, here and later."""
    world = dist.group.WORLD
    assert world is not None
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=_time_limit(world), backend=backend, use_local_synchronization=True
    )
    return group


def _limit_time(group: dist.ProcessGroup) -> None:
    """Lower the group's time limit to the default group's: torch gives every group half an hour (NCCL: ten minutes)."""
    world = dist.group.WORLD
    assert world is not None
    limit, current = _time_limit(world), _time_limit(group)
    if limit is not None and current is not None and limit < current:
        _set_pg_timeout(limit, group)


def _time_limit(group: dist.ProcessGroup) -> datetime.timedelta | None:
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)  # not every backend has one


# -- groups that are made on demand, once each -------------------------------------------------------------------------

_groups: dict[tuple[tuple[int, ...], str | None, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def world_group(device: torch.device) -> dist.ProcessGroup:
    """A group over the ranks of this process's role that supports tensors of this device."""
    group = role_group() or dist.group.WORLD
    assert group is not None
    return group if supports(group, device) else get_or_make_group(role_ranks(), device)


def get_or_make_group(ranks: tuple[int, ...], device: torch.device, number: int = 0) -> dist.ProcessGroup:
    """The group over ``ranks`` that supports ``device``: made by these ranks alone, and kept with the default group.

    Callers with the same arguments share it.

    Args:
        number: 0, or the number of the :class:`~lightstep.distributed.replicas.Replicas` with a group of its own.
    """
    world = dist.group.WORLD
    assert world is not None
    backend = None if supports(world, device) else "gloo" if device.type == "cpu" else "nccl"
    owner, group = _groups.get((ranks, backend, number), (None, None))
    if owner is not world or group is None:
        group = new_group(ranks, backend)
        _groups[ranks, backend, number] = (world, group)
    return group


def supports(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors of this device."""
    backends = dist.get_backend_config(group)
    return f"{device.type}:" in backends or (":" not in backends and (backends == "gloo") == (device.type == "cpu"))
