"""Identifiers: hashes of what a record is about. The same input gives the same id on every machine and in replay.

An id is the first 128 bits (32 hex digits) of sha256 over canonical JSON (an array, UTF-8, no spaces).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any

from turnlog.schemas.canonical import canonical_text

TEXTS: dict[type, Callable[[Any], str]] = {str: encode_basestring, int: str, type(None): lambda _: "null"}
"""Type -> its text in JSON, as `json.dumps` without `ensure_ascii` writes it; ids are made by the dozen per session."""


def digest(*about: str | int | None) -> str:
    """Return 32 hex digits that identify the tuple `about`. Raises TypeError for values that JSON would not
    distinguish."""
    try:
        text = ",".join([TEXTS[type(part)](part) for part in about])
    except KeyError:  # a bool, or an enum
        for part in about:
            if part is not None and not isinstance(part, str | int):
                raise TypeError(f"an id is made of strings and integers, got {type(part).__name__}") from None
        text = json.dumps(about, ensure_ascii=False, separators=(",", ":"))[1:-1]
    return hashlib.sha256(f"[{text}]".encode()).hexdigest()[:32]


def environment_digest(about: Mapping[str, object]) -> str:
    """Return the hex sha256 of a mapping as canonical JSON with sorted keys, so that equal mappings have equal hashes.
    Used for the environment of a call or a session, and for the checksums of weights. Raises TypeError or ValueError
    for values that are not JSON."""
    return hashlib.sha256(canonical_text(about, ascii_only=False, nan=False).encode()).hexdigest()


def group_id(run_id: str, task_id: str, draw: int) -> str:
    """Return the id of the rollouts of one task that are drawn together. Drawing the task again makes a new group."""
    return digest("group", run_id, task_id, draw)


def rollout_id(group: str, index: int) -> str:
    """Return the id of one attempt of the policy at the group's task."""
    return digest("rollout", group, index)


def session_id(rollout: str, attempt: int) -> str:
    """Return the id of one execution of a rollout; a retry is a new session."""
    return digest("session", rollout, attempt)


def turn_event_id(record: str, session: str, epoch: str, index: int) -> str:
    """Return the `event_id` of the TurnCompleted or TokenSnapshot of a turn."""
    return digest(record, session, epoch, index)


def reward_id(session: str, verifier: str, version: str, player: str = "") -> str:
    """Return the `event_id` of the RewardAssigned of a session, or of one of its players: judging again repeats it."""
    return digest("RewardAssigned", session, verifier, version, *([player] if player else []))


def call_id(session: str, epoch: str, turn: int, index: int, purpose: str) -> str:
    """Return the id of the index-th tool call of a turn; `purpose` is "agent" or "verify"."""
    return digest("call", session, epoch, turn, index, purpose)


def sample_id(session: str, segment: int) -> str:
    """Return the id of a training row, which is a segment of a session."""
    return digest("sample", session, segment)


def dead_letter_id(topic: str, partition: int, offset: int) -> str:
    """Return the id of a DeadLetter. A record has only one, so that it is dead-lettered once, whichever role finds it
    first."""
    return digest("dead-letter", topic, partition, offset)
