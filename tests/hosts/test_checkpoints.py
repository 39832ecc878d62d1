"""Hosts that share no disk: each saves a part, resumes from it, and says which part is missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightstep
from lightstep.checkpoint import CheckpointError, latest_checkpoint, verify_checkpoints
from tests.distributed.models import TinyTransformer
from tests.distributed.training import DDP, FSDP2, HSDP, full, load, same_tensors, train, weights_of
from tests.hosts.hosts import NAMES, Hosts

STREAM = {"backend": "stream", "ring_mib": 1}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"sharding": FSDP2},
    "hsdp-stream": {"sharding": HSDP, "optimizer_state": STREAM},
    "ddp": {"sharding": DDP},
}
LOST = ["whole", "lost-b", "lost-a", "file-gone", "mixed", "swapped", "damaged"]
"""Copies of one checkpoint, to which different things happen."""


class Run:
    def __init__(self, case: str, seed: int = 0) -> None:
        self.strategy = load(**CASES[case])
        torch.manual_seed(seed)
        self.model = self.strategy.prepare_model(TinyTransformer())
        groups = self.strategy.unwrap_model(self.model).split()  # type: ignore[operator]
        self.optimizer = self.strategy.create_optimizer(self.model, torch.optim.AdamW, param_groups=groups)

    def train(self) -> dict[str, Any]:
        train(self.strategy, self.model, self.optimizer)
        return weights_of(self.strategy, self.model)

    def save(self, path: str, **options: Any) -> Any:
        return self.strategy.save_checkpoint(path, self.model, self.optimizer, **options)

    def load(self, path: str) -> dict[str, Any]:
        return self.strategy.load_checkpoint(path, self.model, self.optimizer)


def check_saves(rank: int, world_size: int, disk: str) -> dict[str, Any]:
    """Every case is saved, and resumed on the same hosts with the bits of the run that went on."""
    found = {}
    for case in CASES:
        run = Run(case)
        found[case] = run.train()
        run.save(f"{disk}/{case}/step-2", extra={"rank": rank})
        expected = run.train()
        resumed = Run(case, seed=1)
        assert resumed.load(f"{disk}/{case}/step-2") == {"rank": 0}
        same_tensors(weights_of(resumed.strategy, resumed.model), found[case])
        same_tensors(resumed.train(), expected)
    run = Run("fsdp2")
    for name in LOST:
        run.save(f"{disk}/{name}")
    run.train()
    for step in (1, 2, 3):
        pending = run.save(f"{disk}/kept/step-{step}", keep_last=2, asynchronous=True)
    run.train()
    pending.result()
    run.save(f"{disk}/mixed-new")
    return found


def check_loads(rank: int, world_size: int, disk: str) -> dict[str, str]:
    """What each load says, and whether the model is as it was."""
    run, said = Run("fsdp2"), {}
    before = weights_of(run.strategy, run.model)
    for name in LOST:
        try:
            run.load(f"{disk}/{name}")
            said[name] = "loaded"
        except CheckpointError as error:
            said[name] = str(error)
            same_tensors(weights_of(run.strategy, run.model), before)
        before = weights_of(run.strategy, run.model)
    return said


@pytest.fixture(scope="module")
def saved(hosts: Hosts) -> list[dict[str, Any]]:
    return hosts.run(check_saves, disk=str(hosts.disk))


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_each_host_has_its_part(hosts: Hosts, saved: Any, case: str) -> None:
    first, second = (disk / case / "step-2" for disk in hosts.disks)
    for name in ("lightstep.json", "tensors.json", "state.pt", ".metadata"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    parts = json.loads((first / "lightstep.json").read_bytes())["parts"]
    assert [(part["host"], part["ranks"]) for part in parts] == [(NAMES[0], [0, 1]), (NAMES[1], [2, 3])]
    for part, folder in zip(parts, (first, second), strict=True):
        assert part["path"] == str(hosts.disk / case / "step-2")
        assert part["files"] and set(part["files"]) == {name for name in names_in(folder) if name.endswith(".distcp")}
    for folder in (first, second):
        assert names_in(folder.parent) == {"step-2"}
        assert latest_checkpoint(folder.parent) == folder
        assert [found.damage for found in verify_checkpoints(folder)] == [[]]


def one_process(path: Path) -> dict[str, Any]:
    strategy = lightstep.Strategy.load({"optimizer_state": {"backend": "resident"}})
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, param_groups=model.split())  # type: ignore[operator]
    strategy.load_checkpoint(path, model, optimizer)
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_all_parts_in_one_folder_are_a_checkpoint(hosts: Hosts, saved: Any, case: str, tmp_path: Path) -> None:
    for disk in hosts.disks:
        shutil.copytree(disk / case / "step-2", tmp_path / "all", dirs_exist_ok=True)
    same_tensors(one_process(tmp_path / "all"), saved[0][case])


def test_one_part_is_not_enough_for_one_process(hosts: Hosts, saved: Any) -> None:
    with pytest.raises(CheckpointError, match=r"does not hold all of .* on this host: it was saved in parts, host-a:"):
        one_process(hosts.disks[0] / "fsdp2" / "step-2")


def test_a_part_with_a_copy_of_everything_is(hosts: Hosts, saved: Any) -> None:
    for disk in hosts.disks:
        same_tensors(one_process(disk / "ddp" / "step-2"), saved[0]["ddp"])


def test_older_checkpoints_are_removed_on_both(hosts: Hosts, saved: Any) -> None:
    for disk in hosts.disks:
        assert names_in(disk / "kept") == {"step-2", "step-3"}


@pytest.fixture(scope="module")
def said(hosts: Hosts, saved: Any) -> list[dict[str, str]]:
    first, second = hosts.disks
    shutil.rmtree(second / "lost-b")
    shutil.rmtree(first / "lost-a")
    os.unlink(next((second / "file-gone").glob("*.distcp")))
    shutil.rmtree(second / "mixed")
    os.rename(second / "mixed-new", second / "mixed")
    os.rename(first / "swapped", first / "swapping")
    os.rename(second / "swapped", first / "swapped")
    os.rename(first / "swapping", second / "swapped")
    damaged = next((second / "damaged").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    return hosts.run(check_loads, disk=str(hosts.disk))


def lost(ranks: str, host: str, why: str) -> Callable[[str], str]:
    return lambda path: (
        f"{path} was not loaded: it was saved in 2 parts, one on each disk, and the part of ranks {ranks} (saved by "
        f"{host} in {path}) is missing; rank {ranks[0]} on {host}: {path} {why}"
    )


SENTENCES = {
    "lost-b": lost("2, 3", "host-b", "does not exist or is an empty folder"),
    "lost-a": lost("0, 1", "host-a", "does not exist or is an empty folder"),
    "file-gone": lost("2, 3", "host-b", "is not a complete checkpoint: __2_0_0.distcp is missing"),
    "mixed": lost("2, 3", "host-b", "is of another save"),
    "whole": lambda path: "loaded",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_missing_is_said_on_all_ranks(hosts: Hosts, said: list[dict[str, str]], name: str) -> None:
    expected = SENTENCES[name](str(hosts.disk / name))
    assert [each[name] for each in said] == [expected] * 4


def test_hosts_in_another_order_are_told(said: list[dict[str, str]]) -> None:
    for each in said:
        assert "on this host: it was saved in parts, host-a:" in each["swapped"]
        assert "Start as many ranks, with the hosts in this order, or copy the .distcp files" in each["swapped"]


def test_damage_on_the_other_host(said: list[dict[str, str]]) -> None:
    for each in said:
        assert "__2_0_0.distcp is damaged" in each["damaged"] or "__3_0_0.distcp is damaged" in each["damaged"]
