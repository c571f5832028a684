"""Invented histories of the agent topics: sessions that hold together, and logs as bad days leave them.

For chaos runs, benchmarks and tests: what a gateway, its zombie, runners and reapers may append, in any order that each
of them keeps.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from turnlog.infra.log import partition_of
from turnlog.schemas.events import (
    Agent,
    Boundary,
    Environment,
    Event,
    Expects,
    FinishReason,
    GroupClosed,
    Outcome,
    Purpose,
    RewardAssigned,
    RewardFailed,
    Sampling,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    TurnCompleted,
    Verifier,
    VersionSpan,
)
from turnlog.schemas.ids import digest, rollout_id, session_id, turn_event_id
from turnlog.schemas.topics import SESSIONS, TOPIC_OF
from turnlog.schemas.types import TurnId

VOCABULARY = 384
PLAYER_PATHS = ("player/white", "player/black", "player/idle", "player/white/compaction")


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of one turn: what the prompt gains, what is sampled."""

    delta: int = 6
    output: int = 4


@dataclass(frozen=True, slots=True)
class GroupName:
    """What every record of a group says."""

    run_id: str
    group_id: str
    floor: int
    size: int


class SessionStory:
    """One session, told record by record."""

    def __init__(
        self, group: GroupName, index: int, rng: np.random.Generator, *, attempt: int = 0,
        purpose: Purpose = Purpose.train,
    ) -> None:  # fmt: skip
        self._rng = rng
        self._group = group
        self._index = index
        self._attempt = attempt
        self._purpose = purpose
        self._rollout = rollout_id(group.group_id, index)
        self._ids: NDArray[np.int32] = np.zeros(0, dtype="<i4")
        """Prompt and output of the last turn."""
        self._common = {
            "run_id": group.run_id,
            "group_id": group.group_id,
            "session_id": session_id(self._rollout, attempt),
            "floor": group.floor,
        }
        self.epoch = ""
        self.turns: list[TurnId] = []

    @property
    def session_id(self) -> str:
        """Its name."""
        return self._common["session_id"]  # type: ignore[return-value]

    def started(self) -> SessionStarted:
        """Opens epoch 0."""
        self.epoch = digest("SessionStarted", self.session_id)
        return SessionStarted(
            event_id=self.epoch,
            **self._common,  # type: ignore[arg-type]
            task_id=f"task of {self._group.group_id}",
            group_size=self._group.size,
            rollout_id=self._rollout,
            rollout_index=self._index,
            attempt=self._attempt,
            purpose=self._purpose,
            recipe="example",
            agent=Agent("example", "1"),
            model="example",
            tokenizer_sha256="",
            chat_template_sha256="",
            sampling=Sampling(),
            environment=Environment(name="example", version="1"),
            writer_url="http://127.0.0.1:1",
        )

    def adopted(self) -> SessionAdopted:
        """Opens the next epoch; the turns so far keep the old one."""
        self.epoch = digest("SessionAdopted", self.session_id, self.epoch)
        return SessionAdopted(event_id=self.epoch, **self._common, writer_url="http://127.0.0.1:2")  # type: ignore[arg-type]

    def turn(self, shape: Shape, *, version: int = 0) -> tuple[TurnCompleted, TokenSnapshot]:
        """The next turn: extends the last one, sampled with one weight version."""
        base = self.turns[-1] if self.turns else None
        turn = TurnId(self.epoch, len(self.turns))
        delta, output = (self._rng.integers(0, VOCABULARY, n).astype("<i4") for n in (shape.delta, shape.output))
        prompt = np.concatenate([self._ids, delta])
        base_len = len(self._ids)
        self._ids = np.concatenate([prompt, output])
        self.turns.append(turn)
        return self._completed(turn, base, len(prompt), shape, version), TokenSnapshot(
            event_id=turn_event_id("TokenSnapshot", self.session_id, turn.epoch, turn.index),
            **self._common,  # type: ignore[arg-type]
            turn=turn,
            parent_turn=base,
            base_len=base_len,
            delta_ids=delta.tobytes(),
            output_ids=output.tobytes(),
            output_logprobs=(-self._rng.random(len(output))).astype("<f4").tobytes(),
            version_spans=(VersionSpan(version=version, length=len(output)),),
            boundary=Boundary.append if base else Boundary.root,
            boundary_reason="append" if base else "first",
            prompt_sha256=hashlib.sha256(prompt.tobytes()).hexdigest(),
            temperature=1.0,
            logprob_kind="at_temperature",
        )

    def zombie(self) -> SessionStory:
        """The gateway of the present epoch, which will not notice that another one takes over."""
        twin = copy.copy(self)
        twin.turns = list(self.turns)
        return twin

    def rewarded(self, value: float) -> RewardAssigned:
        """The verdict."""
        return RewardAssigned(
            event_id=digest("RewardAssigned", self.session_id),
            **self._common,  # type: ignore[arg-type]
            value=value,
            components={},
            verifier=Verifier("example", "1"),
            evidence=b"{}",
        )

    def finished(self, outcome: Outcome = Outcome.completed) -> SessionFinished:
        """The end, in the present epoch."""
        return SessionFinished(
            event_id=digest("SessionFinished", self.session_id, self.epoch),
            **self._common,  # type: ignore[arg-type]
            epoch=self.epoch,
            turns=tuple(self.turns),
            undelivered=(),
            outcome=outcome,
            reason="",
            final=True,
            expects=Expects(reward=True),
        )

    def _completed(self, turn: TurnId, base: TurnId | None, prompt: int, shape: Shape, version: int) -> TurnCompleted:
        return TurnCompleted(
            event_id=turn_event_id("TurnCompleted", self.session_id, turn.epoch, turn.index),
            **self._common,  # type: ignore[arg-type]
            turn=turn,
            request_sha256=digest("request", self.session_id, turn.epoch, turn.index),
            api="chat",
            base_turn=base,
            system_sha256="",
            tools_sha256="",
            new_messages=b"[]",
            response=b"{}",
            finish_reason=FinishReason.stop,
            aborted=False,
            prompt_tokens=prompt,
            output_tokens=shape.output,
            cached_tokens=0,
            weight_version_first=version,
            weight_version_last=version,
            queue_s=0.0,
            first_token_s=0.0,
            total_s=0.0,
            engine_id="example",
        )


