"""`lightstep bench --iteration`, `--small` and `--timeline`: whole training iterations; forward, backward and step."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightstep.bench.machine import read_timeline, write_timeline
from lightstep.bench.models import LOSS_CHUNK, Llama, LlamaShape, MoeShape, QwenMoe
from lightstep.bench.peers import CpuAdamW, DeepSpeedCpuAdam, Dion, DionTriton, Fsdp2Offload, TorchFsdp2, TorchResident
from lightstep.bench.report import BY_HAND, Column, Panel, Values, View, size
from lightstep.bench.run import (
    OPTIMIZERS,
    Contender,
    Measurement,
    Row,
    Run,
    Skipped,
    Spread,
    Task,
    add_rounds_by_hand,
    add_times_by_hand,
)
from lightstep.bench.strategies import WithoutOptimizer
from lightstep.sharding.preparation import checkpoint_activations


@dataclass(frozen=True)
class IterationTask(Task):
    """Iterations of `case` tokens per step and rank, a multiple of `sequence`.

    Work that a step defers counts in the next iteration if that has to wait for it. The first iteration of a round
    waits for the last one of the warm-up; what the last iteration defers is not counted.
    """

    shape: LlamaShape | MoeShape
    sequence: int
    clip_every: int = field(default=0, kw_only=True)
    """Clip every N-th step, whatever its norm; 0: none."""

    stem = "iteration"
    case_name = "tokens"
    default_peers = "none"
    peers: ClassVar[tuple[type[Contender], ...]] = (
        TorchResident,
        TorchFsdp2,
        CpuAdamW,
        Fsdp2Offload,
        DeepSpeedCpuAdam,
        Dion,
        DionTriton,
    )
    baseline: ClassVar[type[Contender] | None] = WithoutOptimizer

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "sharding.activation_checkpointing": True}

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        if ranks > 1:
            return ("fsdp2", "fsdp2-stream", "fsdp2-stream-overlap")
        return ("resident", "stream", "stream-overlap", "stream-overlap:optimizer_state.resident_gib=8")

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Llama | QwenMoe:
        return self.shape.make(self.device, dtype, self.seed, self.sequence)

    def model_for_peers(self, dtype: torch.dtype = torch.bfloat16) -> Llama | QwenMoe:
        model = self.model(dtype)
        checkpoint_activations(model)
        return model

    @property
    def tokens(self) -> int:
        """Of a step and rank."""
        return int(self.case)

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, (sequences, length) each; other ranks have others."""
        generator = torch.Generator().manual_seed(self.seed + 1 + rank)
        size = (self.tokens // self.sequence, self.sequence + 1)
        words = torch.randint(self.shape.vocabulary, size, generator=generator).to(self.device)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def measure(self, measurement: Measurement) -> None:
        """One round. One iteration more than the warm-up comes first, which makes the state.

        Raises:
            FloatingPointError: the loss is not finite: such steps are skipped, and their times would mean nothing.
        """
        contender, effort = measurement.contender, measurement.run.effort
        measurement.inputs = [self.batch(measurement.run.ranks.rank)]
        seen: list[Tensor | None] = []  # read after timing, so that no step waits for them
        limits: list[float] = []
        host: list[tuple[float, float, float]] = []

        def iterate(batch: Sequence[Tensor]) -> None:
            limits.append(self._limit(len(limits)))
            if self.clip_every or contender.kind == "peer":  # strategies have their own
                contender.set_max_norm(limits[-1])
            contender.iterate(batch)
            seen.append(contender.grad_norm)
            host.append(contender.host_ms)

        measurement.time(iterate, measurement.untimed, synchronize=False)
        measurement.row.host_ms += host[-effort.steps :]
        timed = list(zip(seen, limits, strict=True))[-effort.steps :]
        norms = [(float(norm), limit) for norm, limit in timed if norm is not None]
        loss = float(contender.loss)
        measurement.row.extra = {
            "loss": loss,
            "grad_norm": norms[-1][0] if norms else None,
            "clipped_steps": sum(norm > limit for norm, limit in norms) if norms else None,
            "redone_steps": contender.redone_steps,
        }
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}: its steps are skipped, so their times mean nothing")

    def _limit(self, step: int) -> float:
        """The norm to clip `step` to; a step that must be clipped gets one below any gradient's norm."""
        clipped = self.clip_every and step % self.clip_every == self.clip_every - 1
        return 1e-9 if clipped else self.max_norm

    def probe(self, measurement: Measurement) -> None:
        measurement.profile(measurement.contender.iterate)

    def head(self, run: Run) -> Values:
        how = {"attention": "sdpa", "activation_checkpointing": True, "loss_chunk_tokens": LOSS_CHUNK}
        return {
            "model": {**self.shape.values(), **how},
            "optimizer": {**OPTIMIZERS[self.optimizer], "max_norm": self.max_norm, "clip_every": self.clip_every},
            "sequence": self.sequence,
            "tokens_per_rank": run.cases,
            "iterations": run.effort.steps,
        }

    def figures(self, run: Run, row: Row) -> Values:
        """Times are means over all iterations; the slowest rank counts."""
        times = Spread.of(row.times, statistics.fmean, run.ranks)
        counts = [row.peak_bytes or 0, row.weight_bytes, row.host_bytes]
        peak, weights, host = (int(value) for value in run.ranks.maximum([float(count) for count in counts]))
        return {
            **times.values("iteration_ms"),
            "windows_ms": row.windows,
            "tokens_per_s": self.tokens * run.ranks.world_size / times.middle * 1e3,
            "peak_device_bytes": None if row.peak_bytes is None else peak,
            "peak_device_bytes_beyond_weights": None if row.peak_bytes is None else peak - weights,
            "weight_bytes": weights,
            "host_bytes": host,
            **row.host_waits(run.ranks),
            **row.extra,
        }

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        measured = [shown for shown in values if "iteration_ms" in shown]
        alone = next((shown for shown in measured if shown["kind"] == "baseline"), None)
        resident = next((shown["iteration_ms"] for shown in measured if shown["resident"]), None)
        for shown in measured:
            own = shown["iteration_ms"]
            shown["times_resident"] = None if resident is None else own / resident
            shown["exposed_ms"] = None if alone is None else own - alone["iteration_ms"]
            shown["ms_without_optimizer"] = own if alone is None else alone["iteration_ms"]
            # The chart's grey bar: memory without an optimizer.
            shown["device_bytes_without_optimizer"] = (alone or {}).get("peak_device_bytes") or shown["weight_bytes"]
        add_times_by_hand(run, values, "iteration_ms")


