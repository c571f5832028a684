"""`turnlog log tail`, `turnlog log why` and `turnlog log session show --tree`: human-readable views of the log and its
decisions.

Text by agents and tools is shown as plain text: none of its escape sequences reach the terminal
(infra/roles/terminal.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import orjson
from rich.text import Text
from rich.tree import Tree

from turnlog.consumers.event_json import as_json
from turnlog.consumers.index import BadQuestion, fate
from turnlog.consumers.index.reader import GroupView, Index, Row, SessionView, path_of, resolve_id, where_of
from turnlog.consumers.index.rows import message_texts
from turnlog.infra.access.audit import audit_command
from turnlog.infra.history import caught_up
from turnlog.infra.log import Partition, Record
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.terminal import Terminal, aside, say, say_json
from turnlog.names import ExitStatus
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import ALL, Event
from turnlog.schemas.topics import BY_NAME
from turnlog.schemas.types import BlobRef, TurnId
from turnlog.settings import Settings

SAID = 100
"""Maximum length of one printed value in characters."""
LEFT_OUT = frozenset({"event_id", "run_id", "group_id", "session_id", "floor"})
COLOURS = {"": "green", "unused": "yellow", "length_cut": "magenta", "version_mask": "magenta", "stale": "magenta"}
"""Colour of a token by mask reason, "" for trained ones; any other reason is red."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Filter for events. Empty fields let everything pass; ids match by prefix."""

    session: str = ""
    group: str = ""
    kinds: frozenset[str] = frozenset()

    def passes(self, event: Event) -> bool:
        """Return whether an event passes the filter."""
        return (
            (not self.kinds or type(event).__name__ in self.kinds)
            and str(getattr(event, "session_id", "")).startswith(self.session)
            and str(getattr(event, "group_id", "")).startswith(self.group)
        )

    def topics(self) -> list[str]:
        """Return the topics that can hold such events."""
        return [name for name, topic in BY_NAME.items() if not self.kinds or self.kinds & set(topic.records)]


def line(record: Record, event: Event) -> str:
    """Format an event as one line: time, position, type, group and session, and its fields."""
    at = time.strftime("%H:%M:%S", time.gmtime(record.timestamp_ms / 1000))
    of = " ".join(str(getattr(event, name))[:12] for name in ("group_id", "session_id") if getattr(event, name, None))
    said = " ".join(f"{name}={_short(value)}" for name, value in _facts(event))
    where = f"{record.topic}[{record.partition}]@{record.offset}"
    return f"{at} {where} {type(event).__name__} {of} {said}"


def _facts(event: Event) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name not in LEFT_OUT and value not in (None, "", (), {}, b""):
            yield field.name, value


def _short(value: object) -> str:
    match value:
        case bytes():
            text = value.decode(errors="replace")
            return f"{len(value)}B" if "\x00" in text or "\ufffd" in text else _cut(text)
        case BlobRef():
            return f"blob {value.sha256[:12]} ({value.size}B)"
        case TurnId():
            return f"{value.epoch[:6]}/{value.index}"
        case tuple() | list() if len(value) > 3:
            return f"[{len(value)}]"
        case float():
            return f"{value:.4g}"
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= SAID else text[: SAID - 1] + "…"


async def tail(
    role: Role, wanted: EventFilter, *, since_start: bool, until_end: bool
) -> AsyncIterator[tuple[Record, Event]]:
    """Yield wanted events, starting from the ends or the starts of their topics. Partitions are read side by side."""
    known = await role.log.topics()
    places = [Partition(name, n) for name in wanted.topics() if name in known for n in range(known[name].partitions)]
    ends = await role.log.end_offsets(places)
    starts = await role.log.start_offsets(places) if since_start else ends
    async with role.log.reader(patient=True) as reader:
        reader.assign(starts)
        while not (until_end and caught_up(reader, ends)):
            for record in sorted(await reader.poll(timeout_s=0.5), key=lambda record: record.timestamp_ms):
                try:
                    event = await role.events.decode(record)
                except UndecodableRecord as error:
                    aside(f"skipped: {error}")
                    continue
                if wanted.passes(event):
                    yield record, event


