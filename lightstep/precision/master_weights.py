"""Masters follow the model: who else wrote to a parameter since the last step?"""

from __future__ import annotations

from torch import Tensor

Fingerprint = tuple[int, int]


class ModelWatch:
    """Notices parameters that were written to by somebody else.

    Every in-place operation raises a tensor's version counter and an exchanged storage has another address, so that
    looking is free. Writes through ``p.data`` raise no version: on the CPU, where comparing costs little beside the
    step, every parameter is a suspect; on an accelerator call ``optimizer.refresh_master_weights()`` after such writes.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, Fingerprint] = {}

    def record(self, parameter: Tensor, local: Tensor) -> None:
        """The parameter is now as the optimizer left it."""
        self._seen[parameter] = _fingerprint(local)

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter was recorded, and not forgotten since."""
        return parameter in self._seen

    def suspicious(self, parameter: Tensor, local: Tensor) -> bool:
        """Whether the parameter may have been written to since :meth:`record`."""
        return local.device.type == "cpu" or self._seen.get(parameter) != _fingerprint(local)

    def moved(self, parameter: Tensor, local: Tensor) -> bool:
        """Whether the parameter's storage is another one than at :meth:`record`."""
        seen = self._seen.get(parameter)
        return seen is None or seen[1] != local.data_ptr()

    def forget(self, parameter: Tensor) -> None:
        self._seen.pop(parameter, None)


def _fingerprint(local: Tensor) -> Fingerprint:
    return local._version, local.data_ptr()
