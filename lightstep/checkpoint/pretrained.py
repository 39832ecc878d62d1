"""Loading the weights of a Hugging Face folder into a sharded model: every rank reads its own shards.

torch's ``HuggingFaceStorageReader`` is not used: it reads every safetensors file in the folder, even those that the
index does not list, and supports no alternative names (``base_model_prefix``, tied weights).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightstep.checkpoint.errors import list_names
from lightstep.checkpoint.partly_loaded import loading
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import local_tensor, rank
from lightstep.sharding.model_names import NamedTensor, named_tensors
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes in files whose values are the weights. Those of quantised weights need scales."""
_ROWS = 4096
"""Rows that are compared at a time."""


class TiedWeightsDifferError(ValueError):
    """A folder has different values for weights that the model ties."""


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Fill the model's tensors from ``model.safetensors`` or from the files in ``model.safetensors.index.json``.

    There is no communication, and a rank reads only its own shards. Values are cast to the model's dtypes. Names in the
    files may be with or without the model's ``base_model_prefix``. For tied weights one of the names is enough. Names
    that the model does not have are logged.

    Args:
        model: sharded or not, not on the meta device.
        folder: what ``save_pretrained`` wrote.

    Raises:
        FileNotFoundError: no safetensors file in ``folder``.
        ValueError: a parameter is not in the files, has another shape there or is quantised, or tied weights differ.
            Nothing has been changed. After any other error the model cannot be saved, and its optimizers' ``step()``
            raises.
    """
    folder = Path(folder).expanduser()
    files, wanted = find_tensors(model, folder)
    warn_of_unused(model, folder, files)
    with loading(model, PreparedModel.of(model).optimizers, folder, weights_only=True):
        _read(folder, files, wanted)


def find_tensors(
    model: nn.Module, folder: Path, shape_of: Callable[[Tensor], torch.Size] = lambda tensor: tensor.shape
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Tensor name -> file for all tensors in the folder, and tensor name -> model's tensor for those to load.

    Args:
        shape_of: called with a model's tensor, returns the shape that it must have in the files.

    Raises:
        FileNotFoundError, ValueError: as :func:`load_pretrained`.
    """
    files = _files(folder)
    wanted = {}
    missing, tied = [], []
    for named in named_tensors(model):
        keys = _names_in_files(named, model, files)
        if keys:
            wanted[keys[0]] = named.tensor
        elif isinstance(named.tensor, nn.Parameter):
            missing.append(named.name)
        tied += [(keys[0], other) for other in keys[1:]]
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''} "
            f"({len(missing)} of the model's parameters; {len(files)} tensors are there); where transformers converts "
            "names, call from_pretrained on rank 0 and build the model on the meta device on the others"
        )
    _check_tensors(folder, files, wanted, shape_of)
    for one, other in tied:
        _refuse_different(folder, files, one, other)
    return files, wanted


def warn_of_unused(model: nn.Module, folder: Path, files: Mapping[str, str]) -> None:
    """Log a warning on the first rank if the folder has tensors that the model does not have."""
    if rank() != 0:
        return
    used = {key for named in named_tensors(model) for key in _names_in_files(named, model, files)}
    unused = sorted(files.keys() - used)
    if unused:
        logger.warning(
            "%d of the %d tensors in %s are not the model's and were not loaded: %s",
            len(unused),
            len(files),
            folder,
            list_names(unused),
        )


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"])
    if (folder / _SINGLE).is_file():
        with safe_open(folder / _SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), _SINGLE)
    raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}: it is not a folder of safetensors weights")


def _names_in_files(named: NamedTensor, model: nn.Module, files: Mapping[str, str]) -> list[str]:
    """The names in the files of a tensor, several if weights that the model ties were saved under each name."""
    found = (next((key for key in _possible_names(name, model) if key in files), None) for name in named.names)
    return list(dict.fromkeys(key for key in found if key is not None))


def _possible_names(name: str, model: nn.Module) -> Iterable[str]:
    """The names a tensor may have in the files."""
    prefix = getattr(model, "base_model_prefix", "")
    yield name
    if prefix:
        yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def _check_tensors(
    folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor], shape_of: Callable[[Tensor], torch.Size]
) -> None:
    """Raise ``ValueError`` if tensors have other shapes in the files, or are quantised."""
    for file, keys in _by_file(files, wanted).items():
        with safe_open(folder / file, framework="pt") as opened:
            for key in keys:
                stored, tensor = opened.get_slice(key), wanted[key]
                found, expected, dtype = list(stored.get_shape()), list(shape_of(tensor)), stored.get_dtype()
                if found != expected:
                    raise ValueError(f"{folder / file}: {key} has shape {found}, the model's has {expected}")
                if tensor.is_floating_point() and dtype not in _FLOATS:
                    raise ValueError(
                        f"{folder / file}: {key} is quantised ({dtype}), and {', '.join(_FLOATS)} are loaded; load the "
                        "folder with from_pretrained, dequantised, and pass the model"
                    )


def _refuse_different(folder: Path, files: Mapping[str, str], one: str, other: str) -> None:
    """Raise :class:`TiedWeightsDifferError` if two tensors of the files are not equal."""
    with (
        safe_open(folder / files[one], framework="pt") as first,
        safe_open(folder / files[other], framework="pt") as second,
    ):
        parts = first.get_slice(one), second.get_slice(other)
        shapes = [list(part.get_shape()) for part in parts]
        rows = [slice(start, start + _ROWS) for start in range(0, shapes[0][0], _ROWS)] if shapes[0] else [...]
        equal = shapes[0] == shapes[1] and all(torch.equal(parts[0][part], parts[1][part]) for part in rows)
    if not equal:
        raise TiedWeightsDifferError(
            f"{folder}: {one} and {other} have different values, and the model ties them; build the model with "
            "tie_word_embeddings=False"
        )


def shards_with_other_dtypes(model: nn.Module, folder: str | Path) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's tensors whose dtype in the folder is another one, each with this rank's shard from the folder.

    None if the folder does not have this model's weights.
    """
    folder = Path(folder).expanduser()
    try:
        files, wanted = find_tensors(model, folder)
    except (FileNotFoundError, ValueError):
        return
    for tensor, opened, key in _open_files(folder, files, wanted):
        sample = opened.get_slice(key)[:0] if tensor.dim() else opened.get_tensor(key)
        if sample.dtype != tensor.dtype:
            yield tensor, _read_shard(tensor, opened, key)


@torch.no_grad()
def _read(folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor]) -> None:
    for tensor, opened, key in _open_files(folder, files, wanted):
        local_tensor(tensor).copy_(_read_shard(tensor, opened, key))


def _open_files(
    folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Any, str]]:
    """The model's tensors of which this rank has a shard, each with its open file and its name there."""
    for file, keys in _by_file(files, wanted).items():
        with safe_open(folder / file, framework="pt") as opened:
            for key in keys:
                if shard_of(wanted[key]) is not None and local_tensor(wanted[key]).numel() > 0:
                    yield wanted[key], opened, key


def _read_shard(tensor: Tensor, opened: Any, key: str) -> Tensor:
    """This rank's shard of a tensor, from the file and in the file's dtype."""
    shard = shard_of(tensor)
    assert shard is not None
    part = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
    return cast(Tensor, opened.get_slice(key)[part] if part else opened.get_tensor(key))


def _by_file(files: Mapping[str, str], wanted: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for key in wanted:
        grouped.setdefault(files[key], []).append(key)
    return grouped
