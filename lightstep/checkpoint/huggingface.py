"""Hugging Face folders: exporting weights, and loading them into a sharded model, of which each rank reads its shards.

torch's ``HuggingFaceStorageWriter`` and ``HuggingFaceStorageReader`` are not used. The writer writes one file per rank,
which has to be written a second time before ``from_pretrained`` can read it, and it writes tied weights twice;
``save_pretrained`` is needed in any case, for the configuration and the names. The reader reads every safetensors file
in the folder, even those that the index does not list, and supports no alternative names (``base_model_prefix``, tied
weights).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from lightstep.checkpoint.background import wait_for_pending
from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors, list_names
from lightstep.checkpoint.run_state import loading, refuse_partly_loaded
from lightstep.checkpoint.storage import FolderKind, LocalStorage, local_folder, sync_files, was_replaced
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import Ranks, fill_local, gather_tensor, mesh_ranks, rank, whole_shape
from lightstep.sharding.engine_model import tell_deepspeed_where_it_is
from lightstep.sharding.model_names import NamedTensor, holders, named_tensors, several_holders, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

logger = logging.getLogger(__name__)

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ONLY_LOCAL = "save_pretrained writes to local folders; export to one, and copy it"
_MODEL_FILES, _ADAPTER_FILES = "model*.safetensors*", ("adapter_model*.safetensors*", "adapter_config.json")


def export_model(
    path: str | os.PathLike[str],
    model: nn.Module,
    tokenizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the weights to a folder: with ``save_pretrained`` if the model has it, else as ``model.safetensors``.

    Called by every rank. A sharded model is gathered parameter by parameter. The first rank needs host memory for the
    whole model, the others for one parameter. The folder is written beside ``path`` and replaces it when all is on the
    disk, as a checkpoint does. Other files in ``path`` move into the new folder, but for the weights of an earlier
    export: ``model*.safetensors*``, and the files of an adapter.

    Args:
        path: a local folder.
        model: wrapped or not; tied weights are written once.
        tokenizer: anything with ``save_pretrained``; written to the same folder.
        group: default: the ranks of this process's role.

    Raises:
        CheckpointError: the folder could not be written, ``path`` is a URL, or ranks have different tensors of one name
            (experts). All ranks raise.
    """
    ranks = Ranks(group)
    with checkpoint_errors(f"{path} was not exported"):
        target = local_folder(path, ONLY_LOCAL)
        ranks.together(wait_for_pending)  # a save may be writing to a folder in this one
        weights = full_weights(model, keep=ranks.is_first, group=group)
        ranks.together(lambda: write_export(target, unwrap_model(model), weights, tokenizer), only_first=True)


