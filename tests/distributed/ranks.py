"""A pool of rank processes: started once, then any check runs on any number of them within a second or so.

:func:`on_ranks` makes tests that are written as what each rank does.

A check is a module-level function of ``rank``, ``world_size`` and other arguments, or of these alone; it runs on ranks
``0 … world_size - 1`` inside a fresh process group: nccl with one GPU per rank where the machine has that many, else
gloo, in processes that see no GPU. With ``LIGHTSTEP_SHARED_GPU=1`` all ranks share one GPU, over gloo. There is no way
to skip: a check that does not run is a failure. A rank that fails or hangs takes the pool down with it, and the next
check gets a new one. Tensors are pickled as bytes: not every machine has shared memory.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from lightstep.strategy import process_group
from tests.collector import collect_and_skip, collect_seldom
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.small_units import make_units_small

TIMEOUT = datetime.timedelta(seconds=PATIENCE)
"""Of one collective. A rank that waits longer for the others fails."""

CHECK_SECONDS = 2 * PATIENCE
"""Of one whole check, the start of its processes included."""

CHECKS = 64
"""After so many checks new processes are started: gloo's threads outlive some groups, and each of them polls."""

LINEAR = torch.nn.functional.linear

SHARED_GPU = os.environ.get("LIGHTSTEP_SHARED_GPU") == "1"
"""So the streams of several ranks are tried where there is one GPU, which nccl refuses to share.

Tests fail there that make nccl groups themselves."""

_REPLACED = torch.library.Library("_c10d_functional", "IMPL")


class Pool:
    """Rank processes, started when first needed.

    Args:
        patience: seconds that the other ranks have for their answers after the first failure.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._patience, self._checks = patience, 0
        self._processes: list[BaseProcess] = []
        self._pipes: dict[bool, list[Connection]] = {True: [], False: []}  # whose processes see the GPUs

    def run(
        self, check: Callable[..., Any], world_size: int, *, group: bool = True, cpu: bool = False, **arguments: Any
    ) -> list[Any]:
        """What ``check`` returned, by rank.

        Args:
            check: importable; called with ``rank``, ``world_size`` and ``arguments`` on every rank.
            group: start the default process group before and end it afterwards; else only torchrun's variables are set.
            cpu: in processes that see no GPU, whatever the machine has.

        Raises:
            AssertionError: with every failed rank's traceback, that of the first one to fail last.
        """
        self._checks += 1
        if self._checks % CHECKS == 0:
            self.close()
        gpus = device_of(0, world_size).type == "cuda" and not cpu
        pipes = self._pipes[gpus]
        self._grow(world_size, gpus)
        with tempfile.TemporaryDirectory() as meeting_place:
            place = meeting_place if group else None  # a file: a port may be taken between its choice and its use
            task = (check.__module__, check.__qualname__, world_size, free_port(), place, arguments)
            for rank in range(world_size):
                pipes[rank].send_bytes(pickle.dumps((rank, *task)))
            outcomes = self._outcomes(pipes[:world_size])
        failed = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
        if failed or len(outcomes) < world_size:
            silent = sorted(set(range(world_size)) - outcomes.keys())
            self.close()
            told = [f"--- rank {rank} of {world_size} ---\n{text}" for rank, text in reversed(failed.items())]
            short = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in failed.items()]
            raise AssertionError("\n".join([*told, *short, *(f"rank {rank} did not answer" for rank in silent)]))
        return [outcomes[rank][1] for rank in range(world_size)]

    def _outcomes(self, pipes: list[Connection]) -> dict[int, tuple[bool, Any]]:
        """Answers by rank. After the first failure the others have some time left to tell theirs."""
        outcomes: dict[int, tuple[bool, Any]] = {}
        seconds = CHECK_SECONDS
        while len(outcomes) < len(pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
            ready = wait(list(waiting), seconds)
            if not ready:
                break
            for pipe in ready:
                outcomes[waiting[pipe]] = _answer(pipe)  # type: ignore[index]
            if not all(ok for ok, _ in outcomes.values()):
                seconds = self._patience
        return outcomes

    def _grow(self, world_size: int, gpus: bool) -> None:
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        while len(self._pipes[gpus]) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            with nullcontext() if gpus else mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes[gpus].append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], {True: [], False: []}


def on_ranks(
    ranks: int | Mapping[str, tuple[int, Any]] | None,
    names: str | tuple[str, ...] = (),
    cases: Sequence[Any] = ((),),
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function a test that runs it on so many ranks of the pool.

    Its arguments are ``rank`` and ``world_size``, if it wants them, and those of the test: parameters, and fixtures
    whose values can be pickled.

    Args:
        ranks: how many. ``None``: a case says so, as its ``ranks``. Layouts: the ``layout`` of a case names ranks and
            their sharding, which the function gets as ``sharding``.
        names, cases: other arguments, as for ``pytest.mark.parametrize``: of calls that follow each other in one
            process group.
        options: of :meth:`Pool.run`.
    """
    rows = [{names: case} if isinstance(names, str) else dict(zip(names, case, strict=True)) for case in cases]

    def placed(case: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """On how many ranks a case runs, and its arguments there."""
        if isinstance(ranks, int):
            return ranks, case
        if ranks is None:
            return case["ranks"], {name: value for name, value in case.items() if name != "ranks"}
        size, sharding = ranks[case["layout"]]
        return size, {name: value for name, value in case.items() if name != "layout"} | {"sharding": sharding}

    def mark(function: Callable[..., Any]) -> Callable[..., None]:
        def check(rank: int, world_size: int, **arguments: Any) -> None:
            for row in rows:
                size, case = placed({**arguments, **row})
                if size == world_size:
                    torch.manual_seed(0)
                    try:
                        called(function, rank, world_size, case)
                    except BaseException as error:
                        error.add_note(f"in the case {row}")
                        raise

        def test(pool: Pool, **arguments: Any) -> None:
            for size in dict.fromkeys(placed({**arguments, **row})[0] for row in rows):
                pool.run(check, size, **options, **arguments)

        pool, *_ = inspect.signature(test).parameters.values()
        own = [name for name in inspect.signature(function).parameters if name not in ("rank", "world_size")]
        if not isinstance(ranks, int):
            own = ["ranks", *own] if ranks is None else ["layout", *(name for name in own if name != "sharding")]
        given = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in own if n not in rows[0]]
        test.__signature__ = inspect.Signature([pool, *given])  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        check.__module__, check.__qualname__ = function.__module__, f"{function.__qualname__}.check"
        test.check = check  # type: ignore[attr-defined]
        return test

    return mark


