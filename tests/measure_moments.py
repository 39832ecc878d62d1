"""Loss curves with moments in fp32, bf16 and 8 bits: ``python -m tests.measure_moments --processes 6``.

A byte-level transformer learns the sources of Python's library, from several seeds for each kind of moments, all with
the same batches for a seed. Beside them, if bitsandbytes is installed, its AdamW8bit on fp32 masters by hand. Kinds
like ``rounded: int8 stochastic`` have no masters, and weights that are rounded stochastically; ``nearest: float32`` has
no masters either, and rounds weights to nearest. A run's seed is also that of its noise.

``--output`` is written after each run, so a measurement that is cut off keeps what it has; ``--begun`` goes on from it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import platform
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lightstep

KINDS = ("float32", "bfloat16 nearest", "bfloat16 stochastic", "int8 nearest", "int8 stochastic", "bitsandbytes")
WITHOUT_MASTERS: dict[str, bool | str] = {"rounded": "stochastic", "nearest": False}
"""``precision.master_weights`` of ``rounded: int8 stochastic``."""
BETAS = (0.95, 0.999)
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 4, 4, 256, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, in nats per byte; ``tokens``: ``[batch, LENGTH + 1]``."""
        x = self.bytes(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def texts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and held-out ones ``[64, LENGTH + 1]``."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    learned = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10)
    held_out = b"".join(file.read_bytes() for file in files[::10])
    rows = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)]
    rows = rows.view(-1, LENGTH + 1)
    chosen = rows[torch.linspace(0, len(rows) - 1, 64).long()]
    return torch.frombuffer(bytearray(learned), dtype=torch.uint8).to(device), chosen.long().to(device)


def stepper(model: nn.Module, kind: str, beta2: float, lr: float, seed: int) -> tuple[Callable[[Tensor], None], Any]:
    """A function that takes a loss and steps, and what schedulers change."""
    options = {"lr": lr, "betas": (0.9, beta2), "weight_decay": 0.1}
    if kind != "bitsandbytes":
        weights, _, kept = kind.rpartition(": ")
        moments, _, rounding = kept.partition(" ")
        noise = {"rounding_seed": seed} if "stochastic" in (rounding, WITHOUT_MASTERS.get(weights)) else {}
        strategy = lightstep.Strategy.load(
            "resident",
            overrides={
                "precision": {"master_weights": WITHOUT_MASTERS.get(weights, True), **noise},
                "optimizer_state": {"moments": moments, "moments_rounding": rounding or "nearest"},
            },
        )
        optimizer = strategy.create_optimizer(strategy.prepare_model(model), torch.optim.AdamW, **options)

        def step(loss: Tensor) -> None:
            optimizer.backward(loss)
            optimizer.step()

        return step, optimizer
    import bitsandbytes

    model.to(torch.bfloat16)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    by_hand = bitsandbytes.optim.AdamW8bit(masters, **options)

    def step_by_hand(loss: Tensor) -> None:
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        by_hand.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step_by_hand, by_hand


def run(job: tuple[str, float, int, int]) -> dict[str, Any]:
    """One run: held-out losses after each quarter of its steps."""
    kind, beta2, seed, steps = job
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(seed)
    with device:
        model = Model()
    learned, held_out = texts(device)
    step, optimizer = stepper(model, kind, beta2, 3e-3, seed)
    warm = 50
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / warm, 0.1 + 0.9 * (1 - n / steps)))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(1, steps + 1):
        starts = torch.randint(len(learned) - LENGTH - 1, (BATCH,), generator=generator).tolist()
        step(model(torch.stack([learned[start : start + LENGTH + 1] for start in starts]).long()))
        scheduler.step()
        if number % (steps // 4) == 0:
            with torch.no_grad():
                found.append(round(float(model(held_out)), 4))
    return {"moments": kind, "beta2": beta2, "seed": seed, "held_out_loss": found}


class Measurement:
    """Jobs in several processes; the rows that are there are written after each of them.

    Args:
        given: parsed arguments, among them those of :func:`add_arguments`.
        command, hardware, what: for the file.
        keys: what tells two rows from each other.
    """

    def __init__(self, given: argparse.Namespace, command: str, hardware: str, what: str, keys: Sequence[str]) -> None:
        self._output, self._processes, self._keys = given.output, given.processes, keys
        files = {"--output", "--begun", str(given.output), str(given.begun)}
        self._values = {
            "command": f"python -m {command} {shlex.join(word for word in sys.argv[1:] if word not in files)}",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware,
            "torch": torch.__version__,
            "python": platform.python_version(),  # the text is its library
            "what": what,
            "steps": given.steps,
        }
        begun = json.loads(given.begun.read_text(encoding="utf-8")) if given.begun is not None else {"rows": []}
        if begun["rows"] and any(
            begun[key] != value for key, value in self._values.items() if key not in ("command", "date")
        ):
            raise ValueError(f"{given.begun} was measured with other steps, hardware, torch or Python")
        self.rows: list[dict[str, Any]] = begun["rows"]

    def measure(self, run: Callable[[Any], dict[str, Any]], jobs: dict[tuple[Any, ...], Any]) -> list[dict[str, Any]]:
        """The rows of all jobs, in their order. Jobs are by the values of ``keys``; those that have a row are left
        out."""
        order, began = list(jobs), time.monotonic()
        missing = [job for key, job in jobs.items() if key not in map(self._key, self.rows)]
        self._write()
        with multiprocessing.get_context("spawn").Pool(self._processes) as pool:
            for number, row in enumerate(pool.imap_unordered(run, missing), start=1):
                self.rows.append(row)
                self.rows.sort(key=lambda one: order.index(self._key(one)) if self._key(one) in jobs else len(order))
                self._write()
                seconds, loss = time.monotonic() - began, row["held_out_loss"][-1]
                sys.stdout.write(f"{seconds:6.0f} s  {number} of {len(missing)}: {self._key(row)} loss {loss:.4f}\n")
                sys.stdout.flush()
        return [row for row in self.rows if self._key(row) in jobs]

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self._keys)

    def _write(self) -> None:
        if self._output is None:
            return
        text = json.dumps({**self._values, "rows": self.rows}, indent=1) + "\n"
        beside = self._output.with_suffix(".part")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._output)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file, written after each run")
    parser.add_argument("--begun", type=Path, help="such a file of a measurement that was cut off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--betas", default=",".join(map(str, BETAS)))
    add_arguments(parser)
    given = parser.parse_args()
    kinds, betas = given.kinds.split(","), [float(beta2) for beta2 in given.betas.split(",")]
    if "bitsandbytes" in kinds and importlib.util.find_spec("bitsandbytes") is None:
        kinds.remove("bitsandbytes")
    cases = [(kind, beta2, seed) for seed in range(given.seeds) for beta2 in betas for kind in kinds]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    what = "held-out loss, nats per byte, after each quarter of the steps"
    measurement = Measurement(given, "tests.measure_moments", device, what, ("moments", "beta2", "seed"))
    rows = measurement.measure(run, {case: (*case, given.steps) for case in cases})
    for beta2 in betas:
        for kind in kinds:
            last = [row["held_out_loss"][-1] for row in rows if (row["moments"], row["beta2"]) == (kind, beta2)]
            sys.stdout.write(f"{beta2:6} {kind:30} {sum(last) / len(last):.4f} ({min(last):.4f} - {max(last):.4f})\n")


if __name__ == "__main__":
    main()
