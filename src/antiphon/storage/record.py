"""The record: how a chunk looks in every tier. A head of one page, then the payload, and nothing after it.

    magic 8 · version 4 · head bytes 4 · key 32 · namespace 32 · payload bytes 8 · format version 4
    · fingerprint length 4 · fingerprint 512 · xxh3_128 of the payload 16 · zeros · xxh3_128 of the head before it 16

Always true:

- Every bit of a record is covered: a head with a changed bit has another checksum, a payload with one another digest, a
  record that is longer or shorter than its head says is none.
- A head names the key and the meaning of the payload, so that a record under a wrong name is found out.

The digests tell damage, not malice: who can write to a tier can write a record that passes.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

import xxhash

from antiphon.core.errors import TierCorrupt
from antiphon.core.namespace import NamespaceDigest
from antiphon.storage.arena import copy_bytes
from antiphon.storage.tier import FINGERPRINT_BYTES_MAX, KEY_BYTES, ChunkMeta

__all__ = [
    "HEAD_BYTES",
    "Head",
    "PayloadDigest",
    "RecordReader",
    "RecordWriter",
    "address_of",
    "check_head",
    "check_payload",
    "copy_into",
    "pack_head",
    "record_bytes",
    "unpack_head",
]

HEAD_BYTES: Final = 4096
"""A page, so that the payload of a file can be read and written without the page cache."""
VERSION: Final = 1
DIGEST_BYTES: Final = 16

_MAGIC: Final = b"ANTPTIER"
_HEAD = struct.Struct(f"<8sII32s32sQII{FINGERPRINT_BYTES_MAX}s{DIGEST_BYTES}s")
_NO_FINGERPRINT: Final = 0xFFFFFFFF
_CHECKED_BYTES: Final = HEAD_BYTES - DIGEST_BYTES
assert _HEAD.size <= _CHECKED_BYTES


class PayloadDigest:
    """xxh3_128 of a payload that comes in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.num_bytes = 0

    def update(self, piece: memoryview) -> None:
        self._state.update(piece)
        self.num_bytes += len(piece)

    def digest(self) -> bytes:
        """16 bytes."""
        return self._state.digest()


class Head:
    """What a sound head says.

    Args:
        key: 32 bytes.
        meta: of the payload.
        digest: xxh3_128 of the payload, 16 bytes.
    """

    __slots__ = ("digest", "key", "meta")

    def __init__(self, key: bytes, meta: ChunkMeta, digest: bytes) -> None:
        self.key = key
        self.meta = meta
        self.digest = digest

    @property
    def total_bytes(self) -> int:
        """Of the whole record."""
        return record_bytes(self.meta)


def record_bytes(meta: ChunkMeta) -> int:
    """Bytes of the record of a chunk."""
    return HEAD_BYTES + meta.num_bytes


def pack_head(key: bytes, meta: ChunkMeta, digest: bytes) -> bytes:
    """The head of a record, ``HEAD_BYTES`` long."""
    assert len(key) == KEY_BYTES, len(key)
    assert len(digest) == DIGEST_BYTES, len(digest)
    fingerprint = (meta.layout_fingerprint or "").encode()
    length = _NO_FINGERPRINT if meta.layout_fingerprint is None else len(fingerprint)
    head = _HEAD.pack(
        *(_MAGIC, VERSION, HEAD_BYTES, key, meta.namespace, meta.num_bytes, meta.format_version),
        *(length, fingerprint, digest),
    )
    head += bytes(_CHECKED_BYTES - len(head))
    return head + xxhash.xxh3_128_digest(head)


def unpack_head(head: bytes | memoryview) -> Head:
    """What ``head`` says.

    Raises:
        TierCorrupt: it is cut, damaged, or of another version.
    """
    if len(head) != HEAD_BYTES:
        raise TierCorrupt(f"a record's head has {HEAD_BYTES} bytes, this one {len(head)}")
    if xxhash.xxh3_128_digest(head[:_CHECKED_BYTES]) != bytes(head[_CHECKED_BYTES:]):
        raise TierCorrupt("the head of a record is damaged, or is none")
    values = _HEAD.unpack(bytes(head[: _HEAD.size]))
    magic, version, head_bytes, key, namespace, num_bytes, format_version, length, fingerprint, digest = values
    if (magic, version, head_bytes) != (_MAGIC, VERSION, HEAD_BYTES):
        raise TierCorrupt(f"a record has version {version}, this process reads {VERSION}")
    if (length != _NO_FINGERPRINT and length > FINGERPRINT_BYTES_MAX) or num_bytes < 1:
        raise TierCorrupt("the head of a record contradicts itself")
    name = None if length == _NO_FINGERPRINT else fingerprint[:length].decode(errors="replace")
    return Head(key, ChunkMeta(NamespaceDigest(namespace), name, num_bytes, format_version), digest)


