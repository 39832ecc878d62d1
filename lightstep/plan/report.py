"""Shows plans as tables of 80 columns and as a chart."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightstep.plan.planning import Plan, Workload, first_that_fits
from lightstep.plan.profiles import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 80
_NAME = 24
_NO_TIMES = "No times: they are planned for Adam and AdamW, without DeepSpeed, and in dtypes with a known rate."
_PARTS = ("weights", "gradients", "state", "activations", "gathered", "step")
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#999999", "#CC79A7", "#009E73")


def planned_sentence(make: Callable[[], Plan]) -> str:
    """The first line of a run: the planned memory and time of a step. A plan that fails never ends a run."""
    try:
        return f"planned: {make()}"
    except Exception as error:
        return f"no plan: {str(error) or type(error).__name__}"


def measured_sentence(peak_gb: float, step_ms: float) -> str:
    """The last line of a run: the measured memory and time of a step."""
    return f"measured: {peak_gb:.1f} GB of memory at the peak, {step_ms:,.0f} ms per step"


def report(model: str, made: Sequence[Plan], workload: Workload, profile: Profile | None) -> str:
    """Tables of memory and time, the strategies that do not fit and why, and a recommendation."""
    lines = [*_heading(model, made[0], workload, profile), "", *_memory_table(made)]
    timed = any(plan.time is not None for plan in made)
    if timed:
        lines += ["", *_time_table(made)]
    elif profile is not None:
        lines += ["", *_wrapped(_NO_TIMES, "")]
    if refused := [plan for plan in made if not plan.fits]:
        lines += ["", "Does not fit:"]
        for plan in refused:
            lines += _wrapped(f"{plan.strategy}: {plan.reason}", "  ")
    first = first_that_fits(made)
    how = "The fastest that fits" if timed else "The first that fits"
    advice = (
        f"{how}: {first.strategy}" if first else "None of these fits; use more devices or fewer tokens per micro-batch"
    )
    lines += ["", advice]
    if profile is not None:
        lines += [line for source in profile.sources for line in _wrapped(source, "  ")]
    return "\n".join(lines) + "\n"


def _heading(model: str, plan: Plan, workload: Workload, profile: Profile | None) -> list[str]:
    batch = f"{workload.tokens:,} tokens"
    if workload.micro_batches > 1:
        batch = f"{workload.micro_batches} × {batch}"
    where = "device" if profile is None else profile.name
    devices = f"{plan.ranks} × {where}" if plan.ranks > 1 else where
    count = plan.parameters
    size = f"{count / 1e9:.2f}·10⁹ parameters" if count >= 1e8 else f"{count / 1e6:.2f}·10⁶ parameters"
    each = " on each" if plan.ranks > 1 else ""
    room = "" if plan.limit is None else f" ({plan.limit / 1e9:.1f} GB of memory usable{each})"
    return _wrapped(f"{model}, {size}; a step of {batch} per device; {devices}{room}", "")


def _memory_table(made: Sequence[Plan]) -> list[str]:
    unit, name = (1e9, "GB") if max(plan.memory.peak for plan in made) >= 1e9 else (1e6, "MB")
    heads = ("peak", "weights", "grads", "state", "activ.", "host", "")
    lines = [_row(f"{name} per device", heads, 8)]
    for plan in made:
        held = plan.memory
        parts = (held.peak, held.weights, held.gradients, held.state, held.activations, held.host)
        figures = [f"{part / unit:.1f}" for part in parts]
        lines.append(_row(plan.strategy, [*figures, "fits" if plan.fits else "NO"], 8))
    return lines


def _time_table(made: Iterable[Plan]) -> list[str]:
    lines = [_row("ms per step", ("step", "compute", "link", "exposed", "link GB"), 10)]
    for plan in made:
        time = plan.time
        known = [] if time is None else [time.iteration, time.compute, time.link, time.exposed]
        figures = [f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in known] or ["–"] * 4
        lines.append(_row(plan.strategy, [*figures, f"{plan.memory.link / 1e9:.1f}"], 10))
    if any(plan.time is None for plan in made):
        lines.append("–: not planned; it uses DeepSpeed, or the rate of its dtype is unknown.")
    return lines


def _row(name: str, figures: Iterable[str], width: int) -> str:
    return (f"{name:<{_NAME}}" + "".join(f"{figure:>{width}}" for figure in figures)).rstrip()


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def draw(model: str, made: Sequence[Plan], path: Path) -> None:
    """Draw device memory by part, and the time of a step, as a PNG. The parts may add up to more than the peak."""
    from matplotlib.figure import Figure

    timed = any(plan.time is not None for plan in made)
    figure = Figure(figsize=(11, 1.4 + 0.45 * len(made)), layout="constrained")
    panels = list(figure.subplots(1, 2 if timed else 1, squeeze=False)[0])
    figure.suptitle(f"{model}: planned, not measured", fontsize="medium")
    _draw_memory(panels[0], made)
    if timed:
        _draw_time(panels[1], made)
    for axes in panels:
        axes.set_yticks(range(len(made)), [plan.strategy for plan in made] if axes is panels[0] else [""] * len(made))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, made: Sequence[Plan]) -> None:
    left = [0.0] * len(made)
    for part, colour in zip(_PARTS, _COLOURS, strict=True):
        lengths = [getattr(plan.memory, part) / 1e9 for plan in made]
        axes.barh(range(len(made)), lengths, left=left, color=colour, label=part, edgecolor="black", linewidth=0.5)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    peaks = [plan.memory.peak / 1e9 for plan in made]
    axes.plot(peaks, range(len(made)), "kD", markersize=5, label="peak")
    if made[0].limit is not None:
        axes.axvline(made[0].limit / 1e9, color="black", linestyle=":", label="usable")
    axes.set_xlabel("device memory, GB: parts and peak")


def _draw_time(axes: Axes, made: Sequence[Plan]) -> None:
    compute = [plan.time.compute if plan.time else 0.0 for plan in made]
    axes.barh(range(len(made)), compute, color="#D0D0D0", label="compute", edgecolor="black", linewidth=0.5)
    exposed = [plan.time.exposed if plan.time else 0.0 for plan in made]
    axes.barh(
        range(len(made)), exposed, left=compute, color="#0072B2", label="exposed", edgecolor="black", linewidth=0.5
    )
    axes.set_xlabel("ms per step")
