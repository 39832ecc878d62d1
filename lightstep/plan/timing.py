"""Rates of machines, with the source of each figure or measured here, and the time of an iteration that is planned from
them.

Measuring takes under a minute. The host buffers of the link are page-locked and registered at their exact size, like
lightstep's own. Each direction is measured alone, then both at once: that rate is what a streaming optimizer can reach.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightstep.chunked_loss import ChunkedLoss
from lightstep.config import ConfigError, FSDP2Sharding, StrategyConfig
from lightstep.config_errors import suggest
from lightstep.plan.memory import Memory, shard_count, updates_in_backward
from lightstep.plan.model import LOSS_CHUNK, Activations, Sizes, from_values, run_on_meta
from lightstep.sharding.preparation import checkpoint_activations
from lightstep.state.host_memory import HostSlab

_TOTALS = {2: 4 * 37.188, 4: 8 * 23.082}
"""GB/s of a host's links together, both ways, by the number of GPUs: h200-x2-8b-16k.json, h200-x4-8b-16k.json."""


_HIDDEN = 0.1
"""The part of forward and backward by which copies may make an iteration longer and still count as hidden."""


@dataclass(frozen=True)
class Link:
    """The link between host and device.

    Attributes:
        alone: GB/s one way.
        both: GB/s each way when both are busy.
        host: GB/s of all links of a host together, both ways, for so many devices and more; ``None``: each has its own.
        carries_network: the device's network traffic goes through its PCIe port, too.
    """

    alone: float
    both: float
    host: Mapping[int, float] | None
    source: str
    carries_network: bool = True

    def each_way(self, devices: int) -> float:
        """GB/s each way when ``devices`` devices of one host stream at once."""
        if self.host is None or devices == 1:
            return self.both
        return min(self.both, self.host[max(known for known in self.host if known <= devices)] / 2 / devices)


@dataclass(frozen=True)
class Profile:
    """A device and its link.

    Attributes:
        tflops: TFLOP/s that training reaches, over all operations of forward and backward.
        update_ms: ms of AdamW on the device per 10⁹ parameters.
        memory_gb: device memory in GB.
        computes_in: the dtype in which ``tflops`` was measured; ``bfloat16`` stands for all 16-bit dtypes.
    """

    name: str
    tflops: float
    update_ms: float
    memory_gb: float
    link: Link
    source: str
    computes_in: str = "bfloat16"

    def knows(self, dtype: str) -> bool:
        """Whether there is a rate for forward and backward in ``dtype``."""
        return (dtype == "float32") == (self.computes_in == "float32")

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"{self.name}: {self.source}", f"link: {self.link.source}")


LINKS = {
    "pcie4": Link(27.3, 25.0, None, "half of pcie5, as the standards' rates are; an estimate"),
    "pcie5": Link(55.4, 50.65, _TOTALS, "measured: h200-3b-tokens.json, h200-x2-8b-16k.json, h200-x4-8b-16k.json"),
    "nvlink-c2c": Link(
        394,
        360,
        None,
        "80 % of the data sheet's 450 GB/s each way, as pcie5 reaches; an estimate",
        carries_network=False,
    ),
}

PROFILES = {
    "H100": Profile(
        "H100",
        409,
        10.3,
        85.0,
        Link(54.9, 46.99, _TOTALS, "measured: h100-3b-iteration.json; of several GPUs those of H200"),
        "measured: h100-3b-iteration.json; AdamW is H200's, by the data sheets' 3.35 of 4.8 TB/s",
    ),
    "H200": Profile("H200", 442, 7.2, 150.7, LINKS["pcie5"], "measured: h200-3b-tokens.json, h200-1b.json"),
    "A100": Profile(
        "A100",
        188,
        16.9,
        85.0,
        LINKS["pcie4"],
        "torchtitan's docs/performance.md, Llama 3 70B on 64 GPUs; AdamW is H100's, by the data sheets' 2.04 of 3.35 "
        "TB/s; estimates",
    ),
    "B200": Profile(
        "B200",
        930,
        4.3,
        192.0,
        LINKS["pcie5"],
        "H100's, by the data sheets' 2250 of 989 TFLOP/s and 8.0 of 3.35 TB/s; an estimate",
    ),
    "GH200": Profile("GH200", 409, 10.3, 96.0, LINKS["nvlink-c2c"], "H100's, which it holds; an estimate"),
}


