"""What is published, and the interface of what carries it to where it is generated with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightstep.sharding.model_names import NamedTensor


class WeightTransferError(RuntimeError):
    """Weights did not get where they are generated with.

    Attributes:
        ranks: the rollout workers that failed or did not answer, by their numbers in the default process group.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TrainingEnded(Exception):
    """The trainers have closed their strategy: no weights will come any more."""


@dataclass(frozen=True)
class WeightInfo:
    """One tensor of a set.

    Attributes:
        names: under which the trained model knows it; several when weights are tied.
        shape: of the whole tensor.
        dtype: in which it travels.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, named: NamedTensor, dtype: torch.dtype | None = None) -> WeightInfo:
        """A model's tensor, in another dtype if given."""
        return cls(named.names, tuple(named.tensor.shape), dtype or named.tensor.dtype)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def as_json(self) -> list[Any]:
        """Plain values."""
        return [list(self.names), list(self.shape), str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> WeightInfo:
        """From :meth:`as_json`."""
        names, shape, dtype = values
        return cls(tuple(names), tuple(shape), getattr(torch, dtype))

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Bucket:
    """Tensors that travel together, one behind the other in one buffer.

    Iterating gives each one's :class:`WeightInfo` and the tensor, a view of :attr:`buffer`.

    Args:
        infos: what is in it.
        buffer: uint8, at least :meth:`nbytes_of` the infos; what is behind that is left alone.

    Attributes:
        buffer: all of it, to be sent as it is: 1-D uint8.
    """

    def __init__(self, infos: Sequence[WeightInfo], buffer: Tensor) -> None:
        self.infos = infos
        self.buffer = buffer[: self.nbytes_of(infos)]

    @staticmethod
    def nbytes_of(infos: Iterable[WeightInfo]) -> int:
        """Of a buffer for these tensors."""
        return sum(-(-info.nbytes // _ALIGNMENT) * _ALIGNMENT for info in infos)

    def __iter__(self) -> Iterator[tuple[WeightInfo, Tensor]]:
        start = 0
        for info in self.infos:
            yield info, self.buffer[start : start + info.nbytes].view(info.dtype).view(info.shape)
            start += -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT = 16  # bytes


class WeightTransport(ABC):
    """Carries sets of weights, one at a time, from the first trainer to engines that lightstep does not run.

    For each set ``begin``, then ``send`` for every bucket in order, then ``finish``; where one of them or anything else
    fails ``abort``, and nothing more of that set. Whatever they raise becomes an error on all trainers. It is the
    transport that has to give up in time when its receivers are gone.
    """

    @abstractmethod
    def begin(self, version: int, buckets: Sequence[Sequence[WeightInfo]]) -> None:
        """A set is about to come: make sure that the receivers are there and can take it. Nothing is written yet."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """The next tensors: whole, on the trainer's device, valid until this returns."""

    @abstractmethod
    def finish(self) -> None:
        """That was all: returns when every receiver has the complete set."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """The set ends here, incomplete. After ``begin``, whether or not that raised. Should not raise."""


def buckets_of(infos: Sequence[WeightInfo], layers: Sequence[str], limit: float) -> list[list[WeightInfo]]:
    """Consecutive tensors of one layer, at most ``limit`` bytes of them; a larger tensor travels alone."""
    found: list[list[WeightInfo]] = []
    filled, current = 0, None
    for info, layer in zip(infos, layers, strict=True):
        if layer != current or filled + info.nbytes > limit:
            found.append([])
            filled, current = 0, layer
        found[-1].append(info)
        filled += info.nbytes
    return found


def refuse_mismatch(offered: Sequence[WeightInfo], expected: Sequence[WeightInfo]) -> None:
    """Compare a set with what an engine expects, before anything is written.

    Raises:
        ValueError: with the first tensors that are missing, unknown, or of another shape or dtype.
    """
    targets = {name: info for info in expected for name in info.names}
    filled: dict[WeightInfo, str] = {}
    found: list[str] = []
    for info in offered:
        wanted = dict.fromkeys(targets[name] for name in info.names if name in targets)
        if not wanted:
            found.append(f"{info} is published and unknown to the engine")
        for target in wanted:
            if (target.shape, target.dtype) != (info.shape, info.dtype):
                found.append(f"{info} is published, and the engine has {target}")
            elif filled.setdefault(target, info.name) != info.name:
                found.append(f"{filled[target]} and {info.name} are published, and are one tensor in the engine")
    known = {name for info in offered for name in info.names}
    found += [f"the engine has {info}, which is not published" for info in expected if known.isdisjoint(info.names)]
    if found:
        raise ValueError(f"{'; '.join(found[:3])}{f'; {len(found) - 3} more' if len(found) > 3 else ''}")
