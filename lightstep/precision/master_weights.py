"""Masters follow the model: who else wrote to a parameter since the last step?"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

Fingerprint = tuple[int, int]


class ModelWatch:
    """Notices parameters that were written to by somebody else.

    Every in-place operation raises a tensor's version counter and an exchanged storage has another address, so that
    looking is free. Writes through ``p.data`` raise no version: on the CPU, where comparing costs little beside the
    step, every parameter is a suspect; on an accelerator call ``optimizer.refresh_master_weights()`` after such writes.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, Fingerprint] = {}

    def record(self, key: Hashable, local: Tensor) -> None:
        """The parameter is now as the optimizer left it."""
        self._seen[key] = local._version, local.data_ptr()

    def untouched(self, key: Hashable, local: Tensor) -> bool:
        """Whether nothing says that somebody else has written to the parameter since :meth:`record`."""
        return self._seen.get(key) == (local._version, local.data_ptr())

    def moved(self, key: Hashable, local: Tensor) -> bool:
        """Whether the parameter's storage is another one than at :meth:`record`."""
        seen = self._seen.get(key)
        return seen is None or seen[1] != local.data_ptr()

    def forget(self, key: Hashable) -> None:
        """It has to be looked at in any case."""
        self._seen.pop(key, None)
