"""Access control of the dashboard: an ASGI middleware around its pages.

* Host: a loopback name, a numeric address, or one of [dashboard] hosts. Foreign names that resolve to this server (DNS
  rebinding) are rejected.
* Reading over the loopback needs no login unless [dashboard] login or [access] requires one. Over other addresses,
  every page does.
* Changes need a POST from a login, sent by a page of this dashboard (Origin), with that login's form token (CSRF).
* A login starts with a link that works once, or at the OpenID Connect provider. It is a cookie that scripts cannot read
  and other sites cannot send. Programs send a bearer token with each request instead.
* Every answer has a content policy that allows only the dashboard's own files.

Which role an address needs stands in `rights`; the pages check it. Links, cookies and form tokens are HMACs under one
key ([dashboard] key, else the run's own). Nothing is stored except logins that were ended early.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnlog.infra.access import (
    AccessFailure,
    AuditUnavailable,
    NoMappedRole,
    Person,
    ProviderUnavailable,
    TokenRejected,
)
from turnlog.infra.access.audit import AccessAttempt, AuditTrail
from turnlog.infra.access.bearers import Bearers
from turnlog.infra.roles.health import BodyTooLarge, body_of
from turnlog.infra.roles.probe import leads_nowhere_else, parse_host
from turnlog.infra.run_folder import DASHBOARD_KEY, kept_secret, lock_file, present, replace_private
from turnlog.plugins.dashboard import Refused
from turnlog.plugins.dashboard.provider_login import (
    BEGIN,
    CALLBACK,
    PENDING_S,
    ProviderLogin,
    continue_at,
    simple_page,
)
from turnlog.plugins.dashboard.rights import RIGHTS, client_of, is_open
from turnlog.secret_files import SecretUnusable
from turnlog.settings import AccessRole

log = logging.getLogger(__name__)
ENDED: Final = Path("dashboard.ended")
"""File in the run's folder: the HMAC of each login that was ended, or `of SUBJECT` for all that a subject had, and the
time at which the newest of them expires and may be forgotten."""
LINK_S: Final = 900.0
"""Validity of a login link in seconds."""
LOGIN_S: Final = 7 * 86400.0
"""Validity of a login in seconds."""
SKEW_S: Final = 5.0
"""Seconds by which the clocks of two dashboards of a run may differ."""
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
STATUS: Final[Mapping[type[AccessFailure], int]] = {
    ProviderUnavailable: 503, TokenRejected: 401, NoMappedRole: 403, AuditUnavailable: 503,
}  # fmt: skip
NOBODY: Final = Person()
LINKED: Final = Person("link", "link", AccessRole.OWNER)
FIELD: Final = "form_token"


@dataclass(frozen=True, slots=True)
class SignedToken:
    """Content of a link or a cookie of ours."""

    body: Mapping[str, Any]
    made_s: float
    """Seconds since 1970 at which it was issued."""


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

    def link_token(self, url: str, *, role: AccessRole = AccessRole.OWNER, printed_by: str = "") -> str:
        """Return a token for a link to the dashboard at `url`. It works once, within LINK_S seconds, and logs in with
        `role`. `printed_by` is the user who has it printed, for the audit trail."""
        return self._sign_token("link", {"role": role, "by": printed_by}, url)

    def take_link(self, token: str, url: str) -> Person:
        """Use up a link token, and return whom it logs in. Raises Refused if it was used, expired, was issued before
        this process started, or belongs to another dashboard."""
        found = self._verify_token("link", token, url, LINK_S)
        if found is None or found.made_s < self._begun or _mac_of(token) in self._used:
            raise Refused(403, "this login link was used or has expired: `turnlog dashboard link` prints another")
        kept = {one: at for one, at in self._used.items() if at > self._now() - LINK_S}
        self._used = kept | {_mac_of(token): found.made_s}
        by = found.body["by"]
        return Person(f"link:{by}" if by else LINKED.subject, "link", AccessRole(found.body["role"]))

    def login(self, person: Person = LINKED, lasts_s: float = LOGIN_S) -> str:
        """Return the cookie value of a new login, which is valid for `lasts_s` seconds and at most LOGIN_S."""
        until = self._now() + min(LOGIN_S, lasts_s)
        body = {"sub": person.subject, "by": person.login, "role": person.role, "name": person.name, "until": until}
        return self._sign_token("login", body, "")

    def find_login(self, cookie: str) -> Person | None:
        """Return who the cookie logs in; None if it is no login of ours, has expired or has ended."""
        found = self._verify_token("login", cookie, "", LOGIN_S)
        if found is None or self._now() > found.body["until"]:
            return None
        ends, body = self._ends(), found.body
        if _mac_of(cookie) in ends or found.made_s <= ends.get(_all_of(body["sub"]), 0.0) - LOGIN_S + 0.001:
            return None
        return Person(body["sub"], body["by"], AccessRole(body["role"]), body["name"], body["until"])

    def sign_begun(self, body: Mapping[str, str]) -> str:
        """Return the cookie value of a login that was begun at the provider."""
        return self._sign_token("begun", body, "")

    def find_begun(self, cookie: str) -> Mapping[str, str] | None:
        """Return what a login needs on its return; None if the cookie is not ours or has expired."""
        found = self._verify_token("begun", cookie, "", PENDING_S)
        return None if found is None else found.body

    def is_login(self, cookie: str) -> bool:
        """Return whether the cookie is a valid login that has neither expired nor ended."""
        return self.find_login(cookie) is not None

    def end_all(self, subject: str) -> None:
        """Invalidate every login that a subject has now, at every dashboard of the run."""
        self._end(_all_of(subject))

    def end(self, cookie: str) -> None:
        """Log out: invalidate the cookie and all copies of it, at every dashboard of the run."""
        self._end(_mac_of(cookie))

    def _end(self, key: str) -> None:
        with lock_file(self._ended.with_name(f"{self._ended.name}.lock")):  # another dashboard may end a login now
            kept = {each: until for each, until in self._ends().items() if until > self._now()}
            replace_private(self._ended, json.dumps(kept | {key: self._now() + LOGIN_S}))

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

    def _sign_token(self, kind: str, body: Mapping[str, object], about: str) -> str:
        text = base64.urlsafe_b64encode(json.dumps(body, ensure_ascii=False).encode()).rstrip(b"=").decode()
        made, nonce = f"{self._now():.3f}", secrets.token_urlsafe(18)
        return f"{text}~{made}~{nonce}~{self._mac(kind, text, made, nonce, about)}"

    def _verify_token(self, kind: str, token: str, about: str, lasts_s: float) -> SignedToken | None:
        """Return what a token says; None if it is not ours or has expired."""
        parts = token.split("~")
        if not token.isascii() or len(parts) != 4:
            return None
        text, made, nonce, mac = parts
        if not hmac.compare_digest(mac, self._mac(kind, text, made, nonce, about)):
            return None
        if not -SKEW_S <= self._now() - float(made) <= lasts_s:  # from the future: a clock was wrong
            return None
        return SignedToken(json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))), float(made))

    def _mac(self, *parts: str) -> str:
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(present(self._key).encode(), text.encode(), sha256).hexdigest()


def _all_of(subject: str) -> str:
    return f"of {subject}"


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
    login_s: float = 0.0
    """[access] login_s."""
    secure: bool = False
    """True if browsers reach it over TLS, as [dashboard] url says."""


@dataclass(slots=True)
class Visitor:
    """Sender of a request; stored in the request's state."""

    cookie: str = ""
    """Login cookie; empty without a login, and for programs."""
    form_token: str = field(default="", repr=False)
    person: Person = NOBODY
    issuer: str = ""
    """Provider at which people can log in; empty if there is none."""

    @property
    def logged_in(self) -> bool:
        return bool(self.cookie)

    def may(self, role: str) -> bool:
        """Return True if the visitor has the rights of that role in a browser: the page then shows its forms."""
        return self.logged_in and self.person.may(AccessRole(role))


