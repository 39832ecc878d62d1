"""The text of `lightstep env`: what a bug report needs, without names of people, machines or folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

_LIBRARIES = (
    *("numpy", "pydantic", "safetensors", "triton"),
    *("transformers", "accelerate", "peft", "trl", "deepspeed", "lightning-fabric", "torchtitan", "torchao"),
)
_SETTINGS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "WORLD_SIZE")
_GIB = 2**30


def describe_environment() -> str:
    """``name: value`` lines."""
    lines = [f"{name}: {value}" for name, value in _facts()]
    return "\n".join(lines) + "\n"


def _facts() -> Iterator[tuple[str, str]]:
    import torch

    from lightstep.version import __version__

    yield "lightstep", __version__
    yield "python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield "torch", torch.__version__  # with its build, such as +cu130
    for name in _LIBRARIES:
        if (version := _version(name)) is not None:
            yield name, version
    yield "cuda", f"{torch.version.cuda or 'not in this build of torch'}, available: {torch.cuda.is_available()}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"gpu {index}", f"{device.name}, {device.total_memory / _GIB:.1f} GiB"
    yield "cpu", f"{cpu_name()}, cores: {os.cpu_count()}, threads of torch: {torch.get_num_threads()}"
    yield "host memory", f"{_host_memory() / _GIB:.1f} GiB"
    for name in (*_SETTINGS, *sorted(key for key in os.environ if key.startswith("LIGHTSTEP_"))):
        if name in os.environ:
            yield name, os.environ[name]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's own name, or its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
