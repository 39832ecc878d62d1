"""Short messages between roles, through the store of the default process group. Receivers need not be waiting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.001, 0.02
"""Seconds between two polls, at first and at most."""


class MessageBoard:
    """Keys with JSON values that all ranks of all roles can read and write.

    The n-th board of one process is the same as the n-th board of another: all processes create them in the same order.
    """

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"lightstep/roles of rank {dist.get_rank()}", 1)
        self.prefix = f"lightstep/roles/{number}"
        self.store = dist.PrefixStore(self.prefix, store)

    def write(self, key: str, value: Any) -> None:
        """Set the key's value."""
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The key's value; ``None`` if it is not set."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait(self, key: str, deadline: float) -> Any:
        """Wait until the key is set, and return its value; ``None`` after ``deadline`` (in ``time.monotonic()``)."""
        return self.poll(lambda: self.read(key), deadline)

    @staticmethod
    def poll(read: Callable[[], Any], deadline: float) -> Any:
        """Call ``read`` until it returns something else than ``None``, and return that; ``None`` after ``deadline``.

        The store's own ``wait`` is not used: while it waits, it blocks Ctrl-C and the store's connection, which other
        threads need (NCCL's for example), and it logs every timeout.
        """
        pause = _SHORTEST
        while (found := read()) is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return found

    def next_number(self) -> int:
        """1, 2, 3, ...: a new number for each call on any rank."""
        return int(self.store.add("numbers", 1))

    def delete(self, *keys: str) -> None:
        """Delete keys."""
        for key in keys:
            self.store.delete_key(key)

    def store_for(self, name: str) -> dist.Store:
        """A store for the rendezvous of a process group."""
        return dist.PrefixStore(f"stores/{name}", self.store)