def tail_command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print events until stopped, and return the exit status. Raises BadQuestion, LogError."""
    if unknown := set(arguments.kind) - set(ALL):
        raise BadQuestion(f"--kind {', '.join(sorted(unknown))}: docs/events.md lists the kinds")
    wanted = EventFilter(session=arguments.session, group=arguments.group, kinds=frozenset(arguments.kind))
    return run_verb(_tail(settings, arguments, wanted))


async def _tail(settings: Settings, arguments: argparse.Namespace, wanted: EventFilter) -> int:
    archive = arguments.source == "archive"
    async with open_role("tail", settings, archive=archive) as role:
        await audit_command(role, "look", "records", tuple(filter(None, (arguments.session, arguments.group))))
        whole = {"since_start": arguments.all or archive, "until_end": arguments.until_end or archive}
        async for record, event in tail(role, wanted, **whole):
            if arguments.json:
                say_json(as_json(record, event), indent=None)
            else:
                say(line(record, event))
    return ExitStatus.DONE


TOKEN = re.compile(r"(.+):(\d+):(\d+)")


def why_command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the chain of records that decided about the subject, and return the exit status. Raises IndexFailure,
    LogError."""
    token = TOKEN.fullmatch(arguments.about)
    with Index.open(path_of(settings)) as index, index.snapshot():
        kind, name = resolve_id(index, token[1] if token else arguments.about)
        if kind == "group":
            group = index.group(name)
            assert group is not None
            return _tell_chain(_group_head(group), _group_chain(index, group), arguments)
        view = index.session(name)
        assert view is not None
        if token is None:
            return _tell_chain(_session_head(view), fate.of_session(view), arguments)
        turns = run_verb(_tokens(settings, index, view, archive=arguments.source == "archive"))
        return _tell_chain(_token_head(turns, int(token[2]), int(token[3])), fate.of_session(view), arguments)


async def _tokens(settings: Settings, index: Index, view: SessionView, *, archive: bool) -> list[fate.TurnTokens]:
    async with open_role("session", settings, archive=archive) as role:
        await audit_command(role, "look", "session", (view.row.session_id,))
        return await fate.tokens(role, index, view)


async def _audit_look(settings: Settings, session_id: str, *, archive: bool) -> None:
    async with open_role("session", settings, archive=archive) as role:
        await audit_command(role, "look", "session", (session_id,))


def _session_head(view: SessionView) -> str:
    row = view.row
    return f"session {row.session_id}: {row.fate}; reward {row.reward}, {row.turns} turns, {row.output_tokens} tokens"


def _group_head(group: GroupView) -> str:
    return f"group {group.row['group_id']}: {group.row['status']}; {len(group.sessions)} sessions"


def _group_chain(index: Index, group: GroupView) -> list[fate.Link]:
    sessions = {row.session_id: row for row in group.sessions}
    links = [
        fate.Link(where_of(each["place"]), each["kind"], _of_member(sessions, each["session_id"]))
        for each in group.events
    ]
    if group.score is not None:
        rollouts = ", ".join(
            f"{each['session_id'][:12]} {'excluded: ' + each['excluded'] if each['excluded'] else each['reward']}"
            for each in orjson.loads(group.score["rollouts"])
        )
        reason = f": {group.score['reason']}" if group.score["reason"] else ""
        links.append(fate.Link(
            where_of(group.score["place"]), "GroupScored", f"{group.score['status']}{reason} ({rollouts})",
        ))  # fmt: skip
    drawn = index.rows(
        "SELECT d.batch_index, d.draw_index, m.place FROM batch_groups d "
        "JOIN batches m ON m.batch_index = d.batch_index WHERE d.group_id = ? ORDER BY d.batch_index",
        group.row["group_id"],
    )
    links += [
        fate.Link(
            where_of(each["place"]), "SampleBatchFormed", f"batch {each['batch_index']} of draw {each['draw_index']}"
        )
        for each in drawn
    ]
    links += [
        fate.Link("", "dropped", f"sample {each['sample_id'][:12]}: {each['reason']}, {each['sampled_tokens']} tokens")
        for each in group.drops
    ]
    return links


def _of_member(sessions: Mapping[str, Any], name: str | None) -> str:
    row = sessions.get(name or "")
    return "" if row is None else f"session {row.session_id[:12]}: {row.fate}, {row.outcome}, reward {row.reward}"


