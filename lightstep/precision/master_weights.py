"""Detects parameters that somebody else wrote to since the last step; their masters must follow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from torch import Tensor

Fingerprint = tuple[int, int]
Key = TypeVar("Key", bound=Hashable)


class ModelWatch:
    """Detects writes to parameters by their version counters and addresses, at no cost.

    Every in-place operation increments a tensor's version counter, and another storage has another address. A write
    through ``p.data`` does not increment it. On the CPU all parameters are therefore compared with their masters, which
    costs little compared to the step. On an accelerator call ``optimizer.refresh_master_weights()`` after such writes.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, Fingerprint] = {}

    def record(self, parameters: Iterable[tuple[Hashable, int, int]]) -> None:
        """Remember the present version and address of each parameter."""
        for key, version, address in parameters:
            self._seen[key] = version, address

    def touched(self, parameters: Iterable[tuple[Key, Tensor, int]]) -> list[tuple[Key, Tensor]]:
        """Those that do not have the version and address of the last :meth:`record`.

        Args:
            parameters: keys, local tensors, and versions.
        """
        seen, listed = self._seen, list(parameters)
        addresses = map(Tensor.data_ptr, [local for _, local, _ in listed])
        return [
            (key, local)
            for (key, local, version), address in zip(listed, addresses, strict=True)
            if key not in seen or seen[key] != (version, address)
        ]

    def moved(self, key: Hashable, local: Tensor) -> bool:
        """Whether the parameter has another address than at the last :meth:`record`, or none, since it is empty."""
        seen = self._seen.get(key)
        return seen is None or seen[1] != local.data_ptr() or not local.numel()

    def forget(self, key: Hashable) -> None:
        """Forget the parameter: it counts as written to, whatever its version."""
        self._seen.pop(key, None)
