"""Checkpoints of a DeepSpeed engine: its own files, with the same promise as every other checkpoint's.

::

    step-100/
        lightstep.json       the manifest, as in checkpoint/layout.py, with a section "deepspeed"
        state.pt             extra, scheduler, hyper-parameters, random states; loaded with weights_only=True
        latest               the name of the folder below: where DeepSpeed's tools begin
        zero_to_fp32.py      DeepSpeed's script that makes plain weights of its files
        global_step100/      what engine.save_checkpoint writes: weights, and one file of optimizer state per rank

DeepSpeed unpickles its files with everything allowed. Here it does so through torch's weights-only unpickler, which
makes nothing but tensors, plain values and DeepSpeed's own records (``trusted_loads``); files that ask for anything
else are refused by name before the first of them is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.layout import (
    CHECKPOINT,
    STATE,
    commit_checkpoint,
    find_checkpoint,
    manifest_header,
    read_manifest,
    refuse_replaced,
)
from lightstep.checkpoint.load import apply_scheduler
from lightstep.checkpoint.optimizer_content import OptimizerContent
from lightstep.checkpoint.partly_loaded import loading, refuse_partly_loaded
from lightstep.checkpoint.ranks import Ranks
from lightstep.checkpoint.retention import Retention
from lightstep.checkpoint.small_state import check_loadable, random_states, read_state, set_random_states, write_state
from lightstep.checkpoint.storage import new_shared_folder, sync, write_file
from lightstep.checkpoint.verify import check_files, size_and_checksum
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer
from lightstep.deepspeed.universal import DEEPSPEEDS_OWN, UNIVERSAL, load_universal, refuse_untrusted, trusted_loads
from lightstep.deepspeed.weights import shapes
from lightstep.sharding.model_names import named_tensors, unwrap_model

logger = logging.getLogger(__name__)

_SECTION = "deepspeed"
_LATEST = "latest"
_TOOLS = ("zero_to_fp32.py", "zero_to_torch.py")


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
    """As ``lightstep.checkpoint.save_checkpoint``, with DeepSpeed's own files.

    Raises:
        TypeError, CheckpointError: as there. All ranks raise, and what was at ``path`` is still there.
    """
    target, ranks = Path(path).resolve(), Ranks()
    with checkpoint_errors(f"{path} was not saved"), Retention(keep_last, keep_every).applied(target, ranks):
        if "://" in str(path):
            raise CheckpointError("DeepSpeed writes its files to local paths only, not to a URL")
        state, manifest = ranks.together(lambda: _content(model, optimizer, scheduler, extra))
        with new_shared_folder(target, CHECKPOINT, ranks) as temporary:
            files = _write_engine(temporary, manifest[_SECTION]["tag"], optimizer, ranks, state)
            parts = ranks.gather((random_states(), files))
            state["random"] = [random for random, _ in parts]
            everyones = {name: entry for _, written in parts for name, entry in written.items()}
            ranks.together(lambda: _finish(temporary, target, state, manifest, everyones), only_first=True)
    logger.info("saved %s", path)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any = None, weights_only: bool = False
) -> dict[str, Any]:
    """As ``lightstep.checkpoint.load_checkpoint``, into the engine; returns ``extra``.

    Args:
        weights_only: leave optimizer state and random states as they are; masters are rebuilt from the weights.

    Raises:
        CheckpointError: it cannot be used; nothing has been changed. All ranks raise.
    """
    ranks = Ranks()
    if (Path(path) / UNIVERSAL).is_file():
        return load_universal(Path(path), optimizer, scheduler, weights_only)
    with checkpoint_errors(f"{path} was not loaded"):
        folder = ranks.together(lambda: find_checkpoint(Path(path)), only_first=True)
        manifest, state = ranks.together(lambda: _read(folder, model, optimizer, ranks, weights_only))
        tag = manifest[_SECTION]["tag"]
        with loading(model, [optimizer], path):
            ranks.together(lambda: _load_engine(folder, tag, optimizer, weights_only))
            ranks.together(lambda: refuse_replaced(folder, manifest))
            ranks.together(lambda: _apply(state, model, optimizer, scheduler, ranks.rank, weights_only))
    logger.info("loaded %s", path)
    return dict(state.get("extra") or {})


# -- saving ------------------------------------------------------------------------------------------------------------


def _content(
    model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The small state and the manifest, checked; nothing has been written."""
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
        _SECTION: _described(optimizer.engine),
    }
    return state, manifest


def _described(engine: Any) -> dict[str, Any]:
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
    """The files that this rank wrote, their sizes and checksums.

    All ranks raise when one of them cannot write: none is left in one of DeepSpeed's barriers. DeepSpeed's files hold
    scheduler and ``extra`` too, where its tools and ours look for them.
    """
    known = {key: value for key, value in state["extra"].items() if key not in DEEPSPEEDS_OWN}
    with _watched(optimizer.engine) as writer:
        optimizer.engine.save_checkpoint(
            str(folder), tag=tag, client_state={**known, "lr_scheduler": state["scheduler"]}, save_latest=False
        )

    def check() -> dict[str, tuple[int, int]]:
        if writer.failures:
            raise writer.failures[0]
        for file in writer.files:
            sync(file)
        return {file.relative_to(folder).as_posix(): size_and_checksum(file) for file in writer.files}

    return ranks.together(check)


