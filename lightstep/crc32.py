"""CRC-32 by isal if it is installed, or else by zlib.

Both give the same result and release the GIL.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["crc32"]


def crc32(data: Any, checksum: int = 0) -> int:
    """The CRC-32 of ``data``, continued from ``checksum``."""
    return _fastest()(data, checksum)


@functools.cache
def _fastest() -> Callable[[Any, int], int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32