def called(function: Callable[..., Any], rank: int, world_size: int, arguments: Mapping[str, Any]) -> Any:
    """What it returns, with ``rank`` and ``world_size`` if it has such arguments."""
    place = {"rank": rank, "world_size": world_size}
    wanted = inspect.signature(function).parameters
    return function(**{name: value for name, value in place.items() if name in wanted}, **arguments)


def device_of(rank: int, world_size: int) -> torch.device:
    """The rank's own GPU if every rank has one, or the first one if they share it, else the CPU."""
    if SHARED_GPU and torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world_size else torch.device("cpu")


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "the process ended"
    return ok, value


def _serve(pipe: Connection) -> None:
    """A rank process: check after check until the pipe closes. If it crashes, it says where."""
    faulthandler.enable()
    if SHARED_GPU:
        process_group._has_nccl = lambda: True  # strategies take gloo for a group of CPUs
        _replace_collectives()
    gc.freeze()  # what was imported before the fork is collected by nobody
    collect_seldom()  # _run() does after each check
    make_units_small(pytest.MonkeyPatch())
    while True:
        try:
            rank, module, name, world_size, port, meeting_place, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            check = _imported(module)
            for part in name.split("."):
                check = getattr(check, part)
            _run(check, rank, world_size, port, meeting_place, arguments, partial(_tell, pipe))
        except BaseException:
            _tell(pipe, False, traceback.format_exc())


def _replace_collectives() -> None:
    """DTensor's collectives on a GPU are made of others: torch 2.11's own crash over gloo."""

    def all_gather(values: Tensor, group_size: int, group: str) -> Tensor:
        gathered = values.new_empty((group_size * values.shape[0], *values.shape[1:]))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=_resolve_process_group(group))
        return gathered

    def all_reduce(values: Tensor, operation: str, group: str) -> Tensor:
        reduced = values.contiguous().clone()
        dist.all_reduce(reduced, getattr(dist.ReduceOp, operation.upper()), group=_resolve_process_group(group))
        return reduced

    def reduce_scatter(values: Tensor, operation: str, group_size: int, group: str) -> Tensor:
        ranks, reduction = _resolve_process_group(group), getattr(dist.ReduceOp, operation.upper())
        received = values.new_empty((values.shape[0] // group_size, *values.shape[1:]))
        dist.reduce_scatter_tensor(received, values.contiguous(), op=reduction, group=ranks)
        return received

    _REPLACED.impl("all_gather_into_tensor", all_gather, "CUDA")
    _REPLACED.impl("all_reduce", all_reduce, "CUDA")
    _REPLACED.impl("reduce_scatter_tensor", reduce_scatter, "CUDA")
    _REPLACED.impl("wait_tensor", lambda values: values, "CUDA")


def _tell(pipe: Connection, ok: bool, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((ok, value)))


def _imported(name: str) -> Any:
    """The module. What a new one brings along is collected by nobody either."""
    if name in sys.modules:
        return sys.modules[name]
    module = importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return module


def _run(
    check: Any,
    rank: int,
    world_size: int,
    port: int,
    meeting_place: str | None,
    arguments: dict[str, Any],
    tell: Callable[[bool, Any], None],
) -> None:
    device = device_of(rank, world_size)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if device.type == "cpu" else device.index),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # accelerate sets others, and sums have other bits then
    torch.nn.functional.linear = LINEAR  # DeepSpeed's third stage puts its own there for good, with other bits
    if meeting_place is not None:
        on_gpus = "cpu:gloo,cuda:gloo" if SHARED_GPU else "cpu:gloo,cuda:nccl"
        backend = on_gpus if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, f"file://{meeting_place}/store", timeout=TIMEOUT, rank=rank, world_size=world_size
        )
        if device.type == "cpu":
            dist.barrier()  # a check that does not communicate may end while another rank is still connecting
    try:
        result = called(check, rank, world_size, arguments)
    except BaseException:
        tell(False, traceback.format_exc())  # nccl does not leave a group while another rank waits in it
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        with suppress(ImportError):  # torch keeps what it found out about a mesh for the next one that is equal to it
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
        collect_and_skip()  # groups that a cycle keeps, and their threads
    tell(True, result)
