"""Running a step on several ranks so that all of them succeed or all of them raise; which ranks are gone if not.

When a collective fails the backend says "timed out" or "connection closed", and not whose rank it is. So every rank
that is left reports to the store of torchrun, through a connection of its own, and looks who else does.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightstep.distributed.groups import role_group, supports

Result = TypeVar("Result")

_CPU = torch.device("cpu")
_FAILED = -1


class Ranks:
    """The ranks that take part: those of a process group, or this process alone.

    Args:
        group: ``None``: the ranks of this process's role. Without roles these are the ranks of the default process
            group if one is initialised, else this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group = role_group() if group is None else group
        self.is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if self.is_distributed else 0
        self.size = dist.get_world_size(group) if self.is_distributed else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what only one rank does."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, in rank order, on every rank: one collective.

        Raises:
            LostRankError: ranks no longer answer; it names them.
        """
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        with _lost_ranks_named():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_integer(self, value: int) -> list[int]:
        """:meth:`gather` of integers: one message instead of two, and nothing is pickled."""
        if not self.is_distributed:
            return [value]
        with _lost_ranks_named():
            group = dist.group.WORLD if self.group is None else self.group
            if group is None or not supports(group, _CPU):
                return self.gather(value)
            values = [torch.empty(1, dtype=torch.int64, device=_CPU) for _ in range(self.size)]
            dist.all_gather(values, torch.tensor([value], dtype=torch.int64, device=_CPU), group=group)
        return [int(each) for each in values]

    def together(self, step: Callable[[], Result], only_first: bool = False) -> Result:
        """Run ``step`` on every rank and return its result. If it fails on any rank, every rank raises.

        A rank whose step fails raises its own error. The others raise :class:`RemoteRankError` with the message of the
        first rank that failed.

        Args:
            only_first: run ``step`` on the first rank only, and return its result on all of them.
        """
        error: BaseException | None = None
        result: Any = None
        if not only_first or self.is_first:
            try:
                result = step()
            except BaseException as caught:
                error = caught
        failures = self.gather(None if error is None else _describe(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RemoteRankError(rank, *failure)
        return self.gather(result)[0] if only_first else result

    def agree(self, step: Callable[[], int | None]) -> list[int]:
        """:meth:`together` for steps that return numbers of at least 0: all ranks' numbers, in one short message.

        ``None`` counts as 0. It must not meet :meth:`leave`.
        """
        error: BaseException | None = None
        number = _FAILED
        try:
            number = step() or 0
        except BaseException as caught:
            error = caught
        numbers = self.gather_integer(number)
        if _FAILED in numbers:
            self.together(lambda: _reraise(error))
        return numbers

    def leave(self, error: BaseException) -> None:
        """This rank leaves a block with ``error``, which the next :meth:`together` of the others raises on them.

        All ranks that leave a block with an error call this. It does nothing if the error is from a rank that has left:
        that rank waits for nobody. Nor does it if ranks no longer answer.
        """
        if not any(
            isinstance(link, LostRankError) or (isinstance(link, RemoteRankError) and link.has_left)
            for link in _chain(error)
        ):
            self.gather(_describe(error, has_left=True))


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """A collective that fails in the block because ranks no longer answer raises an error that names them."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():  # what torch says then depends on how far the collective had got
            raise LostRankError(
                "the process group was destroyed (torch.distributed.destroy_process_group) while its ranks still had "
                "something to do together; call strategy.close() before, or wait for saves and publications"
            ) from error
        lost = describe_lost_ranks() if is_failed_collective(error) else None
        if lost is None:
            raise
        raise LostRankError(lost) from error


class RemoteRankError(Exception):
    """Another rank failed: ``rank``, with ``text``. ``kind`` is the name of its error's class, ``has_left`` that of
    :meth:`Ranks.leave`.

    ``ranks`` are those that its error names, if it has such an attribute.
    """

    def __init__(self, rank: int, text: str, kind: str, has_left: bool = False, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text, self.kind, self.has_left, self.ranks = rank, text, kind, has_left, ranks


def _describe(error: BaseException, has_left: bool = False) -> tuple[str, str, bool, tuple[int, ...]]:
    """The arguments of :class:`RemoteRankError` on the other ranks, without the rank."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif not (isinstance(error, RuntimeError | TypeError) and text):
        text = f"{kind}: {text}"
    return text, kind, has_left, getattr(error, "ranks", ())


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__


# -- ranks that are gone ----------------------------------------------------------------------------------------------

REPORTING = datetime.timedelta(seconds=10)
"""How long the others have to report. The same failure reaches them at about the same time."""


class LostRankError(RuntimeError):
    """A collective failed; the message has the ranks that no longer answer."""


def name_lost_ranks() -> None:
    """From now on an uncaught error of a collective ends with :func:`describe_lost_ranks`.

    Most collectives are torch's own (FSDP2's, DDP's), in calls that nothing of ours could wrap.
    """
    if not _has_store():
        return
    with suppress(RuntimeError):
        store = _connect()
        store.delete_key(_report(dist.get_rank()))  # of an earlier group, maybe of a process before a restart
        store.set(_host(dist.get_rank()), socket.gethostname())
    if sys.excepthook is not _excepthook:
        _earlier_hooks.append(sys.excepthook)
        sys.excepthook = _excepthook


_earlier_hooks = [sys.__excepthook__]


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    chain, link = [], error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    named = any(isinstance(each, LostRankError) for each in chain)
    if not named and any(is_failed_collective(each) for each in chain) and (text := describe_lost_ranks()):
        error.add_note(text)
    _earlier_hooks[-1](kind, error, trace)


def is_failed_collective(error: BaseException) -> bool:
    """Whether a process group's backend raised the error. gloo raises a plain ``RuntimeError``."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def describe_lost_ranks() -> str | None:
    """One sentence about the ranks of the default group that no longer answer; ``None`` if all do, or nothing is known.

    Called by the ranks that are left. It takes :data:`REPORTING` if ranks are gone.
    """
    if not _has_store():
        return None
    this = f"rank {dist.get_rank()} on {socket.gethostname()}"
    try:
        store = _connect()
        store.set(_report(dist.get_rank()), "")
        missing = _unreported(store)
        hosts = [store.get(_host(rank)).decode() for rank in missing if store.check([_host(rank)])]
    except RuntimeError:  # torch's DistStoreError and DistNetworkError are
        there = os.environ["MASTER_ADDR"]
        return f"{this} does not reach {there}, where rank 0 is: its processes ended, or the network to it is down"
    if not missing:
        return None
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    where = f" on {' and '.join(dict.fromkeys(hosts))}" if hosts else ""
    return f"{this} does not reach {names}{where}: the processes ended, or the network to them is down"


def _has_store() -> bool:
    """Whether there is a group, and a store that does not end with one of its ranks: torchrun's."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agents and dist.is_available() and dist.is_initialized()


def _connect() -> dist.Store:
    client = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False, timeout=REPORTING
    )
    return dist.PrefixStore("lightstep-lost-ranks", client)


def _report(rank: int) -> str:
    return f"report-{rank}"


def _host(rank: int) -> str:
    return f"host-{rank}"


def _unreported(store: dist.Store) -> list[int]:
    """The ranks that have not reported in time."""
    end = time.monotonic() + REPORTING.seconds
    while True:
        missing = [rank for rank in range(dist.get_world_size()) if not store.check([_report(rank)])]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.1)
