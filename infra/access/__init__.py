"""Identity of people and programs, and the record of their accesses (docs/access.md).

AccessFailure
├── ProviderUnavailable   the OpenID Connect provider does not answer, or its answer is not one
├── TokenRejected         a token or a code that the provider did not issue for us, or that has expired
├── NoMappedRole          somebody is known, but [access] roles gives no role
└── AuditUnavailable      the audit record could not be written, so the content is not shown
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.settings import AccessRole


class AccessFailure(Exception):
    """Base of the tree above."""


class ProviderUnavailable(AccessFailure):
    """Remedy: see the message; [access] oidc_issuer names the provider."""


class TokenRejected(AccessFailure):
    """Remedy: log in again, or request a new token. The message never holds the token."""


class NoMappedRole(AccessFailure):
    """Remedy: map one of the subject's claims in [access] roles."""

    def __init__(self, person: Person) -> None:
        super().__init__(
            f"{person.described} is logged in, but no rule of [access] roles gives a role: ask the owner of the run"
        )
        self.person = person


class AuditUnavailable(AccessFailure):
    """Remedy: see the message; or set [access] audit to false."""


@dataclass(frozen=True, slots=True)
class Person:
    """Person or program that asks for something of a run."""

    subject: str = ""
    """Identifier that never changes; empty for a visitor without a login."""
    login: str = "none"
    """Kind of login: oidc, link, token, os_user, or none."""
    role: AccessRole | None = None
    """Role of the subject, or None if it has no role."""
    name: str = ""
    """E-mail address or user name that the provider gave; else empty."""
    expires_s: float | None = None
    """Seconds since 1970 until which the provider vouches for the subject; None without a limit."""

    @property
    def described(self) -> str:
        """The subject in words."""
        return f"{self.name} ({self.subject})" if self.name else self.subject or "a visitor without a login"

    def may(self, role: AccessRole | None) -> bool:
        """Return True if the subject has all rights of `role`; None needs no role."""
        return role is None or (self.role is not None and self.role.includes(role))
