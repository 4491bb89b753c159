"""The arena: sealed, named by its life, mapped by others, populated in pieces.

In scope: what ``storage.arena`` promises, also across processes. Out of scope: who may have the descriptor (the cache
server), and what lies where (``cache``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from antiphon.core.errors import CacheError, CapacityExceeded, StaleHandle
from antiphon.core.units import MIB
from antiphon.storage import arena
from antiphon.storage.arena import HEADER_BYTES, ArenaMapping, ArenaOwner, copy_bytes


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    made = ArenaOwner.create(3 * MIB + 1, "a-node", "0123456789ab")
    yield made
    if not made.mapping.is_closed:
        made.close()


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_data_are_whole_pages_after_the_header(owner: ArenaOwner) -> None:
    assert owner.data_bytes == 3 * MIB + 4096
    assert os.fstat(owner.fd).st_size == owner.data_bytes + HEADER_BYTES
    assert owner.mapping.address % 4096 == 0
    assert os.readlink(f"/proc/self/fd/{owner.fd}").startswith("/memfd:antiphon:a-node:0123456789ab")
    assert not os.get_inheritable(owner.fd)


@pytest.mark.parametrize("change_bytes", [-4096, 4096])
def test_nobody_can_change_its_size(owner: ArenaOwner, change_bytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(owner.fd, owner.data_bytes + HEADER_BYTES + change_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(
            owner.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_FUTURE_WRITE if hasattr(fcntl, "F_SEAL_FUTURE_WRITE") else 8
        )


READER = """
import sys
from antiphon.storage.arena import ArenaMapping
mapping = ArenaMapping.open(int(sys.argv[1]), "a-node", "0123456789ab")
with mapping.view(8192, 5) as view:
    print(bytes(view).decode())
    view[:] = b"reply"
