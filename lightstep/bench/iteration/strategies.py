"""lightstep's strategies in whole iterations, and the same iterations without an optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from lightstep.bench.contender import ADAMW
from lightstep.bench.iteration.contender import SETTINGS, Batch, Task, Training
from lightstep.bench.iteration.model import trained_model
from lightstep.bench.sources import Source
from lightstep.bench.strategies import on_device
from lightstep.distributed import world_size
from lightstep.strategy import Strategy


class _Prepared(Training):
    """A strategy's model."""

    def __init__(self, task: Task, source: Source) -> None:
        self._strategy: Strategy = on_device(source.load(SETTINGS), task.device)
        dtype = self._strategy.parameter_dtype
        model = trained_model(task.shape, task.sequence, task.device, dtype, task.seed)
        self.model = self._strategy.prepare_model(model)

    def close(self) -> None:
        self._strategy.close()


class StrategyTraining(_Prepared):
    """`Strategy.load` → `prepare_model` → `create_optimizer`, and the loop of the README."""

    kind = "lightstep"

    def __init__(self, task: Task, source: Source) -> None:
        super().__init__(task, source)
        self.name = source.text
        self.about = self._strategy.config.description or source.text
        self._optimizer = self._strategy.create_optimizer(self.model, torch.optim.AdamW, **ADAMW)

    def iterate(self, batch: Batch) -> None:
        with self._strategy.accumulate(self.model):
            super().iterate(batch)

    def backward(self, loss: Tensor) -> None:
        self._optimizer.backward(loss)

    def step(self) -> None:
        self.grad_norm = self._optimizer.step().grad_norm

    def host_bytes(self) -> int:
        return int(self._optimizer.memory_report()["host_bytes"])

    def finish(self) -> None:
        self._optimizer.synchronize()

    def close(self) -> None:
        close = getattr(self._optimizer, "close", None)
        if callable(close):
            close()
        super().close()


class WithoutOptimizer(_Prepared):
    """Forward and backward of `resident` (of `fsdp2` on several ranks), whose gradients are dropped."""

    name = "no optimizer"
    about = "forward and backward, and the gradients dropped"
    kind = "baseline"

    def __init__(self, task: Task) -> None:
        super().__init__(task, Source.parse("resident" if world_size() == 1 else "fsdp2"))

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
