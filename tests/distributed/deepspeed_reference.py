"""The textbook loop with what DeepSpeed does otherwise, each of it written out.

- A parameter without a gradient gets a gradient of zeros: it decays, and its moments are made.
- At stages 2 and 3 every micro-batch is averaged over the ranks by itself, and the averages are added.
- Gradients are multiplied by ``1 / (clip * scale)`` with ``clip = max((norm + 1e-6) / max_norm, 1)``; by the textbook's
  factor where stage 1 has its own optimizer for bf16 weights (without offloading).
- The loss scale grows one step later for the first time: at the step after ``growth_interval`` good ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.sharded_reference import ReplicatedLoop
from tests.reference.plain_loop import check_norm


class DeepSpeedLoop(ReplicatedLoop):
    """As ``ReplicatedLoop`` over one unit of all parameters.

    Args:
        stage: ZeRO stage.
        offload: masters and state are updated on the host.
    """

    def __init__(self, *arguments: Any, stage: int, offload: bool = False, **keywords: Any) -> None:
        self.stage, self.offload = stage, offload
        super().__init__(*arguments, units=[], **keywords)
        bf16 = self.reduce_dtype is not None and next(iter(self.masters)).dtype == torch.bfloat16
        self.bf16_optimizer = stage == 1 and bf16 and not offload
        self.overflow_at, self.steps = -1, 0

    def part(self, whole: Tensor) -> Tensor:
        return whole.cpu() if self.offload else whole

    def backward(self, loss: Tensor) -> None:
        if self.stage == 1:
            super().backward(loss)
            return
        earlier, self.sums = self.sums, {}
        super().backward(loss)
        self.sums = {p: average + earlier[p] if p in earlier else average for p, average in self._averaged().items()}

    def _averaged(self) -> dict[Tensor, Tensor]:
        """Zeros where there was no gradient."""
        averaged = {}
        for parameter in self.masters:
            average = (
                self.sums.get(parameter, torch.zeros_like(parameter, dtype=self.reduce_dtype)) / dist.get_world_size()
            )
            dist.all_reduce(average)
            averaged[parameter] = average
        return averaged

    @torch.no_grad()
    def finish(self, norm: Tensor, unrounded: Tensor) -> bool:
        """The step.

        Args:
            norm: as reported, 0-dim fp32.
            unrounded: as DeepSpeed has it, which may be fp64.
        """
        scale = self.loss_scale.scale
        averages = self._averaged() if self.stage == 1 else self.sums
        gradients = {p: average.float() for p, average in averages.items()}
        self.sums = {}
        check_norm(norm, [gradient / scale for gradient in gradients.values()])
        applied = math.isfinite(float(norm))
        if applied:
            self._update(gradients, unrounded)
        self._rescale(applied)
        return applied

    def _update(self, gradients: dict[Tensor, Tensor], norm: Tensor) -> None:
        for parameter, gradient in gradients.items():
            master = self.masters[parameter]
            master.grad = (gradient * self._factor(norm)).to(master.device)
        self.optimizer.step()
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    def _factor(self, norm: Tensor) -> Any:
        if self.max_norm is None:
            return 1.0 / self.loss_scale.scale
        if self.bf16_optimizer:
            return torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        clip = torch.clamp((norm + 1e-6) / self.max_norm, min=1.0)
        return 1.0 / (clip * self.loss_scale.scale)

    def _rescale(self, applied: bool) -> None:
        """DeepSpeed's rule, for ``hysteresis: 1``."""
        rule = self.loss_scale
        if rule.dynamic and not applied:
            rule.scale, self.overflow_at = max(rule.scale / 2, rule.min_scale), self.steps
        elif rule.dynamic:
            good = self.steps - self.overflow_at - 1
            rule.scale *= 2 if good > 0 and good % rule.growth_interval == 0 else 1
        self.steps += 1
