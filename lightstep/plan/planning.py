"""Plans memory and time of a strategy for one model, batch and machine: whether it fits, and what helps it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightstep.config import ConfigError, FSDP2Sharding, StrategyConfig
from lightstep.plan.cost import ADAMW, StateBytes, sorted_for_choice, with_settings
from lightstep.plan.memory import Memory, MemoryPlan, shard_count
from lightstep.plan.model import Activations, fp32_share, model_sizes, run_on_meta, units_outside_blocks
from lightstep.plan.timing import Crossing, Network, Profile, Time, find_profile, iteration_time, profile_here

MARGIN = 0.05
"""Share of device memory reserved for CUDA and for fragmentation."""


@dataclass(frozen=True)
class Workload:
    """The work of one optimizer step.

    Attributes:
        tokens: tokens of one micro-batch on one device.
        sequence: tokens of one sequence.
        micro_batches: micro-batches of one step.
        checkpointed: activation checkpointing; ``None``: as the strategy says.
        loss_chunk: tokens per chunk of the loss; ``None``: all logits at once, as in transformers' own loss.
    """

    tokens: int
    sequence: int = 4096
    micro_batches: int = 1
    checkpointed: bool | None = None
    loss_chunk: int | None = None


@dataclass(frozen=True)
class Plan:
    """The plan of one strategy.

    Attributes:
        time: of a step that is not clipped; ``None`` if the machine's rates are unknown, and for optimizers other
            than Adam and AdamW.
        clipped_time: of a step in a run that clips all of them, in which ``overlap`` updates during the next forward.
        other_activations: their peak without activation checkpointing, or with it if ``workload`` is without;
            ``None`` if not asked for.
        clips_by_layer: clips each unit by its own norm, so its training differs from that of other strategies.
        sums_on_host: the dtype in which the host keeps the sum of micro-batches; ``None``: it keeps none.
        crossing: what leaves a node, if there are several.
        host_of_node: page-locked bytes of all ranks of a node.
        limit: usable bytes of device memory.
        reason: why it does not fit; ``None`` if it fits.
    """

    strategy: str
    parameters: int
    ranks: int
    workload: Workload
    memory: Memory
    time: Time | None
    clipped_time: Time | None
    other_activations: int | None
    clips_by_layer: bool
    sums_on_host: str | None
    crossing: Crossing | None
    host_of_node: int
    limit: int | None
    reason: str | None

    @property
    def fits(self) -> bool:
        return self.reason is None

    def values(self) -> dict[str, Any]:
        """For JSON."""
        memory = asdict(self.memory) | {"step": self.memory.step}
        iteration = {
            "iteration_ms": self.time and self.time.iteration,
            "clipped_iteration_ms": self.clipped_time and self.clipped_time.iteration,
        }
        sent = self.crossing and {key: getattr(self.crossing, key) for key in ("gathered", "reduced", "sent")}
        return asdict(self) | {"memory": memory, "fits": self.fits, "crossing": sent} | iteration

    def on_cpu(self) -> str:
        """One line for a run on a CPU, whose memory is the host's, and whose rates are unknown."""
        size = _size(self.memory.peak + self.memory.host)
        return f"{size} of memory for weights, gradients, optimizer state and activations; no time, since this is a CPU"

    def __str__(self) -> str:
        """One line."""
        said = f"{_size(self.memory.peak)} of device memory at the peak"
        if self.memory.host:
            said += f", {_size(self.memory.host)} of host memory"
        if self.time is not None:
            said += f", {_milliseconds(self.time)} ms per step"
            if self.clipped_time is not None and self.clipped_time != self.time:
                said += f" ({_milliseconds(self.clipped_time)} if all are clipped)"
        return said if self.reason is None else f"{said}; {self.reason}"


def _milliseconds(time: Time) -> str:
    return f"{time.iteration:,.{0 if time.iteration >= 10 else 2}f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


