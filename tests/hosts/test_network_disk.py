"""Two hosts with one disk, with the caches and renames of NFS: a checkpoint is whole, or does not count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightstep.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from lightstep.checkpoint.layout import CHECKPOINT, find_checkpoint, read_manifest
from lightstep.checkpoint.storage import storage_for
from tests.distributed.training import same_tensors, weights_of
from tests.hosts.hosts import NAMES, Hosts
from tests.hosts.test_checkpoints import Run
from tests.patience import PATIENCE

CACHED_S = 600
"""Seconds for which a host's kernel believes what it has seen: nothing that it sees anew is new by chance."""

FILES = [".metadata", "__0_0_0.distcp", "lightstep.json", "state.pt", "tensors.json"]


@pytest.fixture
def network(hosts: Hosts) -> Iterator[Path]:
    """A folder that both hosts have mounted."""
    if not Path("/dev/fuse").exists():
        pytest.skip("a network disk cannot be played on this machine: there is no /dev/fuse")
    folder, mount = hosts.folder / "network-files", hosts.folder / "network"
    for each in (folder, mount):
        each.mkdir()
    clients = []
    for host, name in enumerate(NAMES):
        program = ["tests.hosts.network_disk", str(folder), str(mount), str(CACHED_S), name]
        clients.append(hosts.start(host, hosts.folder / f"network-{name}.log", program))
        end = time.monotonic() + PATIENCE
        while "fuse" not in hosts.on(host, "stat", "--file-system", "--format=%T", str(mount)):
            assert clients[-1].poll() is None and time.monotonic() < end, "no mount"
            time.sleep(0.05)
    yield mount
    for host, client in enumerate(clients):
        hosts.on(host, "umount", "--lazy", str(mount))
        client.kill()
        client.wait()


