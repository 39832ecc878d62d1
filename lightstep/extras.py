"""Libraries that only parts of lightstep need, and the extra of the distribution that installs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LIBRARIES = {
    "train": ("accelerate", "matplotlib", "rich", "tensorboard", "transformers", "typer"),
    "bench": ("matplotlib", "rich", "transformers", "typer"),
    "deepspeed": ("deepspeed",),
    "urls": ("fsspec",),
    "checksums": ("isal",),
}


class MissingLibraryError(ModuleNotFoundError):
    """A library that is not installed; the message says which extra installs it."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """What is imported in here may need a library of ``extra``.

    Raises:
        MissingLibraryError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in LIBRARIES[extra]:
            raise
        raise MissingLibraryError(
            f"{library} is not installed; install it with: pip install 'lightstep-optim[{extra}]'", name=library
        ) from error
