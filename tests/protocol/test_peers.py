"""Messages of peers cross the wire unchanged, their limits hold, and a proof is good for one connection only."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import LeaseUnknown, PeerRefused, PeerTimeout, ProtocolError, TierFull
from antiphon.protocol import peers as wire
from antiphon.protocol.cache import LENGTH_BYTES
from antiphon.protocol.cluster_proof import Answerer, Asker

SECRET = b"s" * 32
KEY = bytes(range(32))

MESSAGES = [
    wire.Join("host:1", 1),
    wire.Joined(1.0),
    wire.Listing(True, False, 3, KEY * 2),
    wire.Events(3, 2, ((True, KEY), (False, KEY))),
    wire.Resync(),
    wire.Heartbeat(),
    wire.Locate(KEY),
    wire.Located((wire.Holder("a", "i", "host:1"),), ((0,), ())),
    wire.AskNixl(),
    wire.NixlInfo(b"m", 2**47, 4096),
    wire.Lend(KEY, None, 10, 1, KEY),
    wire.Lent((wire.LentChunk(0, 7, 4096, bytes(16)),), 0),
    wire.AskHeld(KEY * 2, KEY * 2),
    wire.Held(bytes((0, 2))),
    wire.Read(7),
    wire.ReadBegins(10),
    wire.Return((7,)),
    wire.Noted(),
    wire.Failure("peer_error", "m"),
]


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: type(body).__name__)
def test_messages_come_back(body: wire.Message) -> None:
    framed = wire.frame(5, body)
    assert int.from_bytes(framed[:LENGTH_BYTES], "little") == len(framed) - LENGTH_BYTES
    assert wire.decode(framed[LENGTH_BYTES:]) == wire.Envelope(5, body)


def test_every_message_is_tried() -> None:
    proofs = {wire.Hello, wire.Challenge, wire.Proof, wire.Accepted}
    assert {type(body) for body in MESSAGES} | proofs == set(wire.Message.__args__)


@pytest.mark.parametrize(
    "body",
    [
        wire.Hello(1, "peer", "a", "i", b"short"),
        wire.Listing(True, True, 1, bytes(wire.KEYS_PER_CALL_MAX * 32 + 1)),
        wire.Lend(KEY, "f" * 513, 1, 1, KEY),
        wire.Lend(KEY, None, 1, 1, KEY * (wire.LEND_KEYS_MAX + 1)),
        wire.AskHeld(KEY * (wire.HELD_KEYS_MAX + 1), KEY),
        wire.Return(tuple(range(wire.LEND_KEYS_MAX + 1))),
        wire.Join("u" * 301, 1),
        wire.Read(-1),
    ],
    ids=lambda body: type(body).__name__,
)
def test_what_exceeds_a_limit_is_refused(body: wire.Message) -> None:
    payload = msgspec.msgpack.encode(wire.Envelope(1, body))
    with pytest.raises(ProtocolError):
        wire.decode(payload)


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    try:
        read = wire.decode(noise)
    except ProtocolError:
        return
    assert wire.decode(wire.frame(read.id, read.body)[LENGTH_BYTES:]) == read


def test_the_largest_messages_fit_a_frame() -> None:
    events = wire.Events(2**62, wire.EVENTS_PER_CALL_MAX, ((True, KEY),) * wire.EVENTS_PER_CALL_MAX)
    listing = wire.Listing(True, True, 2**62, KEY * wire.KEYS_PER_CALL_MAX)
    members = tuple(wire.Holder("i" * 64, "i" * 12, "u" * 100) for _ in range(1_024))
    located = wire.Located(members, ((1_021, 1_022, 1_023),) * wire.KEYS_PER_CALL_MAX)
    for body in (events, listing, located):
        assert wire.decode(wire.frame(1, body)[LENGTH_BYTES:]).body == body


@pytest.mark.parametrize(
    ("error", "kind"), [(LeaseUnknown("m"), LeaseUnknown), (PeerTimeout("m"), PeerTimeout), (TierFull("m"), None)]
)
def test_errors_cross_as_themselves_or_as_peer_errors(error: Exception, kind: type | None) -> None:
    back = wire.error_of(wire.failure_of(error))  # type: ignore[arg-type]  # AntiphonError
    assert type(back) is (kind or wire.PeerError)
    assert back.message == "m"


# ---- the proof -------------------------------------------------------------------------------------------------------


def asker(secret: bytes = SECRET, purpose: str = wire.PEER) -> Asker:
    return Asker(secret, purpose, "b", "ib")


def answerer(secret: bytes = SECRET) -> Answerer:
    return Answerer(secret, wire.PEER, "a", "ia")


def test_equal_secrets_are_accepted_and_never_said() -> None:
    one, other = asker(), answerer()
    challenge = other.challenge(one.hello)
    proof = one.answer(challenge)
    other.check(proof)
    said = msgspec.msgpack.encode([one.hello, challenge, proof])
    assert SECRET not in said


def test_either_side_finds_out_another_secret() -> None:
    one, other = asker(), answerer(b"t" * 32)
    with pytest.raises(PeerRefused, match="another cluster secret"):
        one.answer(other.challenge(one.hello))
    liar = asker(b"t" * 32)
    right = answerer()
    challenge = right.challenge(liar.hello)
    forged = wire.Proof(challenge.proof)  # sent back as it came
    with pytest.raises(PeerRefused, match="another cluster secret"):
        right.check(forged)


def test_a_proof_of_another_connection_is_of_no_use() -> None:
    one, first, second = asker(), answerer(), answerer()
    proof = one.answer(first.challenge(one.hello))
    second.challenge(one.hello)
    with pytest.raises(PeerRefused):
        second.check(proof)


def test_names_and_lives_are_part_of_the_proof() -> None:
    one, other = asker(), answerer()
    challenge = other.challenge(one.hello)
    elsewhere = wire.Challenge("c", challenge.incarnation, challenge.nonce, challenge.proof)
    with pytest.raises(PeerRefused):
        one.answer(elsewhere)


def test_another_version_or_purpose_is_refused_before_any_proof() -> None:
    hello = asker().hello
    with pytest.raises(PeerRefused, match="same version"):
        answerer().challenge(wire.Hello(99, hello.purpose, hello.instance, hello.incarnation, hello.nonce))
    with pytest.raises(PeerRefused, match="not a coordinator"):
        answerer().challenge(asker(purpose=wire.COORDINATOR).hello)
    with pytest.raises(ProtocolError):
        answerer().challenge(wire.Heartbeat())
