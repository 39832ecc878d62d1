"""Publishing weights, on the trainers: gathers whole tensors and sends them, one bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import find_senders
from lightstep.distributed import Ranks, gather_tensor, local_tensor
from lightstep.optimizer.param_groups import layer_of
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError, WeightTransport, buckets_of
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.model_names import named_tensors

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
        self._device = next((local_tensor(named.tensor).device for named in tensors), torch.device("cpu"))

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Send all buckets.

        Raises:
            WeightTransferError: a receiver did not get all of them. All ranks raise.
        """
        transport = self._transport
        try:
            self._run_on_all(lambda: transport.begin(version, self._buckets) if transport else None)
            buffer = self._buffer()
            for infos in self._buckets:
                self._run_on_all(lambda infos=infos: self._send_bucket(infos, buffer))  # type: ignore[misc]
            self._run_on_all(lambda: transport.finish() if transport else None)
        except BaseException as error:
            if transport is not None:
                transport.abort(f"{type(error).__name__}: {error}")
            raise

    def _buffer(self) -> Tensor | None:
        if self._transport is None:
            return None
        return torch.empty(max(map(Bucket.nbytes_of, self._buckets), default=0), dtype=torch.uint8, device=self._device)

    def _send_bucket(self, infos: Sequence[WeightInfo], buffer: Tensor | None) -> None:
        """Gather the tensors, and on the sending rank send them."""
        if buffer is None or self._transport is None:
            for info in infos:
                self._gather(info)
            return
        bucket = Bucket(infos, buffer)
        for info, target in bucket:
            target.copy_(self._gather(info))
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
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise WeightTransferError(f"trainer {rank}: {failure[0]}", failure[1])
