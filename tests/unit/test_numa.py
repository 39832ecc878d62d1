"""Host memory on the GPU's own NUMA node, with topologies that are made up: the machines at hand have one node."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightstep.state import host_memory, numa
from lightstep.state.host_memory import HostSlab

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