def on(rank: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns on one rank, while the others wait: on all of them."""
    dist.barrier()
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, work() if dist.get_rank() == rank else None)
    return results[rank]


def check_runs(disk: Path) -> None:
    """Ranks on both hosts have looked for checkpoints before there were any, and save and load together."""
    folder = disk / "runs/a"
    assert latest_checkpoint(folder) is None and not (folder / "step-1").exists()
    dist.barrier()
    run = Run("fsdp2")
    for step in range(1, 4):
        run.train()
        assert not (folder / f"step-{step}").exists()
        dist.barrier()
        saved = run.save(f"{folder}/step-{step}", keep_last=2, asynchronous=step == 2)
        if saved is not None:
            saved.result()
        expected = weights_of(run.strategy, run.model)
        resumed = Run("fsdp2", seed=1)
        resumed.load(f"{folder}/step-{step}")
        same_tensors(weights_of(resumed.strategy, resumed.model), expected)
        assert not read_manifest(folder / f"step-{step}").get("parts")
    run.train()
    run.save(f"{folder}/step-3")  # again
    resumed.load(f"{folder}/step-3")
    same_tensors(weights_of(resumed.strategy, resumed.model), weights_of(run.strategy, run.model))
    found = [latest_checkpoint(folder)]
    dist.broadcast_object_list(found)
    assert found == [folder / "step-3"]


class Alone:
    """A model that one rank saves and loads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.model = torch.nn.Linear(64, 64)

    def _group(self) -> Any:
        return self.groups[dist.get_rank()]

    def save(self, name: str, value: float, **options: Any) -> None:
        torch.nn.init.constant_(self.model.weight, value)
        save_checkpoint(self.folder / name, self.model, group=self._group(), **options)

    def value(self, name: str) -> float:
        load_checkpoint(self.folder / name, self.model, group=self._group())
        assert (self.model.weight == self.model.weight[0, 0]).all()
        return float(self.model.weight[0, 0])


def check_hosts_in_turn(disk: Path) -> dict[str, Any]:
    """The hosts save to one path, one after the other, and each believes what it has seen of it."""
    alone, found = Alone(disk / "turns"), {}
    on(0, lambda: alone.save("x-0", 0.0))
    on(2, lambda: alone.save("x-0", 0.5))
    assert not (alone.folder / "x-1").exists()
    on(0, lambda: alone.save("x-1", 1.0))
    assert dist.get_rank() < 2 or not (alone.folder / "x-1").exists(), "the second host does not see it yet"
    on(2, lambda: alone.save("x-1", 2.0))
    found["after the second host"] = on(0, lambda: alone.value("x-1"))
    on(0, lambda: alone.save("x-1", 3.0))
    found["after the first"] = on(2, lambda: alone.value("x-1"))
    on(2, lambda: alone.save("x-2", 4.0, keep_last=1))
    found["a new one"] = on(0, lambda: alone.value("x-2"))
    found["left"] = on(2, lambda: visible(alone.folder))
    return found


def check_crashes(disk: Path) -> dict[str, Any]:
    """The first host ends between the two renames of a save. The second one does not know that."""
    alone, found = Alone(disk / "crashed"), {}
    path = alone.folder / "x-1"
    on(0, lambda: alone.save("x-1", 1.0))
    on(2, lambda: alone.value("x-1"))
    on(0, lambda: path.rename(alone.folder / ".x-1.replaced-01234567"))
    assert dist.get_rank() < 2 or path.exists(), "the second host believes in the old name"

    def fail() -> None:
        with pytest.raises(ValueError, match="too"), storage_for(path).new_folder(path, CHECKPOINT):
            raise ValueError("this host fails, too")

    on(2, fail)
    found["the second host"] = on(2, lambda: alone.value("x-1"))
    found["the first host"] = on(0, lambda: alone.value("x-1"))
    return found


def check_lost_answers(disk: Path, answers: Path) -> dict[str, Any]:
    """A rename happens, and its answer is that there is nothing of that name."""
    alone, found = Alone(disk / "lost"), {}
    on(0, lambda: alone.save("x-0", 0.0))
    for value, name in enumerate(("x-1", "x-0"), 1):  # a new one, and one that is replaced
        on(0, lambda name=name: answers.write_text(name))
        on(0, lambda name=name, value=value: alone.save(name, float(value)))
        assert not answers.exists()
        found[name] = on(2, lambda name=name: alone.value(name))
    return found


def check_open_files(disk: Path) -> dict[str, Any]:
    """Both hosts read a checkpoint while it is replaced, and the first one while it is removed."""
    alone, found = Alone(disk / "open"), {}
    on(0, lambda: alone.save("x-1", 1.0))
    with tensors_of(alone.folder / "x-1").open("rb") as reader:
        reader.read(1)
        dist.barrier()
        on(0, lambda: alone.save("x-1", 2.0))
        on(0, lambda: alone.save("x-1", 3.0))
        found["replaced"] = on(0, lambda: visible(alone.folder / "x-1"))
        found["read after that"] = on(0, lambda: len(reader.read()) > 0)
    on(0, lambda: alone.save("x-1", 4.0))
    found["value"] = on(2, lambda: alone.value("x-1"))
    with tensors_of(alone.folder / "x-1").open("rb"):
        on(0, lambda: alone.save("x-2", 5.0, keep_last=1))
    on(0, lambda: alone.save("x-3", 6.0, keep_last=1))
    found["left"] = on(0, lambda: visible(alone.folder))
    return found


def check_old_sizes(disk: Path) -> bool:
    """The second host has seen a file while it was written, and believes that size."""
    alone = Alone(disk / "sizes")
    folder = alone.folder / "x-1"
    on(0, lambda: alone.save("x-1", 1.0))
    file = tensors_of(folder)
    content = on(0, file.read_bytes)
    on(0, lambda: file.write_bytes(b""))
    on(2, file.stat)
    on(0, lambda: file.write_bytes(content))
    assert dist.get_rank() < 2 or file.stat().st_size == 0
    found: bool = on(2, lambda: find_checkpoint(folder)[0] == folder)
    return found


def tensors_of(folder: Path) -> Path:
    return next(iter(folder.glob("*.distcp")))


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def check_all(rank: int, world_size: int, disk: str, answers: str) -> dict[str, Any]:
    check_runs(Path(disk))
    return {
        "turns": check_hosts_in_turn(Path(disk)),
        "crashes": check_crashes(Path(disk)),
        "lost": check_lost_answers(Path(disk), Path(answers)),
        "open": check_open_files(Path(disk)),
        "sizes": check_old_sizes(Path(disk)),
    }


def test_saves_on_a_network_disk(hosts: Hosts, network: Path) -> None:
    answers = f"{hosts.folder}/network-files.lost-{NAMES[0]}"
    found, *_ = hosts.run(check_all, disk=str(network), answers=answers)
    assert found == {
        "turns": {"after the second host": 2.0, "after the first": 3.0, "a new one": 4.0, "left": ["x-2"]},
        "crashes": {"the second host": 1.0, "the first host": 1.0},
        "lost": {"x-1": 1.0, "x-0": 2.0},
        "open": {"replaced": FILES, "read after that": True, "value": 4.0, "left": ["x-3"]},
        "sizes": True,
    }
