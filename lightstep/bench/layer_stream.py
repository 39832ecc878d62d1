"""A per-layer streamer of Adam's moments, after the publicly known design of verl's pull request 5364.

What that design does, and this does: fp32 weights and fp32 gradients stay on the GPU; each parameter's two moments live
in a pinned host tensor of their own; three streams (host to device, compute, device to host) are ordered by one event
per layer and lane; one layer is prefetched ahead; device copies are allocated as they are needed and handed to the
allocator with `record_stream`; the step ends by waiting for the last copy. What is left out, in its favour: the
per-parameter step counters stay on the device (sending them costs a host sync per parameter), the update is torch's
fused kernel instead of `foreach`, and `empty_cache()` is not called after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightstep.bench.contender import ADAMW, MAX_NORM, Contender, Task
from lightstep.bench.lane import Lane, pinned_like

PREFETCH_LAYERS = 1


@dataclass(eq=False)
class Moments:
    """`exp_avg` and `exp_avg_sq` of one layer's parameters, in parameter order."""

    first: list[Tensor]
    second: list[Tensor]

    def all(self) -> list[Tensor]:
        return [*self.first, *self.second]


class LayerStream(Contender):
    """Streams m and v layer by layer with per-tensor pinned copies; fp32 weights and gradients on the device."""

    name = "layer-stream"
    about = "per-layer m/v streamer, pinned copies per tensor, fp32 weights and gradients (verl pull request 5364)"
    gradient_dtype = torch.float32

    def __init__(self, task: Task) -> None:
        stack = task.model(torch.float32)
        self._layers = stack.layer_indices()
        self._masters = list(stack.parameters())
        self._weights = [master.detach().bfloat16() for master in self._masters]
        self._steps = [torch.zeros((), device=task.device) for _ in self._masters]
        self._host = [Moments(self._pinned(layer), self._pinned(layer)) for layer in self._layers]
        self._to_device, self._to_host = Lane(task.device), Lane(task.device)
        self._compute = task.device

    def _pinned(self, layer: list[int]) -> list[Tensor]:
        return [pinned_like(self._masters[i]) for i in layer]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        staged = {i: self._prefetch(i) for i in range(min(PREFETCH_LAYERS + 1, len(self._layers)))}
        for index in range(len(self._layers)):
            moments, arrived = staged.pop(index)
            self._update(index, moments, arrived)
            ahead = index + PREFETCH_LAYERS + 1
            if ahead < len(self._layers):
                staged[ahead] = self._prefetch(ahead)
            self._offload(index, moments)
        self._to_host.synchronize()
        torch._foreach_copy_(self._weights, [master.detach() for master in self._masters])
        for master in self._masters:
            master.grad = None

    def _prefetch(self, index: int) -> tuple[Moments, torch.cuda.Event | None]:
        host, device = self._host[index], self._compute
        with self._to_device.queue():
            first = [_to(tensor, device) for tensor in host.first]
            second = [_to(tensor, device) for tensor in host.second]
        return Moments(first, second), self._to_device.mark()

    def _update(self, index: int, moments: Moments, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            torch.cuda.current_stream(self._compute).wait_event(arrived)
        layer = self._layers[index]
        masters = [self._masters[i] for i in layer]
        steps = [self._steps[i] for i in layer]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = ADAMW["betas"]
        torch._fused_adamw_(
            [master.detach() for master in masters],
            [master.grad for master in masters if master.grad is not None],
            moments.first,
            moments.second,
            [],
            steps,
            lr=ADAMW["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=ADAMW["weight_decay"],
            eps=ADAMW["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _offload(self, index: int, moments: Moments) -> None:
        self._to_host.follow()
        with self._to_host.queue():
            for host, device in zip(self._host[index].all(), moments.all(), strict=True):
                host.copy_(device, non_blocking=True)
        self._to_host.keep(moments.all())
        self._keep_for_compute(moments.all())

    def _keep_for_compute(self, tensors: list[Tensor]) -> None:
        if self._compute.type == "cuda":
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self._compute))

    def weights(self) -> list[Tensor]:
        return self._weights

    def device_weights(self) -> list[Tensor]:
        return [*self._weights, *(master.detach() for master in self._masters)]

    def host_tensors(self) -> list[Tensor]:
        return [tensor for moments in self._host for tensor in moments.all()]


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A fresh copy on `device` (also when that is the host)."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor, non_blocking=True)