def find_profile(name: str) -> Profile:
    """A profile of :data:`PROFILES`; ``H100+pcie4`` selects another link.

    Raises:
        ConfigError: the GPU or the link is unknown; the message says what is allowed.
    """
    gpu, plus, link = name.partition("+")
    found = PROFILES.get(gpu.upper())
    if found is None:
        raise ConfigError(
            f"profile {name!r} is not known{suggest(gpu, list(PROFILES))}; allowed: {', '.join(PROFILES)}"
        )
    if not plus:
        return found
    if link.lower() not in LINKS:
        raise ConfigError(
            f"profile {name!r}: {link!r} is not a known link{suggest(link, list(LINKS))}; allowed: {', '.join(LINKS)}"
        )
    return Profile(name, found.tflops, found.update_ms, found.memory_gb, LINKS[link.lower()], found.source)


def profile_of_device(name: str) -> Profile | None:
    """The profile of a GPU by its CUDA name, for example ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = name.upper().replace("-", " ").split()
    return next((profile for key, profile in PROFILES.items() if key in words), None)


def profile_here() -> Profile | None:
    """The profile of this process's GPU, with the memory that this one has; None without a known one.

    Rates that were measured here (``lightstep plan --measure``) come before those of its name.
    """
    if not torch.cuda.is_available():
        return None
    known = cached_profile() or profile_of_device(torch.cuda.get_device_name())
    return None if known is None else with_own_memory(known)


def with_own_memory(profile: Profile) -> Profile:
    """The profile with the memory of this process's GPU, if it has one and that is smaller: a smaller model of the
    same name, or a part of it (MIG)."""
    if not torch.cuda.is_available():
        return profile
    found = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e9
    return replace(profile, memory_gb=found) if found < profile.memory_gb else profile


# -- collectives that leave a node -------------------------------------------------------------------------------------
#
# Rings, as NCCL's: an all-gather of B bytes over S ranks on nodes of g GPUs enters each node once, through all of its
# interfaces: B (S - 1) / S / g each. A reduce-scatter is the same, and an all-reduce twice that. What stays in a node
# is not counted.


@dataclass(frozen=True)
class Network:
    """Nodes, and what connects them.

    Attributes:
        gpus_per_node: of each node.
        gb_per_s: GB/s each way of each GPU's interface.
    """

    gpus_per_node: int
    gb_per_s: float


class Crossing:
    """What one strategy sends between nodes.

    Attributes:
        gathered: bytes each way through each GPU's interface in one step: weights for forwards and backwards.
        reduced: gradients.
        sent: updated weights, from the replica that has updated them to the others.
        nodes: their number.
    """

    def __init__(
        self, config: StrategyConfig, sizes: Sizes, ranks: int, network: Network, micro_batches: int = 1
    ) -> None:
        self._sizes, self._network, self._micro_batches = sizes, network, micro_batches
        self.nodes = ranks // network.gpus_per_node
        self._shards = shard_count(config, ranks)
        self._replicas = ranks // self._shards
        self._updates_at_step = config.optimizer_state.update == "at_step"
        self._shares_updates = config.optimizer_state.backend == "stream"
        parameters = config.precision.parameters
        self._width = _width(parameters)
        self._gathered_width = self._gradient_width = self._width
        if config.precision.reduce == "float32":
            self._gradient_width = 4
        self._gathers_again = False
        sharding = config.sharding
        if isinstance(sharding, FSDP2Sharding):
            if sharding.compute != "parameters":
                self._gathered_width = _width(sharding.compute)
            after = sharding.reshard_after_forward  # to so many ranks, or to all shards
            self._gathers_again = after is True or (after is not False and after > network.gpus_per_node)
        self._reductions = micro_batches if config.weights.placement == "host" else 1
        blocks, root = sum(sizes.blocks), sizes.root
        passes = micro_batches * (2 if self._gathers_again else 1)
        self.gathered = int(passes * self._gather(blocks) + micro_batches * self._gather(root))
        self.reduced = int(self._reductions * self._reduce(blocks + root))
        self.sent = int(self._send(blocks + root))

    def _across(self, nbytes: float) -> float:
        """Of an all-gather or a reduce-scatter over the shards."""
        per_node = self._network.gpus_per_node
        return nbytes * (self._shards - 1) / self._shards / per_node if self._shards > per_node else 0

    def _between(self, nbytes: float) -> float:
        """Of an all-gather over the replicas, of a shard of so many bytes. A node's shards share its interfaces."""
        per_node = self._network.gpus_per_node
        return nbytes * (self._replicas - 1) / self._replicas * min(self._shards, per_node) / per_node

    def _gather(self, elements: float) -> float:
        return self._across(elements * self._gathered_width)

    def _reduce(self, elements: float) -> float:
        nbytes = elements * self._gradient_width
        return self._across(nbytes) + 2 * self._between(nbytes / self._shards)

    def _send(self, elements: float) -> float:
        return self._between(elements * self._width / self._shards) if self._shares_updates else 0

    @property
    def in_forward(self) -> float:
        """Bytes in the forward after an update."""
        total = self._sizes.total
        return self._gather(total) + (0 if self._updates_at_step else self._send(total))

    @property
    def in_backward(self) -> float:
        """Bytes in the backward before an update."""
        again = self._gather(sum(self._sizes.blocks)) if self._gathers_again else 0
        return again + self._reduce(self._sizes.total)

    @property
    def milliseconds(self) -> float:
        """The time of all of it, if nothing else went on."""
        return self._ms(self.gathered + self.reduced + self.sent)

    def _ms(self, nbytes: float) -> float:
        return nbytes / self._network.gb_per_s / 1e6

    def unhidden(self, passes: _Compute) -> float:
        """The milliseconds of a step that computation does not hide.

        A block's weights are gathered while the block before it computes, and its gradients reduced while the next one
        does. Nothing hides the first gather of a forward, the last reduction of a backward, and those of what is in no
        block.
        """
        blocks, root = self._sizes.blocks, self._sizes.root
        count, block = len(blocks), sum(blocks) / max(len(blocks), 1)
        gather, reduce, send = self._ms(self._gather(block)), self._ms(self._reduce(block)), self._ms(self._send(block))
        again = gather if self._gathers_again else 0

        def forward(sent: float) -> float:
            first = self._ms(self._gather(root)) + gather
            return first + (count - 1) * max(gather + sent - passes.block_forward, 0)

        def backward(reduced: float) -> float:
            last = self._ms(self._reduce(root)) + reduced if reduced else 0
            first = max(again - passes.loss_backward, 0)
            return first + (count - 1) * max(again + reduced - passes.block_backward, 0) + last

        late = send and not self._updates_at_step
        others = self._micro_batches - 1
        alone = self._reductions > 1  # every micro-batch is reduced
        time = forward(send if late else 0) + others * forward(0)
        time += backward(reduce) + others * backward(reduce if alone else 0)
        return time + (self._ms(self._send(root)) if late else self._ms(self.sent))


