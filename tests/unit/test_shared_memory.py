"""Memory that another process of the host maps."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightstep.state.host_memory import HostMemoryError, HostSlab
from lightstep.state.shared_memory import SharedMemory
from tests.python import python

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has such memory")

PROGRAM = """
import sys, torch
from lightstep.state.host_memory import HostSlab
from lightstep.state.shared_memory import Address, SharedMemory
path, name, nbytes = sys.argv[1:]
memory = SharedMemory.find(Address(path, name, int(nbytes)))
view = HostSlab(int(nbytes), shared=memory).tensor(torch.uint8, 5, 3)
print(view.tolist())
view.fill_(9)
"""


def created(nbytes: int) -> SharedMemory:
    memory = SharedMemory.create(nbytes)
    assert memory is not None
    return memory


def test_another_process_reads_and_writes_it() -> None:
    memory = created(10_000)
    slab = HostSlab(10_000, shared=memory)
    view = slab.tensor(torch.uint8, 5, 3)
    view.copy_(torch.arange(5))
    address = memory.address
    arguments = [address.path, address.name, str(address.nbytes)]
    done = python("-c", PROGRAM, *arguments, cwd=Path.cwd())
    assert done.stdout.strip() == "[0, 1, 2, 3, 4]", done.stderr
    assert view.tolist() == [9] * 5 and slab.place_of(view) == 3 and slab.place_of(torch.ones(1)) is None


def test_what_has_another_name_is_not_found() -> None:
    """The same number of process and descriptor on another host."""
    memory = created(4096)
    assert SharedMemory.find(replace(memory.address, name="lightstep-other")) is None
    assert SharedMemory.find(replace(memory.address, path="/proc/self/fd/0")) is None
    assert SharedMemory.find(replace(memory.address, path="/proc/1000000000/fd/3")) is None


def test_mappings_outlive_the_descriptor() -> None:
    memory = created(4096)
    address, view = memory.address, HostSlab(4096, shared=memory).tensor(torch.uint8, 4096)
    del memory
    gc.collect()
    assert SharedMemory.find(address) is None
    view.fill_(1)
    assert int(view.sum()) == 4096


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(HostMemoryError):
        HostSlab(1 << 20, shared=created(4096))


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert SharedMemory.create(4096) is None
