"""Loading a training run, on any number of ranks: all of it, or nothing is changed.

A load first compares the checkpoint with model and optimizer. Then every rank reads and checks all that it needs, and
changes nothing. What fits into a third of the free host memory is cached; the rest is read a second time. When all of
it could be read, and belongs to one save, it is loaded into the model and the optimizer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError, DamagedError, checkpoint_errors, is_damage, list_names
from lightstep.checkpoint.frozen_base import warn_if_other_base, without_base
from lightstep.checkpoint.layout import Manifest, find_checkpoint, is_unchanged, read_manifest, warn_if_unchecked
from lightstep.checkpoint.matching import Match, match, shard_or_empty
from lightstep.checkpoint.optimizer_content import OptimizerContent, same_settings, stored_entries
from lightstep.checkpoint.partly_loaded import loading
from lightstep.checkpoint.pending import wait_for_pending
from lightstep.checkpoint.ranks import Ranks, Result
from lightstep.checkpoint.read import ChunkCache, read_tensors
from lightstep.checkpoint.save import average_key, averaged_weights, live_tensors
from lightstep.checkpoint.saved import SavedCheckpoint
from lightstep.checkpoint.small_state import set_random_states
from lightstep.checkpoint.storage import location
from lightstep.checkpoint.tensors import StoredTensor, Target, full_shard
from lightstep.checkpoint.verify import newest_undamaged_before
from lightstep.distributed import local_tensor, ranks_on_this_host
from lightstep.optimizer.serialization import refuse_nan
from lightstep.sharding.model_names import NamedTensor, set_extra_states
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import available_bytes

logger = logging.getLogger(__name__)

_ATTEMPTS, _PAUSE = 10, 0.02
"""How often to retry when another process is replacing the checkpoint, and the seconds in between."""


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
    Gradients that no step has used are dropped: they are of other weights. Another process may replace the checkpoint
    at the same time: the old or the new one is loaded, never a mixture.

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
    with checkpoint_errors(f"{path} was not loaded"), _suggesting_older(location(path), ranks, optimizer is not None):
        optimizers = list(PreparedModel.of(model).optimizers) if optimizer is None else [optimizer]
        tensors = live_tensors(model, optimizer, ranks, for_load=True)
        content = ranks.together(lambda: None if optimizer is None else OptimizerContent(optimizer, tensors))
        destination = _Destination(
            model, scheduler, tensors, content, _gather_names(tensors, content, ranks), trainable_only
        )
        matched = _find_match(location(path), destination, ranks)
        if ranks.is_first:
            warn_if_unchecked(matched.saved.folder, matched.saved.manifest)
            _warn_of_divided_groups(matched)
        weights_only = optimizer is None or matched.saved.optimizer is None
        with loading(model, optimizers, path, weights_only):
            while not _apply_if_unchanged(matched, destination, ranks):
                matched = _find_match(location(path), destination, ranks)  # another process has replaced it
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
    divided: dict[int, list[int]] = {}
    for number, origin in enumerate(matched.groups):
        divided.setdefault(origin, []).append(number)
    groups = matched.optimizer.hyperparameters()
    for origin, numbers in divided.items():
        others = [number for number in numbers if not same_settings(groups[number], groups[numbers[0]])]
        if origin >= 0 and others:
            logger.warning(
                "parameter groups %d and %d of the optimizer were one group of the checkpoint, and get the same "
                "settings from it (learning rate %g); set those that differ after the load",
                numbers[0],
                others[0],
                (matched.saved.optimizer or {})["groups"][origin].get("lr", float("nan")),
            )


@contextmanager
def _suggesting_older(path: Path, ranks: Ranks, with_state: bool) -> Iterator[None]:
    """If the block finds damage, the first rank's error names an older checkpoint that is undamaged."""
    try:
        yield
    except Exception as error:
        if not ranks.is_first or not is_damage(error):
            raise
        older = newest_undamaged_before(path.resolve(), with_state)
        advice = "no older checkpoint next to it is undamaged"
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
    all_names: list[dict[str, set[str]]]
    """From :func:`_gather_names`."""
    trainable_only: bool | None


