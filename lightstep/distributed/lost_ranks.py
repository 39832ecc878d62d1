"""Which ranks are gone when a collective fails.

The backend says "timed out" or "connection closed", and not whose rank it is. So every rank that is left reports to the
store of torchrun, through a connection of its own, and looks who else does.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

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
