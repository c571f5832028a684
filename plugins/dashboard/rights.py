"""Role that each address of the dashboard needs, and how it is audited. This table is the only place with that rule:
the dashboard serves no other address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from turnlog.infra.access.audit import AccessAttempt
from turnlog.settings import AccessRole

READER, OPERATOR, OWNER = AccessRole.READER, AccessRole.OPERATOR, AccessRole.OWNER


@dataclass(frozen=True, slots=True)
class Right:
    """Right that an address needs."""

    role: AccessRole | None
    """The lowest role that may use it; None: anybody, also without a login."""
    kind: str = ""
    """Kind of what the address shows or changes, as in AccessAudited; empty if it is not audited."""
    action: str = "look"
    """look, export or act."""
    ids: tuple[str, ...] = ()
    """Parameters of the path or the query, or fields of the form, that identify what is accessed."""

    def attempt(self, request: Request, form: Mapping[str, str], *, allowed: bool) -> AccessAttempt:
        """Return what a request with these fields of a form asks for, for the audit trail."""
        given = {**request.query_params, **request.path_params, **form}
        about = tuple(str(given[name]) for name in self.ids if given.get(name))
        exported = str(request.path_params.get("form", "")) if self.action == "export" else ""
        return AccessAttempt(self.action, self.kind, about, exported, client_of(request), allowed)


def client_of(request: Request) -> str:
    """Return the address of the client; behind a proxy on this machine, that which the proxy names."""
    return "" if request.client is None else request.client.host


SESSION: Final = Right(READER, "session", ids=("id",))
RIGHTS: Final[Mapping[tuple[str, str], Right]] = {
    ("GET", "/"): Right(READER, "run"),
    ("GET", "/queues"): Right(READER, "run"),
    ("GET", "/live"): Right(READER),  # it only says that the run has moved on
    ("GET", "/sessions"): Right(READER, "sessions"),
    ("GET", "/sessions/histogram"): Right(READER, "sessions"),
    ("GET", "/sessions/total"): Right(READER, "sessions"),
    ("GET", "/sessions/{id}"): SESSION,
    ("GET", "/sessions/{id}/tokens"): SESSION,
    ("GET", "/sessions/{id}/images/{name}"): SESSION,
    ("GET", "/sessions/{id}/export/{form}"): Right(OWNER, "session", "export", ids=("id",)),
    ("GET", "/compare"): Right(READER, "session", ids=("left", "right")),
    ("GET", "/groups/{id}"): Right(READER, "group", ids=("id",)),
    ("GET", "/batches"): Right(READER, "batches"),
    ("GET", "/batches/{number}"): Right(READER, "batch", ids=("number",)),
    ("GET", "/weights"): Right(READER, "weights"),
    ("GET", "/timeline"): Right(READER, "timeline"),
    ("GET", "/sandboxes"): Right(READER, "sandboxes"),
    ("GET", "/sandboxes/pools"): Right(READER, "sandboxes"),
    ("GET", "/against"): Right(READER, "against"),
    ("GET", "/against/{name}"): Right(READER, "against", ids=("name",)),
    ("GET", "/against/{name}/samples"): Right(READER, "against", ids=("name",)),
    ("GET", "/cheating"): Right(READER, "cheating"),
    ("GET", "/lineage"): Right(READER, "lineage", ids=("weights", "session")),
    ("GET", "/records/{topic}/{partition}/{offset}"): Right(READER, "record", ids=("topic", "partition", "offset")),
    ("GET", "/dead-letters"): Right(READER, "dead-letters"),
    ("POST", "/dead-letters/requeue"): Right(OPERATOR, "requeue", "act", ids=("letter",)),
    ("POST", "/dead-letters/skip"): Right(OPERATOR, "skip", "act", ids=("place",)),
    ("POST", "/notes"): Right(OPERATOR, "note", "act", ids=("subject",)),
    ("GET", "/audit"): Right(OWNER, "audit"),
    ("POST", "/logins/end"): Right(OWNER, "logins", "act", ids=("subject",)),
    ("GET", "/login"): Right(None),
    ("GET", "/login/provider"): Right(None),
    ("GET", "/login/callback"): Right(None),
    ("POST", "/logout"): Right(READER),
}
"""(method, path) -> right. A HEAD request has the right of its GET."""
OPEN: Final = ("/static/", *(path for (_, path), right in RIGHTS.items() if right.role is None))
"""Addresses that need no login; /static/ holds only files of turnlog's own."""


def is_open(path: str) -> bool:
    """Return True if an address needs no login."""
    return path in OPEN or path.startswith("/static/")
