"""Certificates of intercepted TLS: one authority per worker, whose key exists in memory alone, and a leaf per host.

RFC 5280. `ssl` loads keys from files only, so a leaf and its key pass through an anonymous file in memory
(memfd_create)."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Self

from turnlog.infra.roles.tls import machine_authorities
from turnlog.sandbox_workers.egress.policy import EgressUnavailable

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

VALID = datetime.timedelta(days=397)
"""Validity of certificates: the longest that clients accept for a leaf. A worker that runs longer must be restarted."""
EARLY = datetime.timedelta(days=1)
"""Time by which validity begins early, for machines whose clocks lag a little behind the worker's (docker, e2b)."""
CONTEXTS = 256
"""Maximum number of hosts whose leaf is cached."""


class CertificateAuthority:
    """Signs a leaf for any host that a sandbox was granted."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        """Create an authority from a key that nobody else has; see `make`."""
        self._key, self._certificate = key, certificate
        self._leaf_key = _new_key()
        self._contexts: dict[str, ssl.SSLContext] = {}

    @classmethod
    def make(cls) -> Self:
        """Create a new authority. Raises EgressUnavailable without `cryptography`."""
        try:
            from cryptography import x509
            from cryptography.x509.oid import NameOID
        except ImportError:
            raise EgressUnavailable(
                '[egress] tls = "intercept" needs certificates: pip install turnlog[sandbox], or set tls = "refuse"'
            ) from None
        key = _new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "turnlog sandbox egress")])
        usage = _usage(signs_certificates=True)
        certificate = (
            _builder(name, name, key.public_key(), key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, _sha256())
        )
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        return _pem(self._certificate)

    def context(self, host: str) -> ssl.SSLContext:
        """Return a context that serves TLS as `host`, a name or an address."""
        if (known := self._contexts.get(host)) is not None:
            return known
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load(context, self.leaf(host))
        if len(self._contexts) >= CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
        self._contexts[host] = context
        return context

    def leaf(self, host: str) -> bytes:
        """Return certificate and key of `host` as PEM."""
        return _pem(self._leaf(host)) + _private_pem(self._leaf_key)

    def _leaf(self, host: str) -> x509.Certificate:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        return (
            _builder(x509.Name([]), self._certificate.subject, self._leaf_key.public_key(), self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)  # critical: the subject is empty
            .sign(self._key, _sha256())
        )


def public_roots() -> bytes:
    """Return the root certificates that this machine trusts, as PEM. Raises EgressUnavailable if there are none."""
    context = machine_authorities()
    roots = [ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True)]
    if not roots:
        raise EgressUnavailable("this machine has no root certificates: install ca-certificates or set SSL_CERT_FILE")
    return "".join(roots).encode()


def write_certificate(folder: Path, pem: bytes) -> Path:
    """Write the file ca.pem, which sandboxes of every user may read. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ca.pem"
    path.write_bytes(pem)
    path.chmod(0o644)
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, signer: EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now - EARLY + VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _sha256() -> hashes.SHA256:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    with os.fdopen(os.memfd_create("leaf"), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
