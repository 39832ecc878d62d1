"""Finds the processors near a GPU. Host memory should be on the NUMA node to which the GPU is attached."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe", "near"]

_SYS = Path("/sys")


def near(device: torch.device, sys: Path = _SYS) -> frozenset[int]:
    """Processors on the NUMA node of a CUDA device that this process may use.

    Empty if there is only one node, if the system does not say, or if the process is bound to other nodes.
    """
    node = _node_of(device, sys) if len(_nodes(sys)) > 1 else None
    return frozenset() if node is None else _processors(node, sys) & _allowed()


def describe(device: torch.device, sys: Path = _SYS) -> str:
    """``"2 NUMA nodes, cuda:0 on node 1"``, for reports."""
    count = len(_nodes(sys))
    nodes = "1 NUMA node" if count == 1 else f"{count} NUMA nodes" if count else "NUMA nodes unknown"
    node = _node_of(device, sys) if count > 1 else None
    return nodes if node is None else f"{nodes}, {device} on node {node}"


def _nodes(sys: Path) -> list[Path]:
    return sorted((sys / "devices/system/node").glob("node[0-9]*"))


def _node_of(device: torch.device, sys: Path) -> int | None:
    address = _pci_address(device)
    if address is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None  # -1: unknown to the firmware
    return None


def _pci_address(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None


def _processors(node: int, sys: Path) -> frozenset[int]:
    """``0-3,8,10-11`` as numbers."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in (sys / f"devices/system/node/node{node}/cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _allowed() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
