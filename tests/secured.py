"""A real Apache Kafka as companies run it: TLS, SASL, sessions of ten seconds, and nobody may do anything unasked.

Listeners: PLAINTEXT (whose ANONYMOUS is the super user), SASL_SSL (PLAIN, SCRAM-SHA-512, OAUTHBEARER), SSL (mTLS).
Certificates are made anew for each.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.ports import HOST, free_ports, listens
from turnlog.infra.embedded.process import Launch
from turnlog.infra.topics_admin import Acl
from turnlog.settings import KafkaSettings

PASSWORD = "by-scram-alone"
SESSION_MS = 10_000
MODULES = "org.apache.kafka.common.security"
HANDLER = f"{MODULES}.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
SUPER = "contract"
"""May do everything, by SASL and by mTLS."""
AUDITED = "-Dorg.slf4j.simpleLogger.log.kafka.authorizer.logger=debug"
AUDIT = re.compile(
    rb"Principal = User:(\S+) is (Allowed|Denied) operation = (\w+) from host = \S+ on resource = (\w+):LITERAL:(\S+) "
    rb"for request = (\w+)"
)
LOOKS = ("Metadata", "ListGroups", "ListTransactions")
_EVERY = AclBindingFilter(
    ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
)
OPERATIONS = {
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "IdempotentWrite": AclOperation.IDEMPOTENT_WRITE,
}
PROPERTIES = """
listeners=CLIENTS://{host}:{port},SASL_SSL://{host}:{sasl},SSL://{host}:{tls},CONTROLLER://{host}:{controller}
advertised.listeners=CLIENTS://{host}:{port},SASL_SSL://{host}:{sasl},SSL://{host}:{tls}
controller.quorum.voters=1@{host}:{controller}
listener.security.protocol.map=CLIENTS:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=false
super.users=User:ANONYMOUS;User:{all};User:CN={all}
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512,OAUTHBEARER
connections.max.reauth.ms={session_ms}
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
listener.name.ssl.ssl.client.auth=required
listener.name.sasl_ssl.plain.sasl.jaas.config={modules}.plain.PlainLoginModule required {users};
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={modules}.scram.ScramLoginModule required;
listener.name.sasl_ssl.oauthbearer.sasl.jaas.config={modules}.oauthbearer.OAuthBearerLoginModule required;
listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class={handler}
"""


class Authority:
    """Signs certificates; its own is ca.pem in `folder`. With `old` it lacks what RFC 5280 demands, as authorities of
    companies do: it states no usage of its key, and certificates do not name the keys."""

    def __init__(self, folder: Path, name: str = "ca", *, old: bool = False) -> None:
        self.folder, self._old = folder, old
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        limits = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._signed(self._name, self._key.public_key(), limits, *(() if old else (usage,)))
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, password: bytes | None = None, days: int = 1) -> Path:
        """NAME.pem: a certificate of CN=NAME for client and server on this machine, and its key. `days` below 0: it has
        expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
        certificate = self._signed(subject, key.public_key(), usage, names, days=days)
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        path = self.folder / f"{name}.pem"
        path.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, hidden) + certificate.public_bytes(pem)
        )
        return path

    def _signed(self, subject: x509.Name, public: Any, *extensions: x509.ExtensionType, days: int = 1) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self._name, subject, public, x509.random_serial_number(), now - datetime.timedelta(days=3),
            now + datetime.timedelta(days=days),
        )  # fmt: skip
        keys: tuple[x509.ExtensionType, ...] = ()
        if not self._old:  # default contexts of Python 3.13 demand these
            keys = (
                x509.SubjectKeyIdentifier.from_public_key(public),
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
            )
        for extension in (*extensions, *keys):
            critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Secured:
    """Where it is, and how each listener is spoken to."""

    plain: str
    sasl: str
    tls: str
    authority: Authority
    log: Path

    def grant(self, acls: Iterable[Acl]) -> None:
        """As kafka-acls.sh --add does."""
        wanted = [_binding(acl) for acl in acls]
        with self._admin() as admin:
            _done(admin.create_acls(wanted))
            _until(admin, lambda held: held.issuperset(wanted))

    def revoke(self, *acls: Acl) -> None:
        """As kafka-acls.sh --remove does; of none given, all."""
        wanted = [_binding(acl, AclBindingFilter) for acl in acls] or [_EVERY]
        with self._admin() as admin:
            _done(admin.delete_acls(wanted))
            gone = {_binding(acl) for acl in acls}
            _until(admin, lambda held: not (held & gone if acls else held))

    @contextlib.contextmanager
    def _admin(self) -> Iterator[AdminClient]:
        yield AdminClient({"bootstrap.servers": self.plain})

    def asked(self, since: int, *, verdict: str = "Allowed") -> set[tuple[str, str, str, str]]:
        """What principals were allowed, or denied, to do since the log had that many bytes: principal, operation, kind
        of resource, its name. That a look at everything passes over what one may not see is no denial."""
        with self.log.open("rb") as lines:
            lines.seek(since)
            found = (match.groups() for line in lines if (match := AUDIT.search(line)))
            said = [tuple(part.decode() for part in groups) for groups in found]
        return {
            (who, operation, kind, name)
            for who, how, operation, kind, name, request in said
            if how == verdict and not (how == "Denied" and request in LOOKS)
        }

    def scram(self, user: str, **more: Any) -> KafkaSettings:
        """[kafka] of `user` by SCRAM-SHA-512 over TLS."""
        return self.by("SCRAM-SHA-512", **({"username": user, "password": PASSWORD} | more))

    def by(self, mechanism: Any, **more: Any) -> KafkaSettings:
        """[kafka] by another mechanism over TLS."""
        ca = str(self.authority.file)
        asked = {"bootstrap": self.sasl, "ca_file": ca, "sasl_mechanism": mechanism, "security_protocol": "SASL_SSL"}
        return KafkaSettings(**(asked | more))

    def mutual(self, user: str, **more: Any) -> KafkaSettings:
        """[kafka] of CN=`user` by mTLS."""
        certificate = self.authority.folder / f"{user}.pem"
        asked = {
            "bootstrap": self.tls, "security_protocol": "SSL", "ca_file": str(self.authority.file),
            "certificate_file": str(certificate if certificate.exists() else self.authority.issue(user)),
        }  # fmt: skip
        return KafkaSettings(**(asked | more))


