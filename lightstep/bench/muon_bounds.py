"""Lower bounds for a Muon step: Newton-Schulz's products, the bytes over the link, the bytes between ranks.

Rows that orthogonalize each matrix once are compared with a bound that combines these, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightstep.bench.llama import LlamaShape
from lightstep.bench.ranks import Ranks
from lightstep.bench.report import Column, Values, size
from lightstep.plan.measure import lap_times

if TYPE_CHECKING:
    from lightstep.bench.run import Run

NS_STEPS = 5  # torch's default
_EXCHANGED_BYTES = 64 << 20
_SAMPLES = 5

COLUMNS = (
    Column("×\nby hand", "times_by_hand", ".3f", 8, optional=True),
    Column("bound\nms", "bound_ms", ".1f", 7, optional=True),
    Column("×\nbound", "times_bound", ".3f", 8, optional=True),
    Column("Newton–\nSchulz\nTFLOP/s", "newton_schulz_tflops", ".1f", 2, optional=True),
)


def newton_schulz_tflop(shape: LlamaShape) -> float:
    """TFLOP of one step. Each iteration computes A = X Xᵀ, A² and a product with X, for X [short, long]."""
    pairs = [(min(matrix), max(matrix)) for matrix in shape.matrices]
    return NS_STEPS * sum(4 * short**2 * long + 2 * short**3 for short, long in pairs) / 1e12


def exchanged_gb(shape: LlamaShape, ranks: int) -> float:
    """GB that one rank sends in a step: bf16 rows to the owners of matrices, and updated rows back."""
    elements = sum(rows * columns for rows, columns in shape.matrices)
    return 2 * 2 * elements * (ranks - 1) / ranks**2 / 1e9


def measure_exchange(device: torch.device, ranks: Ranks, nbytes: int = _EXCHANGED_BYTES) -> float | None:
    """GB/s that a rank sends to all others together in an all-to-all; None on one rank."""
    if ranks.world_size == 1:
        return None
    ranks.ensure_group()
    sent = torch.zeros(nbytes // ranks.world_size * ranks.world_size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    times = [_exchange_ms(sent, received, ranks) for _ in range(_SAMPLES + 1)]
    milliseconds = ranks.maximum([statistics.median(times[1:])])[0]  # the first one opens the connections
    return sent.numel() * (ranks.world_size - 1) / ranks.world_size / milliseconds / 1e6


def _exchange_ms(sent: torch.Tensor, received: torch.Tensor, ranks: Ranks) -> float:
    ranks.barrier()
    return lap_times([partial(dist.all_to_all_single, received, sent)], sent.device)[0]


def head(run: Run, shape: LlamaShape) -> Values:
    """The JSON values that belong to the whole run; none without Muon."""
    if run.task.optimizer != "muon":
        return {}
    hidden, ranks = sum(rows * columns for rows, columns in shape.matrices), run.ranks.world_size
    return {
        "newton_schulz_tflop": newton_schulz_tflop(shape),
        "muon_matrices": len(shape.matrices),
        "muon_parameters": hidden,
        "link_bytes_per_parameter": (6 * hidden + 10 * (shape.parameters - hidden)) / shape.parameters,
        "exchanged_gb": exchanged_gb(shape, ranks) if ranks > 1 else None,
        "exchange_gb_per_s": run.exchange,
    }


def add_bounds(run: Run, shape: LlamaShape, values: Sequence[Values], key: str) -> None:
    """Compare the rows with the loop by hand and, for single steps, with the lower bound.

    One rank: the larger of the arithmetic (`resident`) and the bytes that crossed the link. Several: one rank's
    arithmetic for the whole model (`torch`) divided among them, and the all-to-all, or the link where that is longer.
    """
    if run.task.optimizer != "muon":
        return
    times = {shown["name"]: shown[key] for shown in values if key in shown}
    ranks = run.ranks.world_size
    by_hand = times.get("torch" if ranks == 1 else "torch-fsdp2")
    for shown in (shown for shown in values if key in shown):
        shown["times_by_hand"] = None if by_hand is None else shown[key] / by_hand
        if key != "step_ms":
            continue
        sharded = ranks == 1 or shown["parameters_per_rank"] < shape.parameters
        shares = sharded and shown["name"] != "torch-fsdp2"  # orthogonalizes every matrix on every rank
        shown["newton_schulz_tflops"] = newton_schulz_tflop(shape) / (ranks if shares else 1) / shown[key] * 1e3
        bound = _bound(run, shape, shown, times) if shares else None
        if bound is not None:
            shown["bound_ms"], shown["times_bound"] = bound, shown[key] / bound


def _bound(run: Run, shape: LlamaShape, shown: Values, times: dict[str, float]) -> float | None:
    ranks = run.ranks.world_size
    moved = max(shown.get("gb_to_device") or 0.0, shown.get("gb_to_host") or 0.0)
    link = moved / run.link.duplex * 1e3 if run.link is not None else 0.0
    if ranks == 1:
        return max(times["resident"], link) if "resident" in times and moved else None
    if "torch" not in times or not run.exchange:
        return None
    return max(times["torch"] / ranks + exchanged_gb(shape, ranks) / run.exchange * 1e3, link)


def sentences(values: Values) -> list[str]:
    """The footnotes for Muon."""
    if "newton_schulz_tflop" not in values:
        return []
    ranks = values["ranks"]
    said = [
        f"Muon on {values['muon_matrices']} hidden matrices of {size(values['muon_parameters'])} parameters: "
        f"{values['newton_schulz_tflop']:.3g} TFLOP of Newton–Schulz a step; streamed, "
        f"{values['link_bytes_per_parameter']:.2f} bytes per parameter of the model each way."
    ]
    if ranks == 1:
        return [
            *said,
            "Bound: the larger of resident's time and the bytes that crossed the link, at its rate both ways.",
        ]
    return [
        *said,
        f"Bound: torch's time for the whole model on one rank, divided by {ranks}, and {values['exchanged_gb']:.3g} GB "
        f"between the ranks at {values['exchange_gb_per_s']:.1f} GB/s; the link's time where that is longer.",
    ]
