"""Whatever one field of one record says, the fold refuses it by a typed error or folds it; it never falls over."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from enum import StrEnum
from typing import Any

from tests.each import each
from tests.fakes.sessions import bad_days
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.avsc import field_types
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL, Event, GroupScored
from turnlog.schemas.topics import TOPIC_OF

RULES = FoldRules(run_id="run", settings_sha256="")
CODEC = Codec({name: place for place, name in enumerate(ALL)})
KEPT = {"group_id", "run_id", "event_id"}
"""Which group a record belongs to is the shell's business."""
NUMBERS = (0, 1, 2, -1, 7, 2**31, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
TEXTS = ("", "nowhere", "\0", "x" * 5000)
BYTES = (b"", b"\0", b"12345", b"\xff" * 8, b"\xff\xff\xff\x7f" * 3, b"[]", b"{")


def other(value: Any, rng: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, StrEnum):
        return rng.choice(list(type(value)))
    for kind, values in ((int, NUMBERS), (float, FLOATS), (str, TEXTS), (bytes, BYTES)):
        if isinstance(value, kind):
            return rng.choice(values)
    if dataclasses.is_dataclass(value):
        return changed(value, rng)
    if isinstance(value, dict):
        return {"component": rng.choice(FLOATS)}
    if isinstance(value, tuple) and value:
        place = rng.randrange(len(value))
        some = (*value[:place], other(value[place], rng), *value[place + 1 :])
        return rng.choice((some, (), value + value, value[::-1]))
    return value


def changed(record: Any, rng: random.Random) -> Any:
    """The record with one field changed."""
    name = rng.choice([name for name in field_types(type(record)) if name not in KEPT])
    return dataclasses.replace(record, **{name: other(getattr(record, name), rng)})


@each("seed", range(100))
def test_a_history_with_changed_records_is_folded_or_refused_and_its_books_balance(seed: int) -> None:
    rng = random.Random(seed)
    groups: dict[str, GroupFold] = {}
    offsets: defaultdict[str, int] = defaultdict(int)
    scores: list[GroupScored] = []
    causes: Counter[str] = Counter()
    for event in bad_days(random.Random(seed), groups=6, name="g"):
        now: Event = changed(event, rng) if rng.random() < 0.2 else event
        topic = TOPIC_OF[type(now).__name__].name
        group = groups.setdefault(now.group_id, GroupFold(now.group_id, now.floor, RULES))
        try:
            outputs = group.apply(topic, offsets[topic], now)
        except FoldError as refusal:
            causes[type(refusal).__name__] += 1
            outputs = refusal.outputs
        offsets[topic] += 1
        for output in outputs:
            CODEC.encode(output)  # what cannot be encoded would end the process again and again
        scores += [output for output in outputs if isinstance(output, GroupScored)]
    for score in scores:
        assert score.books.sampled == score.books.trained + sum(score.books.masked.values())
    assert scores or causes
