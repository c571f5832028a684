"""G11: bytes on the log. A session of 100 turns that grows to a context of 50,000 tokens, half of them sampled, with
its messages as text of four characters a token and a tool catalogue of 16 KB; and its sample, per token.

Counted is the growth of the broker's log files, record batches and headers included: what agents wrote, and what the
assembler made of it. The same session of half the length shows that bytes grow with tokens, not with turns x context.
Floor: the ids, log-probs and text alone. Not shown: replication, which multiplies it all; compression, which is off.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import uvloop
from assembling import assemble
from g4_turns import message
from log_server import ACKS, LogServer, broker
from row import say, size, told

from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.fold_versions import FOLD_VERSION, INPUTS, outputs_of
from turnlog.schemas.events import Event
from turnlog.schemas.topics import SAMPLES
from turnlog.settings import Settings

GOAL_SESSION, GOAL_PER_TOKEN, GOAL_SHARE = 1_500_000, 10.0, 0.8
SESSIONS, SHAPE = 2, Shape(delta=250, output=250)
TURNS = size(100, smallest=4)
SETTINGS = Settings()
TOOLS = b"[" + b'{"name": "tool", "description": "..."}, ' * 400 + b"{}]"


def session(
    group: GroupName, index: int, turns: int, rng: np.random.Generator, shape: Shape = SHAPE
) -> Iterator[Event]:
    """A session with what a real gateway would put into its records."""
    story = SessionStory(group, index, rng)
    yield story.started()
    for number in range(turns):
        completed, snapshot = story.turn(shape)
        yield dataclasses.replace(
            completed,
            request_sha256="a" * 64, system_sha256="b" * 64, tools_sha256="c" * 64,
            new_messages=message("tool", shape.delta, rng), response=message("assistant", shape.output, rng),
            tools=TOOLS if number == 0 else None,
        )  # fmt: skip
        yield snapshot
    yield story.rewarded(float(index))
    yield story.finished()


async def on_the_log(server: LogServer, turns: int) -> dict[str, float]:
    """Bytes per session of that many turns: of its input records, of its outputs, and of its sample's record."""
    part = f"turns{turns}-"
    log = server.log(part)
    await apply(log, SETTINGS)
    rng, group = np.random.default_rng(0), GroupName(SETTINGS.run.id, "group", 0, SESSIONS)
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events:
        for index in range(SESSIONS):
            acks = [await events.submit(event) for event in session(group, index, turns, rng)]
            await asyncio.gather(*acks)
        await assemble(log, events, SETTINGS)
    await log.close()
    kinds = {"inputs": INPUTS, "outputs": outputs_of(FOLD_VERSION), "sample": [SAMPLES.name]}
    return {kind: server.written(topics, part) / SESSIONS for kind, topics in kinds.items()}


async def measure(server: LogServer) -> int:
    """The session, half the session; the exit status."""
    started = time.perf_counter()
    whole, half = [await on_the_log(server, turns) for turns in (TURNS, TURNS // 2)]
    say(f"{SETTINGS.kafka.groups} units, {time.perf_counter() - started:.0f} s")
    tokens = TURNS * (SHAPE.delta + SHAPE.output)
    value, per_token = whole["inputs"] + whole["outputs"], whole["sample"] / tokens
    bare = 4 * tokens + 4 * TURNS * SHAPE.output
    detail: dict[str, Any] = {
        "turns": TURNS, "context_tokens": tokens, "sampled_tokens": TURNS * SHAPE.output,
        "input_bytes": round(whole["inputs"]), "output_bytes": round(whole["outputs"]),
        "sample_bytes_per_token": round(per_token, 2), "goal_sample_bytes_per_token": GOAL_PER_TOKEN,
        "of_half_the_session": round((half["inputs"] + half["outputs"]) / value, 3),
        "floor_is": "ids and log-probs twice (as turns, as sample), the text once", **ACKS,
    }  # fmt: skip
    return told(
        id="G11", value=round(value), unit="bytes/session", goal=GOAL_SESSION, floor=2 * bare + 4 * tokens,
        goal_share=GOAL_SHARE, met=value <= GOAL_SESSION and per_token <= GOAL_PER_TOKEN, detail=detail,
    )  # fmt: skip


if __name__ == "__main__":
    with broker() as server:
        raise SystemExit(uvloop.run(measure(server)))
