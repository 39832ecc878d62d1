"""Plans bytes: device memory at the peak of a step, host memory between steps, link traffic of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightstep.config import DDPSharding, FSDP2Sharding, StrategyConfig, Weights
from lightstep.optimizer.arithmetic import ADAMS, BaseArithmetic
from lightstep.optimizer.classes import GroupClasses
from lightstep.optimizer.moments import moments_of
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.optimizer.rules import Rule, groups_by_rules, own_class
from lightstep.plan.cost import ADAMW, BYTES, MASTER, SCALE, SIGN, SPLIT_MASTER, StateBytes, cost
from lightstep.plan.model import FORWARD, HEAD, TAIL, Activations, Moment, Sizes
from lightstep.state.versions import LEFT_FREE

_UNIT = 128 * 2**20
"""Largest number of elements that ``resident`` updates together."""
_UNDER_WAY = 3
"""Blocks whose gradients are on the device at a time, where they leave for the host."""
_BULK_UNIT = 128 * 2**20
"""Bytes of the largest unit of ``bulk``."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, on its device unless noted. ``peak`` is at most the sum of the parts.

    Attributes:
        gradients: when all gradients are complete.
        state: masters and optimizer state between steps.
        ring: through which ``stream`` copies state.
        previous_weights: of the units that ``overlap`` updates in backward.
        other: gradient buckets; fp32 gradients of the unit that is updated; the state of ``bulk`` while it is updated.
        activations: their peak.
        gathered: unsharded weights and gradients of FSDP2.
        host: page-locked, with ``spare`` and what blocks keep there between forward and backward.
        spare: second copies on the host, of the state that ``overlap`` updates in backward, as far as there is room.
        wanted_spare: the same if there is room for all of them.
        staying: on the device, of gradients that rest on the host otherwise (``gradients_gib``); they are in
            ``gradients``, too.
        wanted_staying: the same if there is room for all of them.
        link: bytes in the busier direction in a step: ``link_once``, and those of each further micro-batch.
        link_once: of the updates, and of one micro-batch.
        link_in_forward: those that no update waits for: previous weights that rest on the host leave in forward.
        forward_link, backward_link: to the device in a further micro-batch's forward and backward.
    """

    weights: int
    gradients: int
    state: int
    ring: int
    previous_weights: int
    other: int
    activations: int
    gathered: int
    peak: int
    host: int
    spare: int
    wanted_spare: int
    staying: int
    wanted_staying: int
    link: int
    link_once: int
    link_in_forward: int
    forward_link: int
    backward_link: int

    @property
    def step(self) -> int:
        """All buffers of the step on the device."""
        return self.ring + self.previous_weights + self.other

    @property
    def spare_share(self) -> float:
        """The part of the updates that ``overlap`` can make in backward for which there is spare memory."""
        return self.spare / self.wanted_spare if self.wanted_spare else 1.0


class MemoryPlan:
    """Computes the :class:`Memory` of a strategy.

    Args:
        micro_batches: in a step.
        fp32_share: as for :func:`~lightstep.plan.cost.cost`. These parameters count as spread evenly over the model.
        apart: elements before and behind the blocks that FSDP2 gathers as units of their own, not with the root.
        host_memory: bytes for this rank, which limit ``spare``.
    """

    def __init__(
        self,
        config: StrategyConfig,
        sizes: Sizes,
        ranks: int = 1,
        micro_batches: int = 1,
        optimizer: StateBytes = ADAMW,
        on_cpu: bool = False,
        fp32_share: float = 0.0,
        apart: tuple[int, int] = (0, 0),
        host_memory: float | None = None,
    ) -> None:
        self.host_memory = host_memory
        self.apart, self.root = apart, sizes.root - sum(apart)
        self.config, self.sizes, self.ranks, self.fp32_share = config, sizes, ranks, fp32_share
        self.is_fp32 = config.precision.parameters == "float32"
        self.shards = shard_count(config, ranks)
        self.on_host = config.weights.placement == "host"
        on_device = config.model_copy(update={"weights": Weights()})
        held = cost(on_device, optimizer, on_cpu, fp32_share)
        self.width = held.weights.count
        self.state_width = max(held.device_state.count, held.host_state.count)
        divided = (held.device_state if held.device_state.count else held.host_state).divided_by
        self.owned = sizes.total / (
            ranks if divided == "ranks" else self.shards
        )  # elements whose state this rank keeps
        self.speculates = updates_in_backward(config)
        self.micro_batches, self.optimizer = micro_batches, optimizer
        self.gradient_width = self._gradient_width()

    def _gradient_width(self) -> float:
        """Bytes per element of a gradient after backward."""
        if self.is_fp32 or self.config.precision.reduce == "parameters":
            return self.width
        return 4 if isinstance(self.config.sharding, FSDP2Sharding | DDPSharding) else self.width

    def _sums(self, blocks_done: int = 0) -> float:
        """Bytes of gradients accumulated over micro-batches, on the device: fp32; under FSDP2 unsharded until they are
        reduced."""
        return 0 if self.on_host else self._all_sums(blocks_done)

    def _all_sums(self, blocks_done: int = 0) -> float:
        if self.micro_batches == 1:
            return 0
        if self.config.sharding.kind == "fsdp2":
            if self.on_host:  # where the first gradient is
                return 0
            return self.gradient_width * (self.sizes.total - blocks_done * sum(self.sizes.blocks[:1]))
        apart = self.config.sharding.kind == "single" and self.config.precision.reduce == "float32" and not self.is_fp32
        return 4 * (1 - self.fp32_share) * self.sizes.total if apart else 0

    def memory(self, activations: Activations | None) -> Memory:
        """With ``None``, if they are not known, the peak leaves activations out."""
        total, state = self.sizes.total, self.config.optimizer_state
        all_weights = total * self.width / self.shards
        weights = min(self.config.weights.device_mib * 2**20, 2 * all_weights) if self.on_host else all_weights
        gradients = self._gradients(total)
        all_state = self.owned * self.state_width
        resident, streamed = self._split_state(all_state)
        ring = self._ring(all_state)
        buffers = self._unit_buffers() + self._buckets()
        all_gradients = self.gradient_width * total / self.shards
        inputs = activations.on_host if activations else 0
        summed = max(all_gradients, self._all_sums())  # in one place on the host
        rest = all_weights + summed if self.on_host else 0
        held = (all_state if state.backend != "resident" else 0) + rest + inputs
        speculated = self._speculative_bytes(resident, streamed)
        previous = self.width * speculated / self.state_width if speculated else 0
        chosen = state.previous_weights == "auto" and (self.on_host or state.resident_gib != 0)
        travel = state.previous_weights == "host" or chosen
        wanted = speculated + (previous if travel else 0)
        spare = min(wanted, self._spare_limit(held))
        share = spare / wanted if wanted else 0.0
        travelling = share * previous if travel else 0
        speculative = 0 if travel else share * previous
        moved = all_state if state.backend == "bulk" else 0
        staying = self._staying(summed) if self.on_host else 0
        travelling_sums = summed - staying
        base = weights + staying + resident + ring + buffers + speculative + (moved if state.update != "at_step" else 0)
        sums = 0 if self.config.sharding.kind == "fsdp2" else self._sums()
        during_step = base + gradients + sums + (moved if state.update == "at_step" else 0)
        moments = activations.moments if activations else ()
        during_backward = [base + self._live_at(moment) + self._sums(moment.blocks_done) for moment in moments]
        reduced = base + gradients + self._root_reduction()
        peak = max([during_step, reduced, *during_backward])
        # On the host: weights, gradients, and their sums. Each way: to a forward and a backward, and a gradient unless
        # it is updated in backward; or from an update and a gradient.
        early = travelling if self.on_host else 0
        to_device = 2 * all_weights + (1 - share * travel) * travelling_sums if self.on_host else 0
        to_host = all_weights + travelling_sums if self.on_host else 0
        once = int(streamed + max(to_device, to_host + travelling)) + inputs
        # The second micro-batch brings the gradient of the first, and each later one the sum.
        forward = int(all_weights) if self.on_host else 0
        backward = inputs + (int(all_weights + travelling_sums) if self.on_host else 0)
        first = int((summed - all_gradients) * travelling_sums / summed) if self.on_host else 0
        return Memory(
            weights=int(weights),
            gradients=int(gradients + staying + self._sums()),
            state=int(resident),
            ring=int(ring),
            previous_weights=int(speculative),
            other=int(buffers + moved),
            activations=activations.peak if activations else 0,
            gathered=int(max(self._gathered(2) + self._reductions(2), self._root_reduction())),
            peak=int(peak),
            host=int(held + spare),
            spare=int(spare),
            wanted_spare=int(wanted),
            staying=int(staying),
            wanted_staying=int(summed) if self.on_host else 0,
            link=once + (self.micro_batches - 1) * (forward + backward) - first,
            link_once=once,
            link_in_forward=int(min(early, max(to_host + early - to_device, 0))),
            forward_link=forward,
            backward_link=backward,
        )

    def _speculative_bytes(self, resident: float, streamed: float) -> float:
        """Bytes of records that are updated in backward. Excludes those that are complete last and used first."""
        if not self.speculates:
            return 0
        last = self.root + self.apart[0] if self.config.sharding.kind == "fsdp2" else self.sizes.before
        return streamed - max(last / self.sizes.total * (resident + streamed) - resident, 0)

    def _spare_limit(self, held: float) -> float:
        """Bytes of spare memory that may be allocated if the host holds ``held`` bytes without it."""
        limit = self.config.optimizer_state.spare_host_gib
        free = math.inf if self.host_memory is None else max(self.host_memory - held, 0)
        return (1 - LEFT_FREE) * free if limit == "auto" else min(free, float(limit) * 2**30)

    def _staying(self, summed: float) -> float:
        """Bytes of gradients and their sums that stay on the device. ``auto`` plans none."""
        gib = self.config.weights.gradients_gib
        return 0 if gib == "auto" else min(summed, float(gib) * 2**30)

    def _split_state(self, all_state: float) -> tuple[float, float]:
        """Bytes of state that stays on the device, and of state that is streamed."""
        state = self.config.optimizer_state
        if state.backend == "resident":
            return all_state, 0
        staying = 0 if state.resident_gib == "auto" else min(all_state, float(state.resident_gib) * 2**30)
        return staying, all_state - staying

    def _ring(self, all_state: float) -> float:
        state = self.config.optimizer_state
        return min(state.ring_mib * 2**20, all_state) if state.backend == "stream" else 0

    def _unit_buffers(self) -> float:
        """fp32 memory for the largest unit's gradients, shorter moments, and joined masters; ``stream`` has it in its
        ring."""
        state = self.config.optimizer_state
        if state.backend == "stream":
            return 0
        largest: float = largest_unit(self.sizes.tensors) / self.shards
        width: float = 0 if self.gradient_width == 4 or self._sums() else 4
        if state.moments != "float32":
            width += 2 * (self.optimizer.full - self.optimizer.bfloat16)  # in fp32, during their update
        if state.backend == "bulk":
            width += 4 if self.state_width else 0
            largest = min(largest, _BULK_UNIT / max(self.state_width, self.width))
        return width * largest

    def _buckets(self) -> float:
        """DDP's gradient buckets."""
        return self.sizes.total * self.width if isinstance(self.config.sharding, DDPSharding) else 0

    def _gradients(self, elements: float) -> float:
        if self.on_host:  # those of blocks, and of the embedding
            elements = min(elements, self._leaving + max(self.sizes.before, self.sizes.behind))
        elif self.config.optimizer_state.update == "in_backward":
            elements = min(elements, 2 * max(self.sizes.blocks, default=0) + self.sizes.behind)
        return elements * self.gradient_width / self.shards

    @property
    def _leaving(self) -> int:
        """Elements of gradients that are on the device on their way to the host: of one block, and of two before it."""
        return _UNDER_WAY * max(self.sizes.blocks, default=0)

    # -- one moment of backward

    def _live_at(self, moment: Moment) -> float:
        blocks, root = sum(self.sizes.blocks[:1]) * moment.blocks_done, moment.arrived_root
        if self.on_host:
            blocks = min(blocks, self._leaving)
            if moment.blocks_done >= _UNDER_WAY and moment.where != TAIL:
                root = 0  # the head's has left
        if self.config.sharding.kind != "fsdp2":
            return moment.live + self._gradients(blocks + root + moment.arrived_block)
        before, behind = self.apart
        waiting = moment.arrived_root - (0 if moment.where == HEAD else min(behind, moment.arrived_root))
        whole = (waiting + moment.arrived_block) * self._compute_width  # not yet reduced
        ahead = 1 if moment.where == TAIL else 2 if moment.blocks_below else 1
        reducing = 1 if moment.blocks_done else 0
        # FSDP2 keeps the buffer of a forward's last all-gather.
        own = {HEAD: 2 * behind, TAIL: before, FORWARD: max(before, behind)}.get(moment.where, 0) * self._compute_width
        return moment.live + whole + own + self._gradients(blocks) + self._gathered(ahead) + self._reductions(reducing)

    @property
    def _compute_width(self) -> float:
        sharding = self.config.sharding
        compute = sharding.compute if isinstance(sharding, FSDP2Sharding) else "parameters"
        if compute == "parameters":
            return self.width
        return (1 - self.fp32_share) * BYTES[compute] + 4 * self.fp32_share

    def _gathered(self, blocks: int) -> float:
        """Unsharded weights: of ``blocks`` blocks, and of the root from the first forward to the end of backward."""
        if self.config.sharding.kind != "fsdp2":
            return 0
        return self._compute_width * (self.root + blocks * max(self.sizes.blocks, default=0))

    def _reductions(self, blocks: int) -> float:
        if self.config.sharding.kind != "fsdp2":
            return 0
        return blocks * max(self.sizes.blocks, default=0) * self.gradient_width

    def _root_reduction(self) -> float:
        """The gradients of the root, or of a unit outside the blocks, before and during their reduction."""
        if self.config.sharding.kind != "fsdp2":
            return 0
        return max(self.root, *self.apart) * (self._compute_width + self.gradient_width)


