"""Logins and bearer tokens of an OpenID Connect provider.

The authorization code flow with PKCE (OpenID Connect Core 1.0, section 3.1; RFC 7636), discovery (OpenID Connect
Discovery 1.0), and JSON Web Tokens signed with the provider's published keys (RFC 7519, RFC 8725).
joserfc verifies signatures and claims. It is typed, small and kept by the author of authlib. Authlib's own clients
would be HTTP clients beside those of `infra.roles.http_clients`, for two requests.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from turnlog.access_settings import claim_rules, is_safe_url
from turnlog.infra.access import NoMappedRole, Person, ProviderUnavailable, TokenRejected
from turnlog.infra.run_folder import present
from turnlog.settings import AccessRole, AccessSettings

if TYPE_CHECKING:
    import httpx
    from joserfc.jwk import KeySet

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519",
)  # fmt: skip
"""Signatures with the provider's private key. Neither "none" nor HMAC is one: anybody could make the first, and the key
of the second would be the client secret."""
SKEW_S: Final = 60
"""Seconds by which the clocks of provider and dashboard may differ."""
TIMEOUT_S: Final = 10.0
"""Seconds for a request to the provider."""
KEPT_S: Final = 3600.0
"""Seconds for which the provider's addresses and keys are kept."""
AGAIN_S: Final = 10.0
"""Minimum seconds between two requests for the provider's keys because of a token with an unknown key."""
MOST_BYTES: Final = 1 << 20
"""Maximum bytes of an answer of the provider."""
TOKEN_CHARACTERS: Final = 16_384
"""Maximum length of a token."""
NAMES: Final = ("email", "preferred_username", "name")
"""Claims that name a person, the best first."""
TYPES: Final = (None, "JWT", "jwt", "at+jwt", "application/at+jwt")
"""Types of id tokens and access tokens. Logout tokens and others of the provider's are no proof of who sends them."""


