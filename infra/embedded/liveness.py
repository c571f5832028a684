"""Liveness of child processes: whether one that exists still works, by an answer to a request and by heartbeats of its
loops.

The sockets of a hung process (stopped, deadlocked) stay open: the kernel continues to accept connections for it. Every
check therefore requires an answer from the process itself, and from a role also the number of heartbeats of each of its
loops.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnlog.infra.embedded.ports import HOST
from turnlog.infra.engines.protocol import RELEASED
from turnlog.infra.roles.http_clients import fetch_json, got

LOOK_S = 2.0
"""Maximum duration of one check in seconds."""
GENERATION_LOOK_S = 5.0
ANSWER = "answer"


def _request(key: int, version: int, body: bytes = b"") -> bytes:
    """Return a Kafka request: size, header (with correlation id 1 and no client id: Kafka protocol guide, "Request
    Header v1") and body."""
    return struct.pack(">ihhih", 10 + len(body), key, version, 1, -1) + body


API_VERSIONS = _request(18, 0)
METADATA = _request(3, 1, struct.pack(">i", 0))
"""Metadata request for no topic."""
PLAIN_HANDSHAKE = _request(17, 1, struct.pack(">h", len("PLAIN")) + b"PLAIN")

Loops = Mapping[str, tuple[float, float]]
"""Loop -> (a number that changes with each heartbeat, maximum seconds between two heartbeats; 0: no limit)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Description of how to check that a child works."""

    look: Callable[[], Loops | None]
    """Checks once, for about LOOK_S; returns None if there is no answer."""
    within_s: float
    """Maximum seconds between two answers; 0: no limit."""

    @property
    def every_s(self) -> float:
        """Pause between checks in seconds."""
        return min(max(self.within_s / 10, 0.25), 5.0) if self.within_s else 5.0


class Silence:
    """Time for which each loop of a child has had no heartbeat, according to the checks.

    The time between two checks counts for at most twice the planned interval, so that a supervisor that was stopped
    itself, or a machine that slept, does not make a child look hung."""

    def __init__(self, liveness: Liveness, now: float) -> None:
        """`now`: current time in seconds of any clock that `record_check` gets, too."""
        self._most_s = 2 * (liveness.every_s + LOOK_S)
        self._at = now
        self._seen: dict[str, float] = {ANSWER: 0.0}
        self._within_s = {ANSWER: liveness.within_s}
        self._silent_s = {ANSWER: 0.0}

    def record_check(self, loops: Loops | None, now: float) -> None:
        """Record the result of a check that ended at `now`."""
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
        """Return which loop has been silent for longer than allowed (and longer than `at_least_s`), in words; empty if
        none."""
        for loop, silent_s in self._silent_s.items():
            allowed_s = self._within_s[loop]
            if allowed_s and silent_s > max(allowed_s, at_least_s):
                what = "gave no answer" if loop == ANSWER else f"answered, but its loop {loop!r} stood still"
                return f"{what} for {silent_s:.0f} s ({allowed_s:g} s are allowed: [liveness])"
        return ""


def answering(ask: Callable[[], bool]) -> Callable[[], Loops | None]:
    """Return a check that asks a server for one answer."""
    return lambda: {} if ask() else None


def broker_answers(port: int) -> bool:
    """Whether a broker answers ApiVersions, the first request of every client, which needs no login."""
    return _broker_says(port, API_VERSIONS) != b""


def broker_takes_part(port: int, user: str = "", password: str = "") -> bool:
    """Whether the broker's metadata lists any broker of the cluster: a broker listens before it joins. `password` is
    that of `user`, if it requires a login (RFC 4616)."""
    token = f"\0{user}\0{password}".encode()
    login = (PLAIN_HANDSHAKE, _request(36, 0, struct.pack(">i", len(token)) + token)) if password else ()
    return any(_broker_says(port, *login, METADATA)[8:12])  # after size and correlation id: the number of brokers


def _broker_says(port: int, *requests: bytes) -> bytes:
    """Return the bytes received of the answer to the last request, or nothing if the broker does not answer all
    requests."""
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


def http_answers(url: str) -> bool:
    """Whether an HTTP server answers GET, with whatever status."""
    return _status(url, LOOK_S) > 0


def steps(url: str) -> bool:
    """Whether a vLLM engine's scheduler answers: its HTTP server alone would answer /health, also while the scheduler
    hangs."""
    return is_well(f"{url}/weight_info", timeout_s=GENERATION_LOOK_S)


def generates(url: str) -> bool:
    """Whether an SGLang engine generates tokens (for a request of its own if it is idle, else for any request), or has
    released its memory, in which case it would answer 503."""
    return _is_released(url) or is_well(f"{url}/health_generate", timeout_s=GENERATION_LOOK_S)


def _is_released(url: str) -> bool:
    try:
        _, said = fetch_json(f"{url}/model_info", timeout_s=LOOK_S)
        return bool(said.get("weight_version") == RELEASED)
    except (OSError, ValueError, AttributeError):
        return False


def is_well(url: str, *, timeout_s: float) -> bool:
    """Whether GET answers 2xx."""
    return 200 <= _status(url, timeout_s) < 300


def _status(url: str, timeout_s: float) -> int:
    """Return the status of the answer to GET; 0 if there is none."""
    try:
        with got(url, timeout_s=timeout_s) as answer:
            return answer.status
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return refusal.code
    except (OSError, ValueError):
        return 0


def role_loops(health: str) -> Loops | None:
    """Return the heartbeats of a role's loops from /healthz, whatever its status; None without a usable answer."""
    try:
        _, said = fetch_json(f"{health}/healthz", timeout_s=LOOK_S)
        loops = said.get("loops", {})
        return {loop: (float(one["rounds"]), float(one["within_s"])) for loop, one in loops.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
