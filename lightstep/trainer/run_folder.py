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
import shutil
from pathlib import Path

import yaml

from lightstep.config import ConfigError
from lightstep.strategy.checkpoint import latest_checkpoint
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
        moved = next(place for number in range(1, 10**6) if not (place := _numbered(folder, number)).exists())
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(content, encoding="utf-8")
    return moved


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Keep the ``keep`` checkpoints of the most steps."""
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := _CHECKPOINT.fullmatch(entry.name))}
    for step in sorted(found)[:-keep]:
        shutil.rmtree(found[step], ignore_errors=True)


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.{number}")
