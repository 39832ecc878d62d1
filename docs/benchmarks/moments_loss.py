"""Draw each ``*-loss.json`` of ``tests.measure_moments`` and each ``*-codes.json`` of ``tests.measure_codes`` as a PNG.

Lines are means of the seeds, and bands and bars reach from the lowest to the highest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
COLORS = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73")
DASHES = ("-", "--")


def main() -> None:
    for path in sorted(FOLDER.glob("*-loss.json")):
        drawn(losses_of(json.loads(path.read_text())), path)
    for path in sorted(FOLDER.glob("*-codes.json")):
        drawn(errors_of(json.loads(path.read_text())), path)


def losses_of(values: dict[str, Any]) -> Figure:
    """A row for each ``beta2``: losses, and how far they are from those of the first kind with the same seed."""
    kinds, betas = distinct(values, "moments"), distinct(values, "beta2")
    figure = Figure(figsize=(9, 3.3 * len(betas)), layout="constrained")
    for beta2, (losses, differences) in zip(betas, figure.subplots(len(betas), 2, squeeze=False), strict=True):
        by_kind = {kind: {row["seed"]: row["held_out_loss"] for row in rows_of(values, kind, beta2)} for kind in kinds}
        quarters = len(next(iter(by_kind[kinds[0]].values())))
        steps = [values["steps"] * (quarter + 1) // quarters for quarter in range(quarters)]
        for number, (kind, runs) in enumerate(by_kind.items()):
            band(losses, steps, list(zip(*runs.values(), strict=True)), kind, COLORS[number])
            exact = by_kind[kinds[0]]
            apart = [[run[n] - exact[seed][n] for seed, run in runs.items()] for n in range(quarters)]
            places = [step + (number - len(kinds) / 2) * steps[0] * 0.09 for step in steps]
            bars(differences, places, apart, kind, COLORS[number])
        losses.set_ylabel(f"held-out loss, beta2 {beta2}")
        differences.set_ylabel(f"loss less that of {kinds[0]}")
        for axes in (losses, differences):
            axes.set_xlabel("step")
            axes.set_xticks(steps)
            axes.grid(axis="y", alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def errors_of(values: dict[str, Any]) -> Figure:
    """A column for each ``beta2``: errors of updates by moments that were coded in every step; dashed: to nearest."""
    kinds, betas = distinct(values, "code"), distinct(values, "beta2")
    kinds = [kind for kind in kinds if not kind.startswith("float32")]
    codes = list(dict.fromkeys(kind.split()[0] for kind in kinds))
    figure = Figure(figsize=(1 + 4.5 * len(betas), 3.6), layout="constrained")
    for beta2, axes in zip(betas, figure.subplots(1, len(betas), sharey=True, squeeze=False)[0], strict=True):
        for kind in kinds:
            code, rounding = kind.split()
            rows = rows_of(values, kind, beta2, "code")
            steps = [int(step) for step in rows[0]["errors"]]
            found = [[100 * row["errors"][str(step)]["carried"] for row in rows] for step in steps]
            band(axes, steps, found, kind, COLORS[1 + codes.index(code)], DASHES[rounding == "nearest"])
        axes.set_title(f"beta2 {beta2}", fontsize="medium")
        axes.set_xlabel("step")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(axis="y", which="both", alpha=0.3)
    figure.axes[0].set_ylabel("error of an update (%)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    return figure


def distinct(values: dict[str, Any], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in values["rows"]))


def rows_of(values: dict[str, Any], kind: str, beta2: float, key: str = "moments") -> list[dict[str, Any]]:
    return [row for row in values["rows"] if (row[key], row["beta2"]) == (kind, beta2)]


def band(
    axes: Axes, x: Sequence[float], found: Sequence[Sequence[float]], label: str, color: str, dashes: str = "-"
) -> None:
    axes.plot(x, [sum(one) / len(one) for one in found], dashes, color=color, label=label, linewidth=1.2)
    axes.fill_between(x, [min(one) for one in found], [max(one) for one in found], color=color, alpha=0.12, linewidth=0)


def bars(axes: Axes, x: Sequence[float], found: Sequence[Sequence[float]], label: str, color: str) -> None:
    means = [sum(one) / len(one) for one in found]
    reach = [
        [mean - min(one) for mean, one in zip(means, found, strict=True)],
        [max(one) - mean for mean, one in zip(means, found, strict=True)],
    ]
    axes.errorbar(x, means, reach, fmt="o", color=color, label=label, markersize=3.5, capsize=2, linewidth=1)


def drawn(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
