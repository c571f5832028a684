"""Identifiers: what a record is about, as a hash; the same input gives the same id on every machine and in replay.

An id is the first 128 bits (32 hex digits) of sha256 over canonical JSON (an array, UTF-8, no spaces).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one at every call that asks for separators."""


def digest(*about: str | int | None) -> str:
    """32 hex digits naming the tuple `about`. Raises TypeError for anything that JSON would not keep apart."""
    for part in about:
        if part is not None and not isinstance(part, str | int):
            raise TypeError(f"an id is made of strings and integers, got {type(part).__name__}")
    return hashlib.sha256(CANONICAL.encode(about).encode()).hexdigest()[:32]


def environment_digest(about: Mapping[str, object]) -> str:
    """Hex sha256 naming what surrounds a call or a session: of canonical JSON with sorted keys, so that equal maps have
    equal names. Raises TypeError, ValueError for what is no JSON."""
    text = json.dumps(about, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def group_id(run_id: str, task_id: str, draw: int) -> str:
    """The n rollouts of one task drawn together; drawing the task again is a new group."""
    return digest("group", run_id, task_id, draw)


def rollout_id(group: str, index: int) -> str:
    """One attempt of the policy at the group's task."""
    return digest("rollout", group, index)


def session_id(rollout: str, attempt: int) -> str:
    """One execution of a rollout; a retry is a new session."""
    return digest("session", rollout, attempt)


def turn_event_id(record: str, session: str, epoch: str, index: int) -> str:
    """`event_id` of the TurnCompleted or TokenSnapshot of one turn."""
    return digest(record, session, epoch, index)


def call_id(session: str, epoch: str, turn: int, index: int, purpose: str) -> str:
    """One tool call: the index-th of a turn; `purpose` is "agent" or "verify"."""
    return digest("call", session, epoch, turn, index, purpose)


def sample_id(session: str, segment: int) -> str:
    """One training row: a segment of a session."""
    return digest("sample", session, segment)


def dead_letter_id(topic: str, partition: int, offset: int) -> str:
    """A record is parked once, whoever finds it first."""
    return digest("dead-letter", topic, partition, offset)