def _gather_names(
    tensors: list[NamedTensor], optimizer: OptimizerContent | None, ranks: Ranks
) -> list[dict[str, set[str]]]:
    """Each rank's names: of the model's tensors, of those that are frozen, and of the optimizer's parameters."""
    model = {name for named in tensors for name in named.names}
    frozen = {name for named in tensors if not named.tensor.requires_grad for name in named.names}
    optimized = set() if optimizer is None else set(optimizer.parameters)
    return ranks.gather({"model": model, "frozen": frozen, "optimizer": optimized})


# -- one save, even if another process replaces the checkpoint ---------------------------------------------------------


def _find_match(path: Path, destination: _Destination, ranks: Ranks) -> Match:
    """The checkpoint at ``path``, which fits the destination and could be read. Nothing has been changed."""
    for _ in range(_ATTEMPTS):
        folder, manifest = ranks.together(lambda: _find(path), only_first=True)
        read = partial(_read, folder, manifest, destination)
        matched = _run_if_unchanged(read, folder, manifest, ranks)
        if matched is not None:
            return matched
    raise CheckpointError("other processes replace it all the time; wait until they have finished")


def _find(path: Path) -> tuple[Path, Manifest]:
    """The complete checkpoint for ``path``. Retries, because another process may be between two renames."""
    for attempt in range(_ATTEMPTS):
        try:
            folder = find_checkpoint(path)
            return folder, read_manifest(folder)
        except CheckpointError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE)
    raise AssertionError


def _run_if_unchanged(step: Callable[[], Result], folder: Path, manifest: Manifest, ranks: Ranks) -> Result | None:
    """Run ``step`` on every rank. ``None`` on all ranks if the checkpoint was replaced while it ran on any."""

    def run() -> Result | None:
        try:
            result = step()
        except Exception:
            if is_unchanged(folder, manifest):
                raise
            return None
        return result if is_unchanged(folder, manifest) else None

    result = ranks.together(run)
    return result if all(ranks.gather(result is not None)) else None


def _apply_if_unchanged(matched: Match, destination: _Destination, ranks: Ranks) -> bool:
    def apply() -> Match:
        _apply(matched, destination, ranks.rank)
        return matched

    return _run_if_unchanged(apply, matched.saved.folder, matched.saved.manifest, ranks) is not None


# -- the dry run -------------------------------------------------------------------------------------------------------


def _read(folder: Path, manifest: Manifest, destination: _Destination) -> Match:
    matched = _match(SavedCheckpoint.read(folder, manifest), destination)
    _dry_run(matched)
    return matched


