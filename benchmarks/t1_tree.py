"""T1: one session of 200 turns x 5,000 new tokens (a context of a million) folded into its tree.

Floor in the same run: the snapshots' arrays concatenated once by numpy, and sha256 over those bytes, which any reading
that checks prompts must pay; `sha256_ms` is the hash alone. Not shown: decoding, the broker, building the samples (G5
has them), what a buffered turn holds (G13).
usage: python benchmarks/t1_tree.py
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from row import say, size, told

from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import (
    Agent,
    Boundary,
    Environment,
    Event,
    Expects,
    FinishReason,
    Outcome,
    Purpose,
    Sampling,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    TurnCompleted,
    TurnTreeAssembled,
    VersionSpan,
)
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TURNS
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s

TURN_COUNT, REPEATS = size((200, 40), smallest=(8, 2))
NEW_TOKENS = 5000
OUTPUT_TOKENS = 512
GOAL_MS, GOAL_SHARE = 5.0, 0.77
RULES = FoldRules(run_id="t1", settings_sha256="0" * 64)
Records = list[tuple[str, int, Event]]


def history(turns: int, new: int) -> Records:
    """The records of one session whose every prompt extends the turn before it."""
    rng = np.random.default_rng(0)
    about: dict[str, Any] = {"run_id": "t1", "group_id": "g", "session_id": "s", "floor": 0}
    records: Records = [(SESSIONS.name, 0, _started(about))]
    hashed, length, output_len = hashlib.sha256(), 0, min(OUTPUT_TOKENS, new // 2)
    for index in range(turns):
        delta = pack_int32s(rng.integers(0, 150_000, new - output_len))
        output = pack_int32s(rng.integers(0, 150_000, output_len))
        hashed.update(delta)
        turn, parent = TurnId("epoch", index), TurnId("epoch", index - 1) if index else None
        records.append((TURNS.name, index, _completed(about, turn, parent, length + new)))
        records.append(
            (
                SNAPSHOTS.name,
                index,
                TokenSnapshot(
                    event_id=f"snapshot{index}",
                    **about,
                    turn=turn,
                    parent_turn=parent,
                    base_len=length,
                    delta_ids=delta,
                    output_ids=output,
                    output_logprobs=pack_float32s(-rng.random(output_len)),
                    version_spans=(VersionSpan(1, output_len),),
                    boundary=Boundary.append,
                    boundary_reason="append",
                    prompt_sha256=hashed.hexdigest(),
                    temperature=1.0,
                    logprob_kind="at_temperature",
                ),
            )
        )
        hashed.update(output)
        length += new
    turn_ids = tuple(TurnId("epoch", index) for index in range(turns))
    records.append((SESSIONS.name, 1, _finished(about, turn_ids)))
    return records


def _started(about: dict[str, Any]) -> SessionStarted:
    return SessionStarted(
        event_id="epoch", **about, task_id="t", group_size=2, rollout_id="r0", rollout_index=0, attempt=0,
        purpose=Purpose.train, recipe="t1", agent=Agent("t1", "1"), model="", tokenizer_sha256="",
        chat_template_sha256="", sampling=Sampling(), environment=Environment(name="none", version="1"), writer_url="",
    )  # fmt: skip


def _completed(about: dict[str, Any], turn: TurnId, base: TurnId | None, prompt_tokens: int) -> TurnCompleted:
    return TurnCompleted(
        event_id=f"turn{turn.index}", **about, turn=turn, request_sha256="", api="chat", base_turn=base,
        system_sha256="s", tools_sha256="t", new_messages=b"[]", response=b"{}", finish_reason=FinishReason.stop,
        aborted=False, prompt_tokens=prompt_tokens, output_tokens=OUTPUT_TOKENS, cached_tokens=0,
        weight_version_first=1, weight_version_last=1, queue_s=0, first_token_s=0, total_s=0, engine_id="e",
    )  # fmt: skip


def _finished(about: dict[str, Any], turns: tuple[TurnId, ...]) -> SessionFinished:
    return SessionFinished(
        event_id="finish", **about, epoch="epoch", turns=turns, undelivered=(), outcome=Outcome.completed, reason="",
        final=True, expects=Expects(reward=False),
    )  # fmt: skip


def tree(records: Records) -> TurnTreeAssembled:
    """The measured fold: from the first record to the tree."""
    group = GroupFold("g", 0, RULES)
    outputs = [output for topic, offset, event in records for output in group.apply(topic, offset, event)]
    (assembled,) = outputs
    return assembled  # type: ignore[no-any-return]


def floor(records: Records) -> int:
    """What cannot be avoided: read every token once, hash every token once."""
    snapshots = [event for topic, _, event in records if topic == SNAPSHOTS.name]
    hashed = hashlib.sha256()
    for event in snapshots:
        hashed.update(event.delta_ids)
        hashed.copy().hexdigest()
        hashed.update(event.output_ids)
    arrays = [np.frombuffer(ids, "<i4") for event in snapshots for ids in (event.delta_ids, event.output_ids)]
    return len(np.concatenate(arrays))


def fastest_ms(measured: Callable[[Records], object], records: Records) -> float:
    """Milliseconds of the fastest repetition: the others waited for other people's processes."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        measured(records)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def hashing(records: Records) -> str:
    """The hash of the session's tokens, turn by turn, as the fold must check it."""
    hashed = hashlib.sha256()
    for topic, _, event in records:
        if topic == SNAPSHOTS.name:
            hashed.update(event.delta_ids)
            hashed.update(event.output_ids)
    return hashed.hexdigest()


def main() -> int:
    """Print one JSON line."""
    records, half = history(TURN_COUNT, NEW_TOKENS), history(TURN_COUNT // 2, NEW_TOKENS)
    assembled = tree(records)
    assert [segment.tokens for segment in assembled.segments] == [TURN_COUNT * NEW_TOKENS]
    say(f"folding {assembled.books}")
    value, floor_ms, half_ms = fastest_ms(tree, records), fastest_ms(floor, records), fastest_ms(tree, half)
    return told(
        id="T1", value=value, unit="ms", goal=GOAL_MS, floor=floor_ms, goal_share=GOAL_SHARE, met=value <= GOAL_MS,
        detail={
            "turns": TURN_COUNT, "tokens_per_turn": NEW_TOKENS, "us_per_turn": round(value / TURN_COUNT * 1e3, 1),
            "half_the_turns_ms": round(half_ms, 2), "sha256_ms": round(fastest_ms(hashing, records), 2),
            "floor_is": "every token's bytes read once and hashed once",
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
