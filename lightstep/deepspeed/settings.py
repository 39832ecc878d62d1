"""DeepSpeed's configuration from a strategy's: what maps onto what, and what DeepSpeed cannot do.

Only plain values here: a strategy is checked when it is loaded, whether DeepSpeed is installed or not.
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
"""What the transformers Trainer's DeepSpeed files write for "as the arguments say"."""

_OURS = {
    "optimizer": "the optimizer comes from strategy.create_optimizer",
    "scheduler": "schedulers are the caller's: build one over the optimizer, and step it when step() was applied",
    "amp": "precision comes from precision.parameters",
    "torch_autocast": "precision comes from precision.parameters",
}
"""Sections of DeepSpeed's file that something else decides here."""


def deepspeed_config(config: StrategyConfig, name: str) -> dict[str, Any]:
    """The mapping that ``deepspeed.initialize`` takes, with what ``sharding.config`` adds.

    Args:
        name: the strategy's, for messages.

    Raises:
        ConfigError: something in the strategy that DeepSpeed cannot do, or ``sharding.config`` contradicts it.
    """
    _refuse_impossible(config, name)
    ours = _generated(config)
    theirs = cast(DeepSpeedSharding, config.sharding).own_config(name)
    refuse_contradictions(ours, theirs, f"{name}: sharding.config contradicts the strategy")
    if theirs.get("train_batch_size", _AUTO) != _AUTO:  # DeepSpeed divides it by the ranks
        del ours["train_micro_batch_size_per_gpu"]
    return _merged(ours, {key: value for key, value in theirs.items() if key not in _OURS})


def refuse_contradictions(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    """Raise when DeepSpeed's own configuration says otherwise.

    Args:
        ours: what the strategy needs.
        theirs: what was handed in; ``auto`` and what it leaves out agree with everything.
        what: how the message begins.

    Raises:
        ConfigError: every contradicting key with both values.
    """
    found = [f"{key} is {theirs[key]!r}, but {reason}" for key, reason in _OURS.items() if _is_on(theirs.get(key))]
    found += [
        f"{key} is {given!r}, and the strategy needs {needed!r}{_where(key)}"
        for key, needed, given in _different(ours, theirs)
    ]
    if found:
        raise ConfigError(f"{what}: {'; '.join(found)}. Leave these keys out, write auto, or change the strategy")


def _is_on(section: Any) -> bool:
    return bool(section) and not (isinstance(section, Mapping) and section.get("enabled") is False)


def settings_of(engine: Any) -> dict[str, Any]:
    """The configuration that an engine works with, defaults filled in, as far as a strategy says anything about it."""
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
    if zero["offload_optimizer"]["device"] != "none":
        zero["offload_optimizer"]["super_offload"] = bool(engine.super_offload())
    if engine.zenflow_config() is not None:
        zero["zenflow"] = True
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


def _refuse_impossible(config: StrategyConfig, name: str) -> None:
    found = [*_state(config), *_clipping(config), *_precision(config)]
    if found:
        raise ConfigError(f"{name}: sharding.kind deepspeed: {'; '.join(found)}")


def _state(config: StrategyConfig) -> Iterator[str]:
    default = OptimizerState()
    given = {key: value for key, value in config.optimizer_state if value != getattr(default, key)}
    if given:
        listed = ", ".join(f"optimizer_state.{key} {value}" for key, value in given.items())
        yield (
            f"{listed} cannot be followed, because DeepSpeed keeps and updates the optimizer state itself; leave the "
            "section out, and write sharding.offload: cpu for state on the host"
        )


def _clipping(config: StrategyConfig) -> Iterator[str]:
    clipping = config.clipping
    if clipping.norm_type != 2:
        yield f"clipping.norm_type is {clipping.norm_type:g}, and DeepSpeed clips by the Euclidean norm; set it to 2.0"
    if clipping.scope != "global":
        yield f"clipping.scope is {clipping.scope}, and DeepSpeed clips by the global norm; set it to global"


def _precision(config: StrategyConfig) -> Iterator[str]:
    precision, scale = config.precision, config.precision.loss_scale
    if precision.parameters != "float32" and not precision.master_weights:
        yield "precision.master_weights is false, and DeepSpeed keeps fp32 masters of 16-bit weights; set it to true"
    if precision.parameters != "float16" and scale.kind != "none":
        yield (
            f"precision.loss_scale is {scale.kind}, and DeepSpeed scales the loss of float16 weights only; set it to "
            f"none with {precision.parameters}"
        )
    elif isinstance(scale, DynamicScale):
        yield from _dynamic_scale(scale)


def _dynamic_scale(scale: DynamicScale) -> Iterator[str]:
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


# -- what it is told ---------------------------------------------------------------------------------------------------


def _generated(config: StrategyConfig) -> dict[str, Any]:
    precision, clipping = config.precision, config.clipping
    dtype = _SHORT[precision.parameters]
    reduce = "fp32" if precision.reduce == "float32" else dtype
    clips = clipping.max_norm is not None and math.isfinite(clipping.max_norm)
    return {
        "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own figures: batches are the caller's
        "gradient_accumulation_steps": 1,  # the caller's too: strategy.accumulate says which micro-batch is the last
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
        if sharding.superoffload:
            section["offload_optimizer"]["super_offload"] = True
        if sharding.stage == 3 and not sharding.superoffload:
            section["offload_param"] = {"device": "cpu"}
    if sharding.zenflow:
        section["zenflow"] = {}
    return section


# -- what the user's own configuration says ----------------------------------------------------------------------------

_MEANT_BY = {
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


def _where(key: str) -> str:
    """Which key of the strategy it comes from."""
    if key.startswith("fp16.") and key != "fp16.enabled":
        return f" ({_MEANT_BY['fp16.']})"
    return next((f" ({ours})" for theirs, ours in _MEANT_BY.items() if key.startswith(theirs)), "")


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, our value and theirs, wherever both say something."""
    for key, needed in ours.items():
        given = theirs.get(key, _AUTO)
        if given == _AUTO or (not prefix and key == "train_micro_batch_size_per_gpu"):
            continue
        if isinstance(needed, Mapping) and isinstance(given, Mapping):
            yield from _different(needed, given, f"{prefix}{key}.")
        elif given != needed:
            yield f"{prefix}{key}", needed, given
    if prefix == "zero_optimization.":
        yield from _offloads_more(ours, theirs)


def _offloads_more(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in ("offload_optimizer", "offload_param"):
        section = theirs.get(key)
        device = section.get("device", "none") if isinstance(section, Mapping) else "none"
        if key not in ours and device not in ("none", _AUTO):
            yield f"zero_optimization.{key}.device", "none", device
    if "zenflow" not in ours and theirs.get("zenflow"):
        yield "zero_optimization.zenflow", None, theirs["zenflow"]


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for key, given in theirs.items():
        if isinstance(given, Mapping):
            merged[key] = _merged(ours.get(key) or {}, given)
        elif given != _AUTO:
            merged[key] = given
    return merged