def _width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


# -- the time of an iteration -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Time:
    """Milliseconds of one iteration.

    Attributes:
        compute: forward and backward.
        link: the copies, both directions at once.
        exposed: the part of the step that forward and backward do not hide.
        update: the arithmetic of the step, which nothing hides.
        network: collectives between nodes, if nothing else went on.
        unhidden: the part of them that forward and backward do not hide.
    """

    compute: float
    link: float
    exposed: float
    update: float = 0
    network: float = 0
    unhidden: float = 0

    @property
    def iteration(self) -> float:
        return self.compute + self.exposed + self.unhidden

    @property
    def is_limited_by_link(self) -> bool:
        """Whether copies make the iteration longer by more than a small part."""
        return self.exposed - self.update > _HIDDEN * self.compute


def iteration_time(
    config: StrategyConfig,
    sizes: Sizes,
    activations: Activations,
    memory: Memory,
    profile: Profile,
    ranks: int = 1,
    micro_batches: int = 1,
    crossing: Crossing | None = None,
    devices: int | None = None,
) -> Time:
    """The time of one optimizer step with all its micro-batches.

    Assumes that collectives within a node are hidden, and that ``overlap`` repeats no updates, as it does for a clipped
    step.

    Args:
        crossing: what leaves a node.
        devices: of a node; default: all ranks are on one.
    """
    one = _Compute(activations, profile)
    compute = micro_batches * (one.forward + one.backward)
    state = config.optimizer_state
    update = sizes.total / shard_count(config, ranks) / 1e9 * profile.update_ms
    network = unhidden = 0.0
    if crossing is not None:
        network, unhidden = crossing.milliseconds, crossing.unhidden(one)
    rate = profile.link.each_way(devices or ranks) * 1e6  # bytes per ms
    # What blocks keep on the host goes there in forward and comes back in backward; a pass waits for slower copies.
    inputs = activations.on_host / rate
    waiting = max(inputs - one.forward, 0) + max(inputs - one.backward, 0)
    # So do the passes of further micro-batches for weights and sums of gradients that rest on the host.
    forward, backward = max(inputs, memory.forward_link / rate), memory.backward_link / rate
    waiting += (micro_batches - 1) * (max(forward - one.forward, 0) + max(backward - one.backward, 0))
    all_copies = memory.link / rate
    if memory.link == micro_batches * activations.on_host:
        return Time(compute, all_copies, update + waiting, update, network, unhidden)
    link = (memory.link_once - memory.link_in_forward) / rate  # beside one micro-batch
    if crossing is not None and profile.link.carries_network:
        link += _beside(state.update, crossing) / rate
    if state.update == "at_step":
        copies = link - inputs
    elif state.update == "in_backward":
        copies = _Units(sizes, one, link).end_of_updates() - one.backward
    else:
        early = memory.spare_share if updates_in_backward(config) else 0.0
        copies = _Units(sizes, one, link).end_of_forward(early) - one.forward
    # Copies are hidden beside the computation, arithmetic is not.
    return Time(compute, all_copies, max(update, copies) + waiting, update, network, unhidden)


