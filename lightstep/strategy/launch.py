"""The default process group, from torchrun's environment."""

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
    """Start the default process group from torchrun's environment: nccl for GPU tensors, gloo for those on the CPU.

    Args:
        why: what needs it, for the error: ``"fsdp2: sharding.kind fsdp2 needs a process per device"``.

    Raises:
        ConfigError: this process was not started by torchrun.
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


_times = 0
"""How often this process has started a group by torchrun's store."""


def _initialise(backend: str) -> None:
    """The second one has its own prefix in torchrun's store, which keeps the addresses of groups that have ended."""
    global _times
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _times += by_torchrun
    if not by_torchrun or _times == 1:
        dist.init_process_group(backend)
        return
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group(
        backend, store=dist.PrefixStore(f"lightstep-{_times}", store), rank=rank, world_size=world_size
    )


def _command() -> str:
    """What to type instead: torchrun with this process's program and arguments."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return f"torchrun --nproc-per-node {max(devices, 2)} {shlex.join(_program())}"


def _program() -> list[str]:
    """The module or script that runs, with its arguments; a name to fill in where there is neither (``-c``, stdin)."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # that is what a folder or a zip file with a __main__.py says
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    named = getattr(main, "__file__", None) is not None and sys.argv[0] not in ("", "-", "-c")
    return sys.argv if named else ["train.py"]