def _binding(acl: Acl, kind: Any = AclBinding) -> Any:
    resource = ResourceType[{"cluster": "BROKER"}.get(acl.resource, acl.resource.replace("-", "_").upper())]
    operation = OPERATIONS.get(acl.operation) or AclOperation[acl.operation.upper()]
    pattern = ResourcePatternType[acl.pattern.upper()]
    return kind(resource, acl.name, pattern, acl.principal, "*", operation, AclPermissionType.ALLOW)


def _done(answers: Mapping[Any, Any]) -> None:
    for answer in answers.values():
        answer.result()


def _until(admin: AdminClient, reached: Callable[[set[AclBinding]], bool]) -> None:
    """Until the broker goes by what its controller has noted: nothing tells of that."""
    while not reached(set(admin.describe_acls(_EVERY).result())):
        time.sleep(0.01)


class SecuredBroker(Broker):
    """Ready when every listener is there."""

    ports: tuple[int, ...] = ()

    def launch(self) -> Launch:
        launch = super().launch()
        argv = (launch.argv[0], AUDITED, *launch.argv[1:])
        return replace(launch, argv=argv, ready=lambda: all(map(listens, self.ports)))


def secured_broker(folder: Path, users: Iterable[str]) -> tuple[Broker, Secured]:
    """Not started yet. Each of `users` has PASSWORD, by PLAIN and by SCRAM-SHA-512."""
    folder.mkdir()
    port, sasl, tls, controller = free_ports(4)
    users = [SUPER, *users]
    authority = Authority(folder)
    authority.issue("broker")
    properties = PROPERTIES.format(
        host=HOST, port=port, sasl=sasl, tls=tls, controller=controller, folder=folder, session_ms=SESSION_MS,
        handler=HANDLER, all=SUPER, modules=MODULES, users=" ".join(f'user_{user}="{PASSWORD}"' for user in users),
    )  # fmt: skip
    scram = [f"SCRAM-SHA-512=[name={user},password={PASSWORD}]" for user in users]
    broker = SecuredBroker(
        folder / "broker", port=port, controller_port=controller, properties=properties,
        format_arguments=tuple(word for user in scram for word in ("--add-scram", user)),
    )  # fmt: skip
    broker.ports = (port, sasl, tls)
    return broker, Secured(
        broker.bootstrap, f"{HOST}:{sasl}", f"{HOST}:{tls}", authority, folder / "broker" / "broker.log"
    )