def whole_group(group: GroupName, rng: np.random.Generator, *, turns: int, shape: Shape) -> Iterator[Event]:
    """A group without accidents, session after session; the last record completes it."""
    for index in range(group.size):
        story = SessionStory(group, index, rng)
        yield story.started()
        for _ in range(turns):
            yield from story.turn(shape)
        yield story.rewarded(float(rng.integers(0, 3)))
        yield story.finished()


def bad_days(
    rng: random.Random, *, groups: int, partitions: int = 1, run_id: str = "run", name: str = "group",
    ends: list[int] | None = None, alive: int = 6,
) -> Iterator[Event]:  # fmt: skip
    """About `alive` groups at a time in a random interleaving, with records that come again, however late, zombies of
    an earlier epoch that go on writing and finishing, turns of nobody, and closes that race with finishes.

    `ends`: end offset of each agent.sessions partition, kept up to date; None for an empty log."""
    tokens = np.random.default_rng(rng.getrandbits(64))
    ends = [0] * partitions if ends is None else ends
    live: list[list[list[Event]]] = []
    sent: list[Event] = []
    made = 0
    while live or made < groups:
        while len(live) < alive and made < groups:
            group = f"{name}-{made}"
            floor = ends[partition_of(group.encode(), partitions)]
            live.append(_streams(rng, GroupName(run_id, group, floor, rng.randrange(1, 4)), tokens))
            made += 1
        due = [stream.pop(0) for stream in [rng.choice(rng.choice(live))] if stream]
        sent += due
        if rng.random() < 0.1 and sent:
            due.append(rng.choice(sent))
        for event in due:
            if TOPIC_OF[type(event).__name__] is SESSIONS:
                ends[partition_of(event.group_id.encode(), partitions)] += 1
            yield event
        live = [streams for streams in live if any(streams)]


def _streams(rng: random.Random, group: GroupName, tokens: np.random.Generator) -> list[list[Event]]:
    """What the writers of one group append, each in its own order."""
    streams: list[list[Event]] = []
    names: list[str] = []
    for index in range(group.size):
        story = SessionStory(group, index, tokens)
        names.append(story.session_id)
        streams += _session(rng, story)
    if rng.random() < 0.4:
        noise = SessionStory(group, group.size + 1, tokens)
        noise.epoch = "nobody"
        members = tuple(name for name in names if rng.random() < 0.7)
        seen = 1 << 40 if rng.random() < 0.8 else 0
        closed = GroupClosed(
            event_id=digest("GroupClosed", group.group_id), run_id=group.run_id, group_id=group.group_id,
            floor=group.floor, members=members, reason="operator", seen=seen,
        )  # fmt: skip
        streams.append([*(noise.turn(Shape())[0] for _ in range(rng.randrange(6))), closed])
    return streams


def _session(rng: random.Random, story: SessionStory) -> list[list[Event]]:
    main: list[Event] = [story.started()]
    streams = [main]
    epochs = 1 + (rng.random() < 0.3)
    for epoch in range(epochs):
        if epoch:
            zombie = story.zombie()
            main.append(story.adopted())
            if rng.random() < 0.6:
                streams.append([*zombie.turn(Shape()), zombie.finished()])
        for _ in range(rng.randrange(4)):
            pair = list(story.turn(Shape(rng.randrange(1, 8), rng.randrange(1, 6))))
            rng.shuffle(pair)
            main += pair
    end: list[Event] = [story.finished(), story.rewarded(float(rng.randrange(3)))]
    rng.shuffle(end)
    main += end
    return streams


def with_players(events: Iterable[Event]) -> Iterator[Event]:
    """The same history as games: the turns of a session are those of two players that are rewarded and of one that is
    not, one of whom summarises now and then. Each player has a verdict of its own, and one in eight has failed. What
    becomes of a record depends on its id alone."""
    for event in events:
        chance = int(hashlib.sha256(event.event_id.encode()).hexdigest(), 16)
        if isinstance(event, TurnCompleted):
            yield replace(event, agent_path=PLAYER_PATHS[chance % len(PLAYER_PATHS)])
        elif isinstance(event, SessionFinished):
            yield replace(event, expects=Expects(reward=False, players=("black", "white")))
        elif isinstance(event, RewardAssigned):
            common = {name: getattr(event, name) for name in ("run_id", "group_id", "session_id", "floor", "verifier")}
            for player in ("black", "white"):
                name, chance = digest(event.event_id, player), chance // 8
                if chance % 8:
                    yield replace(event, event_id=name, player=player, value=float(chance % 3))
                else:
                    yield RewardFailed(event_id=name, cause="crashed: it broke", player=player, **common)
        else:
            yield event
