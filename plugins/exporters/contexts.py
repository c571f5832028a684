"""A recorded session as contexts: each is a history of messages that the policy saw and continued, in order.

A context ends where the next turn of its lineage does not continue its last one: after a compaction, a retry or a
branch. Formats for whole sessions are written from these (atif.py, hub_traces.py). Everything is read from the log; the
index only names the records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from turnlog.consumers.index import fate
from turnlog.consumers.index.fate import TurnTokens
from turnlog.consumers.index.reader import Index, SessionView
from turnlog.infra.blobs import Blobs
from turnlog.infra.roles.role import Role
from turnlog.plugins.dashboard.conversation import OFF_MAIN, ROLES, TurnView, conversation
from turnlog.plugins.dashboard.records import started_of
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.images import picture
from turnlog.schemas.events import SessionStarted, TokenSnapshot, TurnCompleted
from turnlog.schemas.json_depth import deeper_than
from turnlog.schemas.types import BlobRef, int32s

MAIN = "main"
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RecordedImage:
    """An image of a message, stored by its hash."""

    ref: BlobRef
    content: bytes


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message of a context."""

    turn: TurnView
    """Turn whose request or response contains it."""
    role: str
    """system, user, assistant or tool."""
    parts: Sequence[str | RecordedImage]
    """Texts and images in order."""
    reasoning: str
    calls: Sequence[Mapping[str, Any]]
    """Tool calls as recorded, in OpenAI's format."""
    call_id: str
    """Id of the call that a tool message answers, else empty."""
    sampled: bool
    """True if it is the response of `turn`; False for messages of requests."""
    copied: bool
    """True if an earlier context contains it already."""

    @property
    def text(self) -> str:
        """Texts joined by line breaks, with a placeholder per image."""
        return "\n".join(part if isinstance(part, str) else "[image]" for part in self.parts)


@dataclass(slots=True, eq=False)
class Context:
    """A history of messages, from its first message to the response of its last turn."""

    lineage: str
    """`main`, or the id of a sub-agent or side call within the session."""
    kind: str
    """main, player, sub_agent, side_call or compaction."""
    number: int
    """Number in its lineage, from 0."""
    after: TurnView | None
    """Last turn of the main lineage before it began; None if there is none."""
    turns: list[TurnView] = field(default_factory=list)
    """Turns that were sampled in it."""
    messages: list[RecordedMessage] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    """Schemas of the tools that its last turn was offered."""


