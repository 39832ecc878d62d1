"""Running a step on several ranks so that all of them succeed or all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightstep.distributed.groups import role_group, supports
from lightstep.distributed.lost_ranks import LostRankError, describe_lost_ranks, is_failed_collective

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
        group = dist.group.WORLD if self.is_distributed and self.group is None else self.group
        if group is None or not self.is_distributed or not supports(group, _CPU):
            return self.gather(value)
        values = [torch.empty(1, dtype=torch.int64, device=_CPU) for _ in range(self.size)]
        with _lost_ranks_named():
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
                kind, text, has_left = failure
                raise RemoteRankError(f"rank {rank}: {text}", kind, has_left)
        return self.gather(result)[0] if only_first else result

    def agree(self, step: Callable[[], int]) -> list[int]:
        """:meth:`together` for steps that return numbers of at least 0: all ranks' numbers, in one short message.

        It must not meet :meth:`leave`.
        """
        error: BaseException | None = None
        number = _FAILED
        try:
            number = step()
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
    except RuntimeError as error:
        lost = describe_lost_ranks() if is_failed_collective(error) else None
        if lost is None:
            raise
        raise LostRankError(lost) from error


class RemoteRankError(Exception):
    """Another rank failed; ``kind`` is the name of its error's class, ``has_left`` that of :meth:`Ranks.leave`."""

    def __init__(self, message: str, kind: str, has_left: bool = False) -> None:
        super().__init__(message)
        self.kind, self.has_left = kind, has_left


def _describe(error: BaseException, has_left: bool = False) -> tuple[str, str, bool]:
    """The name of the error's class, a message for the other ranks, and ``has_left``."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, OSError) and error.strerror:
        return kind, error.strerror, has_left
    return kind, text if isinstance(error, RuntimeError | TypeError) and text else f"{kind}: {text}", has_left


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__
