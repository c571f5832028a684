"""Settings of the log: where it is, how it is spoken to, and who speaks.

What contradicts each other is refused when the settings are read, by name. Whether a file or a token endpoint is there
is found when a connection is made: it may come, or be swapped, while roles wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from turnlog.setting_types import Partitions, Port, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """[kafka] The log."""

    bootstrap: str = ""
    """host:port[,host:port]; empty starts the embedded brokers."""
    brokers: Literal[1, 3] = 1
    """How many are embedded. One serves a run on one machine; of three any may be lost with all that it holds."""
    prefix: str = ""
    """Prepended to every topic, group and transactional id, so that several runs share one cluster."""
    groups: Partitions = 4
    """Partitions of every topic keyed by group_id; never changes."""
    rollouts: Partitions = 4
    """Partitions of tasks, agent.tool-calls and agent.tool-results; never changes."""
    replication: Annotated[int, Meta(ge=0, le=32767)] = 0
    """Copies of every topic that `turnlog topics apply` makes, of which an acknowledged record is on all but one; 3
    where the cluster has as many brokers. 0: as many as `brokers`, so 1 on a cluster of yours."""
    port: Port = 0
    """Of the embedded broker, of three the first one's, and the next two follow; 0 picks free ones."""
    heap_mb: Annotated[int, Meta(ge=64, le=1_048_576)] = 256
    """Java heap of each embedded broker."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Of the listener at bootstrap, as Kafka names it; SSL with a certificate of ours is mTLS."""
    ca_file: str = ""
    """PEM certificates that vouch for the brokers' (and for the token endpoint's, beside the system's own); empty: the
    system's own."""
    certificate_file: str = ""
    """PEM certificate of this client with what it is signed by, for mTLS."""
    key_file: str = ""
    """PEM private key of that certificate; empty: it is in certificate_file, too."""
    key_password: str = field(default="", repr=False)
    """Of an encrypted private key."""
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = ""
    """How a SASL_ listener learns who this is."""
    username: str = field(default="", repr=False)
    """Who logs in by PLAIN or SCRAM."""
    password: str = field(default="", repr=False)
    """Of username."""
    oauth_token_url: str = ""
    """Token endpoint for OAUTHBEARER: tokens come by the client credentials grant (RFC 6749, 4.4), and are refreshed
    before they expire."""
    oauth_client_id: str = field(default="", repr=False)
    """Who asks the token endpoint."""
    oauth_client_secret: str = field(default="", repr=False)
    """Of oauth_client_id."""
    oauth_scope: str = ""
    """Asked for there; empty asks for none."""
    oauth_token_file: str = ""
    """A file with the token, which somebody else rotates, in place of a token endpoint."""

    @property
    def copies(self) -> int:
        """Replicas of a topic."""
        return self.replication or self.brokers

    def count(self, kind: str) -> int:
        """Partitions of a topic, by its `partitions` in schemas.topics."""
        return {"groups": self.groups, "rollouts": self.rollouts, "one": 1}[kind]


Refuse = Callable[[str], None]
Names = Callable[..., list[str]]
"""Those among keys that are set, or are not."""
ENDPOINT = ("oauth_token_url", "oauth_client_id", "oauth_client_secret")


def check_kafka(kafka: KafkaSettings, source: str) -> None:
    """Raises SettingsError for what contradicts itself. `source`: where most of it was read."""

    def refuse(why: str) -> None:
        raise SettingsError(f"{source}: {why}")

    def has(*keys: str) -> list[str]:
        return [f"kafka.{key}" for key in keys if getattr(kafka, key)]

    def lacks(*keys: str) -> list[str]:
        return [f"kafka.{key}" for key in keys if not getattr(kafka, key)]

    if not kafka.bootstrap and (kafka.copies > kafka.brokers or kafka.copies == 1 < kafka.brokers):
        refuse(f"kafka.replication = {kafka.replication} contradicts kafka.brokers = {kafka.brokers}: leave "
               "replication out, or 2 or 3 with brokers = 3; kafka.bootstrap names a cluster of your own")  # fmt: skip
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
               "protocol has a mechanism, and no other has one")  # fmt: skip
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
