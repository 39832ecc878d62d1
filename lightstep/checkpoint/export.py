"""Weights and optimizer state in other libraries' formats.

Not through torch's ``HuggingFaceStorageWriter``: its shards per rank have to be written a second time to become files
that ``from_pretrained`` reads, with tied weights twice; configuration and names are ``save_pretrained``'s anyway.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError, reported
from lightstep.checkpoint.ranks import Ranks
from lightstep.distributed import is_sharded, mesh_ranks, rank
from lightstep.sharding.engine_model import tell_deepspeed_where_it_is
from lightstep.sharding.model_names import NamedTensor, holders, named_tensors, several_holders, unwrap_model

WEIGHTS = "model.safetensors"


def export_model(
    path: str | os.PathLike[str],
    model: nn.Module,
    tokenizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the weights as one folder: by ``save_pretrained`` if the model has it, else as ``model.safetensors``.

    Called by every rank. A sharded model is collected parameter by parameter: the first rank's host memory holds all
    of it at the end, the others never more than one parameter. Files appear in ``path`` when all of them are written;
    other files there are left alone.

    Args:
        path: the folder.
        model: wrapped or not; tied weights are written once.
        tokenizer: anything with ``save_pretrained``; written into the same folder.

    Raises:
        CheckpointError: the folder could not be written, or there are several tensors of one name (experts that differ
            over ranks); all ranks raise.
    """
    ranks = Ranks(group)
    with reported(f"{path} was not exported"):
        weights = full_weights(model, keep=ranks.is_first, group=group)
        ranks.together(lambda: write_export(Path(path), unwrap_model(model), weights, tokenizer), only_first=True)


@torch.no_grad()
def full_weights(model: nn.Module, keep: bool = True, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """All weights on the host by name, tied names sharing one tensor; ``{}`` on ranks that do not ``keep`` them.

    Every rank of a sharded model takes part: one all-gather per parameter, and a broadcast of those that the first rank
    has no part of.

    Raises:
        CheckpointError: several tensors have one name.
    """
    ranks, tensors, weights = Ranks(group), named_tensors(model), dict[str, Tensor]()
    senders = senders_of(tensors, ranks)
    for named in tensors:
        full = whole_tensor(named, senders, ranks.group)
        if keep:
            weights.update(dict.fromkeys(named.names, full.cpu().contiguous()))
    return weights


def senders_of(tensors: Sequence[NamedTensor], ranks: Ranks) -> Mapping[str, int]:
    """Which tensors the first rank has no part of, by name, and a rank that has one. Called by all ranks.

    Raises:
        CheckpointError: several tensors have one name.
    """
    everywhere = ranks.gather((holders(tensors), _held_by_others(tensors)))
    _refuse_several(several_holders(held for held, _ in everywhere))
    senders: Mapping[str, int] = everywhere[0][1]
    return senders


def whole_tensor(
    named: NamedTensor, senders: Mapping[str, int], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
) -> Tensor:
    """All of a tensor, on every rank that calls this: one all-gather of a sharded one, and a broadcast if need be.

    Args:
        senders: from :func:`senders_of`.
        dtype: cast to this one before gathering, if that makes less to gather.
    """
    tensor = named.tensor.detach()
    if dtype is not None and is_sharded(tensor) and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return _sent(full, tensor, senders[named.name], group) if named.name in senders else full


def _held_by_others(tensors: Iterable[NamedTensor]) -> dict[str, int]:
    """Names of DTensors whose mesh this rank is not in -> a rank that is."""
    meshes = {named.name: mesh_ranks(named.tensor) for named in tensors}
    return {name: ranks[0] for name, ranks in meshes.items() if rank() not in ranks}


def _sent(full: Tensor, sharded: Tensor, sender: int, group: dist.ProcessGroup | None) -> Tensor:
    """The sender's ``full`` on every rank; outside the mesh ``full_tensor()`` is empty."""
    if rank() not in mesh_ranks(sharded):
        full = torch.empty(sharded.shape, dtype=sharded.dtype, device=full.device)
    full = full.contiguous()
    dist.broadcast(full.view(-1).view(torch.uint8), src=sender, group=group)
    return full


def _refuse_several(several: Mapping[str, list[tuple[int, ...]]]) -> None:
    for name, parts in several.items():
        where = " and ".join(", ".join(map(str, ranks)) for ranks in parts[:2])
        raise CheckpointError(
            f"{name} is another tensor on ranks {where}{' ...' if len(parts) > 2 else ''}, and a folder of weights has "
            "one tensor of a name; save_checkpoint keeps all of them"
        )


def to_torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as the plain torch class would save it for fp32 parameters: without masters and loss scale.

    For ``optimizer_class(params).load_state_dict(...)`` over the same groups. The fp32 weights that go with it are the
    masters: load the checkpoint into a model in fp32 to get them. Every rank calls it, as ``optimizer.state_dict()``.
    """
    packed = optimizer.state_dict()
    state = {
        index: {key: value for key, value in entries.items() if key != "master"}
        for index, entries in packed["state"].items()
    }
    return {"state": {i: entries for i, entries in state.items() if entries}, "param_groups": packed["param_groups"]}


def write_export(path: Path, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any) -> None:
    """Put whole weights into a folder, on one rank."""
    path.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.saving-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        _write_model(temporary, model, weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        written = [entry.name for entry in temporary.iterdir()]
        for stale in {file.name for file in path.glob("model*.safetensors*")} - set(written):
            (path / stale).unlink()
        for name in written:
            os.replace(temporary / name, path / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    if hasattr(model, "save_pretrained"):
        tell_deepspeed_where_it_is()
        model.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    once = {id(tensor): name for name, tensor in reversed(weights.items())}
    save_file({name: weights[name] for name in once.values()}, folder / WEIGHTS, metadata={"format": "pt"})
