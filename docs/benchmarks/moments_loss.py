"""Draw ``h200-moments-loss.json`` as ``moments-loss.png``: held-out losses of several seeds by the kind of moments."""

import json
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
values = json.loads((FOLDER / "h200-moments-loss.json").read_text())
kinds = list(dict.fromkeys(row["moments"] for row in values["rows"]))
betas = sorted({row["beta2"] for row in values["rows"]})
figure = Figure(figsize=(8, 3.2), layout="constrained")
for beta2, axes in zip(betas, figure.subplots(1, len(betas), sharey=True), strict=True):
    for place, kind in enumerate(kinds):
        last = [row["held_out_loss"][-1] for row in values["rows"] if (row["moments"], row["beta2"]) == (kind, beta2)]
        axes.plot([min(last), max(last)], [place, place], color="#0072B2", linewidth=1)
        axes.plot(last, [place] * len(last), "o", color="#56B4E9", markersize=4)
        axes.plot(sum(last) / len(last), place, "|", color="#000000", markersize=12)
    axes.set_title(f"beta2 = {beta2}", fontsize="medium")
    axes.set_xlabel("held-out loss (nats per byte)")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.grid(axis="x", alpha=0.3)
figure.axes[0].invert_yaxis()
figure.savefig(FOLDER / "moments-loss.png", dpi=100)
