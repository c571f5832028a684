"""Settings of the Kafka connection: where the cluster is, the protocol, and who logs in.

Settings that contradict each other are rejected, by name, when they are read. Whether a file or a token endpoint exists
is checked only when a connection is made: it may appear, or be replaced, while roles wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from turnlog.setting_types import Partitions, Port, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """[kafka] The cluster that holds the topics of the run."""

    bootstrap: str = ""
    """Bootstrap servers of your cluster, host:port[,host:port]; empty starts embedded brokers."""
    brokers: Literal[1, 3] = 1
    """Number of embedded brokers. One is enough for a run on one machine; with three, any one may be lost with all its
    data."""
    prefix: str = ""
    """Prefix of every topic, consumer group and transactional id, so that several runs can share one cluster."""
    groups: Partitions = 4
    """Number of partitions of each topic keyed by group_id. It never changes during a run."""
    rollouts: Partitions = 4
    """Number of partitions of tasks, agent.tool-calls and agent.tool-results. It never changes during a run."""
    replication: Annotated[int, Meta(ge=0, le=32767)] = 0
    """Replication factor of the topics that `turnlog topics apply` creates; an acknowledged record is on at least all
    replicas but one. Use 3 where the cluster has at least three brokers. 0: as many as `brokers`, which is 1 on a
    cluster of your own unless `brokers` is set."""
    port: Port = 0
    """Port of the embedded broker; with three brokers, of the first one, and the next two use the following ports. 0
    picks free ports."""
    heap_mb: Annotated[int, Meta(ge=64, le=1_048_576)] = 256
    """Java heap of each embedded broker, in MiB."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Security protocol of the listener at `bootstrap`, by Kafka's names; SSL with a client certificate is mTLS."""
    ca_file: str = ""
    """PEM file with the CA certificates that verify the brokers (and the token endpoint, in addition to the system's
    CAs); empty trusts the system's CAs."""
    certificate_file: str = ""
    """PEM file with the client certificate and its chain, for mTLS."""
    key_file: str = ""
    """PEM file with the private key of the client certificate; empty means that certificate_file holds the key as well.
    """
    key_password: str = field(default="", repr=False)
    """Password of an encrypted private key."""
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = ""
    """SASL mechanism for a SASL_ protocol; empty for the other protocols."""
    username: str = field(default="", repr=False)
    """User name for PLAIN or SCRAM."""
    password: str = field(default="", repr=False)
    """Password of `username`."""
    oauth_token_url: str = ""
    """Token endpoint for OAUTHBEARER. Tokens are requested with the client credentials grant (RFC 6749, 4.4) and
    refreshed before they expire."""
    oauth_client_id: str = field(default="", repr=False)
    """Client id for the token endpoint."""
    oauth_client_secret: str = field(default="", repr=False)
    """Client secret of `oauth_client_id`."""
    oauth_scope: str = ""
    """Scope to request from the token endpoint; empty requests none."""
    oauth_token_file: str = ""
    """File with the OAUTHBEARER token, rotated by another process, instead of a token endpoint."""

    @property
    def copies(self) -> int:
        """Replication factor of a topic."""
        return self.replication or self.brokers

    def count(self, kind: str) -> int:
        """Return the number of partitions of a topic, given its `partitions` in schemas.topics."""
        return {"groups": self.groups, "rollouts": self.rollouts, "one": 1}[kind]


Refuse = Callable[[str], None]
Names = Callable[..., list[str]]
"""Returns the full names of those of the given keys that are set, or that are not."""
ENDPOINT = ("oauth_token_url", "oauth_client_id", "oauth_client_secret")


def check_kafka(kafka: KafkaSettings, source: str) -> None:
    """Raise SettingsError if Kafka settings contradict each other. `source` is where most of them were read."""

    def refuse(why: str) -> None:
        raise SettingsError(f"{source}: {why}")

    def has(*keys: str) -> list[str]:
        return [f"kafka.{key}" for key in keys if getattr(kafka, key)]

    def lacks(*keys: str) -> list[str]:
        return [f"kafka.{key}" for key in keys if not getattr(kafka, key)]

    if not kafka.bootstrap and (kafka.copies > kafka.brokers or kafka.copies == 1 < kafka.brokers):
        refuse(f"kafka.replication = {kafka.replication} contradicts kafka.brokers = {kafka.brokers}: omit "
               "replication, or set 2 or 3 with brokers = 3; to use your own cluster, set kafka.bootstrap")  # fmt: skip
    protocol, mechanism = kafka.security_protocol, kafka.sasl_mechanism
    if protocol != "PLAINTEXT" and not kafka.bootstrap:
        refuse(f"kafka.security_protocol is {protocol} and kafka.bootstrap is empty: the embedded brokers have a "
               "login that `turnlog up` makes; unset it, or set kafka.bootstrap to your cluster")  # fmt: skip
    if (found := has("certificate_file", "key_file", "key_password")) and not protocol.endswith("SSL"):
        refuse(f"{found[0]} is set and kafka.security_protocol is {protocol}: set it to SSL or SASL_SSL, or unset it")
    if (found := has("key_file", "key_password")) and not kafka.certificate_file:
        refuse(f"{found[0]} is set without kafka.certificate_file: set both")
    if kafka.ca_file and protocol in ("PLAINTEXT", "SASL_PLAINTEXT") and not kafka.oauth_token_url.startswith("https"):
        refuse(f"kafka.ca_file is set and kafka.security_protocol is {protocol}: set it to SSL or SASL_SSL")
    if bool(mechanism) != protocol.startswith("SASL_"):
        refuse(f"kafka.security_protocol is {protocol} and kafka.sasl_mechanism is {mechanism or 'empty'}: a SASL_ "
               "protocol needs a mechanism, and no other takes one")  # fmt: skip
    by_name = mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
    if by_name and (missing := lacks("username", "password")):
        refuse(f"kafka.sasl_mechanism is {mechanism} and {missing[0]} is empty: set it, or {_file(missing[0])}")
    if not by_name and (found := has("username", "password")):
        refuse(f"{found[0]} is set and kafka.sasl_mechanism is {mechanism or 'empty'}: set PLAIN or SCRAM-SHA-512")
    _check_token(kafka, refuse, has, lacks)


def _check_token(kafka: KafkaSettings, refuse: Refuse, has: Names, lacks: Names) -> None:
    oauth = has(*ENDPOINT, "oauth_scope", "oauth_token_file")
    if oauth and kafka.sasl_mechanism != "OAUTHBEARER":
        refuse(f"{oauth[0]} is set and kafka.sasl_mechanism is {kafka.sasl_mechanism or 'empty'}: set OAUTHBEARER")
    if kafka.sasl_mechanism == "OAUTHBEARER":
        if kafka.oauth_token_file and (found := has(*ENDPOINT, "oauth_scope")):
            refuse(f"kafka.oauth_token_file and {found[0]} are both set: unset one of them")
        if not kafka.oauth_token_file and (missing := lacks(*ENDPOINT)):
            refuse(f"kafka.sasl_mechanism is OAUTHBEARER and {missing[0]} is empty: set it, or kafka.oauth_token_file")


def _file(key: str) -> str:
    return f"TURNLOG_{key.replace('.', '_').upper()}_FILE"
