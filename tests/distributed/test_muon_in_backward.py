"""Muon on shards under ``update: overlap``: tried in backward by all ranks or none, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightstep.optimizer.overlap import Overlap
from tests.distributed.models import loss_of
from tests.distributed.ranks import Pool
from tests.distributed.test_sharded_muon import STATES, assert_same, beside_a_loop, round_moments, slow_lanes
from tests.python import python

Act = Callable[[int, Overlap], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def nothing(rank: int, overlap: Overlap) -> Iterator[None]:
    yield


@contextlib.contextmanager
def other_order(rank: int, overlap: Overlap) -> Iterator[None]:
    """One rank sees its gradients last to first, when backward is over.

    On the CPU: NCCL wants the operations of all communicators in one order on all ranks. FSDP2's own reductions, which
    follow the order of gradients, would hang there as well.
    """
    collect, try_together, held = overlap._collect, overlap._try_together, []

    def tried(trial: Any, rest: bool = False) -> None:
        while rest and held:
            collect(*held.pop())
        try_together(trial, rest)

    if rank == 1 and overlap._backend.lanes.device.type == "cpu":
        collecting = mock.patch.object(overlap, "_collect", lambda *one: held.append(one))
        with collecting, mock.patch.object(overlap, "_try_together", tried):
            yield
        assert not held
    else:
        yield


@contextlib.contextmanager
def read_in_backward(rank: int, overlap: Overlap) -> Iterator[None]:
    """One rank reads what was tried, while all of them go on with more."""
    submit, reads = overlap._try, []

    def tried(trial: Any, units: Any) -> None:
        submit(trial, units)
        if trial.line and trial.units:
            overlap.wait_for_update(list(trial.used))
            reads.append(units)

    if rank == 1:
        with mock.patch.object(overlap, "_try", tried):
            yield
        assert reads
    else:
        yield


@contextlib.contextmanager
def no_room(rank: int, overlap: Overlap) -> Iterator[None]:
    able: Any = overlap._backend.can_try
    with mock.patch.object(overlap._backend, "can_try", (lambda units: ()) if rank == 1 else able):
        yield


@contextlib.contextmanager
def some_room(rank: int, overlap: Overlap) -> Iterator[None]:
    """Others on every rank: weights are cut, and what is tried of one may be its end."""
    able: Any = overlap._backend.can_try
    with mock.patch.object(overlap._backend, "can_try", lambda units: able(units)[rank % 3 :: 2]):
        yield


def read_before_step(rank: int, optimizer: Any) -> None:
    if rank == 1:
        optimizer.synchronize()


STEPS: list[tuple[Act, Any, float, str]] = [
    (nothing, None, 1e6, ""),  # state is made
    (nothing, None, 1e6, "commit"),
    (nothing, None, 0.05, "redo"),
    (other_order, None, 1e6, "commit"),
    (read_in_backward, None, 1e6, "redo"),
    (nothing, read_before_step, 1e6, "redo"),
    (no_room, None, 1e6, ""),
    (some_room, None, 1e6, "any"),
    (nothing, None, float("nan"), "withdrawn"),
    (nothing, None, 1e6, "commit"),
]
"""What is done in backward, what before ``step()``, the largest norm (NaN: an overflow), and what becomes of units that
ranks try together, on rank 0."""


def check_tried(rank: int, world_size: int, moments: str, copies: int) -> None:
    state = {**STATES["stream, overlap"], "moments": moments}
    sharding = {"mesh": {"replicate": copies, "shard": world_size // copies}}
    strategy, model, optimizer, loop = beside_a_loop(rank, world_size, sharding, state)
    overlap: Overlap = optimizer.engine.schedule
    became: list[str] = []
    decide, withdraw = overlap._decide, overlap.withdraw

    def note(trial: Any, what: str) -> None:
        if trial is not None and trial.together & set(trial.units):
            became.append(what)

    def decided(trial: Any, update: Any) -> None:
        note(trial, overlap._verdict.read())
        decide(trial, update)

    def withdrawn() -> None:
        note(overlap._trial, "withdrawn")
        withdraw()

    patches: dict[str, Any] = {
        "at_once": 1,
        "ahead": 0,
        "_decide": decided,
        "withdraw": withdrawn,
        "_count_verdict": lambda: setattr(overlap, "_pause", 0),
    }
    with mock.patch.multiple(overlap, **patches), mock.patch.object(overlap._share, "adapt"):
        for step, (in_backward, before_step, max_norm, expected) in enumerate(STEPS):
            overflow = max_norm != max_norm
            optimizer.max_norm = loop.max_norm = 1.0 if overflow else max_norm
            loss = loss_of(model, step, 0, rank, strategy.device)
            with in_backward(rank, overlap), strategy.accumulate(model, last=True):
                optimizer.backward(loss * max_norm if overflow else loss)
            if before_step is not None:
                before_step(rank, optimizer)
            result = optimizer.step()
            if rank == 0:
                optimizer.synchronize()  # alone: what it waits for does not wait for what the others do next
            dist.barrier()
            if not overflow:
                loop.backward(loss_of(loop.model, step, 0, rank, strategy.device))
                loop.step(result.grad_norm)
                if moments == "bfloat16":
                    round_moments(loop)
            if step == 0:
                slow_lanes(strategy, optimizer, rank)
            assert rank > 0 or expected == "any" or became == [expected] * bool(expected), (step, became)
            became.clear()
    assert_same(model, optimizer, loop)
    optimizer.close()


@pytest.mark.parametrize(
    ("world_size", "moments", "copies"), [(2, "float32", 1), (3, "bfloat16", 1), (4, "float32", 2)]
)
def test_the_same_on_all_ranks(pool: Pool, world_size: int, moments: str, copies: int) -> None:
    """With copies of the shards, what is said of rank 1 is so of one copy, or of one rank of it."""
    pool.run(check_tried, world_size, moments=moments, copies=copies)


def test_a_rank_that_fails_ends(tmp_path: Path) -> None:
    """With its own error, and the others with it: neither waits for the other until the process group gives up."""
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = python("-m", "tests.distributed.failing_rank", str(tmp_path), cwd=Path.cwd(), env=without_gpu)
    assert ended.returncode and (tmp_path / "rank1").exists(), ended.stderr
    failed, waiting = ((tmp_path / name).read_text() for name in ("rank1", "rank0"))
    assert "no more room); other ranks wait for this one until its process ends" in failed
    assert "imed out" not in waiting
