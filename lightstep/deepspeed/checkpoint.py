"""Checkpoints of a DeepSpeed engine: DeepSpeed's own files, written completely or not at all.

::

    step-100/
        lightstep.json       the manifest, as in checkpoint/layout.py, with a section "deepspeed"
        state.pt             extra, scheduler, hyper-parameters, random states; loaded with weights_only=True
        latest               the name of the folder below, which DeepSpeed's tools read
        zero_to_fp32.py      DeepSpeed's script that converts its files to plain weights
        global_step100/      what engine.save_checkpoint writes: weights, and one file of optimizer state per rank

A folder in DeepSpeed's universal format, from DeepSpeed's or lightstep's converter, is loaded too, at any stage and on
any number of ranks: ``latest_universal`` names the folder in it, whose ``zero/`` has a folder per parameter with master
and moments.

DeepSpeed loads its files with ``weights_only=False``. Here torch's weights-only unpickler is used in its place. It
accepts only tensors, plain values and a few of DeepSpeed's classes (``trusted_loads``). Files with anything else are
refused before one of them is loaded.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors, list_names
from lightstep.checkpoint.formats.files import GETATTR, enum_member, refused_name
from lightstep.checkpoint.formats.zero import RESERVED
from lightstep.checkpoint.layout import (
    CHECKPOINT,
    STATE,
    check_files,
    commit_checkpoint,
    find_checkpoint,
    manifest_header,
    read_manifest,
    size_and_checksum,
    unreplaced,
)
from lightstep.checkpoint.load import apply_scheduler
from lightstep.checkpoint.model_state import loading, refuse_partly_loaded
from lightstep.checkpoint.optimizer_state import OptimizerContent
from lightstep.checkpoint.retention import Retention
from lightstep.checkpoint.saved import check_loadable, random_states, read_state, set_random_states, write_state
from lightstep.checkpoint.storage import local_folder, new_shared_folder, sync, write_file
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer
from lightstep.deepspeed.weights import shapes
from lightstep.distributed import Ranks
from lightstep.sharding.model_names import named_tensors, unwrap_model

logger = logging.getLogger(__name__)

_SECTION = "deepspeed"
_LATEST = "latest"
_UNIVERSAL = "latest_universal"
_TOOLS = ("zero_to_fp32.py", "zero_to_torch.py")

_TRUSTED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes in DeepSpeed's files that torch's weights-only unpickler does not allow by itself."""


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: DeepSpeedOptimizer,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep_every: int = 0,
) -> None:
    """``lightstep.checkpoint.save_checkpoint`` with DeepSpeed's own files.

    Raises:
        TypeError: something in ``scheduler`` or ``extra`` could not be loaded again.
        CheckpointError: the checkpoint could not be written. All ranks raise, and what was at ``path`` is still there.
    """
    ranks = Ranks()
    with checkpoint_errors(f"{path} was not saved"):
        target = local_folder(path, "DeepSpeed writes its files to local folders")
    with checkpoint_errors(f"{path} was not saved"), Retention(keep_last, keep_every).applied(target, ranks):
        state, manifest = ranks.together(lambda: _content(model, optimizer, scheduler, extra))
        with new_shared_folder(target, CHECKPOINT, ranks) as temporary:
            files = _write_engine(temporary, manifest[_SECTION]["tag"], optimizer, ranks, state)
            parts = ranks.gather((random_states(), files))
            state["random"] = [random for random, _ in parts]
            all_files = {name: entry for _, written in parts for name, entry in written.items()}
            ranks.together(lambda: _finish(temporary, target, state, manifest, all_files), only_first=True)
    logger.info("saved %s", path)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any = None, weights_only: bool = False
) -> dict[str, Any]:
    """``lightstep.checkpoint.load_checkpoint`` into an engine; returns ``extra``.

    Args:
        weights_only: do not load optimizer state and random states; rebuild the masters from the weights.

    Raises:
        CheckpointError: the checkpoint cannot be used. All ranks raise. Nothing has been changed, unless DeepSpeed
            fails after the checks, or another process replaces the checkpoint while DeepSpeed loads it.
    """
    ranks, path = Ranks(), Path(path).expanduser()
    universal = (path / _UNIVERSAL).is_file()
    load = _load_universal if universal else _load_own
    with checkpoint_errors(f"{path} was not loaded"):
        extra = load(path, model, optimizer, scheduler, weights_only, ranks)
    logger.info("loaded %s", path)
    return extra


