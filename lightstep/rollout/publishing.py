"""The trainers' side of publishing: whole tensors, one bucket at a time, from models that are sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.export import find_senders, gather_tensor
from lightstep.checkpoint.ranks import Ranks
from lightstep.distributed import local_tensor
from lightstep.optimizer.param_groups import layer_of
from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.transport import Bucket, WeightInfo, WeightTransferError, WeightTransport, buckets_of
from lightstep.sharding.model_names import named_tensors
from lightstep.sharding.preparation import buffers_like_parameters

_MIB = 2**20


class LocalEngine(WeightTransport):
    """To an engine in the trainer's own process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        try:
            self._engine.begin_set(version, [info for bucket in buckets for info in bucket])
        except ValueError as error:
            raise WeightTransferError(f"{error}; nothing was written") from error

    def send(self, bucket: Bucket) -> None:
        self._engine.take(bucket)

    def finish(self) -> None:
        self._engine.end_set()

    def abort(self, reason: str) -> None:
        """The engine knows: it has begun to load a set, and not ended it."""


class Publication:
    """One set of weights on its way. Called by all trainers, in the same order.

    Args:
        model: unwrapped and up to date.
        dtype: of its floating-point weights on the way.
        bucket_mib: size of a bucket, in MiB.
        transport: ``None`` on ranks that only take part in gathering.
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
        cast = {id(buffer) for buffer in buffers_like_parameters(model)}
        infos = [WeightInfo.of(named, dtype if _is_cast(named.tensor, cast) else None) for named in tensors]
        self._named = dict(zip(infos, tensors, strict=True))
        self._buckets = buckets_of(infos, [layer_of(info.name) for info in infos], bucket_mib * _MIB)
        self._device = next((local_tensor(named.tensor).device for named in tensors), torch.device("cpu"))

    @torch.no_grad()
    def send(self, version: int) -> None:
        """All of it.

        Raises:
            WeightTransferError: it did not arrive; on all ranks.
        """
        transport = self._transport
        try:
            self._everywhere(lambda: transport.begin(version, self._buckets) if transport else None)
            buffer = self._buffer()
            for infos in self._buckets:
                self._everywhere(lambda infos=infos: self._send_one(infos, buffer))  # type: ignore[misc]
            self._everywhere(lambda: transport.finish() if transport else None)
        except BaseException as error:
            if transport is not None:
                transport.abort(f"{type(error).__name__}: {error}")
            raise

    def _buffer(self) -> Tensor | None:
        if self._transport is None:
            return None
        return torch.empty(max(map(Bucket.nbytes_of, self._buckets), default=0), dtype=torch.uint8, device=self._device)

    def _send_one(self, infos: Sequence[WeightInfo], buffer: Tensor | None) -> None:
        if buffer is None or self._transport is None:
            for info in infos:
                self._whole(info)
            return
        bucket = Bucket(infos, buffer)
        for info, place in bucket:
            place.copy_(self._whole(info))
        self._transport.send(bucket)

    def _whole(self, info: WeightInfo) -> Tensor:
        return gather_tensor(self._named[info], self._senders, self._ranks.group, info.dtype)

    def _everywhere(self, step: Callable[[], object]) -> None:
        """Do it on all ranks; a failure of one of them is raised on all."""
        error: BaseException | None = None
        try:
            step()
        except BaseException as caught:
            error = caught
        told = None if error is None else (f"{type(error).__name__}: {error}", getattr(error, "ranks", ()))
        everybody = self._ranks.gather(told)
        if isinstance(error, WeightTransferError) or (error is not None and not isinstance(error, Exception)):
            raise error
        if error is not None:
            raise WeightTransferError(f"weights were not published: {told[0] if told else error}") from error
        for rank, failure in enumerate(everybody):
            if failure is not None:
                raise WeightTransferError(f"trainer {rank}: {failure[0]}", failure[1])


def _is_cast(tensor: Tensor, buffers: set[int]) -> bool:
    return tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or id(tensor) in buffers)
