"""Saving a training run: whole or not at all, on any number of ranks. ``layout.py`` says what lies on disk then."""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError, reported
from lightstep.checkpoint.frozen_base import frozen_base, is_adapter, without_base
from lightstep.checkpoint.layout import CHECKPOINT, INDEX, STATE, TORCHS_INDEX, commit_checkpoint, manifest_header
from lightstep.checkpoint.optimizer_content import OptimizerContent
from lightstep.checkpoint.partly_loaded import refuse_partly_loaded
from lightstep.checkpoint.pending import PendingSave, ended, finish_pending, own_group, start
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.retention import Retention
from lightstep.checkpoint.small_state import check_loadable, random_states, write_state
from lightstep.checkpoint.staging import in_place, staged
from lightstep.checkpoint.storage import location, new_folder_of_ranks, write_file
from lightstep.checkpoint.tensors import Index, Source, file_sizes, format_index, format_torchs_index, join, shard_of
from lightstep.checkpoint.write import share, write_tensors
from lightstep.distributed import local_tensor
from lightstep.sharding.model_names import (
    NamedTensor,
    extra_states,
    holders,
    named_tensors,
    numbered,
    several_holders,
)
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import HostMemoryError

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    trainable_only: bool | None = None,
    weights_only: bool = False,
    keep_last: int | None = None,
    keep_every: int = 0,
    asynchronous: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PendingSave | None:
    """Write a checkpoint folder; an existing checkpoint at ``path`` is replaced once the new one is whole.

    Called by every rank of ``group`` (default: the ranks of this process's role, without roles all of them), with a
    file system that all of them see. Each rank writes its shards; host memory grows by about 128 MiB, or by
    three tensors where these are larger. The random states of Python, numpy, torch and the accelerator are saved
    per rank; ``scheduler`` and ``extra`` are the first rank's.

    Args:
        path: the checkpoint's folder, for example ``runs/a/step-100``. Files in it that no save wrote are kept.
        model: wrapped or not; parameters and persistent buffers are saved, tied ones once.
        optimizer: any torch optimizer over parameters of ``model``.
        scheduler: anything with ``state_dict()``.
        extra: plain numbers, strings, lists, dicts, tensors; :func:`load_checkpoint` returns it.
        trainable_only: leave out parameters that are frozen and have no optimizer state; the checkpoint names the base
            that they belong to. ``None``: for models with adapters of PEFT.
        weights_only: leave out optimizer and scheduler: weights, buffers and ``extra`` of a run that saves its whole
            state less often. A load of it rebuilds the masters.
        keep_last: remove checkpoints beside ``path`` with the same name and a lower number, but for the newest ones
            that are whole: this many with the new one. ``None`` removes none. Where there are more before the save,
            the surplus goes first and makes room. Those with optimizer state and those without count separately.
        keep_every: checkpoints whose number is a multiple of it are kept besides.
        asynchronous: return as soon as nothing that training does changes what will be saved; ``staging.py`` says how,
            and how much host memory it takes. A thread writes; training goes on. The next save waits for it. The
            process ends after it.

    Returns:
        With ``asynchronous``, a handle with ``done()`` and ``result(timeout=None)``, the folder. An error is raised by
        ``result()``, by the next save, and on a single rank by the optimizer's next step, whichever comes first.

    Raises:
        TypeError: something in ``scheduler`` or ``extra`` could not be loaded again; nothing has been written.
        CheckpointError: the disk is full, ``path`` is something else than a checkpoint, another process is saving to
            it, ... What was at ``path`` is still there. All ranks raise.
    """
    ranks = Ranks(group)
    with reported(f"{path} was not saved"):
        ranks.together(finish_pending)
        tensors = live_tensors(model, optimizer, ranks)
        saved, its_scheduler = (None, None) if weights_only else (optimizer, scheduler)
        content = ranks.together(lambda: _collect(tensors, model, saved, its_scheduler, extra, trainable_only))
        if weights_only:
            content.manifest["weights_only"] = True
        else:
            content.sources += _average_sources(model)
        retention = Retention(keep_last, keep_every, weights_only=saved is None)
        plan = _Plan(path, content, share(content.sources, ranks), retention)
        if asynchronous:
            with ExitStack() as until_written:
                if plan.detach(ranks, model, optimizer, until_written):
                    write = partial(_write, plan, own_group(ranks))
                    return start(write, until_written, None if ranks.several else optimizer)
    with ExitStack() as until_written:
        with reported(f"{path} was not saved"):
            plan.sources = ranks.together(lambda: in_place(plan.sources, saved, until_written))
        written = _write(plan, ranks)
    return ended(written) if asynchronous else None


@dataclass
class _Plan:
    """What a save will write: nothing of it needs another look at the run, but for what the sources fetch."""

    path: str | os.PathLike[str]
    content: _Content
    sources: list[Source]
    """What this rank writes."""
    retention: Retention

    def detach(
        self, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None, until_written: ExitStack
    ) -> bool:
        """From the run: whatever training does from now on, this is saved. ``False``: a rank has no memory for that."""

        def stage() -> list[Source] | str:
            try:
                return staged(self.sources, model, optimizer, until_written)
            except HostMemoryError as error:
                return str(error)

        sources = ranks.together(stage)
        refusals = [text for text in ranks.gather(sources if isinstance(sources, str) else None) if text is not None]
        if refusals or isinstance(sources, str):
            logger.warning("training waits for %s: %s", self.path, refusals[0])
            return False
        self.sources = sources
        content = self.content
        own = {**content.of_this_rank, "values": copy.deepcopy(content.of_this_rank["values"])}  # all else is its own
        self.content = replace(content, sources=[], state=copy.deepcopy(content.state), of_this_rank=own)
        return True


