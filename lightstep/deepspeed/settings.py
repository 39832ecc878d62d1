"""Translating a strategy's configuration to DeepSpeed's, and refusing what DeepSpeed cannot do.

This needs no DeepSpeed: a strategy is checked when it is loaded, even if DeepSpeed is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lightstep.config import (
    ConfigError,
    ConstantScale,
    DeepSpeedSharding,
    DynamicScale,
    OptimizerState,
    StrategyConfig,
)

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_AUTO = "auto"
"""In DeepSpeed files for transformers' Trainer: the value comes from the Trainer's arguments."""

_DECIDED_ELSEWHERE = {
    "optimizer": "the optimizer comes from strategy.create_optimizer",
    "scheduler": "schedulers are the caller's: build one over the optimizer, and step it when step() was applied",
    "amp": "precision comes from precision.parameters",
    "torch_autocast": "precision comes from precision.parameters",
}
"""Sections of DeepSpeed's configuration that must be off, with the reason."""

_OTHER_OPTIMIZER = (
    "lightstep supports only ZeRO's own offloading (sharding.offload: cpu), which uses your optimizer class"
)
_UNSUPPORTED = {
    "zenflow": _OTHER_OPTIMIZER,
    "offload_optimizer.super_offload": _OTHER_OPTIMIZER,
    "round_robin_gradients": "with it DeepSpeed takes the masters and moments of one parameter for another's",
}
"""Keys below ``zero_optimization`` that must be off, with the reason."""


