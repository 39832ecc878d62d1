"""What a strategy does beside training: weights for those that generate with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightstep.config import ConfigError, Rollout
from lightstep.distributed import initialized, rank
from lightstep.optimizer.optimizer import MixedPrecisionOptimizer
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.group_transport import GroupReceiver, GroupTransport
from lightstep.rollout.message_board import MessageBoard
from lightstep.rollout.publishing import LocalEngine, Publication
from lightstep.rollout.roles import Roles
from lightstep.rollout.transport import TrainingEnded, WeightTransport
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

_TIMEOUT = 300.0
_NO_GROUP = "this strategy has no process group: it was closed, or neither prepare_model nor start() was called"


class ReinforcementLearning:
    """``strategy.rollout``: sends the weights of models that are trained, or receives them.

    Args:
        config: ``roles.rollout``.
        roles: which ranks train and which generate.
        reshard: puts a model's own parameters into their places, where a forward has left others.
    """

    def __init__(self, config: Rollout, roles: Roles, reshard: Callable[[nn.Module], None]) -> None:
        self._config, self._roles, self._reshard = config, roles, reshard
        self._timeout = _TIMEOUT if config.timeout_s is None else config.timeout_s
        self._version = 0
        self._dropped: set[int] = set()
        self._board: MessageBoard | None = None
        self._transport: GroupTransport | None = None
        self._receiver: GroupReceiver | None = None

    def open(self) -> None:
        """The process group is there. Called by all ranks of all roles."""
        if self._board is None:
            self._board = MessageBoard()

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
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise ValueError(f"version is {version!r}; a whole number of at least 0 is needed")
        number = self._version + 1 if version is None else version
        inner = unwrap_model(model)
        device = next((tensor.device for tensor in inner.parameters()), torch.device("cpu"))
        Publication(inner, dtype, self._config.bucket_mib, self._transport_to(to, device)).send(number)
        self._version = number
        return number

    def _transport_to(self, to: RolloutEngine | WeightTransport | None, device: torch.device) -> WeightTransport | None:
        if isinstance(to, RolloutEngine):
            return LocalEngine(to)
        if to is not None and not isinstance(to, WeightTransport):
            raise TypeError(f"to is of type {type(to).__name__}; a RolloutEngine or a WeightTransport is needed")
        first = not self._roles.asynchronous or self._roles.rank == 0
        if to is not None:
            return to if first else None
        board, receivers = self._workers()
        if not first:
            return None
        if self._transport is None:
            self._transport = GroupTransport(board, receivers, device, self._timeout)
        elif self._transport.receivers != receivers:
            self._transport.change_receivers(receivers)
        return self._transport

    def _workers(self) -> tuple[MessageBoard, tuple[int, ...]]:
        """Those that are still to receive weights, and how to reach them."""
        if not self._roles.asynchronous:
            raise ConfigError(
                "publish_weights without a receiver: roles.rollout.mode is sync, and no ranks generate alone; name the "
                "engine of this process, publish_weights(model, to=engine), or set mode: async"
            )
        if self._board is None:
            raise ConfigError(f"publish_weights: {_NO_GROUP}")
        left = tuple(number for number in self._roles.rollout_ranks if number not in self._dropped)
        if not left:
            raise ConfigError("publish_weights: all rollout workers were dropped; nobody is left to receive weights")
        return self._board, left

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
        if not isinstance(engine, RolloutEngine):
            raise TypeError(
                f"receive_weights needs a RolloutEngine; got {type(engine).__name__}. For a model: "
                "TransformersEngine(model)"
            )
        if not self._roles.asynchronous or self._roles.mine != "rollout":
            raise ConfigError(
                "receive_weights is for ranks whose role is 'rollout' (roles.rollout.mode: async), and this one "
                "trains; an engine in a trainer's process gets its weights by publish_weights(model, to=engine)"
            )
        if self._board is None:
            raise ConfigError(f"receive_weights: {_NO_GROUP}")
        if not initialized():
            raise TrainingEnded("the process group has ended: no weights will come any more")
        if self._receiver is None:
            self._receiver = GroupReceiver(self._board, rank(), self._timeout)
        return self._receiver.receive(engine, wait, timeout)

    def drop(self, ranks: Iterable[int]) -> None:
        """Publish without these from now on."""
        chosen = set(ranks)
        unknown = sorted(chosen - set(self._roles.rollout_ranks))
        if unknown:
            raise ValueError(f"ranks {unknown} are no rollout workers; those are {list(self._roles.rollout_ranks)}")
        self._dropped |= chosen

    def close(self) -> None:
        """Let go of the other side; from the first trainer, tell the workers that there is nothing to wait for."""
        if self._board is not None and initialized():
            if self._roles.mine == "trainer" and self._roles.rank == 0:
                self._transport = self._transport or GroupTransport(self._board, (), torch.device("cpu"), self._timeout)
                self._transport.close()
            if self._receiver is not None:
                self._receiver.close()
        self._transport = self._receiver = self._board = None
