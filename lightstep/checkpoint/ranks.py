"""Running a step on several ranks so that all of them succeed or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightstep.distributed import role_group

Result = TypeVar("Result")


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
        """All ranks' values, in rank order, on every rank: one collective."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

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
                raise RemoteRankError(f"rank {rank}: {failure[1]}", kind=failure[0])
        return self.gather(result)[0] if only_first else result


class RemoteRankError(Exception):
    """Another rank failed; ``kind`` is the name of its error's class."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _describe(error: BaseException) -> tuple[str, str]:
    """The name of the error's class, and a message for the other ranks."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, OSError) and error.strerror:
        return kind, error.strerror
    return kind, text if isinstance(error, RuntimeError | TypeError) and text else f"{kind}: {text}"
