"""How the Trainer saves and resumes under a strategy."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from lightstep import CheckpointError
from lightstep.checkpoint.errors import DamagedError, is_damage, list_names
from lightstep.checkpoint.huggingface import full_weights, load_pretrained
from lightstep.checkpoint.layout import holds_checkpoint
from lightstep.checkpoint.run_state import has_adapters, refuse_partly_loaded
from lightstep.checkpoint.saved import CHECKPOINT, SavedCheckpoint
from lightstep.checkpoint.storage import remove_folder
from lightstep.config import ConfigError
from lightstep.distributed import Ranks
from lightstep.integrations.checks import unwrap_optimizer
from lightstep.integrations.folders import (
    PendingFolder,
    SavedFolders,
    SavesFolders,
    check_before_load,
    converts_weights,
    holds_adapters,
    is_same,
    learns_prompts,
    load_adapters,
    load_converted,
    parts_with_other_dtypes,
    sharding_full_state,
    unsaved_encoders,
)
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.param_groups import clean_name
from lightstep.sharding.fsdp_groups import sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.strategy import Strategy

__all__ = ["TrainerCheckpoints"]

logger = logging.getLogger(__name__)


def _has_files(folder: Path) -> bool:
    """Whether it has the Trainer's state, which the Trainer writes last, and all of the optimizer's, if it has any."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    file = folder / OPTIMIZER_NAME
    return holds_checkpoint(folder / CHECKPOINT) or not file.exists() or zipfile.is_zipfile(file)


CHECKPOINTS = SavedFolders(
    "a checkpoint of the Trainer",
    prefix=f"{PREFIX_CHECKPOINT_DIR}-",
    patterns=(
        *(OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, "scaler.pt", "rng_state*.pth", "training_args.bin"),
        *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "checkpoint-is-incomplete.txt"),
    ),
    is_ours=lambda _: True,  # the Trainer saves over whatever has this name
    has_files=_has_files,
    # Not what save_only_model has saved.
    is_resumable=lambda folder: holds_checkpoint(folder / CHECKPOINT) or (folder / OPTIMIZER_NAME).exists(),
)

_AnyTrainer: Any = object
"""The class that follows in the method resolution order, made from ``transformers.Trainer``."""


