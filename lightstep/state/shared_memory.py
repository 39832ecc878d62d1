"""Memory that several processes of one host map. No file system has it: it is freed with the last of them."""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from dataclasses import dataclass

__all__ = ["Address", "SharedMemory"]


@dataclass(frozen=True)
class Address:
    """Where other processes of the host find it.

    Attributes:
        path: of the descriptor of the process that made it. On another host it may lead to something else.
        name: no other memory has it.
        nbytes: whole pages.
    """

    path: str
    name: str
    nbytes: int


class SharedMemory:
    """A descriptor, which is closed with this object. Mappings stay.

    Attributes:
        is_new: this process made it.
    """

    def __init__(self, descriptor: int, address: Address, is_new: bool) -> None:
        self.descriptor, self.address, self.is_new = descriptor, address, is_new
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory | None:
        """New zeroed memory; ``None`` where the system has none of this kind."""
        nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        name = f"lightstep-{uuid.uuid4().hex}"
        try:
            descriptor = os.memfd_create(name)
        except (OSError, AttributeError):
            return None
        found = cls(descriptor, Address(f"/proc/{os.getpid()}/fd/{descriptor}", name, nbytes), is_new=True)
        try:
            os.ftruncate(descriptor, nbytes)
        except OSError:
            return None
        return found

    @classmethod
    def find(cls, address: Address) -> SharedMemory | None:
        """The same memory, made by any process of this host; ``None`` if it is not here, or may not be opened."""
        try:
            if not _is_at(address.path, address):
                return None
            found = cls(os.open(address.path, os.O_RDWR | os.O_CLOEXEC), address, is_new=False)
            return found if _is_at(f"/proc/self/fd/{found.descriptor}", address) else None
        except OSError:
            return None


def _is_at(path: str, address: Address) -> bool:
    return os.readlink(path).split(" ")[0] == f"/memfd:{address.name}"
