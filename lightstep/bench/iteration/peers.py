"""Other people's ways to keep optimizer state on the host, in whole iterations."""

from __future__ import annotations

import torch

from lightstep.bench.contender import ADAMW, MAX_NORM
from lightstep.bench.iteration.contender import Task, Training
from lightstep.bench.iteration.model import trained_model
from lightstep.bench.libraries import shard_to_host
from lightstep.distributed import local_tensor
from lightstep.sharding.preparation import checkpoint_activations


class OffloadTraining(Training):
    """FSDP2 with `CPUOffloadPolicy`: fp32 shards on the host, bf16 compute, `clip_grad_norm_` and fused AdamW there."""

    name = "fsdp2-offload"
    about = "fully_shard(CPUOffloadPolicy), fp32 shards, bf16 compute, fp32 reduction, clip_grad_norm_, fused CPU AdamW"
    kind = "peer"

    def __init__(self, task: Task) -> None:
        self.model = trained_model(task.shape, task.sequence, task.device, torch.float32, task.seed)
        checkpoint_activations(self.model)
        shard_to_host(self.model, list(self.model.model.layers), task.device, reshard_after_forward=True)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)

    def step(self) -> None:
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weight_bytes(self) -> int:
        return 0

    def host_bytes(self) -> int:
        state = [entry for entries in self._optimizer.state.values() for entry in entries.values()]
        return sum(local_tensor(tensor).nbytes for tensor in [*self.model.parameters(), *state])
