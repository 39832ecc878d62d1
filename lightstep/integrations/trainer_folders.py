"""The folders ``checkpoint-N`` of the Trainer: which of them are whole, what is in them, who reads them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.layout import has_complete_checkpoint, holds_checkpoint
from lightstep.checkpoint.storage import recover_interrupted, remove_folder
from lightstep.checkpoint.verify import CHECKPOINT, read_file_list
from lightstep.integrations.pending_folder import folder_kind, newest_whole

__all__ = ["KIND", "is_read_on_save", "keep_best_only", "newest_checkpoint", "remove_leftovers", "rotate"]

_NAME = re.compile(r"checkpoint-(\d+)")


def _is_whole(folder: Path) -> bool:
    """Whether all of its files are there, with their sizes.

    Without a list of them: whether it has the Trainer's state, which the Trainer writes last, and all of the
    optimizer's, if it has any.
    """
    try:
        if read_file_list(folder) is not None:
            return True
    except CheckpointError:
        return False
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if holds_checkpoint(folder / CHECKPOINT):
        return has_complete_checkpoint(folder / CHECKPOINT)
    return not (folder / OPTIMIZER_NAME).exists() or zipfile.is_zipfile(folder / OPTIMIZER_NAME)


def _is_resumable(folder: Path) -> bool:
    """Whether it is whole, and was not saved with ``save_only_model``."""
    return _is_whole(folder) and (holds_checkpoint(folder / CHECKPOINT) or (folder / OPTIMIZER_NAME).exists())


KIND = folder_kind(
    "a checkpoint of the Trainer",
    patterns=(
        *(OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, "scaler.pt", "rng_state*.pth", "training_args.bin"),
        *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "checkpoint-is-incomplete.txt"),
    ),
    is_ours=lambda _: True,  # the Trainer saves over whatever has this name
    is_complete=_is_whole,
)


def newest_checkpoint(output_dir: Path, below: Path | None = None) -> Path | None:
    """The newest checkpoint to resume from; a warning names newer ones that are not whole.

    Args:
        below: only those with a lower number than this one.
    """
    found = [path for path in _checkpoints(output_dir) if below is None or _number(path) < _number(below)]
    return newest_whole(found, _is_resumable)


def _checkpoints(output_dir: Path) -> list[Path]:
    """The folders ``checkpoint-N``, by their numbers: times depend on the clock."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    return 0 if found is None else int(found[1])


def rotate(saved: Path, limit: int | None, best: str | None) -> None:
    """Keep ``limit`` whole checkpoints up to ``saved``, which has just been saved, and remove the others before it.

    The best one counts, as in the Trainer. It is always kept, and so are ``saved`` and the newest one to resume from.
    Checkpoints with higher numbers stay: a run that was resumed from an earlier one will replace them.
    """
    if limit is None or limit <= 0:
        return
    earlier = [path for path in reversed(_checkpoints(saved.parent)) if _number(path) <= _number(saved)]
    whole = [path for path in earlier if path == saved or _is_whole(path)]
    if len(whole) <= limit:
        return
    kept = {saved, *[path for path in whole if _is_best(path, best)], *list(filter(_is_resumable, whole))[:1]}
    for path in whole:
        if len(kept) < limit:
            kept.add(path)
    for path in earlier:
        if path not in kept:
            remove_folder(path)


def keep_best_only(output_dir: Path, best: str) -> None:
    """Remove all checkpoints but the best one, as the Trainer does at the end of a run with ``save_total_limit=1``."""
    checkpoints = _checkpoints(output_dir)
    if any(_is_best(path, best) for path in checkpoints):
        for path in checkpoints:
            if not _is_best(path, best):
                remove_folder(path)


def _is_best(folder: Path, best: str | None) -> bool:
    return best is not None and folder.resolve() == Path(best).resolve()


def remove_leftovers(output_dir: Path) -> None:
    """Remove hidden folders of saves whose process was killed."""
    recover_interrupted(output_dir, KIND, lambda name: _NAME.fullmatch(name) is not None)


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
