"""Records scalars in TensorBoard or experiment trackers, and draws the loss curve."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from lightstep.config import ConfigError

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
        self._previous_hook = threading.excepthook

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of one step (from 1)."""
        for name, tracker in list(self._open.items()):
            with self._dropping_on_error(name):
                tracker.log(dict(values), step)

    def __enter__(self) -> Logs:
        if self._folder is not None:
            self._previous_hook, threading.excepthook = threading.excepthook, self._handle_thread_exception
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
        threading.excepthook = self._previous_hook

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

    def _handle_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        """Print no traceback for TensorBoard's writer thread, whose errors ``add_scalar`` raises again."""
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            self._previous_hook(arguments)


def draw_loss_curve(logs: Path, image: Path) -> None:
    """Draw the logged training and validation loss over steps."""
    with _errors_only("matplotlib"):  # it warns about a read-only home
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

    with _errors_only("tensorboard"):  # it warns about every step that was logged twice
        events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    known = events.Tags()["scalars"]
    return {
        name: sorted({event.step: event.value for event in events.Scalars(name)}.items()) if name in known else []
        for name in names
    }


@contextmanager
def _errors_only(library: str) -> Iterator[None]:
    """Log only errors of ``library``."""
    remarks = logging.getLogger(library)
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        yield
    finally:
        remarks.setLevel(level)
