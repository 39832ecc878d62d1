"""The bench under torchrun: every rank measures at the same time, the slowest counts, rank 0 reports."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

from lightstep.distributed import end_process_group


class Ranks:
    """The processes of this run; one without torchrun.

    Starts the default process group if nobody did, and ends what it started. A group is
    needed for one process too, when a contender shards: `ensure_group()` makes one without a network.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._device = device
        self._started = False
        if self.world_size > 1:
            self.ensure_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def ensure_group(self) -> None:
        """Start the default process group: gloo for CPU tensors, nccl for those on GPUs."""
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        if self.world_size > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        self._started = True

    def maximum(self, values: list[float]) -> list[float]:
        """Element by element the largest over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def minimum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MIN)

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1 or not values:
            return values
        # On the CPU group: a collective on the GPU would be one more thing in the memory and the queues being measured.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def barrier(self) -> None:
        self.maximum([0.0])

    def agree(self, error: str | None) -> str | None:
        """None when no rank has an error, else this rank's error or a word about the others'."""
        if self.maximum([float(error is not None)])[0] == 0.0:
            return None
        return error or "failed on another rank"

    def close(self) -> None:
        if self._started and dist.is_initialized():
            end_process_group()
        self._started = False


def share_cores(threads: int | None) -> None:
    """Give every rank so many threads for torch's CPU work, or its share of the machine's cores.

    torchrun sets `OMP_NUM_THREADS=1` for several ranks, which slows those down that compute on the CPU.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is not None or ranks > 1:
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // ranks))


def local_device(requested: str | None) -> torch.device:
    """The device to measure: `requested`, else this rank's GPU, else the CPU.

    Raises:
        ValueError: it is none, or not here.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found is None:
        raise ValueError(f"--device {requested}: allowed are cpu, cuda and cuda:N")
    if found[0] == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(found[1] or os.environ.get("LOCAL_RANK", "0")))
    seen = torch.cuda.device_count()
    if device.index >= seen:
        raise ValueError(f"--device {device}: torch sees {seen or 'no'} GPU{'s' if seen > 1 else ''} here")
    torch.cuda.set_device(device)
    return device
