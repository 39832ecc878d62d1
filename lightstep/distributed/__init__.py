"""DTensors, device meshes and process groups: the only folder below sharding/ that knows them.

``groups`` has the process groups, ``ranks`` steps that all ranks do or none, and who is gone when a collective fails,
``tensors`` the local parts of DTensors, their place in the whole and their gathering, ``norms`` the reduction of a norm
over meshes, ``replicas`` the collectives of ranks with the same part of the model, and ``matrices`` those of ranks that
share matrices.
"""

from torch.distributed.tensor import DTensor

from lightstep.distributed.groups import (
    form_role_group,
    initialized,
    let_gloo_finish_at_exit,
    make_mesh,
    new_group,
    rank,
    ranks_on_this_host,
    role_group,
    world_size,
)
from lightstep.distributed.matrices import MatrixExchange, MatrixTransfer, Rows, rows_of
from lightstep.distributed.norms import NormReduction
from lightstep.distributed.ranks import LostRankError, Ranks, RemoteRankError, is_failed_collective, name_lost_ranks
from lightstep.distributed.replicas import Replicas
from lightstep.distributed.tensors import (
    Window,
    dense_strides,
    differs_across_ranks,
    empty_in_order,
    fill_local,
    gather_tensor,
    is_divided,
    is_sharded,
    layout_of,
    like,
    local_gradient,
    local_tensor,
    memory_order,
    mesh_ranks,
    whole_shape,
    window_of,
    writes,
)

__all__ = [
    "DTensor",
    "LostRankError",
    "MatrixExchange",
    "MatrixTransfer",
    "NormReduction",
    "Ranks",
    "RemoteRankError",
    "Replicas",
    "Rows",
    "Window",
    "dense_strides",
    "differs_across_ranks",
    "empty_in_order",
    "fill_local",
    "form_role_group",
    "gather_tensor",
    "initialized",
    "is_divided",
    "is_failed_collective",
    "is_sharded",
    "layout_of",
    "let_gloo_finish_at_exit",
    "like",
    "local_gradient",
    "local_tensor",
    "make_mesh",
    "memory_order",
    "mesh_ranks",
    "name_lost_ranks",
    "new_group",
    "rank",
    "ranks_on_this_host",
    "role_group",
    "rows_of",
    "whole_shape",
    "window_of",
    "world_size",
    "writes",
]
