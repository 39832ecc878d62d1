"""Paths as people write them: ``~`` is the home folder, and a URL is not a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/")
"""A scheme of two letters or more: ``C:/`` is a drive. A ``Path`` has merged the two slashes."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path was meant as a URL: ``s3://bucket/run``, or that in a ``Path``, which is ``s3:/bucket/run``."""
    return _URL.match(str(path)) is not None


def local_path(path: str | os.PathLike[str], needed: str) -> Path:
    """The path with ``~`` expanded.

    Args:
        needed: what is possible instead of a URL, for the error: ``"a local folder is needed"``.

    Raises:
        ValueError: it is a URL.
    """
    if is_url(path):
        raise ValueError(f"{path} is a URL, and {needed}")
    return Path(path).expanduser()
