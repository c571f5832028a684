"""Access control of the dashboard: an ASGI middleware around its pages.

* Host: a loopback name, a numeric address, or one of [dashboard] hosts. Foreign names that resolve to this server (DNS
  rebinding) are rejected.
* Reading over the loopback needs no login unless [dashboard] login requires one. Over other addresses, every page does.
* Changes need a POST from a login, sent by a page of this dashboard (Origin), with that login's form token (CSRF).
* A login starts with a link that works once. It is a cookie that scripts cannot read and other sites cannot send.
* Every answer has a content policy that allows only the dashboard's own files.

Links, cookies and form tokens are HMACs under one key ([dashboard] key, else the run's own). Nothing is stored except
logins that were ended early.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnlog.infra.roles.health import BodyTooLarge, body_of
from turnlog.infra.roles.probe import leads_nowhere_else, parse_host
from turnlog.infra.run_folder import DASHBOARD_KEY, kept_secret, present, replace_private
from turnlog.plugins.dashboard import Refused
from turnlog.secret_files import SecretUnusable

ENDED: Final = Path("dashboard.ended")
"""File in the run's folder: the HMAC of each login that was ended, and the time at which it expires and may be
forgotten."""
LINK_S: Final = 900.0
"""Validity of a login link in seconds."""
LOGIN_S: Final = 7 * 86400.0
"""Validity of a login in seconds."""
FORM_BYTES: Final = 131_072
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {  # not no-referrer: browsers would then send "Origin: null" with our own forms
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
OPEN: Final = ("/login", "/static/")
"""Paths that need no login."""
FIELD: Final = "form_token"


class Keys:
    """Issuer and verifier of login links, login cookies and form tokens."""

    def __init__(self, configured: str, directory: Path, now: Callable[[], float] = time.time) -> None:
        """`configured` is [dashboard] key; if empty, a key is created in the run's directory with mode 0600. Raises
        SecretUnusable, also if the list of ended logins cannot be read: otherwise all of them would be valid again."""
        self._key = configured or kept_secret(directory / DASHBOARD_KEY)
        self._ended = directory / ENDED
        self._now = now
        self._begun = now()
        self._used: dict[str, float] = {}
        self._ends()

    def link_token(self, url: str) -> str:
        """Return a token for a link to the dashboard at `url`. It works once, within LINK_S seconds."""
        return self._sign_token("link", url)

    def take_link(self, token: str, url: str) -> None:
        """Use up a link token. Raises Refused if it was used, expired, was issued before this process started, or
        belongs to another dashboard."""
        made = self._verify_token("link", token, url, LINK_S)
        if made is None or made < self._begun or token in self._used:
            raise Refused(403, "this login link was used or has expired: `turnlog dashboard link` prints another")
        self._used = {one: at for one, at in self._used.items() if at > self._now() - LINK_S} | {token: made}

    def login(self) -> str:
        """Return the cookie value of a new login."""
        return self._sign_token("login", "")

    def is_login(self, cookie: str) -> bool:
        """Return whether the cookie is a valid login that has neither expired nor ended."""
        return self._verify_token("login", cookie, "", LOGIN_S) is not None and _mac_of(cookie) not in self._ends()

    def end(self, cookie: str) -> None:
        """Log out: invalidate the cookie and all copies of it, at every dashboard of the run."""
        kept = {mac: until for mac, until in self._ends().items() if until > self._now()}
        replace_private(self._ended, json.dumps(kept | {_mac_of(cookie): self._now() + LOGIN_S}))

    def _ends(self) -> dict[str, float]:
        try:
            return json.loads(self._ended.read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SecretUnusable(
                f"{self._ended} cannot be read, so ended logins are unknown ({error}): restore it, or end all logins "
                f"by deleting it together with {DASHBOARD_KEY}"
            ) from error

    def form_token(self, cookie: str) -> str:
        """Return the token that forms of this login carry."""
        return self._mac("form", cookie, "", "")

    def _sign_token(self, kind: str, about: str) -> str:
        made, nonce = f"{self._now():.3f}", secrets.token_urlsafe(18)
        return f"{made}~{nonce}~{self._mac(kind, made, nonce, about)}"

    def _verify_token(self, kind: str, text: str, about: str, lasts_s: float) -> float | None:
        """Return when a token was issued; None if it is not ours or has expired."""
        made, _, rest = text.partition("~")
        nonce, _, mac = rest.partition("~")
        if not text.isascii() or not hmac.compare_digest(mac, self._mac(kind, made, nonce, about)):
            return None
        return float(made) if self._now() - float(made) <= lasts_s else None

    def _mac(self, *parts: str) -> str:
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(present(self._key).encode(), text.encode(), sha256).hexdigest()


def _mac_of(text: str) -> str:
    return text.rpartition("~")[2]


@dataclass(frozen=True, slots=True)
class Rules:
    """Access rules of one dashboard."""

    hosts: frozenset[str]
    """Host names that are accepted besides numeric addresses and loopback names."""
    login: bool
    """True if reading requires a login, too."""
    cookie: str
    """Name of the cookie. It differs by run, because browsers share cookies between all ports of a host."""
    url: str
    """Address of the dashboard. Links are valid for one dashboard only."""


@dataclass(slots=True)
class Visitor:
    """Sender of a request; stored in the request's state."""

    cookie: str = ""
    """Login cookie; empty without a login."""
    form_token: str = field(default="", repr=False)

    @property
    def logged_in(self) -> bool:
        return bool(self.cookie)


