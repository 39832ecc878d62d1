"""The tensors of a model that is published, and the plan by which they are sent, which is kept for the next set."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightstep.checkpoint.errors import CheckpointError
from lightstep.checkpoint.huggingface import find_senders
from lightstep.checkpoint.tensors import shard_of
from lightstep.distributed import Ranks, layout_of, local_tensor
from lightstep.optimizer.param_groups import layer_of
from lightstep.rollout.transport import WeightInfo, WeightTransferError, buckets_of
from lightstep.sharding.dtypes import planned_by_tensor
from lightstep.sharding.model_names import NamedTensor, named_tensors

__all__ = ["Part", "PublishedModel", "SendingPlan"]

_MIB = 2**20


@dataclass(frozen=True)
class Part:
    """One trainer's shard of a tensor.

    Attributes:
        info: the whole tensor.
        region: where the shard is in it.
        shard: the shard as a tensor of its own.
    """

    info: WeightInfo
    region: tuple[slice, ...]
    shard: WeightInfo


@dataclass(frozen=True)
class SendingPlan:
    """What follows from names, dtypes and shards of a model's tensors. It refers to none of them.

    Attributes:
        described: these names, dtypes and shards.
        senders: a rank that has a tensor of which the first trainer has no part, by name.
        buckets: the tensors as they are sent.
        parts: by bucket and trainer: its shards. Each is the first trainer's that has it.
    """

    described: Hashable
    senders: Mapping[str, int]
    infos: Sequence[WeightInfo]
    buckets: Sequence[Sequence[WeightInfo]]
    parts: Sequence[Sequence[Sequence[Part]]]


class PublishedModel:
    """The tensors of a model, in the dtypes and buckets in which they are sent. Created by all trainers.

    Args:
        model: without wrappers, and without pending updates.
        dtype: weights are sent in it, except those that a rollout model keeps in another one.
        bucket_mib: size of a bucket in MiB.
        ranks: the trainers.
        plans: of earlier sets. A model whose tensors look as before is not planned again.

    Raises:
        WeightTransferError: ranks have different tensors of one name.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        bucket_mib: float,
        ranks: Ranks,
        plans: MutableMapping[nn.Module, SendingPlan],
    ) -> None:
        self.model = model
        tensors = named_tensors(model)
        described = (dtype, bucket_mib, tuple(map(_description, tensors)))
        plan = plans.get(model)
        if plan is None or not all(ranks.gather(plan.described == described)):
            plan = plans[model] = _planned(model, tensors, described, ranks)
        self.plan = plan
        self.named: Mapping[WeightInfo, NamedTensor] = dict(zip(plan.infos, tensors, strict=True))
        self.device = next((local_tensor(named.tensor).device for named in tensors), torch.device("cpu"))


def _description(named: NamedTensor) -> Hashable:
    """What the plan depends on."""
    tensor = named.tensor
    return named.names, type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, layout_of(tensor)


def _planned(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    described: tuple[torch.dtype, float, Hashable],
    ranks: Ranks,
) -> SendingPlan:
    dtype, bucket_mib, _ = described
    try:
        senders = find_senders(tensors, ranks)
    except CheckpointError as error:  # all ranks raise it
        raise WeightTransferError(f"{error}; engines know one tensor of a name") from error
    planned = planned_by_tensor(model, dtype)
    infos = [WeightInfo.of(named, planned.get(named.tensor)) for named in tensors]
    buckets = buckets_of(infos, [layer_of(info.name) for info in infos], bucket_mib * _MIB)
    return SendingPlan(described, senders, infos, buckets, _parts(tensors, infos, buckets, ranks))


def _parts(
    tensors: Sequence[NamedTensor],
    infos: Sequence[WeightInfo],
    buckets: Sequence[Sequence[WeightInfo]],
    ranks: Ranks,
) -> list[list[list[Part]]]:
    shards = [shard_of(named.tensor) for named in tensors]
    own = {
        (number, tuple(shard.offsets)): tuple(shard.lengths)
        for number, shard in enumerate(shards)
        if shard is not None and shard.numel
    }
    bucket_of = {info: number for number, bucket in enumerate(buckets) for info in bucket}
    parts: list[list[list[Part]]] = [[[] for _ in range(ranks.size)] for _ in buckets]
    known: set[tuple[int, tuple[int, ...]]] = set()
    for trainer, listed in enumerate(ranks.gather(own)):
        for (number, offsets), lengths in listed.items():
            if (number, offsets) in known:
                continue
            known.add((number, offsets))
            info = infos[number]
            region = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            parts[bucket_of[info]][trainer].append(Part(info, region, WeightInfo(info.names, lengths, info.dtype)))
    return parts
