"""`turnlog log fold --policy A --against B` over a log in memory: a story whose numbers are known."""

from __future__ import annotations

import argparse
import io
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from rich.console import Console

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs, externalize_payloads
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import events as events_of_topic
from turnlog.infra.log import TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import RunConfigured, SessionStarted
from turnlog.schemas.topics import CATALOGUE, SESSIONS
from turnlog.settings import KafkaSettings, RunSettings, Settings, SettingsError, fold_settings_json
from turnlog.verbs.fold_comparison import NoUniqueSession, Scope, compare, drawings, rows_to_show, sessions, totals
from turnlog.verbs.replay import fold_arguments

SETTINGS = Settings(run=RunSettings(id="r"), kafka=KafkaSettings(groups=2))
ASKED = {"role": "user", "content": "q"}


def answer(text):
    return {"role": "assistant", "content": text}


def tell(s):
    """a: its first answer drifts by a token; b: its first answer comes back rewritten; c: nothing happens."""
    s.turn("a", 0, "sq", "AAAA", messages=[ASKED], response=answer("A"))
    s.turn("a", 1, "sqAAAzr", "BB", base=0, messages=[{"role": "tool", "content": "r"}], response=answer("B"))
    s.turn("b", 0, "sq", "CCC", messages=[ASKED], response=answer("C"))
    s.turn("b", 1, "sqcr", "D", messages=[ASKED, answer("c"), {"role": "tool", "content": "r"}], response=answer("D"))
    s.turn("c", 0, "sq", "EE", messages=[ASKED], response=answer("E"))
    s.turn("c", 1, "sqEEr", "F", base=0, messages=[{"role": "tool", "content": "r"}], response=answer("F"))
    for number, session in enumerate("abc"):
        s.end(session, reward=float(number))


@pytest.fixture
async def role(story) -> AsyncIterator[Role]:
    """A run with one settled group, one that goes on, and payloads in the store."""
    told, going_on = story(size=3), story(size=3)
    tell(told)
    going_on.turn("d", 0, "sq", "G", messages=[ASKED])
    configured = RunConfigured(
        event_id="run", run_id="r", settings=fold_settings_json(SETTINGS), settings_sha256="s" * 64, fold_version="1"
    )
    log, blobs = MemoryLog(), MemoryBlobs()
    await log.create_topics([TopicSpec(t.name, 2 if t.partitions == "groups" else 1, 1, {}) for t in CATALOGUE])
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        await events.append(configured)
        for _, _, event in told.arrivals:
            await events.append(await externalize_payloads(event, blobs, limit=20))
        for _, _, event in going_on.arrivals:
            await events.append(replace(event, group_id="h"))
        yield Role("fold", "fold-0", SETTINGS, log, events, blobs, Health("fold"))


def text(shown) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(shown)
    return console.file.getvalue()


def lines(golden: str) -> str:
    return "\n".join(line.strip() for line in golden.strip().splitlines())


async def test_who_comes_from_slime_sees_what_was_lost(role: Role) -> None:
    found = await compare(role, ["slime", "prefix"])
    assert lines(text(totals(found))) == lines("""
                            3 sessions
        ┏━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━┓
        ┃ tokens                 ┃ slime ┃ prefix ┃ difference ┃
        ┡━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━┩
        │ segments (rows)        │     3 │      5 │         +2 │
        │ sampled                │    13 │     13 │          = │
        │ trained                │     6 │     13 │         +7 │
        │ masked: realigned      │     4 │      0 │         -4 │
        │ masked: rewritten      │     3 │      0 │         -3 │
        │ context computed again │     0 │      7 │         +7 │
        │ in all rows            │    20 │     31 │        +11 │
        └────────────────────────┴───────┴────────┴────────────┘
    """)
    assert lines(text(sessions(found, rows_to_show(found)))) == lines("""
                                 sessions that differ most
        ┏━━━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┓
        ┃ session ┃ turns ┃ policy ┃ segments ┃ trained ┃ masked      ┃ context again ┃
        ┡━━━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━┩
        │ a       │     2 │ slime  │        1 │       2 │ 4 realigned │             0 │
        │         │       │ prefix │        2 │       6 │             │             5 │
        ├─────────┼───────┼────────┼──────────┼─────────┼─────────────┼───────────────┤
        │ b       │     2 │ slime  │        1 │       1 │ 3 rewritten │             0 │
        │         │       │ prefix │        2 │       4 │             │             2 │
        └─────────┴───────┴────────┴──────────┴─────────┴─────────────┴───────────────┘
    """)
    assert (found.sessions, found.open_groups, found.refused) == (3, 1, 0)


async def test_the_json_says_the_same(role: Role) -> None:
    body = (await compare(role, ["prefix", "last-turn"], Scope(session="c"))).body()
    assert body["policies"] == ["prefix", "last-turn"]
    assert [row["session_id"] for row in body["rows"]] == ["c"]
    assert body["totals"] == [
        {"segments": 1, "sampled": 3, "trained": 3, "masked": {}, "duplicated": 0, "tokens": 6},
        {"segments": 2, "sampled": 3, "trained": 3, "masked": {}, "duplicated": 4, "tokens": 10},
    ]


async def test_a_session_is_drawn_under_each_policy(role: Role) -> None:
    found = await compare(role, ["", "slime"], Scope(session="a", draw=True))
    assert drawings(found) == (
        "prefix\na0 main 0: 2 <4>\na1* main 1: 7 <2>\na 6 = 6 trained\n\n"
        "slime\na0* main 1: 7 <2>\na 6 = 2 trained + 4 realigned\n"
    )


async def test_the_threshold_may_be_another_and_only_the_sessions_that_differ_most_are_kept(role: Role) -> None:
    found = await compare(role, ["slime", "prefix"], Scope(group="g", top=1), threshold=0)
    assert [tally.trained for tally in found.totals] == [13, 13]
    assert found.open_groups == 0
    assert len(found.rows) == 1


async def test_the_beginning_of_an_id_is_enough_where_only_one_begins_with_it(role: Role) -> None:
    started = next(
        event
        for _, event in [pair async for pair in events_of_topic(role, SESSIONS)]
        if isinstance(event, SessionStarted)
    )
    for session in ("long-1", "long-2"):
        await role.events.append(replace(started, event_id=session, session_id=session, group_id=f"of-{session}"))
    found = await compare(role, ["slime"], Scope(session="long-1", group="of"))
    assert (found.sessions, found.open_groups) == (0, 1)
    with pytest.raises(NoUniqueSession, match="2 sessions or groups 'long'"):
        await compare(role, ["slime"], Scope(session="long"))
    with pytest.raises(NoUniqueSession, match="2 sessions or groups 'of-'"):
        await compare(role, ["slime"], Scope(group="of-"))


async def test_what_is_not_there_is_named(role: Role) -> None:
    with pytest.raises(NoUniqueSession, match="'nobody'"):
        await compare(role, ["slime"], Scope(session="nobody"))
    with pytest.raises(SettingsError, match=r"fold\.policy must be one of last-turn, prefix, slime"):
        await compare(role, ["unheard-of"])


def test_the_options_are_parsed() -> None:
    verb = argparse.ArgumentParser()
    fold_arguments(verb)
    options = verb.parse_args(["--policy", "slime", "--against", "prefix", "--from", "archive", "--show", "a"])
    assert (options.policy, options.against, options.source, options.show) == ("slime", "prefix", "archive", "a")
