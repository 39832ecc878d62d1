"""``torch.save`` for content that does not fit into memory.

The file is first written without its tensors' data, which are then filled in through a memory map, one tensor at a
time.
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
    empty: dict[int, Tensor] = {}
    template = tree_unflatten([_empty(leaf, empty) for leaf in leaves], structure)
    with skip_data():
        torch.save(template, path)
    del template, empty
    with set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for source, target in zip(leaves, tree_leaves(mapped, is_leaf=_is_size), strict=True):
        if isinstance(source, LazyTensor):
            source.copy_to(target)
        elif isinstance(source, Tensor):
            target.copy_(source)


def _empty(leaf: Any, empty: dict[int, Tensor]) -> Any:
    """An uninitialised tensor for a tensor, the same one for tied tensors; it takes address space but no memory."""
    if not isinstance(leaf, LazyTensor | Tensor):
        return leaf
    if id(leaf) not in empty:
        empty[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype)
    return empty[id(leaf)]


def _is_size(value: Any) -> bool:
    """Whether ``value`` is a shape, which is a leaf: flattened, it would become a tuple."""
    return isinstance(value, torch.Size)
