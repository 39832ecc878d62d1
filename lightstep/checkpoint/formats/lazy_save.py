"""``torch.save`` of more than fits into memory.

The file is laid out first, without numbers, and then filled through a memory map, tensor by tensor: its content is
never in memory as a whole, although it is one file.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightstep.checkpoint.formats.state import LazyTensor


def save_lazily(content: dict[str, Any], path: Path) -> None:
    """``torch.save`` of nested dictionaries and lists whose leaves are lazy tensors, tensors and plain values."""
    leaves, structure = tree_flatten(content, is_leaf=_is_size)
    made: dict[int, Tensor] = {}
    template = tree_unflatten([_empty(leaf, made) for leaf in leaves], structure)
    with skip_data():
        torch.save(template, path)
    del template, made
    with set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for source, target in zip(leaves, tree_leaves(mapped, is_leaf=_is_size), strict=True):
        if isinstance(source, LazyTensor):
            source.copy_to(target)
        elif isinstance(source, Tensor):
            target.copy_(source)


def _empty(leaf: Any, made: dict[int, Tensor]) -> Any:
    """A tensor without numbers, which costs address space and no memory; tied ones share it."""
    if not isinstance(leaf, LazyTensor | Tensor):
        return leaf
    if id(leaf) not in made:
        made[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype)
    return made[id(leaf)]


def _is_size(value: Any) -> bool:
    """A shape is one value, which would come back as a tuple otherwise."""
    return isinstance(value, torch.Size)
