"""Shows plans as tables of 80 columns and as a chart."""

from __future__ import annotations

import resource
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightstep.plan.cost import BYTES
from lightstep.plan.planning import Plan, Relief, Workload, first_that_fits
from lightstep.plan.timing import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 80
_NAME = 24
_NO_TIMES = "No times: they are planned for Adam and AdamW, and in dtypes with a known rate."
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "state": "masters and state",
    "activations": "activations",
    "gathered": "gathered by FSDP2",
    "step": "buffers of the step",
}
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#999999", "#CC79A7", "#009E73")


def planned_sentence(make: Callable[[], Plan], on_cpu: bool = False) -> str:
    """The first line of a run: the planned memory and time of a step. A plan that fails never ends a run."""
    try:
        return f"planned: {make().on_cpu() if on_cpu else make()}"
    except Exception as error:
        return f"no plan: {str(error) or type(error).__name__}"


def measured_sentence(device: torch.device, step_ms: float) -> str:
    """The last line of a run: the measured memory and time of a step."""
    whole = " of the whole process" if device.type == "cpu" else ""
    return f"measured: {peak_memory(device) / 1e9:.1f} GB of memory at the peak{whole}, {step_ms:,.0f} ms per step"


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on the GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def report(
    model: str,
    made: Sequence[Plan],
    workload: Workload,
    profile: Profile | None,
    remedies: Sequence[str] = (),
    relief: Sequence[Relief] = (),
) -> str:
    """Tables of memory and time, the strategies that do not fit and why, and a recommendation.

    Args:
        remedies: what makes a strategy fit, if none of ``made`` does.
        relief: what helps if the link limits the strategy that is recommended.
    """
    lines = [*_heading(model, made[0], workload, profile), "", *_memory_table(made), "", *_detail_table(made)]
    timed = any(plan.time is not None for plan in made)
    if timed:
        lines += ["", *_time_table(made)]
    elif profile is not None:
        lines += ["", *_wrapped(_NO_TIMES, "")]
    if any(plan.crossing is not None for plan in made):
        lines += ["", *_network_table(made)]
    if refused := [plan for plan in made if not plan.fits]:
        lines += ["", "Does not fit:"]
        for plan in refused:
            lines += _wrapped(f"{plan.strategy}: {plan.reason}", "  ")
    lines += ["", *_advice(made, remedies), *_relief_table(made, relief)]
    if profile is not None:
        lines += [line for source in profile.sources for line in _wrapped(source, "  ")]
    return "\n".join(lines) + "\n"


def _advice(made: Sequence[Plan], remedies: Sequence[str]) -> list[str]:
    first = first_that_fits(made)
    if first is None:
        if not remedies:
            return _wrapped("None of these fits. Use a smaller model, or GPUs with more memory.", "")
        enough = "Each of these alone" if len(remedies) > 1 else "This"
        return [
            f"None of these fits. {enough} is enough:",
            *(line for each in remedies for line in _wrapped(each, "  ")),
        ]
    advice = f"{'The fastest' if first.time else 'The first'} that fits: {first.strategy}"
    return _wrapped(f"{advice}, which clips each layer by its own norm" if first.clips_by_layer else advice, "")


def _relief_table(made: Sequence[Plan], relief: Sequence[Relief]) -> list[str]:
    first = first_that_fits(made)
    if not relief or first is None:
        return []
    unit, name = _unit(made)
    lines = [_row("ms per micro-batch", ("step", "exposed", f"{name}: peak", "host"), 11)]
    for change, plan in (Relief("as it is", first), *relief):
        assert plan.time is not None
        times = (time / plan.workload.micro_batches for time in (plan.time.iteration, plan.time.exposed))
        figures = [*(f"{time:,.0f}" if time >= 10 else f"{time:.1f}" for time in times)]
        lines.append(_row(change, [*figures, *_figures((plan.memory.peak, plan.memory.host), unit)], 11))
    hidden = [change for change, plan in relief if plan.time is not None and not plan.time.is_limited_by_link]
    said = "The link limits it. Take the first of these that your run allows"
    return [
        *_wrapped(f"{said}; {hidden[0]} is enough." if hidden else f"{said}, or several.", ""),
        "",
        *lines,
        "",
    ]


