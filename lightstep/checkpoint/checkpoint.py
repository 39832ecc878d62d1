"""Saving and loading a training run: whole or not at all, on any number of ranks, without unpickling anything.

:func:`save_checkpoint` and :func:`load_checkpoint` are called by every rank. What lies on disk is described in
``checkpoint_format.py``.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightstep.checkpoint.export import export_model, to_torch_state_dict
from lightstep.checkpoint.format import (
    CheckpointError,
    commit,
    find_checkpoint,
    latest_checkpoint,
    reported,
    saving,
    write_manifest,
)
from lightstep.checkpoint.load import Saved, apply, match
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.state import OptimizerContent, check_loadable, random_states, write_state
from lightstep.checkpoint.tensors import Source, read_index, shard_of, write_tensors
from lightstep.distributed import local_tensor
from lightstep.sharding.model_names import (
    NamedTensor,
    extra_states,
    holders,
    named_tensors,
    numbered,
    several_holders,
)

__all__ = [
    "CheckpointError",
    "export_model",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "to_torch_state_dict",
]

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint folder; an existing checkpoint at ``path`` is replaced once the new one is whole.

    Called by every rank of ``group`` (default: the ranks of this process's role, without roles all of them), with a
    file system that all of them see. Each rank writes its shards; host memory grows by about 32 MiB, or by one
    parameter's tensors where these are larger. The random states of Python, numpy, torch and the accelerator are saved
    per rank; ``scheduler`` and ``extra`` are the first rank's.

    Args:
        path: the checkpoint's folder, for example ``runs/a/step-100``.
        model: wrapped or not; parameters and persistent buffers are saved, tied ones once.
        optimizer: any torch optimizer over parameters of ``model``.
        scheduler: anything with ``state_dict()``.
        extra: plain numbers, strings, lists, dicts, tensors; :func:`load_checkpoint` returns it.

    Raises:
        TypeError: something in ``scheduler`` or ``extra`` could not be loaded again; nothing has been written.
        CheckpointError: the disk is full, ``path`` is something else than a checkpoint, ... What was at ``path`` is
            still there. All ranks raise.
    """
    target, ranks = Path(path).resolve(), Ranks(group)
    with reported(f"{path} was not saved"):
        tensors = _tensors(model, optimizer, ranks)
        content = ranks.together(lambda: _collect(tensors, model, optimizer, scheduler, extra))
        with saving(target, ranks) as temporary:
            write_tensors(temporary, content.sources, ranks.group)
            parts = ranks.gather(content.of_this_rank)
            ranks.together(lambda: _finish(temporary, target, content, parts), only_first=True)
    logger.info("saved %s", path)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote, on any number of ranks, and return its ``extra``.

    Called by every rank of ``group``. Everything is compared first: a checkpoint that is incomplete or of another model
    or optimizer is refused before anything is changed.

    With an ``optimizer``, its state, hyper-parameters and loss scale are loaded bit for bit, and each rank's random
    states are restored (ranks that were not there when it was saved keep theirs). Weights change dtype through their
    fp32 masters: fp32 weights become the masters of bf16 parameters, and masters become fp32 weights. If the
    checkpoint holds no optimizer, the masters are rebuilt from the loaded weights.

    Raises:
        CheckpointError: the checkpoint cannot be used; the message names the path and what differs. All ranks raise.
    """
    ranks = Ranks(group)
    with reported(f"{path} was not loaded"):
        folder = ranks.together(lambda: find_checkpoint(Path(path)), only_first=True)
        saved = ranks.together(lambda: Saved.read(folder))
        tensors = _tensors(model, optimizer, ranks)
        live = ranks.together(lambda: _live(tensors, optimizer))
        everywhere = ranks.gather(live.names)
        matched = ranks.together(lambda: match(saved, live.tensors, live.optimizer, everywhere))
        ranks.together(lambda: apply(matched, model, scheduler, ranks.rank))
    logger.info("loaded %s", path)
    return dict(saved.state.get("extra") or {})


# -- what is saved -----------------------------------------------------------------------------------------------------


@dataclass
class _Live:
    """A model's and an optimizer's tensors by name."""

    tensors: list[NamedTensor]
    optimizer: OptimizerContent | None

    @property
    def names(self) -> dict[str, set[str]]:
        """All names that this rank knows."""
        optimizer = set() if self.optimizer is None else set(self.optimizer.parameters)
        return {"model": {name for named in self.tensors for name in named.names}, "optimizer": optimizer}


@dataclass
class _Content:
    sources: list[Source]
    state: dict[str, Any]
    manifest: dict[str, Any]
    of_this_rank: dict[str, Any] = field(default_factory=dict)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> list[NamedTensor]:
    """The model's tensors, up to date, each under a name of its own on all ranks."""
    tensors = ranks.together(lambda: _of_this_rank(model, optimizer))
    return numbered(tensors, several_holders(ranks.gather(holders(tensors))))


