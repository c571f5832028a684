"""The first difference between a record as emitted and as folded, in words: which field, which token of which turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from turnlog.schemas.events import Event, SegmentSample
from turnlog.schemas.types import float32s, int32s


def about(event: Event) -> str:
    """Which record it is, for people."""
    name = type(event).__name__
    if isinstance(event, SegmentSample):
        return f"{name} of session {event.session_id}, segment {event.segment_index}"
    session = getattr(event, "session_id", None)
    return f"{name} of " + (f"session {session}" if session else f"group {event.group_id}")


def first_difference(emitted: Event, folded: Event) -> str:
    """The first field, in the order of the schema, whose values differ."""
    if type(emitted) is not type(folded):
        return f"a {type(emitted).__name__} as emitted, a {type(folded).__name__} as folded"
    if isinstance(emitted, SegmentSample):
        for name, words in (("token_ids", _tokens), ("logprobs", _logprobs)):
            if getattr(emitted, name) != getattr(folded, name):
                return words(emitted, folded)
    return _difference(emitted, folded, "") or "its encoding alone"


def _difference(emitted: Any, folded: Any, path: str) -> str | None:
    if emitted == folded and repr(emitted) == repr(folded):  # -0.0 equals 0.0, and is encoded otherwise
        return None
    if dataclasses.is_dataclass(emitted) and type(emitted) is type(folded):
        names = [field.name for field in dataclasses.fields(emitted)]
        pairs = [(f"{path}.{name}" if path else name, getattr(emitted, name), getattr(folded, name)) for name in names]
    elif isinstance(emitted, tuple) and isinstance(folded, tuple) and len(emitted) == len(folded):
        pairs = [(f"{path}[{at}]", one, other) for at, (one, other) in enumerate(zip(emitted, folded, strict=True))]
    elif isinstance(emitted, dict) and isinstance(folded, dict) and list(emitted) == list(folded):
        pairs = [(f"{path}.{key}", emitted[key], folded[key]) for key in emitted]
    elif isinstance(emitted, tuple) and isinstance(folded, tuple):
        return f"{path}: {len(emitted)} entries as emitted, {len(folded)} as folded"
    else:
        return f"{path}: {_shown(emitted)} as emitted, {_shown(folded)} as folded"
    return next((words for at, one, other in pairs if (words := _difference(one, other, at)) is not None), None)


def _tokens(emitted: SegmentSample, folded: SegmentSample) -> str:
    ours, theirs = int32s(_bytes(emitted.token_ids)), int32s(_bytes(folded.token_ids))
    at = _first(ours, theirs)
    if at is None:
        return f"token_ids: {len(ours)} tokens as emitted, {len(theirs)} as folded; they agree as far as both go"
    where = _where(folded, at)
    return f"token_ids: token {at} ({where}) is {ours[at]} as emitted, {theirs[at]} as folded"


def _logprobs(emitted: SegmentSample, folded: SegmentSample) -> str:
    ours, theirs = float32s(_bytes(emitted.logprobs)), float32s(_bytes(folded.logprobs))
    at = _first(ours.view("<i4"), theirs.view("<i4"))
    if at is None:
        return f"logprobs: {len(ours)} entries as emitted, {len(theirs)} as folded; they agree as far as both go"
    position = _position(folded, at)
    where = f"entry {at}, token {position} ({_where(folded, position)})"
    return f"logprobs: {where} is {ours[at]!s} as emitted, {theirs[at]!s} as folded"


def _first(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> int | None:
    common = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:common] != theirs[:common])
    return int(differ[0]) if len(differ) else None


def _where(sample: SegmentSample, position: int) -> str:
    """Whose token it is."""
    for span in sample.spans:
        if position < span.start:
            return f"in the prompt of turn {span.turn.index}"
        if position < span.start + span.length:
            return f"token {position - span.start} of the output of turn {span.turn.index}, version {span.version}"
    return "behind the last turn's output"


def _position(sample: SegmentSample, entry: int) -> int:
    """Position in the segment of the n-th sampled token."""
    for span in sample.spans:
        if entry < span.length:
            return span.start + entry
        entry -= span.length
    return -1


def _bytes(payload: object) -> bytes:
    assert isinstance(payload, bytes), "payloads are inline here"
    return payload


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
