"""Training on two hosts of two ranks has the bits of four ranks on one host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import Pool
from tests.distributed.training import DDP, FSDP2, HSDP, load, same_tensors, train, weights_of
from tests.hosts.hosts import NAMES, Hosts, lacks_discipline

STREAM = {"backend": "stream", "ring_mib": 1}
OVERLAP = {"backend": "stream", "update": "overlap", "ring_mib": 1}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"sharding": FSDP2},
    "fsdp2-stream-overlap": {"sharding": FSDP2, "optimizer_state": OVERLAP},
    "fsdp2-muon": {"sharding": FSDP2, "muon": True},
    "hsdp": {"sharding": HSDP},
    "hsdp-stream": {"sharding": HSDP, "optimizer_state": STREAM},
    "ddp-stream": {"sharding": DDP, "optimizer_state": STREAM},
}


def _groups(model: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    matrices = {"params": [p for p in parameters if p.dim() == 2], "optimizer_class": torch.optim.Muon, "lr": 2e-2}
    return [matrices, {"params": [p for p in parameters if p.dim() != 2]}]


def check_weights(rank: int, world_size: int, cases: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """The weights of the cases after two steps, the host's name, and which hosts share HSDP's shards with this rank."""
    found: dict[str, Any] = {"host": socket.gethostname()}
    for case in cases:
        options = CASES[case]
        sections = {key: value for key, value in options.items() if key == "optimizer_state"}
        strategy = load(options["sharding"], clipping={"max_norm": 0.5}, **sections)
        torch.manual_seed(0)
        model = strategy.prepare_model(TinyTransformer())
        inner = strategy.unwrap_model(model)
        groups = _groups(inner) if "muon" in options else inner.split()
        optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=groups, lr=1e-2)
        train(strategy, model, optimizer)
        optimizer.synchronize()
        found[case] = weights_of(strategy, model)
        if case == "hsdp":
            found["shards on"] = _hosts_of_shards(inner)
    return found


def _hosts_of_shards(model: nn.Module) -> list[str]:
    """The hosts of the ranks that this one shares a model's shards with."""
    sharded: Any = next(model.parameters())
    group = sharded.device_mesh["shard"].get_group()
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return names


@pytest.fixture(scope="module")
def on_one_host() -> list[dict[str, Any]]:
    pool = Pool()
    try:
        return pool.run(check_weights, 4, cpu=True)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def on_two_hosts(hosts: Hosts) -> list[dict[str, Any]]:
    return hosts.run(check_weights)


def test_hosts_have_two_ranks_each(on_two_hosts: list[dict[str, Any]]) -> None:
    assert [rank["host"] for rank in on_two_hosts] == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]


@pytest.mark.parametrize("case", CASES)
def test_weights(case: str, on_one_host: list[dict[str, Any]], on_two_hosts: list[dict[str, Any]]) -> None:
    for one, two in zip(on_one_host, on_two_hosts, strict=True):
        same_tensors(two[case], one[case])


def test_hsdp_shards_within_a_host(on_two_hosts: list[dict[str, Any]]) -> None:
    assert [rank["shards on"] for rank in on_two_hosts] == [[NAMES[0]] * 2] * 2 + [[NAMES[1]] * 2] * 2


SLOW = {
    "1 Mbit/s": "tbf rate 1mbit burst 4kb limit 32kb",
    "20 ms, and 2 % is lost": "netem delay 20ms loss 2%",
}


@pytest.mark.parametrize("discipline", SLOW.values(), ids=SLOW)
def test_weights_over_a_slow_link(hosts: Hosts, on_one_host: list[dict[str, Any]], discipline: str) -> None:
    if reason := lacks_discipline(discipline):
        pytest.skip(f"the link cannot be made slow: tc qdisc add {discipline}: {reason}")
    with hosts.slow_link(*discipline.split()):
        found = hosts.run(check_weights, cases=["fsdp2-stream-overlap", "hsdp"])
        held_back = hosts.held_back()
    assert held_back > 0
    for one, two in zip(on_one_host, found, strict=True):
        for case in ("fsdp2-stream-overlap", "hsdp"):
            same_tensors(two[case], one[case])