class TrainerCheckpoints(SavesFolders, _AnyTrainer):
    """Saving and loading for a class made from the Trainer.

    Attributes:
        asynchronous_saves: train on while a thread writes the optimizer's state.
    """

    strategy: Strategy
    optimizer: Any
    asynchronous_saves = False
    _open_folder: PendingFolder | None = None
    """The folder of a save, while the Trainer writes its own files into it."""
    _gathered_weights: dict[str, Any] | None = None
    """The whole weights of a model that the strategy has sharded, while the Trainer saves them."""
    _is_finalizing = False

    @property
    def _lightstep_optimizer(self) -> BaseOptimizer:
        return unwrap_optimizer(self.optimizer)

    # -- saving

    @property
    def _sharded_by_strategy(self) -> bool:
        return not self.is_fsdp_enabled and bool(sharded_modules(self.model))

    @property
    def _saves_optimizer_pt(self) -> bool:
        """Whether a synchronous save writes ``optimizer.pt``: one process holds the full state on its device.

        Not for learnt prompts, of which PEFT may save less than is trained.
        """
        config = self.strategy.config
        whole = config.sharding.kind == "single" and config.optimizer_state.backend == "resident"
        return whole and not learns_prompts(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; called by every process. Nothing is gathered if a thread writes the weights.

        Raises:
            CheckpointError: a failed load left a part of the weights.
            RuntimeError: a failed step did.
        """
        refuse_partly_loaded(self.model, "saving its weights")  # alone: replicas may leave the call to the first one
        if self._writes_weights_later and self.is_fsdp_enabled:
            if "FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type):
                self._save(output_dir)
            return
        try:
            if self._sharded_by_strategy and not self._writes_weights_later:
                self._gathered_weights = self._gather_weights()
            super().save_model(output_dir, _internal_call)
        finally:
            self._gathered_weights = None

    def _gather_weights(self) -> dict[str, Any]:
        return full_weights(self.strategy.unwrap_model(self.model), keep=self.args.should_save)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As the Trainer's. Before transformers 5.23 only the first process calls it, when all have gathered.

        A class in front of this one whose ``save_model`` calls it must call it on every process.
        """
        if state_dict is None and self._writes_weights_later:
            assert self._open_folder is not None
            if self.args.should_save:
                super()._save(output_dir, {})  # the other files
            folder, names = self._open_folder.folder, list(self.model.state_dict())
            self._open_folder.write_later = partial(_write_weights, folder, unwrap_model(self.model), names)
            return
        if state_dict is None:
            state_dict = self._gathered_weights
        if state_dict is None and self._sharded_by_strategy:
            state_dict = self._gather_weights()
        super()._save(output_dir, state_dict)

    @property
    def _writes_weights_later(self) -> bool:
        """Whether a thread writes the weights, from the checkpoint in ``lightstep/``, which has all of them.

        Not if a class in front of the Trainer has a ``_save`` of its own.
        """
        plain = getattr(super()._save, "__func__", None) is Trainer._save
        return self.asynchronous_saves and self._open_folder is not None and plain and not has_adapters(self.model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the Trainer's, in a hidden folder that becomes ``checkpoint-N`` when all of it is written."""
        self._finish_save()
        run_dir, limit = Path(super()._get_output_dir(trial)), self.args.save_total_limit
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.state.best_global_step and best.exists():  # the Trainer would look for it in the hidden folder
            self.state.best_model_checkpoint = str(best)
        path = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

        def rotate() -> None:  # best_model_checkpoint changes with the next save only, which waits for this one
            CHECKPOINTS.rotate(path, limit, self.state.best_model_checkpoint)

        with PendingFolder(path, CHECKPOINTS, rotate) as pending:
            self._open_folder = pending
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._open_folder = None
            self._rename_best(pending)
        self._pending_save = pending
        if not self.asynchronous_saves or any(Ranks().gather(bool(self._callbacks_that_read_saves()))):
            self._finish_save()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(path))

    def _rename_best(self, pending: PendingFolder) -> None:
        """If the best checkpoint is the one in the hidden folder, tell its path to come."""
        if self.state.best_model_checkpoint == str(pending.folder):
            self.state.best_model_checkpoint = str(pending.path)
            if self.args.should_save:
                self.state.save_to_json(str(pending.folder / TRAINER_STATE_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As the Trainer's, once the folder has its name: a thread uploads it."""
        if self._open_folder is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _callbacks_that_read_saves(self) -> list[str]:
        return [type(callback).__name__ for callback in self.callback_handler.callbacks if is_read_on_save(callback)]

    def _get_output_dir(self, trial: Any) -> str:
        """The hidden folder during a save; at the end a folder without checkpoints, where the Trainer removes some."""
        if self._is_finalizing:
            return os.devnull
        pending = self._open_folder
        return cast(str, super()._get_output_dir(trial)) if pending is None else str(pending.folder.parent)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, which would remove the user's folders too, such as ``checkpoint-3-notes``."""
        run_dir, best = self._get_output_dir(trial), self.state.best_model_checkpoint
        self._is_finalizing = True
        try:
            finished = super()._finalize_training(trial, *args, **kwargs)
        finally:
            self._is_finalizing = False
        if self.args.should_save and self.args.save_total_limit == 1:
            checkpoints = CHECKPOINTS.numbered(Path(run_dir))
            if any(is_same(path, best) for path in checkpoints):
                for path in checkpoints:
                    if not is_same(path, best):
                        remove_folder(path)
        return finished

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pending = self._open_folder
        asynchronous = self.asynchronous_saves and pending is not None
        if self._saves_optimizer_pt and not asynchronous:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        handle = self.strategy.save_checkpoint(
            Path(output_dir) / CHECKPOINT,
            self.model,
            self._lightstep_optimizer,
            self.lr_scheduler,
            asynchronous=asynchronous,
        )
        if pending is not None and asynchronous:
            pending.checkpoint = handle

    # -- loading

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. ``resume_from_checkpoint=True`` continues from the newest checkpoint that is whole.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: the best model could not be loaded at the end.
        """
        if self._pending_save is not None:  # an error has ended the last call before its save was whole
            self._pending_save.exception()
        readers = self._callbacks_that_read_saves() if self.asynchronous_saves else []
        if readers and self.args.should_log:
            logger.warning("asynchronous_saves: training waits for each save, for on_save of %s", ", ".join(readers))
        self._check_best_model()
        folder = Path(self.args.output_dir)
        Ranks().together(lambda: CHECKPOINTS.remove_leftovers(folder), only_first=True)
        if resume_from_checkpoint is True:
            newest = Ranks().together(lambda: CHECKPOINTS.newest(folder), only_first=True)
            resume_from_checkpoint = True if newest is None else str(newest)
        if isinstance(resume_from_checkpoint, str | Path):
            resume_from_checkpoint = os.path.expanduser(resume_from_checkpoint)
            with _naming_an_older_one(Path(resume_from_checkpoint)):
                check_before_load(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """
        Raises:
            CheckpointError: there is no optimizer state to continue from, or it is damaged.
        """
        if checkpoint is None:
            return
        with _naming_an_older_one(Path(checkpoint)):
            self._load_training_state(Path(checkpoint))

    def _load_training_state(self, folder: Path) -> None:
        optimizer = self._lightstep_optimizer
        if holds_checkpoint(folder / CHECKPOINT):
            self.strategy.load_checkpoint(folder / CHECKPOINT, self.model, optimizer, self.lr_scheduler)
        elif not self.is_fsdp_enabled and (folder / OPTIMIZER_NAME).is_file():
            other_dtypes = partial(parts_with_other_dtypes, device=self.strategy.device)
            with sharding_full_state(self.model, optimizer, folder, other_dtypes):
                # The Trainer would load all of it onto the device of each process.
                self.optimizer.load_state_dict(_load_on_cpu(folder / OPTIMIZER_NAME))
            self.lr_scheduler.load_state_dict(_load_on_cpu(folder / SCHEDULER_NAME))
        else:
            raise DamagedError(
                f"{folder} has no optimizer state ({CHECKPOINT}/, or {OPTIMIZER_NAME} of a model that accelerate does "
                "not shard), and resuming from it would start a new optimizer in the middle of a run. Resume from "
                "another checkpoint, or start a new run from its weights (save_only_model=True saves no more)"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if holds_checkpoint(folder / CHECKPOINT):
            return  # the weights are loaded with the optimizer
        if not self._load_into_parameters(folder):
            # Sentence Transformers' own takes no model.
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))

    def _load_best_model(self) -> None:
        best, score = self.state.best_model_checkpoint, self.state.best_metric
        logger.info("loading the best model from %s (score: %s)", best, score)
        check_before_load(Path(best))
        if holds_checkpoint(Path(best) / CHECKPOINT):
            self.strategy.load_checkpoint(Path(best) / CHECKPOINT, self.model)
        elif not self._load_into_parameters(Path(best)):
            super()._load_best_model()

    def _load_into_parameters(self, folder: Path) -> bool:
        """Load adapters, weights that transformers converts, or weights into shards, in place.

        The Trainer would replace parameters, leave some as they are, or cannot.

        Returns:
            ``False`` if the Trainer can load these weights itself.
        """
        if not self.is_fsdp_enabled and holds_adapters(folder, self.model):
            load_adapters(self.model, folder)
            return True
        self._refuse_unsaved_encoders(folder)
        if not self.is_fsdp_enabled and converts_weights(self.model, folder):
            load_converted(self.model, folder, self.strategy.device)
        elif self._sharded_by_strategy:
            load_pretrained(self.model, folder)
        else:
            return False
        return True

    def _check_best_model(self) -> None:
        """
        Raises:
            ConfigError: the best model could not be loaded at the end.
        """
        if not (self.args.load_best_model_at_end and self.args.save_only_model):
            return
        sharded = self.strategy.config.sharding.kind == "fsdp2" and learns_prompts(self.model)
        if sharded or unsaved_encoders(self.model):
            raise ConfigError(
                "save_only_model=True and load_best_model_at_end=True: PEFT saves the prompts, and neither what "
                "computes them nor for shards; leave one of the two out"
            )

    def _refuse_unsaved_encoders(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: PEFT's files in ``folder`` do not have all that is trained.
        """
        unsaved = unsaved_encoders(self.model)
        if unsaved:
            raise CheckpointError(
                f"{folder} has the prompts, as PEFT saves them, and not {list_names(unsaved)}, which compute them and "
                f"are trained; only a checkpoint with {CHECKPOINT}/ has these (not one of save_only_model=True or of "
                "the plain Trainer)"
            )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As the Trainer's, after a load that may have left weights as they were.

        Raises:
            CheckpointError: parameters that are trained are among them.
        """
        missing = set(load_result.missing_keys)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        loaded = {parameter for name, parameter in parameters.items() if name not in missing}  # tied weights need one
        lost = [name for name, p in parameters.items() if name in missing and p.requires_grad and p not in loaded]
        if lost:
            raise CheckpointError(
                f"the checkpoint has no {list_names(lost)}, which this {type(self.model).__name__} trains: they would "
                "stay what they were"
            )
        super()._issue_warnings_after_load(load_result)


def _write_weights(folder: Path, model: nn.Module, names: list[str]) -> None:
    """Write the weights of the checkpoint in ``folder`` beside it, as the Trainer would.

    Args:
        names: the keys of the model's state dict, in their order.
    """
    saved = SavedCheckpoint.read(folder / CHECKPOINT).weights()
    weights = {name: saved[clean_name(name)] for name in names if clean_name(name) in saved}
    others = saved.keys() - set(map(clean_name, names))
    if others:
        raise CheckpointError(
            f"{SAFE_WEIGHTS_NAME} cannot hold {list_names(sorted(others))}, which are not in the model's state dict; "
            "set asynchronous_saves=False"
        )
    del saved
    if not isinstance(model, PreTrainedModel):
        save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        return
    place = folder / ".weights"
    model.save_pretrained(place, state_dict=weights)
    for file in place.glob("*.safetensors*"):  # the other files may have changed since the save was asked for
        os.replace(file, folder / file.name)
    shutil.rmtree(place)


@contextmanager
def _naming_an_older_one(folder: Path) -> Iterator[None]:
    """Add to an error that says that ``folder`` is damaged which older checkpoint is whole."""
    try:
        yield
    except CheckpointError as error:
        folder = folder.resolve()
        number = CHECKPOINTS.number(folder.name)
        older = CHECKPOINTS.newest(folder.parent, below=number or 0) if is_damage(error) else None
        if older is None:
            raise
        raise type(error)(f"{error}; {older} is whole: resume_from_checkpoint={str(older)!r}") from error


def _load_on_cpu(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


_UPLOADS: dict[str, Any] = {
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "TrackioCallback": lambda _: False,
    "SwanLabCallback": lambda _: False,
}
"""By the class of a callback of transformers: whether its ``on_save`` reads the folder. Others' may."""


def is_read_on_save(callback: TrainerCallback) -> bool:
    """Whether the callback may read the folder in ``on_save``."""
    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save:
        return False
    uploads = _UPLOADS.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    return uploads is None or bool(uploads(callback))
