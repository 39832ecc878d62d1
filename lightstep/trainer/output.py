"""The output of a run: its folder, logged scalars, the loss curve, and lines on the console.

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

import logging
import math
import re
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from lightstep.checkpoint import CheckpointError
from lightstep.checkpoint.errors import UnreadableError
from lightstep.checkpoint.layout import (
    CHECKPOINT,
    MANIFEST,
    Manifest,
    checkpoints_in,
    find_checkpoint,
    is_complete,
)
from lightstep.checkpoint.saved import is_undamaged
from lightstep.checkpoint.storage import new_file, recover_interrupted
from lightstep.config import ConfigError
from lightstep.distributed import Ranks
from lightstep.trainer.config import TrainConfig

CONFIG = "config.yaml"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_SAVED = re.compile(r"(checkpoint|weights)-\d+")


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        ConfigError: there is none.
    """
    newest = next(filter(is_complete, _checkpoints(folder)), None)
    if newest is None:
        raise ConfigError(f"--resume: {folder} holds no complete checkpoint; start without --resume")
    return newest


def newest_undamaged(folder: Path, ranks: Ranks) -> Path | None:
    """The newest undamaged checkpoint of a run, checked byte by byte; ``None`` if there are no checkpoints.

    Called by all ranks. Of a save in parts, the first rank of each disk checks its own part.

    Raises:
        ConfigError: all checkpoints are damaged, or the first rank has none and another one has.
    """
    found = ranks.together(lambda: [path.name for path in _checkpoints(folder)])
    (first, names), *others = ranks.gather((socket.gethostname(), found))
    for rank, (host, there) in enumerate(others, 1):
        if there and not names:
            raise ConfigError(
                f"--resume auto: rank 0 on {first} has no checkpoints in {folder}, and rank {rank} on {host} has "
                f"{', '.join(there)}; start the hosts in the order of the run that saved them"
            )
    newest = next((name for name in names if _is_undamaged_everywhere(folder / name, ranks)), None)
    if newest is None and names:
        raise ConfigError(
            f"--resume auto: all checkpoints in {folder} are damaged or have parts that are ({', '.join(names)}); "
            "start without --resume, which moves the folder aside"
        )
    return None if newest is None else folder / newest


def _is_undamaged_everywhere(path: Path, ranks: Ranks) -> bool:
    """Whether all parts of a checkpoint are there, undamaged and of one save. Called by all ranks."""
    manifest = ranks.together(lambda: _manifest_of_undamaged(path), only_first=True)
    if manifest is None:
        return False
    is_lead = ranks.rank in [part["ranks"][0] for part in manifest.get("parts") or ()]
    own = ranks.together(lambda: _manifest_of_undamaged(path) if is_lead and not ranks.is_first else manifest)
    return all(each is not None and each["save_id"] == manifest["save_id"] for each in ranks.gather(own))


def _manifest_of_undamaged(path: Path) -> Manifest | None:
    """``None`` if the checkpoint is damaged, or another process removes it."""
    try:
        return find_checkpoint(path)[1] if is_undamaged(path) else None
    except UnreadableError as error:
        raise UnreadableError(f"{error}, or move {path} away to continue from an older one") from error
    except CheckpointError:
        return None


def _checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of the whole state, newest first."""
    return [path for path in checkpoints_in(folder) if _CHECKPOINT.fullmatch(path.name)]


def start_run(config: TrainConfig, resume: bool) -> Path | None:
    """Create the run's folder. An earlier run of that name is moved aside, never overwritten. In one that is resumed,
    what a crash left under temporary names is renamed or removed: a run that has ended saves nothing that would do it.

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
    if resume:
        recover_interrupted(folder, CHECKPOINT, lambda name: _SAVED.fullmatch(name) is not None)
    content = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    with new_file(folder / CONFIG, Path.is_file, "a file") as file:  # a full disk leaves the settings of the run
        file.write_text(content, encoding="utf-8")
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


