"""CRC-32 of everything that a save writes.

The manifest has the checksums of all small files. One of them is the index, which has the checksums of all tensors. The
manifest ends with its own checksum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from lightstep.crc32 import crc32

_SEAL = b'"crc32": "%08x"\n}'


def crc32_of(blocks: Iterable[bytes]) -> int:
    """The checksum of all blocks together."""
    checksum = 0
    for block in blocks:
        checksum = crc32(block, checksum)
    return checksum


def seal(content: dict[str, Any]) -> bytes:
    """``content`` as JSON, with the checksum of all text before it as the last key."""
    text = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n "
    return text + _SEAL % crc32(text)


def unseal(text: bytes) -> tuple[dict[str, Any], bool]:
    """The content of sealed text, and whether its checksum is right. Text that was never sealed passes.

    Raises:
        ValueError, TypeError: ``text`` is not JSON, or not a mapping.
    """
    content: dict[str, Any] = dict(json.loads(text))
    sealed = "crc32" in content or "checksums" in content  # a single flipped bit cannot remove both keys
    body = text[: -len(_SEAL % 0)]
    return content, not sealed or text == body + _SEAL % crc32(body)
