"""Logins at the dashboard through the OpenID Connect provider: to the provider, back, and logout.

A login that was begun is kept in a signed cookie of the browser that began it, and works there within ten minutes. So
no stranger can use up places for logins, and it does not matter which dashboard the browser comes back to. The code of
the provider works once. Its tokens stay in this process and are forgotten at once.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import Final, Protocol

from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from turnlog.infra.access import Person, TokenRejected
from turnlog.infra.access.oidc import OidcProvider

BEGIN: Final = "/login/provider"
CALLBACK: Final = "/login/callback"
PENDING_S: Final = 600.0
"""Seconds within which somebody has to log in at the provider."""


class LoginTokens(Protocol):
    """Signs what a login needs on its return."""

    def sign_begun(self, body: Mapping[str, str]) -> str:
        """Return a token with `body`."""
        ...

    def find_begun(self, token: str) -> Mapping[str, str] | None:
        """Return the body of a token that was signed within PENDING_S seconds, else None."""
        ...


class ProviderLogin:
    """Logins of one dashboard through its provider."""

    def __init__(self, provider: OidcProvider, issuer: str, cookie: str, url: str, tokens: LoginTokens) -> None:
        """`cookie` begins the names of the cookies of logins that were begun; `url` is [dashboard] url."""
        self.issuer = issuer
        self._provider, self._cookie, self._url, self._tokens = provider, cookie, url.rstrip("/"), tokens

    async def begin(self, request: Request) -> Response:
        """Redirect to the provider. Raises ProviderUnavailable."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return_to = self._own(request) + CALLBACK
        url = await self._provider.authorization_url(return_to, state=state, nonce=nonce, verifier=verifier)
        page = own_page(request.query_params.get("next", ""))
        begun = {"state": state, "nonce": nonce, "verifier": verifier, "return_to": return_to, "page": page}
        answer = RedirectResponse(url, 303)
        answer.set_cookie(  # lax, because the provider's page sends the browser back here
            self._name(state), self._tokens.sign_begun(begun), max_age=int(PENDING_S), httponly=True, samesite="lax",
            secure=self._own(request).startswith("https"), path="/login",
        )  # fmt: skip
        return answer

    async def finish(self, request: Request) -> tuple[Person, str]:
        """Return who has logged in, and the page to show. Raises TokenRejected, NoMappedRole, ProviderUnavailable."""
        given = request.query_params
        state = given.get("state", "")
        begun = self._tokens.find_begun(request.cookies.get(self._name(state), ""))
        if begun is None or not hmac.compare_digest(begun["state"].encode(), state.encode()):
            raise TokenRejected(
                "this login was not begun in this browser, was completed, or took too long: log in again"
            )
        if "code" not in given:
            raise TokenRejected(
                f"the provider refused the login ({given.get('error', 'no code')[:100]!r}): log in again"
            )
        person = await self._provider.redeem_code(
            given["code"], begun["return_to"], nonce=begun["nonce"], verifier=begun["verifier"]
        )
        return person, begun["page"]

    async def logout_url(self, request: Request) -> str:
        """Return the address at which the provider ends its login, or "". Raises ProviderUnavailable."""
        return await self._provider.logout_url(self._own(request) + "/login")

    def forget(self, request: Request, answer: Response) -> None:
        """Delete the cookie of a login that has returned."""
        name = self._name(request.query_params.get("state", ""))
        answer.delete_cookie(name, path="/login", httponly=True, samesite="lax")

    def _name(self, state: str) -> str:
        """Return the name of a login's cookie: several tabs may log in at once."""
        return f"{self._cookie}-{sha256(state.encode()).hexdigest()[:12]}"

    def _own(self, request: Request) -> str:
        """Return the address of the dashboard as the browser knows it. The guard has checked the Host header."""
        return self._url or f"{request.url.scheme}://{request.headers['host']}"


def own_page(text: str) -> str:
    """Return the path and query of a page of this dashboard; "/" for anything that could lead elsewhere."""
    safe = text.startswith("/") and not text.startswith(("//", "/\\", "/login")) and len(text) < 2000
    return text if safe and text.isascii() and text.isprintable() and "\\" not in text else "/"


def continue_at(url: str, words: str) -> HTMLResponse:
    """Return a page that leads on to `url`. A redirect would not do: browsers send no strict cookie with a redirect
    that another site began, and follow none to another site after a form."""
    return simple_page(words, Markup('<p><a href="{}">Continue</a></p>').format(url), refresh=url)


def simple_page(title: str, body: str | Markup, status: int = 200, *, refresh: str = "") -> HTMLResponse:
    """Return a page of a heading and a body, without a script or a style."""
    head = Markup('<meta http-equiv="refresh" content="0;url={}">').format(refresh) if refresh else ""
    text = Markup(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">{}<title>{} · turnlog</title></head>'
        "<body><h1>{}</h1>{}</body></html>"
    ).format(head, title, title, escape(body))
    return HTMLResponse(text, status)
