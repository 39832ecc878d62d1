"""The errors that saving and loading raise: one sentence with the path and the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightstep.distributed import LostRankError, RemoteRankError

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or cannot be loaded; the message names the path and the cause."""


class NotFoundError(CheckpointError):
    """Nothing is at the path that was given, or it is no checkpoint."""


class DamagedError(CheckpointError):
    """Files are missing, truncated or changed since they were written. An older checkpoint may be undamaged."""


class UnreadableError(CheckpointError):
    """What is at the path is not known: a network or a disk failed, or a newer lightstep has written it.

    It is neither skipped for an older checkpoint nor removed.
    """


_KINDS = {kind.__name__: kind for kind in (TypeError, DamagedError, UnreadableError)}
"""Classes of another rank's error that are kept; every other one becomes a plain :class:`CheckpointError`."""


def unless_damaged(read: Callable[[], Result]) -> Result | None:
    """What ``read`` returns; ``None`` if it finds no checkpoint, or a damaged one.

    Raises:
        UnreadableError: which of these it is, is not known.
    """
    try:
        return read()
    except UnreadableError:
        raise
    except CheckpointError:
        return None


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Turn any error in the block into a :class:`CheckpointError` that begins with ``what``.

    A ``TypeError`` stays a ``TypeError``.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{what}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except LostRankError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except RemoteRankError as error:
        raise _KINDS.get(error.kind, CheckpointError)(f"{what}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {error_text(error)}") from error


def is_damage(error: BaseException) -> bool:
    """Whether the error, raised on this rank or on another one, says that a checkpoint is damaged."""
    return isinstance(error, DamagedError) or (
        isinstance(error, RemoteRankError) and error.kind == DamagedError.__name__
    )


def error_text(error: BaseException) -> str:
    """The cause in a few words: the operating system's message if an ``OSError`` is anywhere in the chain."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its causes, the nearest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def list_names(names: Iterable[str], limit: int = 5) -> str:
    """The first ``limit`` names, and how many more there are."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
