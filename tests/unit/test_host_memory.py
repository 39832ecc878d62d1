"""Host slabs: size, views, life time, the up-front check, and the one warning when pages cannot be locked."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightstep.state import host_memory, numa
from lightstep.state.host_memory import CHECK_VARIABLE, HostMemoryError, HostSlab, available_bytes, require
from tests.python import python

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    monkeypatch.setattr(host_memory, "_warned_pageable", False)


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 5 * mmap.PAGESIZE + 17, (1 << 20) + 1])
def test_a_slab_is_rounded_to_pages_and_to_nothing_else(nbytes: int) -> None:
    slab = HostSlab(nbytes)
    assert nbytes <= slab.nbytes <= max(nbytes, 1) + mmap.PAGESIZE - 1
    assert slab.nbytes % mmap.PAGESIZE == 0
    assert torch.count_nonzero(slab.tensor(torch.uint8, slab.nbytes)) == 0
    slab.close()


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [(torch.float32, 1025, 0), (torch.float32, 1, 2), (torch.uint8, 1, -1), (torch.int16, 1, 4096)],
)
def test_a_view_outside_the_slab_is_refused(dtype: torch.dtype, shape: int, offset: int) -> None:
    with pytest.raises(ValueError, match="do not lie in a slab of 4096 bytes"):
        HostSlab(4096).tensor(dtype, shape, offset)


def test_close_refuses_new_views_and_keeps_the_memory_of_old_ones() -> None:
    slab = HostSlab(4096)
    view = slab.tensor(torch.float32, 4)
    view.fill_(3.0)
    slab.close()
    slab.close()
    gc.collect()
    assert slab.closed and not slab.page_locked
    assert torch.equal(view, torch.full((4,), 3.0))
    with pytest.raises(RuntimeError, match="closed"):
        slab.tensor(torch.uint8, 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    slab = HostSlab(64 << 20, touch=False)
    assert resident() - before < 16 << 20
    slab.tensor(torch.uint8, slab.nbytes).zero_()
    slab = HostSlab(64 << 20)
    held = resident() - before
    slab.close()
    del slab
    gc.collect()
    assert held > 56 << 20
    assert resident() - before < 16 << 20


# ---- page-locking, with a runtime that is not there
# -------------------------------------------------------------------------


class FakeRuntime:
    """Stands in for the CUDA runtime: remembers what is registered, refuses when told to."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def register(self, pointer: int, nbytes: int, device: torch.device) -> str:
        if self.code:
            return "cudaHostRegister: out of memory"
        self.registered[pointer] = nbytes
        return ""

    def unlock(self, pointer: int, device: torch.device, pid: int) -> None:
        del self.registered[pointer]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(host_memory, "_register", fake.register)
    monkeypatch.setattr(host_memory, "_unlock", fake.unlock)
    return fake


def test_pages_for_a_cuda_device_are_locked_exactly_and_unlocked_once(runtime: FakeRuntime) -> None:
    slab = HostSlab(3 * mmap.PAGESIZE + 1, device="cuda")
    assert slab.page_locked
    assert list(runtime.registered.values()) == [4 * mmap.PAGESIZE]
    slab.close()
    slab.close()
    assert runtime.registered == {} and not slab.page_locked


def test_a_collected_slab_is_unlocked(runtime: FakeRuntime) -> None:
    HostSlab(1, device="cuda")
    gc.collect()
    assert runtime.registered == {}


def test_refused_page_locking_warns_once_and_works_pageable(runtime: FakeRuntime) -> None:
    runtime.code = 2
    with pytest.warns(
        RuntimeWarning, match=r"cudaHostRegister: out of memory.*stays pageable.*fraction of link speed.*ulimit -l"
    ):
        slab = HostSlab(4096, device="cuda")
    assert not slab.page_locked
    slab.tensor(torch.float32, 4).fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostSlab(4096, device="cuda").close()
    slab.close()


def test_a_slab_left_open_is_unlocked_at_exit() -> None:
    code = (
        "from lightstep.state import host_memory as h\n"
        "h._register = lambda *a: ''\n"
        "h._unlock = lambda *a: print('unlocked', flush=True)\n"
        "slab = h.HostSlab(1, device='cuda')\n"
    )
    root = Path(host_memory.__file__).parents[2]
    output = python("-c", code, cwd=root)
    assert output.stdout.split() == ["unlocked"], output.stderr


# ---- the up-front check
# -----------------------------------------------------------------------------------------------------


