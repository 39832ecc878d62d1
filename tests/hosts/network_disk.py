"""A disk that hosts share, with the semantics of NFS: ``python -m tests.hosts.network_disk FOLDER MOUNT SECONDS NAME``.

The files are in ``FOLDER``. Each host mounts them with a process of its own, through FUSE, and its kernel caches names
that are there, names that are not, sizes and listings for ``SECONDS``, whatever other hosts do meanwhile. As on NFS:

- Opening a file asks for its size (close-to-open). Changes by the same host are seen at once.
- Handles follow renames. A file that another host has removed gives ``ESTALE``.
- A file that is open on the same host is renamed to ``.nfs...`` when it is removed, and goes when it is closed.
- A rename whose answer is lost is sent again, and the second answer is ``ENOENT``: so is that of the next rename to a
  name that ends in the text of ``FOLDER.lost-NAME``, which is done nevertheless.

Locks are each host's own, as with ``local_lock=all``. Writes reach the server at once, which real clients may delay
until a file is closed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, OPEN, READ, WRITE = (
    1,
    2,
    3,
    4,
    9,
    10,
    11,
    12,
    14,
    15,
    16,
)
STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = 17, 18, 20, 25, 26, 27, 28, 29, 30
CREATE, INTERRUPT, BATCH_FORGET, RENAME2 = 35, 36, 42, 45
UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT}
AUTO_INVAL_DATA, BIG_WRITES = 1 << 12, 1 << 5
KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3
HEADER = struct.Struct("=IIQQIIII")
SIZE_IS_SET, MODE_IS_SET = 1 << 3, 1 << 0


class NetworkDisk:
    """The client of one host. Nodes are opened files of ``folder``, so that they follow renames."""

    def __init__(self, folder: str, mount: str, seconds: int, name: str) -> None:
        self._seconds, self._lost = seconds, Path(f"{folder}.lost-{name}")
        self._device = os.open("/dev/fuse", os.O_RDWR)
        self._nodes: dict[int, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._handles: dict[int, int] = {}
        self._listings: dict[int, list[tuple[int, int, bytes]]] = {}
        self._silly: dict[int, tuple[int, bytes]] = {}
        self._node(os.open(folder, os.O_PATH))
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if ctypes.CDLL(None, use_errno=True).mount(b"network", mount.encode(), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mount)

    def serve(self) -> None:
        answers: dict[int, Callable[[int, bytes], bytes]] = {
            LOOKUP: self._lookup,
            GETATTR: lambda node, body: self._attributes(node),
            SETATTR: self._set_attributes,
            MKDIR: self._make_folder,
            UNLINK: self._unlink,
            RMDIR: lambda node, body: self._done(os.rmdir(_name(body), dir_fd=self._nodes[node])),
            RENAME: lambda node, body: self._rename(node, body, 8),
            RENAME2: lambda node, body: self._rename(node, body, 16),
            OPEN: self._open,
            CREATE: self._create,
            READ: self._read,
            WRITE: self._write,
            STATFS: lambda node, body: struct.pack(
                "=5Q4I24x", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 20, 4096, 255, 4096, 0
            ),
            RELEASE: self._release,
            FSYNC: lambda node, body: b"",
            FSYNCDIR: lambda node, body: b"",
            FLUSH: lambda node, body: b"",
            INIT: self._begin,
            OPENDIR: self._open_folder,
            READDIR: self._read_folder,
            RELEASEDIR: lambda node, body: self._done(self._listings.pop(struct.unpack_from("=Q", body)[0])),
        }
        while True:
            try:
                request = os.read(self._device, 1 << 21)
            except OSError:  # unmounted
                return
            _, code, unique, node, *_ = HEADER.unpack_from(request)
            if code in UNANSWERED:
                continue
            error, content = 0, b""
            try:
                if code not in answers:
                    raise OSError(errno.ENOSYS, "")
                content = answers[code](node, request[HEADER.size :])
            except OSError as failed:
                error = -(failed.errno or errno.EIO)
            with suppress(FileNotFoundError):  # the caller was killed
                os.write(self._device, struct.pack("=IiQ", 16 + len(content), error, unique) + content)

    def _done(self, result: object) -> bytes:
        return b""

    def _begin(self, node: int, body: bytes) -> bytes:
        return struct.pack("=4IHHIIHHI28x", 7, 31, 1 << 17, AUTO_INVAL_DATA | BIG_WRITES, 12, 9, 1 << 17, 1, 0, 0, 0)

    # -- names

    def _node(self, file: int) -> int:
        """The number of an open file, which is closed if it is known."""
        found = os.fstat(file)
        key = found.st_dev, found.st_ino
        if key in self._numbers:
            os.close(file)
            return self._numbers[key]
        number = self._numbers[key] = len(self._numbers) + 1
        self._nodes[number] = file
        return number

    def _entry(self, node: int, name: bytes) -> bytes:
        number = self._node(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[node]))
        return struct.pack("=4QII", number, 0, self._seconds, self._seconds, 0, 0) + self._packed(number)

    def _packed(self, node: int) -> bytes:
        s = os.fstat(self._nodes[node])
        times = [divmod(ns, 10**9) for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        values = s.st_ino, s.st_size, s.st_blocks, *(t for t, _ in times), *(ns for _, ns in times)
        return struct.pack("=6Q10I", *values, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0)

    def _attributes(self, node: int) -> bytes:
        if os.fstat(self._nodes[node]).st_nlink == 0:
            raise OSError(errno.ESTALE, "")
        return struct.pack("=QII", self._seconds, 0, 0) + self._packed(node)

    def _lookup(self, node: int, body: bytes) -> bytes:
        try:
            return self._entry(node, _name(body))
        except FileNotFoundError:
            if os.fstat(self._nodes[node]).st_nlink == 0:
                raise OSError(errno.ESTALE, "") from None
            return struct.pack("=4QII88x", 0, 0, self._seconds, 0, 0, 0)  # it is not there, which is cached too

    def _make_folder(self, node: int, body: bytes) -> bytes:
        os.mkdir(_name(body[8:]), 0o755, dir_fd=self._nodes[node])
        return self._entry(node, _name(body[8:]))

    def _unlink(self, node: int, body: bytes) -> bytes:
        name, folder = _name(body), self._nodes[node]
        number = self._node(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder))
        if number in self._silly:
            raise OSError(errno.EBUSY, "")
        if number not in self._handles.values():
            os.unlink(name, dir_fd=folder)
            return b""
        silly = b".nfs%024x" % number
        os.rename(name, silly, src_dir_fd=folder, dst_dir_fd=folder)
        self._silly[number] = node, silly
        return b""

    def _rename(self, node: int, body: bytes, start: int) -> bytes:
        target = self._nodes[struct.unpack_from("=Q", body)[0]]
        old, new = body[start:].split(b"\0")[:2]
        os.rename(old, new, src_dir_fd=self._nodes[node], dst_dir_fd=target)
        if self._lost.exists() and new.decode().endswith(self._lost.read_text()):
            self._lost.unlink()
            raise FileNotFoundError(errno.ENOENT, "")
        return b""

    # -- content

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        path = f"/proc/self/fd/{self._nodes[node]}"
        if valid & SIZE_IS_SET:
            os.truncate(path, size)
        if valid & MODE_IS_SET:
            os.chmod(path, stat.S_IMODE(struct.unpack_from("=I", body, 68)[0]))
        return self._attributes(node)

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("=I", body)
        self._attributes(node)
        self._forget_attributes(node)
        return self._handle(node, flags)

    def _forget_attributes(self, node: int) -> None:
        """The kernel asks for them when it needs them again."""
        content = struct.pack("=QqQ", node, -1, 0)
        with suppress(FileNotFoundError):  # it has forgotten the node itself
            os.write(self._device, struct.pack("=IiQ", 16 + len(content), 2, 0) + content)

    def _handle(self, node: int, flags: int) -> bytes:
        access = flags & (os.O_ACCMODE | os.O_TRUNC)
        handle = os.open(f"/proc/self/fd/{self._nodes[node]}", access)
        self._handles[handle] = node
        return struct.pack("=QII", handle, 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("=II", body)
        name = _name(body[16:])
        exclusive = flags & os.O_EXCL
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | exclusive, stat.S_IMODE(mode), dir_fd=self._nodes[node]))
        entry = self._entry(node, name)
        return entry + self._handle(struct.unpack_from("=Q", entry)[0], flags)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", body)
        if node not in self._silly:
            self._attributes(node)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", body)
        return struct.pack("=II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _release(self, node: int, body: bytes) -> bytes:
        (handle,) = struct.unpack_from("=Q", body)
        os.close(handle)
        del self._handles[handle]
        if node in self._silly and node not in self._handles.values():
            folder, name = self._silly.pop(node)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._nodes[folder])
                self._forget_attributes(folder)
        return b""

    def _open_folder(self, node: int, body: bytes) -> bytes:
        path = f"/proc/self/fd/{self._nodes[node]}"
        with os.scandir(path) as entries:
            listed = [(e.inode(), 4 if e.is_dir(follow_symlinks=False) else 8, os.fsencode(e.name)) for e in entries]
        handle = 1 + max(self._listings, default=0)
        self._listings[handle] = listed
        return struct.pack("=QII", handle, KEEP_CACHE | CACHE_DIR, 0)

    def _read_folder(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", body)
        found = b""
        for number, (inode, kind, name) in enumerate(self._listings[handle][offset:], offset + 1):
            entry = struct.pack("=QQII", inode, number, len(name), kind) + name
            entry += b"\0" * (-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _name(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


if __name__ == "__main__":
    NetworkDisk(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]).serve()
