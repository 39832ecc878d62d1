"""Bytes per parameter of a strategy: weights, gradients, and state with master weights."""

from __future__ import annotations

from dataclasses import dataclass

from lightstep.config import DDPSharding, DeepSpeedSharding, FSDP2Sharding, SingleSharding, StrategyConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MASTER = 4
SPLIT_MASTER = 2
"""The low half of a master whose high half is the bf16 weight. `bulk` keeps whole masters, and `resident` those of
optimizers without a kernel that joins them."""


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter on each rank."""

    count: float
    divided_by: str = ""
    """``ranks`` or ``shards``; empty if every rank holds everything."""

    def __str__(self) -> str:
        return f"{self.count:g}/{self.divided_by}" if self.count and self.divided_by else f"{self.count:g}"


@dataclass(frozen=True)
class StateBytes:
    """Bytes of an optimizer's state per parameter, without masters: the mean over a model's parameters.

    Attributes:
        full: with fp32 moments.
        short: with ``optimizer_state.moments: bfloat16``.
        bitmap: what a split master needs in addition if no entry has unused sign bits.
        resident_master: of a master that `resident` keeps on a GPU for a bf16 weight.
        is_adam: all classes are Adam or AdamW, for whose arithmetic profiles have a time.
    """

    full: float
    short: float
    bitmap: float = 0
    resident_master: float = SPLIT_MASTER
    is_adam: bool = True


ADAMW = StateBytes(8, 4)


@dataclass(frozen=True)
class Cost:
    """Memory between steps and of gradients, without activations and the step's buffers."""

    weights: Bytes
    gradients: Bytes
    """From backward to the step, without accumulation."""
    device_state: Bytes
    """Between steps, including master weights."""
    host_state: Bytes


def cost(config: StrategyConfig, optimizer: StateBytes = ADAMW, on_cpu: bool = False) -> Cost:
    """Bytes per parameter, on a GPU unless ``on_cpu``, where ``resident`` keeps whole masters."""
    sharding = config.sharding
    if isinstance(sharding, DeepSpeedSharding):
        on_host = sharding.offload == "cpu"
    else:
        on_host = config.optimizer_state.backend != "resident"
    weights, gradients, divided_by = _divisors(config)
    state, none = Bytes(_state_bytes(config, optimizer, on_cpu), divided_by), Bytes(0)
    return Cost(
        Bytes(_BYTES[config.precision.parameters], weights),
        Bytes(_gradient_bytes(config), gradients),
        none if on_host else state,
        state if on_host else none,
    )


def _divisors(config: StrategyConfig) -> tuple[str, str, str]:
    """What weights, gradients and state are divided by."""
    sharding = config.sharding
    if isinstance(sharding, DeepSpeedSharding):
        return "ranks" if sharding.stage == 3 else "", "ranks" if sharding.stage > 1 else "", "ranks"
    held = ""
    if isinstance(sharding, FSDP2Sharding):
        held = "ranks" if sharding.mesh.replicate == 1 else "shards"
    shared = not isinstance(sharding, SingleSharding) and config.optimizer_state.backend == "stream"
    return held, held, "ranks" if shared else held


def _gradient_bytes(config: StrategyConfig) -> int:
    own = _BYTES[config.precision.parameters]
    if own == 4 or config.precision.reduce == "parameters" or isinstance(config.sharding, SingleSharding):
        return own
    # DDP keeps its buckets as well as the fp32 gradients. FSDP2 keeps only the fp32 gradients.
    return own + 4 if isinstance(config.sharding, DDPSharding) else 4


def _state_bytes(config: StrategyConfig, optimizer: StateBytes, on_cpu: bool) -> float:
    precision, backend = config.precision, config.optimizer_state.backend
    entries = optimizer.short if config.optimizer_state.moments == "bfloat16" else optimizer.full
    if isinstance(config.sharding, DeepSpeedSharding):
        return entries + MASTER  # DeepSpeed keeps masters even for fp32 weights
    if precision.parameters == "float32" or not precision.master_weights:
        return entries
    if precision.parameters == "float16" or backend == "bulk" or (backend == "resident" and on_cpu):
        return entries + MASTER
    return entries + (optimizer.resident_master if backend == "resident" else SPLIT_MASTER + optimizer.bitmap)
