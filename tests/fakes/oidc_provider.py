"""An OpenID Connect provider on the loopback that checks what a client sends, and misbehaves where it is told to."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import parse_qs, urlencode

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.infra.roles.probe import client_url

CLIENT, SECRET = "turnlog", "a-secret-of-the-client"
PEOPLE: dict[str, dict[str, Any]] = {
    "ann": {"email": "ann@example.org", "email_verified": True, "groups": ["rl-owners", "rl"]},
    "oli": {"email": "oli@example.org", "email_verified": True, "groups": ["rl-operators"]},
    "rob": {"email": "rob@example.org", "email_verified": True, "groups": ["rl"]},
    "eve": {"email": "ann@example.org", "email_verified": False, "groups": []},
}
ROLES = (
    "groups=rl:reader", "groups=rl-operators:operator", "groups=rl-owners:owner", "email=ann@example.org:owner",
)  # fmt: skip


class FakeOidcProvider:
    """A provider with the people above."""

    def __init__(self) -> None:
        self.issuer = ""
        self.key = ECKey.generate_key("P-256", {"kid": "first", "use": "sig"})
        self.faults: set[str] = set()
        """Which parts misbehave: nonce, audience, azp, expired, early, none, hmac, unsigned_by_us, no_sub, logout,
        down, issuer, plain, large, no_keys."""
        self.lasts_s = 3600
        self.former: list[ECKey] = []
        """Keys before those of `rotate`."""
        self.answering, self.asked = asyncio.Event(), asyncio.Event()
        """Cleared: requests wait for their answers. `asked`: one waits."""
        self.answering.set()
        self.requests: list[str] = []
        """Path and query of each request."""
        self._codes: dict[str, tuple[str, dict[str, str]]] = {}

    def rotate(self) -> None:
        """Sign with another key from now on, and publish no other."""
        self.former.append(self.key)
        self.key = ECKey.generate_key("P-256", {"kid": f"key-{len(self.former)}", "use": "sig"})

    def token(self, subject: str, nonce: str = "", **more: Any) -> str:
        """Return an id token; `more` replaces claims."""
        now, faults = int(time.time()), self.faults
        claims: dict[str, Any] = {
            "iss": self.issuer, "sub": subject, "aud": CLIENT, "iat": now, "exp": now + self.lasts_s, "nonce": nonce,
            **PEOPLE.get(subject, {}), **more,
        }  # fmt: skip
        changes: dict[str, dict[str, Any]] = {
            "nonce": {"nonce": "another"}, "audience": {"aud": "another"}, "expired": {"exp": now - 120},
            "azp": {"aud": [CLIENT, "another"], "azp": "another"}, "early": {"nbf": now + 600}, "no_sub": {"sub": ""},
            "logout": {"events": {"http://schemas.openid.net/event/backchannel-logout": {}}},
        }  # fmt: skip
        for fault in faults & changes.keys():
            claims |= changes[fault]
        if faults & {"none", "hmac"}:
            head = {"alg": "none" if "none" in faults else "HS256", "kid": self.key.kid}
            signed = ".".join(_in_base64(json.dumps(part).encode()) for part in (head, claims))
            public = self.key.as_pem(private=False)  # as if it were a secret
            mac = b"" if "none" in faults else hmac.digest(public, signed.encode(), "sha256")
            return f"{signed}.{_in_base64(mac)}"
        key = ECKey.generate_key("P-256", {"kid": self.key.kid}) if "unsigned_by_us" in faults else self.key
        return jwt.encode({"alg": "ES256", "kid": self.key.kid}, claims, key)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve while the block runs; yields the issuer."""
        with closing(listening("127.0.0.1", 0, "port")) as listener:
            self.issuer = client_url("127.0.0.1", listener.getsockname()[1])
            async with QuietServer(uvicorn_config(self.application())).running(listener):
                yield self.issuer

    def application(self) -> Starlette:
        """Return the provider."""
        return Starlette(routes=[
            Route("/.well-known/openid-configuration", self._describe), Route("/jwks", self._keys),
            Route("/authorize", self._authorize, methods=["GET", "POST"]),
            Route("/token", self._token, methods=["POST"]), Route("/logout", self._logout),
        ])  # fmt: skip

    def _note(self, request: Request) -> Response | None:
        self.requests.append(f"{request.url.path}?{request.url.query}")
        return Response("down", 503) if "down" in self.faults else None

    async def _describe(self, request: Request) -> Response:
        if (down := self._note(request)) is not None:
            return down
        issuer = "https://another.example" if "issuer" in self.faults else self.issuer
        token = "http://provider.example/token" if "plain" in self.faults else f"{self.issuer}/token"
        more = {"padding": "x" * (2 << 20)} if "large" in self.faults else {}
        return JSONResponse({
            "issuer": issuer, "authorization_endpoint": f"{self.issuer}/authorize", "token_endpoint": token,
            "jwks_uri": f"{self.issuer}/jwks", "end_session_endpoint": f"{self.issuer}/logout", **more,
        })  # fmt: skip

    async def _keys(self, request: Request) -> Response:
        down = self._note(request)
        if not self.answering.is_set():
            self.asked.set()
            await self.answering.wait()
            down = Response("down", 503) if "down" in self.faults else None
        if down is not None:
            return down
        return JSONResponse({"keys": []} if "no_keys" in self.faults else KeySet([self.key]).as_dict())

    async def _authorize(self, request: Request) -> Response:
        """Log in the subject of the form, as the page of a provider does."""
        self._note(request)
        given = dict(request.query_params)
        fields = parse_qs((await request.body()).decode())
        if given.get("client_id") != CLIENT or given.get("code_challenge_method") != "S256" or not given.get("state"):
            return Response("bad request", 400)
        if "sub" not in fields:
            answer = {"error": "access_denied", "state": given["state"]}
        else:
            code = f"code-{len(self._codes)}"
            self._codes[code] = fields["sub"][0], given
            answer = {"code": code, "state": given["state"]}
        return RedirectResponse(f"{given['redirect_uri']}?{urlencode(answer)}", 302)

    async def _token(self, request: Request) -> Response:
        if (down := self._note(request)) is not None:
            return down
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        subject, given = self._codes.pop(form.get("code", ""), ("", {}))
        challenge = _in_base64(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        login = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        right = (
            request.headers.get("authorization") == f"Basic {login}"
            and given.get("redirect_uri") == form.get("redirect_uri")
            and given.get("code_challenge") == challenge
        )
        if not subject or not right:
            return JSONResponse({"error": "invalid_grant"}, 400)
        return JSONResponse({"id_token": self.token(subject, given.get("nonce", "")), "token_type": "Bearer"})

    async def _logout(self, request: Request) -> Response:
        self._note(request)
        return Response("logged out")


def _in_base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
