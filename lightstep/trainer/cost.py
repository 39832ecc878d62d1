"""What a strategy holds per parameter between steps: weights, masters, AdamW's moments. Gradients come on top."""

from __future__ import annotations

from dataclasses import dataclass

from lightstep.config import DeepSpeedSharding, FSDP2Sharding, StrategyConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MOMENTS = 8
_MASTER = 4
_SPLIT_MASTER = 2
"""The low half of a master whose high half is the bf16 weight; `stream` moves and keeps only that."""


@dataclass(frozen=True)
class Cost:
    """Bytes per parameter, and over how many processes they are divided."""

    device: float
    """The same on every rank."""
    host: float
    device_shared: float = 0.0
    """Divided by the number of ranks (of shards, for HSDP)."""
    host_shared: float = 0.0

    def text(self, place: str) -> str:
        """``14``, ``2 + 12/ranks``, ..."""
        own, shared = getattr(self, place), getattr(self, f"{place}_shared")
        parts = ([f"{own:g}"] if own or not shared else []) + ([f"{shared:g}/ranks"] if shared else [])
        return " + ".join(parts)


def cost(config: StrategyConfig) -> Cost:
    """Per parameter with AdamW."""
    weights, state = _BYTES[config.precision.parameters], _state_bytes(config)
    on_host = config.optimizer_state.backend != "resident"
    sharding = config.sharding
    if isinstance(sharding, DeepSpeedSharding):
        on_host = sharding.offload == "cpu"
        own, shared = (0, weights) if sharding.stage == 3 else (weights, 0)
        return Cost(own, 0, shared + (0 if on_host else state), state if on_host else 0)
    device, host = weights + (0 if on_host else state), state if on_host else 0
    return Cost(0, 0, device, host) if isinstance(sharding, FSDP2Sharding) else Cost(device, host)


def _state_bytes(config: StrategyConfig) -> int:
    precision, backend = config.precision, config.optimizer_state.backend
    if precision.parameters == "float32" or not precision.master_weights:
        return _MOMENTS
    split = backend == "stream" and precision.parameters == "bfloat16"
    return _MOMENTS + (_SPLIT_MASTER if split else _MASTER)
