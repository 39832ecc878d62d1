"""Muon on shards under ``update: overlap``: tried in backward by all ranks or none, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightstep.optimizer import queue
from lightstep.optimizer.overlap import SpeculativeUpdates
from tests.distributed.failing_rank import train_as
from tests.distributed.models import loss_of
from tests.distributed.ranks import on_ranks
from tests.distributed.test_sharded_muon import STATES, Run
from tests.patience import PATIENCE

Act = Callable[[int, SpeculativeUpdates], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def nothing(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    yield


@contextlib.contextmanager
def other_order(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """One rank sees its gradients last to first, when backward is over.

    On the CPU: NCCL wants the operations of all communicators in one order on all ranks. FSDP2's own reductions, which
    follow the order of gradients, would hang there as well.
    """
    on_gradient, speculate_shared, held = overlap._on_gradient, overlap._speculate_shared, []

    def speculated(speculation: Any, flush: bool = False) -> None:
        while flush and held:
            on_gradient(*held.pop())
        speculate_shared(speculation, flush)

    if rank == 1 and overlap._backend.lanes.device.type == "cpu":
        collecting = mock.patch.object(overlap, "_on_gradient", lambda *one: held.append(one))
        with collecting, mock.patch.object(overlap, "_speculate_shared", speculated):
            yield
        assert not held
    else:
        yield


@contextlib.contextmanager
def read_in_backward(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """One rank reads what was tried, while all of them go on with more."""
    submit, reads = overlap._submit_speculative, []

    def submitted(speculation: Any, units: Any) -> None:
        submit(speculation, units)
        if speculation.shared_queue and speculation.submitted:
            overlap._queue.wait_for_update(list(speculation.used))
            reads.append(units)

    if rank == 1:
        with mock.patch.object(overlap, "_submit_speculative", submitted):
            yield
        assert reads
    else:
        yield


@contextlib.contextmanager
def no_room(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    able: Any = overlap._backend.reserve_speculation
    with mock.patch.object(overlap._backend, "reserve_speculation", (lambda units: ()) if rank == 1 else able):
        yield


@contextlib.contextmanager
def some_room(rank: int, overlap: SpeculativeUpdates) -> Iterator[None]:
    """Others on every rank: weights are cut, and what is tried of one may be its end."""
    able: Any = overlap._backend.reserve_speculation
    with mock.patch.object(overlap._backend, "reserve_speculation", lambda units: able(units)[rank % 3 :: 2]):
        yield


def read_before_step(rank: int, optimizer: Any) -> None:
    if rank == 1:
        optimizer.synchronize()


STEPS: list[tuple[Act, Any, float, str]] = [
    (nothing, None, 1e6, ""),  # state is made
    (nothing, None, 0.05, "redo"),
    (other_order, None, 1e6, "commit"),
    (read_in_backward, None, 1e6, "redo"),
    (nothing, read_before_step, 1e6, "redo"),
    (no_room, None, 1e6, ""),
    (some_room, None, 1e6, "any"),
    (nothing, None, float("nan"), "drop"),
    (nothing, None, 1e6, "commit"),
]
"""What is done in backward, what before ``step()``, the largest norm (NaN: an overflow), and what becomes of units that
ranks try together, on rank 0."""


@on_ranks(None, ("ranks", "moments", "copies"), [(2, "bfloat16", 1), (4, "float32", 2)])
def test_the_same_on_all_ranks(rank: int, world_size: int, moments: str, copies: int) -> None:
    """With copies of the shards, what is said of rank 1 is so of one copy, or of one rank of it."""
    sharding = {"mesh": {"replicate": copies, "shard": world_size // copies}}
    run = Run(sharding, {**STATES["stream, overlap"], "moments": moments}, beside=True)
    optimizer, loop = run.optimizer, run.loop
    overlap: SpeculativeUpdates = optimizer.engine.queue.early
    became: list[str] = []
    apply_verdict, roll_back, skip = overlap._apply_verdict, overlap._roll_back, overlap.skip

    def note(speculation: Any, what: str) -> None:
        if speculation is not None and speculation.plan.shared & set(speculation.submitted):
            became.append(what)

    def applied(speculation: Any, update: Any) -> None:
        note(speculation, overlap._verdict.read())
        apply_verdict(speculation, update)

    def rolled_back(reason: str) -> Any:
        note(overlap.speculation, "rolled back")
        return roll_back(reason)

    def skipped() -> None:
        note(overlap.speculation, "drop")
        skip()

    patches: dict[str, Any] = {
        "skip": skipped,
        "_apply_verdict": applied,
        "_roll_back": rolled_back,
        "_update_pause": lambda: setattr(overlap, "_pause", 0),
    }
    one_by_one = mock.patch.multiple(queue, SUBMIT_IN_STEP=1, SUBMIT_AHEAD=0)
    with one_by_one, mock.patch.multiple(overlap, **patches), mock.patch.object(overlap._link_share, "adapt"):
        for step, (in_backward, before_step, max_norm, expected) in enumerate(STEPS):
            overflow = max_norm != max_norm
            optimizer.max_norm = loop.max_norm = 1.0 if overflow else max_norm
            loss = loss_of(run.model, step, 0, rank, run.device)
            with in_backward(rank, overlap), run.accumulate(last=True):
                optimizer.backward(loss * max_norm if overflow else loss)
            if before_step is not None:
                before_step(rank, optimizer)
            run.result = optimizer.step()
            if rank == 0:
                optimizer.synchronize()  # alone: what it waits for does not wait for what the others do next
            dist.barrier()
            if not overflow:
                loop.backward(loss_of(loop.model, step, 0, rank, run.device))
                run.step_loop()
            if step == 0:
                run.delay(rank, 3e-4)
            assert rank > 0 or expected == "any" or became == [expected] * bool(expected), (step, became)
            became.clear()
    run.check()
    optimizer.close()


def test_a_rank_that_fails_ends(tmp_path: Path) -> None:
    """With its own error, and the others with it: neither waits for the other until the process group gives up."""
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    ranks = [context.Process(target=train_as, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    assert all(rank.exitcode for rank in ranks)
    failed, waiting = ((tmp_path / name).read_text() for name in ("rank1", "rank0"))
    assert "no more room); other ranks wait for this one until its process ends" in failed
    assert "imed out" not in waiting
