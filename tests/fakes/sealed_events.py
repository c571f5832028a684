"""Events whose content fields all hold the same bytes, which a test then searches for."""

from __future__ import annotations

import dataclasses
from typing import Any

from turnlog.schemas.content import content_fields
from turnlog.schemas.events import ALL, Event
from turnlog.schemas.releases import example

MASTER = "0123456789abcdef-one"
PLANTED = b"the-secret-of-this-session"


def event_of(name: str, session: str = "session-1", event_id: str = "event-1", planted: bytes = PLANTED) -> Event:
    """An event of a kind with content, in which every content field holds what is planted."""
    record = ALL[name]
    event = dataclasses.replace(example(record), event_id=event_id, run_id="run", session_id=session)
    return dataclasses.replace(event, **planted_in(event, planted))


def planted_in(value: Any, planted: bytes) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for field in content_fields(type(value)):
        if field.inner is not None:
            one = example(field.inner)
            changes[field.name] = (dataclasses.replace(one, **planted_in(one, planted)),) * 2
        else:
            changes[field.name] = planted.decode() if field.is_text else planted
    return changes
