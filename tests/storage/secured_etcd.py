"""An etcd with a user, TLS and client certificates, for tests."""

from __future__ import annotations

import base64
import datetime
import http.client
import ipaddress
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.storage.servers import Etcd, Take

USER, PASSWORD = "kv", "the-word-of-kv"
PREFIX = b"mooncake/"
"""Of the keys that the user may read and write: those of Mooncake."""


class Certificates:
    """An authority, and what it has signed: PEM files in a folder.

    Args:
        folder: for the files.
    """

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("cryptography", reason="needs cryptography, of the packages for tests")
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        now = datetime.datetime.now(datetime.UTC)
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])

        def sign(name: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
            uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = x509.CertificateBuilder().subject_name(name).issuer_name(authority_name)
            builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
            builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
            builder = builder.not_valid_after(now + datetime.timedelta(days=1))
            builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            if not is_authority:
                address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
                builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
                builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority = folder / "ca.pem"
        self.authority.write_bytes(sign(authority_name, authority_key, is_authority=True))
        for each in ("server", "client"):
            key = ec.generate_private_key(ec.SECP256R1())
            # With users, etcd's gateway refuses clients whose certificate has a common name.
            part = NameOID.COMMON_NAME if each == "server" else NameOID.ORGANIZATION_NAME
            name = x509.Name([x509.NameAttribute(part, each)])
            (folder / f"{each}.pem").write_bytes(sign(name, key, is_authority=False))
            (folder / f"{each}.key").write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )

    def files(self, name: str) -> tuple[str, str]:
        """Certificate and key of ``server`` or ``client``."""
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")


class SecuredEtcd(Etcd):
    """An etcd that asks who comes.

    Args:
        certificates: it serves TLS with them; None: it does not.
        has_user: only ``USER`` may read and write, and only Mooncake's keys.
        wants_certificate: clients show one.
    """

    def __init__(
        self,
        folder: Path,
        around: tuple[set[int], Take],
        certificates: Certificates | None = None,
        *,
        has_user: bool = True,
        wants_certificate: bool = False,
    ) -> None:
        super().__init__(folder, *around)
        self._certificates = certificates
        self._has_user = has_user
        self._wants_certificate = wants_certificate
        self._is_set_up = False
        self._context = None
        if certificates is not None:
            self._context = ssl.create_default_context(cafile=str(certificates.authority))
            self._context.load_cert_chain(*certificates.files("client"))
        self.scheme = "http" if certificates is None else "https"
        self.password_file = folder / "password"
        self.password_file.write_text(f"{PASSWORD}\n")

    def command(self) -> list[str]:
        words = super().command()
        if self._certificates is not None:
            client = f"https://127.0.0.1:{self.port}"
            words[words.index("--listen-client-urls") + 1] = client
            words[words.index("--advertise-client-urls") + 1] = client
            certificate, key = self._certificates.files("server")
            words += ["--cert-file", certificate, "--key-file", key]
        if self._wants_certificate:
            assert self._certificates is not None
            words += ["--client-cert-auth", "--trusted-ca-file", str(self._certificates.authority)]
        return words

    def is_ready(self) -> bool:
        try:
            if self.ask("/health", None)[0] != 200:
                return False
        except (OSError, http.client.HTTPException):
            return False
        if self._has_user and not self._is_set_up:
            self._set_up()
        return True

    def _set_up(self) -> None:
        start, end = (base64.b64encode(word).decode() for word in (PREFIX, PREFIX[:-1] + b"0"))
        permission = {"permType": "READWRITE", "key": start, "range_end": end}
        for path, body in (
            ("role/add", {"name": "mooncake"}),
            ("role/grant", {"name": "mooncake", "perm": permission}),
            ("user/add", {"name": USER, "password": PASSWORD}),
            ("user/grant", {"user": USER, "role": "mooncake"}),
            ("user/add", {"name": "root", "password": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            status, answer = self.ask(f"/v3/auth/{path}", body)
            assert status == 200, (path, answer)
        self._is_set_up = True

    def ask(self, path: str, body: dict[str, Any] | None, token: str = "") -> tuple[int, dict[str, Any]]:
        """A request of the test's own."""
        kind = http.client.HTTPConnection if self._context is None else http.client.HTTPSConnection
        rest: dict[str, Any] = {} if self._context is None else {"context": self._context}
        link = kind("127.0.0.1", self.port, timeout=5, **rest)
        headers = {"Authorization": token} if token else {}
        try:
            link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            answer = link.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            link.close()

    def all_keys(self) -> list[bytes]:
        """Of all that is in it."""
        token = ""
        if self._has_user:
            token = self.ask("/v3/auth/authenticate", {"name": "root", "password": "root"})[1]["token"]
        everything = {"key": "AA==", "range_end": "AA==", "keys_only": True}
        found = self.ask("/v3/kv/range", everything, token)[1].get("kvs", [])
        return [base64.b64decode(each["key"]) for each in found]
