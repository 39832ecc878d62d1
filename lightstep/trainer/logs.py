"""TensorBoard scalars, and the loss curve drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

TRAINING, VALIDATION = "loss/training", "loss/validation"


class Logs:
    """Scalars in ``<folder>/tensorboard``, and ``<folder>/loss.png`` at the end.

    Args:
        folder: ``None`` on ranks that write nothing.
        start: the step that the run continues from; what an interrupted run logged after it is superseded.
    """

    def __init__(self, folder: Path | None, start: int) -> None:
        self._folder = folder
        self._writer = None
        if folder is not None:
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step (from 1)."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None or self._folder is None:
            return
        try:
            self._writer.close()
            draw_loss_curve(self._folder / "tensorboard", self._folder / "loss.png")
        except OSError:
            if error is None:  # a full disk has already been reported otherwise
                raise


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
    figure.savefig(image, dpi=150)


def read_scalars(logs: Path, names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
    """``(step, value)`` by name; of a step that was logged again after a resume the last value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    known = events.Tags()["scalars"]
    return {
        name: sorted({event.step: event.value for event in events.Scalars(name)}.items()) if name in known else []
        for name in names
    }
