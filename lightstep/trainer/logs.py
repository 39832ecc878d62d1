"""TensorBoard scalars, and the loss curve drawn from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

TRAINING, VALIDATION = "loss/training", "loss/validation"

logger = logging.getLogger(__name__)


class Logs:
    """Scalars in ``<folder>/tensorboard``, and ``<folder>/loss.png`` at the end.

    Training does not depend on them: when they cannot be written, one warning says so and nothing more is logged.

    Args:
        folder: ``None`` on ranks that write nothing.
        start: the step that the run continues from; what an interrupted run logged after it is superseded.
    """

    def __init__(self, folder: Path | None, start: int) -> None:
        self._folder, self._start = folder, start
        self._writer: SummaryWriter | None = None
        self._given_up = False
        self._hook = threading.excepthook

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step (from 1)."""
        if self._writer is not None:
            try:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
            except OSError as error:
                self._give_up(error)

    def __enter__(self) -> Logs:
        if self._folder is not None:
            self._hook, threading.excepthook = threading.excepthook, self._outside_writer
            purge = self._start + 1 if self._start else None
            try:
                self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge)
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        try:
            if self._writer is not None:
                self._writer.close()
            draw_loss_curve(self._folder / "tensorboard", self._folder / "loss.png")
        except OSError as failure:
            if error is None:  # else a full disk has already been reported
                self._give_up(failure)
        finally:
            threading.excepthook = self._hook

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        if not self._given_up:
            logger.warning("warning: %s: %s; nothing more is logged", self._folder, error.strerror or error)
        self._given_up = True

    def _outside_writer(self, arguments: threading.ExceptHookArgs) -> None:
        """The writer's thread hands its errors to ``add_scalar``; a traceback of them says nothing new."""
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            self._hook(arguments)


def draw_loss_curve(logs: Path, image: Path) -> None:
    """Training and validation loss over steps, as the logs hold them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = read_scalars(logs, (TRAINING, VALIDATION))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
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
    """``(step, value)`` by name; of a step that was logged again after a resume the last value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    remarks = logging.getLogger("tensorboard")
    level = remarks.level
    remarks.setLevel(logging.ERROR)  # it warns of every step that was logged again after a resume
    try:
        events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    finally:
        remarks.setLevel(level)
    known = events.Tags()["scalars"]
    return {
        name: sorted({event.step: event.value for event in events.Scalars(name)}.items()) if name in known else []
        for name in names
    }