_HOST_TIMES = ("host_forward_ms", "host_backward_ms", "host_step_ms")


class SmallModel(NamedTuple):
    """``adapted``: the layers that get adapters, which alone are trained; none: all weights are."""

    shape: LlamaShape | MoeShape
    checkpointed: bool = False
    adapted: tuple[str, ...] = ()


_ADAPTED = ("q_proj", "k_proj", "v_proj")

SMALL_MODELS = {
    "dense": SmallModel(LlamaShape.nearest(390_000_000), checkpointed=True),
    "lora": SmallModel(LlamaShape.nearest(1_240_000_000, released=True), adapted=_ADAPTED),
    "moe": SmallModel(MoeShape.nearest(640_000_000, 12)),
}
SMALLEST_MODELS = {
    "dense": SmallModel(LlamaShape.nearest(300_000), checkpointed=True),
    "lora": SmallModel(LlamaShape.nearest(300_000), adapted=_ADAPTED),
    "moe": SmallModel(MoeShape.nearest(300_000)),
}
"""Of the same kinds, for a CPU."""


@dataclass(frozen=True)
class SmallModelTask(IterationTask):
    """Iterations of `tokens` of one small model, `case`, whose time is Python's as much as the device's."""

    tokens: int = field(default=0, kw_only=True)  # the case is the model
    small: SmallModel = field(kw_only=True)

    stem = "small"
    case_name = "model"
    default_peers = "torch"
    peers = (TorchResident,)
    has_loop_by_hand = True
    keeps_contenders = True

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "sharding.activation_checkpointing": self.small.checkpointed}

    def default_strategies(self, ranks: int) -> tuple[str, ...]:
        return ("resident", "stream-overlap")

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Llama | QwenMoe:
        model = super().model(dtype)
        return _with_adapters(model, self.small.adapted) if self.small.adapted else model

    def model_for_peers(self, dtype: torch.dtype = torch.bfloat16) -> Llama | QwenMoe:
        return super().model_for_peers(dtype) if self.small.checkpointed else self.model(dtype)

    def figures(self, run: Run, row: Row) -> Values:
        means = [statistics.fmean(times) for times in zip(*row.host_ms, strict=True)]
        return {**super().figures(run, row), **dict(zip(_HOST_TIMES, means, strict=True))}

    def head(self, run: Run) -> Values:
        models = {task.case: task.describe() for task in run.tasks if isinstance(task, SmallModelTask)}
        return {**super().head(run), "model": models, "tokens_per_rank": self.tokens}

    def compare(self, run: Run, rows: Sequence[Row], values: Sequence[Values]) -> None:
        super().compare(run, rows, values)
        add_rounds_by_hand(rows, values)

    def describe(self) -> Values:
        """For the JSON file."""
        how = {"activation_checkpointing": self.small.checkpointed, "adapted": list(self.small.adapted)}
        return {**self.shape.values(), "attention": "sdpa", "loss_chunk_tokens": LOSS_CHUNK, **how}


def small_models(device: torch.device, seed: int, sequence: int, tokens: int, **settings: Any) -> list[SmallModelTask]:
    """A task for each small model; on a CPU those are tiny."""
    models = SMALL_MODELS if device.type == "cuda" else SMALLEST_MODELS
    how: dict[str, Any] = {**settings, "tokens": tokens}
    return [
        SmallModelTask(device, seed, model.shape, sequence, case=name, small=model, **how)
        for name, model in models.items()
    ]


