"""A process group between the first trainer and rollout workers that may break without harm to any other group."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class WeightLink:
    """Broadcasts from its first member to the others, outside of torch's registry of groups.

    A member that dies makes the others' next broadcast raise: under gloo at once, under nccl (whose own watchdog would
    end the process) when ``timeout`` is over.

    Args:
        number: by which its members know it.
        store: where the members meet; for this link alone.
        rank: this process's number in it; 0 sends.
        size: how many there are.
        device: of what is sent.
        timeout: seconds for one broadcast.
    """

    def __init__(
        self, number: int, store: dist.Store, rank: int, size: int, device: torch.device, timeout: float
    ) -> None:
        self.number, self.device = number, device
        self._timeout = timeout
        self._used = False
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any
        if device.type == "cpu":
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)
            return
        with _errors_reported_here():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit * 2
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """The first member's values; returns when they have arrived here, or have been taken over for sending.

        Raises:
            RuntimeError: another member is gone, or did not take part in time.
        """
        if self.device.type == "cpu":
            self._group.broadcast(tensor, 0).wait()
            return
        deadline = time.monotonic() + self._timeout
        work = self._begun(tensor, deadline)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {self._timeout:g} s")
            time.sleep(0.0002)
        work.wait()

    def _begun(self, tensor: Tensor, deadline: float) -> Any:
        """nccl connects its members in the first broadcast, and would wait for them without end."""
        if self._used:
            return self._group.broadcast(tensor, 0)
        outcome: list[Any] = []

        def connect() -> None:
            torch.cuda.set_device(tensor.device)
            try:
                outcome.append(self._group.broadcast(tensor, 0))
            except Exception as error:
                outcome.append(error)

        torch.cuda.current_stream().synchronize()  # the thread has a current stream of its own
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if not outcome:
            raise RuntimeError(f"the members did not connect within {self._timeout:g} s")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self._used = True
        return outcome[0]

    def close(self) -> None:
        """Let go of the others, who notice."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # not every torch lets every backend be aborted
                group.abort()


@contextlib.contextmanager
def _errors_reported_here() -> Iterator[None]:
    """nccl groups that are made now leave their failures to whoever waits for them, and do not end the process."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


def shared_device(everybody: list[str]) -> str:
    """``"cuda"`` if every member has a GPU of its own that nccl can send from, else ``"cpu"``."""
    own_gpus = all(one != "cpu" for one in everybody) and len(set(everybody)) == len(everybody)
    return "cuda" if own_gpus and dist.is_nccl_available() else "cpu"


def identity(device: torch.device) -> str:
    """What tells one GPU from another, on all hosts; ``"cpu"`` elsewhere."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