mapping.close()
"""


def test_a_second_process_maps_it(owner: ArenaOwner, die_with_parent: Callable[[], None]) -> None:
    with owner.mapping.view(8192, 5) as view:
        view[:] = b"hello"
    argv = [sys.executable, "-c", READER, str(owner.fd)]
    ran = subprocess.run(
        argv, pass_fds=[owner.fd], capture_output=True, text=True, timeout=30, check=True, preexec_fn=die_with_parent
    )
    assert ran.stdout == "hello\n"
    with owner.mapping.view(8192, 5) as view:
        assert bytes(view) == b"reply"


@pytest.mark.parametrize("names", [("another", "0123456789ab"), ("a-node", "ba9876543210")])
def test_another_life_is_refused(owner: ArenaOwner, names: tuple[str, str]) -> None:
    with pytest.raises(StaleHandle, match="a-node"):
        ArenaMapping.open(owner.fd, *names)


def test_what_is_no_arena_is_refused() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    os.ftruncate(unsealed, 8192)
    os.ftruncate(sealed, 8192)
    for fd in (sealed, empty):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    try:
        for fd, reason in ((unsealed, "not sealed"), (sealed, "header"), (empty, "no header"), (reading, "no arena")):
            with pytest.raises(CacheError, match=reason):
                ArenaMapping.open(fd, "a-node", "0123456789ab")
    finally:
        for fd in (unsealed, sealed, empty, reading, writing):
            os.close(fd)


def test_another_version_or_size_is_refused(owner: ArenaOwner) -> None:
    (total_bytes,) = {os.fstat(owner.fd).st_size}
    for offset, value, reason in ((8, 2, "version 2"), (12, total_bytes + 4096, "another size")):
        before = os.pread(owner.fd, 8, offset)
        os.pwrite(owner.fd, value.to_bytes(4, "little"), offset)
        with pytest.raises(CacheError, match=reason):
            ArenaMapping.open(owner.fd, "a-node", "0123456789ab")
        os.pwrite(owner.fd, before, offset)
    ArenaMapping.open(owner.fd, "a-node", "0123456789ab").close()


def test_names_must_fit_the_header() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        ArenaOwner.create(4096, "n" * 65, "0123456789ab")
    with pytest.raises(ValueError, match="at least one byte"):
        ArenaOwner.create(0, "a-node", "0123456789ab")


def test_memory_is_taken_by_the_piece(owner: ArenaOwner) -> None:
    assert resident_bytes(owner.fd) == 4096, "only the header"
    owner.populate(0, MIB)
    assert resident_bytes(owner.fd) == MIB + 4096
    owner.populate(MIB, 2 * MIB + 4096)
    assert resident_bytes(owner.fd) == owner.data_bytes + HEADER_BYTES


def test_populating_keeps_what_is_there(owner: ArenaOwner) -> None:
    with owner.mapping.view(0, 4096) as view:
        view[:] = b"x" * 4096
        owner.populate(0, MIB)
        assert bytes(view) == b"x" * 4096


@pytest.mark.parametrize("error_number", [errno.ENOMEM, errno.EFAULT])
def test_a_shortage_is_a_typed_error(owner: ArenaOwner, monkeypatch: pytest.MonkeyPatch, error_number: int) -> None:
    monkeypatch.setattr(arena, "_madvise", lambda *_: error_number)
    with pytest.raises(CapacityExceeded, match=f"no memory for {MIB} bytes.*{os.strerror(error_number)}"):
        owner.populate(0, MIB)


def test_a_kernel_without_populate_write_allocates_the_file(owner: ArenaOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_madvise", lambda *_: errno.EINVAL)
    owner.populate(MIB, MIB)
    assert resident_bytes(owner.fd) == MIB + 4096
    monkeypatch.setattr(arena, "_allocate", lambda *_: errno.ENOSPC)
    with pytest.raises(CapacityExceeded, match=os.strerror(errno.ENOSPC)):
        owner.populate(0, MIB)


def test_a_view_keeps_the_mapping(owner: ArenaOwner) -> None:
    view = owner.mapping.view(0, 100)
    part = view[10:20]
    view.release()
    with pytest.raises(BufferError, match="1 views"):
        owner.mapping.close()
    part[:] = b"0123456789"
    part.release()
    owner.close()
    with pytest.raises(AssertionError, match="closed twice"):
        owner.mapping.close()
    with pytest.raises(AssertionError, match="is closed"):
        owner.mapping.view(0, 1)


@pytest.mark.parametrize(("offset_bytes", "num_bytes"), [(-1, 1), (0, 3 * MIB + 4097), (3 * MIB + 4096, 1)])
def test_a_view_lies_inside_the_data(owner: ArenaOwner, offset_bytes: int, num_bytes: int) -> None:
    with pytest.raises(AssertionError):
        owner.mapping.view(offset_bytes, num_bytes)


def test_a_mapping_outlives_the_descriptor_and_the_owner(owner: ArenaOwner) -> None:
    with owner.mapping.view(0, 3) as view:
        view[:] = b"abc"
    fd = os.dup(owner.fd)
    mapping = ArenaMapping.open(fd, "a-node", "0123456789ab")
    os.close(fd)
    owner.close()
    with mapping.view(0, 3) as view:
        assert bytes(view) == b"abc"
    mapping.close()


def test_copy_moves_bytes_while_other_threads_run(owner: ArenaOwner) -> None:
    size = 2 * MIB
    source = ctypes.create_string_buffer(os.urandom(size), size)
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(20):
            copy_bytes(owner.mapping.address + 4096, ctypes.addressof(source), size)
    finally:
        stop.set()
        thread.join()
    assert ticks > 0
    with owner.mapping.view(4096, size) as view:
        assert bytes(view) == source.raw


def test_a_size_that_the_kernel_refuses_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityExceeded, match=r"no shared memory of \d+ bytes|cannot be mapped"):
        ArenaOwner.create(1 << 62, "a-node", "0123456789ab")
    assert set(os.listdir("/proc/self/fd")) <= before
