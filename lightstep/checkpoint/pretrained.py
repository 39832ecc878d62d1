"""Loading the weights of a Hugging Face folder into a sharded model: every rank reads its own shards.

torch's ``HuggingFaceStorageReader`` is not used: it reads every safetensors file in the folder, even those that the
index does not list, and supports no alternative names (``base_model_prefix``, tied weights).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightstep.checkpoint.partly_loaded import loading
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import local_tensor
from lightstep.sharding.model_names import NamedTensor, named_tensors
from lightstep.sharding.prepared_model import PreparedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Fill the model's tensors from ``model.safetensors`` or from the files in ``model.safetensors.index.json``.

    There is no communication, and a rank reads only its own shards. Values are cast to the model's dtypes. Names in the
    files may be with or without the model's ``base_model_prefix``. For tied weights one of the names is enough.

    Args:
        model: sharded or not, not on the meta device.
        folder: what ``save_pretrained`` wrote.

    Raises:
        FileNotFoundError: no safetensors file in ``folder``.
        ValueError: a parameter is not in the files, or has another shape there. Nothing has been changed. After any
            other error the model cannot be saved, and its optimizers' ``step()`` raises.
    """
    folder = Path(folder)
    files, wanted = find_tensors(model, folder)
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
    missing = []
    for named in named_tensors(model):
        key = next((key for key in _possible_names(named, model) if key in files), None)
        if key is not None:
            wanted[key] = named.tensor
        elif isinstance(named.tensor, nn.Parameter):
            missing.append(named.name)
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''} "
            f"({len(missing)} of the model's parameters; {len(files)} tensors are there); where transformers converts "
            "names, call from_pretrained on rank 0 and build the model on the meta device on the others"
        )
    _check_shapes(folder, files, {key: shape_of(tensor) for key, tensor in wanted.items()})
    return files, wanted


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"])
    if (folder / _SINGLE).is_file():
        with safe_open(folder / _SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), _SINGLE)
    raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}: it is not a folder of safetensors weights")


def _possible_names(named: NamedTensor, model: nn.Module) -> Iterable[str]:
    """The names a tensor may have in the files."""
    prefix = getattr(model, "base_model_prefix", "")
    for name in named.names:
        yield name
        if prefix:
            yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def _check_shapes(folder: Path, files: Mapping[str, str], wanted: Mapping[str, torch.Size]) -> None:
    for file, keys in _by_file(files, wanted).items():
        with safe_open(folder / file, framework="pt") as opened:
            for key in keys:
                found, expected = list(opened.get_slice(key).get_shape()), list(wanted[key])
                if found != expected:
                    raise ValueError(f"{folder / file}: {key} has shape {found}, the model's has {expected}")


def shards_with_other_dtypes(model: nn.Module, folder: str | Path) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's tensors whose dtype in the folder is another one, each with this rank's shard from the folder.

    None if the folder does not have this model's weights.
    """
    folder = Path(folder)
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
