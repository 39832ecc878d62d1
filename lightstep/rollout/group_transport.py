"""Sending weights from the first trainer to rollout workers over a process group: both ends.

Every set of weights has a number and these messages on a :class:`MessageBoard`:

1. ``offer``, from the trainer: which tensors will be sent, and to whom.
2. ``reply``, from every receiver: that it can load them, or why not.
3. ``verdict``, from the trainer: that it will send them, or why not.
4. ``done``, from every receiver: that it has the complete set, or its error.

The weights are broadcast over a :class:`~lightstep.rollout.transport.WeightLink`, which is kept for the next set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightstep.rollout.engine import RolloutEngine
from lightstep.rollout.transport import (
    Bucket,
    TrainingEnded,
    WeightInfo,
    WeightLink,
    WeightTransferError,
    WeightTransport,
    device_id,
    link_device,
)

logger = logging.getLogger(__name__)

LATEST, ENDED = "latest", "ended"

_AFTERWARDS = "Training can continue; engines with incomplete weights wait for a complete set"

_GRACE = 5.0
"""Seconds in which receivers report that their link broke. A receiver that does not is taken for dead."""

_BROADCAST_SHARE = 0.9
"""The share of the timeout for one broadcast. The rest is for finding out which receiver failed."""

_PAUSE = 0.005
"""Seconds between two polls."""


class MessageBoard:
    """Keys with JSON values that all ranks of all roles can read and write.

    The n-th board of one process is the same as the n-th board of another: all processes create them in the same order.
    """

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        number = store.add(f"lightstep/roles of rank {dist.get_rank()}", 1)
        self.store = dist.PrefixStore(f"lightstep/roles/{number}", store)

    def end(self) -> None:
        """Tell the receivers that no further weights will be sent."""
        with contextlib.suppress(RuntimeError):
            self.write(ENDED, True)

    def write(self, key: str, value: Any) -> None:
        """Set the key's value."""
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The key's value; ``None`` if it is not set."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait(self, key: str, deadline: float) -> Any:
        """Wait until the key is set, and return its value; ``None`` after ``deadline`` (in ``time.monotonic()``)."""
        return poll(lambda: self.read(key), deadline)


def poll(read: Callable[[], Any], deadline: float) -> Any:
    """Call ``read`` until it returns something else than ``None``, and return that; ``None`` after ``deadline``.

    The store's own ``wait`` is not used: while it waits, it blocks Ctrl-C and the store's connection, which other
    threads need (NCCL's for example), and it logs every timeout.
    """
    while (found := read()) is None and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return found


class _End:
    """One end of the link, which is kept from set to set.

    Args:
        board: shared by the trainer and the receivers.
        timeout: seconds to wait for the other end.
    """

    def __init__(self, board: MessageBoard, timeout: float) -> None:
        self._board, self._timeout = board, timeout
        self._link: WeightLink | None = None

    def _connect(self, number: int, rank: int, size: int, device: torch.device) -> WeightLink:
        """Open the link of this number, whose members meet at the board's store."""
        store = dist.PrefixStore(f"stores/{number}", self._board.store)
        self._link = WeightLink(number, store, rank, size, device, _BROADCAST_SHARE * self._timeout)
        return self._link

    def close(self) -> None:
        """Close the link."""
        if self._link is not None:
            self._link.close()
            self._link = None


