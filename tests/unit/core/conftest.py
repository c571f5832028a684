"""Stories: histories of one group in a small notation, where a token is a letter.

story = Story()
story.turn("a", 0, "sq", "AB")          session a, turn 0: sampled AB on the prompt sq
story.turn("a", 1, "sqABr", "CD", base=0)
story.end("a", reward=1.0)
draw(story.fold())                      # sq<AB>r<CD>, masked outputs stand in {braces}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.render import render as pictures
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import (
    Agent,
    Boundary,
    Environment,
    Event,
    Expects,
    FinishReason,
    GroupClosed,
    GroupScored,
    Outcome,
    Purpose,
    RewardAssigned,
    RewardFailed,
    Sampling,
    SegmentSample,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    TurnCompleted,
    TurnTreeAssembled,
    Verifier,
    VersionSpan,
)
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TOPIC_OF, TURNS
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s

TOPICS = (SESSIONS.name, TURNS.name, SNAPSHOTS.name)
RULES = FoldRules(run_id="r", settings_sha256="s" * 64)
VERIFIER = Verifier("exact", "1")
Record = tuple[str, int, Event]


def ids(text: str) -> bytes:
    return pack_int32s([ord(letter) for letter in text])


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Folded:
    """What a fold of records gave."""

    outputs: list[Event] = field(default_factory=list)
    refused: list[tuple[str, int, FoldError]] = field(default_factory=list)
    group: GroupFold | None = None

    @property
    def trees(self) -> dict[str, TurnTreeAssembled]:
        return {out.session_id: out for out in self.outputs if isinstance(out, TurnTreeAssembled)}

    @property
    def samples(self) -> list[SegmentSample]:
        return [out for out in self.outputs if isinstance(out, SegmentSample)]

    @property
    def score(self) -> GroupScored:
        (score,) = [out for out in self.outputs if isinstance(out, GroupScored)]
        return score

    @property
    def bodies(self) -> dict[str, Event]:
        assert len({out.event_id for out in self.outputs}) == len(self.outputs), "an output came twice"
        return {out.event_id: out for out in self.outputs}


def fold(records: Iterable[Record], rules: FoldRules = RULES, group: GroupFold | None = None) -> Folded:
    """Fold (topic, offset, event) in the order given."""
    result = Folded(group=group)
    for topic, offset, event in records:
        if result.group is None:
            result.group = GroupFold(event.group_id, event.floor, rules)
        try:
            result.outputs += result.group.apply(topic, offset, event)
        except FoldError as refusal:
            result.outputs += refusal.outputs
            result.refused.append((topic, offset, refusal))
    return result


class Story:
    """Writes the records of one group, each topic in its own order; offsets have gaps of other groups' records."""

    def __init__(self, *, size: int = 1, purpose: Purpose = Purpose.train, task: str = "t", step: int = 3) -> None:
        self.size, self.purpose, self.task, self.step = size, purpose, task, step
        self.topics: dict[str, list[Event]] = {topic: [] for topic in TOPICS}
        self.arrivals: list[Record] = []
        self.epochs: dict[str, list[str]] = {}
        self.texts: dict[str, dict[TurnId, tuple[str, str]]] = {}

    def write(self, event: Event) -> Event:
        topic = TOPIC_OF[type(event).__name__].name
        self.arrivals.append((topic, 7 + self.step * len(self.topics[topic]), event))
        self.topics[topic].append(event)
        return event

    def about(self, record: str, session: str, *more: object) -> dict[str, Any]:
        name = "/".join(map(str, (record, session, *more)))
        return {"event_id": name, "run_id": "r", "group_id": "g", "session_id": session, "floor": 5}

    def start(self, session: str, *, rollout: int | None = None, attempt: int = 0, **changes: Any) -> None:
        index = len(self.epochs) if rollout is None else rollout
        event = SessionStarted(
            **self.about("start", session), task_id=self.task, group_size=self.size, rollout_id=f"rollout{index}",
            rollout_index=index, attempt=attempt, purpose=self.purpose, recipe="calc", agent=Agent("loop", "1"),
            model="m", tokenizer_sha256="", chat_template_sha256="", sampling=Sampling(),
            environment=Environment(name="none", version="1"), writer_url="http://gateway",
        )  # fmt: skip
        self.epochs.setdefault(session, []).append(event.event_id)
        self.write(replace(event, **changes))

    def adopt(self, session: str) -> None:
        about = self.about("adopt", session, len(self.epochs[session]))
        self.epochs[session].append(about["event_id"])
        self.write(SessionAdopted(**about, writer_url="http://other"))

    def id(self, session: str, turn: int | tuple[int, int]) -> TurnId:
        epoch, index = turn if isinstance(turn, tuple) else (len(self.epochs[session]) - 1, turn)
        return TurnId(self.epochs[session][epoch], index)

    def turn(
        self, session: str, turn: int | tuple[int, int], prompt: str, output: str, *,
        base: int | tuple[int, int] | None = None, system: str = "sys", tools: bool = True, aborted: bool = False,
        versions: Sequence[int] = (), agent_path: str | None = None, parent: tuple[TurnId, int] | None = None,
        temperature: float = 1.0, messages: Sequence[dict[str, Any]] = (), response: dict[str, Any] | None = None,
        finish_reason: FinishReason | None = None, summary: int | tuple[int, int] | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        """Both records of a turn. `versions`: one per output token. `parent`: (turn, base_len) of storage. `messages`:
        those beyond the base's. `summary`: the turn whose answer they quote. What is `aborted` is partial unless a
        `finish_reason` says that it ended."""
        if session not in self.epochs:
            self.start(session)
        turn_id = self.id(session, turn)
        self.write(
            TurnCompleted(
                **self.about("turn", session, turn_id.epoch, turn_id.index),
                turn=turn_id,
                request_sha256="",
                api="chat",
                agent_path=agent_path,
                base_turn=None if base is None else self.id(session, base),
                system_sha256=system,
                tools_sha256="tools" if tools else "",
                new_messages=json.dumps(list(messages)).encode(),
                response=json.dumps(response or {}).encode(),
                finish_reason=finish_reason or (FinishReason.abort if aborted else FinishReason.stop),
                aborted=aborted,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                cached_tokens=0,
                weight_version_first=1,
                weight_version_last=1,
                queue_s=0,
                first_token_s=0,
                total_s=0,
                engine_id="e",
                summary_turn=None if summary is None else self.id(session, summary),
            )
        )
        self.snapshot(session, turn_id, prompt, output, versions, parent, temperature, **changes)

    def snapshot(
        self, session: str, turn: TurnId, prompt: str, output: str, versions: Sequence[int] = (),
        parent: tuple[TurnId, int] | None = None, temperature: float = 1.0, **changes: Any,
    ) -> None:  # fmt: skip
        texts = self.texts.setdefault(session, {})
        if parent is None:
            parent = max(((t, common(p + o, prompt)) for t, (p, o) in texts.items()), key=lambda p: p[1], default=None)
        holder, base_len = parent if parent is not None and parent[1] else (None, 0)
        event = TokenSnapshot(
            **self.about("snapshot", session, turn.epoch, turn.index), turn=turn, parent_turn=holder, base_len=base_len,
            delta_ids=ids(prompt[base_len:]), output_ids=ids(output),
            output_logprobs=pack_float32s([-0.5 - i for i in range(len(output))]),
            version_spans=tuple(VersionSpan(version, 1) for version in versions or (1,) * len(output)),
            boundary=Boundary.append, boundary_reason="append", prompt_sha256=hashlib.sha256(ids(prompt)).hexdigest(),
            temperature=temperature, logprob_kind="at_temperature",
        )  # fmt: skip
        texts.setdefault(turn, (prompt, output))
        self.write(replace(event, **changes))

    def finish(
        self, session: str, *, outcome: Outcome = Outcome.completed, turns: Sequence[TurnId] | None = None,
        undelivered: Sequence[int] = (), final: bool = True, epoch: int = -1, expects: Expects | None = None,
    ) -> None:  # fmt: skip
        if session not in self.epochs:
            self.start(session)
        self.write(
            SessionFinished(
                **self.about("finish", session, epoch),
                epoch=self.epochs[session][epoch],
                turns=tuple(self.texts.get(session, {})) if turns is None else tuple(turns),
                undelivered=tuple(self.id(session, turn) for turn in undelivered),
                outcome=outcome,
                reason="",
                final=final,
                expects=expects or Expects(reward=outcome in ("completed", "truncated", "agent_error")),
            )
        )

    def reward(self, session: str, value: float, player: str = "") -> None:
        about = self.about("reward", session, *([player] if player else []))
        self.write(
            RewardAssigned(**about, value=value, components={}, verifier=VERIFIER, evidence=b"{}", player=player)
        )

    def fail(self, session: str, player: str = "") -> None:
        about = self.about("reward failed", session, *([player] if player else []))
        self.write(RewardFailed(**about, verifier=VERIFIER, cause="crashed: it broke", player=player))

    def end_game(self, session: str, *, own: float | None = None, **rewards: float | None) -> None:
        """A finish, and a reward for each player; None: the verifier failed on it. `own`: the session's own reward."""
        self.finish(session, expects=Expects(reward=own is not None, players=tuple(rewards)))
        if own is not None:
            self.reward(session, own)
        for player, reward in rewards.items():
            if reward is None:
                self.fail(session, player)
            else:
                self.reward(session, reward, player)

    def end(self, session: str, *, reward: float, **finish: Any) -> None:
        self.finish(session, **finish)
        self.reward(session, reward)

    def close(self, *members: str, seen: int | None = None, reason: str = "quorum") -> None:
        latest = [offset for topic, offset, _ in self.arrivals if topic == SESSIONS.name][-1]
        about = self.about("close", "-", len(self.arrivals))
        del about["session_id"]
        self.write(GroupClosed(**about, members=members, reason=reason, seen=latest + 1 if seen is None else seen))

    def fold(self, rules: FoldRules = RULES) -> Folded:
        """In order of arrival."""
        return fold(self.arrivals, rules)


def draw(folded: Folded) -> str:
    """Trees of a scored group as text (processors/core/fold/render.py), a token as its letter."""
    return pictures(folded.trees.values(), folded.samples, letters)


def letters(tokens: Iterable[int]) -> str:
    return "".join(chr(token) for token in tokens)


@pytest.fixture(scope="session")
def story() -> type[Story]:
    """The notation."""
    return Story


@pytest.fixture(scope="session")
def drawn() -> Callable[[Folded], str]:
    """`draw`."""
    return draw


@pytest.fixture(scope="session")
def folded() -> Callable[..., Folded]:
    """`fold`."""
    return fold
