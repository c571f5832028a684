"""The audit trail of a run: who looked at it, exported from it, acted on it or logged in (docs/access.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from turnlog.infra.history import events, partitions
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import AccessAudited


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A record of the audit trail."""

    time_ms: int
    """Milliseconds since 1970 at which it was written."""
    offset: int
    access: AccessAudited


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Filter of entries; an empty string matches all."""

    subject: str = ""
    kind: str = ""
    about: str = ""
    """An id of what was accessed."""
    action: str = ""
    denied: bool = False
    """Only what was denied."""

    def matches(self, access: AccessAudited) -> bool:
        """Return True if the entry passes the filter."""
        wanted = ((self.subject, access.subject), (self.kind, access.kind), (self.action, access.action))
        same = all(not word or word == there for word, there in wanted)
        return same and (not self.about or self.about in access.about) and not (self.denied and access.allowed)


async def entries(role: Role, asked: AuditFilter, *, newest: int | None = None) -> AsyncIterator[AuditEntry]:
    """Yield the entries that pass, oldest first. With `newest`, only that many records of the topic are read. Raises
    LogError."""
    since = None
    if newest is not None:
        ends = await role.log.end_offsets(partitions(role, topics.AUDIT))
        since = {place: max(0, end - newest) for place, end in ends.items()}
    async for record, event in events(role, topics.AUDIT, since=since):
        if isinstance(event, AccessAudited) and asked.matches(event):
            yield AuditEntry(record.timestamp_ms, record.offset, event)


READ = 20_000
"""Number of the newest records among which `newest_entries` searches."""


async def newest_entries(role: Role, asked: AuditFilter, *, most: int) -> Sequence[AuditEntry]:
    """Return at most `most` entries that pass, newest first, among the newest READ records. Raises LogError."""
    kept: deque[AuditEntry] = deque(maxlen=most)
    async for entry in entries(role, asked, newest=READ):
        kept.append(entry)
    return list(reversed(kept))
