"""Weights and optimizer state in other libraries' formats."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.distributed import is_sharded
from lightstep.strategy.agreement import Ranks
from lightstep.strategy.checkpoint_format import reported
from lightstep.strategy.model_names import named_tensors, unwrap_model

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
        CheckpointError: the folder could not be written; all ranks raise.
    """
    ranks = Ranks(group)
    with reported(f"{path} was not exported"):
        weights = full_weights(model, keep=ranks.is_first)
        ranks.together(lambda: _write(Path(path), unwrap_model(model), weights, tokenizer), only_first=True)


@torch.no_grad()
def full_weights(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """All weights on the host by name, tied names sharing one tensor; ``{}`` on ranks that do not ``keep`` them.

    Every rank of a sharded model takes part: one all-gather per parameter.
    """
    weights: dict[str, Tensor] = {}
    for named in named_tensors(model):
        tensor = named.tensor.detach()
        full = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if keep:
            weights.update(dict.fromkeys(named.names, full.cpu().contiguous()))
    return weights


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


def _write(path: Path, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any) -> None:
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
        model.save_pretrained(folder, state_dict=weights)
        return
    from safetensors.torch import save_file

    once = {id(tensor): name for name, tensor in reversed(weights.items())}
    save_file({name: weights[name] for name in once.values()}, folder / WEIGHTS, metadata={"format": "pt"})
