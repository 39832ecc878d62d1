"""Draw ``cpu-moments-loss.json`` as ``moments-loss.png``: held-out losses with moments in fp32 and in bf16."""

import json
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
# The Okabe-Ito palette is safe for the common kinds of color blindness.
STYLES = {None: ("#000000", "o-"), "nearest": ("#0072B2", "s--"), "stochastic": ("#E69F00", "^:")}

values = json.loads((FOLDER / "cpu-moments-loss.json").read_text())
betas = sorted({row["beta2"] for row in values["rows"]})
figure = Figure(figsize=(8, 3.2), layout="constrained")
for beta2, axes in zip(betas, figure.subplots(1, len(betas), sharey=True), strict=True):
    for row in (row for row in values["rows"] if row["beta2"] == beta2):
        color, marks = STYLES[row["moments_rounding"]]
        label = ", ".join(filter(None, (row["moments"], row["moments_rounding"])))
        axes.plot(values["steps"], row["validation_loss"], marks, color=color, label=label, markersize=4, linewidth=1)
    axes.set_title(f"beta2 = {beta2}", fontsize="medium")
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
figure.axes[0].set_ylabel("held-out loss (nats per byte)")
figure.axes[0].legend(frameon=False)
figure.savefig(FOLDER / "moments-loss.png", dpi=100)
