"""Loading a training run, on any number of ranks: all of it, or nothing is changed.

A load first compares the checkpoint with model and optimizer. Then every rank reads and checks all that it needs, and
changes nothing. What fits into a third of the free host memory is cached; the rest is read a second time. When all of
it could be read, and belongs to one save, it is loaded into the model and the optimizer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.background import wait_for_pending
from lightstep.checkpoint.disks import own_part
from lightstep.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    UnreadableError,
    checkpoint_errors,
    is_damage,
    list_names,
)
from lightstep.checkpoint.layout import Manifest, checkpoints_in, find_checkpoint, unreplaced
from lightstep.checkpoint.run_state import (
    OptimizerContent,
    average_key,
    averaged_weights,
    entry_key,
    live_tensors,
    loading,
    same_settings,
    stored_entries,
    warn_if_other_base,
    without_base,
)
from lightstep.checkpoint.saved import SavedCheckpoint, newest_undamaged_before, set_random_states
from lightstep.checkpoint.storage import ask_server, location
from lightstep.checkpoint.tensors import (
    ChunkCache,
    IncompleteTensorError,
    Shard,
    StoredTensor,
    Target,
    full_shard,
    read_tensors,
    shard_of,
)
from lightstep.distributed import (
    Ranks,
    RemoteRankError,
    fill_local,
    is_divided,
    local_tensor,
    ranks_on_this_host,
    whole_shape,
)
from lightstep.optimizer.serialization import refuse_nan
from lightstep.sharding.model_names import NamedTensor, set_extra_states
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import available_bytes

logger = logging.getLogger(__name__)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    trainable_only: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote, on any number of ranks, and return its ``extra``.

    Called by every rank of ``group``. A checkpoint that is incomplete or damaged, or belongs to another model or
    optimizer, is refused before anything is changed. If loading fails after that (the disk fails), the model cannot be
    saved, and its optimizer raises in ``step()``, until a load succeeds. A pending asynchronous save is waited for.
    Gradients that no step has used are dropped: they are of other weights. If another process replaces the checkpoint
    at the same time, an error says so, and to load again: a mixture is never used.

    With an ``optimizer``, its state, hyper-parameters and loss scale are loaded bit for bit, and each rank's random
    states are restored (on more ranks than saved it, the additional ones keep theirs). Weights change dtype through
    their fp32 masters: fp32 weights become the masters of bf16 parameters, and masters become fp32 weights. Without an
    ``optimizer``, or if the checkpoint has no optimizer state, only weights are loaded, and the masters of the model's
    optimizers are rebuilt from them.

    Args:
        path: the checkpoint's folder, or a URL.
        model: wrapped or not.
        optimizer: over parameters of ``model``.
        scheduler: anything with ``state_dict()`` and ``load_state_dict()``.
        trainable_only: ``None`` loads what the checkpoint has. If the frozen base was not saved, the model's base is
            not changed, and its shapes are checked. ``True`` never loads the base. ``False`` refuses a checkpoint
            without it.
        group: default: the ranks of this process's role.

    Raises:
        CheckpointError: the checkpoint cannot be used; the message names the path and what differs. All ranks raise.
    """
    ranks = Ranks(group)
    wait_for_pending()
    with checkpoint_errors(f"{path} was not loaded"), suggesting_older(location(path), ranks, optimizer is not None):
        optimizers = list(PreparedModel.of(model).optimizers) if optimizer is None else [optimizer]
        tensors = live_tensors(model, optimizer, ranks, for_load=True)
        content = ranks.together(lambda: None if optimizer is None else OptimizerContent(optimizer, tensors))
        destination = _Destination(
            model, scheduler, tensors, content, _gather_names(tensors, content, ranks), trainable_only
        )
        folder, manifest = _find(location(path), ranks)
        matched = ranks.together(lambda: _read(folder, manifest, destination))
        if ranks.is_first:
            _warn_of_divided_groups(matched)
        weights_only = optimizer is None or matched.saved.optimizer is None
        with loading(model, optimizers, path, weights_only):
            ranks.together(lambda: _apply(matched, destination, ranks.rank))
            if weights_only:
                _refresh_masters(optimizers, path)
            if optimizer is not None and weights_only and ranks.is_first:
                logger.warning("%s holds no optimizer state; only its weights were loaded", path)
            _restart_missing_averages(matched.saved, destination)
            for one in optimizers:
                one.zero_grad()  # gradients of the weights that were replaced
    if matched.saved.base is not None:
        warn_if_other_base(model, matched.saved.base)
    logger.info("loaded %s", path)
    return dict(matched.saved.state.get("extra") or {})


