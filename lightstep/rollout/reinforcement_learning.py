"""What a strategy does beside training: weights for those that generate with them, and memory that is lent to them."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn

from lightstep.config import StrategyConfig
from lightstep.optimizer.base import BaseOptimizer
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.exchange import WeightExchange
from lightstep.rollout.roles import Role, Roles, fsdp_version
from lightstep.rollout.transport import WeightTransport
from lightstep.sharding.model_names import unwrap_model


class ReinforcementLearning(ABC):
    """This part of :class:`~lightstep.strategy.base.Strategy`.

    Attributes:
        roles: which ranks train and which generate.
    """

    config: StrategyConfig
    roles: Roles
    _weights: WeightExchange
    _optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[BaseOptimizer]]

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def _settle(self, model: nn.Module) -> None: ...

    @abstractmethod
    def _land(self, model: nn.Module) -> None: ...

    @property
    def role(self) -> Role:
        """``"rollout"`` on a rank that only generates (``roles.rollout.mode: async``), elsewhere ``"trainer"``."""
        return self.roles.mine

    @property
    def rollout_dtype(self) -> torch.dtype:
        """``roles.rollout.parameters`` as a torch dtype; without it that of the trained parameters."""
        asked = self.config.roles.rollout.parameters or self.config.precision.parameters
        return cast(torch.dtype, getattr(torch, asked))

    @staticmethod
    def fsdp_version(model: nn.Module) -> int:
        """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 where nothing is sharded."""
        return fsdp_version(model)

    def publish_weights(
        self, model: nn.Module, to: RolloutEngine | WeightTransport | None = None, version: int | None = None
    ) -> int:
        """Send the model's weights as they are after the last step to what generates with them; returns their version.

        Called by all ranks that train. Deferred updates land first. Weights go layer by layer: no device ever holds
        more of them, beyond what it keeps anyway, than one bucket (``roles.rollout.bucket_mib``, or one larger tensor)
        and one gathered tensor. Floating-point weights are cast to :attr:`rollout_dtype`. Nothing of the training state
        is changed, whatever happens.

        Args:
            model: what :meth:`prepare_model` returned for the role ``"trainer"``.
            to: ``None``: the ranks whose role is ``"rollout"``, which call :meth:`receive_weights`. An engine: one that
                lives in this process, on every rank that trains. A transport: whatever it leads to; used by the first
                rank alone.
            version: a number that travels along; default: one more than the last time, beginning with 1.

        Raises:
            WeightTransferError: a receiver died, did not answer in ``roles.rollout.timeout_s`` seconds, or cannot take
                these weights; on all ranks that train. Training can go on, and the weights be published again.
            ConfigError: nobody would receive them.
            RuntimeError: layers are updated in backward and ``step()`` has not been called, or a step broke off.
        """
        self.roles.refuse("publish_weights", "it receives weights: call receive_weights(engine)", model)
        for optimizer in list(self._optimizers.get(unwrap_model(model), ())):
            if isinstance(optimizer, MixedPrecisionOptimizer):
                optimizer.refuse_half_updated("Load a checkpoint before publishing weights")
        self._land(model)
        self._settle(model)
        return self._weights.publish(unwrap_model(model), self.rollout_dtype, to, version)

    def receive_weights(self, engine: RolloutEngine, wait: bool = True, timeout: float | None = None) -> int | None:
        """Take the newest published weights into the engine, on a rank whose role is ``"rollout"``.

        Args:
            engine: what generates; its ``version`` is the returned one afterwards.
            wait: for the next weights. Else only those that are being offered now are taken, and without any it returns
                ``None`` at once.
            timeout: seconds to wait; default ``roles.rollout.timeout_s``.

        Returns:
            The version received; ``None`` without ``wait`` if there is no newer one.

        Raises:
            TrainingEnded: the trainers have closed their strategy, or are gone: no weights will come any more.
            WeightTransferError: names, shapes or dtypes do not fit, or nothing came in time: the engine is as it was.
                Or the sending broke off: the engine refuses to generate until it has received a complete set.
            ConfigError: this process is no rollout worker.
        """
        return self._weights.receive(engine, wait, timeout)

    def drop_rollout_workers(self, ranks: Iterable[int]) -> None:
        """Publish without these (``WeightTransferError.ranks``) from now on. Called by all ranks that train."""
        self._weights.drop(ranks)

    def release_device_memory(self) -> AbstractContextManager[None]:
        """Give back what this strategy's optimizers hold on the device, and gathered weights, for another to use.

        At once; it comes back by itself with the next step. As a context manager around that phase it also empties the
        allocator's cache at its end, of what the phase leaves there. Weights and gradients stay; on a rank that only
        generates there is nothing to give.

        Raises:
            HostMemoryError: the host has no room for state that lives on the device; nothing of it was moved then.
        """
        for model, optimizers in list(self._optimizers.items()):
            self._settle(model)
            for optimizer in list(optimizers):
                optimizer.release_device_memory()
        return _emptying_cache(self.device)


@contextlib.contextmanager
def _emptying_cache(device: torch.device) -> Iterator[None]:
    try:
        yield
    finally:
        if device.type != "cpu":
            torch.accelerator.memory.empty_cache()
