"""Reading files of ``torch.save`` without running code from them, and writing content that does not fit into memory.

torch's weights-only unpickler reads them. Objects of other classes, DeepSpeed's for example, become :class:`StandIn`
objects, which have the attributes and no behaviour. So the libraries need not be installed.

A file is first written without its tensors' data, which are then filled in through a memory map, one tensor at a time.
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
import warnings
import zipfile
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightstep.checkpoint.errors import CheckpointError, error_text
from lightstep.checkpoint.formats.state import LazyTensor


class StandIn:
    """An object whose class is not imported: it has the attributes and no methods."""

    pickled_name = ""

    def __new__(cls, *arguments: Any, **keywords: Any) -> StandIn:
        instance = object.__new__(cls)
        instance.__dict__["arguments"] = arguments
        return instance

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"<{self.pickled_name}>"


class _ZeroStage(IntEnum):
    """DeepSpeed's ``ZeroStageEnum``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def enum_member(kind: type, name: str) -> Any:
    """What files mean by :data:`GETATTR`: Python 3.11.0 to 3.11.3 pickle an enum's member as ``getattr(class, name)``.

    Raises:
        pickle.UnpicklingError: ``kind`` is not an enum, or has no such member. Nothing else is looked up.
    """
    if isinstance(kind, type) and issubclass(kind, StandIn):
        return kind(name)
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"{GETATTR}({kind!r}, {name!r}) is not the member of an enum")


GETATTR = "builtins.getattr"
_KNOWN: dict[str, Any] = {"deepspeed.runtime.zero.config.ZeroStageEnum": _ZeroStage, GETATTR: enum_member}


def load_file(path: Path, part: bytes | None = None) -> Any:
    """The object in a file of ``torch.save``. Its tensors are memory-mapped, except in files of the old format.

    Args:
        part: what ``torch.save`` wrote to a part of the file; ``None``: it wrote the file.

    Raises:
        CheckpointError: the file is missing, damaged, or not a file of ``torch.save``; the message names what torch
            refuses to load.
    """

    def source() -> Path | io.BytesIO:
        return path if part is None else io.BytesIO(part)

    try:
        zipped = zipfile.is_zipfile(source())
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source()) if zipped else []
        with torch.serialization.safe_globals(_replacements(names)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about device meshes without a process group
            return torch.load(source(), map_location="cpu", weights_only=True, mmap=zipped and part is None)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} cannot be read: it is not a file of torch.save, or holds what must not be run "
            f"({refused_name(error)})"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, damaged, or not a file of torch.save ({error_text(error)})"
        ) from error


def refused_name(error: pickle.UnpicklingError) -> str:
    """What torch's unpickler refused. The rest of its message, which recommends ``weights_only=False``, is left out."""
    found = re.search(r"WeightsUnpickler error:\s*(.+?)(\.\s|\n|$)", str(error))
    return found[1] if found else "not tensors and plain values"


def _replacements(names: list[str]) -> list[Any]:
    """``(class, name)`` pairs for the names that torch's unpickler does not know."""
    numpy_classes = _numpy_classes(names)
    known = {name for _, name in numpy_classes}
    return [*numpy_classes, *(_stand_in(name) for name in names if name not in known)]


def _stand_in(name: str) -> tuple[Any, str]:
    known = _KNOWN.get(name) or type(name.rpartition(".")[2], (StandIn,), {"pickled_name": name})
    return known, name


def _numpy_classes(names: list[str]) -> list[tuple[Any, str]]:
    """What numpy scalars need, if the file has any: a learning rate may be one."""
    if not any(name.endswith("multiarray.scalar") for name in names):
        return []
    import numpy

    scalar = numpy._core.multiarray.scalar  # type: ignore[attr-defined]
    kinds = [type(numpy.dtype(kind)) for kind in ("float64", "float32", "int64", "int32")]
    return [
        (scalar, "numpy._core.multiarray.scalar"),
        (scalar, "numpy.core.multiarray.scalar"),
        (numpy.dtype, "numpy.dtype"),
        *((kind, f"{kind.__module__}.{kind.__qualname__}") for kind in kinds),
    ]


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
