"""Record what the code of a release makes of a history: `python tests/golden/record_history.py v2`.

Writes `history-VERSION.jsonl`, the records of an invented history as that release wrote them (topic, key, headers and
Avro body, to be framed with the id that a registry gives to the release's schema), and `history-VERSION.outputs.json`,
a sha256 of every tree, sample and score that its fold gave. Later code must give the same (docs/schema-evolution.md).
Files that exist are left alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from turnlog.infra.event_log import OUTPUT_TOKENS_HEADER, RECORD_HEADER
from turnlog.infra.murmur2 import partition_of
from turnlog.processors.core.assembler import GroupFold
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.rules import fold_rules
from turnlog.processors.shells.examples import GroupName, Shape, bad_days, whole_group
from turnlog.schemas.codec import Codec, plain
from turnlog.schemas.events import ALL, Event, TokenSnapshot
from turnlog.schemas.topics import SESSIONS, TOPIC_OF
from turnlog.settings import FoldSettings

FOLDER = Path(__file__).parent
RUN, PARTITIONS = "history", 4
OF_THE_FOLDER = frozenset({"fold_version", "settings_sha256"})
"""What a record says of the code that derived it, which may differ."""


def history() -> Iterator[Event]:
    """Two plain groups, then five on bad days; floors are right for a log of PARTITIONS that holds nothing else."""
    ends = [0] * PARTITIONS
    for number in range(2):
        name = f"plain-{number}"
        unit = partition_of(name.encode(), PARTITIONS)
        group = GroupName(RUN, name, ends[unit], 3)
        for event in whole_group(group, np.random.default_rng(number), turns=3, shape=Shape()):
            ends[unit] += TOPIC_OF[type(event).__name__] is SESSIONS
            yield event
    yield from bad_days(random.Random(11), groups=5, partitions=PARTITIONS, run_id=RUN, name="bad", ends=ends)


def folded(events: Iterable[Event], version: str) -> Iterator[Event]:
    """What a version of the fold gives under the default settings."""
    rules = fold_rules(FoldSettings(), run_id=RUN, settings_sha256="", version=version)
    groups: dict[str, GroupFold] = {}
    offsets: defaultdict[str, int] = defaultdict(int)
    for event in events:
        topic = TOPIC_OF[type(event).__name__].name
        group = groups.setdefault(event.group_id, GroupFold(event.group_id, event.floor, rules))
        try:
            yield from group.apply(topic, offsets[topic], event)
        except FoldError as refusal:
            yield from refusal.outputs
        offsets[topic] += 1


def fingerprint(datum: Any) -> str:
    """sha256 of a derived record's body, without what it says of the code that derived it."""
    about = {name: value for name, value in datum.items() if name not in OF_THE_FOLDER}
    text = json.dumps(about, sort_keys=True, separators=(",", ":"), default=bytes.hex)
    return hashlib.sha256(text.encode()).hexdigest()


def line(event: Event, codec: Codec) -> dict[str, Any]:
    """A record of the log as JSON."""
    name = type(event).__name__
    headers = {RECORD_HEADER: name}
    if isinstance(event, TokenSnapshot):
        headers[OUTPUT_TOKENS_HEADER] = str(sum(span.length for span in event.version_spans))
    body = base64.b64encode(codec.frame(codec.encode(event))[1]).decode()
    return {"topic": TOPIC_OF[name].name, "key": event.group_id, "headers": headers, "body": body}


def main(version: str) -> None:
    """Record, unless it was."""
    records, outputs = FOLDER / f"history-{version}.jsonl", FOLDER / f"history-{version}.outputs.json"
    if records.exists():
        raise SystemExit(f"{records.name} was recorded; what a release said does not change")
    codec = Codec({name: place for place, name in enumerate(ALL)})
    events = list(history())
    records.write_text("".join(json.dumps(line(event, codec)) + "\n" for event in events))
    said = {event.event_id: fingerprint(plain(event)) for event in folded(events, "1")}
    outputs.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    print(f"{len(events)} records, {len(said)} outputs")


if __name__ == "__main__":
    main(sys.argv[1])
