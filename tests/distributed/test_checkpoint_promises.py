"""Checkpoints of several ranks: earlier versions, one save that all ranks read, and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import lightstep
from lightstep.checkpoint import CheckpointError, load, save
from tests.checkpoint_runs import OLD, Adapted
from tests.distributed.ranks import Pool
from tests.distributed.sharding_runs import full
from tests.patience import PATIENCE


def made(module: nn.Module, steps: int, width: int) -> tuple[Any, nn.Module, Any]:
    strategy = lightstep.Strategy.load({"sharding": {"kind": "fsdp2"}, "optimizer_state": {"backend": "stream"}})
    model = strategy.prepare_model(module)
    optimizer = strategy.create_optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        rows = torch.randn(4, width, dtype=torch.bfloat16, device=strategy.device)
        optimizer.backward(model(rows).float().square().sum())
        optimizer.step()
    return strategy, model, optimizer


def content(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    optimizer.synchronize()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter).detach().cpu().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = full(torch.as_tensor(value)).cpu().clone()
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def check_old(rank: int, world_size: int) -> None:
    strategy, model, optimizer = made(nn.Linear(5, 3), 1, 5)
    for name in ("stream", "fsdp2-2"):
        assert strategy.load_checkpoint(OLD / name, model, optimizer) == {"epoch": 3}
        same(content(model, optimizer), load_file(OLD / f"{name}.safetensors"))


def test_checkpoints_of_the_previous_version_load_to_the_same_bits(pool: Pool) -> None:
    pool.run(check_old, 2)


def check_replaced(rank: int, world_size: int, folder: str) -> None:
    """The checkpoint is replaced after one rank has read it: all ranks are told to load again, and get the new one."""
    path = Path(folder, "step")
    strategy, model, optimizer = made(nn.Linear(5, 3), 1, 5)
    strategy.save_checkpoint(path, model, optimizer)
    newer, model2, optimizer2 = made(nn.Linear(5, 3), 3, 5)
    expected, read, calls = content(model2, optimizer2), load.read_tensors, []
    newer.save_checkpoint(Path(folder, "newer"), model2, optimizer2)

    def replacing(*arguments: Any) -> None:
        calls.append(arguments)
        read(*arguments)
        if len(calls) == moments[0] and rank == 1:
            path.rename(path.with_name("aside"))
            Path(folder, "newer").rename(path)

    moments = [1, 2, 3]  # after which reading it is replaced
    while moments:
        other, model3, optimizer3 = made(nn.Linear(5, 3), 0, 5)
        load.read_tensors = replacing
        try:
            with pytest.raises(CheckpointError, match="step was replaced or removed while it was read; load again"):
                other.load_checkpoint(path, model3, optimizer3)
        finally:
            load.read_tensors = read
        other.load_checkpoint(path, model3, optimizer3)
        same(content(model3, optimizer3), expected)
        dist.barrier()
        if rank == 1:
            path.rename(Path(folder, "newer"))
            path.with_name("aside").rename(path)
        calls.clear()
        moments.pop(0)
        dist.barrier()


def test_all_ranks_load_one_save(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_replaced, 2, folder=str(tmp_path))


def check_failing(rank: int, world_size: int, folder: str) -> None:
    """One rank cannot read its part: no rank has changed anything, or all of them are marked."""
    strategy, model, optimizer = made(nn.Linear(5, 3), 3, 5)
    strategy.save_checkpoint(Path(folder, "a"), model, optimizer)
    other, model2, optimizer2 = made(nn.Linear(5, 3), 1, 5)
    before, read, calls = content(model2, optimizer2), load.read_tensors, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if rank == 1 and len(calls) == when:
            raise OSError(5, "Input/output error")
        read(*arguments)

    for when in (1, 3):
        calls.clear()
        load.read_tensors = failing
        try:
            with pytest.raises(CheckpointError, match="Input/output error"):
                other.load_checkpoint(Path(folder, "a"), model2, optimizer2)
        finally:
            load.read_tensors = read
        if when == 1:
            same(content(model2, optimizer2), before)
            other.save_checkpoint(Path(folder, "b"), model2, optimizer2)
    with pytest.raises(CheckpointError, match="failed after a part of it had been loaded"):
        other.save_checkpoint(Path(folder, "b"), model2, optimizer2)
    other.load_checkpoint(Path(folder, "a"), model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))
    other.save_checkpoint(Path(folder, "b"), model2, optimizer2)


def test_a_rank_that_cannot_read_stops_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_failing, 2, folder=str(tmp_path))


def check_adapter(rank: int, world_size: int, folder: str) -> None:
    strategy, model, optimizer = made(Adapted(), 3, 6)
    path = Path(folder, "a")
    strategy.save_checkpoint(path, model, optimizer)
    dist.barrier()
    names = {key.split(".")[1] for key in json.loads((path / "tensors.json").read_text())["tensors"]}
    assert names == {"adapter", "norm"}
    other, model2, optimizer2 = made(Adapted(), 1, 6)
    other.load_checkpoint(path, model2, optimizer2)
    same(content(model2, optimizer2), content(model, optimizer))


def test_an_adapter_without_its_base(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_adapter, 2, folder=str(tmp_path))


def check_damage_and_urls(rank: int, world_size: int, folder: str) -> None:
    """One manifest has the checksums of both ranks; whichever finds damage, all raise, and the first advises."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    for place in (folder, f"file://{folder}/at-a-url"):
        for number in (1, 2, 3):
            strategy.save_checkpoint(f"{place}/step-{number}", model, optimizer, keep_last=2, extra={"at": number})
        expected = content(model, optimizer)
        other, model2, optimizer2 = made(nn.Linear(6, 4), 1, 6)
        assert other.load_checkpoint(f"{place}/step-3", model2, optimizer2) == {"at": 3}
        same(content(model2, optimizer2), expected)
        written = sorted(Path(place.removeprefix("file://")).glob("step-3/**/*.distcp"))
        assert [file.name.split("_")[2] for file in written] == ["0", "1"], "each rank writes"
        assert {path.name for path in Path(place.removeprefix("file://")).glob("step-*")} == {"step-2", "step-3"}
        dist.barrier()
        if rank == 0:
            data = bytearray(written[1].read_bytes())
            data[len(data) // 2] ^= 1
            written[1].write_bytes(bytes(data))
        dist.barrier()
        before = content(model2, optimizer2)
        with pytest.raises(CheckpointError) as raised:
            other.load_checkpoint(f"{place}/step-3", model2, optimizer2)
        assert "__1_0_0.distcp is damaged" in str(raised.value)
        assert (f"{place}/step-2 is undamaged: load that one" in str(raised.value)) == (rank == 0)
        same(content(model2, optimizer2), before)
        dist.barrier()


def test_damage_is_told_to_all_ranks_and_a_url_is_written_by_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_damage_and_urls, 2, folder=str(tmp_path))


