"""Converting other libraries' loss scales to the state of :class:`lightstep.DynamicLossScale`, and back.

The state of a dynamic scale has ``scale``, ``good_steps`` (steps since the last overflow or growth) and
``hysteresis_left`` (overflows until it shrinks). ``settings``, if known, has arguments of ``DynamicLossScale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightstep.precision.loss_scale import DynamicLossScale

SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_LIGHTRFT_HYSTERESIS = 2


class DynamicLossScaler:
    """Stands for DeepSpeed's class of this name in the files that are written. It has only attributes."""

    __module__ = SCALERS


def is_dynamic(state: Mapping[str, Any] | None) -> bool:
    """Whether ``state`` is the state of a dynamic scale, not of a constant one."""
    return state is not None and "good_steps" in state


def from_deepspeed(scaler: Any) -> dict[str, Any] | None:
    """The state of DeepSpeed's ``LossScaler`` or ``DynamicLossScaler``; ``None`` for anything else."""
    known = getattr(scaler, "__dict__", {})
    if "cur_scale" not in known:
        return None
    if "scale_window" not in known:
        return {"scale": float(known["cur_scale"])}
    # DeepSpeed grows the scale when the steps before the current one fill the window. So its first growth after an
    # overflow is one step later than lightstep's: good_steps -1 stands for that step.
    good = int(known["cur_iter"]) - int(known["last_overflow_iter"]) - 1
    window, factor = int(known["scale_window"]), float(known["scale_factor"])
    settings = {
        "growth_interval": window,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "hysteresis": int(known["delayed_shift"]),
        "min_scale": float(known["min_scale"]),
        "consecutive_hysteresis": bool(known["consecutive_hysteresis"]),
        "raise_error_at_min_scale": bool(known.get("raise_error_at_min_scale", True)),
    }
    return {
        "scale": float(known["cur_scale"]),
        "good_steps": (good - 1) % window if good > 0 else -1,
        "hysteresis_left": int(known["cur_hysteresis"]),
        "settings": settings,
    }


def to_deepspeed(state: Mapping[str, Any], step: int) -> DynamicLossScaler:
    """A ``DynamicLossScaler`` in the given state, after ``step`` steps."""
    settings = _settings(state)
    scaler = DynamicLossScaler()
    scaler.__dict__.update(
        cur_scale=float(state["scale"]),
        dynamic=True,
        cur_iter=step,
        last_overflow_iter=step - int(state["good_steps"]) - 2,
        scale_factor=float(settings["growth_factor"]),
        scale_window=int(settings["growth_interval"]),
        min_scale=float(settings["min_scale"]),
        delayed_shift=int(settings["hysteresis"]),
        cur_hysteresis=max(int(state["hysteresis_left"]), 1),
        consecutive_hysteresis=bool(settings.get("consecutive_hysteresis", False)),
        raise_error_at_min_scale=bool(settings.get("raise_error_at_min_scale", True)),
        dtype=torch.float16,
    )
    return scaler


def from_torch(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of ``torch.amp.GradScaler.state_dict()``; ``None`` for a disabled scaler, whose state dict is empty."""
    if "scale" not in state:
        return None
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return {
        "scale": float(state["scale"]),
        "good_steps": int(state.get("_growth_tracker", 0)),
        "hysteresis_left": 1,
        "settings": {"hysteresis": 1, **{name: state[name] for name in names if name in state}},
    }


def to_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as ``torch.amp.GradScaler.load_state_dict`` accepts it."""
    settings = _settings(state)
    return {
        "scale": float(state["scale"]),
        "growth_factor": float(settings["growth_factor"]),
        "backoff_factor": float(settings["backoff_factor"]),
        "growth_interval": int(settings["growth_interval"]),
        "_growth_tracker": max(int(state["good_steps"]), 0),
    }


def from_lightrft(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of LightRFT's ``DynamicGradScaler.state_dict()``."""
    return {
        "scale": float(state["_scale"]),
        "good_steps": int(state["_growth_step"]),
        "hysteresis_left": max(_LIGHTRFT_HYSTERESIS - int(state["_hysteresis_step"]), 0),
    }


def _settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the state, with lightstep's defaults for those that are missing."""
    default = DynamicLossScale()
    names = ("growth_interval", "growth_factor", "backoff_factor", "hysteresis", "min_scale")
    return {**{name: getattr(default, name) for name in names}, **state.get("settings", {})}
