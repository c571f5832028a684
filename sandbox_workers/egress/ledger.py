"""What one call asked of the network: an entry per request, in the order in which they began."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from turnlog.sandbox_workers.egress.refusals import Reason, Refused
from turnlog.schemas.events import EgressRequest, EgressSource
from turnlog.schemas.types import BlobRef

URL_CHARACTERS = 2000
"""Of a recorded URL, so that a call's result stays a small record; the key covers all of it."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request under way. `over`: the call had no more left."""

    over: bool
    began: float = field(default_factory=time.monotonic)
    method: str = ""
    url: str = ""
    key: str = ""
    status: int = 0
    source: EgressSource = EgressSource.refused
    reason: str = Reason.call_ended
    """Until it is known."""
    response: BlobRef | None = None
    answer: BlobRef | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    duration_s: float | None = None

    def refused(self, refused: Refused) -> None:
        """It ended so, and nothing of an answer had been passed on."""
        self.status, self.source, self.reason = refused.status, EgressSource.refused, refused.reason

    def ended(self, sent: int) -> None:
        """Whatever happens now is no part of it. `sent`: bytes of an answer's body."""
        self.response_bytes = self.response_bytes or sent
        self.duration_s = time.monotonic() - self.began

    def event(self) -> EgressRequest:
        """As it goes into the call's result."""
        elapsed = time.monotonic() - self.began
        return EgressRequest(
            method=self.method,
            url=self.url if len(self.url) <= URL_CHARACTERS else self.url[: URL_CHARACTERS - 1] + "…",
            status=self.status,
            source=self.source,
            reason=str(self.reason),
            request_sha256=self.key,
            response=self.response,
            request_bytes=self.request_bytes,
            response_bytes=self.response_bytes,
            duration_s=elapsed if self.duration_s is None else self.duration_s,
            answer=self.answer,
        )


class Requests:
    """Of one call. At most `most` are granted; one more entry tells that there were more."""

    def __init__(self, most: int) -> None:
        """Nothing was asked yet."""
        self._most = most
        self._entries: list[Entry] = []
        self._tunnels = 0
        self._asked: Counter[str] = Counter()

    def begin(self) -> Entry:
        """A request comes."""
        entry = Entry(over=len(self._entries) >= self._most or self._tunnels > self._most)
        if len(self._entries) <= self._most:
            self._entries.append(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """It was only the way to others (a granted CONNECT); a call has as many of these as requests."""
        self._tunnels += 1
        self._entries.remove(entry)

    def ordinal(self, key: str) -> int:
        """How many times this was asked before in the call."""
        self._asked[key] += 1
        return self._asked[key] - 1

    def made(self) -> tuple[EgressRequest, ...]:
        """Everything so far; complete when `serving` has ended."""
        return tuple(entry.event() for entry in self._entries)
