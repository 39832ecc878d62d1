"""Reads documents: one per file of a folder, one per line of a JSONL file, or one text file."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightstep.config import ConfigError, what_it_holds
from lightstep.trainer.config import STDLIB, Data

STDLIB_SUFFIXES = (".py", ".pyi", ".rst", ".md", ".txt")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_SNIFFED_BYTES = 8192
"""A file with a zero byte among its first bytes is not text (git and grep use the same rule)."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""An unpaired surrogate, which JSON can express and UTF-8 cannot."""


def split_documents(data: Data) -> tuple[list[bytes], list[bytes]]:
    """All documents for training and for validation, in a fixed order.

    The side of a document depends on its bytes alone: adding or removing others does not move it, and copies are on the
    same side. A single document is cut in two.

    Raises:
        ConfigError: there is no text, or it cannot be read.
    """
    documents = [document for document in _read(data) if document.strip()]
    if not documents:
        raise ConfigError(f"data.path {data.path} holds no text")
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - data.validation))
        return [documents[0][:cut]], [documents[0][cut:]]
    places = [_hash_fraction(document) for document in documents]
    known = sorted(set(places))
    if len(known) == 1:
        raise ConfigError(f"data.path {data.path} holds only copies of one text; validation needs a different one")
    edge = min(max(data.validation, known[0]), known[-2])  # both sides get something
    training = [document for document, place in zip(documents, places, strict=True) if place > edge]
    validation = [document for document, place in zip(documents, places, strict=True) if place <= edge]
    return training, validation


def _read(data: Data) -> Iterator[bytes]:
    if data.path == STDLIB:
        return _folder(Path(sysconfig.get_path("stdlib")), data.suffixes or STDLIB_SUFFIXES)
    path = Path(data.path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.path {data.path} does not exist; a folder, a text file, a JSONL file or stdlib is needed"
        )
    _refuse_unused(data, path)
    if path.is_dir():
        return _folder(path, data.suffixes)
    return _file(path, data)


def _refuse_unused(data: Data, path: Path) -> None:
    """Raise :class:`ConfigError` if settings are for another kind of path: a folder's files are read as they are."""
    if data.text_key != Data.model_fields["text_key"].default and (path.is_dir() or path.suffix not in _JSONL_SUFFIXES):
        raise ConfigError(
            f"data.text_key is {data.text_key!r}, the key of the text in one JSONL file, and data.path {data.path} is "
            f"{'a folder' if path.is_dir() else 'not one'}; give the path of a file {' or '.join(_JSONL_SUFFIXES)}, or "
            "leave text_key out"
        )
    if data.suffixes is not None and not path.is_dir():
        raise ConfigError(f"data.suffixes selects files of a folder, and data.path {data.path} is a file; leave it out")


def _file(path: Path, data: Data) -> Iterator[bytes]:
    if path.suffix in _JSONL_SUFFIXES:
        yield from _json_lines(path, data.text_key)
        return
    content = _content(path)
    if content is None:
        raise ConfigError(f"data.path {path} is not text")
    yield content


def _folder(root: Path, suffixes: Sequence[str] | None) -> Iterator[bytes]:
    """The text files under ``root`` by relative path; hidden ones and installed packages are left out."""
    for path in sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts):
            continue
        if (suffixes is None or path.name.endswith(tuple(suffixes))) and path.is_file():
            content = _content(path)
            if content is not None:
                yield content


def _content(path: Path) -> bytes | None:
    """A text file's bytes; ``None`` for any other file."""
    try:
        with path.open("rb") as stream:
            start = stream.read(_SNIFFED_BYTES)
            return None if b"\0" in start else start + stream.read()
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from error


def _json_lines(path: Path, key: str) -> Iterator[bytes]:
    """The texts. U+FFFD replaces invalid characters; a leading byte order mark is dropped."""
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"data.path {path}, line {number}: not JSON ({error.msg})") from None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(record) if isinstance(record, dict) else what_it_holds(record)
                raise ConfigError(
                    f"data.path {path}, line {number}: no text under {key!r} (data.text_key); it has {keys or 'none'}"
                )
            yield _HALF_CHARACTER.sub("\ufffd", text).encode()


def _hash_fraction(document: bytes) -> float:
    """A hash of the document as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big") / 2**64
