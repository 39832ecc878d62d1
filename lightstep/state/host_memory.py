"""Host memory for optimizer state and weights: slabs of exact size, page-locked if a CUDA device will read them.

`pin_memory=True` and torch's pinned allocator round up to powers of two (up to twice the memory); mapping pages and
registering them with `cudaHostRegister` does not. Call `require()` before allocating: it raises an error if there is
too little memory, before the kernel's out-of-memory killer ends the process halfway.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightstep.distributed import ranks_on_this_host
from lightstep.state import numa
from lightstep.state.interrupts import uninterrupted
from lightstep.state.shared_memory import SharedMemory

__all__ = ["CHECK_VARIABLE", "HostMemoryError", "HostSlab", "available_bytes", "require"]

CHECK_VARIABLE = "LIGHTSTEP_HOST_MEMORY_CHECK"
"""Environment variable for `require()`: `off` disables the check, a number is used as the free memory in GiB."""

_GIB = 1 << 30
_ADVICE = (
    "Lower it with `optimizer_state.backend: resident`, `precision.master_weights: false`, an optimizer with less "
    "state, or by sharding over more ranks"
)
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_TOUCH_THREADS = 16
_TOUCH_CHUNK = 8 << 20


class HostMemoryError(MemoryError):
    """The host has too little memory for the optimizer state."""


def require(nbytes: int, what: str, advice: str = _ADVICE) -> None:
    """Raise `HostMemoryError` if the host does not have `nbytes` more bytes of memory for each rank on it.

    The ranks are assumed to need the same and to check before any of them allocates. Free memory is the smaller of
    `MemAvailable` and what the process's memory cgroups (v1 and v2, each level) still allow. If neither can be read,
    the check passes. Some virtual machines grow as they use memory, and a few report no useful figure: the environment
    variable `LIGHTSTEP_HOST_MEMORY_CHECK` overrides the check (`off`, or the free GiB).
    """
    free = _free_from_environment()
    if free is None:
        free = available_bytes()
    ranks = ranks_on_this_host()
    if free is None or nbytes * ranks <= free:
        return
    each = f" ({nbytes / _GIB:.2f} GiB for each of the {ranks} ranks on this host)" if ranks > 1 else ""
    raise HostMemoryError(
        f"{what}: {nbytes * ranks / _GIB:.2f} GiB of host memory are needed{each} and {free / _GIB:.2f} GiB are free. "
        f"{advice}. "
        f"If this machine has more than it reports, set {CHECK_VARIABLE}=off, or to the free GiB"
    )


def _free_from_environment() -> float | None:
    """The free bytes that `LIGHTSTEP_HOST_MEMORY_CHECK` states; infinite for `off`, None if it is not set."""
    value = os.environ.get(CHECK_VARIABLE, "").strip().lower()
    if not value:
        return None
    if value == "off":
        return float("inf")
    try:
        return float(value) * _GIB
    except ValueError:
        raise ValueError(f"{CHECK_VARIABLE}={value!r}: allowed are `off` and a number of GiB") from None


def available_bytes(proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> int | None:
    """Bytes of host memory that this process can still allocate, or None if the system does not say."""
    limits = [
        limit
        for limit in (_mem_available(Path(proc)), *_cgroup_headrooms(Path(proc), Path(cgroup)))
        if limit is not None
    ]
    return min(limits, default=None)


def _mem_available(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_headrooms(proc: Path, root: Path) -> Iterator[int | None]:
    """What each memory cgroup of this process still allows, from its own up to the root (v2 and v1)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _headrooms_to_root(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _headrooms_to_root(root / "memory", path, names)


def _headrooms_to_root(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int | None]:
    # In a container the path is often the host's and does not exist here. The mount's root is then the container's own
    # group.
    folder = root / path.strip("/")
    for level in (folder, *folder.parents):
        yield _headroom(level, *names)
        if level == root:
            return


def _headroom(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Limit minus usage of one cgroup, counting its inactive page cache as free; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((folder / limit_name).read_text())  # "max" is a ValueError: no limit
        if limit >= _UNLIMITED:
            return None
        usage = int((folder / usage_name).read_text())
        return max(0, limit - usage + _statistic(folder / "memory.stat", cache_name))
    return None


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


class HostSlab:
    """Contiguous zeroed host memory, rounded up to whole pages.

    `device`: the device with which it is exchanged. For a CUDA device the pages are locked (`page_locked`), so that
    copies reach link speed and are asynchronous. If locking is refused, the pages stay pageable, and one warning says
    what that costs.

    `touch`: allocate all pages now, with several threads, so that later checks of `require()` count them. With False,
    each page of a slab for the CPU is allocated by the first write to it; locking pages allocates them anyway.

    `shared`: the memory, of at least `nbytes`, instead of new memory. What another process wrote there is kept.

    `close()` (also called at exit, and when the slab is collected) ends the page-locking. The memory itself lives as
    long as any view of it, so a tensor from `tensor()` always stays valid.

    `bytes`: all of it as uint8; None once it is closed.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device: torch.device | str | None = None,
        what: str = "optimizer state",
        touch: bool = True,
        shared: SharedMemory | None = None,
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: a slab's size is 0 or more")
        device = torch.device(device) if device is not None else torch.device("cpu")
        self.nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.shared = shared
        self.bytes: Tensor | None = _map_pages(self.nbytes, what, device.type != "cpu", shared)
        if (shared is None or shared.is_new) and (touch or device.type != "cpu"):
            _first_touch(self.bytes, numa.near(device))
        self.page_locked = device.type != "cpu" and _page_lock(self.bytes, device)
        self._finalizer = (
            weakref.finalize(self, _unlock, self.bytes.data_ptr(), device, os.getpid()) if self.page_locked else None
        )

    def tensor(self, dtype: torch.dtype, shape: Sequence[int] | int, offset: int = 0) -> Tensor:
        """A view of the slab: `shape` elements of `dtype` from byte `offset` (a multiple of the element size)."""
        if self.bytes is None:
            raise RuntimeError("this host slab is closed")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = dtype.itemsize * torch.Size(shape).numel()
        if offset < 0 or offset % dtype.itemsize or offset + size > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + size} as {dtype} do not lie in a slab of {self.nbytes} bytes")
        return self.bytes[offset : offset + size].view(dtype).view(shape)

    def place_of(self, view: Tensor) -> int | None:
        """The first byte of a view of this slab; `None` for other tensors."""
        start = -1 if self.bytes is None else view.data_ptr() - self.bytes.data_ptr()
        return start if 0 <= start < self.nbytes else None

    @property
    def closed(self) -> bool:
        return self.bytes is None

    def close(self) -> None:
        """Wait for the device, unlock the pages and drop the reference to them. A second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()
        self.page_locked = False
        self.bytes = self.shared = None


def _map_pages(nbytes: int, what: str, for_device: bool, shared: SharedMemory | None) -> Tensor:
    """A new mapping of `nbytes` as a uint8 tensor, which owns it: it is unmapped with the last view."""
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if shared is None:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            pages = mmap.mmap(shared.descriptor, nbytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"{what}: the system refused to map {nbytes / _GIB:.2f} GiB of host memory ({error}). {_ADVICE}"
        ) from error
    _advise(pages, "MADV_HUGEPAGE")
    if for_device:
        # After fork() a write here would go to a copy of the page, while the device still used the old page.
        _advise(pages, "MADV_DONTFORK")
    return torch.frombuffer(pages, dtype=torch.uint8)


def _advise(pages: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):
            pages.madvise(advice)


def _first_touch(pages: Tensor, processors: Collection[int] = ()) -> None:
    """Touch every page, with several threads of our own: torchrun sets OMP_NUM_THREADS=1, so torch would use one.

    A page is allocated on the NUMA node of the processor that touches it first: one of ``processors``, if given.
    """
    chunks = pages.split(_TOUCH_CHUNK)
    threads = min(_TOUCH_THREADS, len(processors) or _processors(), len(chunks))
    if threads == 1 and not processors:
        _touch(pages)
        return

    def touch(share: Sequence[Tensor]) -> None:
        if processors:
            os.sched_setaffinity(0, processors)  # of this thread
        for chunk in share:
            _touch(chunk)

    # Not an executor: those take no work while the interpreter ends, and a save may run then.
    workers = [
        threading.Thread(target=touch, args=(chunks[first::threads],), name="lightstep-first-touch")
        for first in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _touch(pages: Tensor) -> None:
    pages[:: mmap.PAGESIZE].zero_()  # new pages are zero


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_warned_pageable = False


def _page_lock(pages: Tensor, device: torch.device) -> bool:
    """Register the pages with the CUDA runtime. If it refuses: False, and one warning per process."""
    if device.type != "cuda":
        _warn_pageable(f"page-locking is not supported for {device.type} devices")
        return False
    try:
        error = _register(pages.data_ptr(), pages.numel(), device)
    except (RuntimeError, AttributeError) as refusal:
        error = str(refusal)
    if error:
        _warn_pageable(error)
    return not error


def _register(pointer: int, nbytes: int, device: torch.device) -> str:
    """The runtime's error message; empty on success."""
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(pointer, nbytes, 0)
        if int(code) == 0:
            return ""
        _clear_last_error(device)
        return f"cudaHostRegister: {runtime.cudaGetErrorString(code)}"


def _clear_last_error(device: torch.device) -> None:
    """Clear the runtime's last error, which the next kernel launch would otherwise raise."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0.0)


def _unlock(pointer: int, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:  # a forked child owns neither the pages nor the CUDA context
        return
    uninterrupted(partial(_unregister, pointer, device))


def _unregister(pointer: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(pointer)


def _warn_pageable(reason: str) -> None:
    global _warned_pageable
    if _warned_pageable:
        return
    _warned_pageable = True
    warnings.warn(
        f"host memory could not be page-locked ({reason}); it stays pageable. Results are "
        "the same, but copies go through a bounce buffer and block the host: expect a fraction of link speed and "
        "little overlap with compute. Raise the lock limit (`ulimit -l unlimited`, in a container "
        "`--ulimit memlock=-1`) to allow page-locking",
        RuntimeWarning,
        stacklevel=4,
    )