def _write(plan: _Plan, ranks: Ranks) -> Path:
    target = location(plan.path).resolve()
    with (
        reported(f"{plan.path} was not saved"),
        plan.retention.around(target, ranks),
        new_folder_of_ranks(target, CHECKPOINT, ranks) as temporary,
    ):
        index = ranks.together(lambda: write_tensors(temporary, plan.sources, ranks.rank))
        indices, parts = zip(*ranks.gather((index, plan.content.of_this_rank)), strict=True)
        ranks.together(lambda: _finish(temporary, target, plan.content, parts, join(indices)), only_first=True)
    logger.info("saved %s", plan.path)
    return target


def live_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> list[NamedTensor]:
    """The model's tensors, up to date, each under a name of its own on all ranks, which all call this."""
    tensors = ranks.together(lambda: _of_this_rank(model, optimizer))
    return numbered(tensors, several_holders(ranks.gather(holders(tensors))))


def finish_checkpoint(
    folder: Path, target: Path, index: Index, state: dict[str, Any], manifest: dict[str, Any], world_size: int
) -> None:
    """Write what is no tensor beside the tensors, and put all of it in its place."""
    files: dict[str, tuple[int, int | None]] = {name: (size, None) for name, size in file_sizes(index).items()}
    files[INDEX] = write_file(folder / INDEX, format_index(index))
    files[TORCHS_INDEX] = write_file(folder / TORCHS_INDEX, format_torchs_index(index))
    files[STATE] = write_state(folder, state)
    header = manifest_header(target, world_size)
    commit_checkpoint(folder, target, {**header, **manifest, "tensors": _for_people(index)}, files)


def _for_people(index: Index) -> dict[str, str]:
    """The model's tensors: ``bfloat16[1024, 4096]``."""
    return {
        key.removeprefix("model."): f"{str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}"
        for key, stored in index.items()
        if key.startswith("model.")
    }


@dataclass
class _Content:
    """Everything that goes into the checkpoint; tensors are fetched when they are written."""

    sources: list[Source]
    state: dict[str, Any]
    manifest: dict[str, Any]
    of_this_rank: dict[str, Any] = field(default_factory=dict)


def _of_this_rank(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[NamedTensor]:
    if optimizer is not None and hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    tensors = named_tensors(model)
    empty = [named.name for named in tensors if named.tensor.is_meta]
    if empty:
        raise CheckpointError(f"{len(empty)} tensors of the model are on the meta device ({', '.join(empty[:3])})")
    return tensors


def _collect(
    tensors: list[NamedTensor],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    trainable_only: bool | None,
) -> _Content:
    """The content, checked."""
    refuse_partly_loaded(model)
    if hasattr(optimizer, "refuse_half_updated"):
        optimizer.refuse_half_updated("Load a checkpoint before saving one")
    state = {
        "extra": dict(extra or {}),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "modules": extra_states(model),
    }
    for key, value in state.items():
        check_loadable(key, value)
    content = _Content([], state, {"scheduler": None if scheduler is None else type(scheduler).__name__})
    saved = tensors
    if trainable_only or (trainable_only is None and is_adapter(model)):
        saved = without_base(tensors, optimizer)
        content.manifest["base"] = frozen_base(model, tensors, saved)
    content.sources = [source for named in saved for source in _model_sources(named)]
    content.of_this_rank = {
        "values": {},
        "random": random_states(),
        "aliases": {alias: named.name for named in tensors for alias in named.names[1:]},
    }
    if optimizer is not None:
        _collect_optimizer(content, OptimizerContent(optimizer, tensors))
    return content


def _collect_optimizer(content: _Content, optimizer: OptimizerContent) -> None:
    sources, values = optimizer.contents()
    content.sources += sources
    hyperparameters = optimizer.hyperparameters()
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
    return _sources(f"model.{named.name}", named.tensor)


def _average_sources(model: nn.Module) -> list[Source]:
    average = PreparedModel.of(model).average
    tensors = {} if average is None else average.tensors
    return [source for name, tensor in tensors.items() for source in _sources(average_key(name), tensor)]


def average_key(name: str) -> str:
    """The name of a parameter's average among the checkpoint's tensors."""
    return f"average.{name}"


def _sources(key: str, tensor: Tensor) -> list[Source]:
    shard = shard_of(tensor)
    if shard is None:
        return []
    return [Source(key, shard, tensor.dtype, lambda: local_tensor(tensor).detach(), tensor)]


def _finish(temporary: Path, target: Path, content: _Content, parts: Sequence[dict[str, Any]], index: Index) -> None:
    """The first rank's part: small state, manifest, rename."""
    state = {**content.state, "random": [part["random"] for part in parts]}
    groups = None
    if "optimizer" in state:
        state["optimizer"]["values"] = {name: value for part in parts for name, value in part["values"].items()}
        groups = [_union(members) for members in zip(*(part["groups"] for part in parts), strict=True)]
    manifest = {
        **content.manifest,
        "groups": groups,
        "aliases": {alias: name for part in parts for alias, name in part["aliases"].items()},
    }
    finish_checkpoint(temporary, target, index, state, manifest, len(parts))


def _union(ranks: Iterable[Iterable[str]]) -> list[str]:
    """Names in the order in which they first appear."""
    return list(dict.fromkeys(itertools.chain.from_iterable(ranks)))
