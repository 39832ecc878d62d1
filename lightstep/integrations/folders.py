"""Folders of accelerate and the Trainer: whole ones appear under their names, damaged ones are found, old ones go; and
loading what others saved into them, into a model's own tensors: full optimizer state, converted weights, adapters.

The model may be sharded, or have another dtype. Loaders of other libraries replace parameters, leave some as they are,
or do not support shards.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightstep.checkpoint.background import PendingSave, writer_group
from lightstep.checkpoint.errors import CheckpointError, UnreadableError, checkpoint_errors, list_names
from lightstep.checkpoint.huggingface import shards_with_other_dtypes
from lightstep.checkpoint.layout import holds_checkpoint, is_complete
from lightstep.checkpoint.run_state import loading
from lightstep.checkpoint.saved import CHECKPOINT, FILE_LIST, check_listed_files, read_file_list, write_file_list
from lightstep.checkpoint.storage import (
    FolderKind,
    new_shared_folder,
    recover_interrupted,
    remove_folder,
    storage_for,
    sync,
)
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import Ranks, is_sharded, local_tensor
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.serialization import matched_parameters
from lightstep.sharding.model_names import named_tensors, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel
from lightstep.strategy.process_group import broadcast_from_first

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedFolders:
    """The folders that a library saves, with a checkpoint in ``lightstep/`` and small files beside it.

    Args:
        name: of one of them, for messages: ``"a checkpoint of the Trainer"``.
        prefix: what the names of numbered folders begin with; a number follows.
        patterns: the files beside the checkpoint, for folders without a list of them.
        is_ours: whether a folder may be replaced.
        has_files: whether the library's files are all there, if no list of them is.
        is_resumable: whether a whole folder has what a run continues from.
    """

    name: str
    prefix: str
    patterns: tuple[str, ...]
    is_ours: Callable[[Path], bool]
    has_files: Callable[[Path], bool]
    is_resumable: Callable[[Path], bool] = lambda _: True

    def is_whole(self, folder: Path) -> bool:
        """Whether all files are there, with their sizes if there is a list of them."""
        try:
            if read_file_list(folder) is not None:
                return True
        except UnreadableError:
            raise
        except CheckpointError:
            return False
        checkpoint = folder / CHECKPOINT
        return self.has_files(folder) and (not holds_checkpoint(checkpoint) or is_complete(checkpoint))

    def own_files(self, folder: Path) -> set[str]:
        """The files that a save has written, by their paths in ``folder``: those in its list and in the checkpoint.

        Without a list that fits, those that have the names of a save's files.
        """
        patterns: tuple[str, ...] = (f"{CHECKPOINT}/**/*",)
        listed = None
        with suppress(CheckpointError):
            listed = read_file_list(folder)
        if listed is None:
            patterns += self.patterns
        found = {file.relative_to(folder).as_posix() for pattern in patterns for file in folder.glob(pattern)}
        return {*found, *(listed or {"files": ()})["files"], FILE_LIST}

    @property
    def kind(self) -> FolderKind:
        return FolderKind(self.name, is_ours=self.is_ours, is_complete=self.is_whole, own_files=self.own_files)

    def number(self, name: str) -> int | None:
        """The number in a name; ``None`` if it is the name of something else."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}(\d+)", name)
        return None if found is None else int(found[1])

    def numbered(self, parent: Path) -> dict[Path, int]:
        """The numbered folders, the oldest first: times depend on the clock. Other folders are the user's."""
        found = {path: self.number(path.name) for path in parent.glob(f"{self.prefix}*") if path.is_dir()}
        numbers = {path: number for path, number in found.items() if number is not None}
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def newest(self, parent: Path, below: int | None = None) -> Path | None:
        """The newest folder to continue from; a warning names newer ones, whose save was interrupted.

        Args:
            below: only those with a lower number.
        """
        found = [path for path, number in self.numbered(parent).items() if below is None or number < below]
        interrupted: list[str] = []
        for folder in reversed(found):
            if not self.is_whole(folder):
                interrupted.insert(0, folder.name)
            elif self.is_resumable(folder):
                if interrupted:
                    logger.warning(
                        "lightstep: the save of %s was interrupted; the newest whole one is %s",
                        ", ".join(interrupted),
                        folder,
                    )
                return folder
        return None

    def rotate(self, saved: Path, limit: int | None, best: str | None = None) -> None:
        """Keep ``limit`` whole folders up to ``saved``, which has just been saved, and remove the others before it.

        The best one counts, as in the Trainer. It is always kept, and so are ``saved`` and the newest one to resume
        from. Folders with higher numbers stay: a run that was resumed from an earlier one will replace them.
        """
        if limit is None or limit <= 0:
            return
        numbers = self.numbered(saved.parent)
        earlier = [path for path, number in reversed(numbers.items()) if number <= numbers[saved]]
        try:
            whole = [path for path in earlier if path == saved or self.is_whole(path)]
        except UnreadableError as error:  # the next save removes what is too much: the new folder is whole
            logger.warning("lightstep: no older folder was removed: %s", error)
            return
        if len(whole) <= limit:
            return
        kept = {saved, *(path for path in whole if is_same(path, best)), *list(filter(self.is_resumable, whole))[:1]}
        for path in whole:
            if len(kept) < limit:
                kept.add(path)
        for path in earlier:
            if path not in kept:
                remove_folder(path)

    def remove_leftovers(self, parent: Path, besides: str | None = None) -> None:
        """Remove hidden folders of saves whose process was killed, but for that of the name ``besides``."""
        recover_interrupted(parent, self.kind, lambda name: name != besides and self.number(name) is not None)


