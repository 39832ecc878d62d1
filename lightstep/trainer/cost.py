"""What a strategy takes per parameter with AdamW: weights, gradients, and the state with its master weights."""

from __future__ import annotations

from dataclasses import dataclass

from lightstep.config import DDPSharding, DeepSpeedSharding, FSDP2Sharding, SingleSharding, StrategyConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOMENTS = 8
_MASTER = 4
_SPLIT_MASTER = 2
"""The low half of a master whose high half is the bf16 weight; `stream` moves and keeps only that."""


@dataclass(frozen=True)
class Bytes:
    """Per parameter, on every rank."""

    count: float
    divided_by: str = ""
    """``ranks`` or ``shards``; empty: every rank has all of it."""

    def __str__(self) -> str:
        return f"{self.count:g}/{self.divided_by}" if self.count and self.divided_by else f"{self.count:g}"


@dataclass(frozen=True)
class Cost:
    """All but the activations, and what a step moves through the device."""

    weights: Bytes
    gradients: Bytes
    """From backward to the step, without accumulation."""
    device_state: Bytes
    """Between steps; master weights included."""
    host_state: Bytes


def cost(config: StrategyConfig) -> Cost:
    """Per parameter with AdamW."""
    if isinstance(config.sharding, DeepSpeedSharding):
        return _of_deepspeed(config, config.sharding)
    weights, gradients, state = _divisors(config)
    on_host = config.optimizer_state.backend != "resident"
    held = _state_bytes(config)
    return Cost(
        Bytes(_BYTES[config.precision.parameters], weights),
        Bytes(_gradient_bytes(config), gradients),
        Bytes(0 if on_host else held, state),
        Bytes(held if on_host else 0, state),
    )


def _of_deepspeed(config: StrategyConfig, sharding: DeepSpeedSharding) -> Cost:
    """fp32 weights have masters beside them there too."""
    own, summed = _BYTES[config.precision.parameters], _gradient_bytes(config)
    stage, on_host = sharding.stage, sharding.offload == "cpu"
    state = Bytes(_MOMENTS + _MASTER, "ranks")
    return Cost(
        Bytes(own, "ranks" if stage == 3 else ""),
        Bytes(summed, "ranks" if stage > 1 else ""),
        Bytes(0) if on_host else state,
        state if on_host else Bytes(0),
    )


def _divisors(config: StrategyConfig) -> tuple[str, str, str]:
    """What divides weights, gradients and state."""
    sharding = config.sharding
    held = ""
    if isinstance(sharding, FSDP2Sharding):
        held = "ranks" if sharding.mesh.replicate == 1 else "shards"
    shared = not isinstance(sharding, SingleSharding) and config.optimizer_state.backend == "stream"
    return held, held, "ranks" if shared else held


def _gradient_bytes(config: StrategyConfig) -> int:
    own = _BYTES[config.precision.parameters]
    if own == 4 or config.precision.reduce == "parameters":
        return own
    if isinstance(config.sharding, DeepSpeedSharding):
        return 4
    if isinstance(config.sharding, FSDP2Sharding):
        return 4  # the reduction's fp32 result takes the place of what FSDP2 would round it to
    return own + 4 if isinstance(config.sharding, DDPSharding) else own  # DDP keeps its buckets beside it


def _state_bytes(config: StrategyConfig) -> int:
    precision, backend = config.precision, config.optimizer_state.backend
    if precision.parameters == "float32" or not precision.master_weights:
        return _MOMENTS
    split = backend == "stream" and precision.parameters == "bfloat16"
    return _MOMENTS + (_SPLIT_MASTER if split else _MASTER)
