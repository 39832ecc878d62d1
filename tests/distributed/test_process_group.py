"""The process group: who starts and ends it, and a rank that dies."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightstep.distributed import LostRankError, Ranks, let_gloo_finish_at_exit, new_group
from lightstep.distributed.groups import get_or_make_group
from tests.distributed.models import TinyTransformer
from tests.distributed.ranks import TIMEOUT, Pool, on_ranks
from tests.distributed.training import DDP, FSDP2, load, train


@on_ranks(2, group=False)
def test_process_group(rank: int, world_size: int) -> None:
    """Started by the strategy from torchrun's environment, and ended by it; left alone when it was somebody else's."""
    strategy = load(FSDP2)
    assert (strategy.rank, strategy.world_size, strategy.is_main) == (rank, world_size, rank == 0)
    assert not dist.is_initialized()
    with strategy:
        model = strategy.prepare_model(TinyTransformer())
        assert dist.is_initialized()
        train(strategy, model, strategy.create_optimizer(model))
        made = get_or_make_group((0, 1), torch.device("cpu"), number=1)
    assert not dist.is_initialized()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    assert let_gloo_finish_at_exit.cache_info().currsize == 1  # else some processes abort after they have ended
    let_gloo_finish_at_exit.cache_clear()
    dist.init_process_group("gloo")
    assert get_or_make_group((0, 1), torch.device("cpu"), number=1) is not made, "it has gone with the default group"
    strategy.close()  # again: this group is not the one that it has started
    with load(FSDP2) as other:
        other.start()
    dist.barrier()  # else this rank may go while the other is still connecting
    assert dist.is_initialized()
    assert let_gloo_finish_at_exit.cache_info().currsize == 1


@on_ranks(2, group=False)
def test_a_second_process_group_under_torchrun(rank: int) -> None:
    """One strategy after the other under torchrun, whose store is there all the time."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
    try:
        for _ in range(3):
            with load(FSDP2) as strategy:
                strategy.start()
                dist.barrier()
    finally:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        del store


@on_ranks(2, cpu=True)
def test_a_process_group_that_is_destroyed_too_early_is_named() -> None:
    """By the program, while a thread of a publication or a save still has something to say to the other ranks."""
    ranks = Ranks()
    ranks.gather(0)
    dist.destroy_process_group()
    for gather in (ranks.gather, ranks.gather_integer):
        with pytest.raises(LostRankError, match=r"the process group was destroyed .* call strategy.close\(\) before"):
            gather(0)


@on_ranks(2, cpu=True)
def test_a_group_that_other_ranks_do_not_make(rank: int) -> None:
    """They are waited for as long as in the default group; torch's own limit is half an hour."""
    store, limit = dist.distributed_c10d._get_default_store(), datetime.timedelta(seconds=2)
    if rank == 0:
        dist.distributed_c10d._set_pg_timeout(limit, None)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
            new_group([0, 1])
        store.set("refused", "yes")
    else:
        store.wait(["refused"], TIMEOUT)


def check_dying_rank(rank: int, world_size: int, folder: str, values: dict[str, Any]) -> None:
    """The last rank goes away without a word in the second step; the first one writes down what it is told."""
    strategy = load(**values)
    model = strategy.prepare_model(TinyTransformer())
    optimizer = strategy.create_optimizer(model)
    train(strategy, model, optimizer, steps=1)
    if rank == world_size - 1:
        os._exit(1)
    try:
        train(strategy, model, optimizer, steps=1)
        strategy.save_checkpoint(Path(folder, "after"), model, optimizer)
    except Exception as error:
        Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(1)  # ending the group may wait for the other rank


ON_HOST = {"weights": {"placement": "host"}, "optimizer_state": {"backend": "stream", "update": "overlap"}}


@pytest.mark.parametrize(
    "values",
    [{"sharding": FSDP2}, {"sharding": FSDP2, **ON_HOST}, {"sharding": DDP}],
    ids=["fsdp2", "fsdp2-offload", "ddp"],
)
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="the process ended"):
        Pool(patience=60).run(check_dying_rank, 2, folder=str(tmp_path), values=values)
    assert not (tmp_path / "after").exists()
    if torch.cuda.device_count() < 2:  # nccl's watchdog ends the process itself
        told = (tmp_path / "0.txt").read_text(encoding="utf-8")
        assert "onnection" in told and "imed out" not in told, told