def _match(saved: SavedCheckpoint, destination: _Destination) -> Match:
    if destination.trainable_only is False and saved.base is not None:
        raise CheckpointError("it holds only what was trained, and trainable_only=False asks for the base too")
    skip = _base(saved, destination) if destination.trainable_only else set()
    matched = match(saved, destination.tensors, destination.optimizer, destination.all_names, skip)
    for named, tensor in averaged_weights(destination.model, destination.tensors):
        if (key := _stored_average(saved, named)) is not None:
            matched.tensors.append(Target(key, shard_or_empty(tensor), partial(local_tensor, tensor)))
    return matched


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
        CheckpointError: something cannot be read, or optimizer state has NaN.
    """
    saved, optimizer = matched.saved, matched.optimizer
    for named, names in matched.tied:
        _refuse_different(saved, named, names)
    targets = [_discarding(target, saved.index[target.key]) for target in matched.tensors]
    if optimizer is not None and saved.optimizer is not None:
        values, saved_names = saved.optimizer["values"], matched.saved_names
        optimizer.prepare_to_load(
            name for name, wanted in matched.entries.items() if wanted or values.get(saved_names[name])
        )
        for name, wanted in matched.entries.items():
            if optimizer.keeps_state(name):
                loader = _ParameterLoader(optimizer, name, {}, len(wanted))
                targets += [loader.checking_target(entry, key, saved.index[key]) for entry, key in wanted.items()]
    matched.cache = ChunkCache(_cache_bytes())
    read_tensors(saved.data, saved.index, targets, matched.cache)
    matched.cache.close()


def _refuse_different(saved: SavedCheckpoint, named: NamedTensor, names: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` if tensors of the checkpoint differ that are one (tied) in the model."""
    values: list[Tensor] = []
    shard = shard_or_empty(named.tensor)
    for name in names:
        stored = saved.index[f"model.{name}"]
        read = partial(torch.empty, shard.lengths, dtype=stored.dtype)
        if stored.shape == shard.shape:
            read_tensors(saved.data, saved.index, [Target(f"model.{name}", shard, read, values.append)])
    if len(values) < len(names) or not all(torch.equal(values[0], value) for value in values[1:]):
        raise CheckpointError(
            f"it belongs to another model ({list_names(names)} are tied in the model, and in the checkpoint they have "
            "different values): load it into a model that does not tie them"
        )


def _cache_bytes() -> int:
    """A third of the free host memory: the optimizer may still have to allocate its state."""
    return (available_bytes() or 0) // 3 // ranks_on_this_host()


def _discarding(target: Target, stored: StoredTensor) -> Target:
    """A target that reads the same shard into temporary memory."""
    return replace(
        target, allocate=lambda: torch.empty(target.shard.lengths, dtype=stored.dtype), on_filled=lambda _: None
    )


# -- loading -----------------------------------------------------------------------------------------------------------


def _apply(matched: Match, destination: _Destination, rank: int) -> None:
    """Load weights, then optimizer state, then the small state."""
    saved, optimizer = matched.saved, matched.optimizer
    with torch.no_grad():
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
        loader = _ParameterLoader(optimizer, name, values, len(wanted))
        targets += [loader.target(entry, key, matched.saved.index[key]) for entry, key in wanted.items()]
        loader.load_if_complete()
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
    """Rebuild the masters after only weights were loaded."""
    for optimizer in optimizers:
        if hasattr(optimizer, "refresh_master_weights"):
            optimizer.refresh_master_weights()
            logger.info("only weights were loaded from %s; the masters were rebuilt from them", path)


class _ParameterLoader:
    """Collects one parameter's state entries, and loads them when all have been read.

    Args:
        entries: the plain values; read tensors are added.
        missing: how many tensors have not been read yet.
    """

    def __init__(self, optimizer: OptimizerContent, name: str, entries: dict[str, Any], missing: int) -> None:
        self._optimizer = optimizer
        self._name = name
        self._entries = entries
        self._missing = missing

    def target(self, entry: str, key: str, stored: StoredTensor) -> Target:
        """The target that reads an entry and adds it."""
        parameter = self._optimizer.parameters[self._name]
        shard = shard_or_empty(parameter) if stored.shape == parameter.shape else full_shard(stored.shape)

        def add(tensor: Tensor) -> None:
            self._entries[entry] = tensor
            self._missing -= 1
            self.load_if_complete()

        return Target(key, shard, lambda: torch.empty(shard.lengths, dtype=stored.dtype), add)

    def checking_target(self, entry: str, key: str, stored: StoredTensor) -> Target:
        """The target that reads an entry only to check it."""

        def check(tensor: Tensor) -> None:
            try:
                refuse_nan(self._name, {entry: tensor})
            except ValueError as error:
                raise CheckpointError(str(error)) from error

        return replace(self.target(entry, key, stored), on_filled=check)

    def load_if_complete(self) -> None:
        if self._missing == 0:
            self._optimizer.load(self._name, self._entries)
            self._entries = {}


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