SYSTEMS: dict[str, tuple[int | None, int | None, str, dict[str, str]]] = {
    "without any source": (None, None, "", {}),
    "without cgroups": (1000 * 1024, 1000, "", {}),
    "version 2, at every level": (
        350_000, 9999, "0::/a/b\n",
        {
            "a/b/memory.max": "max\n", "a/b/memory.current": "5\n", "a/memory.max": "1000000\n",
            "a/memory.current": "700000\n", "a/memory.stat": "anon 1\ninactive_file 50000\n",
        },
    ),
    "version 1, with the host's path": (
        50_000, 9999, "9:cpu:/x\n4:memory:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": "500000\n", "memory/memory.usage_in_bytes": "600000\n",
            "memory/memory.stat": "total_inactive_file 150000\n",
        },
    ),
    "version 1, unlimited": (
        7 * 1024, 7, "4:memory:/\n",
        {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"},
    ),
}  # fmt: skip
"""Bytes that are free, MemAvailable in KiB, the process' cgroups, and their files."""


@pytest.mark.parametrize(("free", "available", "cgroup", "files"), SYSTEMS.values(), ids=SYSTEMS)
def test_free_memory(
    tmp_path: Path, free: int | None, available: int | None, cgroup: str, files: dict[str, str]
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    if available is not None:
        (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available} kB\n")
    if cgroup:
        (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert available_bytes(proc=proc, cgroup=groups) == free


def test_too_little_memory_is_a_sentence_with_numbers_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB)
    require(3 * GIB, "streamed optimizer state")
    with pytest.raises(
        HostMemoryError,
        match=r"streamed optimizer state: 4\.50 GiB of host.* needed and 3\.00 GiB are free.*backend: res.*=off",
    ) as raised:
        require(9 * GIB // 2, "streamed optimizer state")
    assert "resident_gib" not in str(raised.value), "what is resident has its host memory too"
    assert isinstance(raised.value, MemoryError)


def test_the_environment_overrules_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    monkeypatch.setenv(CHECK_VARIABLE, "off")
    require(1 << 50, "state")
    monkeypatch.setenv(CHECK_VARIABLE, "2")
    require(2 * GIB, "state")
    with pytest.raises(HostMemoryError, match=r"2\.00 GiB are free"):
        require(2 * GIB + 1, "state")
    monkeypatch.setenv(CHECK_VARIABLE, "plenty")
    with pytest.raises(ValueError, match="LIGHTSTEP_HOST_MEMORY_CHECK='plenty': allowed are `off` and a number of GiB"):
        require(1, "state")


def test_a_mapping_the_system_refuses_is_a_host_memory_error() -> None:
    with pytest.raises(HostMemoryError, match="refused to map"):
        HostSlab(1 << 62)


# -- memory on the GPU's own NUMA node, with topologies that are made up


GPU = torch.device("cuda", 0)


@pytest.fixture(name="machine")
def made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four processors each; the GPU is on the second one, and the process may use 2 to 5."""
    for node, processors in enumerate(("0-2,3", "4-5,6-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    gpu = tmp_path / "bus/pci/devices/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset(range(2, 6)))
    return tmp_path


def test_processors_of_the_gpus_node(machine: Path) -> None:
    assert numa.near(GPU, machine) == {4, 5}
    assert numa.describe(GPU, machine) == "2 NUMA nodes, cuda:0 on node 1"
    assert numa.near(torch.device("cpu"), machine) == frozenset()


@pytest.mark.parametrize("node", ["-1", "", "7"])
def test_firmware_that_does_not_say(machine: Path, node: str) -> None:
    (machine / "bus/pci/devices/0000:1b:00.0/numa_node").write_text(node)
    assert numa.near(GPU, machine) == frozenset()


def test_one_node_and_none(machine: Path, tmp_path: Path) -> None:
    for file in (machine / "devices/system/node/node1").iterdir():
        file.unlink()
    (machine / "devices/system/node/node1").rmdir()
    assert numa.near(GPU, machine) == frozenset()
    assert numa.describe(GPU, machine) == "1 NUMA node"
    assert numa.describe(GPU, tmp_path / "nothing") == "NUMA nodes unknown"


def test_a_process_that_is_bound_elsewhere_stays_there(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_allowed", lambda: frozenset({0, 1}))
    assert numa.near(GPU, machine) == frozenset()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads to processors")
def test_pages_are_touched_by_threads_on_these_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    processors, seen = {min(os.sched_getaffinity(0))}, []
    before = os.sched_getaffinity(0)
    zero = torch.Tensor.zero_

    def touched(pages: torch.Tensor) -> torch.Tensor:
        seen.append((os.sched_getaffinity(0), threading.current_thread().name))
        return zero(pages)

    monkeypatch.setattr(host_memory.numa, "near", lambda _: frozenset(processors))
    monkeypatch.setattr(host_memory, "_TOUCH_CHUNK", 4096)
    monkeypatch.setattr(torch.Tensor, "zero_", touched)
    HostSlab(3 * 4096).close()
    assert len(seen) == 3
    assert all(bound == processors and name.startswith("lightstep-first-touch") for bound, name in seen)
    assert os.sched_getaffinity(0) == before  # the caller's own thread is bound to nothing
