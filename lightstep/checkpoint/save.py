"""Saving a training run, completely or not at all, on any number of ranks. ``layout.py`` describes the files.

An asynchronous save returns when training can no longer change what it will write. It copies no more than necessary:

- *Optimizer state in host records* (``stream``, ``bulk``) is pinned, not copied. The thread reads the records; an
  update of a record that has not been read yet is written to a spare slab (:mod:`lightstep.state.snapshot`).
- *Optimizer state on the device* (``resident``, ``resident_gib``) is copied to the host in a lane of its own during the
  next iteration. The thread allocates the memory for it. An update of a record that is not copied yet waits
  (:mod:`lightstep.state.device_copies`).
- *Weights, buffers, and all else that users may write to at any time* (state of plain torch optimizers, state that was
  handed out) is copied on the current stream. The host does not wait; the next forward is queued after the copies. On
  the CPU the caller makes these copies.

Host memory: the copies take as many bytes as what is copied, page-locked. The memory is kept for the next save as long
as the model exists, because page-locking and first touch take longer than the copies. Joined masters take the memory of
what is on its way to the files (:data:`~lightstep.checkpoint.tensors.IN_FLIGHT_BYTES`).

A synchronous save reads everything in place. So does an asynchronous one if the host has not enough memory for its
copies: training waits for it, and a warning says so.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightstep.checkpoint.background import (
    PendingSave,
    completed_save,
    finish_pending,
    start_save,
    writer_group,
)
from lightstep.checkpoint.disks import Disks
from lightstep.checkpoint.errors import CheckpointError, UnreadableError, checkpoint_errors
from lightstep.checkpoint.layout import (
    CHECKPOINT,
    INDEX,
    MANIFEST,
    STATE,
    TORCH_INDEX,
    is_complete,
    manifest_header,
    read_manifest,
    remove_checkpoint,
    write_manifest,
)
from lightstep.checkpoint.run_state import (
    OptimizerContent,
    average_key,
    averaged_weights,
    describe_base,
    has_adapters,
    live_tensors,
    refuse_partly_loaded,
    without_base,
)
from lightstep.checkpoint.saved import check_loadable, fingerprint, is_undamaged, random_states, write_state
from lightstep.checkpoint.storage import is_nothing, location, recover_interrupted, storage_for, write_file
from lightstep.checkpoint.tensors import (
    Index,
    Source,
    file_sizes,
    format_index,
    format_torch_index,
    merge_indices,
    shard_of,
    share,
    write_tensors,
)
from lightstep.distributed import Ranks, local_tensor
from lightstep.sharding.model_names import NamedTensor, extra_states
from lightstep.state.host_copy_pool import HostCopyPool
from lightstep.state.host_memory import HostMemoryError
from lightstep.state.snapshot import Snapshot

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
    """Write a checkpoint folder. A checkpoint that is already at ``path`` is replaced when the new one is complete.

    Called by every rank of ``group`` (default: the ranks of this process's role; without roles all of them). Hosts that
    share no disk write a part each to ``path`` on their own disks (``disks.py``). Each rank writes its shards; host
    memory grows by about 128 MiB, or by three tensors if these are larger. The random states of Python, numpy, torch
    and the accelerator are saved for each rank; ``scheduler`` and ``extra`` are the first rank's.

    Args:
        path: the checkpoint's folder or a URL, for example ``runs/a/step-100``. The user's files in it are kept.
        model: wrapped or not. Parameters and persistent buffers are saved, tied ones once.
        optimizer: any torch optimizer over parameters of ``model``.
        scheduler: anything with ``state_dict()``.
        extra: plain numbers, strings, lists, dicts, tensors; :func:`load_checkpoint` returns it.
        trainable_only: leave out parameters that are frozen and have no optimizer state. The checkpoint has the name of
            the base model that they belong to. ``None``: ``True`` for models with PEFT adapters, else ``False``.
        weights_only: leave out optimizer and scheduler, for a run that saves its whole state less often. Loading such a
            checkpoint rebuilds the masters.
        keep_last: keep this many complete checkpoints, the new one included, and remove those next to ``path`` that
            have the same name and a lower number. ``None`` removes none. If there are more before the save, the surplus
            is removed first, to make room. Checkpoints with and without optimizer state are counted separately.
        keep_every: checkpoints whose number is a multiple of it are kept too; 0: none.
        asynchronous: return as soon as training can no longer change what will be saved, and write in a thread.
            ``save.py`` describes how, and how much host memory it takes. The next save and the end of the process wait
            for the thread.

    Returns:
        With ``asynchronous``, a handle with ``done()`` and ``result(timeout=None)``, which returns the folder. An error
        is raised by ``result()``, by the next save, or (on a single rank) by the optimizer's next step, whichever comes
        first.

    Raises:
        TypeError: something in ``scheduler`` or ``extra`` could not be loaded again. Nothing has been written.
        CheckpointError: the disk is full, something else is at ``path``, another process is saving to it, ... What was
            at ``path`` is still there. All ranks raise.
    """
    ranks = Ranks(group)
    with checkpoint_errors(f"{path} was not saved"):
        retention = Retention(keep_last, keep_every, weights_only=weights_only or optimizer is None)
        retention.check(location(path).resolve())
        ranks.together(finish_pending)
        tensors = live_tensors(model, optimizer, ranks)
        saved_optimizer, saved_scheduler = (None, None) if weights_only else (optimizer, scheduler)
        content = ranks.together(
            lambda: _collect(tensors, model, saved_optimizer, saved_scheduler, extra, trainable_only)
        )
        if weights_only:
            content.manifest["weights_only"] = True
        else:
            content.sources += [
                source
                for named, tensor in averaged_weights(model, tensors)
                for source in _sources(average_key(named.name), tensor)
            ]
        disks = Disks.behind(location(path).resolve(), ranks)
        plan = _Plan(path, content, share(content.sources, ranks, disks.leads), retention, disks)
        if asynchronous:
            with ExitStack() as until_written:
                if plan.detach(ranks, model, optimizer, until_written):
                    write = partial(_write, plan, writer_group(ranks))
                    return start_save(write, until_written, None if ranks.is_distributed else optimizer)
    with ExitStack() as until_written:
        with checkpoint_errors(f"{path} was not saved"):
            plan.sources = ranks.together(lambda: in_place(plan.sources, saved_optimizer, until_written))
        written = _write(plan, ranks)
    return completed_save(written) if asynchronous else None


@dataclass
class _Plan:
    """What a save will write. Only the sources still read from the run."""

    path: str | os.PathLike[str]
    content: _Content
    sources: list[Source]
    """What this rank writes."""
    retention: Retention
    disks: Disks
    begin: Callable[[], object] = lambda: None
    """Called before anything else by the thread that writes."""

    def detach(
        self, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None, until_written: ExitStack
    ) -> bool:
        """Make the plan independent of what training does next. ``False`` if a rank has not enough memory for that.

        Args:
            until_written: gets what has to be released when the checkpoint has been written.
        """

        def stage() -> tuple[list[Source], Callable[[], object]] | str:
            try:
                return stage_sources(self.sources, model, optimizer, until_written)
            except HostMemoryError as error:
                return str(error)

        staged = ranks.together(stage)
        errors = [text for text in ranks.gather(staged if isinstance(staged, str) else None) if text is not None]
        if errors or isinstance(staged, str):
            logger.warning("training waits for %s: %s", self.path, errors[0])
            return False
        self.sources, self.begin = staged
        content = self.content
        rank_values = {**content.rank_values, "values": copy.deepcopy(content.rank_values["values"])}
        self.content = replace(content, sources=[], state=copy.deepcopy(content.state), rank_values=rank_values)
        return True


def _write(plan: _Plan, ranks: Ranks) -> Path:
    disks = replace(plan.disks, ranks=ranks)
    target = disks.path
    with checkpoint_errors(f"{plan.path} was not saved"):
        ranks.together(plan.begin)
    with (
        checkpoint_errors(f"{plan.path} was not saved"),
        plan.retention.applied(target, ranks, disks.is_lead),
        disks.new_folders(CHECKPOINT) as temporary,
    ):
        index = ranks.together(lambda: write_tensors(temporary, plan.sources, ranks.rank))
        indices, values = zip(*ranks.gather((index, plan.content.rank_values)), strict=True)
        if disks.are_several:
            plan.content.manifest["parts"] = disks.parts([file_sizes(index) for index in indices])
        ranks.together(
            lambda: _finish(temporary, target, plan.content, values, merge_indices(indices)), only_first=True
        )
        if disks.are_several:
            _copy_small_files(temporary, disks)
        disks.on_each(lambda: storage_for(target).commit(temporary, target, CHECKPOINT))
    logger.info("saved %s", plan.path)
    return target


def _copy_small_files(folder: Path, disks: Disks) -> None:
    """The files that the first rank wrote alone, to the folders on the other disks. The manifest is the last one."""
    names = (INDEX, TORCH_INDEX, STATE, MANIFEST)
    contents = disks.ranks.together(lambda: [(folder / name).read_bytes() for name in names], only_first=True)

    def copy() -> None:
        for name, content in zip(names, contents, strict=True):
            write_file(folder / name, content)

    disks.on_each(lambda: None if disks.ranks.is_first else copy())


def finish_checkpoint(
    folder: Path, target: Path, index: Index, state: dict[str, Any], manifest: dict[str, Any], world_size: int
) -> None:
    """Write the index, the small state and the manifest next to the tensors."""
    files: dict[str, tuple[int, int | None]] = {name: (size, None) for name, size in file_sizes(index).items()}
    files[INDEX] = write_file(folder / INDEX, format_index(index))
    files[TORCH_INDEX] = write_file(folder / TORCH_INDEX, format_torch_index(index))
    files[STATE] = write_state(folder, state)
    header = manifest_header(target, world_size)
    write_manifest(folder, target, {**header, **manifest, "tensors": _tensor_summaries(index)}, files)


def _tensor_summaries(index: Index) -> dict[str, str]:
    """The model's tensors as text, for people: name -> ``bfloat16[1024, 4096]``."""
    return {
        key.removeprefix("model."): f"{str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}"
        for key, stored in index.items()
        if key.startswith("model.")
    }


@dataclass
class _Content:
    """What goes into the checkpoint; tensors are fetched when they are written."""

    sources: list[Source]
    state: dict[str, Any]
    """The small state."""
    manifest: dict[str, Any]
    rank_values: dict[str, Any] = field(default_factory=dict)
    """What only this rank knows: plain state values, random states, tied names, names in the parameter groups, and the
    fingerprint of its ``extra``."""


def _collect(
    tensors: list[NamedTensor],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    trainable_only: bool | None,
) -> _Content:
    """The content of the checkpoint.

    Raises:
        TypeError: something in it could not be loaded again.
        CheckpointError, RuntimeError: model or optimizer were left half loaded or half updated by an error.
    """
    refuse_partly_loaded(model)
    if hasattr(optimizer, "refuse_half_updated"):
        optimizer.refuse_half_updated("Load a checkpoint before saving one")
    state = small_state(scheduler, extra, modules=extra_states(model))
    content = _Content([], state, {"scheduler": None if scheduler is None else type(scheduler).__name__})
    saved = tensors
    if trainable_only or (trainable_only is None and has_adapters(model)):
        saved = without_base(model, tensors, optimizer)
        content.manifest["base"] = describe_base(model, tensors, saved)
    content.sources = [source for named in saved for source in _sources(f"model.{named.name}", named.tensor)]
    content.rank_values = {
        "values": {},
        "random": random_states(),
        "extra": fingerprint(state["extra"]),
        "aliases": {alias: named.name for named in tensors for alias in named.names[1:]},
    }
    if optimizer is not None:
        _collect_optimizer(content, OptimizerContent(optimizer, tensors))
    return content


def small_state(scheduler: Any, extra: Mapping[str, Any] | None, **others: Any) -> dict[str, Any]:
    """What is saved beside model and optimizer.

    Raises:
        TypeError: something in it could not be loaded again.
    """
    scheduled = None if scheduler is None else scheduler.state_dict()
    state = {"extra": dict(extra or {}), "scheduler": scheduled, **others}
    for key, value in state.items():
        check_loadable(key, value)
    return state


def _collect_optimizer(content: _Content, optimizer: OptimizerContent) -> None:
    if getattr(optimizer.optimizer, "has_gradients", False):
        logger.warning("saved between backward() and step(): the gradients of this step are not in the checkpoint")
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
    content.rank_values |= {"values": values, "groups": optimizer.groups}


def _sources(key: str, tensor: Tensor) -> list[Source]:
    """The source for this rank's part of a tensor; none if the rank is not in the DTensor's mesh."""
    shard = shard_of(tensor)
    if shard is None:
        return []
    return [Source(key, shard, tensor.dtype, lambda: local_tensor(tensor).detach(), tensor)]


def _finish(temporary: Path, target: Path, content: _Content, parts: Sequence[dict[str, Any]], index: Index) -> None:
    """Join what all ranks know, and finish the checkpoint. Called by the first rank."""
    warn_if_different([part["extra"] for part in parts], target)
    state = {**content.state, "random": [part["random"] for part in parts]}
    groups = None
    if "optimizer" in state:
        state["optimizer"]["values"] = {name: value for part in parts for name, value in part["values"].items()}
        of_ranks = zip(*(part["groups"] for part in parts), strict=True)  # in the order in which names first appear
        groups = [list(dict.fromkeys(itertools.chain(*names))) for names in of_ranks]
    manifest = {
        **content.manifest,
        "groups": groups,
        "aliases": {alias: name for part in parts for alias, name in part["aliases"].items()},
    }
    finish_checkpoint(temporary, target, index, state, manifest, len(parts))


def warn_if_different(extras: Iterable[int], target: Path) -> None:
    """Log a warning if the ranks have given different ``extra``, of which these are the fingerprints."""
    if len(set(extras)) > 1:
        logger.warning(
            "extra differs over the ranks, and only the first rank's is saved to %s; to keep the others', pass a "
            "dictionary with those of all ranks (torch.distributed.all_gather_object)",
            target,
        )


# -- what is written is made independent of training ------------------------------------------------------------------

_kept: weakref.WeakKeyDictionary[nn.Module, HostCopyPool] = weakref.WeakKeyDictionary()


def stage_sources(
    sources: Sequence[Source], model: nn.Module, optimizer: Any, until_written: ExitStack
) -> tuple[list[Source], Callable[[], object]]:
    """Sources of the same tensors that a thread can fetch, once each, while training continues.

    Also returns what the thread has to call as soon as it runs.

    Args:
        until_written: gets the pinned state, which is released when the checkpoint has been written.

    Raises:
        HostMemoryError: there is not enough host memory for the copies.
    """
    copies = _kept.pop(model, None) or HostCopyPool()  # a signal handler's save has other memory than one under way
    copies.reset()
    until_written.callback(_keep, weakref.ref(model), copies)
    copies.reserve(sum(source.nbytes for source in sources if source.entry is None))
    for source in sources:  # first, because the next forward waits for these
        if source.entry is None and source.model_tensor is not None:
            copies.copy_once(source.model_tensor)

    def weight_of(tensor: Tensor) -> Callable[[], Tensor]:
        return partial(copies.wait_for, copies.copy_once(tensor))

    pinned = _pin_state(sources, optimizer, weight_of, copies, until_written)

    def detached(source: Source) -> Source:
        if pinned is not None and source.entry is not None and source.model_tensor in pinned:
            return _from_pinned(source, pinned)
        if source.model_tensor is not None and source.entry is None:
            return source.with_fetch(weight_of(source.model_tensor))
        return source.with_fetch(partial(copies.wait_for, copies.copy(source.fetch())))

    state = [source for source in sources if source.entry is not None]
    copies.reserve(sum(source.nbytes for source in state if pinned is None or source.model_tensor not in pinned))
    found = [detached(source) for source in _pinned_first(sources)]
    copies.seal()
    return found, pinned.begin if pinned is not None else lambda: None


def _keep(model: weakref.ref[nn.Module], copies: HostCopyPool) -> None:
    """Keep the memory for the next save, as long as the model exists."""
    owner = model()
    if owner is not None:
        _kept[owner] = copies


def in_place(sources: Sequence[Source], optimizer: Any, until_written: ExitStack) -> list[Source]:
    """Sources of the same tensors for a synchronous save: records on the host are read without a copy."""
    pinned = _pin_state(sources, optimizer, lambda tensor: partial(_to_host, tensor), None, until_written)
    if pinned is None:
        return list(sources)
    return [
        _from_pinned(source, pinned) if source.entry is not None and source.model_tensor in pinned else source
        for source in _pinned_first(sources)
    ]


def _pin_state(
    sources: Sequence[Source],
    optimizer: Any,
    weight_of: Callable[[Tensor], Callable[[], Tensor]],
    copies: HostCopyPool | None,
    until_written: ExitStack,
) -> Snapshot | None:
    """Pin the optimizer's state that is among ``sources``; ``None`` if the optimizer has nothing to pin.

    Args:
        weight_of: called with a parameter, returns a function that returns its weights on the host.
        copies: where state on the device is copied to; ``None`` reads it in place.
    """
    wanted: dict[Tensor, set[str]] = {}
    for source in sources:
        if source.model_tensor is not None and source.entry is not None:
            wanted.setdefault(source.model_tensor, set()).add(source.entry)
    pin = getattr(optimizer, "pinned_state", None)
    pinned: Snapshot | None = None if pin is None else pin(wanted, weight_of, copies)
    if pinned is not None:
        until_written.callback(pinned.close)
    return pinned


def _from_pinned(source: Source, pinned: Snapshot) -> Source:
    assert source.model_tensor is not None and source.entry is not None
    return source.with_fetch(
        partial(pinned.take, source.model_tensor, source.entry),
        partial(pinned.written, source.model_tensor, source.entry),
    )


def _pinned_first(sources: Sequence[Source]) -> list[Source]:
    """Optimizer state first, so that records are unpinned soon."""
    return sorted(sources, key=lambda source: source.entry is None)


def _to_host(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach().to(torch.device("cpu"))


# -- removing older checkpoints when a new one is saved ----------------------------------------------------------------

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints a save keeps.

    Attributes:
        keep_last: how many complete ones, with the new one; ``None``: all.
        keep_every: those whose number is a multiple of it are kept too; 0: none.
        weights_only: whether the new checkpoint has no optimizer state. Checkpoints of the other kind are not touched.

    Raises:
        ValueError: ``keep_every`` without ``keep_last``, or a number that is too small.
    """

    keep_last: int | None = None
    keep_every: int = 0
    weights_only: bool = False

    def __post_init__(self) -> None:
        last, every = self.keep_last, self.keep_every
        if last is None and every:
            raise ValueError(f"keep_every is {every} without keep_last: nothing would be removed; set both")
        if (last is not None and last < 1) or every < 0:
            raise ValueError(f"keep_last is {last} and keep_every {every}; at least 1 and 0 are needed")

    def check(self, path: Path) -> None:
        """Raise ``ValueError`` unless ``path`` ends in a number, if older checkpoints are to be removed."""
        if self.keep_last is not None and not _NUMBERED.fullmatch(path.name):
            raise ValueError(f"keep_last needs a path that ends in a number, such as runs/a/step-100; got {path}")

    @contextmanager
    def applied(self, path: Path, ranks: Ranks, removes: bool | None = None) -> Iterator[None]:
        """Remove older checkpoints before and after the block, which saves to ``path``.

        Before the block the surplus over ``keep_last`` is removed, which makes room; after it those that the
        new one makes superfluous. Called by all ranks.

        Args:
            removes: whether this rank removes; default: the first one does.

        Raises:
            ValueError: ``path`` does not end in a number.
        """
        self.check(path)
        removes = ranks.is_first if removes is None else removes
        ranks.together(lambda: self.remove_old(path, saved=False) if removes else None)
        yield
        ranks.together(lambda: self.remove_old(path) if removes else None)

    def remove_old(self, path: Path, saved: bool = True) -> None:
        """Keep the newest complete checkpoints up to ``path``, and remove the older ones next to it.

        Checkpoints with higher numbers stay: a run that was resumed from an earlier one will replace them when it gets
        there. The user's files stay.

        Args:
            saved: whether ``path`` has just been saved. Before the save, nothing is removed unless the checkpoints that
                are kept have been verified byte by byte.
        """
        if self.keep_last is None:
            return
        prefix, number = _split(path.name)

        def is_earlier(name: str) -> bool:
            return _split(name)[0] == prefix and _split(name)[1] < number

        recover_interrupted(path.parent, CHECKPOINT, is_earlier)
        found = [entry for entry in _checkpoints(path.parent) if is_earlier(entry.name)]
        earlier = [entry for entry in sorted(found, key=_number, reverse=True) if _matches(entry, self.weights_only)]
        count = self.keep_last - saved
        if not saved and len(earlier) <= count:
            return
        is_usable: Callable[[Path], bool] = is_complete if saved else is_undamaged
        try:
            kept = list(islice((entry for entry in earlier if is_usable(entry)), count))
            if not saved and not kept:
                return
            if self.keep_every:
                kept += [entry for entry in earlier if _number(entry) % self.keep_every == 0 and is_complete(entry)]
        except UnreadableError as error:  # the next save removes what is too much: the new checkpoint is whole
            logger.warning("no older checkpoint was removed: %s", error)
            return
        for entry in earlier:
            if entry not in kept:
                remove_checkpoint(entry)


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, complete or not, and empty folders, which a crash during a removal may leave."""
    try:
        return [entry for entry in folder.iterdir() if CHECKPOINT.is_ours(entry) or is_nothing(entry)]
    except OSError:  # nothing has been saved yet
        return []


def _split(name: str) -> tuple[str | None, int]:
    """``("step-", 100)`` for ``"step-100"``; ``(None, 0)`` for a name that does not end in a number."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (None, 0)


def _number(path: Path) -> int:
    return _split(path.name)[1]


def _matches(folder: Path, weights_only: bool) -> bool:
    """Whether the checkpoint is of this kind; one that cannot be read counts as both."""
    try:
        return (read_manifest(folder).get("groups") is None) == weights_only
    except CheckpointError:
        return True