class GroupTransport(_End, WeightTransport):
    """The trainer's end.

    Args:
        board: shared with the receivers.
        device: the buckets' device.
        timeout: seconds to wait for receivers.
    """

    def __init__(self, board: MessageBoard, device: torch.device, timeout: float) -> None:
        super().__init__(board, timeout)
        self.receivers: tuple[int, ...] = ()
        self._next_receivers: tuple[int, ...] = ()
        self._device, self._set = device, 0

    def change_receivers(self, receivers: Sequence[int]) -> None:
        """Send to these ranks of the default process group from the next set on."""
        self._next_receivers = tuple(receivers)

    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        self._delete_old_messages()
        if self.receivers != self._next_receivers:
            self.close()
            self.receivers = self._next_receivers
        self._set = int(self._board.store.add("numbers", 1))
        offer = {
            "version": version,
            "receivers": list(self.receivers),
            "buckets": [[info.as_json() for info in infos] for infos in buckets],
        }
        self._board.write(f"{self._set}/offer", offer)
        self._board.write(LATEST, self._set)
        self._open_link(self._replies())

    def _replies(self) -> list[dict[str, Any]]:
        """All receivers' replies.

        Raises:
            WeightTransferError: a receiver did not answer, or cannot load the weights.
        """
        replies = self._answers("reply", time.monotonic() + self._timeout)
        silent = [rank for rank, reply in replies.items() if reply is None]
        if silent:
            raise WeightTransferError(
                f"rollout {_list_ranks(silent)} did not answer within {self._timeout:g} s: dead, or busy for longer "
                "than roles.rollout.timeout_s; nothing was sent, and every engine still has its previous weights",
                silent,
            )
        refusing = {rank: reply["error"] for rank, reply in replies.items() if "error" in reply}
        if refusing:
            texts = "; ".join(f"rollout rank {rank} cannot load these weights: {e}" for rank, e in refusing.items())
            raise WeightTransferError(f"{texts}. Nothing was sent", refusing)
        return list(replies.values())

    def _answers(self, what: str, deadline: float) -> dict[int, Any]:
        """Each receiver's message of this kind; ``None`` for those that have not sent one by ``deadline``."""
        return {rank: self._board.wait(f"{self._set}/{what}/{rank}", deadline) for rank in self.receivers}

    def _open_link(self, replies: Sequence[dict[str, Any]]) -> None:
        """Open a new link, unless all members still have the last one."""
        if self._link is not None and any(reply["link"] != self._link.number for reply in replies):
            self.close()
        kind = link_device([device_id(self._device), *(reply["device"] for reply in replies)])
        self.takes_device = kind != "cpu"
        number = self._set if self._link is None else self._link.number
        self._board.write(f"{self._set}/verdict", {"link": number, "device": kind})
        if self._link is None:
            device = torch.device("cpu") if kind == "cpu" else self._device
            with self._diagnosing():
                self._connect(number, 0, 1 + len(self.receivers), device)

    def send(self, bucket: Bucket) -> None:
        assert self._link is not None
        with self._diagnosing():
            self._link.send(bucket.buffer)

    @contextlib.contextmanager
    def _diagnosing(self) -> Iterator[None]:
        """If the link breaks in the block, raise an error that names the receivers that failed."""
        latest = time.monotonic() + self._timeout
        try:
            yield
        except RuntimeError as error:
            self.close()
            self._refuse_failures(min(latest, time.monotonic() + _GRACE), is_broken=True)
            raise WeightTransferError(f"the link broke: {error}. {_AFTERWARDS}") from error

    def _refuse_failures(self, deadline: float, is_broken: bool) -> None:
        """Raise an error that names the receivers that have failed, or have not reported by ``deadline``.

        Args:
            is_broken: the link broke. Receivers that only report that have not failed.
        """
        reports = self._answers("done", deadline)
        errors = {rank: report for rank, report in reports.items() if report and "error" in report}
        failed = {rank: report["error"] for rank, report in errors.items() if report["own"] or not is_broken}
        silent = [rank for rank, report in reports.items() if report is None]
        texts = [f"rollout rank {rank} failed: {text}" for rank, text in failed.items()]
        if silent:
            texts.append(f"rollout {_list_ranks(silent)} died or hangs")
        if texts:
            raise WeightTransferError(f"{'; '.join(texts)}. {_AFTERWARDS}", [*failed, *silent])

    def finish(self) -> None:
        self._refuse_failures(time.monotonic() + self._timeout, is_broken=False)

    def abort(self, reason: str) -> None:
        self.close()
        with contextlib.suppress(RuntimeError):
            self._board.write(f"{self._set}/verdict", {"abort": reason})

    def _delete_old_messages(self) -> None:
        """Delete the messages of the set before the last one: receivers may still read those of the last one."""
        old = self._set - 1
        if old > 0:
            answers = [f"{what}/{rank}" for rank in self.receivers for what in ("reply", "done")]
            for key in ("offer", "verdict", *answers):
                self._board.store.delete_key(f"{old}/{key}")