def _token_head(turns: list[fate.TurnTokens], number: int, token: int) -> str:
    """Describe one token and what became of it. Raises BadQuestion if the token does not exist."""
    if number >= len(turns) or token >= len(turns[number].ids):
        sizes = ", ".join(str(len(turn.ids)) for turn in turns)
        raise BadQuestion(f"token {number}:{token} is not in the outputs of its turns, which have {sizes} tokens")
    turn = turns[number]
    reason = turn.reasons[token]
    what = (
        f"masked: {reason}"
        if reason
        else f"trained in batch {turn.batch} by step {turn.step}, advantage {turn.advantage:.4g}"
    )
    return (
        f"token {number}:{token} (id {turn.ids[token]}, log-prob {turn.logprobs[token]:.4f}, version "
        f"{turn.versions[token]}, segment {turn.segment}, {where_of(turn.place)}): {what}"
    )


def _tell_chain(head: str, links: list[fate.Link], arguments: argparse.Namespace) -> int:
    if arguments.json:
        say_json({"about": head, "records": [dataclasses.asdict(link) for link in links]})
        return ExitStatus.DONE
    say(head, *(f"  {link.at}  {link.kind}  {link.says}".rstrip() for link in links))
    return ExitStatus.DONE


def show_session(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print a session's turn tree and, if requested, its tokens. Raises IndexFailure, LogError."""
    with Index.open(path_of(settings)) as index, index.snapshot():
        kind, name = resolve_id(index, arguments.id)
        if kind != "session":
            raise BadQuestion(f"{name} is a group: `turnlog log why {name}` names its sessions")
        view = index.session(name)
        assert view is not None
        turns = None
        if arguments.tokens:
            turns = run_verb(_tokens(settings, index, view, archive=arguments.source == "archive"))
        elif settings.access.audit:  # the index alone is not the log
            run_verb(_audit_look(settings, name, archive=arguments.source == "archive"))
    if arguments.json:
        body = dataclasses.asdict(view.row) | {"turns": view.turns, "calls": view.calls, "tree": view.tree}
        say_json(body | ({} if turns is None else {"tokens": [turn.body() for turn in turns]}))
    else:
        Terminal().print(build_turn_tree(view, turns))
    return ExitStatus.DONE


def build_turn_tree(view: SessionView, turns: list[fate.TurnTokens] | None = None) -> Tree:
    """Build the turn tree: each turn below the one that it continues, with its text, tool calls and tokens."""
    tokens = {turn.turn: turn for turn in turns or ()}
    root = Tree(Text(_session_head(view), style="bold"))
    nodes: dict[tuple[str, int], Tree] = {}
    for row in view.turns:
        base = nodes.get((row["base_epoch"], row["base_index"]), root)
        node = nodes[row["epoch"], row["turn_index"]] = base.add(Text(_turn_head(row)))
        said = " ".join(message_texts((row["response"] or "").encode())) or "(stored apart)"
        node.add(Text(_cut(said.replace("\n", " ")), style="italic"))
        if (own := tokens.get((row["epoch"], row["turn_index"]))) is not None:
            node.add(_format_tokens(own))
    for call in view.calls:
        root.add(Text(_call(call)))
    return root


def _call(call: Row) -> str:
    output = _cut((call["output"] or "").replace("\n", " "))
    return (
        f"call {call['call_seq']} {call['tool']} {_cut(call['arguments'])}: {call['status']}, "
        f"exit {call['exit_code']}, {call['duration_s'] or 0:.2f} s: {output}"
    )


def _turn_head(row: Row) -> str:
    who = f" {row['agent_path']}" if row["agent_path"] else ""
    return (
        f"turn {row['turn_index']}{who}: {row['prompt_tokens']} + {row['output_tokens']} tokens, "
        f"{row['finish_reason']}, version {row['version_first']}-{row['version_last']}, {row['total_s']:.2f} s, "
        f"{where_of(row['place'])}"
    )


def _format_tokens(turn: fate.TurnTokens) -> Text:
    shown = Text()
    for token, reason in zip(turn.ids.tolist(), turn.reasons, strict=True):
        shown.append(f"{token} ", style=COLOURS.get(reason, "red"))
    counts = fate.tally([turn])
    shown.append("(" + ", ".join(f"{n} {reason or 'trained'}" for reason, n in sorted(counts.items())) + ")")
    return shown
