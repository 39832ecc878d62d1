"""Loading a training run, on any number of ranks: all of it, or nothing is changed.

Everything is compared first, then everything that a rank needs is read and checked. It stays in host memory, as far as
a third of what is free goes; the rest is read again. Only what could be read and is of one save is then loaded into the
model and the optimizer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.compare import Matched, local_shard, match
from lightstep.checkpoint.errors import CheckpointError, DamagedError, is_damage, reported
from lightstep.checkpoint.frozen_base import say_if_another, without_base
from lightstep.checkpoint.layout import Manifest, find_checkpoint, is_unchanged, read_manifest, say_if_unchecked
from lightstep.checkpoint.optimizer_content import OptimizerContent
from lightstep.checkpoint.partly_loaded import changing
from lightstep.checkpoint.pending import wait_for_pending
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.read import Held, read_tensors
from lightstep.checkpoint.save import average_key, live_tensors
from lightstep.checkpoint.saved import Saved
from lightstep.checkpoint.small_state import set_random_states
from lightstep.checkpoint.storage import location
from lightstep.checkpoint.tensors import Stored, Target, whole
from lightstep.checkpoint.verify import whole_before
from lightstep.distributed import local_tensor, ranks_on_this_host
from lightstep.optimizer.serialization import refuse_nan
from lightstep.sharding.model_names import NamedTensor, set_extra_states
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.state.host_memory import available_bytes

logger = logging.getLogger(__name__)

_ATTEMPTS, _PAUSE = 10, 0.02
"""How often a checkpoint is looked for that another process is just replacing, and seconds between."""


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

    Called by every rank of ``group``. A checkpoint that is incomplete or damaged, or of another model or optimizer, is
    refused before anything is changed. Should loading fail after that all the same (a disk that is gone), the model
    cannot be saved, and its optimizer makes no step, until a load has gone through. A save that this process has under
    way is waited for. Another process may save to ``path`` meanwhile: what is loaded is one checkpoint or the other.

    With an ``optimizer``, its state, hyper-parameters and loss scale are loaded bit for bit, and each rank's random
    states are restored (ranks that were not there when it was saved keep theirs). Weights change dtype through their
    fp32 masters: fp32 weights become the masters of bf16 parameters, and masters become fp32 weights. Without one, or
    if the checkpoint holds none, only weights are loaded, and the masters of the model's optimizers are rebuilt from
    them.

    Args:
        trainable_only: ``None`` loads what the checkpoint holds; if that is only what was trained, the frozen base in
            the model is left as it is, and its shapes are checked. ``True`` leaves the base alone also when the
            checkpoint has it; ``False`` refuses a checkpoint that has not.

    Raises:
        CheckpointError: the checkpoint cannot be used; the message names the path and what differs. All ranks raise.
    """
    ranks = Ranks(group)
    wait_for_pending()
    with reported(f"{path} was not loaded"), _older_one_named(location(path), ranks, optimizer is not None):
        tensors = live_tensors(model, optimizer, ranks)
        content = ranks.together(lambda: None if optimizer is None else OptimizerContent(optimizer, tensors))
        into = _Into(model, scheduler, tensors, content, _names_everywhere(tensors, content, ranks), trainable_only)
        matched = _read_once(location(path), into, ranks)
        if ranks.is_first:
            say_if_unchecked(matched.saved.folder, matched.saved.manifest)
        weights_only = optimizer is None or matched.saved.optimizer is None
        optimizers = list(PreparedModel.of(model).optimizers) if optimizer is None else [optimizer]
        with changing(model, optimizers, path, weights_only):
            while not _loaded(matched, into, ranks):
                matched = _read_once(location(path), into, ranks)  # another one has taken its place
            if optimizer is None or matched.saved.optimizer is None:
                _masters_follow(optimizers, path)
            _begin_averages(model, matched.saved.index)
    if matched.saved.base is not None:
        say_if_another(model, matched.saved.base)
    logger.info("loaded %s", path)
    return dict(matched.saved.state.get("extra") or {})


@contextmanager
def _older_one_named(path: Path, ranks: Ranks, with_state: bool) -> Iterator[None]:
    """An error about damage says, on the first rank, which checkpoint beside it was found to be whole."""
    try:
        yield
    except Exception as error:
        if not ranks.is_first or not is_damage(error):
            raise
        older = whole_before(path.resolve(), with_state)
        advice = "no older one beside it is whole" if older is None else f"{older} beside it is whole: load that one"
        raise DamagedError(f"{error}; {advice}") from error


@dataclass
class _Into:
    """What is loaded into, on this rank; ``everywhere`` has all ranks' names."""

    model: nn.Module
    scheduler: Any
    tensors: list[NamedTensor]
    optimizer: OptimizerContent | None
    everywhere: list[dict[str, set[str]]]
    trainable_only: bool | None


