"""What a configuration says about an optimizer, as arguments and parts of :class:`MixedPrecisionOptimizer`."""

from __future__ import annotations

from typing import Any

from lightstep.config import ConstantScale, DynamicScale, LossScaleConfig, OptimizerState, StrategyConfig
from lightstep.distributed import Replicas
from lightstep.optimizer.in_backward import IN_BACKWARD
from lightstep.optimizer.moments import Moments
from lightstep.optimizer.overlap import OVERLAP
from lightstep.optimizer.queue import AT_STEP, NEXT_FORWARD, UpdateTime
from lightstep.precision.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightstep.precision.split import Splitter
from lightstep.state.store import Store

__all__ = ["settings_of", "store_of", "update_time_of"]

_UPDATE_TIMES = {time.name: time for time in (AT_STEP, NEXT_FORWARD, IN_BACKWARD, OVERLAP)}


def settings_of(config: StrategyConfig) -> dict[str, Any]:
    """Keyword arguments for one optimizer, with a loss scale of its own; the update time is the strategy's choice."""
    precision, clipping, state = config.precision, config.clipping, config.optimizer_state
    return {
        "master_weights": precision.master_weights,
        "reduce_float32": precision.reduce == "float32",
        "loss_scale": _loss_scale_of(precision.loss_scale),
        "max_norm": clipping.max_norm,
        "norm_type": clipping.norm_type,
        "clip_layers": clipping.scope == "unit",
        "moments": Moments(state.moments, state.moments_rounding),
        "rounding_seed": precision.rounding_seed,
    }


def update_time_of(config: OptimizerState) -> UpdateTime:
    """That of ``optimizer_state.update``."""
    return _UPDATE_TIMES[config.update]


def store_of(config: OptimizerState, replicas: Replicas | None, weights_on_host: bool = False) -> Store:
    """A new store for one optimizer.

    Args:
        replicas: the ranks that hold the same part of the model and share the updates.
        weights_on_host: the device has no room for all weights, and none for all previous weights.
    """
    if config.backend == "resident":
        return Store(Splitter, home="device")
    moves = weights_on_host and config.previous_weights == "auto"
    on_host: dict[str, Any] = {
        "spare_host_gib": config.spare_host_gib,
        "previous_weights": "host" if moves else config.previous_weights,
        "beside_compute": config.update != "at_step",
    }
    if config.backend == "bulk":
        return Store(Splitter, slots="all", **on_host)
    return Store(
        Splitter,
        prefetch_layers=config.prefetch_layers,
        ring_mib=config.ring_mib,
        resident_gib=config.resident_gib,
        replicas=replicas,
        **on_host,
    )


def _loss_scale_of(config: LossScaleConfig) -> LossScale:
    if isinstance(config, DynamicScale):
        return DynamicLossScale(**config.model_dump(exclude={"kind"}))
    return ConstantLossScale(config.scale if isinstance(config, ConstantScale) else 1.0)
