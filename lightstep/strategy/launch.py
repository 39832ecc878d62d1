"""Initialising the default process group from torchrun's environment."""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightstep.config import ConfigError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_process_group(why: str) -> None:
    """Initialise the default process group from torchrun's environment: NCCL for GPU tensors, gloo for CPU tensors.

    Args:
        why: why it is needed, for the error: ``"fsdp2: sharding.kind fsdp2 needs a process per device"``.

    Raises:
        ConfigError: torchrun did not start this process.
    """
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{why}, and torchrun did not start this one (no {missing[0]} in its environment); start it with: "
            f"{_command()}"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    _initialise("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _initialise(backend: str) -> None:
    """Initialise the group, in torchrun's store under a prefix that no group before has used.

    That store lasts as long as torchrun. It has the addresses of this process's earlier groups, and after a restart
    those of processes that have ended.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"lightstep-{_fresh_prefix(store, rank, world_size)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _fresh_prefix(store: dist.Store, rank: int, world_size: int) -> str:
    """Rank 0's new prefix, on every rank.

    An answer is to a question that this process alone has asked, so it is not one that an earlier process got. Rank 0
    answers until it has been heard: what it answers first may be a question of a process that has ended.

    Raises:
        RuntimeError: a rank has not answered within the store's time limit.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"lightstep-question-{rank}", own)
        prefix = store.get(f"lightstep-answer-{own}").decode()
        store.set(f"lightstep-heard-{prefix}-{rank}", "")
        return prefix
    limit: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
    end = time.monotonic() + limit
    for other in range(1, world_size):
        while not store.check([f"lightstep-heard-{own}-{other}"]):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"rank {other} has not joined the process group within {limit:g} s: its process ended, "
                    "or the network to it is down"
                )
            question = store.get(f"lightstep-question-{other}").decode()
            store.set(f"lightstep-answer-{question}", own)
            time.sleep(0.01)
    return own


def _command() -> str:
    """The torchrun command for this process's program and arguments."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return f"torchrun --nproc-per-node {max(devices, 2)} {shlex.join(_program())}"


def _program() -> list[str]:
    """This process's module or script with its arguments; ``train.py`` if there is neither (``-c``, stdin)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # "__main__": a folder or zip file with a __main__.py
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    is_script = getattr(main, "__file__", None) is not None and sys.argv[0] not in ("", "-", "-c")
    return sys.argv if is_script else ["train.py"]
