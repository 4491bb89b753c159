"""Files with keys: what is in them. Keys are read from files alone, since a command line is visible to every user of
the machine, and an environment is handed on to child processes.

A key is what can stand in an HTTP header, without white space; that it cannot be guessed is its owner's matter.
"""

from __future__ import annotations

from pathlib import Path

from antiphon.core.errors import ConfigError

KEY_FILE_MAX_BYTES = 1_048_576
KEYS_MAX = 10_000


def read_keys(path: str, field: str) -> list[bytes]:
    """The keys of a file, one a line; empty lines and those that begin with ``#`` are none.

    Raises:
        ConfigError: the file cannot be read, holds no key, or something that is none.
    """
    keys = []
    for number, line in enumerate(_content(path, field).splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(byte > 0x20 and byte != 0x7F for byte in key):
            raise ConfigError(
                f"{path}: line {number} is no key",
                field=field,
                remedy="write one key a line, without white space; lines that begin with # are left out",
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path} is empty", field=field, remedy="write a key into it")
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{path} has more than {KEYS_MAX} keys", field=field, remedy="remove some")
    return keys


def read_key(path: str, field: str) -> bytes:
    """The only key of a file: see :func:`read_keys`.

    Raises:
        ConfigError: as there, or there are several.
    """
    keys = read_keys(path, field)
    if len(keys) > 1:
        raise ConfigError(f"{path} has {len(keys)} keys", field=field, remedy="write one key into it")
    return keys[0]


def shown_to_others(path: str) -> str | None:
    """What to say of a file that other users of this machine could read or write; None where there is nothing."""
    try:
        mode = Path(path).expanduser().stat().st_mode & 0o777
    except OSError:
        return None
    if not mode & 0o077:
        return None
    return f"{path} is open to other users of this host (mode {mode:04o}): close it with chmod 600 {path}"


def _content(path: str, field: str) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(KEY_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            field=field,
            remedy="name a file that is there and that this user can read",
        ) from error
    if len(content) > KEY_FILE_MAX_BYTES:
        raise ConfigError(f"{path} is larger than {KEY_FILE_MAX_BYTES} bytes", field=field, remedy="name another file")
    return content
