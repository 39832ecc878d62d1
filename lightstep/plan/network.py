"""Collectives that leave a node: the bytes through each GPU's network interface, and the time that nothing hides.

Rings, as NCCL's: an all-gather of B bytes over ``S`` ranks on nodes of ``g`` GPUs enters each node once, through all of
its interfaces: ``B (S - 1) / S / g`` each. A reduce-scatter is the same, and an all-reduce twice that. What stays in a
node is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lightstep.config import FSDP2Sharding, StrategyConfig
from lightstep.plan.memory import shard_count
from lightstep.plan.model import Sizes

__all__ = ["Crossing", "Network", "Passes"]


@dataclass(frozen=True)
class Network:
    """Nodes, and what connects them.

    Attributes:
        gpus_per_node: of each node.
        gb_per_s: GB/s each way of each GPU's interface.
    """

    gpus_per_node: int
    gb_per_s: float


class Passes(Protocol):
    """Milliseconds of computation: see :mod:`lightstep.plan.timing`."""

    block_forward: float
    block_backward: float
    loss_backward: float


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

    def unhidden(self, passes: Passes) -> float:
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
    width: int = getattr(torch, dtype).itemsize
    return width
