"""Short messages between roles, through the store behind the default process group: nobody has to be listening."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.001, 0.02
"""Seconds between two looks at what others have written."""


class MessageBoard:
    """Keys with JSON values that all ranks of all roles read and write.

    The n-th board of a process is the n-th one of all others: every process makes them in the same order.
    """

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"lightstep/roles of rank {dist.get_rank()}", 1)
        self.prefix = f"lightstep/roles/{number}"
        self.store = dist.PrefixStore(self.prefix, store)

    def write(self, key: str, value: Any) -> None:
        """Replace the key's value."""
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The key's value; ``None`` if nobody has written it."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait(self, key: str, deadline: float) -> Any:
        """:meth:`read`, once there is something, or ``None`` when ``deadline`` (of ``time.monotonic()``) has passed."""
        return self.until(lambda: self.read(key), deadline)

    @staticmethod
    def until(look: Callable[[], Any], deadline: float) -> Any:
        """What ``look`` returns as soon as that is not ``None``, or ``None`` at the deadline.

        The store's own ``wait`` is not used: it keeps the connection from this process's other threads (nccl's among
        them) and Ctrl-C from the process for as long as it lasts, and logs every wait that was in vain.
        """
        pause = _SHORTEST
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return found

    def next_number(self) -> int:
        """1, 2, 3, ..., to whoever asks."""
        return int(self.store.add("numbers", 1))

    def forget(self, *keys: str) -> None:
        """Nobody needs these any more."""
        for key in keys:
            self.store.delete_key(key)

    def store_of(self, name: str) -> dist.Store:
        """Where the members of a process group may meet."""
        return dist.PrefixStore(f"stores/{name}", self.store)
