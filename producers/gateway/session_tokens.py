"""Signed session tokens: the API key of one session, good for nothing else. base64url(claims).base64url(HMAC-SHA256).

A token carries what a gateway needs to find the session on the log after a crash of the one that opened it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

import orjson

from turnlog.infra.private_files import GATEWAY_KEY, kept_secret
from turnlog.producers.gateway.errors import Unauthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a session's token says of it."""

    session_id: str
    group_id: str
    floor: int
    min_weight_version: int = -1
    pin_weight_version: int | None = None
    max_context_tokens: int = 0
    """0: the model's own window."""


def signing_key(configured: str, directory: Path) -> bytes:
    """The configured key, else the one in the run's directory, made with mode 0600 when it is not there."""
    if configured:
        return configured.encode()
    return kept_secret(directory / GATEWAY_KEY).encode()


def sign(claims: Claims, key: bytes) -> str:
    """The token of a session."""
    payload = _encoded(orjson.dumps(dataclasses.astuple(claims)))
    return f"{payload}.{_mac(payload, key)}"


def verify(token: str, key: bytes) -> Claims:
    """The claims of a token that we signed. Raises Unauthorized."""
    payload, _, mac = token.partition(".")
    if not mac or not hmac.compare_digest(mac.encode(), _mac(payload, key).encode()):
        raise Unauthorized("the Authorization header must carry the token that POST /sessions gave: Bearer <token>")
    session_id, group_id, floor, least, pin, window = orjson.loads(_decoded(payload))
    return Claims(
        session_id=session_id,
        group_id=group_id,
        floor=floor,
        min_weight_version=least,
        pin_weight_version=pin,
        max_context_tokens=window,
    )


def bearer(header: str | None) -> str:
    """The credential of an Authorization header; "" when there is none."""
    scheme, _, credential = (header or "").partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""


def require_key(header: str | None, key: bytes) -> None:
    """Raises Unauthorized unless the header carries the gateway's own key."""
    if not hmac.compare_digest(bearer(header).encode(), key):
        raise Unauthorized(
            f"opening a session needs the gateway's signing key: Bearer <content of {GATEWAY_KEY} in the run's "
            "directory, or [gateway] signing_key>"
        )


def _mac(payload: str, key: bytes) -> str:
    return _encoded(hmac.digest(key, payload.encode(), hashlib.sha256))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
