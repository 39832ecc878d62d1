"""Initialising the default process group from torchrun's environment."""

from __future__ import annotations

import os
import shlex
import sys

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


_groups_in_agent_store = 0
"""How many groups this process has initialised with torchrun's store."""


def _initialise(backend: str) -> None:
    """Initialise the group. From the second one on, it gets a prefix of its own in torchrun's store.

    The store keeps the addresses of groups that have ended.
    """
    global _groups_in_agent_store
    in_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _groups_in_agent_store += in_agent_store
    if not in_agent_store or _groups_in_agent_store == 1:
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"lightstep-{_groups_in_agent_store}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


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