class Planner:
    """Plans several strategies for one model, whose sizes and activations are computed once."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        profile: Profile | None = None,
        ranks: int = 1,
        gpu_memory: float | None = None,
        host_memory: float | None = None,
        optimizer: StateBytes = ADAMW,
        on_cpu: bool = False,
        network: Network | None = None,
    ) -> None:
        """``model`` may be on any device and is not changed. Memory in bytes: of one device, and of a whole host.
        ``network``: the ranks are on several nodes; ``None``: all on one."""
        self._model, self._workload, self._profile, self._ranks = model, workload, profile, ranks
        self._optimizer, self._on_cpu, self._network = optimizer, on_cpu, network
        self._sizes = model_sizes(model)
        of_profile = profile.memory_gb * 1e9 if profile is not None and profile.memory_gb else None
        limit = gpu_memory if gpu_memory is not None else of_profile
        self._limit = None if limit is None else int(limit * (1 - MARGIN))
        self._host_limit = host_memory
        self._seen: dict[tuple[bool, str], Activations] = {}
        self._fp32_shares: dict[str, float] = {}

    def plan(self, name: str, config: StrategyConfig, both: bool = False) -> Plan:
        """Plan one strategy; ``both``: find the activations with and without checkpointing.

        Raises:
            ConfigError: a strategy of DeepSpeed, whose memory and time are not planned.
            ValueError: the model cannot be run on the meta device.
        """
        if config.sharding.kind == "deepspeed":
            raise ConfigError(not_planned(name))
        workload, ranks = self._workload, self.rank_count(config)
        wanted, checkpointed = config.sharding.activation_checkpointing, workload.checkpointed
        if checkpointed is None:
            checkpointed = bool(wanted)
        compute = compute_dtype(config)
        seen = self._activations(checkpointed, compute)
        if checkpointed and wanted == "host":
            seen = seen.with_inputs_on_host()
        held = self._memory(config, seen)
        time = clipped = None
        if self._profile is not None and self._profile.knows(compute) and self._optimizer.is_adam:
            time = clipped = self._time(config, seen, held)
            if config.clipping.max_norm is not None and config.optimizer_state.update == "overlap":
                waiting = with_settings(config, "optimizer_state", update="next_forward")
                clipped = self._time(waiting, seen, self._memory(waiting, seen))
        reason = self._reason(config, held, ranks)
        other = self._activations(not checkpointed, compute).peak if both else None
        by_layer = config.clipping.scope == "unit"
        return Plan(
            name,
            self._sizes.total,
            ranks,
            workload,
            held,
            time,
            clipped,
            other,
            by_layer,
            _sums_on_host(config, workload.micro_batches),
            self._crossing(config),
            held.host * self._ranks_of_node(ranks),
            self._limit,
            reason,
        )

    def with_micro_batches(self, count: int) -> Planner:
        """The same with another number of micro-batches in a step."""
        other = copy.copy(self)
        other._workload = replace(self._workload, micro_batches=count)
        return other

    def _memory(self, config: StrategyConfig, seen: Activations) -> Memory:
        ranks, count, dtype = self.rank_count(config), self._workload.micro_batches, config.precision.parameters
        if dtype not in self._fp32_shares:
            self._fp32_shares[dtype] = fp32_share(self._model, getattr(torch, dtype))
        share = self._fp32_shares[dtype]
        wrap = config.sharding.wrap if isinstance(config.sharding, FSDP2Sharding) else "auto"
        apart = units_outside_blocks(self._model, wrap)
        host = None if self._host_limit is None else self._host_limit / self._ranks_of_node(ranks)
        given = config, self._sizes, ranks, count, self._optimizer, self._on_cpu, share, apart, host
        return MemoryPlan(*given).memory(seen)

    def _time(self, config: StrategyConfig, seen: Activations, held: Memory) -> Time:
        assert self._profile is not None
        ranks, micro_batches = self.rank_count(config), self._workload.micro_batches
        crossing, devices = self._crossing(config), self._ranks_of_node(ranks)
        return iteration_time(config, self._sizes, seen, held, self._profile, ranks, micro_batches, crossing, devices)

    def _crossing(self, config: StrategyConfig) -> Crossing | None:
        if self._network is None:
            return None
        ranks, micro_batches = self.rank_count(config), self._workload.micro_batches
        return Crossing(config, self._sizes, ranks, self._network, micro_batches)

    def _ranks_of_node(self, ranks: int) -> int:
        return ranks if self._network is None else min(ranks, self._network.gpus_per_node)

    def rank_count(self, config: StrategyConfig) -> int:
        return 1 if config.sharding.kind == "single" else self._ranks

    def _activations(self, checkpointed: bool, dtype: str) -> Activations:
        key = checkpointed, "float32" if dtype == "float32" else "bfloat16"
        if key not in self._seen:
            work = self._workload
            self._seen[key] = run_on_meta(
                self._model, work.tokens, work.sequence, checkpointed, work.loss_chunk, getattr(torch, key[1])
            )
        return self._seen[key]

    def _reason(self, config: StrategyConfig, held: Memory, ranks: int) -> str | None:
        if isinstance(config.sharding, FSDP2Sharding) and ranks % shard_count(config, ranks):
            return f"its mesh does not divide the number of devices ({ranks})"
        shards = shard_count(config, ranks)
        devices = self._ranks_of_node(ranks)
        if max(shards, devices) % min(shards, devices):
            return f"its {shards} shards do not fill nodes of {devices} GPUs"
        if self._host_limit is not None and held.host * devices > self._host_limit:
            host = "the host" if self._network is None else "a node"
            return f"{host} needs {held.host * devices / 1e9:.0f} GB and has {self._host_limit / 1e9:.0f}"
        if self._limit is None or held.peak <= self._limit:
            return None
        over = f"{_size(held.peak - self._limit)} too much"
        parts = {
            "weights": held.weights,
            "gradients": held.gradients,
            "masters and optimizer state": held.state,
            "activations": held.activations,
            "unsharded weights and gradients": held.gathered,
            "buffers of the step": held.step,
        }
        largest = max(parts, key=lambda part: parts[part])
        return f"{over}; the largest part: {largest}, {_size(parts[largest])}"


def compute_dtype(config: StrategyConfig) -> str:
    """The dtype of forward and backward."""
    sharding = config.sharding
    compute = sharding.compute if isinstance(sharding, FSDP2Sharding) else "parameters"
    return config.precision.parameters if compute == "parameters" else compute


def _sums_on_host(config: StrategyConfig, micro_batches: int) -> str | None:
    if micro_batches == 1 or config.weights.placement == "device":
        return None
    return "float32" if config.precision.reduce == "float32" else config.precision.parameters


def not_planned(name: str) -> str:
    """The error for a strategy of DeepSpeed."""
    return f"DeepSpeed decides on its memory and time; measure it: lightstep bench --iteration --strategies {name}"


def plan_one(
    name: str,
    config: StrategyConfig,
    model: nn.Module,
    tokens: int,
    work: Mapping[str, Any],
    ranks: int = 1,
    gpu_memory: float | None = None,
    profile: str | None = None,
    optimizer: StateBytes = ADAMW,
    on_cpu: bool = False,
) -> Plan:
    """Plan one strategy. Default profile: this machine's GPU, if it is known or was measured; none ``on_cpu``.

    Raises:
        ConfigError: the profile is not known.
        ValueError: the model cannot be run on the meta device.
    """
    named = find_profile(profile) if profile is not None else None
    if named is None and not on_cpu:
        named = profile_here()
    planner = Planner(model, Workload(tokens, **work), named, ranks, gpu_memory, None, optimizer, on_cpu)
    return planner.plan(name, config)


def is_plannable(config: StrategyConfig, ranks: int) -> bool:
    """Whether a strategy can be planned, and is for ``ranks`` devices."""
    return config.sharding.kind != "deepspeed" and (config.sharding.kind == "single") == (ranks == 1)


def plans(planner: Planner, configs: Mapping[str, StrategyConfig], both: bool = False) -> list[Plan]:
    """The plan of each strategy, in the order of :func:`sorted_for_choice`."""
    return [planner.plan(name, configs[name], both) for name in sorted_for_choice(configs)]


def first_that_fits(made: Sequence[Plan]) -> Plan | None:
    """The fastest plan that fits, or the first if no time is known. Plans that clip by layer are the last choice."""
    fitting = [plan for plan in made if plan.fits]
    fitting = [plan for plan in fitting if not plan.clips_by_layer] or fitting
    return min(fitting, key=lambda plan: plan.time.iteration if plan.time else math.inf, default=None)


# -- what helps where the link limits an iteration, in the order in which to consider it -------------------------------

_GIB = 2**30
_FACTORS = (2, 4, 8)
"""How many times as many micro-batches in a step."""


class Relief(NamedTuple):
    """A change of the command or of the strategy, and the plan with it."""

    change: str
    plan: Plan


def reliefs(name: str, config: StrategyConfig, plan: Plan, planner: Planner) -> list[Relief]:
    """The changes that shorten the step, per micro-batch; none if the link does not limit it.

    More accumulation comes first: it costs nothing but a larger batch. State and gradients on the device take memory.
    Moments in fewer bytes are rounded.

    Args:
        plan: of this strategy, by this planner.
    """
    if plan.time is None or not plan.time.is_limited_by_link:
        return []

    def with_state(**settings: Any) -> Plan:
        return planner.plan(name, with_settings(config, "optimizer_state", **settings))

    tried = [
        *_accumulating(name, config, plan.workload.micro_batches, planner),
        *_staying(config, plan, with_state),
        *_staying_gradients(name, config, plan, planner),
        *_rounding(config, with_state),
    ]
    return [one for one in tried if one.plan.fits and _per_micro_batch(one.plan) < 0.99 * _per_micro_batch(plan)]


def _accumulating(name: str, config: StrategyConfig, now: int, planner: Planner) -> Iterator[Relief]:
    """More micro-batches, until the link does not limit the step."""
    for factor in _FACTORS:
        tried = planner.with_micro_batches(factor * now).plan(name, config)
        yield Relief(f"--micro-batches {factor * now}", tried)
        if tried.time is None or not tried.time.is_limited_by_link:
            return


def _staying(config: StrategyConfig, plan: Plan, with_state: Callable[..., Plan]) -> Iterator[Relief]:
    """As much state on the device as there is room for, in halves of a GiB."""
    state = config.optimizer_state
    if state.backend != "stream" or state.resident_gib == "auto" or plan.limit is None:
        return
    now = float(state.resident_gib)
    halves = 2 * min(plan.limit - plan.memory.peak, plan.memory.link) // _GIB
    for more in range(halves, max(halves - 4, 0), -1):  # previous weights move to the host, and need room in the ring
        tried = with_state(resident_gib=now + more / 2)
        if tried.fits:
            yield Relief(f"resident_gib: {now + more / 2:g}", tried)
            return


def _staying_gradients(name: str, config: StrategyConfig, plan: Plan, planner: Planner) -> Iterator[Relief]:
    """As much of gradients and their sums on the device as there is room for, in halves of a GiB."""
    now, memory = config.weights.gradients_gib, plan.memory
    if memory.wanted_staying == 0 or now == "auto" or plan.limit is None:
        return
    more = min(2 * (plan.limit - memory.peak) // _GIB, -(2 * (memory.staying - memory.wanted_staying) // _GIB))
    if more > 0:
        gib = float(now) + more / 2
        yield Relief(f"gradients_gib: {gib:g}", planner.plan(name, with_settings(config, "weights", gradients_gib=gib)))


def _rounding(config: StrategyConfig, with_state: Callable[..., Plan]) -> Iterator[Relief]:
    kinds, state = ("float32", "bfloat16", "int8"), config.optimizer_state
    rounding = state.moments_rounding
    kept = "" if rounding == type(state).model_fields["moments_rounding"].default else f", {rounding}"
    for moments in kinds[kinds.index(state.moments) + 1 :]:
        yield Relief(f"moments: {moments}{kept}", with_state(moments=moments))


def _per_micro_batch(plan: Plan) -> float:
    assert plan.time is not None
    return plan.time.iteration / plan.workload.micro_batches