def _warn_of_divided_groups(matched: Match) -> None:
    """Log a warning if groups with settings of their own were one group when they were saved."""
    if matched.optimizer is None:
        return
    groups, warned = matched.optimizer.hyperparameters(), {-1}
    for number, origin in enumerate(matched.groups):
        first = matched.groups.index(origin)
        if origin not in warned and not same_settings(groups[number], groups[first]):
            warned.add(origin)
            logger.warning(
                "parameter groups %d and %d of the optimizer were one group of the checkpoint, and get the same "
                "settings from it (learning rate %g); set those that differ after the load",
                first,
                number,
                (matched.saved.optimizer or {})["groups"][origin].get("lr", float("nan")),
            )


@contextmanager
def suggesting_older(path: Path, ranks: Ranks, with_state: bool) -> Iterator[None]:
    """If the block finds damage, the first rank's error names an older checkpoint that is undamaged."""
    try:
        yield
    except Exception as error:
        if not ranks.is_first or not is_damage(error):
            raise
        place = path.resolve()
        advice, is_alone = "no older checkpoint next to it is undamaged", False
        try:
            is_alone = checkpoints_in(place.parent) in ([], [place])
            older = newest_undamaged_before(place, with_state)
        except UnreadableError as unreadable:
            older, advice = None, f"which older one is undamaged is not known: {unreadable}"
        if is_alone:  # in a folder of the Trainer, which knows its older ones
            raise
        if older is not None:
            advice = f"{older} is undamaged: load that one"
        raise DamagedError(f"{error}; {advice}") from error


@dataclass
class _Destination:
    """What a checkpoint is loaded into, on this rank."""

    model: nn.Module
    scheduler: Any
    tensors: list[NamedTensor]
    optimizer: OptimizerContent | None
    names: dict[str, set[str]]
    """From :func:`_gather_names`."""
    trainable_only: bool | None


def _gather_names(tensors: list[NamedTensor], optimizer: OptimizerContent | None, ranks: Ranks) -> dict[str, set[str]]:
    """All ranks' names of the ``"model"``'s tensors, of those that are ``"frozen"``, and of the ``"optimizer"``'s.

    A rank need not have all tensors.
    """
    model = {name for named in tensors for name in named.names}
    frozen = {name for named in tensors if not named.tensor.requires_grad for name in named.names}
    optimized = set() if optimizer is None else set(optimizer.parameters)
    everywhere = ranks.gather({"model": model, "frozen": frozen, "optimizer": optimized})
    return {kind: set().union(*(names[kind] for names in everywhere)) for kind in everywhere[0]}


def _find(path: Path, ranks: Ranks) -> tuple[Path, Manifest]:
    """The complete checkpoint for ``path``, which may be under a temporary name if a crash left it there.

    It is the one that the first rank finds, or on each disk a part of it.
    """
    try:
        folder, manifest = ranks.together(lambda: find_checkpoint(path), only_first=True)
    except (CheckpointError, RemoteRankError):
        own_part(path, ranks)  # if another host has one, its error says what is missing here
        raise
    ask_server(folder)
    return (own_part(path, ranks) or folder if manifest.get("parts") else folder), manifest


# -- the dry run -------------------------------------------------------------------------------------------------------


def _read(folder: Path, manifest: Manifest, destination: _Destination) -> Match:
    """The checkpoint, which fits the destination and could be read. Nothing has been changed."""
    with unreplaced(folder, manifest):
        matched = _match(SavedCheckpoint.read(folder, manifest), destination)
        try:
            _dry_run(matched)
        except IncompleteTensorError as error:
            raise type(error)(f"{error}{_of_parts(folder, manifest)}") from error
    return matched


