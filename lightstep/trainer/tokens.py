"""Tokenizes text into one row of tokens, cut into windows of equal length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightstep.config import ConfigError
from lightstep.trainer.config import Data
from lightstep.trainer.documents import split_documents

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