class Guard:
    """The middleware; `pages` is the application that it protects."""

    def __init__(
        self, pages: ASGIApp, keys: Keys, rules: Rules, trail: AuditTrail, bearers: Bearers,
        provider: ProviderLogin | None,
    ) -> None:  # fmt: skip
        """`provider` is None without [access] oidc_issuer."""
        self._pages = pages
        self._keys = keys
        self._rules = rules
        self._trail, self._bearers, self._provider = trail, bearers, provider

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and answer it, or pass it to the pages."""
        if scope["type"] != "http":
            raise Refused(400, f"{scope['type']}: only HTTP is supported here")
        request = Request(scope, receive)
        path: str = scope["path"]  # as routed; request.url also depends on the Host header
        try:
            self._check_host(request)
            visitor = await self._visitor(request)
            scope.setdefault("state", {})["visitor"] = visitor
            await self._check(request, visitor)
            answer = await self._own_answer(request, visitor)
            if answer is None:
                await self._pages(scope, receive, _with_headers(send, path))
                return
        except NotLoggedIn as refusal:
            answer = self._ask_to_log_in(request, refusal)
        except Refused as refusal:
            answer = Response(f"{refusal}\n", refusal.status, media_type="text/plain")
        except AccessFailure as failure:
            answer = self._failure_page(request, failure)
        await answer(scope, receive, _with_headers(send, path))

    async def _own_answer(self, request: Request, visitor: Visitor) -> Response | None:
        """Answer a request about logins; None for all others. Raises Refused, AccessFailure."""
        match request.method, request.scope["path"]:
            case "GET", "/login" if request.query_params.get("token"):
                return await self._logged_in(request)
            case "GET", path if path == BEGIN and self._provider is not None:
                return await self._provider.begin(request)
            case "GET", path if path == CALLBACK and self._provider is not None:
                return await self._finish_login(request, self._provider)
            case "POST", "/logout":
                return await self._logged_out(request, visitor)
        return None

    async def _visitor(self, request: Request) -> Visitor:
        """Return who sends a request. Raises TokenRejected, NoMappedRole, ProviderUnavailable, AuditUnavailable."""
        issuer = "" if self._provider is None else self._provider.issuer
        authorization = request.headers.get("authorization", "")
        is_bearer = authorization.lower().startswith("bearer ")  # a proxy may leave its own Basic login here
        if is_bearer and self._bearers.configured and not is_open(request.scope["path"]):
            try:
                return Visitor(person=await self._bearers.person(authorization), issuer=issuer)
            except NoMappedRole as denied:
                await self._trail.record(
                    denied.person, AccessAttempt("look", "run", address=client_of(request), allowed=False)
                )
                raise
        cookie = request.cookies.get(self._rules.cookie, "")
        person = self._keys.find_login(cookie) if cookie else None
        if person is None:
            return Visitor(person=Person(role=None if self._rules.login else AccessRole.READER), issuer=issuer)
        return Visitor(cookie, self._keys.form_token(cookie), person, issuer)

    def _ask_to_log_in(self, request: Request, refusal: NotLoggedIn) -> Response:
        """Lead a browser that opens a page to the provider; answer anything else with status 401."""
        opens = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if self._provider is not None and opens and request.headers.get("sec-fetch-mode", "navigate") == "navigate":
            page = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"{BEGIN}?next={quote(page, safe='')}", 303)
        return Response(f"{refusal}\n", refusal.status, media_type="text/plain")

    def _failure_page(self, request: Request, failure: AccessFailure) -> Response:
        status = next(code for kind, code in STATUS.items() if isinstance(failure, kind))
        if "text/html" not in request.headers.get("accept", ""):
            more = {"www-authenticate": "Bearer"} if status == 401 else {}
            return Response(f"{failure}\n", status, more, media_type="text/plain")
        said = Markup('<p>{}</p><p><a href="/login">Log in</a></p>').format(failure)
        return simple_page(type(failure).__name__, said, status)

    def _check_host(self, request: Request) -> None:
        """Check host and method. Raises Refused."""
        host = request.headers.get("host", "")
        if not self._knows(host):
            raise Refused(
                421, f"{host[:200]!r} is not a name of this dashboard: use its IP address, or add the name to "
                "[dashboard] hosts"
            )  # fmt: skip
        if request.method not in ("GET", "HEAD", "POST"):
            raise Refused(405, f"{request.method[:20]} is not served")

    async def _check(self, request: Request, visitor: Visitor) -> None:
        """Check login and origin, and record an action that lacks a login. Raises Refused, AuditUnavailable."""
        if visitor.person.role is None and not is_open(request.scope["path"]):
            raise NotLoggedIn
        if request.method == "POST":
            self._check_origin(request)
            if not visitor.logged_in:
                right = RIGHTS.get(("POST", request.scope["path"]))
                if right is not None and right.kind:
                    await self._trail.record(visitor.person, right.attempt(request, {}, allowed=False))
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

    async def _logged_in(self, request: Request) -> Response:
        """Exchange a link for a login cookie. Raises Refused, AuditUnavailable."""
        person = self._keys.take_link(request.query_params["token"], self._rules.url)
        await self._trail.record(person, AccessAttempt("login", "login", address=client_of(request)))
        answer = RedirectResponse("/", 303)
        self._set_login(request, answer, person, LOGIN_S)
        return answer

    async def _finish_login(self, request: Request, provider: ProviderLogin) -> Response:
        """Exchange the code of the provider for a login cookie. Raises AccessFailure."""
        attempt = AccessAttempt("login", "login", address=client_of(request))
        try:
            person, page = await provider.finish(request)
        except NoMappedRole as denied:
            await self._trail.record(denied.person, replace(attempt, allowed=False))
            raise
        await self._trail.record(person, attempt)
        left_s = LOGIN_S if person.expires_s is None else person.expires_s - time.time()
        answer = continue_at(page, "Logged in")
        self._set_login(request, answer, person, max(1.0, min(LOGIN_S, self._rules.login_s or left_s)))
        provider.forget(request, answer)
        return answer

    def _set_login(self, request: Request, answer: Response, person: Person, lasts_s: float) -> None:
        answer.set_cookie(
            self._rules.cookie, self._keys.login(person, lasts_s), max_age=int(lasts_s), httponly=True,
            samesite="strict", secure=self._rules.secure or request.url.scheme == "https", path="/",
        )  # fmt: skip

    async def _logged_out(self, request: Request, visitor: Visitor) -> Response:
        """End the login, and that of the provider if it can. Raises Refused."""
        await checked_form(request)
        self._keys.end(visitor.cookie)
        url = ""
        if self._provider is not None and visitor.person.login == "oidc":
            try:
                url = await self._provider.logout_url(request)
            except ProviderUnavailable as error:
                log.warning("logged out here, but not at the provider: %s", error)
        page = "/login" if self._provider is not None else "/"  # the first page would lead back to the provider
        answer: Response = continue_at(url, "Logged out") if url else RedirectResponse(page, 303)
        answer.delete_cookie(self._rules.cookie, path="/", httponly=True, samesite="strict")
        return answer


class NotLoggedIn(Refused):
    """Remedy: log in."""

    def __init__(self) -> None:
        super().__init__(401, "log in first: `turnlog dashboard link` prints a single-use link")


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