def _of_this_rank(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[NamedTensor]:
    if optimizer is not None and hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    tensors = named_tensors(model)
    empty = [named.name for named in tensors if named.tensor.is_meta]
    if empty:
        raise CheckpointError(f"{len(empty)} tensors of the model are on the meta device ({', '.join(empty[:3])})")
    return tensors


def _live(tensors: list[NamedTensor], optimizer: torch.optim.Optimizer | None) -> _Live:
    return _Live(tensors, None if optimizer is None else OptimizerContent(optimizer, tensors))


def _collect(
    tensors: list[NamedTensor], model: nn.Module, optimizer: Any, scheduler: Any, extra: Mapping[str, Any] | None
) -> _Content:
    """Everything that goes into the checkpoint, checked; tensors are fetched later."""
    if hasattr(optimizer, "refuse_half_updated"):
        optimizer.refuse_half_updated("Load a checkpoint before saving one")
    live = _live(tensors, optimizer)
    state = {
        "extra": dict(extra or {}),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "modules": extra_states(model),
    }
    for key, value in state.items():
        check_loadable(key, value)
    sources = [source for named in live.tensors for source in _model_sources(named)]
    content = _Content(sources, state, {"scheduler": None if scheduler is None else type(scheduler).__name__})
    content.of_this_rank = {
        "random": random_states(),
        "aliases": {alias: named.name for named in live.tensors for alias in named.names[1:]},
    }
    if live.optimizer is not None:
        _collect_optimizer(content, live.optimizer)
    return content


def _collect_optimizer(content: _Content, optimizer: OptimizerContent) -> None:
    content.sources += optimizer.sources()
    hyperparameters, values = optimizer.hyperparameters(), optimizer.values()
    for group, settings in enumerate(hyperparameters):
        check_loadable(f"optimizer.param_groups[{group}]", settings)
    check_loadable("optimizer.state", values)
    loss_scale = getattr(optimizer.optimizer, "loss_scale", None)
    content.state["optimizer"] = {
        "groups": hyperparameters,
        "loss_scale": None if loss_scale is None else loss_scale.state_dict(),
    }
    content.manifest["optimizer"] = optimizer.class_name
    content.of_this_rank |= {"values": values, "groups": optimizer.groups}


def _model_sources(named: NamedTensor) -> list[Source]:
    shard, tensor = shard_of(named.tensor), named.tensor
    if shard is None:
        return []
    return [Source(f"model.{named.name}", shard, tensor.dtype, lambda: local_tensor(tensor).detach())]


def _finish(temporary: Path, target: Path, content: _Content, parts: list[dict[str, Any]]) -> None:
    """The first rank's part: small state, manifest, rename."""
    state = {**content.state, "random": [part["random"] for part in parts]}
    groups = None
    if "optimizer" in state:
        state["optimizer"]["values"] = {name: value for part in parts for name, value in part["values"].items()}
        groups = [_union(members) for members in zip(*(part["groups"] for part in parts), strict=True)]
    write_state(temporary, state)
    manifest = {
        **manifest_header(len(parts)),
        **content.manifest,
        "groups": groups,
        "aliases": {alias: name for part in parts for alias, name in part["aliases"].items()},
        "tensors": tensor_shapes(temporary),
    }
    write_manifest(temporary, manifest)
    commit(temporary, target)


def _union(ranks: Iterable[Iterable[str]]) -> list[str]:
    """Names in the order in which they first appear."""
    return list(dict.fromkeys(itertools.chain.from_iterable(ranks)))


def manifest_header(world_size: int) -> dict[str, Any]:
    """What every manifest begins with."""
    return {
        "lightstep": _version(),
        "torch": torch.__version__,
        "saved_at": time.time_ns(),
        "world_size": world_size,
    }


def tensor_shapes(folder: Path) -> dict[str, str]:
    """The model's tensors for people to read: ``bfloat16[1024, 4096]``."""
    return {
        key.removeprefix("model."): f"{str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}"
        for key, stored in read_index(folder).items()
        if key.startswith("model.")
    }


def _version() -> str:
    try:
        return importlib.metadata.version("lightstep-optim")
    except importlib.metadata.PackageNotFoundError:
        return "source checkout"
