"""Namespaces of the kernel for children of tests, without root: a user namespace in which the child may do the rest.

Everything here runs in a child between fork and exec, but for ``forbidden`` and ``need``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.conftest import PR_SET_PDEATHSIG

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWNET = 0x4000_0000

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends. After a change of namespaces, which may undo it."""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")


def unshare_user(flags: int) -> None:
    """New namespaces for this process: a user namespace whose root it is, and those of ``flags``."""
    uid, gid = os.geteuid(), os.getegid()
    _checked(_libc.unshare(CLONE_NEWUSER | flags), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def unshare(flags: int) -> None:
    """New namespaces in the user namespace of this process, whose root it must be."""
    _checked(_libc.unshare(flags), "unshare")


def enter(pid: int, user: int, others: tuple[str, ...]) -> None:
    """This process joins the namespaces of another; it stays in its folder.

    Args:
        pid: of that process.
        user: an open descriptor of its user namespace, or -1 where that is this process's own.
        others: names of the further ones, as ``net``.
    """
    folder = os.getcwd()
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in others]
    for fd in ([user] if user >= 0 else []) + files:
        _checked(_libc.setns(fd, 0), "setns")
    os.chdir(folder)  # a mount namespace begins at its root


def mount_tmpfs(folder: str, num_bytes: int) -> None:
    """An empty file system in memory over ``folder``, in a mount namespace of this process's own."""
    options = f"size={num_bytes},mode=700".encode()
    _checked(_libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options), "mount")


def mount_sysfs() -> None:
    """``/sys`` shows the network of this process, in a mount namespace of its own: UCX looks there for its devices."""
    _checked(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount of /sys")


@cache
def forbidden(flags: int, work: Callable[[], None] = lambda: None) -> str | None:
    """Why a child may not have such namespaces; None where it may."""

    read_end, write_end = os.pipe()

    def begin() -> None:
        try:
            unshare_user(flags)
            work()
        except OSError as error:
            os.write(write_end, str(error).encode())
            raise

    with os.fdopen(read_end) as said:
        try:
            subprocess.run([sys.executable, "-I", "-c", ""], preexec_fn=begin, check=True, timeout=60)
        except subprocess.SubprocessError as error:
            os.close(write_end)
            return said.read() or str(error)
        os.close(write_end)
    return None


def need(flags: int, work: Callable[[], None] = lambda: None) -> None:
    """Leaves the test out where the machine forbids such namespaces (``tests.conftest.FORBIDDEN``)."""
    if reason := forbidden(flags, work):
        pytest.skip(f"needs a machine that allows namespaces without root: {reason}")