def is_same(folder: Path, other: str | None) -> bool:
    return other is not None and folder.resolve() == Path(other).resolve()


def check_before_load(folder: Path) -> None:
    """Compare the files beside the checkpoint with their list, on the first rank; a warning says that there is none.

    Raises:
        DamagedError: a file is damaged; the message names it. All ranks raise.
    """

    def check() -> None:
        if folder.is_dir() and not check_listed_files(folder):
            logger.warning("%s has no %s: damage in its files would not be noticed; save again", folder, FILE_LIST)

    with checkpoint_errors(f"{folder} was not loaded"):
        Ranks().together(check, only_first=True)


class PendingFolder(PendingSave):
    """A handle for a folder with a checkpoint in it: ``done()`` and ``result(timeout=None)``, the folder's path.

    The files are written to ``folder``, in a hidden folder beside ``path``. Its checkpoint may be written by a thread;
    when that has ended, ``folder`` is renamed to ``path``. Without ``checkpoint`` that happens at the end of the block.
    All ranks use it::

        with PendingFolder(path, folders, rotate) as pending:
            ...  # small files into pending.folder
            pending.checkpoint = strategy.save_checkpoint(pending.folder / CHECKPOINT, ..., asynchronous=True)
            pending.write_later = ...  # what is written after the checkpoint, on the first rank

    Args:
        path: where the folder appears. An older folder is replaced; files in it that no save wrote are kept.
        folders: what may be replaced.
        rotate: called on the first rank when the folder is in its place.

    If the block fails on one rank, it is left with an error on all of them, and the hidden folder is removed. In the
    block the others may only wait in :meth:`Ranks.together <lightstep.distributed.Ranks.together>`.

    Raises:
        CheckpointError: another process is saving to ``path``, something else is there, or another rank has failed.
    """

    checkpoint: PendingSave | None = None
    write_later: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, path: Path, folders: SavedFolders, rotate: Callable[[], None]) -> None:
        super().__init__()
        self.path, self._place, self._kind, self._rotate = path, path.resolve(), folders.kind, rotate
        self._ranks = Ranks()
        self._hidden_folder = ExitStack()

    def __enter__(self) -> PendingFolder:
        with checkpoint_errors(f"{self.path} was not saved"):
            hidden = new_shared_folder(self._place, self._kind, self._ranks)
            self.folder = self._hidden_folder.enter_context(hidden) / Path(os.path.abspath(self.path)).name
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            if isinstance(error, Exception):  # else this process is about to end
                self._ranks.leave(error)
            self._remove(error)
            return
        try:
            with checkpoint_errors(f"{self.path} was not saved"):
                self._ranks.together(lambda: None)  # the small files of every rank are written
        except Exception as failure:
            self._remove(failure)
            raise
        if self.checkpoint is None:
            self._put_in_place(self._ranks)
            self.set_result(self.path)
            return
        writers = writer_group(self._ranks)
        self.checkpoint.add_done_callback(lambda _: self._complete(writers))

    def _remove(self, error: BaseException) -> None:
        """Remove the hidden folder, to which nobody writes any more."""
        if self.checkpoint is not None and isinstance(error, Exception):
            self.checkpoint.exception()
        self._hidden_folder.__exit__(type(error), error, error.__traceback__)

    def _complete(self, writers: Ranks) -> None:
        """The checkpoint has been written, or has failed on every rank."""
        assert self.checkpoint is not None
        try:
            self._put_in_place(writers, self.checkpoint.exception())
            self.set_result(self.path)
        except BaseException as error:
            if self.checkpoint.exception() is None:  # else the checkpoint reports it, at the latest when Python exits
                logger.error("%s", error)
            self.set_exception(error)

    def _put_in_place(self, ranks: Ranks, error: BaseException | None = None) -> None:
        """Rename ``folder`` to ``path``, or remove it and raise ``error``."""
        with self._hidden_folder, checkpoint_errors(f"{self.path} was not saved"):
            if error is not None:
                raise error
            ranks.together(self._commit, only_first=True)

    def _commit(self) -> None:
        self.write_later()
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        beside = [file for file in files if file.relative_to(self.folder).parts[0] != CHECKPOINT]
        for file in beside:  # the others are on the disk
            sync(file)
        write_file_list(self.folder, [file.relative_to(self.folder).as_posix() for file in beside])
        storage_for(self._place).commit(self.folder, self._place, self._kind)
        self.folder.parent.rmdir()
        self._rotate()

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)  # raises TimeoutError if the save is still running
        if self.checkpoint is not None:
            with suppress(Exception):
                self.checkpoint.result()  # its error is raised here
        return super().result()

    def finish(self) -> None:
        """Wait on every rank; raise the error, unless ``result()`` or the optimizer's step has raised it already."""
        self.exception()
        self._ranks.together(self._raise_once)

    def _raise_once(self) -> None:
        if self.checkpoint is None or not self.checkpoint._result_seen:
            self.raise_if_failed()


