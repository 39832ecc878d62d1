"""What goes wrong with a checkpoint, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightstep.checkpoint.ranks import ElsewhereError


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or cannot be loaded; the message names the path and the cause."""


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever goes wrong becomes one :class:`CheckpointError` with the path; a type error stays one, with the path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except ElsewhereError as error:
        kind = TypeError if error.kind == "TypeError" else CheckpointError
        raise kind(f"{what}: {error}") from error
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {error_text(error)}") from error


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