@contextmanager
def _watched(engine: Any) -> Iterator[_Writer]:
    """What goes wrong in writing is put aside while DeepSpeed goes on to its next barrier."""
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = watched = _Writer(writer)
    engine._copy_recovery_script = lambda folder: None  # the first rank's, which would raise alone; see _finish
    try:
        yield watched
    finally:
        engine.checkpoint_engine = writer
        del engine._copy_recovery_script


class _Writer:
    """DeepSpeed's checkpoint engine, whose errors wait in a list, and which remembers what it wrote."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.failures: list[Exception] = []
        self.files: list[Path] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
        self.files.append(Path(path))
        return self._noted(self._writer.save, state_dict, path, *arguments, **keywords)

    def makedirs(self, *arguments: Any, **keywords: Any) -> Any:
        return self._noted(self._writer.makedirs, *arguments, **keywords)

    def _noted(self, action: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            return action(*arguments, **keywords)
        except Exception as error:
            self.failures.append(error)
            return None


def _finish(
    temporary: Path, target: Path, state: dict[str, Any], manifest: dict[str, Any], files: Mapping[str, tuple[int, int]]
) -> None:
    """The first rank's part: small files, manifest, rename."""
    import deepspeed

    utilities = Path(deepspeed.__file__).parent / "utils"
    tools = [tool for tool in _TOOLS if (utilities / tool).is_file()]
    ours = {tool: write_file(temporary / tool, (utilities / tool).read_bytes()) for tool in tools}
    ours[STATE] = write_state(temporary, state)
    ours[_LATEST] = write_file(temporary / _LATEST, manifest[_SECTION]["tag"].encode())
    manifest = {**manifest_header(target, len(state["random"])), **manifest}
    commit_checkpoint(temporary, target, manifest, {**files, **ours})


# -- loading -----------------------------------------------------------------------------------------------------------


def _read(
    folder: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, ranks: Ranks, weights_only: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
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
    tensors = named_tensors(model)
    live, saved = shapes(tensors), manifest["shapes"]
    found = [f"not in the checkpoint: {name}" for name in live if name not in saved]
    found += [f"not in the model: {name}" for name in saved if name not in live]
    found += [
        f"{name} is {saved[name]} in the checkpoint and {live[name]} in the model"
        for name in live
        if name in saved and saved[name] != live[name]
    ]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise CheckpointError(f"it belongs to another model ({'; '.join(found[:5])}{more})")
    here, there = _described(optimizer.engine), manifest[_SECTION]
    for key, name in (("stage", "sharding.stage"), ("dtype", "precision.parameters")):
        if there[key] != here[key]:
            raise CheckpointError(f"its {name} is {there[key]}, and this strategy's is {here[key]}; {_HOW}")
    if weights_only:
        return
    if manifest["world_size"] != world_size:
        raise CheckpointError(
            f"the number of ranks that saved it is {manifest['world_size']}, here it is {world_size}, and DeepSpeed's "
            f"files belong to one number; {_HOW}"
        )
    if manifest["optimizer"] != optimizer.optimizer_class.__name__:
        raise CheckpointError(
            f"it holds the state of {manifest['optimizer']}, the optimizer is {optimizer.optimizer_class.__name__}"
        )
    if manifest["groups"] != OptimizerContent(optimizer, tensors).groups:
        raise CheckpointError("its parameter groups are others than the optimizer's; build the groups as they were")


_HOW = "train on as before, or convert it: lightstep checkpoint convert SOURCE DESTINATION --to deepspeed-universal"


def _load_engine(folder: Path, tag: str, optimizer: DeepSpeedOptimizer, weights_only: bool) -> None:
    engine = optimizer.engine
    module_only = weights_only and not engine.zero_optimization_partition_weights()
    with trusted_loads():
        engine.load_checkpoint(
            str(folder),
            tag=tag,
            load_optimizer_states=not weights_only,
            load_lr_scheduler_states=False,
            load_module_only=module_only,
        )
    if weights_only:
        optimizer.refresh_master_weights()


def _apply(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: DeepSpeedOptimizer,
    scheduler: Any,
    rank: int,
    weights_only: bool,
) -> None:
    if not weights_only:
        content = OptimizerContent(optimizer, named_tensors(unwrap_model(model)))
        for number, settings in enumerate(state["optimizer"]["groups"]):
            content.set_hyperparameters(number, settings)
        if rank < len(state["random"]):
            set_random_states(state["random"][rank])
    optimizer.loaded()
    if scheduler is not None:
        apply_scheduler(state.get("scheduler"), scheduler)
