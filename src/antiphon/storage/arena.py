"""The arena: one stretch of shared memory that the cache server owns and engines map.

It is a sealed memfd: it has no name in any file system, nobody can change its size, and it is gone when the last
process that maps it is. The server creates it (``ArenaOwner``), passes its descriptor, and both sides map it
(``ArenaMapping``). The first page is a header that names instance and incarnation; the data follow.

Always true:

- A mapping is made only of a descriptor that is sealed, of the right size, and of the life that the caller expects.
- Offsets count from the first data byte; a view lies inside the data.
- Memory that cannot be had is a typed error of ``populate``, not a SIGBUS of a later write. Whoever writes to a part
  that is not populated forgoes that.

It does not know what the bytes are or whose they are (``antiphon.cache``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import weakref
from collections.abc import Callable
from typing import Final

from antiphon.core.errors import CacheError, CapacityExceeded, StaleHandle
from antiphon.core.units import align_up

__all__ = ["HEADER_BYTES", "ArenaMapping", "ArenaOwner", "copy_bytes"]

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = PAGE_BYTES
"""The header takes a whole page, so that the data begin on one."""
VERSION: Final = 1

_MAGIC = b"ANTIPHON"
_HEADER = struct.Struct("<8sIQ64s32s")  # magic, version, bytes of the whole mapping, instance, incarnation
_INSTANCE_BYTES_MAX = 64
_INCARNATION_BYTES_MAX = 32
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED = 0x1
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23  # Linux 5.14

# ctypes releases the interpreter lock for the time of a foreign call.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """``madvise``; returns 0 or the error number."""
    return 0 if _libc.madvise(address, num_bytes, advice) == 0 else ctypes.get_errno()


def copy_bytes(destination_address: int, source_address: int, num_bytes: int) -> None:
    """Copies between two addresses of this process, without holding the interpreter lock.

    The stretches must not overlap, and stay mapped until it returns: nothing here can check that.
    """
    ctypes.memmove(destination_address, source_address, num_bytes)


class ArenaMapping:
    """A mapping of an arena in this process. Made by ``open``.

    Args:
        base_address: of the header.
        total_bytes: header included.
        instance: name of the server.
        incarnation: of this start of the server.
    """

    def __init__(self, base_address: int, total_bytes: int, instance: str, incarnation: str) -> None:
        self._base_address = base_address
        self._total_bytes = total_bytes
        self._views: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        self.instance = instance
        self.incarnation = incarnation
        self.is_closed = False
        self.unmap_with: Callable[[Callable[[], None]], None] = lambda unmap: unmap()
        """Calls what unmaps. Who has told a driver of the memory puts itself here: it takes that back first."""

    @classmethod
    def open(cls, fd: int, expected_instance: str, expected_incarnation: str) -> ArenaMapping:
        """Maps the arena of ``fd`` for reading and writing; ``fd`` stays the caller's, to close at any time.

        Raises:
            CacheError: it is no arena: not sealed, another size than its header says, another version.
            StaleHandle: it is the arena of another instance, or of another life of this one.
            CapacityExceeded: this process may not map that much.
        """
        total_bytes = _check_sealed(fd)
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) != _HEADER.size:
            raise CacheError("the descriptor is no arena: it has no header")
        magic, version, size_bytes, instance, incarnation = _HEADER.unpack(header)
        if magic != _MAGIC or size_bytes != total_bytes:
            raise CacheError("the descriptor is no arena: its header does not say so, or another size")
        if version != VERSION:
            raise CacheError(
                f"the arena has version {version}, this process reads {VERSION}",
                remedy="run the same version of Antiphon in the engine and the cache server",
            )
        found = (instance.rstrip(b"\0").decode(), incarnation.rstrip(b"\0").decode())
        if found != (expected_instance, expected_incarnation):
            raise StaleHandle(
                f"the arena belongs to {found[0]} ({found[1]}), not to {expected_instance} ({expected_incarnation})",
                remedy="connect again",
            )
        address = _mmap(None, total_bytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise CapacityExceeded(
                f"the arena of {total_bytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}",
                remedy="raise the address space limit (ulimit -v) of this process",
            )
        # A child must not keep the memory of a dead server alive, and a core dump need not hold the cache. Both are
        # advice: a kernel that refuses it maps as well.
        _madvise(address, total_bytes, _MADV_DONTFORK)
        _madvise(address, total_bytes, _MADV_DONTDUMP)
        return cls(address, total_bytes, *found)

    @property
    def data_bytes(self) -> int:
        """Bytes of data, a multiple of the page size."""
        return self._total_bytes - HEADER_BYTES

    @property
    def address(self) -> int:
        """Address of the first data byte in this process."""
        assert not self.is_closed, "the mapping is closed"
        return self._base_address + HEADER_BYTES

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """The data from ``offset_bytes`` on, writable, as bytes. The mapping cannot be closed while it exists."""
        assert offset_bytes >= 0, offset_bytes
        assert 0 <= num_bytes <= self.data_bytes - offset_bytes, (offset_bytes, num_bytes, self.data_bytes)
        array = (ctypes.c_ubyte * num_bytes).from_address(self.address + offset_bytes)
        name, views = id(array), self._views
        views[name] = weakref.ref(array, lambda _: views.pop(name))
        return memoryview(array).cast("B")

    def is_populated(self, offset_bytes: int) -> bool:
        """Whether the page at an offset has memory. False where the kernel does not tell, and once it is closed."""
        assert 0 <= offset_bytes < self.data_bytes, (offset_bytes, self.data_bytes)
        page = self._base_address + HEADER_BYTES + offset_bytes // PAGE_BYTES * PAGE_BYTES
        found = ctypes.create_string_buffer(1)
        return not self.is_closed and _libc.mincore(page, PAGE_BYTES, found) == 0 and bool(found.raw[0] & 1)

    def close(self) -> None:
        """Unmaps, as ``unmap_with`` says.

        Raises:
            BufferError: a view of it still exists; nothing was unmapped.
        """
        assert not self.is_closed, "the mapping is closed twice"
        if self._views:
            raise BufferError(f"{len(self._views)} views of the arena are in use: release them before closing it")
        self.is_closed = True
        base_address, total_bytes = self._base_address, self._total_bytes
        self.unmap_with(lambda: _munmap(base_address, total_bytes))


class ArenaOwner:
    """The arena as its creator holds it: the descriptor and a mapping. Made by ``create``.

    Args:
        fd: the sealed memfd.
        mapping: of it, in this process.
    """

    def __init__(self, fd: int, mapping: ArenaMapping) -> None:
        self.fd = fd
        self.mapping = mapping

    @classmethod
    def create(cls, size_bytes: int, instance: str, incarnation: str) -> ArenaOwner:
        """A new arena with at least ``size_bytes`` of data, rounded up to whole pages. No memory is taken yet.

        Raises:
            CapacityExceeded: the kernel refuses a file or a mapping of that size.
            ValueError: a name is longer than the header has room for.
        """
        if size_bytes < 1:
            raise ValueError(f"an arena has at least one byte, not {size_bytes}")
        total_bytes = HEADER_BYTES + align_up(size_bytes, PAGE_BYTES)
        header = _header(total_bytes, instance, incarnation)
        fd = os.memfd_create(f"antiphon:{instance}:{incarnation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                os.ftruncate(fd, total_bytes)
                os.pwrite(fd, header, 0)
            except OSError as error:
                raise CapacityExceeded(
                    f"no shared memory of {total_bytes} bytes: {error.strerror}", remedy="make the arena smaller"
                ) from error
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            owner = cls(fd, ArenaMapping.open(fd, instance, incarnation))
            undo.pop_all()
        return owner

    @property
    def data_bytes(self) -> int:
        """Bytes of data, a multiple of the page size."""
        return self.mapping.data_bytes

    def populate(self, offset_bytes: int, num_bytes: int) -> None:
        """Takes the memory of a piece of the data, whole pages; blocks, without holding the interpreter lock.

        Raises:
            CapacityExceeded: there is no memory for it; a part of the piece may have been taken.
        """
        assert offset_bytes % PAGE_BYTES == 0, offset_bytes
        assert num_bytes % PAGE_BYTES == 0, num_bytes
        assert 0 <= offset_bytes <= offset_bytes + num_bytes <= self.data_bytes, (offset_bytes, num_bytes)
        error_number = _madvise(self.mapping.address + offset_bytes, num_bytes, _MADV_POPULATE_WRITE)
        if error_number == errno.EINVAL:  # a kernel without it: the file can be asked to take its memory
            error_number = _allocate(self.fd, HEADER_BYTES + offset_bytes, num_bytes)
        if error_number:
            raise CapacityExceeded(
                f"no memory for {num_bytes} bytes of the arena at {offset_bytes}: {os.strerror(error_number)}",
                remedy="make the arena smaller, or give the machine or its control group more memory",
            )

    def close(self) -> None:
        """Unmaps, and closes the descriptor. The memory is free once no other process maps it."""
        self.mapping.close()
        os.close(self.fd)


def _header(total_bytes: int, instance: str, incarnation: str) -> bytes:
    name, life = instance.encode(), incarnation.encode()
    if len(name) > _INSTANCE_BYTES_MAX or len(life) > _INCARNATION_BYTES_MAX:
        raise ValueError(
            f"an instance has at most {_INSTANCE_BYTES_MAX} bytes and an incarnation {_INCARNATION_BYTES_MAX}: "
            f"{instance!r}, {incarnation!r}"
        )
    return _HEADER.pack(_MAGIC, VERSION, total_bytes, name, life)


def _check_sealed(fd: int) -> int:
    """Bytes of the file, which nobody can change any more."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise CacheError(f"the descriptor is no arena: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise CacheError("the arena is not sealed, so that its size could change under a copy")
    return os.fstat(fd).st_size


def _allocate(fd: int, offset_bytes: int, num_bytes: int) -> int:
    """``posix_fallocate``; returns 0 or the error number."""
    try:
        os.posix_fallocate(fd, offset_bytes, num_bytes)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