class Guard:
    """The middleware; `pages` is the application that it protects."""

    def __init__(self, pages: ASGIApp, keys: Keys, rules: Rules) -> None:
        self._pages = pages
        self._keys = keys
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and answer it, or pass it to the pages."""
        if scope["type"] != "http":
            raise Refused(400, f"{scope['type']}: only HTTP is supported here")
        request = Request(scope, receive)
        visitor = self._visitor(request)
        path: str = scope["path"]  # as routed; request.url also depends on the Host header
        scope.setdefault("state", {})["visitor"] = visitor
        try:
            self._check(request, visitor)
            if (request.method, path) == ("GET", "/login") and request.query_params.get("token"):
                answer = self._logged_in(request)
            elif (request.method, path) == ("POST", "/logout"):
                answer = await self._logged_out(request, visitor)
            else:
                await self._pages(scope, receive, _with_headers(send, path))
                return
        except Refused as refusal:
            answer = Response(f"{refusal}\n", refusal.status, media_type="text/plain")
        await answer(scope, receive, _with_headers(send, path))

    def _visitor(self, request: Request) -> Visitor:
        cookie = request.cookies.get(self._rules.cookie, "")
        if not cookie or not self._keys.is_login(cookie):
            return Visitor()
        return Visitor(cookie, self._keys.form_token(cookie))

    def _check(self, request: Request, visitor: Visitor) -> None:
        """Check host, method and login. Raises Refused."""
        host = request.headers.get("host", "")
        if not self._knows(host):
            raise Refused(
                421, f"{host[:200]!r} is not a name of this dashboard: use its IP address, or add the name to "
                "[dashboard] hosts"
            )  # fmt: skip
        if request.method not in ("GET", "HEAD", "POST"):
            raise Refused(405, f"{request.method[:20]} is not served")
        if self._rules.login and not visitor.logged_in and not request.scope["path"].startswith(OPEN):
            raise Refused(401, "log in first: `turnlog dashboard link` prints a single-use link")
        if request.method == "POST":
            self._check_origin(request)
            if not visitor.logged_in:
                raise Refused(403, "log in first: `turnlog dashboard link` prints a single-use link")

    def _check_origin(self, request: Request) -> None:
        """Check that a page of this dashboard sent the POST. Raises Refused if another site did, or if the sender is
        unknown. Another scheme counts as another site, unless a TLS proxy is in front, as a name in [dashboard] hosts
        or the forwarded scheme shows."""
        origin, site = request.headers.get("origin", ""), request.headers.get("sec-fetch-site", "same-origin")
        host, schemes = request.headers["host"], {request.url.scheme}
        if parse_host(host) in self._rules.hosts:
            schemes.add("https")
        if origin not in {f"{scheme}://{host}" for scheme in schemes} or site != "same-origin":
            raise Refused(
                403, f"a form from another site ({origin[:200] or 'no Origin'}): actions come from pages of this site"
            )

    def _knows(self, host: str) -> bool:
        name = parse_host(host)
        return name in self._rules.hosts or leads_nowhere_else(name)

    def _logged_in(self, request: Request) -> Response:
        """Exchange a link for a login cookie. Raises Refused."""
        self._keys.take_link(request.query_params["token"], self._rules.url)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._rules.cookie, self._keys.login(), max_age=int(LOGIN_S), httponly=True, samesite="strict",
            secure=request.url.scheme == "https", path="/",
        )  # fmt: skip
        return answer

    async def _logged_out(self, request: Request, visitor: Visitor) -> Response:
        """End the login. Raises Refused."""
        await checked_form(request)
        self._keys.end(visitor.cookie)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(self._rules.cookie, path="/", httponly=True, samesite="strict")
        return answer


async def checked_form(request: Request) -> Mapping[str, str]:
    """Return the fields of a POST from a login with its form token. Raises Refused."""
    visitor: Visitor = request.scope["state"]["visitor"]
    try:
        body = await body_of(request, FORM_BYTES, "send the form of the page")
        fields = {name: values[-1] for name, values in parse_qs(body.decode(), keep_blank_values=True).items()}
    except (BodyTooLarge, ValueError) as error:
        raise Refused(400, f"not a form: {error}") from error
    if not visitor.logged_in or not hmac.compare_digest(fields.get(FIELD, "").encode(), visitor.form_token.encode()):
        raise Refused(403, "this form belongs to another login: reload the page")
    return fields


def _with_headers(send: Send, path: str) -> Send:
    kept = "max-age=3600" if path.startswith("/static/") else "no-store"

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            named = {name for name, _ in message["headers"]}
            more = {"cache-control": kept} | HEADERS
            message["headers"] = [
                *message["headers"],
                *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in named),
            ]
        await send(message)

    return send_with_headers