def _heading(model: str, plan: Plan, workload: Workload, profile: Profile | None) -> list[str]:
    batch = f"{workload.tokens:,} tokens"
    if workload.micro_batches > 1:
        batch = f"{workload.micro_batches} × {batch}"
    where = "device" if profile is None else profile.name
    devices = f"{plan.ranks} × {where}" if plan.ranks > 1 else where
    if plan.crossing is not None:
        devices += f" on {plan.crossing.nodes} nodes"
    count = plan.parameters
    size = f"{count / 1e9:.2f}·10⁹ parameters" if count >= 1e8 else f"{count / 1e6:.2f}·10⁶ parameters"
    each = " on each" if plan.ranks > 1 else ""
    room = "" if plan.limit is None else f" ({plan.limit / 1e9:.1f} GB of memory usable{each})"
    return _wrapped(f"{model}, {size}; a step of {batch} per device; {devices}{room}", "")


def _memory_table(made: Sequence[Plan]) -> list[str]:
    unit, name = _unit(made)
    lines = [_row(f"{name} per device", ("peak", "weights", "grads", "state", "activ.", "host", ""), 8)]
    for plan in made:
        held = plan.memory
        parts = (held.peak, held.weights, held.gradients, held.state, held.activations, held.host)
        lines.append(_row(plan.strategy, [*_figures(parts, unit), "fits" if plan.fits else "NO"], 8))
    return lines


def _detail_table(made: Sequence[Plan]) -> list[str]:
    unit, name = _unit(made)
    otherwise = "no ckpt." if made[0].workload.checkpointed is not False else "ckpt."
    lines = [_row(f"{name}, buffers", ("ring", "previous", "gathered", "other", "spare", otherwise), 9)]
    for plan in made:
        held = plan.memory
        parts = (held.ring, held.previous_weights, held.gathered, held.other, held.spare, plan.other_activations or 0)
        lines.append(_row(plan.strategy, _figures(parts, unit), 9))
    without = "without" if otherwise == "no ckpt." else "with"
    note = (
        "previous: weights before their update in backward. gathered: FSDP2's unsharded weights and gradients. "
        f"spare: a part of host. {otherwise[:-1]}.: activations {without} checkpointing."
    )
    return [*lines, *_wrapped(note, ""), *(line for plan in made for line in _host_notes(plan, unit, name))]


def _host_notes(plan: Plan, unit: float, name: str) -> list[str]:
    lines, held = [], plan.memory
    if plan.fits and held.spare < held.wanted_spare:
        room = f"{held.spare / unit:.1f} of {held.wanted_spare / unit:.1f} {name}"
        said = f"spare is limited to {room}; the other updates wait for the next forward."
        lines += _wrapped(f"{plan.strategy}: {said}", "")
    if plan.sums_on_host is not None:
        where = f"added up on the host in {plan.sums_on_host}, {BYTES[plan.sums_on_host]} bytes per parameter"
        said = "each after the first brings the sum, adds to it on the device, and takes it back"
        if held.staying:
            said += f", but for {held.staying / unit:.1f} of {held.wanted_staying / unit:.1f} {name}, which stay there"
        lines += _wrapped(f"{plan.strategy}: micro-batches are {where}; {said}.", "")
    return lines


def _unit(made: Sequence[Plan]) -> tuple[float, str]:
    return (1e9, "GB") if max(plan.memory.peak for plan in made) >= 1e9 else (1e6, "MB")


def _figures(parts: Iterable[int], unit: float) -> list[str]:
    return [f"{part / unit:.1f}" for part in parts]