def _of_parts(folder: Path, manifest: Manifest) -> str:
    """Why a part of a save on several disks has not all that a rank needs; empty for other checkpoints."""
    parts = manifest.get("parts")
    if not parts:
        return ""
    where = [f"{part['host']}:{part['path']} (ranks {', '.join(map(str, part['ranks']))})" for part in parts]
    return (
        f" on this host: it was saved in parts, {' and '.join(where)}. Start as many ranks, with the hosts in this "
        f"order, or copy the .distcp files of all parts into {folder}"
    )


def _base(saved: SavedCheckpoint, destination: _Destination) -> set[str]:
    """The names of the model's frozen base: what neither the run that was saved nor this one has trained."""
    if saved.base is not None:  # it was left out of the checkpoint
        return set()
    optimizer = None if destination.optimizer is None else destination.optimizer.optimizer
    trained = {named.name for named in without_base(destination.model, destination.tensors, optimizer)}
    updated = stored_entries(saved.index).keys() | (saved.optimizer or {}).get("values", {}).keys()
    return {
        named.name
        for named in destination.tensors
        if named.name not in trained and updated.isdisjoint(saved.aliases.get(name, name) for name in named.names)
    }


def _stored_average(saved: SavedCheckpoint, named: NamedTensor) -> str | None:
    """The key of the tensor's average in the checkpoint; ``None`` if it has none."""
    keys = (average_key(saved.aliases.get(name, name)) for name in named.names)
    return next((key for key in keys if key in saved.index), None)


def _dry_run(matched: Match) -> None:
    """Read everything that this rank will load, and change nothing.

    Raises:
        CheckpointError: something cannot be read, or optimizer state has NaN, or lacks entries.
    """
    saved, optimizer = matched.saved, matched.optimizer
    found: dict[str, dict[str, Any]] = {}
    for named, names in matched.tied:
        _refuse_different(saved, named, names)
    targets = [replace(target, allocate=None, on_filled=lambda _: None) for target in matched.tensors]
    if optimizer is not None and saved.optimizer is not None:
        _prepare(matched, optimizer, saved.optimizer)
        for name, wanted in matched.entries.items():
            if optimizer.keeps_state(name):
                own = found[name] = dict(saved.optimizer["values"].get(matched.saved_names[name], {}))
                targets += [
                    _entry_target(optimizer, name, key, saved.index[key], partial(_check_entry, name, entry, own))
                    for entry, key in wanted.items()
                ]
    matched.cache = ChunkCache(_cache_bytes())
    read_tensors(saved.data, saved.index, targets, matched.cache)
    matched.cache.close()
    if optimizer is not None and saved.optimizer is not None:
        with _as_checkpoint_error():
            optimizer.check_complete(found, _groups_to_load(matched, saved.optimizer))


def _prepare(matched: Match, optimizer: OptimizerContent, saved: Mapping[str, Any]) -> None:
    """Set the optimizer up for what will be loaded."""
    entries = {
        name: {*wanted, *saved["values"].get(matched.saved_names[name], {})} for name, wanted in matched.entries.items()
    }
    with _as_checkpoint_error():
        listed = {name: names for name, names in entries.items() if names}
        optimizer.prepare_to_load(listed, _groups_to_load(matched, saved))


