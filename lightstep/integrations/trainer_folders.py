"""The folders ``checkpoint-N`` of the Trainer: which of them are whole, what is in them, who reads them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from lightstep.checkpoint.layout import has_complete_checkpoint, holds_checkpoint
from lightstep.checkpoint.storage import recover_interrupted
from lightstep.integrations.pending_folder import CHECKPOINT, folder_kind, newest_whole

__all__ = ["KIND", "is_read_on_save", "newest_checkpoint", "remove_leftovers"]

_NAME = re.compile(r"checkpoint-(\d+)")

KIND = folder_kind(
    "a checkpoint of the Trainer",
    patterns=(
        *(OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, "scaler.pt", "rng_state*.pth", "training_args.bin"),
        *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "checkpoint-is-incomplete.txt"),
    ),
    is_ours=lambda _: True,  # the Trainer saves over whatever has this name
)


def newest_checkpoint(output_dir: Path, below: Path | None = None) -> Path | None:
    """The newest whole checkpoint; a warning names newer ones that are not.

    Args:
        below: only those with a lower number than this one.
    """
    folders = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    if below is not None:
        folders = [path for path in folders if _number(path) < _number(below)]
    return newest_whole(sorted(folders, key=_number), _is_complete)


def _number(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    return 0 if found is None else int(found[1])


def _is_complete(folder: Path) -> bool:
    """Whether it has the Trainer's state, which is the last of its own files, and an optimizer's state."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    checkpoint = folder / CHECKPOINT
    return (
        has_complete_checkpoint(checkpoint)
        if holds_checkpoint(checkpoint)
        else zipfile.is_zipfile(folder / OPTIMIZER_NAME)
    )


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
