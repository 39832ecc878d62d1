"""Roles of ranks (which train, which generate) and of models, and what a strategy does in reinforcement learning."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightstep.checkpoint.run_state import refuse_partly_loaded
from lightstep.config import ConfigError, Rollout, RolloutServers
from lightstep.distributed import Ranks, form_role_group, initialized, is_divided, rank
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.group_transport import GroupReceiver, GroupTransport, MessageBoard
from lightstep.rollout.publishing import (
    GatheredWeights,
    Publication,
    PublishedModel,
    PublishedWeights,
    SendingPlan,
)
from lightstep.rollout.servers import ServerTransport, SglangServer, VllmNcclServer, VllmServer
from lightstep.rollout.staged_weights import Publisher
from lightstep.rollout.transport import (
    Bucket,
    TrainingEnded,
    WeightInfo,
    WeightTransferError,
    WeightTransport,
)
from lightstep.sharding.dtypes import planned_dtypes
from lightstep.sharding.fsdp_groups import sharded_modules
from lightstep.sharding.model_names import unwrap_model
from lightstep.sharding.preparation import cast_tensors, materialise
from lightstep.sharding.prepared_model import PreparedModel

Role = Literal["trainer", "rollout", "reference"]

ROLES: tuple[Role, ...] = ("trainer", "rollout", "reference")

_DESCRIPTIONS = {
    "rollout": "a rollout model: it holds the inference weights and nothing else",
    "reference": "a reference model: it has no gradients and no optimizer",
}


def check_role(role: str) -> Role:
    """``role``, if it is one of :data:`ROLES`.

    Raises:
        ConfigError: it is not.
    """
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(map(repr, ROLES))}")
    return role


class Roles:
    """Which ranks have which role, from ``roles.rollout`` and the number of processes.

    Args:
        config: ``roles.rollout`` in the strategy file.
        name: the strategy's name, for errors.
    """

    def __init__(self, config: Rollout, name: str) -> None:
        self._config = config
        self._name = name

    @property
    def asynchronous(self) -> bool:
        """Whether some ranks only generate."""
        return self._config.mode == "async"

    @property
    def rollout_ranks(self) -> tuple[int, ...]:
        """The ranks of the default process group that only generate; none if the trainers generate.

        Raises:
            ConfigError: ``roles.rollout.ranks`` names a rank that does not exist, or leaves none to train.
        """
        if not self.asynchronous:
            return ()
        size, configured = _rank_and_size()[1], self._config.ranks or 1
        ranks = tuple(configured) if isinstance(configured, list) else tuple(range(max(size - configured, 0), size))
        if max(ranks) >= size or len(ranks) >= size:
            raise ConfigError(
                f"{self._name}: roles.rollout.ranks is {configured} and {size} {'is' if size == 1 else 'are'} running; "
                "at least one has to be left to train. Start more processes (torchrun --nproc-per-node), or set fewer"
            )
        return ranks

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        """The ranks of the default process group that train."""
        generating = set(self.rollout_ranks)
        return tuple(rank for rank in range(_rank_and_size()[1]) if rank not in generating)

    @property
    def own_role(self) -> Role:
        """This process's role."""
        return "rollout" if _rank_and_size()[0] in self.rollout_ranks else "trainer"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process's role."""
        return self.rollout_ranks if self.own_role == "rollout" else self.trainer_ranks

    @property
    def rank(self) -> int:
        """This process's rank among the ranks of its role."""
        return self.ranks.index(_rank_and_size()[0])

    def form_group(self) -> None:
        """Create the process group of each role. Needs the default process group.

        Raises:
            ConfigError: another strategy of this process has other roles.
        """
        ranks = self.ranks
        try:
            form_role_group(ranks)
        except ValueError as error:
            raise ConfigError(
                f"{self._name}: {error}; give every strategy of a program the same roles.rollout"
            ) from error

    # -- models

    def check(self, role: Role) -> None:
        """Check that this process may prepare a model for ``role``.

        Raises:
            ConfigError: this rank has another role.
        """
        if self.asynchronous and role != "reference" and role != self.own_role:
            raise ConfigError(
                f"{self._name}: prepare_model(role={role!r}) on rank {_rank_and_size()[0]}, whose role is "
                f"{self.own_role!r} (roles.rollout.ranks: {list(self.rollout_ranks)}); strategy.role says which role a "
                "process has"
            )

    def require_trainer(
        self, what: str, instead: str, model: nn.Module | None = None, allowed: tuple[Role, ...] = ()
    ) -> None:
        """Check that the model is trained, or without a role that this process is a trainer.

        Args:
            what: the call that needs a trainer.
            instead: what to do instead, for the error.
            model: prepared by the strategy; ``None`` checks only the process.
            allowed: further roles of models for which the call is allowed.

        Raises:
            ConfigError: the message has the role.
        """
        role = None if model is None else PreparedModel.of(model).role
        if model is not None and role in _DESCRIPTIONS and role not in allowed:
            kind = type(unwrap_model(model)).__name__
            raise ConfigError(f"{self._name}: {what}: this {kind} is {_DESCRIPTIONS[role]}; {instead}")
        if role is None and self.own_role == "rollout":
            raise ConfigError(
                f"{self._name}: {what} on rank {_rank_and_size()[0]}, which is a rollout worker: it has no trainer's "
                f"model, gradients or optimizer; {instead}"
            )


