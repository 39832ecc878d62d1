"""Checkpoints of a DeepSpeed engine: DeepSpeed's own files, written completely or not at all.

::

    step-100/
        lightstep.json       the manifest, as in checkpoint/layout.py, with a section "deepspeed"
        state.pt             extra, scheduler, hyper-parameters, random states; loaded with weights_only=True
        latest               the name of the folder below, which DeepSpeed's tools read
        zero_to_fp32.py      DeepSpeed's script that converts its files to plain weights
        global_step100/      what engine.save_checkpoint writes: weights, and one file of optimizer state per rank

Checkpoints of other strategies are loaded too, at any stage and on any number of ranks, tensor by tensor into the
engine's partitions (``load_parameter_state``).

DeepSpeed loads its files with ``weights_only=False``. Here torch's weights-only unpickler is used in its place. It
accepts only tensors, plain values and a few of DeepSpeed's classes (``trusted_loads``). Files with anything else are
refused before one of them is loaded.
"""

from __future__ import annotations

import logging
import os
import pickle
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightstep.checkpoint import load
from lightstep.checkpoint.background import PendingSave, finish_pending, wait_for_pending
from lightstep.checkpoint.errors import CheckpointError, checkpoint_errors
from lightstep.checkpoint.formats.files import GETATTR, enum_member, refused_name
from lightstep.checkpoint.formats.zero import RESERVED, SECTION
from lightstep.checkpoint.layout import (
    CHECKPOINT,
    STATE,
    check_files,
    find_checkpoint,
    manifest_header,
    read_manifest,
    size_and_checksum,
    unreplaced,
    write_manifest,
)
from lightstep.checkpoint.run_state import OptimizerContent, entry_key, loading, refuse_partly_loaded, stored_entries
from lightstep.checkpoint.save import Retention, small_state, warn_if_different
from lightstep.checkpoint.saved import (
    SavedCheckpoint,
    fingerprint,
    random_states,
    read_state,
    set_random_states,
    write_state,
)
from lightstep.checkpoint.storage import local_folder, location, new_shared_folder, storage_for, sync, write_file
from lightstep.checkpoint.tensors import read_whole
from lightstep.deepspeed.optimizer import DeepSpeedOptimizer, EngineState
from lightstep.distributed import Ranks, is_divided, whole_shape
from lightstep.optimizer.base import BaseOptimizer
from lightstep.rollout.roles import Roles
from lightstep.sharding.model_names import NamedTensor, named_tensors, unwrap_model
from lightstep.strategy.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

_LATEST = "latest"
_TOOLS = ("zero_to_fp32.py", "zero_to_torch.py")