def _groups_to_load(matched: Match, saved: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The saved groups, by the numbers of the live ones that they are loaded into."""
    return {number: saved["groups"][origin] for number, origin in enumerate(matched.groups) if origin >= 0}


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _refuse_different(saved: SavedCheckpoint, named: NamedTensor, names: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` if tensors of the checkpoint differ that are one (tied) in the model."""
    values: list[Tensor] = []
    shard = shard_or_empty(named.tensor)
    for name in names:
        if saved.index[f"model.{name}"].shape == shard.shape:
            read_tensors(saved.data, saved.index, [Target(f"model.{name}", shard, None, values.append)])
    if len(values) < len(names) or not all(torch.equal(values[0], value) for value in values[1:]):
        raise CheckpointError(
            f"it belongs to another model ({list_names(names)} are tied in the model, and in the checkpoint they have "
            "different values): load it into a model that does not tie them"
        )


def _cache_bytes() -> int:
    """A third of the free host memory: the optimizer may still have to allocate its state."""
    return (available_bytes() or 0) // 3 // ranks_on_this_host()


# -- loading -----------------------------------------------------------------------------------------------------------


def _apply(matched: Match, destination: _Destination, rank: int) -> None:
    """Load weights, then optimizer state, then the small state."""
    saved, optimizer = matched.saved, matched.optimizer
    with torch.no_grad(), unreplaced(saved.folder, saved.manifest):
        read_tensors(saved.data, saved.index, matched.tensors, matched.cache)
        if optimizer is not None:
            _apply_optimizer(matched, optimizer)
    set_extra_states(destination.model, saved.state.get("modules") or {})
    if destination.scheduler is not None:
        apply_scheduler(saved.state.get("scheduler"), destination.scheduler, saved.manifest.get("scheduler"))
    states = saved.state.get("random") or []
    if optimizer is not None and saved.optimizer is not None and rank < len(states):
        set_random_states(states[rank])


def _apply_optimizer(matched: Match, optimizer: OptimizerContent) -> None:
    saved = matched.saved.optimizer
    if saved is None:
        return
    # First: which entries a parameter has depends on its group's settings (amsgrad).
    for number, origin in enumerate(matched.groups):
        if origin >= 0:
            optimizer.set_hyperparameters(number, saved["groups"][origin])
    targets = []
    for name, wanted in matched.entries.items():
        values = dict(saved["values"].get(matched.saved_names[name], {}))
        if not optimizer.keeps_state(name):
            optimizer.load(name, dict.fromkeys([*values, *wanted]))
            continue
        if not wanted:
            optimizer.load(name, values)
        add = partial(_add_entry, optimizer, name, values, set(wanted))
        targets += [
            _entry_target(optimizer, name, key, matched.saved.index[key], partial(add, entry))
            for entry, key in wanted.items()
        ]
    read_tensors(matched.saved.data, matched.saved.index, targets, matched.cache)
    loss_scale = getattr(optimizer.optimizer, "loss_scale", None)
    if loss_scale is not None and saved.get("loss_scale") is not None:
        loss_scale.load_state_dict(saved["loss_scale"])


def _restart_missing_averages(saved: SavedCheckpoint, destination: _Destination) -> None:
    """Restart the averages of weights that were saved without one."""
    average = PreparedModel.of(destination.model).average
    if average is not None:
        with_average = averaged_weights(destination.model, destination.tensors)
        average.restart(named.model_name for named, _ in with_average if _stored_average(saved, named) is None)


def _refresh_masters(optimizers: Iterable[Any], path: Any) -> None:
    """Rebuild the masters after only weights were loaded. After a failed step they wait for the state."""
    for optimizer in optimizers:
        if hasattr(optimizer, "refresh_master_weights") and not getattr(optimizer, "needs_state", False):
            optimizer.refresh_master_weights()
            logger.info("only weights were loaded from %s; the masters were rebuilt from them", path)


def _entry_target(
    optimizer: OptimizerContent, name: str, key: str, stored: StoredTensor, on_filled: Callable[[Tensor], None]
) -> Target:
    """The target that reads a parameter's state entry."""
    parameter = optimizer.parameters[name]
    shard = shard_or_empty(parameter) if stored.shape == parameter.shape else full_shard(stored.shape)
    return Target(key, shard, None, on_filled)


def _check_entry(name: str, entry: str, found: dict[str, Any], tensor: Tensor) -> None:
    """Check an entry that has been read, and add it to ``found``, without what its dimensions hold."""
    with _as_checkpoint_error():
        refuse_nan(name, {entry: tensor})
    found[entry] = tensor.to("meta") if tensor.dim() else tensor.clone()


def _add_entry(
    optimizer: OptimizerContent, name: str, entries: dict[str, Any], missing: set[str], entry: str, tensor: Tensor
) -> None:
    """Add a state entry that has been read to the parameter's ``entries``, which are loaded when none is missing."""
    entries[entry] = tensor
    missing.remove(entry)
    if not missing:
        optimizer.load(name, dict(entries))
        entries.clear()  # the targets, which know it, live longer


def apply_scheduler(state: Any, scheduler: Any, saved_class: str | None = None) -> None:
    """Load a scheduler's state, or warn that the checkpoint has none for it.

    torch's schedulers accept any mapping. With the state of a DeepSpeed scheduler they would start again, or fail; with
    that of another class of torch they would mix the settings of both.

    Args:
        saved_class: the name of the class that was saved, if it is known.
    """
    if state is None:
        logger.warning("the checkpoint holds no scheduler state; the scheduler starts where it is")
    elif _is_of_another_kind(state, scheduler, saved_class):
        logger.warning(
            "the checkpoint's scheduler state is not of a %s (it has %s); the scheduler starts where it is",
            type(scheduler).__name__,
            ", ".join(sorted(map(str, state))),
        )
    else:
        scheduler.load_state_dict(state)


def _is_of_another_kind(state: Any, scheduler: Any, saved_class: str | None) -> bool:
    """Whether no key of the state is the scheduler's; for another class, whether any key is not."""
    own = scheduler.state_dict()
    if not (isinstance(state, Mapping) and isinstance(own, Mapping) and state and own):
        return False
    renamed = saved_class is not None and saved_class != type(scheduler).__name__
    return set(state).isdisjoint(own) or (renamed and set(state) != set(own))


_LOW_PRECISION = (torch.bfloat16, torch.float16)
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
"""torch promotes these to no other dtype."""
_NAMES_SHOWN = 8


# -- which stored tensor is read into which tensor ---------------------------------------------------------------------


@dataclass
class Match:
    """A checkpoint that fits a model and optimizer."""

    saved: SavedCheckpoint
    tensors: list[Target]
    """The model's tensors to fill."""
    optimizer: OptimizerContent | None
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter of the optimizer → state entry → key of the stored tensor."""
    groups: list[int] = field(default_factory=list)
    """For each of the optimizer's groups, the saved group whose hyper-parameters it takes; -1: none."""
    saved_names: dict[str, str] = field(default_factory=dict)
    """Parameter of the optimizer → its name in the checkpoint."""
    tied: list[tuple[NamedTensor, list[str]]] = field(default_factory=list)
    """Tensors that were several in the run that was saved, and the names there. They must be equal."""
    cache: ChunkCache = field(default_factory=ChunkCache)
    """Chunks that have been read."""


def _match(saved: SavedCheckpoint, destination: _Destination) -> Match:
    """Find each of this rank's tensors in the checkpoint.

    Raises:
        CheckpointError: tensors are missing or unexpected, or have another shape; the message names them.
    """
    if destination.trainable_only is False and saved.base is not None:
        raise CheckpointError("it holds only what was trained, and trainable_only=False asks for the base too")
    skip = _base(saved, destination) if destination.trainable_only else set()
    found, missing, different = _find_tensors(saved, destination.tensors)
    live = destination.names["model"]
    known = live | {saved.aliases[name] for name in live if name in saved.aliases}
    unexpected = sorted((saved.model_names() | saved.base_shapes.keys()) - known)
    refuse_differences("model", missing, unexpected, different)
    matched = Match(saved, [], destination.optimizer)
    if destination.optimizer is not None and saved.optimizer is not None:
        _match_optimizer(matched, saved, destination.optimizer, destination.names)
    read = [(named, name) for named, name in found if named.name not in skip]
    matched.tensors = [_model_target(saved, named, name, matched) for named, name in read]
    stored = [(named, [name for name in named.names if f"model.{name}" in saved.index]) for named, _ in read]
    matched.tied = [(named, names) for named, names in stored if len(names) > 1]
    for named, tensor in averaged_weights(destination.model, destination.tensors):
        if (key := _stored_average(saved, named)) is not None:
            matched.tensors.append(Target(key, shard_or_empty(tensor), partial(local_tensor, tensor)))
    return matched


# -- the model ---------------------------------------------------------------------------------------------------------


def _find_tensors(
    saved: SavedCheckpoint, tensors: Iterable[NamedTensor]
) -> tuple[list[tuple[NamedTensor, str]], list[str], list[str]]:
    """``(tensor, saved name)`` pairs, names that were not saved, and descriptions of other shapes and dtypes."""
    found, missing, different, base = [], [], [], saved.base_shapes
    for named in tensors:
        names, tensor = [saved.aliases.get(name, name) for name in named.names], named.tensor
        name = next((name for name in names if f"model.{name}" in saved.index), None)
        stored = saved.index.get(f"model.{name}")
        shape = next((base[name] for name in names if name in base), None) if stored is None else list(stored.shape)
        if shape is None:
            missing.append(named.name)
        elif shape != (live := list(whole_shape(tensor))):
            different.append(f"{named.name} is {shape} in the checkpoint and {live} in the model")
        if name is None or stored is None:
            continue
        if not _can_hold(tensor.dtype, stored.dtype):
            different.append(f"{named.name} is {stored.dtype} in the checkpoint and {tensor.dtype} in the model")
        found.append((named, name))
    return found, missing, different


def _can_hold(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether values are loaded into ``dtype``: floating-point numbers are rounded, all others must fit."""
    if dtype.is_floating_point and stored.is_floating_point:
        return True
    if dtype.is_floating_point or stored.is_floating_point or {dtype, stored} & _UNSIGNED:
        return dtype == stored
    return torch.promote_types(dtype, stored) == dtype


def refuse_differences(what: str, missing: Sequence[str], unexpected: Sequence[str], different: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` with the names if there are any: the checkpoint belongs to another ``what``."""
    parts = {"not in the checkpoint": missing, f"not in the {what}": unexpected, "different": different}
    texts = [f"{text}: {list_names(names, limit=_NAMES_SHOWN)}" for text, names in parts.items() if names]
    if texts:
        raise CheckpointError(f"it belongs to another {what} ({'; '.join(texts)})")


def _model_target(saved: SavedCheckpoint, named: NamedTensor, name: str, matched: Match) -> Target:
    """Weights whose dtype changes are read from their masters, if the optimizer is loaded too."""
    key, tensor = f"model.{name}", named.tensor
    master = entry_key(name, "master")
    if named.name in matched.entries and saved.index[key].dtype != tensor.dtype and master in saved.index:
        key = master
    shard = shard_or_empty(tensor)
    if is_divided(tensor):
        return Target(key, shard, lambda: torch.empty(shard.lengths, dtype=tensor.dtype), partial(fill_local, tensor))
    return Target(key, shard, lambda: local_tensor(tensor).detach())


def shard_or_empty(tensor: Tensor) -> Shard:
    """This rank's shard of the tensor; an empty one if the rank is not in the DTensor's mesh."""
    empty = local_tensor(tensor).shape
    return shard_of(tensor) or Shard(tensor.shape, torch.Size([0] * len(empty)), empty)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _match_optimizer(
    matched: Match, saved: SavedCheckpoint, optimizer: OptimizerContent, names_of: Mapping[str, set[str]]
) -> None:
    """Find each parameter's state and each group's hyper-parameters.

    Frozen parameters without state may be in the groups on one side only.

    Args:
        names_of: from :func:`_gather_names`.
    """
    assert saved.optimizer is not None
    expected, known = saved.manifest.get("optimizer"), optimizer.class_name
    if expected and known and expected != known:
        raise CheckpointError(f"it holds the state of {expected}, the optimizer is {known}")
    group_of = {name: number for number, names in enumerate(saved.groups) for name in names}
    saved_names = matched.saved_names = {name: saved.aliases.get(name, name) for name in names_of["optimizer"]}
    entries = stored_entries(saved.index)
    frozen = {saved.aliases.get(name, name) for name in names_of["frozen"]}
    optional = frozen - entries.keys() - saved.optimizer["values"].keys()
    missing = sorted(name for name, saved_name in saved_names.items() if saved_name not in {*group_of, *optional})
    unexpected = sorted(group_of.keys() - set(saved_names.values()) - optional)
    different = [
        text
        for name in optimizer.parameters
        for text in _other_shapes(saved, optimizer, name, saved_names[name], entries)
    ]
    refuse_differences("optimizer", missing, unexpected, different)
    for number, names in enumerate(optimizer.groups):
        origins = {group_of[saved_names[name]] for name in names if saved_names[name] in group_of}
        matched.groups.append(_saved_group(saved, number, sorted(origins)))
        _refuse_other_class(saved, optimizer, number, matched.groups[-1])
    for name in optimizer.parameters:
        matched.entries[name] = _entries_to_load(saved, optimizer, name, saved_names[name], entries)


def _other_shapes(
    saved: SavedCheckpoint, optimizer: OptimizerContent, name: str, saved_name: str, entries: Mapping[str, list[str]]
) -> list[str]:
    """Descriptions of saved state that is neither of the parameter's shape nor 0-dim, if the parameter is sharded."""
    parameter = optimizer.parameters[name]
    shard = shard_of(parameter)
    if shard is None or not shard.sharded or optimizer.has_whole_tensors:
        return []
    return [
        f"state {entry!r} of {name} is {list(stored.shape)} in the checkpoint, the parameter {list(shard.shape)}"
        for entry in entries.get(saved_name, [])
        if (stored := saved.index[entry_key(saved_name, entry)]).shape not in (shard.shape, torch.Size(()))
    ]


def _saved_group(saved: SavedCheckpoint, number: int, origins: list[int]) -> int:
    """The saved group whose hyper-parameters group ``number`` takes; -1 without ``origins``.

    Args:
        origins: the saved groups that the group's parameters come from.
    """
    assert saved.optimizer is not None
    settings = saved.optimizer["groups"]
    for origin in origins[1:]:
        if not same_settings(settings[origin], settings[origins[0]]):
            raise CheckpointError(
                f"parameter group {number} of the optimizer joins groups {origins} of the checkpoint, whose settings "
                "differ; build the groups as they were"
            )
    return origins[0] if origins else -1


def _refuse_other_class(saved: SavedCheckpoint, optimizer: OptimizerContent, number: int, origin: int) -> None:
    if origin < 0:
        return
    assert saved.optimizer is not None
    expected = _class_of(saved.optimizer["groups"], origin, saved.manifest.get("optimizer"))
    known = _class_of(optimizer.optimizer.param_groups, number, optimizer.class_name)
    same_form = (expected, known) if "." in expected and "." in known else map(_without_module, (expected, known))
    if expected and known and len({*same_form}) > 1:
        raise CheckpointError(f"parameter group {number} is updated by {known}, and it holds the state of {expected}")


def _class_of(groups: Sequence[Mapping[str, Any]], number: int, every: str | None) -> str:
    """The class of a group; of one that names none, the one of ``every`` that no group names. ``""``: not known."""
    named = groups[number].get("optimizer_class")
    if named is not None or every is None:
        return named or ""
    others = {_without_module(name) for group in groups if (name := group.get("optimizer_class")) is not None}
    left = set(every.split(" + ")) - others
    return left.pop() if len(left) == 1 else ""


def _without_module(name: str) -> str:
    return name.rpartition(".")[2]


def _entries_to_load(
    saved: SavedCheckpoint, optimizer: OptimizerContent, name: str, saved_name: str, entries: Mapping[str, list[str]]
) -> dict[str, str]:
    """State entry → key of the stored tensor, with a master if and only if the parameter's dtype needs one."""
    parameter = optimizer.parameters[name]
    wanted = {entry: entry_key(saved_name, entry) for entry in entries.get(saved_name, [])}
    if parameter.dtype not in _LOW_PRECISION or not optimizer.keeps_masters:
        wanted.pop("master", None)
    elif "master" not in wanted and (wanted or parameter.requires_grad):
        stored = saved.index.get(f"model.{saved_name}")
        if stored is not None and stored.dtype == torch.float32:
            wanted["master"] = f"model.{saved_name}"
    return wanted