@torch.no_grad()
def full_weights(model: nn.Module, keep: bool = True, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """All weights on the host by name; ``{}`` on ranks that do not ``keep`` them. Tied names share one tensor.

    Called by all ranks: one all-gather per sharded parameter, and a broadcast of each parameter of which the first
    rank has no part.

    Raises:
        CheckpointError: ranks have different tensors of one name, or a failed load left a part of the weights.
        RuntimeError: a failed step did.
    """
    ranks = Ranks(group)
    ranks.together(lambda: refuse_partly_loaded(model, "exporting its weights"))
    tensors, weights = named_tensors(model), dict[str, Tensor]()
    senders = find_senders(tensors, ranks)
    for named in tensors:
        full = gather_tensor(named.tensor, senders.get(named.name), ranks.group)
        if keep:
            weights.update(dict.fromkeys(named.names, full.cpu().contiguous()))
    return weights


def find_senders(tensors: Sequence[NamedTensor], ranks: Ranks) -> Mapping[str, int]:
    """The tensors of which the first rank has no part: name -> a rank that has one. Called by all ranks.

    Raises:
        CheckpointError: ranks have different tensors of one name.
    """
    gathered = ranks.gather((holders(tensors), _held_by_others(tensors)))
    for name, holders_of_each in several_holders(held for held, _ in gathered).items():
        where = " and ".join(", ".join(map(str, ranks)) for ranks in holders_of_each[:2])
        raise CheckpointError(
            f"{name} is another tensor on ranks {where}{' ...' if len(holders_of_each) > 2 else ''}, and a folder of "
            "weights has one tensor of a name; save_checkpoint keeps all of them"
        )
    return gathered[0][1]


def _held_by_others(tensors: Iterable[NamedTensor]) -> dict[str, int]:
    """Names of DTensors whose mesh this rank is not in -> the first rank in the mesh."""
    meshes = {named.name: mesh_ranks(named.tensor) for named in tensors}
    return {name: ranks[0] for name, ranks in meshes.items() if rank() not in ranks}


def to_torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state in the format of the plain torch class over fp32 parameters: no masters, no loss scale.

    For ``optimizer_class(params).load_state_dict(...)`` over the same groups. The matching fp32 weights are the
    masters; to get them, load the checkpoint into a model in fp32 and its optimizer. Called by every rank, as
    ``optimizer.state_dict()``.
    """
    packed = optimizer.state_dict()
    state = {
        index: {key: value for key, value in entries.items() if key != "master"}
        for index, entries in packed["state"].items()
    }
    return {"state": {i: entries for i, entries in state.items() if entries}, "param_groups": packed["param_groups"]}


def write_export(path: Path, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any) -> None:
    """Write whole weights and the tokenizer to a folder, on one rank; they appear when all is on the disk."""
    storage, kind = LocalStorage(), _export_kind(path)
    with storage.new_folder(path, kind) as temporary:
        _write_model(temporary, model, weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        sync_files(temporary)
        storage.commit(temporary, path, kind)


def _export_kind(path: Path) -> FolderKind:
    """Any folder may be replaced: its files move to the new one, but for the weights of an earlier export."""

    def weights_before(old: Path) -> set[str]:
        is_whole = any(path.glob(_MODEL_FILES))  # not an adapter, beside which the base may be
        patterns = (_MODEL_FILES, *_ADAPTER_FILES) if is_whole else _ADAPTER_FILES
        return {file.name for pattern in patterns for file in old.glob(pattern)}

    return FolderKind("a folder", is_ours=Path.is_dir, is_complete=was_replaced, own_files=weights_before)


def _write_model(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    if hasattr(model, "save_pretrained"):
        tell_deepspeed_where_it_is()
        model.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    once = {id(tensor): name for name, tensor in reversed(weights.items())}
    save_file({name: weights[name] for name in once.values()}, folder / WEIGHTS, metadata={"format": "pt"})


_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes in files whose values are the weights. Those of quantised weights need scales."""
_ROWS = 4096
"""Rows that are compared at a time."""


class TiedWeightsDifferError(ValueError):
    """A folder has different values for weights that the model ties."""


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Fill the model's tensors from ``model.safetensors`` or from the files in ``model.safetensors.index.json``.

    A rank reads only its own shards, and there is no communication: of weights that DeepSpeed has divided (stage 3) it
    reads the whole, and gathers them one at a time. Values are cast to the model's dtypes. Names in the
    files may be with or without the model's ``base_model_prefix``. For tied weights one of the names is enough. Names
    that the model does not have are logged, and buffers that the files do not have.

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
    _warn_of_differences(model, folder, files)
    with loading(model, PreparedModel.of(model).optimizers, folder, weights_only=True):
        _read(folder, files, wanted)


def find_tensors(model: nn.Module, folder: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Tensor name -> file for all tensors in the folder, and tensor name -> model's tensor for those to load.

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
            f"{folder} has no {list_names(missing)} "
            f"({len(missing)} of the model's parameters; {len(files)} tensors are there); where transformers converts "
            "names, call from_pretrained on rank 0 and build the model on the meta device on the others"
        )
    _check_tensors(folder, files, wanted)
    for one, other in tied:
        _refuse_different(folder, files, one, other)
    return files, wanted


def _warn_of_differences(model: nn.Module, folder: Path, files: Mapping[str, str]) -> None:
    """Log a warning on the first rank if the folder has tensors that the model does not have, or lacks buffers."""
    if rank() != 0:
        return
    found = {named.name: _names_in_files(named, model, files) for named in named_tensors(model)}
    unused = sorted(files.keys() - {key for keys in found.values() for key in keys})
    if unused:
        logger.warning(
            "%d of the %d tensors in %s are not the model's and were not loaded: %s",
            len(unused),
            len(files),
            folder,
            list_names(unused),
        )
    if kept := [name for name, keys in found.items() if not keys]:  # buffers: without a parameter nothing is loaded
        logger.warning("%s has no %s: these buffers keep the model's own values", folder, list_names(kept))


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the folder's index; empty without one."""
    if not (folder / WEIGHTS_INDEX).is_file():
        return {}
    return dict(json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"])


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if found := weight_map(folder):
        return found
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), WEIGHTS)
    raise FileNotFoundError(
        f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}: it is not a folder of safetensors weights"
    )


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


def _check_tensors(folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` if tensors have other shapes in the files, or are quantised."""
    for file, keys in _by_file(files, wanted).items():
        with safe_open(folder / file, framework="pt") as opened:
            for key in keys:
                stored, tensor = opened.get_slice(key), wanted[key]
                found, expected, dtype = list(stored.get_shape()), list(whole_shape(tensor)), stored.get_dtype()
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
        if dtype_in_file(opened, key) != tensor.dtype:
            yield tensor, _read_shard(tensor, opened, key)


def dtype_in_file(opened: Any, key: str) -> torch.dtype:
    """The dtype of a tensor in a file that ``safe_open`` has opened."""
    part = opened.get_slice(key)
    return cast(Tensor, part[:0] if part.get_shape() else opened.get_tensor(key)).dtype


@torch.no_grad()
def _read(folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor]) -> None:
    for tensor, opened, key in _open_files(folder, files, wanted):
        fill_local(tensor, _read_shard(tensor, opened, key))


def _open_files(
    folder: Path, files: Mapping[str, str], wanted: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Any, str]]:
    """The model's tensors of which this rank has a shard, each with its open file and its name there."""
    for file, keys in _by_file(files, wanted).items():
        with safe_open(folder / file, framework="pt") as opened:
            for key in keys:
                if (shard := shard_of(wanted[key])) is not None and shard.numel > 0:
                    yield wanted[key], opened, key


def _read_shard(tensor: Tensor, opened: Any, key: str) -> Tensor:
    """This rank's shard of a tensor, from the file and in the file's dtype."""
    shard = shard_of(tensor)
    assert shard is not None
    return cast(Tensor, opened.get_slice(key)[shard.region] if shard.region else opened.get_tensor(key))


def _by_file(files: Mapping[str, str], wanted: Iterable[str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for key in wanted:
        grouped.setdefault(files[key], []).append(key)
    return grouped
