"""Publishing while training goes on: the loop copies the weights, and a thread sends them.

One set is on its way at a time. Another one waits for it, or with ``replace`` is copied beside it, and is replaced by
a third one that comes before it has been begun. All trainers decide alike: the first one's threads tell whether the
set that waits has been begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from lightstep.checkpoint.background import Pending, start_thread, thread_group
from lightstep.distributed import Ranks, RemoteRankError
from lightstep.rollout.publication import Publication, PublishedWeights
from lightstep.rollout.published_model import PublishedModel
from lightstep.rollout.staged_weights import StagedWeights, staging_memory
from lightstep.rollout.transport import WeightTransferError, WeightTransport
from lightstep.state.host_copy_pool import HostCopyPool

__all__ = ["Publisher"]


class _Set:
    """A set that was copied.

    Attributes:
        begun: its thread sends it; before that it may be replaced.
        dropped: it is not sent: its copy broke off.
    """

    def __init__(self, version: int, staged: StagedWeights, transport: WeightTransport | None) -> None:
        self.version, self.staged, self.transport = version, staged, transport
        self.begun = self.dropped = False
        self.pending: Pending[PublishedWeights | None] = Pending()


class Publisher:
    """Sends sets of weights, each from a thread. Created and called by all trainers in one order."""

    def __init__(self) -> None:
        self._loop_ranks = thread_group(Ranks(), "publishing, in the loop")
        self._thread_ranks = thread_group(Ranks(), "publishing, in the thread")
        self._changed = threading.Condition()
        self._holds = False  # no thread begins to send now
        self._sets: list[_Set] = []  # whose results nobody has asked for
        self._free: list[HostCopyPool] = []
        self._last: PublishedWeights | None = None
        self._base: StagedWeights | None = None  # the last set, if its receivers keep it
        self._stream: torch.cuda.Stream | None = None

    def wait(self) -> PublishedWeights | None:
        """Wait for all sets. Returns the last one that was sent.

        Raises:
            WeightTransferError: one was not sent. It is raised once.
        """
        for each in self._sets:
            each.pending.join()
        self._collect()
        return self._last

    def _collect(self) -> None:
        """Forget the sets that have been sent. Raises the error of one that has not."""
        while self._sets and self._sets[0].pending.done():
            self._last = self._sets.pop(0).pending.result() or self._last

    def publish(
        self,
        model: Callable[[Ranks], PublishedModel],
        version: int,
        transport: WeightTransport | None,
        replace: bool,
    ) -> None:
        """Copy a model's weights, and send them from a thread.

        Args:
            model: called by the trainers when the weights are about to be copied.
            replace: do not wait for a set that is on its way.

        Raises:
            WeightTransferError: an earlier set was not sent. Nothing was copied.
            HostMemoryError: there is not enough memory for the copies.
        """
        try:
            self._loop_ranks.together(self._collect if replace else self.wait)
            published = model(self._loop_ranks)
            waiting = self._hold()
            try:
                if waiting is not None:
                    self._replace(waiting, published, version, transport)
                else:
                    self._start(published, version, transport)
            finally:
                with self._changed:
                    self._holds = False
                    self._changed.notify_all()
        except RemoteRankError as error:
            raise WeightTransferError(f"weights were not published: {error}") from error

    def _hold(self) -> _Set | None:
        """The set that nobody has begun to send, and that nobody begins until all trainers have replaced it."""
        last = self._sets[-1] if self._sets else None
        with self._changed:
            self._holds = self._loop_ranks.is_first and last is not None and not last.begun
        return last if self._loop_ranks.gather(self._holds)[0] else None

    def _replace(
        self, waiting: _Set, published: PublishedModel, version: int, transport: WeightTransport | None
    ) -> None:
        waiting.staged.bring()  # its thread uses the memory no more
        try:
            waiting.staged = self._staged(published, waiting.staged.pool)
        except BaseException:
            waiting.dropped = True
            raise
        waiting.staged.bring()
        waiting.version, waiting.transport = version, transport

    def _start(self, published: PublishedModel, version: int, transport: WeightTransport | None) -> None:
        with self._changed:
            pool = self._free.pop() if self._free else staging_memory()
        previous = self._sets[-1] if self._sets else None
        new = _Set(version, self._staged(published, pool), transport)
        start_thread(new.pending, lambda: self._send(new, previous), ExitStack(), "lightstep-publisher")
        self._sets.append(new)

    def _staged(self, published: PublishedModel, pool: HostCopyPool) -> StagedWeights:
        return StagedWeights(published, pool, self._loop_ranks, self._thread_ranks)

    # -- in the thread

    def _send(self, item: _Set, previous: _Set | None) -> PublishedWeights | None:
        with suppress(Exception):  # reading a bucket tries again, where all trainers hear of an error
            item.staged.bring()
        if previous is not None:
            previous.pending.join()
        keeps = self._begin(item)
        staged, done = item.staged, None
        try:
            if not item.dropped:
                with self._own_stream(staged.origin):
                    done = self._publication(item, keeps).send(item.version)
            return done
        finally:
            staged.base = None
            if not item.dropped:
                self._keep(staged if keeps and done is not None else None, staged)

    def _begin(self, item: _Set) -> bool:
        """Whether the set's receivers keep it for deltas."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holds)
            if self._thread_ranks.is_first:
                item.begun = True
        # the first trainer's thread decides when
        return bool(self._thread_ranks.gather(item.transport is not None and item.transport.deltas)[0])

    def _publication(self, item: _Set, keeps: bool) -> Publication:
        staged, base = item.staged, self._base
        if keeps:
            follows = base is not None and staged.can_follow(base)
            staged.base = base if all(self._thread_ranks.gather(follows)) else None
            if item.transport is not None:
                item.transport.identify(staged.set_id, None if staged.base is None else staged.base.set_id)
        return Publication(staged, item.transport, self._thread_ranks)

    def _keep(self, base: StagedWeights | None, sent: StagedWeights) -> None:
        """Keep what was sent as the base of deltas, or nothing. After a failure nobody knows what receivers hold."""
        with self._changed:
            unused = [each for each in (self._base, sent) if each is not None and each is not base]
            self._free += [each.pool for each in unused]
            self._base = base

    def _own_stream(self, device: torch.device) -> torch.cuda.StreamContext:
        """A stream of the threads' own: their copies do not wait for what training has queued.

        It is kept: memory that was allocated for one stream is not used again for another one.
        """
        if device.type != "cuda":
            return torch.cuda.stream(None)
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)
