"""Whether a child that is alive for the kernel works: a protocol answer, and loops that come round.

A hung process (stopped, deadlocked) keeps its sockets: the kernel goes on accepting connections for it. So every look
asks for an answer that the process itself must give, and of a role also how often each of its loops has come round.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPResponse

from turnlog.infra.embedded.ports import HOST
from turnlog.infra.engine import RELEASED
from turnlog.infra.roles.http_clients import got

LOOK_S = 2.0
"""One look takes no longer."""
GENERATION_LOOK_S = 5.0
ANSWER = "answer"


def _request(key: int, version: int, body: bytes = b"") -> bytes:
    """Size, header (with correlation id 1 and no client id: Kafka protocol guide, "Request Header v1") and body."""
    return struct.pack(">ihhih", 10 + len(body), key, version, 1, -1) + body


API_VERSIONS = _request(18, 0)
METADATA = _request(3, 1, struct.pack(">i", 0))
"""About no topic."""
PLAIN_HANDSHAKE = _request(17, 1, struct.pack(">h", len("PLAIN")) + b"PLAIN")

Loops = Mapping[str, tuple[float, float]]
"""Loop -> (a number that changes when it comes round, seconds within which it must; 0: whenever)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How one sees that a child works."""

    look: Callable[[], Loops | None]
    """One look of LOOK_S or so; None: no answer."""
    within_s: float
    """It answers at least so often; 0: whenever."""

    @property
    def every_s(self) -> float:
        """Pause between looks."""
        return min(max(self.within_s / 10, 0.25), 5.0) if self.within_s else 5.0


class Silence:
    """For how long each loop of a child has not come round, by the looks that were taken.

    What lies between two looks counts for no more than the looks were apart by intention: a watcher that was stopped
    itself, or a machine that slept, accuses nobody.
    """

    def __init__(self, liveness: Liveness, now: float) -> None:
        """`now`: seconds of any clock that is given to `looked`, too."""
        self._most_s = 2 * (liveness.every_s + LOOK_S)
        self._at = now
        self._seen: dict[str, float] = {ANSWER: 0.0}
        self._within_s = {ANSWER: liveness.within_s}
        self._silent_s = {ANSWER: 0.0}

    def looked(self, loops: Loops | None, now: float) -> None:
        """A look ended at `now`."""
        passed_s, self._at = min(now - self._at, self._most_s), now
        self._silent_s = {loop: silent_s + passed_s for loop, silent_s in self._silent_s.items()}
        if loops is None:
            return
        self._silent_s = {ANSWER: 0.0} | {
            loop: self._silent_s.get(loop, 0.0) if self._seen.get(loop) == number else 0.0
            for loop, (number, _) in loops.items()
        }
        self._seen = {loop: number for loop, (number, _) in loops.items()}
        self._within_s = {ANSWER: self._within_s[ANSWER]} | {loop: within_s for loop, (_, within_s) in loops.items()}

    def hung(self, *, at_least_s: float = 0.0) -> str:
        """What has been silent for too long (and `at_least_s`), in words; empty: nothing."""
        for loop, silent_s in self._silent_s.items():
            allowed_s = self._within_s[loop]
            if allowed_s and silent_s > max(allowed_s, at_least_s):
                what = "gave no answer" if loop == ANSWER else f"answered, but its loop {loop!r} stood still"
                return f"{what} for {silent_s:.0f} s ({allowed_s:g} s are allowed: [liveness])"
        return ""


def answering(ask: Callable[[], bool]) -> Callable[[], Loops | None]:
    """A look that asks a server for one answer."""
    return lambda: {} if ask() else None


def broker_answers(port: int) -> bool:
    """Whether a broker answers ApiVersions, the first request of every client, which it answers before a login."""
    return _broker_says(port, API_VERSIONS) != b""


def broker_takes_part(port: int, user: str = "", password: str = "") -> bool:
    """Whether the cluster's brokers that a broker tells of are any: it listens before it is one of them. `password`:
    where it asks for a login, that of `user` (RFC 4616)."""
    token = f"\0{user}\0{password}".encode()
    login = (PLAIN_HANDSHAKE, _request(36, 0, struct.pack(">i", len(token)) + token)) if password else ()
    return any(_broker_says(port, *login, METADATA)[8:12])  # behind size and correlation id: how many


def _broker_says(port: int, *requests: bytes) -> bytes:
    """Its answer to the last request, as much as came; nothing of a broker that does not answer them all."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), LOOK_S) as broker:
        for request in requests:
            broker.sendall(request)
            answer = broker.recv(4, socket.MSG_WAITALL)
            if len(answer) < 4:
                return b""
            answer += broker.recv(int.from_bytes(answer), socket.MSG_WAITALL)
        return answer
    return b""


def http_answers(url: str, *, timeout_s: float = LOOK_S) -> bool:
    """Whether an HTTP server answers GET, whatever it says."""
    try:
        with got(url, timeout_s=timeout_s):
            return True
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return True
    except (OSError, ValueError):
        return False


def generates(url: str) -> bool:
    """Whether an SGLang engine gives tokens (to a request of its own where it is idle, else to anybody), or has given
    its memory back: it answers 503 then."""
    return _released(url) or is_well(f"{url}/health_generate", timeout_s=GENERATION_LOOK_S)


def _released(url: str) -> bool:
    try:
        with got(f"{url}/model_info", timeout_s=LOOK_S) as answer:
            return bool(json.load(answer).get("weight_version") == RELEASED)
    except (OSError, ValueError, AttributeError):
        return False


def is_well(url: str, *, timeout_s: float) -> bool:
    """Whether GET answers 2xx."""
    try:
        with got(url, timeout_s=timeout_s):
            return True
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return False
    except (OSError, ValueError):
        return False


def role_loops(health: str) -> Loops | None:
    """What a role's /healthz says of its loops, also where it says that one is stale."""
    try:
        with contextlib.closing(_opened(f"{health}/healthz")) as answer:
            said = json.load(answer).get("loops", {})
        return {loop: (float(one["rounds"]), float(one["within_s"])) for loop, one in said.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _opened(url: str) -> HTTPResponse | urllib.error.HTTPError:
    try:
        return got(url, timeout_s=LOOK_S)
    except urllib.error.HTTPError as refusal:
        return refusal
