"""Exporting weights as a Hugging Face folder, and optimizer state as a torch state dict.

torch's ``HuggingFaceStorageWriter`` is not used: it writes one file per rank, which has to be written a second time
before ``from_pretrained`` can read it, and it writes tied weights twice. ``save_pretrained`` is needed in any case, for
the configuration and the names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.partly_loaded import refuse_partly_loaded
from lightstep.checkpoint.pending import wait_for_pending
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.storage import FolderKind, LocalStorage, local_folder, sync_files, was_replaced
from lightstep.distributed import is_sharded, mesh_ranks, rank
from lightstep.sharding.engine_model import tell_deepspeed_where_it_is
from lightstep.sharding.model_names import NamedTensor, holders, named_tensors, several_holders, unwrap_model

WEIGHTS = "model.safetensors"
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
        full = gather_tensor(named, senders, ranks.group)
        if keep:
            weights.update(dict.fromkeys(named.names, full.cpu().contiguous()))
    return weights


def find_senders(tensors: Sequence[NamedTensor], ranks: Ranks) -> Mapping[str, int]:
    """The tensors of which the first rank has no part: name -> a rank that has one. Called by all ranks.

    Raises:
        CheckpointError: ranks have different tensors of one name.
    """
    gathered = ranks.gather((holders(tensors), _held_by_others(tensors)))
    _refuse_duplicates(several_holders(held for held, _ in gathered))
    senders: Mapping[str, int] = gathered[0][1]
    return senders


def gather_tensor(
    named: NamedTensor, senders: Mapping[str, int], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The whole tensor, on every rank. Called by all ranks: an all-gather if it is sharded, and perhaps a broadcast.

    Args:
        senders: from :func:`find_senders`; the tensors in it are broadcast.
        group: the ranks that call this.
        dtype: sharded tensors of a wider dtype are cast to it before the all-gather.
    """
    tensor = named.tensor.detach()
    if dtype is not None and is_sharded(tensor) and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return _broadcast(full, tensor, senders[named.name], group) if named.name in senders else full


def _held_by_others(tensors: Iterable[NamedTensor]) -> dict[str, int]:
    """Names of DTensors whose mesh this rank is not in -> the first rank in the mesh."""
    meshes = {named.name: mesh_ranks(named.tensor) for named in tensors}
    return {name: ranks[0] for name, ranks in meshes.items() if rank() not in ranks}


def _broadcast(full: Tensor, sharded: Tensor, sender: int, group: dist.ProcessGroup | None) -> Tensor:
    """The sender's ``full`` on every rank. On ranks outside the mesh ``full_tensor()`` has returned an empty tensor."""
    if rank() not in mesh_ranks(sharded):
        full = torch.empty(sharded.shape, dtype=sharded.dtype, device=full.device)
    full = full.contiguous()
    dist.broadcast(full.view(-1).view(torch.uint8), src=sender, group=group)
    return full


def _refuse_duplicates(duplicates: Mapping[str, list[tuple[int, ...]]]) -> None:
    for name, holders_of_each in duplicates.items():
        where = " and ".join(", ".join(map(str, ranks)) for ranks in holders_of_each[:2])
        raise CheckpointError(
            f"{name} is another tensor on ranks {where}{' ...' if len(holders_of_each) > 2 else ''}, and a folder of "
            "weights has one tensor of a name; save_checkpoint keeps all of them"
        )


def to_torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state in the format of the plain torch class over fp32 parameters: no masters, no loss scale.

    For ``optimizer_class(params).load_state_dict(...)`` over the same groups. The matching fp32 weights are the
    masters; to get them, load the checkpoint into a model in fp32. Called by every rank, as ``optimizer.state_dict()``.
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
