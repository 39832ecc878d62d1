"""Publishing and receiving weights: a strategy's part in reinforcement learning.

The trainers gather whole tensors and send them, one bucket at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import find_senders
from lightstep.checkpoint.model_state import refuse_partly_loaded
from lightstep.config import ConfigError, Rollout, RolloutServers
from lightstep.distributed import Ranks, gather_tensor, initialized, local_tensor, rank
from lightstep.optimizer.param_groups import layer_of
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.file_names import infos_in_files, tensors_in_files
from lightstep.rollout.group_transport import GroupReceiver, GroupTransport, MessageBoard
from lightstep.rollout.roles import Roles
from lightstep.rollout.servers import ServerTransport, SglangServer, VllmServer
from lightstep.rollout.transport import (
    Bucket,
    TrainingEnded,
    WeightInfo,
    WeightTransferError,
    WeightTransport,
    buckets_of,
)
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.model_names import named_tensors, unwrap_model
from lightstep.sharding.prepared_model import PreparedModel

_MIB = 2**20


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


class Publication:
    """Sends one set of weights. All trainers create and call it in the same order.

    Args:
        model: without wrappers, and without pending updates.
        dtype: weights are sent in it, except those that a rollout model keeps in another one.
        bucket_mib: size of a bucket in MiB.
        transport: ``None`` on ranks that only take part in gathering.

    Raises:
        WeightTransferError: ranks have different tensors of one name.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, bucket_mib: float, transport: WeightTransport | None
    ) -> None:
        self._ranks = Ranks()
        self._transport = transport
        tensors = named_tensors(model)
        try:
            self._senders = find_senders(tensors, self._ranks)
        except CheckpointError as error:  # all ranks raise it
            raise WeightTransferError(f"{error}; engines know one tensor of a name") from error
        planned = planned_by_tensor(model, dtype)
        infos = [WeightInfo.of(named, planned.get(named.tensor)) for named in tensors]
        self._named = dict(zip(infos, tensors, strict=True))
        self._buckets = buckets_of(infos, [layer_of(info.name) for info in infos], bucket_mib * _MIB)
        self._sent: Sequence[Sequence[WeightInfo]] = self._buckets
        self._model = model
        self._device = next((local_tensor(named.tensor).device for named in tensors), torch.device("cpu"))

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Send all buckets.

        Raises:
            WeightTransferError: a receiver did not get all of them. All ranks raise.
        """
        transport = self._transport
        try:
            self._run_on_all(lambda: self._begin(transport, version) if transport else None)
            size = max(map(Bucket.nbytes_of, self._sent), default=0) if transport else 0
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            for infos, sent in zip(self._buckets, self._sent, strict=True):
                self._run_on_all(lambda infos=infos, sent=sent: self._send_bucket(infos, sent, buffer))  # type: ignore[misc]
            self._run_on_all(lambda: transport.finish() if transport else None)
        except BaseException as error:
            if transport is not None:
                transport.abort(f"{type(error).__name__}: {error}")
            raise

    def _begin(self, transport: WeightTransport, version: int) -> None:
        if transport.uses_file_names:
            self._sent = infos_in_files(self._model, self._buckets)
        transport.begin(version, self._sent)

    def _send_bucket(self, infos: Sequence[WeightInfo], sent: Sequence[WeightInfo], buffer: Tensor) -> None:
        """Gather the tensors ``infos``, and on the sending rank send them as ``sent``."""
        if self._transport is None:
            for info in infos:
                self._gather(info)
            return
        bucket = Bucket(sent, buffer)
        if sent is infos:
            for info, target in bucket:
                target.copy_(self._gather(info))
        else:
            gathered = {info.name: self._gather(info).to(info.dtype) for info in infos}
            found = tensors_in_files(self._model, gathered)
            for info, target in bucket:
                target.copy_(found[info.name])
        self._transport.send(bucket)

    def _gather(self, info: WeightInfo) -> Tensor:
        named = self._named[info]
        return gather_tensor(named.tensor, self._senders.get(named.name), self._ranks.group, info.dtype)

    def _run_on_all(self, step: Callable[[], object]) -> None:
        """Run ``step`` on all ranks. If it fails on one of them, all raise."""
        error: BaseException | None = None
        try:
            step()
        except BaseException as caught:
            error = caught
        text = f"{type(error).__name__}: {error}"
        failures = self._ranks.gather(None if error is None else (text, getattr(error, "ranks", ())))
        if isinstance(error, WeightTransferError) or (error is not None and not isinstance(error, Exception)):
            raise error
        if error is not None:
            raise WeightTransferError(f"weights were not published: {text}") from error
        for trainer, failure in enumerate(failures):
            if failure is not None:
                raise WeightTransferError(f"trainer {trainer}: {failure[0]}", failure[1])


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
    ) -> int:
        """See ``Strategy.publish_weights``. ``dtype``: floating-point weights are cast to it."""
        self._roles.require_trainer("publish_weights", "it receives weights: call receive_weights(engine)", model)
        refuse_partly_loaded(model, "publishing weights")
        with PreparedModel.of(model).between_steps("publish_weights()"):
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
        if self._config.servers is not None:
            return self._server_transport(self._config.servers) if self._roles.rank == 0 else None
        board, receivers = self._workers()
        if not first:
            return None
        if self._transport is None:
            self._transport = GroupTransport(board, receivers, device, self._timeout)
        elif self._transport.receivers != receivers:
            self._transport.change_receivers(receivers)
        return self._transport

    def _server_transport(self, config: RolloutServers) -> ServerTransport:
        if self._servers is None:
            kind = {"vllm": VllmServer, "sglang": SglangServer}[config.kind]
            self._servers = kind(config.urls, pause=config.pause, backend=config.backend, timeout_s=self._timeout)
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
        """Close the links. The first trainer tells the workers that training has ended."""
        if self._board is not None and initialized():
            if self._roles.own_role == "trainer" and self._roles.rank == 0:
                self._transport = self._transport or GroupTransport(self._board, (), torch.device("cpu"), self._timeout)
                self._transport.close()
            if self._receiver is not None:
                self._receiver.close()
        if self._servers is not None:
            self._servers.close()
        self._transport = self._receiver = self._board = self._servers = None
