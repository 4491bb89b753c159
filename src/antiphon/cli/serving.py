"""What the verbs that run one server have in common, so that each says the same of the same thing.

A server that is refused ends the command with status 2 and names the flag that is to be changed, or the field of a file
that a flag names; one that does not start ends it with status 1. Knows no server.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import click

from antiphon.config.hosts import WILDCARDS
from antiphon.config.key_files import shown_to_others
from antiphon.config.problems import SpecError
from antiphon.core.errors import ConfigError, StartError


class Listener(NamedTuple):
    """An address that a server will listen on.

    Args:
        flag: that the port was given with.
        host: as it was given.
        port: 0 takes a free one.
    """

    flag: str
    host: str
    port: int


def refuse_one_port_twice(listeners: Iterable[Listener]) -> None:
    """Raises click.UsageError where two of them cannot listen at once."""
    for one, other in combinations(listeners, 2):
        if one.port and one.port == other.port and _meet(one.host, other.host):
            flags = one.flag if one.flag == other.flag else f"{one.flag} and {other.flag}"
            raise click.UsageError(
                f"{other.flag}: two uses of one port, {other.port}: it is {one.flag} already\n"
                f"  fix: give {flags} a value each"
            )


def _meet(one: str, other: str) -> bool:
    names = [{"localhost": "127.0.0.1", "": "0.0.0.0"}.get(host, host) for host in (one, other)]
    return names[0] == names[1] or any(name in WILDCARDS for name in names)


def log_to_stderr(level: str) -> None:
    """Logs what is at least as severe as ``level``."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def raise_descriptor_limit() -> None:
    """As many descriptors as the system allows: the usual soft limit of 1024 is far below that, and a connection takes
    one or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warn_of_open_files(log: logging.Logger, files: dict[str, str | None]) -> None:
    """Warns of files with secrets that other users of this host could read; ``files``: path by flag, None for none."""
    for flag, path in files.items():
        if path is not None and (text := shown_to_others(path)) is not None:
            log.warning("%s: %s", flag, text)


@contextlib.contextmanager
def refusals(verb: str) -> Iterator[None]:
    """Around the life of the server of ``antiphon VERB``: what refuses it, or keeps it from starting, ends the command.

    Raises:
        click.UsageError: the flags cannot work.
        SystemExit: it did not start; status 1.
    """
    try:
        yield
    except ConfigError as error:
        if isinstance(error, SpecError):  # of a file that a flag names: it tells every problem and its remedy
            raise click.UsageError(str(error)) from error
        flag = f"--{error.field.rpartition('.')[2].replace('_', '-')}: " if error.field else ""
        raise click.UsageError(f"{flag}{error.message}{_fix(error.remedy)}") from error
    except StartError as error:
        click.echo(f"antiphon {verb}: {error.message}{_fix(error.remedy)}", err=True)
        sys.exit(1)


def _fix(remedy: str | None) -> str:
    return f"\n  fix: {remedy}" if remedy else ""