class GroupReceiver(_End):
    """A rollout worker's end.

    Args:
        board: shared with the trainer.
        rank: this process's rank in the default process group.
        timeout: seconds to wait for the trainer.
    """

    def __init__(self, board: MessageBoard, rank: int, timeout: float) -> None:
        super().__init__(board, timeout)
        self._rank, self._seen = rank, 0

    def receive(self, engine: RolloutEngine, wait: bool, timeout: float | None) -> int | None:
        """See ``Strategy.receive_weights``."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            return self._receive(engine, wait, deadline)
        except dist.DistNetworkError as error:  # the process that hosts the store has ended
            raise TrainingEnded(f"the trainers cannot be reached any more: {error}") from error

    def _receive(self, engine: RolloutEngine, wait: bool, deadline: float) -> int | None:
        while True:
            offer = poll(self._next_offer, deadline) if wait else self._next_offer()
            if offer is None and wait:
                raise WeightTransferError(
                    "no weights were published in time; the engine still has its previous weights. Wait for longer "
                    "(receive_weights(timeout=...), roles.rollout.timeout_s), or check the trainers"
                )
            if offer is not None and self._accept(offer, engine):
                return engine.version
            if not wait:
                return None

    def _next_offer(self) -> dict[str, Any] | None:
        """A new offer for this rank that the trainer has not yet decided on; ``None`` without one."""
        number = self._board.read(LATEST) or 0
        if number > self._seen:
            self._seen = number
            offer = self._board.read(f"{number}/offer")
            if offer and self._rank in offer["receivers"] and self._board.read(f"{number}/verdict") is None:
                return dict(offer)
        if self._board.read(ENDED):
            raise TrainingEnded("the trainers have ended: no further weights will be published")
        return None

    def _accept(self, offer: dict[str, Any], engine: RolloutEngine) -> bool:
        """Reply to an offer, and load the set. ``False`` if the trainer decides not to send it."""
        buckets = [[WeightInfo.from_json(values) for values in infos] for infos in offer["buckets"]]
        try:
            engine.begin_set(offer["version"], [info for infos in buckets for info in infos])
        except Exception as error:
            self._answer("reply", {"error": str(error)})
            raise WeightTransferError(
                f"version {offer['version']} was refused: {error}; nothing was written"
            ) from error
        link = None if self._link is None else self._link.number
        self._answer("reply", {"link": link, "device": device_id(engine.device)})
        verdict = self._board.wait(f"{self._seen}/verdict", time.monotonic() + self._timeout)
        if verdict is None or "abort" in verdict:
            reason = "the trainer did not answer" if verdict is None else verdict["abort"]
            logger.warning(
                "version %s was not sent (%s); the engine keeps %s", offer["version"], reason, engine.version
            )
            return False
        self._load(offer, verdict, buckets, engine)
        return True

    def _load(
        self, offer: dict[str, Any], verdict: dict[str, Any], buckets: list[list[WeightInfo]], engine: RolloutEngine
    ) -> None:
        own = False  # whether an error is this process's own, and not the link's
        try:
            link = self._open_link(offer, verdict, engine.device)
            size = max(map(Bucket.nbytes_of, buckets), default=0)
            buffer = torch.empty(size, dtype=torch.uint8, device=link.device)
            for infos in buckets:
                bucket = Bucket(infos, buffer)
                link.broadcast(bucket.buffer)
                own = True
                engine.load_bucket(bucket)
                own = False
            own = True
            engine.end_set()
        except BaseException as error:
            self._answer("done", {"error": f"{type(error).__name__}: {error}", "own": own})
            self.close()
            if own or not isinstance(error, RuntimeError):
                raise
            raise WeightTransferError(
                f"version {offer['version']} was not completed: {self._reason(error)}. "
                + (
                    "The engine still has its previous weights"
                    if engine.complete
                    else "The engine generates again once it has a complete set"
                )
            ) from error
        self._answer("done", {})

    def _open_link(self, offer: dict[str, Any], verdict: dict[str, Any], device: torch.device) -> WeightLink:
        """The link that the verdict names: the last one, or a new one."""
        number = verdict["link"]
        if self._link is not None and self._link.number == number:
            return self._link
        self.close()
        rank, size = 1 + offer["receivers"].index(self._rank), 1 + len(offer["receivers"])
        return self._connect(number, rank, size, torch.device("cpu") if verdict["device"] == "cpu" else device)

    def _reason(self, error: RuntimeError) -> str:
        """The trainer's reason for the abort if it gives one, else this process's error."""
        verdict = self._board.wait(f"{self._seen}/verdict", time.monotonic() + 0.5) or {}
        return str(verdict.get("abort", error))

    def _answer(self, what: str, value: dict[str, Any]) -> None:
        self._board.write(f"{self._seen}/{what}/{self._rank}", value)


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
