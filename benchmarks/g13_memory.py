"""G13: what a processor holds for one buffered turn of 512 new tokens, 256 of them sampled.

5,000 open sessions, as many as an assembler that is far behind may meet: their records are decoded from bytes, as a
poll delivers them, and folded; none is complete. The value is the growth of the process's resident memory per turn,
watch of the reaper included; floor: the turn's ids and log-probs alone. Not shown: what aiokafka prefetches (at most
`FETCH_BYTES` per process, whatever is buffered), and samples under construction.
usage: python benchmarks/g13_memory.py
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from row import size, told

from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.runtime.watch import GroupWatch
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import TOPIC_OF

GOAL_BYTES, GOAL_SHARE = 15_000, 0.5
PER_GROUP, TURNS = 8, 4
SESSIONS = size(5000, smallest=160)
SHAPE = Shape(delta=256, output=256)
RULES = FoldRules(run_id="g13", settings_sha256="0" * 64)
CODEC = Codec({name: place for place, name in enumerate(ALL)})


def records(group: str, rng: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """(topic, value) of every record of a group whose sessions have not ended."""
    for index in range(PER_GROUP):
        story = SessionStory(GroupName("g13", group, 0, PER_GROUP), index, rng)
        events = [story.started(), *(event for _ in range(TURNS) for event in story.turn(SHAPE))]
        for event in events:
            yield TOPIC_OF[type(event).__name__].name, CODEC.encode(event)


def buffered(groups: int, rng: np.random.Generator) -> tuple[dict[str, GroupFold], GroupWatch]:
    """The open state of so many groups."""
    folds, watch = {}, GroupWatch()
    for number in range(groups):
        group = f"group-{number}"
        fold = folds[group] = GroupFold(group, 0, RULES)
        offsets: dict[str, int] = {}
        for topic, value in records(group, rng):
            event = CODEC.decode(value)
            offsets[topic] = offsets.get(topic, -1) + 1
            fold.apply(topic, offsets[topic], event)
            watch.saw(event, 0.0)
    return folds, watch


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Print one JSON line."""
    rng, groups = np.random.default_rng(0), SESSIONS // PER_GROUP
    buffered(8, rng)  # what is imported and compiled once is not the turns'
    before = resident()
    held = buffered(groups, rng)
    turns = len(held[0]) * PER_GROUP * TURNS
    value = (resident() - before) / turns
    del held
    tracemalloc.start()
    held = buffered(groups // 20, rng)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] / (len(held[0]) * PER_GROUP * TURNS)
    tracemalloc.stop()
    return told(
        id="G13", value=round(value), unit="bytes/turn", goal=GOAL_BYTES, floor=4 * (SHAPE.delta + 2 * SHAPE.output),
        goal_share=GOAL_SHARE, met=value <= GOAL_BYTES,
        detail={
            "turns": turns, "sessions": SESSIONS, "new_tokens": SHAPE.delta + SHAPE.output, "sampled": SHAPE.output,
            "allocated_bytes_per_turn": round(traced), "floor_is": "ids and log-probs as packed 4-byte numbers",
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
