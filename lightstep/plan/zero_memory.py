"""Plans the memory of DeepSpeed's ZeRO from its documented configuration. Not checked by measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightstep.config import ConfigError, DeepSpeedSharding, StrategyConfig, what_it_holds
from lightstep.plan.activations import Activations
from lightstep.plan.cost import ADAMW, StateBytes, cost
from lightstep.plan.memory import Memory, Sizes

_BUCKET, _LIVE = 500_000_000, 1_000_000_000
"""Elements: DeepSpeed's own `reduce_bucket_size` and `stage3_max_live_parameters`."""


def zero_memory(
    config: StrategyConfig,
    sizes: Sizes,
    activations: Activations | None,
    ranks: int = 1,
    accumulates: bool = False,
    name: str = "strategy",
    optimizer: StateBytes = ADAMW,
) -> Memory:
    """As :func:`lightstep.plan.memory.memory`, for ``sharding.kind: deepspeed``.

    Raises:
        ConfigError: ``sharding.config`` of the strategy ``name`` cannot be read, or sizes in it are not numbers.
    """
    sharding = config.sharding
    assert isinstance(sharding, DeepSpeedSharding)
    held, given = cost(config, optimizer), _zero_section(sharding, name)
    own, offload = sizes.total / ranks, sharding.offload == "cpu"
    width, gradient_width = held.weights.count, held.gradients.count
    state = own * (held.device_state.count + held.host_state.count)
    weights = width * sizes.total / (ranks if held.weights.divided_by else 1)
    gradients = gradient_width * sizes.total / (ranks if held.gradients.divided_by else 1)
    host = 0.0
    if offload:
        copies = (
            2 if sharding.stage == 3 or accumulates else 1
        )  # the accumulated gradients, and the copy that the update reads
        host, state, gradients = state + own * gradient_width * copies, 0.0, 0.0
    if offload and sharding.stage == 3 and not sharding.superoffload:
        host, weights = host + weights, 0.0
    buckets = _buckets(sharding, given, sizes, width, gradient_width)
    limit = given.get("stage3_max_live_parameters", _LIVE)
    live = width * min(sizes.total, limit) if sharding.stage == 3 else 0.0
    moments = activations.moments if activations else ()
    under_way = max((moment.live + moment.arrived_block * width for moment in moments), default=0)
    flat = 0.0 if offload else 4 * own  # a flat copy of the gradients for the update
    return Memory(
        weights=int(weights),
        gradients=int(gradients),
        state=int(state),
        ring=0,
        previous_weights=0,
        other=int(max(flat, buckets)),
        activations=activations.peak if activations else 0,
        gathered=int(live),
        peak=int(weights + state + gradients + max(flat, buckets + live + under_way)),
        host=int(host),
        spare=0,
        link=int(own * max(gradient_width, 2 * width)) if offload else 0,
    )


def _buckets(
    sharding: DeepSpeedSharding, given: Mapping[str, Any], sizes: Sizes, width: float, gradient_width: float
) -> float:
    """Gradient buckets: as computed (two if one is filled while another is reduced), and as reduced."""
    if sharding.stage == 1:
        return 0
    elements = max(given.get("reduce_bucket_size", _BUCKET), *sizes.tensors)
    filled = 2 if given.get("overlap_comm", sharding.stage == 3) else 1
    return elements * (filled * width + (gradient_width if gradient_width != width else 0))


def _zero_section(sharding: DeepSpeedSharding, name: str) -> Mapping[str, Any]:
    """`zero_optimization` of DeepSpeed's own configuration, without `auto` values."""
    section = sharding.own_config(name).get("zero_optimization") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{name}: sharding.config: zero_optimization holds {what_it_holds(section)}; a mapping is needed"
        )
    found = {key: value for key, value in section.items() if value != "auto"}
    for key in ("reduce_bucket_size", "stage3_max_live_parameters"):
        if not isinstance(found.get(key, 0), int | float):
            raise ConfigError(
                f"{name}: sharding.config: zero_optimization.{key} is {found[key]!r}; a number of elements is needed"
            )
    return found
