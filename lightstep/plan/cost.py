"""Bytes per parameter of a strategy, and the table of `lightstep strategies`, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightstep.config import DDPSharding, DeepSpeedSharding, FSDP2Sharding, SingleSharding, StrategyConfig

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MASTER = 4
SPLIT_MASTER = 2
"""The low half of a master whose high half is the bf16 weight. `resident` keeps whole masters for
optimizers without a kernel that joins them."""
SCALE, SIGN = 4 / 128, 1 / 8
"""Bytes of an 8-bit moment beside its code: its part of a block's scale, and the bit of a sign that is not its own."""


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
        bfloat16, int8: with these ``optimizer_state.moments``, if the rows of all parameters have blocks.
        bitmap: what a split master needs in addition if no entry has unused sign bits.
        resident_master: of a master that `resident` keeps on a GPU for a bf16 weight.
        is_adam: all classes are Adam or AdamW, for whose arithmetic profiles have a time.
    """

    full: float
    bfloat16: float
    int8: float
    bitmap: float = 0
    resident_master: float = SPLIT_MASTER
    is_adam: bool = True


ADAMW = StateBytes(8, 4, 2 + 2 * SCALE + SIGN)


@dataclass(frozen=True)
class Cost:
    """Memory between steps and of gradients, without activations and the step's buffers."""

    weights: Bytes
    gradients: Bytes
    """From backward to the step, without accumulation."""
    device_state: Bytes
    """Between steps, including master weights."""
    host_state: Bytes


def cost(config: StrategyConfig, optimizer: StateBytes = ADAMW, on_cpu: bool = False, fp32_share: float = 0.0) -> Cost:
    """Bytes per parameter, on a GPU unless ``on_cpu``, where ``resident`` keeps whole masters.

    Args:
        fp32_share: the share of the parameters that the model keeps in fp32 under a 16-bit strategy. The bytes are the
            mean over all parameters.
    """
    sharding = config.sharding
    if isinstance(sharding, DeepSpeedSharding):
        on_host = sharding.offload == "cpu"
    else:
        on_host = config.optimizer_state.backend != "resident"
    weights, gradients, divided_by = _divisors(config)
    in_fp32 = with_settings(config, "precision", parameters="float32")  # as parameters that stay fp32 are trained

    def mean(of: Callable[[StrategyConfig], float]) -> float:
        return (1 - fp32_share) * of(config) + fp32_share * of(in_fp32)

    state, none = Bytes(mean(lambda given: _state_bytes(given, optimizer, on_cpu)), divided_by), Bytes(0)
    weight = Bytes(mean(lambda given: BYTES[given.precision.parameters]), weights)
    gradient = Bytes(mean(_gradient_bytes), gradients)
    if config.weights.placement == "host":
        moved = weight.count + gradient.count
        host = Bytes(moved + (state.count if on_host else 0), divided_by)
        return Cost(none, none, none if on_host else state, host)
    return Cost(weight, gradient, none if on_host else state, state if on_host else none)


def with_settings(config: StrategyConfig, section: str, **settings: Any) -> StrategyConfig:
    """The strategy with other values in a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})


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
    own = BYTES[config.precision.parameters]
    if own == 4 or config.precision.reduce == "parameters" or isinstance(config.sharding, SingleSharding):
        return own
    # DDP keeps its buckets as well as the fp32 gradients. FSDP2 keeps only the fp32 gradients.
    return own + 4 if isinstance(config.sharding, DDPSharding) else 4


def _state_bytes(config: StrategyConfig, optimizer: StateBytes, on_cpu: bool) -> float:
    precision, backend = config.precision, config.optimizer_state.backend
    moments = config.optimizer_state.moments
    entries: float = optimizer.full if moments == "float32" else getattr(optimizer, moments)
    if isinstance(config.sharding, DeepSpeedSharding):
        return entries + MASTER  # DeepSpeed keeps masters even for fp32 weights
    if precision.parameters != "float32" and precision.master_weights is False:
        return optimizer.bfloat16  # moments have the parameters' dtype
    if precision.parameters == "float32" or precision.master_weights is not True:
        return entries
    if precision.parameters == "float16" or (backend == "resident" and on_cpu):
        return entries + MASTER
    return entries + (optimizer.resident_master if backend == "resident" else SPLIT_MASTER + optimizer.bitmap)


# -- the table --------------------------------------------------------------------------------------------------------

_WIDTH, _INDENT = 78, 4 * " "
_SECTIONS = {
    "single": "One device",
    "ddp": "Several devices, each with the whole model (DDP)",
    "fsdp2": "Several devices, the model in shards (FSDP2)",
    "deepspeed": "Several devices, DeepSpeed's ZeRO",
}
_PRECISIONS = ("bfloat16", "float16", "float32")
_BACKENDS = ("resident", "stream", "bulk")
_UPDATES = ("at_step", "overlap", "next_forward", "in_backward")
_HEADINGS = ("weights", "gradients", "device state", "host state")
_NOTE = (
    "Bytes per parameter with AdamW. Gradients: from backward to the step, without accumulation. State: between steps, "
    "master weights included. lightstep strategies NAME shows a strategy's file."
)


def strategies_text(configs: Mapping[str, StrategyConfig]) -> str:
    """A line of figures and a description for each strategy."""
    names = sorted_for_choice(configs)
    width = max(map(len, names)) + 2
    lines = [_row("", _HEADINGS, width)]
    for kind, title in _SECTIONS.items():
        chosen = [name for name in names if configs[name].sharding.kind == kind]
        lines += ["", title] if chosen else []
        for name in chosen:
            held = cost(configs[name])
            figures = (held.weights, held.gradients, held.device_state, held.host_state)
            lines.append(_row(name, figures, width))
            lines += textwrap.wrap(configs[name].description, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([*lines, "", *textwrap.wrap(_NOTE, _WIDTH)]) + "\n"


def _row(name: str, figures: Iterable[object], width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{figure!s:>13}" for figure in figures)


def sorted_for_choice(configs: Mapping[str, StrategyConfig]) -> list[str]:
    """Names sorted by sharding, then precision, then backend and update time: least traffic first."""
    return sorted(configs, key=lambda name: (*_place(configs[name]), name))


def _place(config: StrategyConfig) -> tuple[Any, ...]:
    sharding, state = config.sharding, config.optimizer_state
    by_kind: tuple[Any, ...] = ()
    if isinstance(sharding, FSDP2Sharding):
        by_kind = (sharding.mesh.replicate != 1,)
    if isinstance(sharding, DeepSpeedSharding):
        by_kind = (sharding.stage, sharding.offload != "none")
    return (
        list(_SECTIONS).index(sharding.kind),
        by_kind,
        _PRECISIONS.index(config.precision.parameters),
        config.weights.placement == "host",
        _BACKENDS.index(state.backend),
        _UPDATES.index(state.update),
    )
