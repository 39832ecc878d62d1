"""The store of a rendezvous, in a process of its own: ``python -m tests.hosts.store ADDRESS PORT``."""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist

if __name__ == "__main__":
    store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
    signal.pause()
