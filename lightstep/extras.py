"""Optional libraries, and the extras of the distribution that install them."""

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
    """A library is not installed; the message names the extra that installs it."""


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Context for imports that may need a library of ``extra``.

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
