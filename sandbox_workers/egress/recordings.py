"""Recorded answers: a request's key, the answer stored under it, and which of several is given again.

A key is the sha256 of method, URL, body and the headers that select an answer (`SELECTING`). Authorization, cookies and
User-Agent are not part of it: secrets do not belong into a recording, and differ from run to run.

The nth identical request of call c has the place c.n of its key, `egress/CACHE/KEY/c.n`, and the first answer stored at
a place stays. Replay gives the answer at the latest place that is not after the requested one, else at the earliest. So
polling and repeated POSTs are answered as they were recorded wherever an episode does the same as the recorded one;
where it does something else, it gets the state of about that time. Neither depends on a worker's memory, so both
survive restarts. The exact answers of one recorded call are in its own result: `RecordedRequests` gives those."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs
from turnlog.sandbox_workers.egress.policy import EgressUnavailable, Reason, RequestRefused
from turnlog.schemas.events import EgressRequest, EgressSource
from turnlog.schemas.types import BlobRef

Headers = Sequence[tuple[bytes, bytes]]
"""Headers with names in lower case."""

SELECTING = frozenset(
    (b"accept", b"accept-encoding", b"accept-language", b"content-type", b"range", b"if-match", b"if-none-match",
     b"if-modified-since", b"if-unmodified-since", b"if-range")
)  # fmt: skip
"""Request headers that select the answer (RFC 9110 12, 13, 14)."""
LOCAL = frozenset((Reason.malformed, Reason.upgrade, Reason.request_bytes, Reason.requests, Reason.call_ended))
"""Refusals that are not repeated from a record: they recur by themselves, or were not caused by the request."""
ANSWER_TYPE = "application/vnd.turnlog.egress-answer+json"
_CACHE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

URL_CHARACTERS = 2000
"""Maximum characters of a recorded URL, so that a call's result stays a small record; the key covers the whole URL."""


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """An origin's answer: status, headers, and a reference to the body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: BlobRef

    def json(self, method: str, url: str) -> bytes:
        """Return the answer as it is stored; method and URL are for human readers."""
        return orjson.dumps(
            {
                "method": method,
                "url": url,
                "status": self.status,
                "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers],
                "body": {"sha256": self.body.sha256, "size": self.body.size, "media_type": self.body.media_type},
            },
            option=orjson.OPT_INDENT_2,
        )

    @classmethod
    def parse(cls, text: bytes, name: str) -> RecordedResponse:
        """Parse a stored answer. Raises BlobCorrupt for text that `json` did not write."""
        try:
            fields = orjson.loads(text)
            headers = tuple(
                (str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in fields["headers"]
            )
            body = BlobRef(
                str(fields["body"]["sha256"]), int(fields["body"]["size"]), str(fields["body"]["media_type"])
            )
            return cls(int(fields["status"]), headers, body)
        except (KeyError, TypeError, ValueError) as error:
            raise BlobCorrupt(f"{name} is not a recorded answer ({type(error).__name__}); remove it") from error


def request_key(method: str, url: str, headers: Headers, body: bytes | None) -> str:
    """Return the key of a request. `body` is None if it was not read (the request was refused before)."""
    selecting = sorted((name, value) for name, value in headers if name in SELECTING)
    parts = [method.encode(), url.encode(), b"unread" if body is None else hashlib.sha256(body).hexdigest().encode()]
    parts += [name + b": " + value for name, value in selecting]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()


class Recordings:
    """The recording `cache` in the object store."""

    def __init__(self, blobs: Blobs, cache: str) -> None:
        """Create it. Raises EgressUnavailable for an invalid name."""
        if not _CACHE.fullmatch(cache):
            raise EgressUnavailable(f"[egress] cache may only have letters, digits and ._-, got {cache!r}")
        self._blobs, self._cache = blobs, cache

    async def keep(
        self, key: str, place: tuple[int, int], request: tuple[str, str], *,
        status: int, headers: tuple[tuple[bytes, bytes], ...], content: bytes,
    ) -> tuple[BlobRef, BlobRef]:  # fmt: skip
        """Store an answer to `request` (method, URL). Return the references to the answer and to its body. Raises
        StoreUnavailable."""
        media_type = dict(headers).get(b"content-type", b"application/octet-stream").decode("latin-1")
        body = await self._blobs.put(content, media_type=media_type)
        text = RecordedResponse(status, headers, body).json(*request)
        answer = await self._blobs.put(text, media_type=ANSWER_TYPE)
        name = self._name(key, place)
        try:
            await self._blobs.get_named(name)
        except BlobMissing:
            await self._blobs.put_named(name, text, media_type=ANSWER_TYPE)
        return answer, body

    async def find(self, key: str, place: tuple[int, int]) -> tuple[RecordedResponse, BlobRef] | None:
        """Return the answer for that place and the reference to it, or None. Raises BlobCorrupt, StoreUnavailable."""
        prefix = self._prefix(key)
        names = await self._blobs.names(prefix)
        if not names:
            return None
        asked = self._name(key, place)
        name = max((name for name in names if name <= asked), default=names[0])
        text = await self._blobs.get_named(name)
        return RecordedResponse.parse(text, name), BlobRef(hashlib.sha256(text).hexdigest(), len(text), ANSWER_TYPE)

    def _prefix(self, key: str) -> str:
        return f"egress/{self._cache}/{key}/"

    def _name(self, key: str, place: tuple[int, int]) -> str:
        return f"{self._prefix(key)}{place[0]:06d}.{place[1]:06d}"


class RecordedRequests:
    """The requests of one recorded call, each to be given again once, in order."""

    def __init__(self, requests: Iterable[EgressRequest]) -> None:
        """Create it from ToolCallCompleted.requests."""
        self._left: dict[str, deque[EgressRequest]] = defaultdict(deque)
        for request in requests:
            if request.reason in LOCAL:
                continue
            self._left[request.request_sha256].append(request)

    def next(self, key: str) -> EgressRequest | None:
        """Return the next recorded outcome of this request; None if it was not made that often."""
        return self._left[key].popleft() if self._left.get(key) else None


@dataclass(slots=True, eq=False)
class Entry:
    """A request in progress. `over`: the call had no requests left."""

    over: bool
    began: float = field(default_factory=time.monotonic)
    method: str = ""
    url: str = ""
    key: str = ""
    status: int = 0
    source: EgressSource = EgressSource.refused
    reason: str = Reason.call_ended
    """Reason of a refusal; call_ended until the outcome is known."""
    response: BlobRef | None = None
    answer: BlobRef | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    duration_s: float | None = None

    @property
    def host(self) -> str:
        """Host and port of the URL, for log lines: path and query are content of the session."""
        return self.url.partition("://")[2].partition("/")[0] or self.url

    def note_refusal(self, refused: RequestRefused) -> None:
        """Note that the request was refused before any part of an answer was sent."""
        self.status, self.source, self.reason = refused.status, EgressSource.refused, refused.reason

    def note_end(self, sent: int) -> None:
        """Note the end of the request; later events do not count. `sent`: bytes of an answer's body."""
        self.response_bytes = self.response_bytes or sent
        self.duration_s = time.monotonic() - self.began

    def event(self) -> EgressRequest:
        """Return the record for the call's result."""
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
    """Requests of one call. At most `most` are granted; one more entry shows that there were more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: list[Entry] = []
        self._tunnels = 0
        self._asked: Counter[str] = Counter()

    def begin(self) -> Entry:
        entry = Entry(over=len(self._entries) >= self._most or self._tunnels > self._most)
        if len(self._entries) <= self._most:
            self._entries.append(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """Drop the entry of a granted CONNECT, which only carried other requests. A call may have as many of these as
        requests."""
        self._tunnels += 1
        self._entries.remove(entry)

    def disregard(self, entry: Entry) -> None:
        """Drop the entry of a request that did not go to the network; it is counted nowhere."""
        entry.over = False
        self._entries = [one for one in self._entries if one is not entry]

    def ordinal(self, key: str) -> int:
        """Return how many times this request was made before in the call."""
        self._asked[key] += 1
        return self._asked[key] - 1

    def recorded_requests(self) -> tuple[EgressRequest, ...]:
        """Return all requests so far; complete when `serving` has ended."""
        return tuple(entry.event() for entry in self._entries)
