"""The audit trail: who looked at a run, exported from it, acted on it or logged in.

A record is on the log before the content is shown. It is written at most once an hour for the same page of the same
login, because live pages are fetched again whenever the run moves on. Exports, actions and logins are written each
time.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from turnlog.infra.access import AuditUnavailable, Person
from turnlog.infra.archive import ArchiveError
from turnlog.infra.log import LogError
from turnlog.infra.registry import RegistryError
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import NoEndpoints
from turnlog.schemas.events import AccessAudited

LOOK_S: Final = 3600.0
"""Seconds for which one record stands for all looks of a login at a page."""
LOOKS: Final = 10_000
"""Maximum number of looks that are remembered; the oldest is forgotten, and recorded again when it is repeated."""
WITHIN_S: Final = 10.0
"""Seconds after which an audit record counts as not written."""
MOST_IDS: Final = 100
"""Maximum number of ids in a record."""
ID_CHARACTERS: Final = 200
"""Maximum length of an id, a format or an address. A longer one ends with its hash, so that no two look alike."""


@dataclass(frozen=True, slots=True)
class AccessAttempt:
    """Access that is asked for."""

    action: str
    """look, export, act or login."""
    kind: str
    about: tuple[str, ...] = ()
    """Ids of what is accessed."""
    form: str = ""
    """Format of an export."""
    address: str = ""
    """Network address of the client."""
    allowed: bool = True

    def shorten(self) -> AccessAttempt:
        """Return the attempt with ids, format and address of limited length, since anybody may type them."""
        about = tuple(map(_shorten, self.about[:MOST_IDS]))
        return replace(self, about=about, form=_shorten(self.form), address=_shorten(self.address))


class AuditTrail:
    """Writer of the audit trail. Use it from one event loop."""

    def __init__(
        self, open_role: Callable[[], Awaitable[Role]], *, audited: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_role` returns a role that may write to the log; `audited` is [access] audit, without which nothing is
        written."""
        self._open_role, self._audited, self._clock = open_role, audited, clock
        self._looks: OrderedDict[tuple[Person, AccessAttempt], float] = OrderedDict()
        self._one = asyncio.Lock()

    async def record(self, person: Person, attempt: AccessAttempt) -> None:
        """Write a record and wait until it is durable, unless a recent one says the same. Raises AuditUnavailable."""
        if not self._audited:
            return
        attempt = attempt.shorten()
        try:
            async with asyncio.timeout(WITHIN_S), self._one:
                if attempt.action != "look" or not self._is_recent(person, attempt):
                    await write_access(await self._open_role(), person, attempt)
                    self._remember(person, attempt)
        except TimeoutError:
            raise AuditUnavailable(_unwritten(f"the log does not answer within {WITHIN_S:g} s")) from None
        except (LogError, ArchiveError, RegistryError, NoEndpoints) as error:
            raise AuditUnavailable(_unwritten(f"{type(error).__name__}: {error}")) from error

    def _is_recent(self, person: Person, attempt: AccessAttempt) -> bool:
        at = self._looks.get((person, attempt))
        return at is not None and self._clock() - at < LOOK_S

    def _remember(self, person: Person, attempt: AccessAttempt) -> None:
        self._looks.pop((person, attempt), None)
        if attempt.action == "look":
            self._looks[person, attempt] = self._clock()
        while len(self._looks) > LOOKS:
            self._looks.popitem(last=False)


async def write_access(role: Role, person: Person, attempt: AccessAttempt) -> None:
    """Append a record and wait until it is durable. Raises AuditUnavailable if the role reads an archive, and what
    appending raises."""
    if not role.events.writable:
        raise AuditUnavailable(_unwritten("an archive cannot be written"))
    await role.events.append(AccessAudited(
        event_id=secrets.token_hex(16), run_id=role.settings.run.id, subject=person.subject, name=person.name,
        login=person.login, role=person.role or "", action=attempt.action, kind=attempt.kind, about=attempt.about,
        form=attempt.form, address=attempt.address, allowed=attempt.allowed,
    ))  # fmt: skip


async def audit_command(role: Role, action: str, kind: str, about: tuple[str, ...] = (), form: str = "") -> None:
    """Record that a command of this machine's user reads content, if [access] audit is on. Raises AuditUnavailable."""

    async def get_role() -> Role:
        return role

    trail = AuditTrail(get_role, audited=role.settings.access.audit)
    await trail.record(Person(os_user(), "os_user"), AccessAttempt(action, kind, about, form, socket.gethostname()))


def os_user() -> str:
    """Return the name of the user who runs this process; not from the environment, which the user could set."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def _shorten(text: str) -> str:
    if len(text) <= ID_CHARACTERS:
        return text
    return text[: ID_CHARACTERS - 65] + "~" + sha256(text.encode(errors="replace")).hexdigest()


def _unwritten(why: str) -> str:
    return (
        f"the audit record could not be written, so nothing is shown: {why}. Try again once the log can be written (a "
        "run of an earlier release needs `turnlog topics apply`); [access] audit turns auditing on and off"
    )