def _time_table(made: Iterable[Plan]) -> list[str]:
    lines = [_row("ms per step", ("step", "clipped", "compute", "link", "exposed", "link GB"), 9)]
    for plan in made:
        time, clipped = plan.time, plan.clipped_time
        known = [time.iteration, clipped.iteration, time.compute, time.link, time.exposed] if time and clipped else []
        figures = [f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in known] or ["–"] * 5
        lines.append(_row(plan.strategy, [*figures, f"{plan.memory.link / 1e9:.1f}"], 9))
    if any(plan.time is None for plan in made):
        lines.append("–: not planned; the rate of its dtype is unknown.")
    return lines


def _network_table(made: Sequence[Plan]) -> list[str]:
    lines = [_row("between nodes", ("gather", "reduce", "send", "ms", "unhidden", "host"), 9)]
    for plan in made:
        if (crossing := plan.crossing) is None:
            continue
        sizes = [f"{size / 1e9:.1f}" for size in (crossing.gathered, crossing.reduced, crossing.sent)]
        time = plan.time
        times = [f"{value:,.0f}" for value in (time.network, time.unhidden)] if time is not None else ["–"] * 2
        lines.append(_row(plan.strategy, [*sizes, *times, f"{plan.host_of_node / 1e9:.0f}"], 9))
    note = (
        "gather, reduce, send: GB each way through each GPU's interface in a step. ms: their time. unhidden: the part "
        "of it that is in step. host: page-locked GB of a node."
    )
    return [*lines, *_wrapped(note, "")]


def _row(name: str, figures: Iterable[str], width: int) -> str:
    return (f"{name:<{_NAME}}" + "".join(f"{figure:>{width}}" for figure in figures)).rstrip()


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def draw(model: str, made: Sequence[Plan], path: Path) -> None:
    """Draw device memory by part, and the time of a step. The parts may add up to more than the peak."""
    from matplotlib.figure import Figure

    timed = any(plan.time is not None for plan in made)
    figure = Figure(figsize=(11, 2.2 + 0.4 * len(made)), layout="constrained")
    panels = list(figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0])
    figure.suptitle(f"{model}: planned, not measured", fontsize="medium")
    _draw_memory(panels[0], made)
    if timed:
        _draw_time(panels[1], made)
    panels[0].set_yticks(range(len(made)), [plan.strategy for plan in made])
    panels[0].invert_yaxis()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, made: Sequence[Plan]) -> None:
    left, (unit, name) = [0.0] * len(made), _unit(made)
    for (part, label), colour in zip(_PARTS.items(), _COLOURS, strict=True):
        lengths = [getattr(plan.memory, part) / unit for plan in made]
        axes.barh(range(len(made)), lengths, left=left, color=colour, label=label, edgecolor="black", linewidth=0.5)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    peaks = [plan.memory.peak / unit for plan in made]
    axes.plot(peaks, range(len(made)), "kD", markersize=5, linestyle="none", label="peak")
    limit = made[0].limit
    if limit is not None and limit / unit <= 2 * max(left):  # otherwise the bars would be too short to read
        axes.axvline(limit / unit, color="black", linestyle=":", label="usable memory")
    axes.set_xlabel(f"device memory, {name}: parts and peak")


def _draw_time(axes: Axes, made: Sequence[Plan]) -> None:
    edge: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
    for row, plan in enumerate(made):
        if plan.time is None or plan.clipped_time is None:
            axes.text(0, row, " not planned", va="center", fontsize="small")
            continue
        compute, whole, clipped = plan.time.compute, plan.time.iteration, plan.clipped_time.iteration
        axes.barh(row, compute, color="#D0D0D0", **edge)
        axes.barh(row, whole - compute, left=compute, color="#D55E00", **edge)
        if clipped > whole:
            axes.barh(row, clipped - whole, left=whole, color="white", hatch="///", **edge)
    axes.barh(0, 0, color="#D0D0D0", label="forward and backward", **edge)
    axes.barh(0, 0, color="#D55E00", label="exposed", **edge)
    axes.barh(0, 0, color="white", hatch="///", label="more if all are clipped", **edge)
    axes.set_xlabel("ms per step")
