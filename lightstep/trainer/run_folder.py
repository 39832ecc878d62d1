"""The layout of ``runs/<name>``: settings, checkpoints, logs, loss curve and trained model.

::

    runs/train/
        config.yaml        the settings of the run, with defaults and overrides
        checkpoint-500/    the newest checkpoints
        weights-100/       weights alone, if requested
        tensorboard/
        loss.png
        model/             a Hugging Face folder
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from lightstep.checkpoint.layout import MANIFEST, checkpoints_in, has_complete_checkpoint
from lightstep.checkpoint.verify import is_undamaged
from lightstep.config import ConfigError
from lightstep.trainer.config import TrainConfig

CONFIG = "config.yaml"
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def checkpoint_path(folder: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return folder / f"checkpoint-{step}"


def weights_path(folder: Path, step: int) -> Path:
    """The path of the weights of a step."""
    return folder / f"weights-{step}"


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        ConfigError: there is none.
    """
    newest = next((path for path in _checkpoints(folder) if has_complete_checkpoint(path)), None)
    if newest is None:
        raise ConfigError(f"--resume: {folder} holds no complete checkpoint; start without --resume")
    return newest


def newest_undamaged(folder: Path) -> Path | None:
    """The newest undamaged checkpoint of a run, checked byte by byte; ``None`` if there are no checkpoints.

    Raises:
        ConfigError: all checkpoints are damaged.
    """
    found = _checkpoints(folder)
    newest = next((path for path in found if is_undamaged(path)), None)
    if newest is None and found:
        raise ConfigError(
            f"--resume auto: all checkpoints in {folder} are damaged ({', '.join(path.name for path in found)}); "
            "start without --resume, which moves the folder aside"
        )
    return newest


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of the whole state, newest first."""
    return [path for path in checkpoints_in(folder) if _CHECKPOINT.fullmatch(path.name)]


def start_run(config: TrainConfig, resume: bool) -> Path | None:
    """Create the run's folder. An earlier run of that name is moved aside, never overwritten.

    Returns:
        Where the earlier run is now, if there was one.

    Raises:
        ConfigError: the folder holds something other than a run.
    """
    folder, moved = config.folder, None
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} exists and is not a run of lightstep; choose another name or output")
        moved = _free_place(folder)
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(content, encoding="utf-8")
    return moved


def move_incomplete(path: Path) -> Path | None:
    """Move ``path`` aside if it exists and is not a checkpoint, because a save replaces checkpoints only.

    Returns:
        Its new path, if it was moved.
    """
    if not path.exists() or (path / MANIFEST).is_file():
        return None
    aside = _free_place(path)
    path.rename(aside)
    return aside


def _free_place(path: Path) -> Path:
    """``path.1``, or the next free number."""
    places = (path.with_name(f"{path.name}.{number}") for number in range(1, 10**6))
    return next(place for place in places if not place.exists())
