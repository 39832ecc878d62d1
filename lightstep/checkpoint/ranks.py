"""Doing one thing on several ranks so that either all of them succeed or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightstep.distributed import role_group

Result = TypeVar("Result")


class Ranks:
    """The ranks that take part: those of a process group, or just this process.

    Args:
        group: ``None`` for the ranks of this process's role: without roles the default process group, when one is
            initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group = role_group() if group is None else group
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.rank = dist.get_rank(group) if self.several else 0
        self.size = dist.get_world_size(group) if self.several else 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank, on every rank: one collective."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, step: Callable[[], Result], only_first: bool = False) -> Result:
        """Run ``step`` on every rank (or on the first, whose result all get); a failure anywhere raises everywhere.

        A rank that fails raises its own error, the others :class:`ElsewhereError` with the first failed rank's text.
        """
        error: BaseException | None = None
        result: Any = None
        if not only_first or self.is_first:
            try:
                result = step()
            except BaseException as caught:
                error = caught
        texts = self.gather(None if error is None else _describe(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise ElsewhereError(f"rank {rank}: {text[1]}", kind=text[0])
        return self.gather(result)[0] if only_first else result


class ElsewhereError(Exception):
    """Another rank failed; ``kind`` is the name of its error's class."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def _describe(error: BaseException) -> tuple[str, str]:
    kind, text = type(error).__name__, str(error)
    if isinstance(error, OSError) and error.strerror:
        return kind, error.strerror
    return kind, text if isinstance(error, RuntimeError | TypeError) and text else f"{kind}: {text}"
