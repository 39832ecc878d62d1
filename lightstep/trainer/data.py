"""The text: reads documents, tokenizes them, cuts windows of equal length, and selects those of each step."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightstep.config import ConfigError, what_it_holds
from lightstep.trainer.config import STDLIB, Batch, Data

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
    documents = [document for document in _documents(data) if document.strip()]
    if not documents:
        raise ConfigError(f"data.path {data.path} holds no text")
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - data.validation))
        return [documents[0][:cut]], [documents[0][cut:]]
    places = [int.from_bytes(hashlib.sha256(document).digest()[:8], "big") / 2**64 for document in documents]
    known = sorted(set(places))
    if len(known) == 1:
        raise ConfigError(f"data.path {data.path} holds only copies of one text; validation needs a different one")
    edge = min(max(data.validation, known[0]), known[-2])  # both sides get something
    training = [document for document, place in zip(documents, places, strict=True) if place > edge]
    validation = [document for document, place in zip(documents, places, strict=True) if place <= edge]
    return training, validation


def _documents(data: Data) -> Iterator[bytes]:
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
    if path.suffix in _JSONL_SUFFIXES:
        return _json_lines(path, data.text_key)
    content = _content(path)
    if content is None:
        raise ConfigError(f"data.path {path} is not text")
    return iter([content])


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


_TEXTS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Windows:
    """Consecutive windows of the training or validation text, without overlap.

    Attributes:
        tokens: ``[count, length]``, in the smallest dtype that holds the vocabulary.
        bytes_per_token: divides a loss in nats per token to give nats per byte.
    """

    tokens: np.ndarray
    bytes_per_token: float

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: Any) -> Tensor:
        """``[len(indices), length]`` int64."""
        return torch.from_numpy(self.tokens[np.asarray(indices)].astype(np.int64))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation text, and a fingerprint by which a resumed run recognizes its text."""

    training: Windows
    validation: Windows
    fingerprint: str


def load_corpus(data: Data, tokenizer: Any, length: int) -> Corpus:
    """Read, split and tokenize the text.

    Raises:
        ConfigError: there is no text, or less than one window for training or validation.
    """
    sides = [_windows(documents, tokenizer, length) for documents in split_documents(data)]
    for name, windows in zip(("training", "validation"), sides, strict=True):
        if not len(windows):
            raise ConfigError(
                f"data.path {data.path} holds less than one window of {length} tokens (batch.length) for {name}; "
                "give more text or a smaller batch.length"
            )
    digest = hashlib.sha256()
    for windows in sides:
        digest.update(windows.tokens.data)
    return Corpus(sides[0], sides[1], digest.hexdigest()[:16])


def _windows(documents: Sequence[bytes], tokenizer: Any, length: int) -> Windows:
    row = np.concatenate(_encode(documents, tokenizer))
    count = len(row) // length
    n_bytes = sum(len(document) + 1 for document in documents)  # the end of a document counts as one byte
    return Windows(row[: count * length].reshape(count, length), n_bytes / len(row))


def _encode(documents: Sequence[bytes], tokenizer: Any) -> list[np.ndarray]:
    """The tokens of each document, followed by the end token."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.int32)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise ConfigError(f"model.path: its tokenizer ({type(tokenizer).__name__}) has no token that ends a text (eos)")
    if type(tokenizer).__name__ == "ByT5Tokenizer":  # same result as its own encode, but much faster
        return [_ended(np.frombuffer(text, np.uint8).astype(dtype) + tokenizer.offset, end) for text in documents]
    encoded: list[np.ndarray] = []
    for start in range(0, len(documents), _TEXTS_AT_ONCE):
        texts = [text.decode(errors="replace") for text in documents[start : start + _TEXTS_AT_ONCE]]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        encoded += [_ended(np.asarray(row, dtype), end) for row in ids]
    return encoded


def _ended(tokens: np.ndarray, end: int) -> np.ndarray:
    return np.append(tokens, tokens.dtype.type(end))


def check_batch(batch: Batch, world_size: int) -> None:
    """Check that a step divides evenly over micro-batches and ranks.

    Raises:
        ConfigError: the sequences of a step are not divisible by micro-batches × ranks.
    """
    parts = batch.accumulation * world_size
    if batch.sequences % parts:
        raise ConfigError(
            f"batch.sequences is {batch.sequences}; it has to be a multiple of {parts} "
            f"(batch.accumulation {batch.accumulation} × {world_size} {'rank' if world_size == 1 else 'ranks'})"
        )


class Batches:
    """Uses every window once per epoch, in a new order in each epoch.

    A step has the same sequences for any number of ranks; each rank takes its rows of every micro-batch.
    """

    def __init__(self, windows: Windows, batch: Batch, seed: int, rank: int, world_size: int) -> None:
        self._windows = windows
        self._batch = batch
        self._rank, self._world_size = rank, world_size
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(windows)))

    def indices(self, step: int) -> np.ndarray:
        """The windows of step ``step`` (from 0), over all ranks: ``[sequences]``."""
        positions = step * self._batch.sequences + np.arange(self._batch.sequences)
        epochs, places = np.divmod(positions, len(self._windows))
        return np.array([self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def step(self, step: int) -> Tensor:
        """This rank's part of step ``step``: int64 ``[accumulation, rows per micro-batch, length]``."""
        cut = self.indices(step).reshape(self._batch.accumulation, self._world_size, -1)
        mine = cut[:, self._rank]
        return self._windows.rows(mine.reshape(-1)).view(*mine.shape, -1)


def validation_rows(windows: Windows, sequences: int, rank: int, world_size: int) -> Tensor:
    """This rank's share of about ``sequences`` windows, spread evenly over the text. All ranks get the same number."""
    count = max(min(sequences, len(windows)) // world_size, 1)
    spread = np.linspace(0, len(windows) - 1, count * world_size).round().astype(np.int64)
    return windows.rows(spread[rank::world_size])