def prepare_inference(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Cast the whole model to ``dtype`` and move it to ``device``, without gradients, in evaluation mode."""
    cast_tensors(model, planned_dtypes(model, dtype))  # before the move: the device needs no memory for a wider dtype
    return materialise(model, device).requires_grad_(False).eval()


def fsdp_version(model: nn.Module) -> int:
    """2 for a model sharded by ``fully_shard``, 1 by ``FullyShardedDataParallel``, 0 for one that is not sharded."""
    if sharded_modules(model):
        return 2
    return int(any(isinstance(module, FullyShardedDataParallel) for module in model.modules()))


def _rank_and_size() -> tuple[int, int]:
    """Rank and number of processes, from the default process group or from torchrun's environment."""
    if initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


# -- publishing and receiving weights ----------------------------------------------------------------------------------


class LocalEngine(WeightTransport):
    """Sends weights to an engine in the trainer's process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        try:
            self._engine.begin_set(version, [info for bucket in buckets for info in bucket])
        except ValueError as error:
            raise WeightTransferError(f"{error}; nothing was written") from error

    def send(self, bucket: Bucket) -> None:
        self._engine.load_bucket(bucket)

    def finish(self) -> None:
        self._engine.end_set()

    def abort(self, reason: str) -> None:
        """Does nothing: the engine stays incomplete until a set ends."""


_TIMEOUT = 300.0
"""Seconds, if ``roles.rollout.timeout_s`` is not set."""

_NO_GROUP = "this strategy has no process group: it was closed, or neither prepare_model nor start() was called"


class ReinforcementLearning:
    """``strategy.rollout``: publishes the weights of trained models, or receives them.

    Args:
        config: ``roles.rollout``.
        roles: which ranks train and which generate.
        reshard: reshards what a forward has left unsharded.
    """

    def __init__(self, config: Rollout, roles: Roles, reshard: Callable[[nn.Module], None]) -> None:
        self._config, self._roles, self._reshard = config, roles, reshard
        self._timeout = _TIMEOUT if config.timeout_s is None else config.timeout_s
        self._version = 0
        self._dropped: set[int] = set()
        self._board: MessageBoard | None = None
        self._transport: GroupTransport | None = None
        self._servers: ServerTransport | None = None
        self._receiver: GroupReceiver | None = None
        self._publisher: Publisher | None = None
        self._last: PublishedWeights | None = None
        self._plans: weakref.WeakKeyDictionary[nn.Module, SendingPlan] = weakref.WeakKeyDictionary()

    def open(self) -> None:
        """Create the message board, when there is a process group. Called by all ranks of all roles."""
        if self._board is None:
            self._board = MessageBoard()

    def publish(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        to: RolloutEngine | WeightTransport | None = None,
        version: int | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> int:
        """See ``Strategy.publish_weights``. ``dtype``: floating-point weights are cast to it."""
        self._roles.require_trainer("publish_weights", "it receives weights: call receive_weights(engine)", model)
        refuse_partly_loaded(model, "publishing weights")
        if any(map(is_divided, unwrap_model(model).parameters())):
            raise ConfigError(
                "publish_weights with sharding.stage 3: DeepSpeed has partitioned the weights over the ranks; set "
                "stage to 1 or 2, or sharding.kind to fsdp2"
            )
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise ValueError(f"version is {version!r}; a whole number of at least 0 is needed")
        if replace and wait:
            raise ValueError("publish_weights(replace=True) replaces what waits for its turn, and needs wait=False")
        if not wait and isinstance(to, RolloutEngine):
            raise ValueError(
                "publish_weights(wait=False) with an engine: a thread would change its weights while this process may "
                "generate with them; leave wait out"
            )
        if wait:
            self.wait()
        inner = unwrap_model(model)
        with PreparedModel.of(model).between_steps("publish_weights()"):
            self._reshard(model)
            number = self._version + 1 if version is None else version
            device = next((tensor.device for tensor in inner.parameters()), torch.device("cpu"))
            transport = self._transport_to(to, device)

            def published(ranks: Ranks) -> PublishedModel:
                return PublishedModel(inner, dtype, self._config.bucket_mib, ranks, self._plans)

            ranks = Ranks()
            if wait and not ranks.gather(transport is not None and transport.deltas)[0]:
                self._last = Publication(GatheredWeights(published(ranks), ranks), transport, ranks).send(number)
            else:
                self._publisher = self._publisher or Publisher()
                self._publisher.publish(published, number, transport, replace)
                if wait:
                    self.wait()
            self._version = number
            return number

    def wait(self) -> PublishedWeights | None:
        """See ``Strategy.wait_for_publication``."""
        if self._publisher is not None:
            self._last = self._publisher.wait() or self._last
        return self._last

    def _transport_to(self, to: RolloutEngine | WeightTransport | None, device: torch.device) -> WeightTransport | None:
        if isinstance(to, RolloutEngine):
            return LocalEngine(to)
        if to is not None and not isinstance(to, WeightTransport):
            raise TypeError(f"to is of type {type(to).__name__}; a RolloutEngine or a WeightTransport is needed")
        first = self._roles.rank == 0
        if to is not None:
            return to if first else None
        if self._config.servers is not None:
            return self._server_transport(self._config.servers) if first else None
        board, receivers = self._workers()
        if not first:
            return None
        if self._transport is None:
            self._transport = GroupTransport(board, device, self._timeout)
        self._transport.change_receivers(receivers)
        return self._transport

    def _server_transport(self, config: RolloutServers) -> ServerTransport:
        if self._servers is None:
            kind = {"vllm": VllmServer, "vllm-nccl": VllmNcclServer, "sglang": SglangServer}[config.kind]
            self._servers = kind(
                config.urls,
                pause=config.pause,
                backend=config.backend,
                timeout_s=self._timeout,
                deltas=config.deltas,
            )
        return self._servers

    def _workers(self) -> tuple[MessageBoard, tuple[int, ...]]:
        """The message board, and the rollout workers that have not been dropped."""
        if not self._roles.asynchronous:
            raise ConfigError(
                "publish_weights without a receiver: roles.rollout.mode is sync, and no ranks generate alone; name the "
                "engine of this process, publish_weights(model, to=engine), set mode: async, or name servers "
                "(roles.rollout.servers)"
            )
        if self._board is None:
            raise ConfigError(f"publish_weights: {_NO_GROUP}")
        workers = tuple(number for number in self._roles.rollout_ranks if number not in self._dropped)
        if not workers:
            raise ConfigError("publish_weights: all rollout workers were dropped; nobody is left to receive weights")
        return self._board, workers

    def receive(self, engine: RolloutEngine, wait: bool = True, timeout: float | None = None) -> int | None:
        """See ``Strategy.receive_weights``."""
        if not isinstance(engine, RolloutEngine):
            raise TypeError(
                f"receive_weights needs a RolloutEngine; got {type(engine).__name__}. For a model: "
                "TransformersEngine(model)"
            )
        if not self._roles.asynchronous or self._roles.own_role != "rollout":
            raise ConfigError(
                "receive_weights is for ranks whose role is 'rollout' (roles.rollout.mode: async), and this one "
                "trains; an engine in a trainer's process gets its weights by publish_weights(model, to=engine)"
            )
        if self._board is None:
            raise ConfigError(f"receive_weights: {_NO_GROUP}")
        if not initialized():
            raise TrainingEnded("the process group has ended: no further weights will be published")
        if self._receiver is None:
            self._receiver = GroupReceiver(self._board, rank(), self._timeout)
        return self._receiver.receive(engine, wait, timeout)

    def drop(self, ranks: Iterable[int]) -> None:
        """Publish without these rollout workers from now on.

        Raises:
            ValueError: a rank is not a rollout worker.
        """
        dropped = set(ranks)
        unknown = sorted(dropped - set(self._roles.rollout_ranks))
        if unknown:
            raise ValueError(f"ranks {unknown} are no rollout workers; those are {list(self._roles.rollout_ranks)}")
        self._dropped |= dropped

    def close(self) -> None:
        """Close the links. The first trainer tells the workers that training has ended.

        Raises:
            WeightTransferError: a set was not sent that training did not wait for. Everything is closed.
        """
        try:
            self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        if self._board is not None and initialized():
            for end in (self._transport, self._receiver):
                if end is not None:
                    end.close()
            if self._roles.own_role == "trainer" and self._roles.rank == 0:
                self._board.end()
        if self._servers is not None:
            self._servers.close()
        self._transport = self._receiver = self._board = self._servers = self._publisher = None
