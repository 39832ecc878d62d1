"""The loss curves of several runs in one picture.

lightstep train examples/train.yaml
lightstep train examples/muon.yaml
python examples/loss_curves.py runs/train runs/muon --output loss.png
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from lightstep.trainer.output import TRAINING, VALIDATION, read_scalars

parser = argparse.ArgumentParser(description="Draw the loss curves of several runs.")
parser.add_argument("runs", nargs="+", type=Path, help="folders that `lightstep train` has written")
parser.add_argument("--output", type=Path, default=Path("loss.png"))
arguments = parser.parse_args()

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for run in arguments.runs:
    scalars = read_scalars(run / "tensorboard", (TRAINING, VALIDATION))
    line = axes.plot(*zip(*scalars[TRAINING], strict=True), label=run.name, linewidth=1)[0]
    axes.plot(*zip(*scalars[VALIDATION], strict=True), "o", color=line.get_color(), label=f"{run.name}, held out")
axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(arguments.output, dpi=120)
print(f"wrote {arguments.output}")