TRAINING, VALIDATION = "loss/training", "loss/validation"
TENSORBOARD = "tensorboard"

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """The methods of accelerate's ``GeneralTracker`` that are used here."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class TensorBoard:
    """Writes scalars to a folder, and supersedes those that an interrupted run wrote after ``start``.

    accelerate's own tracker starts a process group under torchrun even if the strategy needs none, and flushes its file
    at every step.
    """

    def __init__(self, folder: Path, start: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def check_trackers(names: Sequence[str]) -> None:
    """Check that the trackers' libraries are installed.

    Raises:
        ConfigError: one is missing.
    """
    if missing := [name for name in names if name != TENSORBOARD and name not in _installed()]:
        raise ConfigError(f"trackers: {missing[0]} is not installed; install its library, or remove it from trackers")


def _installed() -> list[str]:
    from accelerate.tracking import get_available_trackers

    return [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]


def _start_service(name: str, run: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """Start accelerate's tracker of that name."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # required by its trackers
    made = LOGGER_TYPE_TO_CLASS[name]
    tracker: Any = made(run, folder) if made.requires_logging_directory else made(run)
    tracker.start()
    tracker.store_init_configuration(_flat(settings))
    return tracker


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to plain values under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str | None) else str(value)
    return flat


class Logs:
    """Logs the scalars of every step, and draws ``<folder>/loss.png`` at the end.

    An error never stops training: the tracker that failed is dropped with one warning.

    Args:
        folder: the folder of the run; ``None`` on ranks that write nothing.
        start: the step from which the run continues.
        trackers: ``tensorboard``, which writes to ``<folder>/tensorboard``, and names of accelerate's trackers.
        settings: the settings of the run, for accelerate's trackers.
    """

    def __init__(
        self,
        folder: Path | None,
        start: int,
        trackers: Sequence[str] = (TENSORBOARD,),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._start = folder, start
        self._names, self._settings = trackers, settings or {}
        self._open: dict[str, Tracker] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of one step (from 1)."""
        for name, tracker in list(self._open.items()):
            with self._dropping_on_error(name):
                tracker.log(dict(values), step)

    def __enter__(self) -> Logs:
        if self._folder is not None:
            for name in self._names:
                with self._dropping_on_error(name):
                    self._open[name] = self._start_tracker(name, self._folder)
        return self

    def _start_tracker(self, name: str, folder: Path) -> Tracker:
        if name == TENSORBOARD:
            return TensorBoard(folder / TENSORBOARD, self._start)
        return _start_service(name, folder.name, folder, self._settings)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        for name, tracker in list(self._open.items()):
            with self._dropping_on_error(name, silent=error is not None):  # a full disk has already been reported
                tracker.finish()
        if TENSORBOARD in self._names:
            with self._dropping_on_error("loss.png", silent=error is not None or TENSORBOARD not in self._open):
                draw_loss_curve(self._folder / TENSORBOARD, self._folder / "loss.png")

    @contextmanager
    def _dropping_on_error(self, name: str, silent: bool = False) -> Iterator[None]:
        """Drop the tracker if the block raises."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            reason = getattr(error, "strerror", None) or error
            if not silent:
                logger.warning("warning: %s: %s: %s; nothing more is logged there", self._folder, name, reason)


def draw_loss_curve(logs: Path, image: Path) -> None:
    """Draw the logged training and validation loss over steps."""
    with errors_only("matplotlib"):  # it warns about a read-only home
        from matplotlib.figure import Figure

    curves = read_scalars(logs, (TRAINING, VALIDATION))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if steps := curves[TRAINING]:
        axes.plot(*zip(*steps, strict=True), linewidth=0.8, alpha=0.6, color="tab:blue", label="training")
    if points := curves[VALIDATION]:
        axes.plot(*zip(*points, strict=True), marker="o", color="tab:orange", label="validation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.3)
    if steps or points:
        axes.legend()
    try:
        figure.savefig(image, dpi=150)
    except OSError:
        image.unlink(missing_ok=True)
        raise


def read_scalars(logs: Path, names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """``(step, value)`` pairs by name. For a step that was logged twice because of a resume, the last value counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with errors_only("tensorboard"):  # it warns about every step that was logged twice
        events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    known = events.Tags()["scalars"]
    return {
        name: sorted({event.step: event.value for event in events.Scalars(name)}.items()) if name in known else []
        for name in names
    }


@contextmanager
def errors_only(library: str) -> Iterator[None]:
    """Log only errors of ``library``."""
    remarks = logging.getLogger(library)
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        yield
    finally:
        remarks.setLevel(level)


@dataclass(frozen=True)
class Figures:
    """Figures of the steps since the last figures."""

    losses: Sequence[float]
    """Of each step, nats per byte."""
    grad_norms: Sequence[float]
    loss_scale: float
    tokens_per_second: float
    memory: int
    """Bytes at the peak so far."""
    skipped: int = 0
    """Steps of the run that were skipped because of non-finite gradients."""


def _summary(shown: Sequence[Figures]) -> str:
    """Means over all steps since the last output."""
    last, rate = shown[-1], statistics.harmonic_mean([figures.tokens_per_second for figures in shown])
    loss = _finite_mean(loss for figures in shown for loss in figures.losses)
    norm = _finite_mean(norm for figures in shown for norm in figures.grad_norms)
    parts = [f"loss {loss:.3f}", f"norm {norm:.2f}"]
    if last.loss_scale != 1:
        parts.append(f"scale {last.loss_scale:g}")
    parts += [f"{rate:,.0f} tokens/s", f"{last.memory / 1e9:.1f} GB"]
    if last.skipped:
        parts.append(f"{last.skipped} skipped")
    return "  ".join(parts)


def _finite_mean(values: Iterable[float]) -> float:
    finite = list(filter(math.isfinite, values))
    return statistics.fmean(finite) if finite else math.nan


class Display:
    """Prints on the first rank only.

    Args:
        seconds, steps: without a terminal, print a line when either has passed since the last one; 0 steps: by time
            alone.
    """

    def __init__(self, console: Console, is_main: bool, seconds: float = 10, steps: int = 0) -> None:
        self._console = console if is_main else Console(quiet=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps, self._saving = 0, ""
        self._every_seconds, self._every_steps = seconds, steps
        self._started = time.monotonic()
        self._shown: tuple[int, float] | None = None
        self._unsaid: list[Figures] = []

    def say(self, sentence: str) -> None:
        """Print one line above the progress bar."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def training(self, start: int, steps: int) -> Iterator[None]:
        """Show progress from ``start`` to ``steps``."""
        self._steps, self._shown, self._started = steps, None, time.monotonic()
        with Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}{task.fields[saving]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=False,
        ) as self._progress:
            self._task = self._progress.add_task("", total=steps, completed=start, figures="", saving="")
            yield

    def advance(self, step: int, saving: bool = False) -> None:
        """Show that ``step`` steps are done, and whether a checkpoint is being written."""
        assert self._progress is not None
        self._saving = "  saving" if saving else ""
        self._progress.update(self._task, completed=step, saving=self._saving)

    def show(self, step: int, figures: Figures) -> None:
        """Show new figures: the progress bar at once, a line when it is due, with means since the last line."""
        assert self._progress is not None
        self._unsaid.append(figures)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, figures=_summary(self._unsaid))
        elif self._due(step):
            elapsed = time.monotonic() - self._started
            self.say(f"step {step}/{self._steps}  {_summary(self._unsaid)}{self._saving}  {elapsed:.0f} s")
            self._shown = step, time.monotonic()
        else:
            return
        self._unsaid = []

    def _due(self, step: int) -> bool:
        if self._shown is None or step == self._steps:
            return True
        last, then = self._shown
        enough = self._every_steps > 0 and step - last >= self._every_steps
        return enough or time.monotonic() - then >= self._every_seconds