_TRUSTED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes in DeepSpeed's files that torch's weights-only unpickler does not allow by itself."""


def is_partitioned(model: nn.Module) -> bool:
    """Whether DeepSpeed has partitioned the weights over the ranks."""
    return any(map(is_divided, model.parameters()))


def refuse_partitioned(model: nn.Module, name: str) -> None:
    """Raise :class:`CheckpointError` if the weights are partitioned: only an engine can save and load them."""
    if is_partitioned(unwrap_model(model)):
        raise CheckpointError(
            f"{name}: the model's weights are partitioned over the ranks, and DeepSpeed saves and loads them through "
            "its engine; call strategy.create_optimizer(model, ...) first"
        )


class EngineCheckpoints(Checkpoints):
    """Checkpoints of a strategy over DeepSpeed. A model without an engine is saved and loaded as every other one is.

    Args:
        roles: the strategy's.
        optimizers_of: called with a model, returns its optimizers: none, or the one of its engine.
        name: the strategy's, for messages.
    """

    def __init__(self, roles: Roles, optimizers_of: Callable[[nn.Module], Sequence[Any]], name: str) -> None:
        super().__init__(roles)
        self._optimizers_of, self._name = optimizers_of, name

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None,
        scheduler: Any,
        extra: Mapping[str, Any] | None,
        **options: Any,
    ) -> PendingSave | None:
        """Write DeepSpeed's own files, or with ``weights_only`` a checkpoint in the format of the other strategies.

        Raises:
            TypeError: something in ``scheduler`` or ``extra`` could not be loaded again.
            CheckpointError: it could not be written. All ranks raise, and what was at ``path`` is still there.
            ValueError: ``trainable_only``: DeepSpeed's files have whole models. ``asynchronous``: DeepSpeed's engine
                writes its files synchronously.
        """
        engine_optimizer = None if options["weights_only"] else self._engine_optimizer(model, optimizer)
        if engine_optimizer is None:
            refuse_partitioned(model, self._name)
            return super().save(path, model, None, scheduler, extra, **options)
        if options["asynchronous"]:
            raise ValueError(f"{self._name}: asynchronous=True, and DeepSpeed's engine writes itself; leave it out")
        self._refuse_part(options["trainable_only"])
        ranks, retention = Ranks(), Retention(options["keep_last"], options["keep_every"])
        with checkpoint_errors(f"{path} was not saved"):
            target = local_folder(path, "DeepSpeed writes its files to local folders")
            ranks.together(finish_pending)  # of weights alone
            with retention.applied(target, ranks):
                state, manifest = ranks.together(lambda: _content(model, engine_optimizer, scheduler, extra))
                with new_shared_folder(target, CHECKPOINT, ranks) as temporary:
                    files = _write_engine(temporary, manifest[SECTION]["tag"], engine_optimizer, ranks, state)
                    parts = ranks.gather((random_states(), files, fingerprint(state["extra"])))
                    random, written, extras = zip(*parts, strict=True)
                    state["random"] = list(random)
                    all_files = {name: entry for of_rank in written for name, entry in of_rank.items()}
                    if ranks.is_first:
                        warn_if_different(extras, target)
                    ranks.together(lambda: _finish(temporary, target, state, manifest, all_files), only_first=True)
        logger.info("saved %s", path)
        return None

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: BaseOptimizer | None,
        scheduler: Any,
        trainable_only: bool | None,
    ) -> dict[str, Any]:
        """Load what was saved on the same number of ranks, or a checkpoint of another strategy from any number.

        Without ``optimizer`` no optimizer state and random states are loaded, and the masters are rebuilt.

        Raises:
            CheckpointError: the checkpoint cannot be used. All ranks raise. Nothing has been changed, unless DeepSpeed
                fails after the checks, or another process replaces the checkpoint while DeepSpeed loads it.
            ValueError: ``trainable_only``: DeepSpeed's files have whole models.
        """
        engine_optimizer, weights_only = self._engine_optimizer(model, optimizer), optimizer is None
        if engine_optimizer is None:
            refuse_partitioned(model, self._name)
            return super().load(path, model, None, scheduler, trainable_only)
        self._refuse_part(trainable_only)
        ranks, source = Ranks(), location(path)
        wait_for_pending()
        advising = load.suggesting_older(source, ranks, with_state=not weights_only)
        with checkpoint_errors(f"{path} was not loaded"), advising:
            ranks.together(engine_optimizer.prepare_for_checkpoint)
            folder, manifest = ranks.together(lambda: find_checkpoint(source), only_first=True)
            if manifest.get(SECTION):
                extra = _load_own(folder, model, engine_optimizer, scheduler, weights_only, ranks)
                logger.info("loaded %s", path)
                return extra
            if not weights_only:
                steps = ranks.together(lambda: _check_partitions(folder, model, engine_optimizer))
        with engine_optimizer.replacing_state():
            extra = load.load_checkpoint(path, model, None if weights_only else engine_optimizer, scheduler)
        if not weights_only:
            engine_optimizer.engine.global_steps = max(steps, default=engine_optimizer.engine.global_steps)
            engine_optimizer.after_load()
        return extra

    def _refuse_part(self, trainable_only: bool | None) -> None:
        if trainable_only:
            raise ValueError(
                f"{self._name}: trainable_only=True, and DeepSpeed's files hold whole models; leave it out"
            )

    def _engine_optimizer(self, model: nn.Module, optimizer: BaseOptimizer | None) -> DeepSpeedOptimizer | None:
        """The optimizer of the model's engine; ``None`` before it is created.

        Raises:
            ValueError: ``optimizer`` is another one.
        """
        optimizers = self._optimizers_of(model)
        if optimizer is not None and not any(optimizer is other for other in optimizers):
            raise ValueError(
                f"{self._name}: this {type(optimizer).__name__} is not the model's; pass both of one engine"
            )
        return optimizers[0] if optimizers else None


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
    state = small_state(scheduler, extra, optimizer={"groups": content.hyperparameters()})
    manifest = {
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "optimizer": optimizer.optimizer_class.__name__,
        "groups": content.groups,
        "shapes": _shapes(tensors),
        SECTION: _describe(optimizer.engine),
    }
    return state, manifest


def _shapes(tensors: Iterable[NamedTensor]) -> Mapping[str, list[int]]:
    """The shapes of the whole tensors by name."""
    return {named.name: list(whole_shape(named.tensor)) for named in tensors}


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
    small[_LATEST] = write_file(temporary / _LATEST, manifest[SECTION]["tag"].encode())
    manifest = {**manifest_header(target, len(state["random"])), **manifest}
    write_manifest(temporary, target, manifest, {**files, **small})
    storage_for(target).commit(temporary, target, CHECKPOINT)


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_own(
    folder: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, scheduler: Any, weights_only: bool, ranks: Ranks
) -> dict[str, Any]:
    """Load DeepSpeed's own files."""
    manifest, state = ranks.together(lambda: _read(folder, model, optimizer, ranks, weights_only))

    def load_engine() -> None:
        with unreplaced(folder, manifest), trusted_loads():
            loaded, _ = optimizer.engine.load_checkpoint(
                str(folder),
                tag=manifest[SECTION]["tag"],
                load_lr_scheduler_states=False,
                load_optimizer_states=not weights_only,
                load_module_only=weights_only and not optimizer.engine.zero_optimization_partition_weights(),
            )
        if loaded is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {folder}")
        if weights_only:
            optimizer.refresh_master_weights()

    def apply() -> None:
        if not weights_only:
            content = OptimizerContent(optimizer, named_tensors(model))
            for number, settings in enumerate(state["optimizer"]["groups"]):
                content.set_hyperparameters(number, settings)
            set_random_states(state["random"][ranks.rank])
        optimizer.after_load()
        if scheduler is not None:
            load.apply_scheduler(state.get("scheduler"), scheduler, manifest.get("scheduler"))

    with loading(model, [optimizer], folder):
        ranks.together(load_engine)
        ranks.together(apply)
    return dict(state.get("extra") or {})