# -- saving ------------------------------------------------------------------------------------------------------------


def _content(
    model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The small state and the manifest.

    Raises:
        TypeError: something in the state could not be loaded again.
        CheckpointError, RuntimeError: model or optimizer cannot be saved now.
    """
    refuse_partly_loaded(model)
    optimizer.prepare_for_checkpoint()
    tensors = named_tensors(model)
    content = OptimizerContent(optimizer, tensors)
    state = {
        "extra": dict(extra or {}),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "optimizer": {"groups": content.hyperparameters()},
    }
    for key, value in state.items():
        check_loadable(key, value)
    manifest = {
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "optimizer": optimizer.optimizer_class.__name__,
        "groups": content.groups,
        "shapes": shapes(tensors),
        _SECTION: _describe(optimizer.engine),
    }
    return state, manifest


def _describe(engine: Any) -> dict[str, Any]:
    import deepspeed

    return {
        "version": deepspeed.__version__,
        "tag": f"global_step{engine.global_steps}",
        "stage": int(engine.zero_optimization_stage()),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
    }


def _write_engine(
    folder: Path, tag: str, optimizer: DeepSpeedOptimizer, ranks: Ranks, state: Mapping[str, Any]
) -> dict[str, tuple[int, int]]:
    """Write DeepSpeed's files; returns the sizes and checksums of those that this rank wrote.

    If one rank cannot write, all raise: none is left in a barrier of DeepSpeed. DeepSpeed's files also have the
    scheduler's state and ``extra``, for its own tools and for converters.
    """
    extra = {key: value for key, value in state["extra"].items() if key not in RESERVED}
    with _collecting_errors(optimizer.engine) as writer:
        optimizer.engine.save_checkpoint(
            str(folder), tag=tag, client_state={**extra, "lr_scheduler": state["scheduler"]}, save_latest=False
        )

    def check() -> dict[str, tuple[int, int]]:
        if writer.failures:
            raise writer.failures[0]
        for file in writer.files:
            sync(file)
        return {file.relative_to(folder).as_posix(): size_and_checksum(file) for file in writer.files}

    return ranks.together(check)


@contextmanager
def _collecting_errors(engine: Any) -> Iterator[_Writer]:
    """In the block errors of writes are collected, not raised, so that this rank reaches DeepSpeed's next barrier."""
    original = engine.checkpoint_engine
    engine.checkpoint_engine = writer = _Writer(original)
    engine._copy_recovery_script = lambda folder: None  # could fail on the first rank alone; _finish copies the script
    try:
        yield writer
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script


class _Writer:
    """DeepSpeed's checkpoint engine, with a list of the files that it wrote and a list of its errors."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.failures: list[Exception] = []
        self.files: list[Path] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
        self.files.append(Path(path))
        return self._try(self._writer.save, state_dict, path, *arguments, **keywords)

    def makedirs(self, *arguments: Any, **keywords: Any) -> Any:
        return self._try(self._writer.makedirs, *arguments, **keywords)

    def _try(self, action: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            return action(*arguments, **keywords)
        except Exception as error:
            self.failures.append(error)
            return None


def _finish(
    temporary: Path, target: Path, state: dict[str, Any], manifest: dict[str, Any], files: Mapping[str, tuple[int, int]]
) -> None:
    """Write the small files, and finish the checkpoint. Called by the first rank."""
    import deepspeed

    folder = Path(deepspeed.__file__).parent / "utils"
    tools = [tool for tool in _TOOLS if (folder / tool).is_file()]
    small = {tool: write_file(temporary / tool, (folder / tool).read_bytes()) for tool in tools}
    small[STATE] = write_state(temporary, state)
    small[_LATEST] = write_file(temporary / _LATEST, manifest[_SECTION]["tag"].encode())
    manifest = {**manifest_header(target, len(state["random"])), **manifest}
    commit_checkpoint(temporary, target, manifest, {**files, **small})


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_own(
    path: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any, weights_only: bool, ranks: Ranks
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` wrote."""
    folder = ranks.together(lambda: find_checkpoint(path), only_first=True)
    manifest, state = ranks.together(lambda: _read(folder, model, optimizer, ranks, weights_only))

    def load() -> None:
        with unreplaced(folder, manifest):
            _load_engine(
                optimizer,
                folder,
                manifest[_SECTION]["tag"],
                load_optimizer_states=not weights_only,
                load_module_only=weights_only and not optimizer.engine.zero_optimization_partition_weights(),
            )
        if weights_only:
            optimizer.refresh_master_weights()

    def apply() -> None:
        saved = {} if weights_only else {"groups": enumerate(state["optimizer"]["groups"]), "random": state["random"]}
        _apply(model, optimizer, ranks.rank, **saved)
        if scheduler is not None:
            apply_scheduler(state.get("scheduler"), scheduler, manifest.get("scheduler"))

    with loading(model, [optimizer], path):
        ranks.together(load)
        ranks.together(apply)
    return dict(state.get("extra") or {})


def _load_universal(
    path: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any, weights_only: bool, ranks: Ranks
) -> dict[str, Any]:
    """Load masters, moments and what goes with them from DeepSpeed's universal format."""
    if weights_only:
        raise CheckpointError("a universal checkpoint is loaded with its optimizer state; pass the optimizer too")
    tag = ranks.together(lambda: _check_universal(path, optimizer))
    engine = optimizer.engine

    def load() -> dict[str, Any]:
        engine._config.load_universal_checkpoint = True
        try:
            client = _load_engine(optimizer, path, tag)
        finally:
            engine._config.load_universal_checkpoint = False
        for entries in engine.optimizer.optimizer.state.values():
            if isinstance(entries.get("step"), torch.Tensor):  # at stage 3 all groups have one, and each would count it
                entries["step"] = entries["step"].clone()
        return client

    def apply() -> None:
        section = client.get("lightstep") or {}
        groups = section.get("param_groups")
        if groups is None:  # DeepSpeed wrote it, and loads every group's hyper-parameters, but for stage 3
            groups = [] if engine.zero_optimization_partition_weights() else engine.optimizer.param_groups
        pairs = zip(optimizer.engine_groups, groups, strict=bool(groups))
        _apply(model, optimizer, ranks.rank, groups=pairs, random=section.get("random") or ())
        if scheduler is not None:
            apply_scheduler(client.get("lr_scheduler"), scheduler)

    with loading(engine.module, [optimizer], path):
        client = ranks.together(load)
        ranks.together(apply)
    return {key: value for key, value in client.items() if key not in RESERVED}


def _load_engine(optimizer: DeepSpeedOptimizer, folder: Path, tag: str, **options: Any) -> dict[str, Any]:
    """Have DeepSpeed load its files; returns what was saved beside the engine's own state."""
    with trusted_loads():
        loaded, client = optimizer.engine.load_checkpoint(
            str(folder), tag=tag, load_lr_scheduler_states=False, **options
        )
    if loaded is None:
        raise CheckpointError(f"DeepSpeed found nothing to load in {folder / tag}")
    return dict(client)


def _apply(
    model: nn.Module,
    optimizer: DeepSpeedOptimizer,
    rank: int,
    groups: Iterable[tuple[int, Mapping[str, Any]]] = (),
    random: Sequence[Any] = (),
) -> None:
    """Load hyper-parameters, in pairs of a group's number and its values, and the random state of this rank."""
    content = OptimizerContent(optimizer, named_tensors(unwrap_model(model)))
    for number, saved in groups:
        content.set_hyperparameters(number, {key: value for key, value in saved.items() if key != "step"})
    if rank < len(random):
        set_random_states(random[rank])
    optimizer.after_load()


def _check_universal(folder: Path, optimizer: DeepSpeedOptimizer) -> str:
    """Check that all files may be loaded and that every trained parameter is there; returns the tag."""
    optimizer.prepare_for_checkpoint()
    tag = (folder / _UNIVERSAL).read_text().strip()
    names = [optimizer.engine.param_names[p] for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    missing = [name for name in names if not (folder / tag / "zero" / name / "fp32.pt").is_file()]
    if missing:
        raise CheckpointError(f"it belongs to another model; not in the checkpoint: {list_names(missing)}")
    for file in sorted((folder / tag).rglob("*.pt")):
        refuse_untrusted(file)
    return tag


def _read(
    folder: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, ranks: Ranks, weights_only: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the small state of a checkpoint whose files this rank has checked."""
    optimizer.prepare_for_checkpoint()
    manifest = read_manifest(folder)
    if not manifest.get(_SECTION):
        raise CheckpointError(
            "it was not written by sharding.kind deepspeed; convert it first: "
            f"lightstep checkpoint convert {folder} DESTINATION --to deepspeed-universal"
        )
    _compare(manifest, model, optimizer, ranks.size, weights_only)
    check_files(folder, manifest, sorted(manifest["files"])[ranks.rank :: ranks.size])
    for file in sorted((folder / manifest[_SECTION]["tag"]).glob("*.pt")):
        refuse_untrusted(file)
    return manifest, read_state(folder, manifest)


def _compare(
    manifest: Mapping[str, Any], model: nn.Module, optimizer: DeepSpeedOptimizer, world_size: int, weights_only: bool
) -> None:
    """Raise :class:`CheckpointError` if the checkpoint does not fit model, optimizer or number of ranks."""
    tensors = named_tensors(model)
    live, saved = shapes(tensors), manifest["shapes"]
    differences = [f"not in the checkpoint: {name}" for name in live if name not in saved]
    differences += [f"not in the model: {name}" for name in saved if name not in live]
    differences += [
        f"{name} is {saved[name]} in the checkpoint and {live[name]} in the model"
        for name in live
        if name in saved and saved[name] != live[name]
    ]
    if differences:
        raise CheckpointError(f"it belongs to another model ({list_names(differences, separator='; ')})")
    expected, known = manifest[_SECTION], _describe(optimizer.engine)
    for key, name in (("stage", "sharding.stage"), ("dtype", "precision.parameters")):
        if expected[key] != known[key]:
            raise CheckpointError(
                f"its {name} is {expected[key]}, and this strategy's is {known[key]}; {_HOW_TO_CONTINUE}"
            )
    if weights_only:
        return
    if manifest["world_size"] != world_size:
        raise CheckpointError(
            f"the number of ranks that saved it is {manifest['world_size']}, here it is {world_size}, and DeepSpeed's "
            f"files belong to one number; {_HOW_TO_CONTINUE}"
        )
    if manifest["optimizer"] != optimizer.optimizer_class.__name__:
        raise CheckpointError(
            f"it holds the state of {manifest['optimizer']}, the optimizer is {optimizer.optimizer_class.__name__}"
        )
    if manifest["groups"] != OptimizerContent(optimizer, tensors).groups:
        raise CheckpointError("its parameter groups are not the optimizer's; build the groups as they were")


_HOW_TO_CONTINUE = (
    "continue with the settings it was saved with, or convert it: "
    "lightstep checkpoint convert SOURCE DESTINATION --to deepspeed-universal"
)


def refuse_untrusted(file: Path) -> None:
    """Check that unpickling the file needs only torch's classes and a few of DeepSpeed's.

    Raises:
        CheckpointError: it needs others; the message names them.
    """
    wanted = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - _TRUSTED - {GETATTR}
    if wanted:
        raise CheckpointError(f"{file} asks for {', '.join(sorted(wanted))}, which no file of DeepSpeed's needs")


@contextmanager
def trusted_loads() -> Iterator[None]:
    """In the block ``torch.load(..., weights_only=False)``, as DeepSpeed calls it, uses the weights-only unpickler.

    An environment variable of torch does that. torch reads it in each load, and it overrides the argument.
    """
    switches = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ.get(name) for name in switches}
    os.environ.update(switches)
    try:
        classes = [_import_class(name) for name in _TRUSTED]
        with torch.serialization.safe_globals([*classes, (enum_member, GETATTR)]):
            yield
    except pickle.UnpicklingError as error:  # torch's own message recommends weights_only=False
        raise CheckpointError(f"a file is damaged, or holds what must not be run ({refused_name(error)})") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
