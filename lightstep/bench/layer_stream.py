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
from typing import Any

import torch
from torch import Tensor

from lightstep.bench.contender import ADAMW, Contender, Task
from lightstep.bench.peers import pinned_like

PREFETCH_LAYERS = 1


class LayerStream(Contender):
    """Streams m and v layer by layer with per-tensor pinned copies; fp32 weights and gradients on the device."""

    name = "layer-stream"
    about = "per-layer m/v streamer, pinned copies per tensor, fp32 weights and gradients (verl pull request 5364)"
    gradient_dtype = torch.float32

    def __init__(self, task: Task) -> None:
        model = task.model(torch.float32)
        self._layers = model.layer_indices()
        self._masters = list(model.parameters())
        self._weights = [master.detach().bfloat16() for master in self._masters]
        self._steps = [torch.zeros((), device=task.device) for _ in self._masters]
        # By layer: the first moments of its parameters, then the second ones.
        self._host = [[pinned_like(self._masters[i]) for i in (*layer, *layer)] for layer in self._layers]
        self._torch: Any = torch.get_device_module(task.device)  # on a CPU its streams do nothing
        self._to_device, self._to_host = self._torch.Stream(), self._torch.Stream()
        self._device = task.device

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(self._masters, self.max_norm)
        staged = {i: self._prefetch(i) for i in range(min(PREFETCH_LAYERS + 1, len(self._layers)))}
        for index in range(len(self._layers)):
            moments, arrived = staged.pop(index)
            arrived.wait()
            self._update(index, moments)
            ahead = index + PREFETCH_LAYERS + 1
            if ahead < len(self._layers):
                staged[ahead] = self._prefetch(ahead)
            self._offload(index, moments)
        last = self._torch.Event()
        last.record(self._to_host)
        last.synchronize()
        torch._foreach_copy_(self._weights, [master.detach() for master in self._masters])
        for master in self._masters:
            master.grad = None

    def _prefetch(self, index: int) -> tuple[list[Tensor], Any]:
        """A layer's moments on their way to the device, and the event of their arrival."""
        arrived = self._torch.Event()
        with self._torch.stream(self._to_device):
            moments = [
                torch.empty_like(host, device=self._device).copy_(host, non_blocking=True) for host in self._host[index]
            ]
            arrived.record()
        return moments, arrived

    def _update(self, index: int, moments: list[Tensor]) -> None:
        layer = self._layers[index]
        masters = [self._masters[i] for i in layer]
        steps = [self._steps[i] for i in layer]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = ADAMW["betas"]
        torch._fused_adamw_(
            [master.detach() for master in masters],
            [master.grad for master in masters if master.grad is not None],
            moments[: len(layer)],
            moments[len(layer) :],
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

    def _offload(self, index: int, moments: list[Tensor]) -> None:
        now = self._torch.current_stream()
        self._to_host.wait_stream(now)
        with self._torch.stream(self._to_host):
            for host, moment in zip(self._host[index], moments, strict=True):
                host.copy_(moment, non_blocking=True)
        for moment in moments if self._device.type == "cuda" else ():
            moment.record_stream(self._to_host)
            moment.record_stream(now)

    def weights(self) -> list[Tensor]:
        return self._weights

    def device_weights(self) -> list[Tensor]:
        return [*self._weights, *(master.detach() for master in self._masters)]

    def host_tensors(self) -> list[Tensor]:
        return [moment for layer in self._host for moment in layer]
