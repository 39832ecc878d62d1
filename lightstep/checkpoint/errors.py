"""What goes wrong with a checkpoint, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightstep.checkpoint.ranks import ElsewhereError


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or cannot be loaded; the message names the path and the cause."""


class DamagedError(CheckpointError):
    """Files are missing, cut or changed since they were written: another checkpoint may be whole."""


_KINDS = {kind.__name__: kind for kind in (TypeError, DamagedError)}


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever goes wrong becomes one :class:`CheckpointError` with the path; a type error stays one, with the path."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{what}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except ElsewhereError as error:
        raise _KINDS.get(error.kind, CheckpointError)(f"{what}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {error_text(error)}") from error


def is_damage(error: BaseException) -> bool:
    """Whether this rank, or the one that failed elsewhere, has found damage."""
    return isinstance(error, DamagedError) or (
        isinstance(error, ElsewhereError) and error.kind == DamagedError.__name__
    )


def error_text(error: BaseException) -> str:
    """The cause in a few words: the operating system's own when there is one anywhere in the chain."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and everything that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