def check_asynchronous(rank: int, world_size: int, folder: str) -> None:
    """Both ranks train on, with collectives of their own, while threads of both write what was there."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    expected = content(model, optimizer)
    for number in (1, 2):
        pending = strategy.save_checkpoint(
            f"{folder}/step-{number}", model, optimizer, asynchronous=True, keep_last=1, extra={"at": number}
        )
        for step in range(3 if number == 1 else 0):
            torch.manual_seed(step)
            rows = torch.randn(4, 6, dtype=torch.bfloat16, device=strategy.device)
            optimizer.backward(model(rows).float().square().sum())
            optimizer.step()
        if number == 1:
            pending.result(PATIENCE)
            other, model2, optimizer2 = made(nn.Linear(6, 4), 1, 6)
            assert other.load_checkpoint(f"{folder}/step-1", model2, optimizer2) == {"at": 1}
            same(content(model2, optimizer2), expected)
    assert strategy.save_checkpoint(f"{folder}/step-3", model, optimizer, keep_last=1) is None
    assert pending.done()
    dist.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["step-3"]


def test_two_ranks_write_while_they_train(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_asynchronous, 2, folder=str(tmp_path))


def check_asynchronous_error(rank: int, world_size: int, folder: str, failing: int) -> None:
    """The writer of one rank fails: no rank's step raises, so none waits for another; the next save of each does."""
    strategy, model, optimizer = made(nn.Linear(6, 4), 2, 6)
    strategy.save_checkpoint(f"{folder}/step-1", model, optimizer)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def train() -> None:
        optimizer.backward(model(torch.ones(4, 6, dtype=torch.bfloat16, device=strategy.device)).float().sum())
        optimizer.step()

    expected = "No space left on device" if rank == failing else f"rank {failing}: No space left on device"
    for raises in (lambda: strategy.save_checkpoint(f"{folder}/step-3", model, optimizer), strategy.close):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(save, "write_tensors", fails)
            pending = strategy.save_checkpoint(f"{folder}/step-2", model, optimizer, asynchronous=True, keep_last=1)
            train()
            assert isinstance(pending.exception(PATIENCE), CheckpointError)
        train()
        with pytest.raises(CheckpointError, match=f"step-2 was not saved: {expected}$"):
            raises()
    strategy.save_checkpoint(f"{folder}/step-4", model, optimizer, asynchronous=True).result(PATIENCE)
    dist.barrier()
    assert {path.name for path in Path(folder).iterdir()} == {"step-1", "step-4"}
    dist.barrier()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_writer_is_raised_by_the_next_save_of_all_ranks(
    pool: Pool, tmp_path: Path, failing: int
) -> None:
    pool.run(check_asynchronous_error, 2, folder=str(tmp_path), failing=failing)
