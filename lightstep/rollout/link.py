"""A process group of the first trainer and rollout workers, which may fail without affecting any other group."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightstep.state.lanes import LanesOfDevices

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

CHANNELS = 8
"""Of NCCL: each takes a multiprocessor of a GPU while a broadcast is under way, or waits for another member."""

_POLL = 0.001
"""Seconds. Each look takes the interpreter from the training loop."""


class WeightLink:
    """Broadcasts from its first member to the others. It is not registered with ``torch.distributed``.

    If a member dies, the others' next broadcast raises: with gloo at once, with NCCL after ``timeout``. (NCCL's own
    watchdog, which would end the process, is off.)

    Broadcasts leave the processors of a GPU to what it computes: those of NCCL use :data:`CHANNELS` of them, or as many
    as NCCL likes where another member is not of this class.

    Args:
        number: identifies the link; the same for all members.
        store: for the rendezvous of this link only.
        rank: this process's rank in the link; rank 0 sends.
        size: the number of members.
        device: of the tensors that are sent.
        timeout: seconds for one broadcast.
        own_kind: all members are of this class.
    """

    def __init__(
        self,
        number: int,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        own_kind: bool = True,
    ) -> None:
        self.number, self.device = number, device
        self._timeout = timeout
        self._connected = False
        self._lanes = LanesOfDevices(small_pieces=True)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        limit = datetime.timedelta(seconds=timeout)
        self._group: Any
        if device.type == "cpu":
            self._group = dist.ProcessGroupGloo(store, rank, size, limit)
            return
        with _without_nccl_error_handling():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit * 2
            if own_kind:  # all have to have as many
                options.config.max_ctas = CHANNELS
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)

    def send(self, data: Tensor) -> None:
        """Broadcast from the first member, 1-D uint8 from any device. Returns when ``data`` may be reused."""
        if data.device.type == "cpu" and self.device.type != "cpu":
            if len(self._buffer) < len(data):
                self._buffer = torch.empty(len(data), dtype=torch.uint8, device=self.device)
            buffer = self._buffer[: len(data)]
            self._lanes[buffer.device].load(buffer, data)
            data = buffer
        self.broadcast(data.to(self.device))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast the first member's values in place. Returns when the tensor may be read (or reused, by the sender).

        Raises:
            RuntimeError: another member has died, or did not take part in time.
        """
        if self.device.type == "cpu":
            self._group.broadcast(tensor, 0).wait()
            return
        self._complete(lambda: self._group.broadcast(tensor, 0))

    def connect(self) -> None:
        """Meet the other members in the sum of one number, as vLLM's own engine begins."""
        one = torch.zeros(1, device=self.device)
        self._complete(lambda: self._group.allreduce([one]))

    def _complete(self, start: Callable[[], Any]) -> None:
        """Start work of NCCL, and wait for it.

        Raises:
            RuntimeError: another member has died, or did not take part in time.
        """
        deadline = time.monotonic() + self._timeout
        work = self._start(start, deadline)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {self._timeout:g} s")
            time.sleep(_POLL)
        work.wait()

    def _start(self, start: Callable[[], Any], deadline: float) -> Any:
        """Launch work. The first one connects the members, which in NCCL has no timeout, so a thread does it."""
        if self._connected:
            return start()
        outcome: list[Any] = []

        def connect() -> None:
            torch.cuda.set_device(self._buffer.device)
            try:
                outcome.append(start())
            except Exception as error:
                outcome.append(error)

        torch.cuda.current_stream().synchronize()  # the thread has another current stream
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if not outcome:
            raise RuntimeError(f"the members did not connect within {self._timeout:g} s")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        self._connected = True
        return outcome[0]

    def close(self) -> None:
        """Abort the group; the other members' next broadcast raises."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):  # some torch versions cannot abort every backend
                group.abort()


@contextlib.contextmanager
def _without_nccl_error_handling() -> Iterator[None]:
    """NCCL groups that are created in the block raise errors in ``wait()`` and do not end the process."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


def link_device(device_ids: list[str]) -> str:
    """``"cuda"`` if every member has a GPU of its own and NCCL is available, else ``"cpu"``.

    Args:
        device_ids: each member's, from :func:`device_id`.
    """
    own_gpus = all(one != "cpu" for one in device_ids) and len(set(device_ids)) == len(device_ids)
    return "cuda" if own_gpus and dist.is_nccl_available() else "cpu"


def device_id(device: torch.device) -> str:
    """A GPU's UUID, which is unique over all hosts; ``"cpu"`` for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
