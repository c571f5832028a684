"""Record what the code of a release makes of a history: `python tests/golden/record_history.py v2`.

Writes `history-VERSION.jsonl`, the records of an invented history as that release wrote them (topic, key, headers and
Avro body, to be framed with the id that a registry gives to the release's schema), and for each fold version N of the
release `history-VERSION.fold-N.json`, a sha256 of every tree, sample and score that it gives. Later code must give the
same (docs/schema-evolution.md). `run-configured-VERSION.json` is what it records of a run with default settings. Files
that exist are left alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # run as a script, it finds tests.fakes

from tests.fakes.sessions import GroupName, SessionStory, Shape, bad_days, whole_group
from turnlog.infra.log import partition_of
from turnlog.infra.roles.runs import configuration
from turnlog.names import OUTPUT_TOKENS_HEADER, RECORD_HEADER
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import VERSIONS
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.schemas.codec import Codec, plain
from turnlog.schemas.events import (
    ALL,
    Event,
    Expects,
    FinishReason,
    StepRewardAssigned,
    TokenSnapshot,
    Verifier,
)
from turnlog.schemas.topics import SESSIONS, TOPIC_OF
from turnlog.settings import FoldSettings, Settings

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
    for number, (name, told) in enumerate(DOUBTS.items()):
        unit = partition_of(name.encode(), PARTITIONS)
        group = GroupName(RUN, name, ends[unit], 2)
        for index in range(group.size):
            for event in told(SessionStory(group, index, np.random.default_rng([number, index]))):
                ends[unit] += TOPIC_OF[type(event).__name__] is SESSIONS
                yield event


def left(story: SessionStory) -> Iterator[Event]:
    """The client was gone before the last byte of an answer that the engine ended."""
    yield story.started()
    yield from story.turn(Shape())
    completed, snapshot = story.turn(Shape())
    yield from (replace(completed, aborted=True), snapshot, story.rewarded(1.0), story.finished())


def cut_off(story: SessionStory) -> Iterator[Event]:
    """An answer, then a later try of the same prompt that was cut off."""
    yield story.started()
    completed, snapshot = story.turn(Shape())
    yield from (completed, snapshot)
    again = replace(story.turns[0], index=1)
    story.turns.append(again)
    yield replace(completed, event_id="again", turn=again, finish_reason=FinishReason.abort, aborted=True)
    yield from (replace(snapshot, event_id="again", turn=again), story.rewarded(1.0), story.finished())


def empty(story: SessionStory) -> Iterator[Event]:
    """Nothing of the group is an answer."""
    yield story.started()
    completed, snapshot = story.turn(Shape())
    yield from (replace(completed, finish_reason=FinishReason.abort, aborted=True), snapshot)
    yield from (story.rewarded(0.0), story.finished())


def paid_for_nothing(story: SessionStory) -> Iterator[Event]:
    """The finish expects a step reward, and the only one is for a turn that does not exist."""
    started = story.started()
    yield from (started, *story.turn(Shape()), story.rewarded(1.0))
    yield StepRewardAssigned(
        event_id=f"step of {started.session_id}", run_id=RUN, group_id=started.group_id,
        session_id=started.session_id, floor=started.floor, turn=replace(story.turns[0], index=7), value=1.0,
        components={}, verifier=Verifier("example", "1"),
    )  # fmt: skip
    yield replace(story.finished(), expects=Expects(reward=True, step_rewards=1))


DOUBTS = {"left": left, "cut-off": cut_off, "empty": empty, "paid-for-nothing": paid_for_nothing}
"""Groups that the versions of the fold read differently."""


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
    records = FOLDER / f"history-{version}.jsonl"
    if records.exists():
        raise SystemExit(f"{records.name} was recorded; what a release said does not change")
    codec = Codec({name: place for place, name in enumerate(ALL)})
    events = list(history())
    records.write_text("".join(json.dumps(line(event, codec)) + "\n" for event in events))
    for fold in VERSIONS:
        said = {event.event_id: fingerprint(plain(event)) for event in folded(events, fold)}
        (FOLDER / f"history-{version}.fold-{fold}.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        print(f"{len(events)} records, {len(said)} outputs of fold version {fold}")
    run = configuration(Settings())
    recorded = {"settings": run.settings.decode(), "settings_sha256": run.settings_sha256}
    configured = json.dumps(recorded | {"fold_version": run.fold_version}, indent=1)
    (FOLDER / f"run-configured-{version}.json").write_text(configured + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
