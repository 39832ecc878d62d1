"""Reading what ``torch.save`` wrote without running anything that it names.

torch's weights-only unpickler does the work. Classes that it does not know, DeepSpeed's among them, become
:class:`StandIn` objects that keep their attributes and do nothing, so that no foreign library has to be installed.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightstep.checkpoint.errors import CheckpointError, error_text

_KNOWN: dict[str, Any] = {"deepspeed.runtime.zero.config.ZeroStageEnum": int}


class StandIn:
    """An object of a class that is not imported: its attributes, and nothing that it could do."""

    pickled_name = ""

    def __new__(cls, *arguments: Any, **keywords: Any) -> StandIn:
        made = object.__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"<{self.pickled_name}>"


def load_file(path: Path) -> Any:
    """The object in a file of ``torch.save``, its tensors mapped from the file and not yet in memory.

    Raises:
        CheckpointError: the file is missing, truncated, or not of ``torch.save``; it names what torch refuses.
    """
    try:
        zipped = zipfile.is_zipfile(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
        with torch.serialization.safe_globals(_replacements(names)), _IgnoreWarnings():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
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
    """What torch's unpickler stopped at; the rest of its text recommends to run it all the same."""
    found = re.search(r"WeightsUnpickler error:\s*(.+?)(\.\s|\n|$)", str(error))
    return found[1] if found else "not tensors and plain values"


def _replacements(names: list[str]) -> list[Any]:
    """What the unpickler gets for the names that it does not know."""
    numbers = _numpy_scalars(names)
    known = {entry[1] for entry in numbers}
    return [*numbers, *(_stand_in(name) for name in names if name not in known)]


def _stand_in(name: str) -> tuple[Any, str]:
    known = _KNOWN.get(name) or type(name.rpartition(".")[2], (StandIn,), {"pickled_name": name})
    return known, name


def _numpy_scalars(names: list[str]) -> list[tuple[Any, str]]:
    """What a learning rate that is a numpy number needs, if the file has one."""
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


class _IgnoreWarnings(warnings.catch_warnings):
    """Without torch's remarks on device meshes that belong to no process group here."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
