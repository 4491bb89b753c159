"""One JSON question to a server of ours: a connection of its own, no proxy, an answer of limited size, typed errors."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from antiphon.cli.addresses import http_host_port
from antiphon.cli.shown import printable
from antiphon.core.errors import AntiphonError, ProtocolError

ANSWER_MAX_BYTES: Final = 16 << 20


class NoAnswer(AntiphonError):
    """Nothing answers at the address, or not in time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of server, in messages.

    Args:
        name: what it is called.
        flag: that names its address.
        if_absent: what to do where none answers.
    """

    name: str
    flag: str
    if_absent: str


class Asker:
    """Asks one server.

    Args:
        url: ``http://HOST:PORT``.
        kind: what should answer there.
        headers: of each question.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str, kind: Kind, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._kind = kind
        self._host, self._port = http_host_port(kind.flag, url)
        self._headers = dict(headers or {})

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of the answer, whatever the status.

        Args:
            path: with its query.
            body: sent as JSON; None for none.

        Raises:
            NoAnswer: no server answers there, or not in time.
            ProtocolError: something else does.
        """
        status, data = self._exchange(method, path, body, timeout_s)
        try:
            answer = json.loads(data)
        except ValueError:
            raise self.wrong_kind(f"status {status}, no JSON") from None
        if not isinstance(answer, dict):
            raise self.wrong_kind(f"status {status}, no JSON object")
        return status, answer

    def _exchange(self, method: str, path: str, body: object, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else self._headers | {"content-type": "application/json"}
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            status, answer, num_missing = response.status, response.read(ANSWER_MAX_BYTES), response.length
        except TimeoutError as error:
            raise NoAnswer(
                f"the {self._kind.name} at {self.url} did not answer within {timeout_s:g} s",
                remedy="it hangs or the machine is overloaded: look at its log, or restart it",
            ) from error
        except OSError as error:
            raise NoAnswer(
                f"no {self._kind.name} answers at {self.url}: {error.strerror or error}", remedy=self._kind.if_absent
            ) from error
        except http.client.HTTPException as error:
            raise self.wrong_kind(repr(error)) from error
        finally:
            connection.close()
        if num_missing:
            raise self.wrong_kind(f"{num_missing} bytes of its answer are missing, or too many")
        return status, answer

    def wrong_kind(self, what: str) -> AntiphonError:
        """The error for an answer that such a server does not give."""
        return ProtocolError(
            f"what answers at {self.url} is no {self._kind.name} ({printable(what)})",
            remedy=f"name the {self._kind.name}'s address with {self._kind.flag}",
        )