def _names_everywhere(
    tensors: list[NamedTensor], optimizer: OptimizerContent | None, ranks: Ranks
) -> list[dict[str, set[str]]]:
    model = {name for named in tensors for name in named.names}
    frozen = {name for named in tensors if not named.tensor.requires_grad for name in named.names}
    known = set() if optimizer is None else set(optimizer.parameters)
    return ranks.gather({"model": model, "frozen": frozen, "optimizer": known})


# -- one save, whatever happens meanwhile ------------------------------------------------------------------------------


def _read_once(path: Path, into: _Into, ranks: Ranks) -> Matched:
    """A checkpoint that fits, all of which could be read; nothing has been changed."""
    for _ in range(_ATTEMPTS):
        folder, manifest = ranks.together(lambda: _found(path), only_first=True)
        matched: list[Matched] = []
        step = _reading(folder, manifest, into, matched)
        if _bound(step, folder, manifest, ranks):
            return matched[0]
    raise CheckpointError("other processes replace it all the time; wait until they have finished")


def _reading(folder: Path, manifest: Manifest, into: _Into, result: list[Matched]) -> Callable[[], None]:
    def step() -> None:
        result.append(_match(Saved.read(folder, manifest), into))
        _rehearse(result[0])

    return step


def _found(path: Path) -> tuple[Path, Manifest]:
    """On one rank; again after a moment, should another process be between two renames."""
    for attempt in range(_ATTEMPTS):
        try:
            folder = find_checkpoint(path)
            return folder, read_manifest(folder)
        except CheckpointError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE)
    raise AssertionError


def _bound(step: Callable[[], None], folder: Path, manifest: Manifest, ranks: Ranks) -> bool:
    """Take a step on every rank; ``False``, on all of them, when what it read may be of two checkpoints."""

    def guarded() -> bool:
        try:
            step()
        except Exception:
            if is_unchanged(folder, manifest):
                raise
        return is_unchanged(folder, manifest)

    return all(ranks.gather(ranks.together(guarded)))


def _loaded(matched: Matched, into: _Into, ranks: Ranks) -> bool:
    saved = matched.saved
    return _bound(lambda: _apply(matched, into, ranks.rank), saved.folder, saved.manifest, ranks)


# -- reading without changing anything ---------------------------------------------------------------------------------


def _match(saved: Saved, into: _Into) -> Matched:
    if into.trainable_only is False and saved.base is not None:
        raise CheckpointError("it holds only what was trained, and trainable_only=False asks for the base too")
    left_alone: set[str] = set()
    if into.trainable_only:
        optimizer = None if into.optimizer is None else into.optimizer.optimizer
        trained = {named.name for named in without_base(into.tensors, optimizer)}
        left_alone = {named.name for named in into.tensors} - trained
    matched = match(saved, into.tensors, into.optimizer, into.everywhere, left_alone)
    averages = {average_key(name): tensor for name, tensor in _averages(into.model).items()}
    matched.tensors += [_average_target(key, tensor) for key, tensor in averages.items() if key in saved.index]
    return matched


def _averages(model: nn.Module) -> Mapping[str, Tensor]:
    average = PreparedModel.of(model).average
    return {} if average is None else average.tensors


def _average_target(key: str, tensor: Tensor) -> Target:
    return Target(key, local_shard(tensor), lambda: local_tensor(tensor))


def _rehearse(matched: Matched) -> None:
    """Read everything that this rank will load, and change nothing.

    Raises:
        CheckpointError: something cannot be read, or state holds NaN.
    """
    saved, optimizer = matched.saved, matched.optimizer
    targets = [_dropped(target, saved.index[target.key]) for target in matched.tensors]
    if optimizer is not None and saved.optimizer is not None:
        values = saved.optimizer["values"]
        optimizer.expect(name for name, wanted in matched.entries.items() if wanted or values.get(matched.called[name]))
        for name, wanted in matched.entries.items():
            if optimizer.keeps(name):
                loader = _ParameterLoader(optimizer, name, {}, len(wanted))
                targets += [loader.checked(entry, key, saved.index[key]) for entry, key in wanted.items()]
    matched.held = Held(_room())
    read_tensors(saved.data, saved.index, targets, matched.held)
    matched.held.no_more()


def _room() -> int:
    """Host memory for what is read: a third of what is free; the optimizer's own may still have to be taken."""
    return (available_bytes() or 0) // 3 // ranks_on_this_host()


def _dropped(target: Target, stored: Stored) -> Target:
    return replace(target, make=lambda: torch.empty(target.shard.lengths, dtype=stored.dtype), arrived=lambda _: None)