class SavesFolders:
    """A library's object whose saves may be pending, one at a time."""

    _pending_save: PendingFolder | None = None

    def _finish_save(self) -> None:
        """Wait for the pending save on every rank, if there is one, and raise its error."""
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.finish()


# -- loading what other savers wrote -----------------------------------------------------------------------------------

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def sharding_full_state(
    model: nn.Module,
    optimizer: BaseOptimizer,
    folder: Path,
    other_dtypes: Callable[[nn.Module, Path], Iterable[tuple[Tensor, Tensor]]] = shards_with_other_dtypes,
) -> Iterator[None]:
    """Convert what ``optimizer.load_state_dict`` is given in the block to the model's shards and dtypes.

    Each process takes its shards. Weights change dtype through fp32, as in every checkpoint: masters become the weights
    of another dtype, and fp32 weights in the folder's safetensors become the masters of 16-bit weights.

    Args:
        other_dtypes: returns the model's tensors that have another dtype in the folder, each with this process's part.
    """

    def convert(_: torch.optim.Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
        parameters = matched_parameters(optimizer, packed["param_groups"])
        state = {index: dict(packed["state"].get(index, {})) for index in parameters}
        by_parameter = {parameter: state[index] for index, parameter in parameters.items()}
        for parameter, entries in by_parameter.items():
            entries.update({key: local_part(parameter, value) for key, value in entries.items()})
        _convert_dtypes(other_dtypes(model, folder), by_parameter)
        return {**packed, "state": {index: entries for index, entries in state.items() if entries}}

    handle = optimizer.register_load_state_dict_pre_hook(convert)
    try:
        yield
    finally:
        handle.remove()


def local_part(parameter: Tensor, value: Any) -> Any:
    """This process's shard of an entry that has the shape of the whole parameter; other entries as they are."""
    whole = isinstance(value, Tensor) and value.shape == parameter.shape and not is_sharded(value)
    if not whole or not is_sharded(parameter):
        return value
    shard = shard_of(parameter)
    if shard is None:
        return value.new_empty(local_tensor(parameter).shape)
    return value[shard.region].clone()


@torch.no_grad()
def _convert_dtypes(found: Iterable[tuple[Tensor, Tensor]], states: Mapping[Tensor, dict[str, Any]]) -> None:
    for parameter, part in found:
        if parameter not in states or parameter.dtype not in _LOW_PRECISION:
            continue
        if "master" in states[parameter]:
            local_tensor(parameter).copy_(states[parameter]["master"])
        elif part.dtype == torch.float32 and (states[parameter] or parameter.requires_grad):
            states[parameter]["master"] = part


# -- weights that transformers stores under other names, or cut and joined (each expert by itself) --------------------


def converts_weights(model: nn.Module, folder: Path) -> bool:
    """Whether ``folder`` has safetensors, and transformers converts them when it loads this model."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    inner = unwrap_model(model)
    if not isinstance(inner, PreTrainedModel) or not any(folder.glob("model*.safetensors")):
        return False
    return bool(getattr(inner, "_weight_conversions", None) or get_model_conversion_mapping(inner, add_legacy=False))


def load_converted(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Load what ``save_pretrained`` wrote into the model's own tensors. Called by every rank.

    The first rank has the whole model in host memory once more, and sends one tensor at a time.

    Args:
        model: whole or sharded.
        device: where tensors are sent from and to.

    Raises:
        CheckpointError: a parameter that is trained is not in the folder, or ``from_pretrained`` cannot make the
            model. Nothing has been changed then.
    """
    weights = _read_on_first(model, folder)
    with torch.no_grad(), loading(model, PreparedModel.of(model).optimizers, folder, weights_only=True):
        for tensor, part in _parts(model, weights, device):
            if not tensor.is_meta:
                local_tensor(tensor).copy_(part)


def parts_with_other_dtypes(model: nn.Module, folder: Path, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """``shards_with_other_dtypes`` for any model. Called by every rank."""
    if not converts_weights(model, folder):
        yield from shards_with_other_dtypes(model, folder)
        return
    ours = {named.tensor.dtype for named in named_tensors(model) if named.tensor.is_floating_point()}
    if {_dtype(folder)} == ours:
        return
    for tensor, part in _parts(model, _read_on_first(model, folder), device):
        if part.dtype != tensor.dtype:
            yield tensor, part


def _read_on_first(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The folder's weights by the model's names on the first rank, in the dtype of the files; ``{}`` on the others."""
    weights: dict[str, Tensor] = {}
    Ranks().together(lambda: weights.update(_read(unwrap_model(model), folder)), only_first=True)
    return weights


def _read(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config: Any = copy.deepcopy(model.config)
    try:
        loaded, report = cast(Any, kind).from_pretrained(
            folder, config=config, dtype=_dtype(folder), output_loading_info=True
        )
    except Exception as error:
        raise CheckpointError(
            f"{folder} has weights that transformers converts, and {kind.__name__}.from_pretrained failed with "
            f"{type(error).__name__}: {error}. Resume under a strategy with optimizer_state.backend stream, whose "
            "checkpoints hold the weights as the model has them"
        ) from error
    missing = set(report["missing_keys"])
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad and name in missing)
    if trained:
        raise CheckpointError(f"{folder} has no {list_names(trained)}, which this {kind.__name__} trains")
    return {name: tensor for name, tensor in loaded.state_dict().items() if name not in missing}


def _dtype(folder: Path) -> torch.dtype:
    """The one dtype of all floating-point tensors in the folder, else fp32, which has the values of all."""
    found = set()
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
    floats = {_FLOATS[name] for name in found & _FLOATS.keys()}
    return floats.pop() if len(floats) == 1 else torch.float32


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _parts(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's tensors that are in the first rank's ``weights``, each with this rank's part of the value."""
    ranks = Ranks()
    described = ranks.together(
        lambda: {name: (whole.shape, whole.dtype) for name, whole in weights.items()}, only_first=True
    )
    for named in named_tensors(model):
        name = next((name for name in named.names if name in described), None)
        if name is None:
            continue
        if not ranks.is_distributed:
            yield named.tensor, weights.pop(name)
            continue
        shape, dtype = described[name]
        whole = weights.pop(name).to(device) if ranks.is_first else torch.empty(shape, dtype=dtype, device=device)
        broadcast_from_first([whole])
        yield named.tensor, local_part(named.tensor, whole)


# -- adapters of PEFT: its own load_adapter may replace the parameters, in another dtype ------------------------------


_PROMPTS = (".embedding.weight", ".trainable_embedding", ".prefix_task_cols", ".prefix_task_rows")
"""What PEFT saves of a prompt encoder."""


def _peft_configs(model: nn.Module) -> dict[str, Any]:
    """The configuration of each adapter; ``{}`` if the model is not PEFT's."""
    peft = sys.modules.get("peft")
    return {} if peft is None or not isinstance(model, peft.PeftModel) else model.peft_config


def holds_adapters(folder: Path, model: nn.Module) -> bool:
    """Whether ``folder`` has the weights of all adapters of a PEFT ``model``. Learnt prompts are not adapters."""
    configs = _peft_configs(model)
    found = [not config.is_prompt_learning and _file(folder, name).is_file() for name, config in configs.items()]
    return bool(found) and all(found)


def learns_prompts(model: nn.Module) -> bool:
    """Whether PEFT trains prompts for this model."""
    return any(config.is_prompt_learning for config in _peft_configs(model).values())


def unsaved_encoders(model: nn.Module) -> list[str]:
    """The trained parameters that compute a model's prompts: PEFT saves what they have computed, and not them."""
    named = model.named_parameters() if learns_prompts(model) else ()
    return [name for name, p in named if p.requires_grad and "prompt_encoder." in name and not name.endswith(_PROMPTS)]


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path) -> None:
    """Load what ``save_pretrained`` wrote; each process reads its shards.

    Raises:
        ValueError: the folder has the weights of other adapters. Nothing has been changed then.
    """
    in_file: Callable[..., dict[str, Tensor]] = sys.modules["peft"].get_peft_model_state_dict
    state, found = model.state_dict(keep_vars=True), dict[Tensor, Tensor]()
    for adapter in _peft_configs(model):
        live = in_file(model, state, adapter, save_embedding_layers=True)  # the model's tensors by names in the file
        for name, value in load_file(_file(folder, adapter)).items():
            if name not in live or live[name].shape != value.shape:
                raise ValueError(f"{_file(folder, adapter)}: {name} {list(value.shape)} is not a weight of this model")
            found[live[name]] = value
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in found]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing[:3])} ({len(missing)} of the trained parameters)")
    for parameter, value in found.items():
        local_tensor(parameter).copy_(local_part(parameter, value))


def _file(folder: Path, adapter: str) -> Path:
    return (folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors"
