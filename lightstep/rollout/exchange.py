"""One strategy's part in publishing and receiving weights, on whichever side this process is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightstep.config import ConfigError, Rollout
from lightstep.distributed import initialized, rank
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.group_transport import GroupReceiver, GroupTransport
from lightstep.rollout.message_board import MessageBoard
from lightstep.rollout.publishing import LocalEngine, Publication
from lightstep.rollout.roles import Roles
from lightstep.rollout.transport import TrainingEnded, WeightTransport

_TIMEOUT = 300.0
_NO_GROUP = "this strategy has no process group: it was closed, or neither prepare_model nor start() was called"


class WeightExchange:
    """Versions, receivers and the built-in transport of one strategy.

    Args:
        roles: who sends and who receives.
        config: ``roles.rollout``.
    """

    def __init__(self, roles: Roles, config: Rollout) -> None:
        self._roles, self._config = roles, config
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
        self, model: nn.Module, dtype: torch.dtype, to: RolloutEngine | WeightTransport | None, version: int | None
    ) -> int:
        """See ``Strategy.publish_weights``."""
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise ValueError(f"version is {version!r}; a whole number of at least 0 is needed")
        number = self._version + 1 if version is None else version
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        Publication(model, dtype, self._config.bucket_mib, self._transport_to(to, device)).send(number)
        self._version = number
        return number

    def _transport_to(self, to: RolloutEngine | WeightTransport | None, device: torch.device) -> WeightTransport | None:
        if isinstance(to, RolloutEngine):
            return LocalEngine(to)
        if to is not None and not isinstance(to, WeightTransport):
            raise TypeError(f"to is a {type(to).__name__}; a RolloutEngine or a WeightTransport is needed")
        first = not self._roles.asynchronous or self._roles.place == 0
        if to is not None:
            return to if first else None
        return self._to_workers(device) if self._workers() and first else None

    def _workers(self) -> list[int]:
        if not self._roles.asynchronous:
            raise ConfigError(
                "publish_weights without a receiver: roles.rollout.mode is sync, and no ranks generate alone; name the "
                "engine of this process, publish_weights(model, to=engine), or set mode: async"
            )
        if self._board is None:
            raise ConfigError(f"publish_weights: {_NO_GROUP}")
        left = [number for number in self._roles.rollout_ranks if number not in self._dropped]
        if not left:
            raise ConfigError("publish_weights: all rollout workers were dropped; nobody is left to receive weights")
        return left

    def _to_workers(self, device: torch.device) -> GroupTransport:
        assert self._board is not None, "_workers has looked"
        receivers = tuple(self._workers())
        if self._transport is None:
            self._transport = GroupTransport(self._board, receivers, device, self._timeout)
        elif self._transport.receivers != receivers:
            self._transport.change_receivers(receivers)
        return self._transport

    def drop(self, ranks: Iterable[int]) -> None:
        """See ``Strategy.drop_rollout_workers``."""
        chosen = set(ranks)
        unknown = sorted(chosen - set(self._roles.rollout_ranks))
        if unknown:
            raise ValueError(f"ranks {unknown} are no rollout workers; those are {list(self._roles.rollout_ranks)}")
        self._dropped |= chosen

    def receive(self, engine: RolloutEngine, wait: bool, timeout: float | None) -> int | None:
        """See ``Strategy.receive_weights``."""
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

    def close(self) -> None:
        """Let go of the other side; from the first trainer, tell the workers that there is nothing to wait for."""
        if self._board is not None and initialized():
            if self._roles.mine == "trainer" and self._roles.place == 0:
                self._transport = self._transport or GroupTransport(self._board, (), torch.device("cpu"), self._timeout)
                self._transport.close()
            if self._receiver is not None:
                self._receiver.close()
        self._transport = self._receiver = self._board = None