class OidcProvider:
    """Client of the provider of [access] oidc_issuer. Use it from one event loop."""

    def __init__(
        self, settings: AccessSettings, client: httpx.AsyncClient, now: Callable[[], float] = time.time
    ) -> None:
        self._settings, self._client, self._now = settings, client, now
        self._rules = claim_rules(settings.roles)
        self._one = asyncio.Lock()
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None
        self._keys_asked_s = -math.inf
        """Time of the last request for keys, also of one that failed."""
        self._failure: tuple[float, str] | None = None
        """Time and message of the last request that failed."""

    async def authorization_url(self, return_to: str, *, state: str, nonce: str, verifier: str) -> str:
        """Return the address at which the provider logs somebody in. Raises ProviderUnavailable."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code", "client_id": self._settings.oidc_client_id, "redirect_uri": return_to,
            "scope": " ".join(self._settings.oidc_scopes), "state": state, "nonce": nonce,
            "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        return _with_query(await self._endpoint("authorization_endpoint"), query)

    async def logout_url(self, return_to: str) -> str:
        """Return the address at which the provider ends its own login, or "" if it has none. It names the client and no
        token, since addresses are logged. Raises ProviderUnavailable."""
        if not (await self._metadata_of_provider()).get("end_session_endpoint"):
            return ""
        query = {"client_id": self._settings.oidc_client_id, "post_logout_redirect_uri": return_to}
        return _with_query(await self._endpoint("end_session_endpoint"), query)

    async def redeem_code(self, code: str, return_to: str, *, nonce: str, verifier: str) -> Person:
        """Exchange a code for an id token, and return whom it names. Raises ProviderUnavailable, TokenRejected,
        NoMappedRole."""
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": return_to, "code_verifier": verifier}
        headers, secret = {}, present(self._settings.oidc_client_secret)
        methods = (await self._metadata_of_provider()).get("token_endpoint_auth_methods_supported") or [
            "client_secret_basic"
        ]
        if secret and "client_secret_basic" in methods:
            pair = f"{quote(self._settings.oidc_client_id, safe='')}:{quote(secret, safe='')}"  # RFC 6749, 2.3.1
            headers["authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        else:
            form |= {"client_id": self._settings.oidc_client_id} | ({"client_secret": secret} if secret else {})
        url = await self._endpoint("token_endpoint")
        status, body = await self._ask("POST", url, data=form, headers=headers)
        if status != 200:
            known = body.get("error") if isinstance(body.get("error"), str) else status
            raise TokenRejected(
                f"{self._settings.oidc_issuer} does not accept the login ({str(known)[:100]}): log in again; if that "
                "does not help, check [access] oidc_client_id and oidc_client_secret"
            )
        claims = await self._verify_token(body.get("id_token"))
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise TokenRejected("the id token belongs to another login (nonce): log in again")
        return self._person(claims)

    async def bearer(self, token: str) -> Person:
        """Return whom an id token or an access token in the form of a JSON Web Token names. Raises ProviderUnavailable,
        TokenRejected, NoMappedRole."""
        return self._person(await self._verify_token(token))

    def _person(self, claims: Mapping[str, Any]) -> Person:
        names = (claims[key] for key in NAMES if isinstance(claims.get(key), str))
        subject, name = (_storable(text) for text in (claims["sub"], next(names, "")))
        person = Person(subject, "oidc", None, name, float(claims["exp"]))
        roles = {rule.role for rule in self._rules if rule.matches(claims)}
        for role in reversed(AccessRole):
            if role in roles:
                return Person(person.subject, person.login, role, person.name, person.expires_s)
        raise NoMappedRole(person)

    async def _verify_token(self, token: object) -> Mapping[str, Any]:
        """Return the claims of a token that the provider signed for this client and that is valid now. Raises
        ProviderUnavailable, TokenRejected."""
        from joserfc import jwt  # 30 ms, and few processes have a provider
        from joserfc.errors import InvalidKeyIdError, JoseError

        if not isinstance(token, str) or not token.isascii() or len(token) > TOKEN_CHARACTERS:
            raise TokenRejected("there is no token of the provider: log in again")
        client_id, issuer = self._settings.oidc_client_id, self._settings.oidc_issuer
        rules = jwt.JWTClaimsRegistry(
            now=lambda: int(self._now()), leeway=SKEW_S, iss={"essential": True, "value": issuer},
            sub={"essential": True}, exp={"essential": True}, iat={"essential": True}, aud={"essential": True},
        )  # fmt: skip
        try:
            try:
                found = jwt.decode(token, await self._published_keys(), algorithms=list(ALGORITHMS))
            except InvalidKeyIdError:  # the provider may have changed its keys
                found = jwt.decode(token, await self._published_keys(again=True), algorithms=list(ALGORITHMS))
            rules.validate(found.claims)
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            raise TokenRejected(
                f"the token is not valid ({type(error).__name__}: {_error_text(error)}): log in again"
            ) from None
        claims, audience = found.claims, found.claims["aud"]
        audiences = [audience] if isinstance(audience, str) else audience
        if client_id not in audiences or (len(audiences) > 1 and claims.get("azp", client_id) != client_id):
            raise TokenRejected(f"the token is for another client than {client_id!r}: request one for this client")
        if found.header.get("typ") not in TYPES or "events" in claims or not claims["sub"]:
            raise TokenRejected("the token is neither an id token nor an access token")
        return claims

    async def _published_keys(self, *, again: bool = False) -> KeySet:
        """Return the provider's public keys; `again`: those of now, unless they were fetched a moment ago. Raises
        ProviderUnavailable."""
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        described = await self._metadata_of_provider()
        may_be_kept = not again or self._is_recent(self._keys_asked_s, AGAIN_S)
        if may_be_kept and self._keys is not None and self._is_recent(self._keys[0], KEPT_S):
            return self._keys[1]  # without the lock: a provider that hangs must not delay tokens with known keys
        async with self._asking():
            if self._keys is None or not self._is_recent(self._keys[0], AGAIN_S if again else KEPT_S):
                self._keys_asked_s = self._now()
                status, body = await self._ask("GET", self._safe(described, "jwks_uri"))
                try:
                    found = KeySet.import_key_set(body)  # type: ignore[arg-type]
                except (JoseError, ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ProviderUnavailable(
                        f"{self._settings.oidc_issuer} publishes no keys that can be read (status {status}): "
                        f"{type(error).__name__}"
                    ) from None
                self._keys = self._now(), found
            return self._keys[1]

    async def _endpoint(self, key: str) -> str:
        return self._safe(await self._metadata_of_provider(), key)

    def _safe(self, described: Mapping[str, Any], key: str) -> str:
        """Return an address of the provider. Raises ProviderUnavailable if it is missing, or not encrypted."""
        url = described.get(key)
        if not isinstance(url, str) or not is_safe_url(url.partition("?")[0]) or "#" in url:
            raise ProviderUnavailable(f"{self._settings.oidc_issuer} names no https:// address as {key}")
        return url

    async def _metadata_of_provider(self) -> Mapping[str, Any]:
        """Return the provider's metadata. Raises ProviderUnavailable."""
        issuer = self._settings.oidc_issuer
        if self._metadata is not None and self._is_recent(self._metadata[0], KEPT_S):
            return self._metadata[1]
        async with self._asking():
            if self._metadata is None or not self._is_recent(self._metadata[0], KEPT_S):
                url = issuer.rstrip("/") + "/.well-known/openid-configuration"
                status, body = await self._ask("GET", url)
                if status != 200 or body.get("issuer") != issuer:
                    raise ProviderUnavailable(
                        f"{url} answers with status {status} and issuer {str(body.get('issuer'))[:200]!r}: set "
                        "[access] oidc_issuer exactly as the provider writes it"
                    )
                self._metadata = self._now(), body
            return self._metadata[1]

    def _is_recent(self, at_s: float, within_s: float) -> bool:
        """Return False also for a time in the future: the clock was put back."""
        return 0 <= self._now() - at_s < within_s

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Hold the lock of requests whose answers are kept. Whoever waited for a request that failed gets its error, or
        else many would wait TIMEOUT_S each, one after the other. Raises ProviderUnavailable."""
        begun_s = time.monotonic()
        async with self._one:
            if self._failure is not None and self._failure[0] > begun_s:
                raise ProviderUnavailable(self._failure[1])
            try:
                yield
            except ProviderUnavailable as error:
                self._failure = time.monotonic(), str(error)
                raise

    async def _ask(self, method: str, url: str, **more: Any) -> tuple[int, Mapping[str, Any]]:
        """Return status and JSON object of an answer; an empty one if it is none. Raises ProviderUnavailable."""
        import httpx
        import orjson

        try:
            async with asyncio.timeout(TIMEOUT_S):
                async with self._client.stream(method, url, **more) as answer:
                    content = b""
                    async for part in answer.aiter_bytes():
                        if len(content := content + part) > MOST_BYTES:
                            raise ProviderUnavailable(f"{url} answers with more than {MOST_BYTES:,} bytes")
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise ProviderUnavailable(f"{url} does not answer: {type(error).__name__}: try again later") from None
        if answer.status_code >= 500:
            raise ProviderUnavailable(f"{url} answers with status {answer.status_code}: try again later")
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            body = None
        return answer.status_code, body if isinstance(body, dict) else {}


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _storable(text: str) -> str:
    """Return a text that fits into a cookie and a record; JSON may hold halves of characters."""
    return text.encode(errors="replace").decode()[:200]


def _error_text(error: Exception) -> str:
    """Return the part of an error's message that holds nothing of the token's content."""
    return str(getattr(error, "description", "") or getattr(error, "claim", "") or "malformed")[:200]
