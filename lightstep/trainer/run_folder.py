"""What lies in ``runs/<name>``: the settings, checkpoints, logs, the loss curve and the trained model.

::

    runs/train/
        config.yaml        the settings of the run, with defaults and overrides
        checkpoint-500/    the newest ones
        tensorboard/
        loss.png
        model/             a Hugging Face folder
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from lightstep.checkpoint.layout import MANIFEST, is_complete, latest_checkpoint, remove_checkpoint
from lightstep.config import ConfigError
from lightstep.trainer.config import TrainConfig

CONFIG = "config.yaml"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"checkpoint-{step}"


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        ConfigError: there is none.
    """
    newest = latest_checkpoint(folder)
    if newest is None:
        raise ConfigError(f"--resume: {folder} holds no complete checkpoint; start without --resume")
    return newest


def start_run(config: TrainConfig, resume: bool) -> Path | None:
    """Make the run's folder. An earlier run of that name is moved aside, never overwritten.

    Returns:
        Where the earlier run is now, if there was one.

    Raises:
        ConfigError: the folder holds something other than a run.
    """
    folder, moved = config.folder, None
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} exists and is no run of lightstep; choose another name or output")
        moved = _free_place(folder)
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(content, encoding="utf-8")
    return moved


def clear_place(path: Path) -> Path | None:
    """Move what stands where a checkpoint belongs aside, unless it is one: only a checkpoint is saved over.

    Returns:
        Where it is now, if there was something.
    """
    if not path.exists() or (path / MANIFEST).is_file():
        return None
    aside = _free_place(path)
    path.rename(aside)
    return aside


def remove_old_checkpoints(saved: Path, keep: int) -> None:
    """Of ``saved``, which is whole, and the checkpoints of fewer steps, keep the ``keep`` newest that are whole.

    Those of more steps stay: they are what a resumed run went past, and it saves over them when it gets there. Files of
    the user's stay too.
    """
    last, kept = _step(saved), 0
    earlier = [entry for entry in saved.parent.iterdir() if last >= _step(entry) >= 0]
    for entry in sorted(earlier, key=_step, reverse=True):
        if kept < keep and (entry == saved or is_complete(entry)):
            kept += 1
        else:
            remove_checkpoint(entry)


def _step(entry: Path) -> int:
    """The step of a checkpoint's folder; -1 for anything else."""
    found = _CHECKPOINT.fullmatch(entry.name)
    return int(found[1]) if found else -1


def _free_place(path: Path) -> Path:
    """``path.1``, or the next number that is free."""
    places = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return next(place for place in places if not place.exists())
