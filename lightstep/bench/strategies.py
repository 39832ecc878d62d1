"""lightstep's own strategies as contenders, built and stepped through the public interface only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightstep.bench.contender import ADAMW, MAX_NORM, Contender, Setup, Skipped
from lightstep.bench.sources import Source
from lightstep.config import ConfigError
from lightstep.distributed import like, local_tensor
from lightstep.strategy import Strategy, available_strategies

_DEFAULT = ("resident", "bulk", "stream")


class StrategyContender(Contender):
    """`Strategy.load(name)` → `prepare_model` → `create_optimizer` → `step()`."""

    kind = "lightstep"

    def __init__(self, setup: Setup, source: str) -> None:
        self._strategy = on_device(load(source), setup.device)
        if self._strategy.config.sharding.kind == "deepspeed":
            raise Skipped("DeepSpeed takes gradients from its own backward only; measure it with --iteration")
        model = self._strategy.prepare_model(setup.stack())
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = self._strategy.create_optimizer(model, torch.optim.AdamW, **ADAMW)
        self._model = model
        self.name = source
        self.about = self._strategy.config.description or source
        self.gradient_dtype = self._parameters[0].dtype

    def step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = like(parameter, gradient)
        self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return [local_tensor(parameter.detach()) for parameter in self._parameters]

    def host_bytes(self) -> int:
        return int(self._optimizer.memory_report()["host_bytes"])

    def save(self, path: Path) -> None:
        """A checkpoint of weights, masters and state."""
        self._strategy.save_checkpoint(path, self._model, self._optimizer)

    def finish(self) -> None:
        self._optimizer.synchronize()

    def close(self) -> None:
        close = getattr(self._optimizer, "close", None)
        if callable(close):
            close()
        self._strategy.close()


def load(text: str) -> Strategy:
    """The strategy that `--strategies` names, with the clipping that every contender does."""
    return Source.parse(text).load({"clipping.max_norm": MAX_NORM})


def on_device(strategy: Strategy, device: torch.device) -> Strategy:
    """The strategy, if it works on the device that is measured.

    Raises:
        Skipped: it works elsewhere.
    """
    if strategy.device.type != device.type:
        raise Skipped(f"strategies run on this process's {strategy.device.type}; --device cannot change that")
    return strategy


def default_strategies() -> list[str]:
    """Those of resident, bulk and stream that this build has."""
    return [name for name in _DEFAULT if name in available_strategies() and _loads(name)]


def _loads(name: str) -> bool:
    try:
        load(name)
    except ConfigError:
        return False
    return True
