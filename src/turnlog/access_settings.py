"""Settings of who may see a run: roles, logins through OpenID Connect, tokens of programs, the audit trail.

Settings that contradict each other are rejected, by name, when they are read. Whether the provider answers is checked
only when somebody logs in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from turnlog.setting_types import LEAST_KEY, SettingsError, Signs


class AccessRole(StrEnum):
    """Role of somebody who uses a run over HTTP. Each role includes those before it."""

    READER = "reader"
    """May look at every page."""
    OPERATOR = "operator"
    """May act: put back and skip records, write notes and tags."""
    OWNER = "owner"
    """May export, read the audit trail and end the logins of others."""

    def includes(self, other: AccessRole) -> bool:
        """Return True if this role has all rights of the other."""
        order = list(AccessRole)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class FixedToken:
    """Token of a program."""

    name: str
    """Name of the program, for the audit trail."""
    role: AccessRole
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClaimRule:
    """Maps a value of a claim to a role."""

    claim: str
    value: str
    role: AccessRole

    def matches(self, claims: Mapping[str, object]) -> bool:
        """Return True if the claim has the value, alone or in a list. An e-mail address counts only if the provider has
        verified it, since at many providers anybody may enter any address."""
        if self.claim == "email" and claims.get("email_verified") not in (True, "true"):
            return False
        found = _claim(claims, self.claim)
        return self.value in found if isinstance(found, list) else found == self.value


def _claim(claims: Mapping[str, object], name: str) -> object:
    """Return a claim by its name, or by a path with dots, such as Keycloak's `realm_access.roles`; None if there is
    none."""
    found: object = claims
    if name in claims:
        return claims[name]
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def claim_rules(texts: tuple[str, ...]) -> tuple[ClaimRule, ...]:
    """Parse [access] roles, `CLAIM=VALUE:ROLE` each. Raises ValueError with the text that is none."""
    return tuple(map(_claim_rule, texts))


def _claim_rule(text: str) -> ClaimRule:
    claim, equals, rest = text.partition("=")
    value, _, role = rest.rpartition(":")
    if not (claim and equals and value and role in list(AccessRole)):
        raise ValueError(text)
    return ClaimRule(claim, value, AccessRole(role))


def fixed_tokens(text: str) -> Iterator[FixedToken]:
    """Yield the tokens of [access] tokens: lines of name, role and token. Empty lines and those that begin with # are
    skipped. Raises ValueError with the number of a line that is none; the message never holds a token."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[1] not in list(AccessRole) or len(words[2]) < LEAST_KEY or not line.isascii():
            raise ValueError(str(number))
        yield FixedToken(words[0], AccessRole(words[1]), words[2])


@dataclass(frozen=True, slots=True)
class ListsTokens(Signs):
    """Marks a secret that is a list of tokens with their roles."""

    def fault(self, text: str) -> str:
        """Return why the text is no such list, or "" if it is one."""
        try:
            programs = list(fixed_tokens(text))
        except ValueError as error:
            return (
                f"has a line {error} that is not NAME ROLE TOKEN with a role of {', '.join(AccessRole)} and a token of "
                f"at least {LEAST_KEY} characters: `openssl rand -hex 32` makes one"
            )
        if len({one.name for one in programs}) < len(programs):
            return "names a program twice: give each token a name of its own"
        if len({one.token for one in programs}) < len(programs):
            return "gives two programs the same token: `openssl rand -hex 32` makes another"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """[access] Who may use the dashboard and the live views, and the record of it (docs/access.md). Without an issuer
    and without tokens, there are no roles beside those of login links."""

    oidc_issuer: str = ""
    """Issuer of an OpenID Connect provider, through which people log in: an https:// address, exactly as the provider
    writes it."""
    oidc_client_id: str = ""
    """Client id of the dashboard at the provider."""
    oidc_client_secret: str = field(default="", repr=False)
    """Client secret; empty for a public client, which the provider trusts by PKCE alone."""
    oidc_scopes: tuple[str, ...] = ("openid", "email", "profile")
    """Scopes to request. Many providers need another one before they name groups."""
    roles: tuple[str, ...] = ()
    """Rules CLAIM=VALUE:ROLE with a role of reader, operator or owner, for example "groups=rl-team:operator" or
    "email=ann@example.org:owner". The highest role of all rules that match counts; nobody else is let in."""
    login_s: Annotated[float, Meta(ge=0, le=604_800)] = 0.0
    """Seconds for which a login through the provider lasts; 0: until its id token expires."""
    tokens: Annotated[str, ListsTokens()] = field(default="", repr=False)
    """Bearer tokens of programs: lines of name, role and token."""
    audit: bool = False
    """Whether each look at a run and each export is recorded on the log first. What cannot be recorded is not shown."""

    @property
    def restricted(self) -> bool:
        """Whether everybody needs a role, also over the loopback."""
        return bool(self.oidc_issuer or self.tokens)


def check_access(access: AccessSettings, dashboard_url: str, source: str) -> None:
    """Raise SettingsError if settings of [access], or [dashboard] url, contradict each other."""

    def refuse(why: str) -> None:
        raise SettingsError(f"{source}: {why}")

    try:
        rules = claim_rules(access.roles)
    except ValueError as error:
        refuse(
            f"access.roles must be rules CLAIM=VALUE:ROLE with a role of {', '.join(AccessRole)}, got {str(error)!r}"
        )
    if access.oidc_issuer:
        if not is_safe_url(access.oidc_issuer):
            refuse(
                "access.oidc_issuer must be an https:// address without ? and # (http:// only over the loopback), got "
                f"{access.oidc_issuer!r}"
            )
        if not access.oidc_client_id:
            refuse("access.oidc_issuer is set without access.oidc_client_id: register the dashboard at the provider")
        if not rules:
            refuse("access.oidc_issuer is set and access.roles is empty, so nobody could log in: map a claim to a role")
        if "openid" not in access.oidc_scopes:
            refuse(f"access.oidc_scopes must contain openid, got {list(access.oidc_scopes)!r}")
    else:
        for key in ("oidc_client_id", "oidc_client_secret", "roles"):
            if getattr(access, key):
                refuse(f"access.{key} is set without access.oidc_issuer: set both, or neither")
    if dashboard_url and not (is_origin(dashboard_url) and is_safe_url(dashboard_url, loopback_only=False)):
        refuse(f"dashboard.url must be http(s)://host[:port] without a path, got {dashboard_url!r}")


def is_origin(url: str) -> bool:
    """Return True if an address has no path."""
    return urlsplit(url).path in ("", "/")


def is_safe_url(url: str, *, loopback_only: bool = True) -> bool:
    """Return True for an https:// address without query, fragment and user. With `loopback_only`, http:// is accepted
    for the loopback alone, else everywhere."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if not host or parts.username is not None or "?" in url or "#" in url or not url.isprintable() or " " in url:
        return False
    if parts.scheme == "https":
        return True
    return parts.scheme == "http" and (not loopback_only or _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