# -- loading -----------------------------------------------------------------------------------------------------------


def _apply(matched: Matched, into: _Into, rank: int) -> None:
    """Weights, then optimizer state, then everything small."""
    saved, optimizer = matched.saved, matched.optimizer
    with torch.no_grad():
        read_tensors(saved.data, saved.index, matched.tensors, matched.held)
        if optimizer is not None:
            _apply_optimizer(matched, optimizer)
    set_extra_states(into.model, saved.state.get("modules") or {})
    if into.scheduler is not None:
        apply_scheduler(saved.state.get("scheduler"), into.scheduler)
    states = saved.state.get("random") or []
    if optimizer is not None and saved.optimizer is not None and rank < len(states):
        set_random_states(states[rank])


def _apply_optimizer(matched: Matched, optimizer: OptimizerContent) -> None:
    saved = matched.saved.optimizer
    if saved is None:
        return
    values_of = {name: dict(saved["values"].get(matched.called[name], {})) for name in matched.entries}
    targets = []
    for name, wanted in matched.entries.items():
        values = values_of.pop(name)  # the loader fills it, and must be the only one that keeps it
        if not optimizer.keeps(name):
            optimizer.load(name, dict.fromkeys([*values, *wanted]))
            continue
        loader = _ParameterLoader(optimizer, name, values, len(wanted))
        targets += [loader.target(entry, key, matched.saved.index[key]) for entry, key in wanted.items()]
        loader.finish_if_whole()
    read_tensors(matched.saved.data, matched.saved.index, targets, matched.held)
    for number, origin in enumerate(matched.groups):
        if origin >= 0:
            optimizer.set_hyperparameters(number, saved["groups"][origin])
    loss_scale = getattr(optimizer.optimizer, "loss_scale", None)
    if loss_scale is not None and saved.get("loss_scale") is not None:
        loss_scale.load_state_dict(saved["loss_scale"])


def _begin_averages(model: nn.Module, index: Collection[str]) -> None:
    """Of weights that were saved without an average."""
    average = PreparedModel.of(model).average
    if average is not None:
        average.restart(name for name in average.tensors if average_key(name) not in index)


def _masters_follow(optimizers: Iterable[Any], path: Any) -> None:
    """Only weights were loaded."""
    for optimizer in optimizers:
        if hasattr(optimizer, "refresh_master_weights"):
            optimizer.refresh_master_weights()
            logger.info("only weights were loaded from %s; the masters were rebuilt from them", path)


class _ParameterLoader:
    """Collects one parameter's entries and hands them over together, so that few of them are in memory at a time."""

    def __init__(self, optimizer: OptimizerContent, name: str, entries: dict[str, Any], missing: int) -> None:
        self._optimizer = optimizer
        self._name = name
        self._entries = entries
        self._missing = missing

    def target(self, entry: str, key: str, stored: Stored) -> Target:
        """Where an entry is read to, for the optimizer."""
        parameter = self._optimizer.parameters[self._name]
        shard = local_shard(parameter) if stored.shape == parameter.shape else whole(stored.shape)

        def arrived(tensor: Tensor) -> None:
            self._entries[entry] = tensor
            self._missing -= 1
            self.finish_if_whole()

        return Target(key, shard, lambda: torch.empty(shard.lengths, dtype=stored.dtype), arrived)

    def checked(self, entry: str, key: str, stored: Stored) -> Target:
        """Where an entry is read to, only to see whether it can be used."""

        def arrived(tensor: Tensor) -> None:
            try:
                refuse_nan(self._name, {entry: tensor})
            except ValueError as error:
                raise CheckpointError(str(error)) from error

        return replace(self.target(entry, key, stored), arrived=arrived)

    def finish_if_whole(self) -> None:
        if self._missing == 0:
            self._optimizer.load(self._name, self._entries)
            self._entries = {}


def apply_scheduler(state: Any, scheduler: Any) -> None:
    """Load a scheduler's state, or say that there is none for it.

    torch's schedulers take any mapping: given the state of one of DeepSpeed's, they would begin anew, or fail.
    """
    if state is None:
        logger.warning("the checkpoint holds no scheduler state; the scheduler starts where it is")
    elif _share_no_key(state, scheduler.state_dict()):
        logger.warning(
            "the checkpoint's scheduler state is not of a %s (it has %s); the scheduler starts where it is",
            type(scheduler).__name__,
            ", ".join(sorted(map(str, state))),
        )
    else:
        scheduler.load_state_dict(state)


def _share_no_key(one: Any, other: Any) -> bool:
    mappings = isinstance(one, Mapping) and isinstance(other, Mapping)
    return mappings and bool(one) and bool(other) and set(one).isdisjoint(other)