class ExportedSession:
    """The records of a session, read from the log."""

    def __init__(
        self, view: SessionView, started: SessionStarted | None, turns: Mapping[TurnKey, TurnCompleted],
        tokens: Mapping[TurnKey, TurnTokens], prompts: Mapping[TurnKey, Ids], images: Mapping[str, bytes],
    ) -> None:  # fmt: skip
        """`images` are the contents of images by sha256. Use `read_session`."""
        self.view = view
        self.started = started
        self.tokens = tokens
        self.prompts = prompts
        """Token ids of each turn's whole prompt, unless a record that they depend on is missing or damaged."""
        self._turns = turns
        self._images = images

    def contexts(self) -> list[Context]:
        """Return the contexts in the order in which they began."""
        found: list[Context] = []
        ends: dict[int, Context] = {}
        """Last turn of each context -> the context."""
        told = conversation(self.view).turns
        main: TurnView | None = None
        for turn in told:
            context = None if turn.base is None else ends.pop(turn.base, None)
            if context is None:
                context = self._open(turn, told, found, main)
                found.append(context)
            self._add(context, turn, copied=False)
            ends[turn.number] = context
            main = turn if context.lineage == MAIN else main
        return found

    def _open(
        self, turn: TurnView, told: Sequence[TurnView], found: Sequence[Context], main: TurnView | None
    ) -> Context:
        """Return a new context that holds what `turn` continues."""
        kind = turn.kind if turn.kind in OFF_MAIN else MAIN
        lineage = MAIN if kind == MAIN else turn.row["agent_path"] or f"{kind}-{_root_of(turn, told).number}"
        number = sum(each.lineage == lineage for each in found)
        context = Context(lineage, kind, number, main)
        for earlier in _line(turn, told):
            self._add(context, earlier, copied=True)
        return context

    def _add(self, context: Context, turn: TurnView, *, copied: bool) -> None:
        if not copied:
            context.turns.append(turn)
        event = self._turns[_key(turn)]
        if event.tools is not None:
            context.tools = [each for each in _parse(event.tools, list) if isinstance(each, dict)]
        elif not event.tools_sha256:
            context.tools = []
        for raw in _parse(event.new_messages, list):
            context.messages.append(self._message(turn, raw, sampled=False, copied=copied))
        response = {"role": "assistant", **_parse(event.response, dict)}
        context.messages.append(self._message(turn, response, sampled=True, copied=copied))

    def _message(self, turn: TurnView, raw: Any, *, sampled: bool, copied: bool) -> RecordedMessage:
        fields = raw if isinstance(raw, dict) else {"content": orjson.dumps(raw).decode()}
        role = str(fields.get("role"))
        calls = fields.get("tool_calls")
        return RecordedMessage(
            turn, ROLES.get(role, role if role in ("system", "assistant", "tool") else "user"),
            list(self._parts(fields.get("content"))),
            str(fields.get("reasoning_content") or fields.get("reasoning") or ""),
            [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else [],
            str(fields.get("tool_call_id") or ""), sampled, copied,
        )  # fmt: skip

    def _parts(self, content: Any) -> Iterator[str | RecordedImage]:
        for block in content if isinstance(content, list) else [content] if content else []:
            text = block if isinstance(block, str) else block.get("text") if isinstance(block, dict) else None
            ref = image_of(block)
            if ref is not None and ref.sha256 in self._images:
                yield RecordedImage(ref, self._images[ref.sha256])
            else:
                yield text if isinstance(text, str) else orjson.dumps(block).decode()


async def read_session(role: Role, index: Index, view: SessionView) -> ExportedSession:
    """Read the records of a session. Raises RecordGone, NothingToReplay, BlobMissing, LogError, ArchiveError."""
    events = await fate.session_events(role, view)
    turns = {key_of(event.turn): event for event in events.values() if isinstance(event, TurnCompleted)}
    snapshots = [events[row["place"]] for row in view.snapshots]
    tokens = {turn.turn: turn for turn in await fate.tokens(role, index, view, events)}
    images: dict[str, bytes] = {}
    for event in turns.values():
        await _fetch_images(event, role.blobs, images)
    return ExportedSession(view, await started_of(role, index, view), turns, tokens, _prompts(snapshots), images)


async def _fetch_images(event: TurnCompleted, blobs: Blobs, images: dict[str, bytes]) -> None:
    for raw in _parse(event.new_messages, list):
        content = raw.get("content") if isinstance(raw, dict) else None
        for block in content if isinstance(content, list) else []:
            ref = image_of(block)
            if ref is not None and ref.sha256 not in images:
                images[ref.sha256] = picture(block, "").content or await blobs.get(ref)


def file_name(file: str, what: str, number: int) -> str:
    """Return the name of a further file of a session: `a.json` becomes `a.WHAT-1.json`. Number 0 is `file` itself."""
    path = PurePath(file)
    return str(path.with_name(f"{path.stem}.{what}-{number}{path.suffix}")) if number else file


def image_of(block: Any) -> BlobRef | None:
    """Return the reference of an image block, or None for other blocks and images that the gateway does not serve."""
    if not isinstance(block, dict) or block.get("type") != "image_url":
        return None
    try:
        return picture(block, "").ref
    except BadRequest:
        return None


def _prompts(snapshots: Sequence[Any]) -> dict[TurnKey, Ids]:
    """Return the whole prompt of each turn. Snapshots are deltas to earlier ones; a prompt that is not the one that the
    gateway hashed is left out."""
    prompts: dict[TurnKey, Ids] = {}
    whole: dict[TurnKey, Ids] = {}
    for event in snapshots:
        assert isinstance(event, TokenSnapshot)
        assert isinstance(event.delta_ids, bytes)
        assert isinstance(event.output_ids, bytes)
        prompt = int32s(event.delta_ids)
        if event.parent_turn is not None and (before := whole.get(key_of(event.parent_turn))) is not None:
            prompt = np.concatenate([before[: event.base_len], prompt])
        key = key_of(event.turn)
        if hashlib.sha256(prompt.tobytes()).hexdigest() == event.prompt_sha256:
            prompts[key], whole[key] = prompt, np.concatenate([prompt, int32s(event.output_ids)])
    return prompts


def _line(turn: TurnView, told: Sequence[TurnView]) -> list[TurnView]:
    """Return the turns that `turn` continues, first to last."""
    line: list[TurnView] = []
    while turn.base is not None:
        turn = told[turn.base]
        line.append(turn)
    return line[::-1]


def _root_of(turn: TurnView, told: Sequence[TurnView]) -> TurnView:
    return next(iter(_line(turn, told)), turn)


def _key(turn: TurnView) -> TurnKey:
    return turn.row["epoch"], turn.row["turn_index"]


def _parse(content: Any, kind: type[Any]) -> Any:
    """Parse JSON of a record. Return an empty `kind` if it is something else, malformed or too deeply nested."""
    assert isinstance(content, bytes)
    if content and not deeper_than(content):
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = None
        if isinstance(value, kind):
            return value
    return kind()
