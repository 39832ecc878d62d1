"""Plans of runs over several nodes that others have published: ``python -m tests.published_runs`` prints the table of
docs/plan.md. The strategies are ours with the same sharding and precision."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from lightstep.config import StrategyConfig, merge_overrides, parse_config
from lightstep.plan.model import from_values
from lightstep.plan.planning import Plan, Planner, Workload
from lightstep.plan.timing import PROFILES, Network
from lightstep.presets import read_source

FOUNDRY = (
    "llm-foundry",
    "https://github.com/mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/benchmarking/README.md",
)
TITAN = (
    "torchtitan",
    "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
)
FORGE = (
    "KempnerForge",
    "https://github.com/KempnerInstitute/KempnerForge/blob/5666d0d161539998210f99f16f986b1ab76cbffe/benchmarks/mfu_scaling/mfu_scaling.md",
)


def _llama(width: int, hidden: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
    }


def _mpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """As a GPT-NeoX of the same sizes: transformers' MPT does not run on the meta device."""
    return {
        "model_type": "gpt_neox",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50_368,
        "tie_word_embeddings": True,
    }


MODELS = {
    "MPT-7B": _mpt(4096, 32, 32),
    "MPT-13B": _mpt(5120, 40, 40),
    "MPT-30B": _mpt(7168, 48, 64),
    "MPT-70B": _mpt(8192, 80, 64),
    "Llama-2-13B": _llama(5120, 13_824, 40, 40, 40, 32_000),
    "Llama-2-70B": _llama(8192, 28_672, 80, 64, 8, 32_000),
    "Llama-3-70B": _llama(8192, 28_672, 80, 64, 8, 128_256),
    "Llama, 14.8B": _llama(5120, 17_920, 40, 40, 8, 128_256),
}


@dataclass(frozen=True)
class Published:
    """One run.

    Attributes:
        source: name and address.
        network: GB/s each way per GPU, and whether the source says so.
        batch: sequences per micro-batch on each GPU, and micro-batches per step.
        rate: tokens/s of each GPU.
    """

    source: tuple[str, str]
    gpu: str
    model: str
    gpus: int
    per_node: int
    network: tuple[float, bool]
    sequence: int
    batch: tuple[int, int]
    checkpointed: bool
    strategy: str
    rate: float

    def plan(self) -> Plan:
        batch, micro_batches = self.batch
        work = Workload(batch * self.sequence, self.sequence, micro_batches, self.checkpointed)
        network = Network(self.per_node, self.network[0]) if self.gpus > self.per_node else None
        planner = Planner(_model(self.model), work, PROFILES[self.gpu], self.gpus, network=network)
        return planner.plan(self.strategy, _config(self.strategy))

    def planned_rate(self) -> float:
        """Tokens/s of each GPU."""
        made = self.plan()
        assert made.time is not None
        return self.sequence * self.batch[0] * self.batch[1] / made.time.iteration * 1e3


@cache
def _model(name: str) -> nn.Module:
    return from_values(MODELS[name], torch.bfloat16)


def _config(label: str) -> StrategyConfig:
    """``fsdp2``, or ``fsdp2 reduce=parameters``."""
    name, *more = label.split()
    values = parse_config(read_source(name)[1], name).model_dump()
    return parse_config(merge_overrides(values, {"precision.reduce": "parameters"} if more else {}), label)


_FP32, _PURE = "fsdp2-fp32", "fsdp2 reduce=parameters"
_IB, _ROCE = (50.0, False), (25.0, True)
RUNS = [
    Published(FOUNDRY, "H100", "MPT-13B", 8, 8, _IB, 2048, (2, 1), False, _FP32, 4792),
    Published(FOUNDRY, "H100", "MPT-13B", 16, 8, _IB, 2048, (2, 1), False, _FP32, 4767),
    Published(FOUNDRY, "H100", "MPT-13B", 32, 8, _IB, 2048, (2, 1), False, _FP32, 4811),
    Published(FOUNDRY, "H100", "MPT-13B", 64, 8, _IB, 2048, (2, 1), False, _FP32, 4800),
    Published(FOUNDRY, "H100", "MPT-30B", 32, 8, _IB, 2048, (14, 3), True, _FP32, 2308),
    Published(FOUNDRY, "H100", "MPT-70B", 64, 8, _IB, 2048, (8, 4), True, _FP32, 1039),
    Published(FORGE, "H200", "Llama, 14.8B", 8, 4, _IB, 4096, (4, 4), True, _FP32, 35_405 / 8),
    Published(TITAN, "A100", "Llama-2-13B", 64, 8, (25.0, False), 4096, (2, 1), False, _FP32, 2162),
    Published(TITAN, "A100", "Llama-2-70B", 64, 8, (25.0, False), 4096, (2, 1), True, _FP32, 353),
    Published(TITAN, "A100", "Llama-3-70B", 64, 8, (25.0, False), 8192, (1, 1), True, _FP32, 331),
    Published(FOUNDRY, "A100", "MPT-70B", 32, 8, _ROCE, 2048, (2, 16), True, _PURE, 373),
    Published(FOUNDRY, "A100", "MPT-70B", 64, 8, _ROCE, 2048, (8, 4), True, _PURE, 410),
    Published(FOUNDRY, "A100", "MPT-30B", 128, 8, _ROCE, 2048, (6, 1), True, _PURE, 865),
    Published(FOUNDRY, "A100", "MPT-13B", 16, 8, _ROCE, 2048, (10, 1), True, _PURE, 1993),
    Published(FOUNDRY, "A100", "MPT-13B", 128, 8, _ROCE, 2048, (16, 1), True, _PURE, 1972),
    Published(FOUNDRY, "A100", "MPT-7B", 128, 8, _ROCE, 2048, (18, 1), True, _PURE, 3623),
]


def row_of(run: Published) -> str:
    planned = run.planned_rate()
    batch = f"{run.batch[1]} × " if run.batch[1] > 1 else ""
    tokens = f"{batch}{run.sequence * run.batch[0]:,}"
    recomputed = ", recomputed" if run.checkpointed else ""
    return (
        f"| [{run.source[0]}] | {run.gpus} × {run.gpu} | {run.model}{recomputed} | {tokens} | {run.rate:,.0f} "
        f"| {planned:,.0f} | {100 * (planned / run.rate - 1):+.0f} % |"
    )


def as_markdown() -> str:
    lines = [
        "| source | GPUs | model | tokens per GPU and step | tokens/s per GPU: published | planned | off by |",
        "|---|---|---|---|---|---|---|",
        *map(row_of, RUNS),
    ]
    sources = [f"[{name}]: {address}" for name, address in dict.fromkeys(run.source for run in RUNS)]
    return "\n".join([*lines, "", *sources]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
