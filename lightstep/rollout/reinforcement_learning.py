"""What a strategy does beside training: weights for those that generate with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightstep.config import Rollout
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.exchange import WeightExchange
from lightstep.rollout.roles import Roles
from lightstep.rollout.transport import WeightTransport
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel


class ReinforcementLearning:
    """``strategy.rollout``: sends the weights of models that are trained, or receives them.

    Args:
        config: ``roles.rollout``.
        roles: which ranks train and which generate.
        reshard: puts a model's own parameters into their places, where a forward has left others.
    """

    def __init__(self, config: Rollout, roles: Roles, reshard: Callable[[nn.Module], None]) -> None:
        self._roles, self._reshard = roles, reshard
        self._exchange = WeightExchange(roles, config)

    def open(self) -> None:
        """The process group is there. Called by all ranks of all roles."""
        self._exchange.open()

    def publish(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        to: RolloutEngine | WeightTransport | None = None,
        version: int | None = None,
    ) -> int:
        """Send the model's weights as they are after the last step to what generates with them; returns their version.

        Called by all ranks that train. Deferred updates come first. Weights go layer by layer: no device ever holds
        more of them, beyond what it keeps anyway, than one bucket (``roles.rollout.bucket_mib``, or one larger tensor)
        and one gathered tensor. Nothing of the training state is changed, whatever happens.

        Args:
            model: what ``prepare_model`` returned for the role ``"trainer"``.
            dtype: what floating-point weights are cast to.
            to: ``None``: the ranks whose role is ``"rollout"``, which call :meth:`receive`. An engine: one that lives
                in this process, on every rank that trains. A transport: whatever it leads to; used by the first rank
                alone.
            version: a number that travels along; default: one more than the last time, beginning with 1.

        Raises:
            WeightTransferError: a receiver died, did not answer in ``roles.rollout.timeout_s`` seconds, or cannot take
                these weights; on all ranks that train. Training can go on, and the weights be published again.
            ConfigError: nobody would receive them.
            RuntimeError: layers are updated in backward and ``step()`` has not been called, or a step broke off.
        """
        self._roles.refuse("publish_weights", "it receives weights: call receive_weights(engine)", model)
        record = PreparedModel.of(model)
        for optimizer in record.optimizers:
            if isinstance(optimizer, MixedPrecisionOptimizer):
                optimizer.refuse_half_updated("Load a checkpoint before publishing weights")
        record.wait_for_updates()
        self._reshard(model)
        return self._exchange.publish(unwrap_model(model), dtype, to, version)

    def receive(self, engine: RolloutEngine, wait: bool = True, timeout: float | None = None) -> int | None:
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
        return self._exchange.receive(engine, wait, timeout)

    def drop(self, ranks: Iterable[int]) -> None:
        """See ``Strategy.drop_rollout_workers``."""
        self._exchange.drop(ranks)

    def close(self) -> None:
        """Tell the other side that nothing will come any more."""
        self._exchange.close()
