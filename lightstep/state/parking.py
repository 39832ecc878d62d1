"""Tensors whose memory goes to the host for a while and comes back, as the same tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightstep.state.host_memory import HostSlab, require

__all__ = ["Parked"]


class Parked:
    """The storages of these tensors in page-locked host memory, their device memory given back; the host waits.

    Until :meth:`restore` the tensors have no memory and must not be used.

    Args:
        tensors: on an accelerator; others stay as they are. Views of one storage go together.

    Raises:
        HostMemoryError: there is no room for them; nothing was changed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type != "cpu"}
        self._parked = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        require(self.nbytes(), "releasing device memory: the optimizer state on the host")
        self._slabs: list[HostSlab] = []
        for storage, nbytes in self._parked:
            slab = HostSlab(nbytes, device=storage.device, what="released optimizer state")
            slab.tensor(torch.uint8, nbytes).copy_(_bytes_of(storage), non_blocking=True)
            self._slabs.append(slab)
        for device in {storage.device for storage, _ in self._parked}:
            torch.accelerator.synchronize(device)
        for storage, _ in self._parked:
            storage.resize_(0)

    def nbytes(self) -> int:
        """Host memory held."""
        return sum(nbytes for _, nbytes in self._parked)

    def restore(self) -> None:
        """Back on the device; the host waits, and its memory is given back.

        Raises:
            torch.OutOfMemoryError: the device has no room now; what was parked still is, and this may be called again.
        """
        try:
            for storage, nbytes in self._parked:
                storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            for storage, _ in self._parked:
                storage.resize_(0)
            raise
        for (storage, nbytes), slab in zip(self._parked, self._slabs, strict=True):
            _bytes_of(storage).copy_(slab.tensor(torch.uint8, nbytes), non_blocking=True)
        for device in {storage.device for storage, _ in self._parked}:
            torch.accelerator.synchronize(device)
        for slab in self._slabs:
            slab.close()
        self._parked, self._slabs = [], []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
