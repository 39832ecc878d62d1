"""CRC-32 of everything that a save writes.

The manifest has the checksums of all small files. One of them is the index, which has the checksums of all tensors. The
manifest ends with its own checksum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightstep.checkpoint.errors import DamagedError, error_text
from lightstep.crc32 import crc32

_BLOCK = 8 * 2**20

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


def size_and_checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    return file.stat().st_size, crc32_of(_blocks(file))


def check_file(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Compare a file in ``folder`` with its checksum in the manifest.

    Raises:
        DamagedError: they differ, or the file cannot be read.
    """
    expected = manifest["checksums"][name]
    try:
        found = crc32_of(_blocks(folder / name))
    except OSError as error:
        raise DamagedError(f"{folder / name} cannot be read: {error_text(error)}") from error
    if found != expected:
        raise DamagedError(f"{folder / name} is damaged: its checksum is {found:08x}, not {expected:08x}")


def check_files(folder: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Compare these files with the manifest's checksums, if it has them.

    Raises:
        DamagedError: a file is damaged; it names the first one.
    """
    for name in names:
        if name in manifest.get("checksums", {}):
            check_file(folder, manifest, name)


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block