def deepspeed_config(config: StrategyConfig, name: str) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``: the strategy's, and what ``sharding.config`` adds.

    Args:
        name: the strategy's name, for messages.

    Raises:
        ConfigError: DeepSpeed cannot do what the strategy says, or ``sharding.config`` contradicts the strategy.
    """
    _refuse_unsupported(config, name)
    needed = _strategy_settings(config)
    given = cast(DeepSpeedSharding, config.sharding).own_config(name)
    refuse_contradictions(needed, given, f"{name}: sharding.config contradicts the strategy")
    if given.get("train_batch_size", _AUTO) != _AUTO:  # DeepSpeed computes the micro-batch size from it
        del needed["train_micro_batch_size_per_gpu"]
    return _merge(needed, {key: value for key, value in given.items() if key not in _DECIDED_ELSEWHERE})


def refuse_contradictions(needed: Mapping[str, Any], given: Mapping[str, Any], what: str) -> None:
    """Raise if a DeepSpeed configuration contradicts the strategy.

    Args:
        needed: the strategy's settings in DeepSpeed's format.
        given: the user's or an engine's. Keys that are missing or ``auto`` contradict nothing.
        what: the beginning of the message.

    Raises:
        ConfigError: the message has every contradicting key with both values.
    """
    found = [
        f"{key} is {given[key]!r}, but {reason}"
        for key, reason in _DECIDED_ELSEWHERE.items()
        if _is_enabled(given.get(key))
    ]
    for key, reason in _UNSUPPORTED.items():
        value = given.get("zero_optimization")
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, False, _AUTO):
            found.append(f"zero_optimization.{key} is {value!r}, and {reason}")
    found += [
        f"{key} is {value!r}, and the strategy needs {expected!r}{_strategy_key(key)}"
        for key, expected, value in _differences(needed, given)
    ]
    if found:
        raise ConfigError(f"{what}: {'; '.join(found)}. Leave these keys out, write auto, or change the strategy")


def _is_enabled(section: Any) -> bool:
    return bool(section) and not (isinstance(section, Mapping) and section.get("enabled") is False)


def engine_settings(engine: Any) -> dict[str, Any]:
    """The part of an engine's configuration, with its defaults, that a strategy determines."""
    fp16: dict[str, Any] = {"enabled": engine.fp16_enabled()}
    if fp16["enabled"]:
        scale = engine.dynamic_loss_scale_args()
        fp16["loss_scale"] = engine.loss_scale()
        fp16 |= {
            "initial_scale_power": math.log2(scale["init_scale"]),
            "loss_scale_window": scale["scale_window"],
            "hysteresis": scale["delayed_shift"],
            "min_loss_scale": scale["min_scale"],
        }
    zero: dict[str, Any] = {"stage": int(engine.zero_optimization_stage())}
    for key, section in (
        ("offload_optimizer", engine.zero_offload_optimizer()),
        ("offload_param", engine.zero_offload_param()),
    ):
        zero[key] = {"device": "none" if section is None else section.device.value}
    zero["offload_optimizer"]["super_offload"] = bool(engine.super_offload())
    zero |= {"zenflow": engine.zenflow_config(), "round_robin_gradients": engine.zero_round_robin_gradients()}
    return {
        "gradient_clipping": float(engine.gradient_clipping()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "bf16": {"enabled": engine.bfloat16_enabled()},
        "fp16": fp16,
        "communication_data_type": _SHORT[str(engine.communication_data_type).removeprefix("torch.")],
        "data_types": {"grad_accum_dtype": _SHORT[str(engine.get_data_types()[1]).removeprefix("torch.")]},
        "zero_optimization": zero,
    }


# -- what DeepSpeed cannot do ------------------------------------------------------------------------------------------


def _refuse_unsupported(config: StrategyConfig, name: str) -> None:
    found = [*_unsupported_state(config), *_unsupported_clipping(config), *_unsupported_precision(config)]
    if found:
        raise ConfigError(f"{name}: sharding.kind deepspeed: {'; '.join(found)}")


def _unsupported_state(config: StrategyConfig) -> Iterator[str]:
    default = OptimizerState()
    given = {key: value for key, value in config.optimizer_state if value != getattr(default, key)}
    if given:
        listed = ", ".join(f"optimizer_state.{key} {value}" for key, value in given.items())
        yield (
            f"{listed} cannot be followed, because DeepSpeed keeps and updates the optimizer state itself; leave the "
            "section out, and write sharding.offload: cpu for state on the host"
        )


def _unsupported_clipping(config: StrategyConfig) -> Iterator[str]:
    clipping = config.clipping
    if clipping.norm_type != 2:
        yield f"clipping.norm_type is {clipping.norm_type:g}, and DeepSpeed clips by the Euclidean norm; set it to 2.0"
    if clipping.scope != "global":
        yield f"clipping.scope is {clipping.scope}, and DeepSpeed clips by the global norm; set it to global"


def _unsupported_precision(config: StrategyConfig) -> Iterator[str]:
    precision, scale = config.precision, config.precision.loss_scale
    if precision.parameters != "float32" and precision.master_weights is not True:
        given = str(precision.master_weights).lower()
        yield f"precision.master_weights is {given}, and DeepSpeed keeps fp32 masters of 16-bit weights; set it to true"
    if precision.parameters != "float16" and scale.kind != "none":
        yield (
            f"precision.loss_scale is {scale.kind}, and DeepSpeed scales the loss of float16 weights only; set it to "
            f"none with {precision.parameters}"
        )
    elif isinstance(scale, DynamicScale):
        yield from _unsupported_scale(scale)


def _unsupported_scale(scale: DynamicScale) -> Iterator[str]:
    if not math.log2(scale.init_scale).is_integer() or scale.init_scale < 1:
        yield f"precision.loss_scale.init_scale is {scale.init_scale:g}; DeepSpeed starts at a power of 2 from 1 on"
    if not scale.min_scale.is_integer():
        yield f"precision.loss_scale.min_scale is {scale.min_scale:g}; DeepSpeed takes a whole number from 1 on"
    fixed = {"growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": DynamicScale(kind="dynamic").max_scale}
    for key, value in fixed.items():
        if getattr(scale, key) != value:
            yield (
                f"precision.loss_scale.{key} is {getattr(scale, key):g}, and DeepSpeed's scale doubles and halves "
                f"without an upper limit; leave it out"
            )


# -- the strategy's settings in DeepSpeed's format ---------------------------------------------------------------------


def _strategy_settings(config: StrategyConfig) -> dict[str, Any]:
    precision, clipping = config.precision, config.clipping
    dtype = _SHORT[precision.parameters]
    reduce = "fp32" if precision.reduce == "float32" else dtype
    clips = clipping.max_norm is not None and math.isfinite(clipping.max_norm)
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only reports it: the caller makes the batches
        "gradient_accumulation_steps": 1,  # strategy.accumulate says which micro-batch is the last
        "gradient_clipping": clipping.max_norm if clips else 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", **(_loss_scale(config) if dtype == "fp16" else {})},
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": reduce},
        "zero_optimization": _zero(cast(DeepSpeedSharding, config.sharding)),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _loss_scale(config: StrategyConfig) -> dict[str, Any]:
    scale = config.precision.loss_scale
    if not isinstance(scale, DynamicScale):
        return {"loss_scale": scale.scale if isinstance(scale, ConstantScale) else 1.0}
    return {
        "loss_scale": 0,
        "initial_scale_power": int(math.log2(scale.init_scale)),
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis,
        "min_loss_scale": int(scale.min_scale),
    }


def _zero(sharding: DeepSpeedSharding) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": sharding.stage}
    if sharding.offload == "cpu":
        section["offload_optimizer"] = {"device": "cpu"}
        if sharding.stage == 3:
            section["offload_param"] = {"device": "cpu"}
    return section


# -- comparing configurations ------------------------------------------------------------------------------------------

_STRATEGY_KEYS = {
    "gradient_clipping": "clipping.max_norm",
    "bf16": "precision.parameters",
    "fp16": "precision.parameters",
    "communication_data_type": "precision.reduce",
    "data_types": "precision.reduce",
    "zero_optimization.stage": "sharding.stage",
    "zero_optimization.offload": "sharding.offload",
    "fp16.": "precision.loss_scale",
    "gradient_accumulation_steps": "strategy.accumulate takes its place",
}


def _strategy_key(key: str) -> str:
    """The strategy's key that determines DeepSpeed's ``key``, in parentheses; empty if there is none."""
    if key.startswith("fp16.") and key != "fp16.enabled":
        return f" ({_STRATEGY_KEYS['fp16.']})"
    return next((f" ({name})" for prefix, name in _STRATEGY_KEYS.items() if key.startswith(prefix)), "")


def _differences(
    needed: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, needed value and given value, for all keys that differ."""
    for key, expected in needed.items():
        value = given.get(key, _AUTO)
        if value == _AUTO or (not prefix and key == "train_micro_batch_size_per_gpu"):
            continue
        if isinstance(expected, Mapping) and isinstance(value, Mapping):
            yield from _differences(expected, value, f"{prefix}{key}.")
        elif value != expected:
            yield f"{prefix}{key}", expected, value
    if prefix == "zero_optimization.":
        yield from _additional_offloads(needed, given)


def _additional_offloads(needed: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The same for offloading that is given although the strategy does not set it."""
    for key in ("offload_optimizer", "offload_param"):
        section = given.get(key)
        device = section.get("device", "none") if isinstance(section, Mapping) else "none"
        if key not in needed and device not in ("none", _AUTO):
            yield f"zero_optimization.{key}.device", "none", device


def _merge(needed: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``needed`` with the given values, except for those that are ``auto``."""
    merged = dict(needed)
    for key, value in given.items():
        if isinstance(value, Mapping):
            merged[key] = _merge(needed.get(key) or {}, value)
        elif value != _AUTO:
            merged[key] = value
    return merged
