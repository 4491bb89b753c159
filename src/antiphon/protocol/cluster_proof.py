"""How two processes show each other that they have the cluster secret, without sending it.

Both proofs are HMAC-SHA256 under the secret over everything that was said: purpose, names, incarnations and both
nonces. The two sides' proofs differ by their role, so that one cannot be sent back as the other; a proof of an earlier
connection is of no use, since each side draws a new nonce.

It does not hide or sign what is said afterwards: who can change packets between two peers is not kept out by it.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from antiphon.core.errors import PeerRefused, ProtocolError
from antiphon.core.namespace import encode_value
from antiphon.protocol.peers import NONCE_BYTES, PROTOCOL_VERSION, Challenge, Hello, Message, Proof

SECRET_BYTES_MIN: Final = 32
"""A proof can be used to try secrets out, so that a short one would be found."""

_REMEDY = "give all cache servers and their coordinator the same --cluster-secret-file"


class Asker:
    """The side that connects.

    Args:
        secret: of the cluster.
        purpose: what the other side should be.
        instance, incarnation: of this process.
    """

    def __init__(self, secret: bytes, purpose: str, instance: str, incarnation: str) -> None:
        self._secret = secret
        self.hello = Hello(PROTOCOL_VERSION, purpose, instance, incarnation, secrets.token_bytes(NONCE_BYTES))

    def answer(self, challenge: Message) -> Proof:
        """The proof, once the other side has given its own.

        Raises:
            PeerRefused: it has not the same secret.
            ProtocolError: it is no challenge.
        """
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"Hello is answered by Challenge, not by {type(challenge).__name__}")
        bare = Challenge(challenge.instance, challenge.incarnation, challenge.nonce, bytes(len(challenge.proof)))
        if not hmac.compare_digest(challenge.proof, _proof(self._secret, "answerer", self.hello, bare)):
            raise PeerRefused(f"{challenge.instance} has another cluster secret", remedy=_REMEDY)
        return Proof(_proof(self._secret, "asker", self.hello, bare))


class Answerer:
    """The side that was connected to.

    Args:
        secret: of the cluster.
        purpose: what this process is.
        instance, incarnation: of this process.
    """

    def __init__(self, secret: bytes, purpose: str, instance: str, incarnation: str) -> None:
        self._secret = secret
        self._purpose = purpose
        self._bare = Challenge(instance, incarnation, secrets.token_bytes(NONCE_BYTES), bytes(32))
        self.hello: Hello | None = None

    def challenge(self, hello: Message) -> Challenge:
        """The answer to ``Hello``.

        Raises:
            PeerRefused: another version, or the caller takes this process for something else.
            ProtocolError: it is no ``Hello``.
        """
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a connection begins with Hello, not with {type(hello).__name__}")
        if hello.version != PROTOCOL_VERSION:
            raise PeerRefused(
                f"{hello.instance} speaks version {hello.version} of the peer protocol, this process "
                f"{PROTOCOL_VERSION}",
                remedy="run the same version of Antiphon on all hosts",
            )
        if hello.purpose != self._purpose:
            raise PeerRefused(
                f"this is a {self._purpose}, not a {hello.purpose}", remedy="give each its own address and port"
            )
        self.hello = hello
        bare = self._bare
        proof = _proof(self._secret, "answerer", hello, bare)
        return Challenge(bare.instance, bare.incarnation, bare.nonce, proof)

    def check(self, proof: Message) -> None:
        """Raises PeerRefused where the caller has not the same secret, ProtocolError where it is no proof."""
        assert self.hello is not None, "challenge comes first"
        if not isinstance(proof, Proof):
            raise ProtocolError(f"Challenge is answered by Proof, not by {type(proof).__name__}")
        if not hmac.compare_digest(proof.proof, _proof(self._secret, "asker", self.hello, self._bare)):
            raise PeerRefused(f"{self.hello.instance} has another cluster secret", remedy=_REMEDY)


def _proof(secret: bytes, role: str, hello: Hello, bare: Challenge) -> bytes:
    said = encode_value(
        (
            "antiphon cluster proof",
            role,
            (hello.version, hello.purpose, hello.instance, hello.incarnation, hello.nonce),
            (bare.instance, bare.incarnation, bare.nonce),
        )
    )
    return hmac.digest(secret, said, "sha256")