def _with_adapters(model: Any, layers: Sequence[str]) -> Any:
    """LoRA's adapters of rank 16, in the weights' dtype. The weights are frozen.

    Raises:
        Skipped: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise Skipped("needs PEFT: pip install peft") from None
    return inject_adapter_in_model(LoraConfig(r=16, target_modules=list(layers)), model)


@dataclass(frozen=True)
class TimelineTask(IterationTask):
    """Writes a Chrome trace of each contender's iterations to `folder`, on the first rank only."""

    folder: Path

    stem = "timeline"
    baseline = None
    view = None

    def measure(self, measurement: Measurement) -> None:
        contender, effort, entry = measurement.contender, measurement.run.effort, measurement.row.entry
        iterate = partial(contender.iterate, self.batch(measurement.run.ranks.rank))
        for _ in range(1 + effort.warmup):
            iterate()
        if measurement.run.ranks.is_main:
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(entry.name).name if "/" in entry.name else entry.name)
            file = self.folder / f"{name}-{self.case}-timeline.json"
            write_timeline(iterate, effort.steps, file)
            said = read_timeline(json.loads(file.read_text())["traceEvents"])
            measurement.row.extra = {
                "said": [f"{file} written", *(f"{entry.label}, {self.case} tokens: {each}" for each in said)]
            }
        else:
            for _ in range(effort.steps + 1):
                iterate()
        contender.finish()

    def probe(self, measurement: Measurement) -> None:
        return


def token_counts(text: str, sequence: int) -> tuple[int, ...]:
    """Parse `--tokens`: multiples of `sequence`, ascending, without duplicates.

    Raises:
        ValueError: no numbers, or no multiples of `sequence`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"--tokens {text}: whole numbers separated by commas are needed, for example 65536,16384")
    for tokens in map(int, parts):
        if tokens < 1 or tokens % sequence:
            raise ValueError(f"--tokens {tokens}: a multiple of --sequence {sequence} is needed; change one of the two")
    return tuple(sorted(set(map(int, parts))))


# -- how it is shown --------------------------------------------------------------------------------------------------


def _title(values: Values, tokens: Any) -> str:
    model = values["model"]
    ranks = f" on each of {values['ranks']} ranks (the slowest counts)" if values["ranks"] > 1 else ""
    what = f"{size(model['parameters'])} parameters ({model['name']}), {values['hardware']['device']}"
    return f"One iteration of {tokens} tokens{ranks}: {what}"


def _footnotes(values: Values) -> list[str]:
    base = "resident" if values["ranks"] == 1 else "fsdp2"
    return [
        f"Mean of back-to-back iterations. Exposed: time beyond forward and backward of {base}. Peak: device memory of",
        "one rank during an iteration. Host waits: in one iteration, including the model's own.",
    ]


IterationTask.view = View(
    key="iteration_ms",
    columns=(
        Column("iteration\nms", "iteration_ms", priority=9),
        Column("from – to\nms", "iteration_ms_range", priority=8),
        Column("×\nresident", "times_resident", ".3f", 6),
        BY_HAND,
        Column("exposed\nms", "exposed_ms", priority=5),
        Column("tokens/s", "tokens_per_s", ".0f", 1),
        Column("peak\nGB", "peak_device_bytes", ".2f", 7, unit=1e9),
        Column("beyond\nweights\nGB", "peak_device_bytes_beyond_weights", ".2f", 2, unit=1e9),
        Column("host\nGB", "host_bytes", priority=4, unit=1e9),
        Column("host\nwaits", "host_syncs", ".0f", 3),
    ),
    panels=(
        Panel(
            "ms per iteration",
            "iteration_ms",
            base="ms_without_optimizer",
            base_label="forward and backward alone",
            spread="iteration_ms_range",
        ),
        Panel(
            "peak device memory, GB",
            "peak_device_bytes",
            base="device_bytes_without_optimizer",
            base_label="forward and backward alone",
            unit=1e9,
        ),
    ),
    title=_title,
    footnotes=_footnotes,
    case="tokens",
)


def _small_title(values: Values, case: Any) -> str:
    model = values["model"][case]
    what = "adapters of " if model["adapted"] else ""
    device = values["hardware"]["device"]
    return (
        f"{case}: one iteration of {values['tokens_per_rank']} tokens, {what}{size(model['parameters'])} parameters "
        f"({model['name']}), {device}"
    )


_BY_HAND = IterationTask.view.columns.index(BY_HAND) + 1
SmallModelTask.view = replace(
    IterationTask.view,
    columns=(
        *IterationTask.view.columns[:_BY_HAND],
        Column("from – to\n×", "times_by_hand_range", ".3f", 7, optional=True),
        *(Column(f"host\n{key.split('_')[1]}\nms", key, priority=3, optional=True) for key in _HOST_TIMES),
        *IterationTask.view.columns[_BY_HAND:],
    ),
    title=_small_title,
    case="model",
)
