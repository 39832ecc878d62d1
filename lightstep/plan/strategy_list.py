"""The text of `lightstep strategies`, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from lightstep.config import DeepSpeedSharding, FSDP2Sharding, StrategyConfig
from lightstep.plan.cost import cost

_WIDTH = 78
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
            lines += _indented(configs[name].description)
    return "\n".join([*lines, "", *textwrap.wrap(_NOTE, _WIDTH)]) + "\n"


def _row(name: str, figures: Iterable[object], width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{figure!s:>13}" for figure in figures)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


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
        _BACKENDS.index(state.backend),
        _UPDATES.index(state.update),
    )
