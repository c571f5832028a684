"""Bearer tokens at the dashboard and the live views: fixed tokens of programs, and those of the provider."""

from __future__ import annotations

import hmac

from turnlog.access_settings import fixed_tokens
from turnlog.infra.access import Person, TokenRejected
from turnlog.infra.access.oidc import OidcProvider
from turnlog.infra.run_folder import present
from turnlog.settings import AccessSettings


class Bearers:
    """Verifier of Authorization headers."""

    def __init__(self, settings: AccessSettings, provider: OidcProvider | None) -> None:
        """`provider` is that of [access] oidc_issuer; None without one."""
        self._settings, self._provider = settings, provider

    @property
    def configured(self) -> bool:
        """Whether any bearer token can be valid."""
        return self._settings.restricted

    async def person(self, authorization: str) -> Person:
        """Return who sends a header `Bearer TOKEN`. Raises TokenRejected, NoMappedRole, ProviderUnavailable."""
        kind, _, token = authorization.partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token:
            raise TokenRejected("send the header `Authorization: Bearer TOKEN`")
        person = None
        for one in fixed_tokens(present(self._settings.tokens)):  # all of them, so that the time tells nothing
            if hmac.compare_digest(one.token.encode(), token.encode()):
                person = Person(one.name, "token", one.role)
        if person is not None:
            return person
        if self._provider is None or token.count(".") != 2:
            raise TokenRejected("the bearer token is none of [access] tokens")
        return await self._provider.bearer(token)


def first_token(settings: AccessSettings) -> str:
    """Return the first of the fixed tokens, with which commands of the run itself ask the live views; "" if there is
    none."""
    return next((one.token for one in fixed_tokens(present(settings.tokens))), "")
