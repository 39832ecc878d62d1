"""A plugin for vLLM: a weight-transfer engine that receives over a torch process group, gloo or nccl.

vLLM finds it by the entry point ``vllm.general_plugins`` of this package. It is the receiving end of
:class:`~lightstep.rollout.servers.VllmServer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lightstep.rollout.server_calls import refuse_other_names
from lightstep.rollout.transport import Bucket, HeldWeights, WeightInfo, WeightLink, receive_bucket

__all__ = ["ProcessGroupEngine", "register"]

NAME = "lightstep"


def register() -> None:
    """Make the engine known to vLLM as the backend ``lightstep``. vLLM calls this in each of its processes."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, ProcessGroupEngine)


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Where the members of the process group meet, and which of them is this server's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group: str
    backend: str
    timeout_s: float


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of a bucket; with ``check_only`` those of a whole set, of which nothing is sent now.

    Attributes:
        set_id: of the set, if it is to be kept for deltas.
        base: of the set to which deltas are sent.
        is_last: the set's last bucket.
        changed: the bucket comes as a delta with so many words.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    check_only: bool = False
    set_id: str = ""
    base: str = ""
    is_last: bool = False
    changed: int | None = None

    @property
    def infos(self) -> list[WeightInfo]:
        listed = zip(self.names, self.shapes, self.dtype_names, strict=True)
        return [WeightInfo((name,), tuple(shape), getattr(torch, dtype)) for name, shape, dtype in listed]


class ProcessGroupEngine(WeightTransferEngine):
    """Receives buckets of whole tensors, and loads them as vLLM loads a checkpoint.

    Raises:
        NotImplementedError: the model has fused experts on a CPU. vLLM creates this when it has loaded the model.
    """

    init_info_cls, update_info_cls = GroupInfo, BucketInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        names = [name for name, _ in self.model.named_parameters()]
        fused = [name for name in names if name.rpartition(".")[2].startswith("w13_")]
        if fused and self.device.type == "cpu":  # by reading 0.32: they are packed after the first load alone
            raise NotImplementedError(
                f"the model has fused experts on a CPU ({fused[0]}), which vLLM loads wrongly a second time: leave "
                "--weight-transfer-config out, or serve it on a GPU"
            )
        self._link: WeightLink | None = None
        self._loading = False
        self._held = HeldWeights()

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=init_info.timeout_s)
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=limit)
        device = torch.device("cpu") if init_info.backend == "gloo" else self.device
        prefix = dist.PrefixStore(init_info.group, store)
        self._link = WeightLink(0, prefix, rank, init_info.world_size, device, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Nothing yet: the first bucket begins to replace weights."""

    def receive_weights(self, update_info: BucketInfo) -> None:
        infos = update_info.infos
        if update_info.check_only:
            parallel = self.parallel_config
            if parallel.rank < parallel.world_size - 1:
                return  # all have the same names; vLLM loses count of answers after an error of several workers
            if update_info.base:
                self._held.refuse_other_base(update_info.base)
            else:
                self._check(infos)
            return
        if self._link is None:
            raise RuntimeError("no process group with a trainer: /init_weight_transfer_engine comes first")
        bucket = receive_bucket(self._link, self._held, infos, update_info)
        if not self._loading:
            self._loading = True
            initialize_layerwise_reload(self.model)
        self.model.load_weights(self._named(bucket))

    def _named(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        for info, tensor in bucket:
            yield info.name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        if self._loading:
            self._loading = False
            self._held.end()
            finalize_layerwise_reload(self.model, self.model_config)

    def _check(self, infos: list[WeightInfo]) -> None:
        """Refuse a set for another model. A worker of a pipeline has a part of it, and cannot tell."""
        if self.parallel_config.pipeline_parallel_size > 1 or self.model_config.quantization is not None:
            return
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            mapped = zip(infos, mapper.apply_list([info.name for info in infos]), strict=True)
            infos = [WeightInfo((name,), info.shape, info.dtype) for info, name in mapped]
        refuse_other_names(infos, dict(self.model.named_parameters()), "the server")

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
