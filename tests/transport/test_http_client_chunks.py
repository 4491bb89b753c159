"""A chunk that arrives alone is passed on without the parser: nobody can tell, however the bytes are split."""

from __future__ import annotations

import asyncio

import httptools
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import UpstreamError
from antiphon.transport.http.client import HttpPool
from antiphon.transport.http.client_connection import HttpClientConnection

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Notes:
    """A sink that notes the body, how many pieces came framed, and the end."""

    def __init__(self) -> None:
        self.body = b""
        self.num_framed = 0
        self.ends: list[str] = []

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert status == 200

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_read_end(self) -> None:
        pass

    def on_chunk(self, raw: bytes, begin: int) -> None:
        assert raw[begin - 2 : begin] == raw[-2:] == b"\r\n"
        assert int(raw[: begin - 2], 16) == len(raw) - begin - 2 > 0
        self.num_framed += 1
        self.body += raw[begin:-2]

    def on_end(self) -> None:
        self.ends.append("end")

    def on_lost(self, error: UpstreamError) -> None:
        self.ends.append(type(error).__name__)

    def on_timeout(self) -> None:
        raise AssertionError("no time was given")


class Plain:
    """What a parser that sees every byte makes of an answer."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__({"socket": None})
        self.has_closed = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.has_closed = True

    def close(self) -> None:
        self.has_closed = True

    def is_closing(self) -> bool:
        return self.has_closed

    def get_write_buffer_size(self) -> int:
        return 0


async def receive(pieces: list[bytes]) -> tuple[Notes, HttpClientConnection]:
    connection = HttpClientConnection(HttpPool("127.0.0.1", 1))
    connection.connection_made(Wire())
    notes = Notes()
    connection.start([b"GET / HTTP/1.1\r\n\r\n"], notes)
    for piece in pieces:
        if not notes.ends:
            connection.data_received(piece)
    return notes, connection


def expected(stream: bytes) -> tuple[bytes, str | None]:
    """The body and the end."""
    plain = Plain()
    parser = httptools.HttpResponseParser(plain)
    try:
        parser.feed_data(stream)
    except httptools.HttpParserError:
        return plain.body, "end" if plain.is_complete else "UpstreamGarbage"
    return plain.body, "end" if plain.is_complete else None


def framed(payload: bytes, form: str) -> bytes:
    size = b"%x" % len(payload)
    return {
        "plain": b"%b\r\n%b\r\n" % (size, payload),
        "upper": b"%b\r\n%b\r\n" % (size.upper(), payload),
        "zeros": b"00%b\r\n%b\r\n" % (size, payload),
        "many zeros": b"0000000%b\r\n%b\r\n" % (size, payload),
        "extension": b"%b;a=b\r\n%b\r\n" % (size, payload),
        "short": b"%x\r\n%b\r\n" % (len(payload) + 1, payload),
        "long": b"%x\r\n%b\r\n" % (max(len(payload) - 1, 1), payload),
        "prefix": b"0x%b\r\n%b\r\n" % (size, payload),
        "sign": b"+%b\r\n%b\r\n" % (size, payload),
        "underscore": b"0_%b\r\n%b\r\n" % (size, payload),
        "no carriage return": b"%b\n%b\r\n" % (size, payload),
        "no end": b"%b\r\n%bXX" % (size, payload),
    }[form]


GOOD_FORMS = ["plain", "upper", "zeros", "many zeros", "extension"]
payloads = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.lists(st.sampled_from([b"\r\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"data: {}\n\n", b"a"]), min_size=1).map(
        b"".join
    ),
    st.just(b"x" * 70_000),
)


@settings(max_examples=300)
@given(st.data())
async def test_an_answer_is_the_same_however_its_bytes_are_split(data: st.DataObject) -> None:
    chunks = [
        framed(payload, data.draw(st.sampled_from(GOOD_FORMS)))
        for payload in data.draw(st.lists(payloads, min_size=1, max_size=8))
    ]
    if data.draw(st.booleans()):
        forms = ["short", "long", "prefix", "sign", "underscore", "no carriage return", "no end"]
        chunks.append(framed(data.draw(payloads), data.draw(st.sampled_from(forms))))
    end = data.draw(st.sampled_from([END, b"0\r\nx: y\r\n\r\n", b"", b"000\r\n\r\n"]))
    parts = [HEAD, *chunks, end]
    pieces: list[bytes] = []
    for part in parts:
        cuts = data.draw(st.one_of(st.just([]), st.lists(st.integers(0, len(part)), max_size=3).map(sorted)))
        pieces += [part[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(part)], strict=True)]
    while len(pieces) > 1 and data.draw(st.integers(0, 3)) == 0:  # join some
        index = data.draw(st.integers(0, len(pieces) - 2))
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    pieces = [piece for piece in pieces if piece]
    notes, _ = await receive(pieces)
    body, end_seen = expected(b"".join(parts))
    assert notes.ends == ([] if end_seen is None else [end_seen])
    if end_seen == "UpstreamGarbage":
        assert body.startswith(notes.body) or notes.body.startswith(body)
    else:
        assert notes.body == body


async def test_chunks_that_arrive_alone_come_in_their_framing() -> None:
    pieces = [HEAD, *[framed(b"data: %d\n\n" % number, "plain") for number in range(5)], END]
    notes, connection = await receive(pieces)
    assert notes.ends == ["end"]
    assert notes.num_framed == 4  # the parser sees the first: only then is it between two chunks
    assert notes.body == b"".join(b"data: %d\n\n" % number for number in range(5))
    assert connection.is_open


async def test_the_framing_of_one_answer_is_not_that_of_the_next() -> None:
    """The first answer ended between two chunks; the second one's body merely looks like a chunk."""
    _, connection = await receive([HEAD, framed(b"a", "plain"), framed(b"b", "plain"), END])
    notes = Notes()
    connection.start([b"GET / HTTP/1.1\r\n\r\n"], notes)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n")
    connection.data_received(b"1\r\nx\r\n")
    connection.data_received(b"1\r\ny\r\n")
    assert (notes.body, notes.num_framed, notes.ends) == (b"1\r\nx\r\n1\r\ny\r\n", 0, ["end"])