def check_head(head: bytes | memoryview, key: bytes, meta: ChunkMeta) -> Head:
    """What ``head`` says, if it is about ``key`` and means ``meta``.

    Raises:
        TierCorrupt: it is damaged, or about something else.
    """
    found = unpack_head(head)
    if found.key != key:
        raise TierCorrupt(f"the record of chunk {key.hex()[:16]} is that of chunk {found.key.hex()[:16]}")
    if found.meta != meta:
        fields = [name for name in ChunkMeta.__slots__ if getattr(found.meta, name) != getattr(meta, name)]
        raise TierCorrupt(f"the record of chunk {key.hex()[:16]} differs in {', '.join(fields)}")
    return found


def check_payload(head: Head, digest: PayloadDigest) -> None:
    """That ``digest`` was taken of all bytes that ``head`` promises, and of no others.

    Raises:
        TierCorrupt: it was not.
    """
    if digest.num_bytes != head.meta.num_bytes:
        raise TierCorrupt(
            f"the record of chunk {head.key.hex()[:16]} has {digest.num_bytes} bytes, not {head.meta.num_bytes}"
        )
    if digest.digest() != head.digest:
        raise TierCorrupt(f"the payload of chunk {head.key.hex()[:16]} is damaged")


class RecordWriter:
    """The record of a chunk as a stream of pieces.

    Args:
        key: 32 bytes.
        payload: the chunk, ``meta.num_bytes`` long; it must not change until the last piece was taken.
        meta: of it.
    """

    def __init__(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        if len(payload) != meta.num_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes under a head that says {meta.num_bytes}")
        self._payload = payload
        self._key = key
        self._first = PayloadDigest()
        self._first.update(payload)
        self._second = PayloadDigest()
        self.head = pack_head(key, meta, self._first.digest())
        self.total_bytes = record_bytes(meta)
        self._offset_bytes = 0

    def fill(self, into: memoryview) -> int:
        """Copies the next bytes of the record into ``into``, at least a head long. Returns how many; 0 at the end."""
        filled = 0
        if self._offset_bytes == 0:
            assert len(into) >= HEAD_BYTES, len(into)
            into[:HEAD_BYTES] = self.head
            filled = HEAD_BYTES
        start = self._offset_bytes + filled - HEAD_BYTES
        num_bytes = min(len(into) - filled, len(self._payload) - start)
        if num_bytes:
            piece = into[filled : filled + num_bytes]
            copy_into(piece, self._payload[start : start + num_bytes])
            self._second.update(piece)
        self._offset_bytes += filled + num_bytes
        return filled + num_bytes

    def check_source(self) -> None:
        """That the payload still is what the head says, where it was written without ``fill``.

        Raises:
            TierCorrupt: it changed.
        """
        self._second = PayloadDigest()
        self._second.update(self._payload)
        self.check()

    def check(self) -> None:
        """That what was copied is what the head says; to be called before the record is published.

        Raises:
            TierCorrupt: the payload changed while it was copied.
        """
        if (self._second.num_bytes, self._second.digest()) != (self._first.num_bytes, self._first.digest()):
            raise TierCorrupt(f"chunk {self._key.hex()[:16]} changed while it was stored; it was not published")


class RecordReader:
    """Takes a record in pieces of any size, checks it, and leaves its payload in ``into``.

    Args:
        key: 32 bytes.
        meta: what it must mean.
        into: of ``meta.num_bytes`` bytes.
    """

    def __init__(self, key: bytes, meta: ChunkMeta, into: memoryview) -> None:
        if len(into) != meta.num_bytes:
            raise ValueError(f"a buffer of {len(into)} bytes for a chunk of {meta.num_bytes}")
        self._key = key
        self._meta = meta
        self._into = into
        self._begun = b""
        self._head: Head | None = None
        self._digest = PayloadDigest()

    def feed(self, piece: memoryview) -> None:
        """The next bytes of the record.

        Raises:
            TierCorrupt: the head is not what it must be, or there are more bytes than it says.
        """
        if self._head is None:
            missing = HEAD_BYTES - len(self._begun)
            self._begun += bytes(piece[:missing])
            piece = piece[missing:]
            if len(self._begun) < HEAD_BYTES:
                return
            self._head = check_head(self._begun, self._key, self._meta)
        start = self._digest.num_bytes
        if len(piece) > self._meta.num_bytes - start:
            raise TierCorrupt(f"the record of chunk {self._key.hex()[:16]} is longer than its head says")
        if len(piece):
            target = self._into[start : start + len(piece)]
            copy_into(target, piece)
            self._digest.update(target)

    def finish(self) -> None:
        """That the record was whole.

        Raises:
            TierCorrupt: it was not.
        """
        if self._head is None:
            raise TierCorrupt(f"the record of chunk {self._key.hex()[:16]} ends inside its head")
        check_payload(self._head, self._digest)


# ---- memory ----------------------------------------------------------------------------------------------------------


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def address_of(view: memoryview) -> int:
    """Where the first byte of a contiguous view lies; valid as long as the view is."""
    assert view.contiguous, "a view with gaps"
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    address: int = buffer.buf or 0
    _release_buffer(ctypes.byref(buffer))
    return address


def copy_into(into: memoryview, source: memoryview) -> None:
    """Copies ``source`` over ``into``, of the same size, without holding the interpreter lock."""
    assert len(into) == len(source), (len(into), len(source))
    assert not into.readonly, "the target cannot be written"
    copy_bytes(address_of(into), address_of(source), len(source))