def updates_in_backward(config: StrategyConfig) -> bool:
    """Whether ``update: overlap`` updates units in backward. Not under DDP, which reduces gradients at its end."""
    return config.optimizer_state.update == "overlap" and not isinstance(config.sharding, DDPSharding)


def shard_count(config: StrategyConfig, ranks: int) -> int:
    """Number of shards of the weights."""
    sharding = config.sharding
    if not isinstance(sharding, FSDP2Sharding):
        return 1
    mesh = sharding.mesh
    if mesh.shard != "auto":
        return int(mesh.shard)
    return max(1, ranks // (1 if mesh.replicate == "auto" else int(mesh.replicate)))


def largest_unit(tensors: Sequence[int]) -> int:
    """Elements of the largest unit: whole tensors up to a limit, and at least one tensor."""
    most = filled = 0
    for size in tensors:
        filled = filled + size if filled + size <= _UNIT else size
        most = max(most, filled)
    return most


# -- how much state an optimizer keeps: its classes are asked, by one update of a small matrix on the CPU -------------

_CPU = torch.device("cpu")
Group = Mapping[str, Any]


def rules_for(optimizer_class: type[torch.optim.Optimizer]) -> list[Rule]:
    """Muon gets the hidden matrices, and AdamW the rest; other classes get everything."""
    if optimizer_class is torch.optim.Muon:
        return [Rule(optimizer_class, kinds="hidden_matrices"), Rule(torch.optim.AdamW, kinds="rest")]
    return [Rule(optimizer_class)]


def state_by_rules(model: nn.Module, rules: Sequence[Rule] | Rule) -> StateBytes:
    """The state of the optimizer that ``strategy.create_optimizer(model, rules=rules)`` would create.

    Raises:
        TypeError, ValueError: as :func:`~lightstep.optimizer.rules.groups_by_rules`.
    """
    groups = groups_by_rules(rules, model)
    classes = GroupClasses(*own_class(groups))
    return _mean(classes, [{**classes.defaults_for(group), **group} for group in groups])


def state_of(optimizer: torch.optim.Optimizer) -> StateBytes:
    """The state of an optimizer that a strategy created; of others, for example DeepSpeed's, that of AdamW."""
    if not isinstance(optimizer, MixedPrecisionOptimizer):
        return ADAMW
    return _mean(optimizer.engine.classes, optimizer.param_groups)


def _mean(classes: GroupClasses, groups: Iterable[Group]) -> StateBytes:
    """The mean over the groups' parameters."""
    sizes = [(sum(p.numel() for p in group["params"]), _state_of_group(classes, group)) for group in groups]
    total = max(sum(size for size, _ in sizes), 1)

    def mean(kind: str) -> float:
        return sum(size * getattr(state, kind) for size, state in sizes) / total

    is_adam = all(state.is_adam for _, state in sizes)
    means = {kind: mean(kind) for kind in ("full", "bfloat16", "int8", "bitmap", "resident_master")}
    return StateBytes(**means, is_adam=is_adam)


def _state_of_group(classes: GroupClasses, group: Group) -> StateBytes:
    """Entries of other shapes than the parameter's (Adafactor's row sums) are small, and not counted."""
    own = classes.arithmetic_for(group)
    arithmetic = BaseArithmetic(own.optimizer_class, own.hyperparameters)
    arithmetic.prepare(_CPU)
    schema = arithmetic.schema(_CPU, [dict(group)])
    moments = moments_of(arithmetic.optimizer_class, schema)
    widths = {key: spec.dtype.itemsize for key, spec in schema.items() if spec.like_parameter and spec.dtype}
    full = sum(widths.values())
    bitmap = 0 if any(schema[key].never_negative for key in widths) else 1 / 8
    is_adam = arithmetic.optimizer_class in ADAMS  # a kernel of lightstep's joins its masters
    coded = sum(1 + SCALE + (SIGN if spec.never_negative else 0) - 4 for spec in moments.values())
    master = SPLIT_MASTER if is_adam else MASTER
    return StateBytes(full, full - 2 * len(moments), full + coded, bitmap, master, is_adam)