def _beside(update: str, crossing: Crossing) -> float:
    """Bytes between nodes, each way, that take the device's port while its state is copied."""
    forward = crossing.in_forward if update in ("next_forward", "overlap") else 0
    return forward + (crossing.in_backward if update in ("in_backward", "overlap") else 0)


class _Compute:
    """Compute times of one micro-batch in ms."""

    def __init__(self, activations: Activations, profile: Profile) -> None:
        def ms(flops: float) -> float:
            return flops / profile.tflops / 1e9

        self.blocks = activations.blocks
        self.block_forward = ms(activations.forward_flops)
        self.block_backward = ms(activations.backward_flops)
        self.loss_forward = ms(activations.other_forward_flops)
        self.loss_backward = ms(activations.other_backward_flops)
        self.forward = self.blocks * self.block_forward + self.loss_forward
        self.backward = self.blocks * self.block_backward + self.loss_backward


class _Units:
    """The link time of each unit: embedding, blocks, norm and head. Time 0 is the end of forward."""

    def __init__(self, sizes: Sizes, compute: _Compute, link: float) -> None:
        self._compute = compute
        elements = [sizes.before, *sizes.blocks, sizes.behind]
        self._link = [link * count / sizes.total for count in elements]
        last = len(elements) - 1
        ready = [compute.loss_backward + compute.block_backward * (last - i) for i in range(last)]
        self._ready = [compute.backward, *ready[1:], compute.loss_backward]

    def end_of_updates(self) -> float:
        """When the last update ends if every unit is updated as soon as its gradients are complete."""
        return max(self._in_backward().values())

    def _in_backward(self, until: float = float("inf"), share: float = 1.0) -> dict[int, float]:
        """The end time of each update that begins before ``until``, last unit first.

        Args:
            share: the part that has spare memory. Units get it in model order, and the embedding needs none.
        """
        now, done, behind = 0.0, {}, self._link[1:]
        room = share * sum(behind)
        with_spare = sum(filled - own / 2 < room for filled, own in zip(accumulate(behind), behind, strict=True))
        for unit in reversed(range(with_spare + 1)):
            start = max(now, self._ready[unit])
            if start < until:
                now = done[unit] = start + self._link[unit]
        return done

    def end_of_forward(self, early: float) -> float:
        """Time from the end of backward to the end of the next forward, in which each part waits for its unit.

        Args:
            early: the share of updates that may begin in backward. All others wait for the norm.
        """
        backward = self._compute.backward
        done = self._in_backward(backward, early)
        now = max([backward, *done.values()])
        for unit in range(len(self._link)):
            if unit not in done:
                now = done[unit] = now + self._link[unit]
        at, blocks = backward, len(self._link) - 2
        for unit, forward in enumerate([0, *[self._compute.block_forward] * blocks, self._compute.loss_forward]):
            at = max(at, done[unit]) + forward
        return at - backward


