"""CRC-32 of everything that a save writes.

A checkpoint's manifest has the checksums of all small files, among them that of the index, which has those of all
tensors. The manifest ends with its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from lightstep.crc32 import crc32

__all__ = ["crc32_of", "seal", "unseal"]

_SEAL = b'"crc32": "%08x"\n}'


def crc32_of(blocks: Iterable[bytes]) -> int:
    """Of a file that is read block by block."""
    checksum = 0
    for block in blocks:
        checksum = crc32(block, checksum)
    return checksum


def seal(content: dict[str, Any]) -> bytes:
    """JSON whose last key is the checksum of all that stands before it."""
    text = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n "
    return text + _SEAL % crc32(text)


def unseal(text: bytes) -> tuple[dict[str, Any], bool]:
    """What was sealed, and whether it is unharmed; of text that was never sealed that is not known, and it passes.

    Raises:
        ValueError, TypeError: it is no JSON, or no mapping.
    """
    content: dict[str, Any] = dict(json.loads(text))
    sealed = "crc32" in content or "checksums" in content  # one flipped bit does not hide both
    body = text[: -len(_SEAL % 0)]
    return content, not sealed or text == body + _SEAL % crc32(body)