def _check_partitions(folder: Path, model: nn.Module, optimizer: DeepSpeedOptimizer) -> list[int]:
    """The step counts of the flat partitions.

    Raises:
        CheckpointError: DeepSpeed's partitions cannot hold the state.
    """
    saved = SavedCheckpoint.read(folder)
    names = {named.tensor: saved.aliases.get(named.name, named.name) for named in named_tensors(model)}
    stored, values = stored_entries(saved.index), (saved.optimizer or {}).get("values", {})
    steps = []
    for members in EngineState(optimizer.engine).partitions:
        shared: dict[str, tuple[str, Any]] = {}
        for member in members:
            name, own = names[member], dict(values.get(names[member], {}))
            for entry in stored.get(name, ()):
                found = saved.index[key := entry_key(name, entry)]
                if entry != "step" and found.shape == whole_shape(member):
                    continue
                if found.shape:
                    raise CheckpointError(f"state {entry!r} of {name} is not element-wise, and DeepSpeed divides it")
                own[entry] = read_whole(saved.data, key, found).item()
            for entry, value in own.items():
                first, known = shared.setdefault(entry, (name, value))
                if known != value:
                    raise CheckpointError(
                        f"{entry} is {known} of {first} and {value} of {name}, and DeepSpeed has one for a whole "
                        "parameter group; put parameters that are updated at other times into a group of their own"
                    )
        steps += [int(shared["step"][1])] if "step" in shared else []
    return steps


def _read(
    folder: Path, model: nn.Module, optimizer: DeepSpeedOptimizer, ranks: Ranks, weights_only: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the small state of a checkpoint whose files this rank has checked."""
    manifest = read_manifest(folder)
    _compare(manifest, model, optimizer, ranks.size, weights_only)
    check_files(folder, manifest, sorted(manifest["files"])[ranks.rank :: ranks.size])
    for file in sorted((folder / manifest[SECTION]["tag"]).glob("*.pt")):
        refuse_untrusted(file)
    return manifest, read_state(folder, manifest)


def _compare(
    manifest: Mapping[str, Any], model: nn.Module, optimizer: DeepSpeedOptimizer, world_size: int, weights_only: bool
) -> None:
    """Raise :class:`CheckpointError` if the checkpoint does not fit model, optimizer or number of ranks."""
    tensors = named_tensors(model)
    live, saved = _shapes(tensors), manifest["shapes"]
    different = [
        f"{name} is {saved[name]} in the checkpoint and {live[name]} in the model"
        for name in live
        if name in saved and saved[name] != live[name]
    ]
    load.refuse_differences("model", sorted(live.keys() - saved), sorted(saved.keys() - live), different)
    expected, known = manifest[SECTION], _describe(optimizer.engine)
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
    "continue with the settings it was saved with, or convert it and load the result: "
    "lightstep checkpoint convert SOURCE DESTINATION --to lightstep"
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
        with torch.serialization.safe_globals([*map(pkgutil.resolve_name, _TRUSTED), (enum_member, GETATTR)]):
            yield
    except pickle.UnpicklingError as error:  # torch's own message recommends weights_only=False
        raise CheckpointError(f"a file is damaged, or holds what must not be run ({refused_name(error)})") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