# -- this machine's rates ----------------------------------------------------------------------------------------------

_REPEATS = 3
_MODEL = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False}
_GPU_SIZES = {"vocab_size": 32_000, "hidden_size": 3072, "intermediate_size": 8192}
_GPU_SIZES |= {"num_attention_heads": 24, "num_key_value_heads": 8}
_CPU_SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384}
_CPU_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def cached_profile() -> Profile | None:
    """The cached profile of this device, if there is one."""
    try:
        values = json.loads(_cache_file(_own_device()).read_text(encoding="utf-8"))
        return Profile(**{**values, "link": Link(**values["link"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def measure_profile() -> Profile:
    """Measure a training pass of two transformer blocks, AdamW, and the link. Results for a GPU are cached."""
    device = _own_device()
    on_gpu = device.type == "cuda"
    said = f"measured here, {datetime.datetime.now():%Y-%m-%d %H:%M}"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # CPUs without bf16 instructions compute it ten times slower
    tflops = _training_tflops(device, dtype, *((_GPU_SIZES, 16_384, 4096) if on_gpu else (_CPU_SIZES, 512, 256)))
    update_ms = _update_ms(device, 10**8 if on_gpu else 10**6)
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if on_gpu else 0.0
    link = Link(1e9, 1e9, None, "a CPU has none")
    if (seen := measure_link(device)) is not None:
        link = Link(min(seen.to_device, seen.to_host), seen.duplex, None, f"{said}, one GPU alone")
    profile = Profile(device_name(device), tflops, update_ms, memory, link, said, str(dtype).removeprefix("torch."))
    if on_gpu:  # later plans are about GPUs
        file = _cache_file(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")
    return profile


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _cache_file(device: torch.device) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "lightstep" / f"rates-{device_name(device).lower().replace(' ', '-')}.json"


def _training_tflops(
    device: torch.device, dtype: torch.dtype, sizes: dict[str, int], tokens: int, sequence: int
) -> float:
    """TFLOP/s of forward and backward, with activation checkpointing and a loss in chunks."""
    model = from_values({**_MODEL, **sizes}, dtype, str(device)).train()
    seen = run_on_meta(model, tokens, sequence, True, LOSS_CHUNK)
    checkpoint_activations(model)
    loss_of = ChunkedLoss(model, LOSS_CHUNK)
    words = torch.zeros(tokens // sequence, sequence, dtype=torch.long, device=device)

    def train() -> None:
        loss_of(model, words).backward()
        model.zero_grad()

    blocks = seen.blocks * (seen.forward_flops + seen.backward_flops)
    return (blocks + seen.other_forward_flops + seen.other_backward_flops) / _fastest_ms(train, device) / 1e9


def _update_ms(device: torch.device, elements: int) -> float:
    """ms of AdamW per 10⁹ parameters."""
    weight = nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _fastest_ms(lambda: optimizer.step(), device) / elements * 1e9


def _fastest_ms(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time, after one untimed run."""
    work()
    return min(lap_times([work] * _REPEATS, device))


def lap_times(works: Iterable[Callable[[], object]], device: torch.device) -> list[float]:
    """Run `works` back to back; the ms of each, from the end of the one before.

    Moments are marked in the current stream of a GPU, or on the host for a CPU.
    """
    mark = _event if device.type == "cuda" else time.perf_counter
    marks: list[Any] = [mark()]
    for work in works:
        work()
        marks.append(mark())
    if device.type != "cuda":
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# -- the link ---------------------------------------------------------------------------------------------------------

_BYTES = 256 << 20  # per buffer: much larger than any cache, small next to the model
_COPIES = 4  # per sample and direction
_SAMPLES = 7


@dataclass(frozen=True)
class MeasuredLink:
    """Rates in GB/s (10⁹ bytes) of one rank; `duplex` is each way's while both run."""

    to_device: float
    to_host: float
    duplex: float
    page_locked: bool

    def or_faster(self, other: MeasuredLink) -> MeasuredLink:
        """The faster of the two, figure by figure; percentages refer to the best rate measured."""
        return MeasuredLink(
            max(self.to_device, other.to_device),
            max(self.to_host, other.to_host),
            max(self.duplex, other.duplex),
            self.page_locked and other.page_locked,
        )


def measure_link(
    device: torch.device, nbytes: int = _BYTES, wait_for_others: Callable[[], object] = lambda: None
) -> MeasuredLink | None:
    """The link's rates; None on a CPU, which has no link.

    Args:
        nbytes: of each buffer.
        wait_for_others: called before each sample, so that several ranks copy at the same time.
    """
    if device.type != "cuda":
        return None
    slab = HostSlab(2 * nbytes, device=device, what="the link measurement")
    try:
        return _link_of(slab, nbytes, device, wait_for_others)
    finally:
        slab.close()


def _link_of(slab: HostSlab, nbytes: int, device: torch.device, wait_for_others: Callable[[], object]) -> MeasuredLink:
    device_source, device_target = torch.empty(2, nbytes, dtype=torch.uint8, device=device).random_()
    host_source, host_target = slab.tensor(torch.uint8, (2, nbytes))
    host_source.copy_(device_source)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    both = ((device_target, host_source), (host_target, device_source))
    ways = (both[:1], both[1:], both)
    samples: list[list[float]] = []
    for _ in range(_SAMPLES + 1):
        samples.append([])
        for copies in ways:
            torch.cuda.synchronize()
            wait_for_others()
            samples[-1].append(_rate(copies, streams, nbytes))
    medians = [statistics.median(column) for column in zip(*samples[1:], strict=True)]  # the first sample warms up
    to_device, to_host, duplex = medians
    return MeasuredLink(to_device, to_host, duplex, slab.page_locked)


def _rate(copies: Sequence[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream], nbytes: int) -> float:
    """GB/s each way, from a common start until all directions are done."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for (target, source), stream in zip(copies, streams, strict=False):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for _ in range(_COPIES):
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return _COPIES * nbytes / milliseconds / 1e6
