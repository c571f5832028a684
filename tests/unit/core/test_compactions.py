"""Compactions: the summary by which an agent shortens its history is a kind of its own, and trains by default."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from textwrap import dedent

import pytest

from turnlog.processors.core.audit import Ledgers
from turnlog.processors.core.fold_versions import LATEST, VERSIONS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.topics import TOPIC_OF

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
OFF = replace(RULES, train_compactions=False)
OLD = replace(RULES, version=VERSIONS["4"])


def picture(text):
    return dedent(text).strip()


def beside(s, path="side/compaction", *, main="main", summary=None):
    """As Codex and opencode do it: the summary is requested beside the conversation, without tools."""
    s.turn("a", 0, "sq", "A", agent_path=main)
    s.turn("a", 1, "sum?", "SUM", tools=False, system="summarise", agent_path=path)
    s.turn("a", 2, "sSUM", "B", agent_path=main, summary=summary)


def within(s, path, *, main="main", summary=None):
    """As Claude Code does it: the summary is requested as the next turn of the conversation, with its tools."""
    s.turn("a", 0, "sq", "A", agent_path=main)
    s.turn("a", 1, "sqAsum?", "SUM", base=0, agent_path=path)
    s.turn("a", 2, "sSUM", "B", agent_path=main, summary=summary)


def kinds(folded):
    tree = folded.trees["a"]
    return [tree.lineages[node.lineage].kind for node in tree.nodes]


def test_a_summary_beside_the_conversation_trains_with_the_credit_of_its_trajectory(story, drawn):
    s = story(size=2)
    beside(s)
    s.end("a", reward=1.0)
    s.turn("b", 0, "sq", "A", agent_path="main")
    s.end("b", reward=0.0)
    folded = s.fold(replace(RULES, estimator="dr_grpo"))
    assert drawn(folded).splitlines()[:4] == [
        "a0 main 0: sq<A>",
        "a1 compaction 1: sum?<SUM>",
        "a2* main 2: sSUM<B>",
        "a 5 = 5 trained",
    ]
    assert [(one.advantage, one.reward) for one in folded.samples] == [(0.5, 1.0)] * 3 + [(-0.5, 0.0)]


def test_a_summary_within_the_conversation_trains_in_its_row_and_is_no_turn_of_main(story, drawn):
    s = story()
    within(s, "main/compaction")
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert drawn(folded) == picture("""
        a0 compaction 0,1: sq<A>sum?<SUM>
        a1* main 2: sSUM<B>
        a 5 = 5 trained
    """)
    assert kinds(folded) == ["main", "compaction", "main"]


@pytest.mark.parametrize("tell", [beside, within])
def test_summaries_that_do_not_train_are_masked_under_a_disposition_of_their_own(story, tell):
    s = story()
    tell(s, "side/compaction" if tell is beside else "main/compaction")
    s.end("a", reward=1.0)
    folded = s.fold(OFF)
    assert folded.trees["a"].books.masked == {"compaction": 3}
    ledgers, ends = Ledgers("r", 4096, LATEST), Counter()
    for event in [*(event for _, _, event in s.arrivals), *folded.outputs]:
        topic = TOPIC_OF[type(event).__name__].name
        ledgers.add(topic, 0, ends[topic], event)
        ends[topic] += 1
    books = ledgers.close()
    assert books.balance
    assert books.levels["session"]["a"].masked == Counter({"compaction": 3, "unused": 2})


def test_titles_stay_side_calls(story):
    s = story()
    s.turn("a", 0, "title?", "TTT", tools=False, system="titles", agent_path="side/title")
    s.turn("a", 1, "sq", "A", agent_path="main")
    s.end("a", reward=1.0)
    assert s.fold(RULES).trees["a"].books.masked == {"side_call": 3}


@pytest.mark.parametrize(
    ("tell", "path", "main"),
    [(beside, None, None), (beside, "side/no-tools", "main"), (within, None, None), (within, "main", "main")],
)
def test_a_summary_that_no_profile_knows_is_recognised_by_the_root_that_quotes_it(story, tell, path, main):
    s = story()
    tell(s, path, main=main, summary=1)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert kinds(folded) == ["main", "compaction", "main"]
    assert folded.trees["a"].anchor_segment == len(folded.trees["a"].segments) - 1
    assert folded.trees["a"].books.masked == {}


def test_the_root_that_quotes_a_summary_continues_the_agent_whose_history_it_was(story):
    """Even with another system text: an agent that puts the summary there."""
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "Xgo", "x", system="explorer")
    s.turn("a", 2, "Xgoxsum?", "SUM", base=1, system="explorer")
    s.turn("a", 3, "XSUM", "y", system="explorer and SUM", summary=2)
    s.end("a", reward=1.0)
    tree = s.fold(RULES).trees["a"]
    assert [node.lineage for node in tree.nodes] == [0, 1, 2, 1]
    assert [one.kind for one in tree.lineages] == ["main", "sub_agent", "compaction"]


@pytest.mark.parametrize(
    "change",
    [
        {"path": "agent/x"},  # what a sub-agent said is no summary of main's history
        {"path": "side/title"},  # a profile knows what it is
        {"path": "player/user"},
        {"continued": True},  # the conversation went on behind it
    ],
)
def test_what_is_quoted_and_is_no_summary_stays_what_it_is(story, change):
    s = story()
    path = change.get("path", "main")
    s.turn("a", 0, "sq", "A", agent_path="main")
    s.turn("a", 1, "sqAr", "BBB", base=0, agent_path=path)
    if change.get("continued"):
        s.turn("a", 2, "sqArBBBt", "C", base=1, agent_path="main")
    s.turn("a", 3, "sBBB", "D", agent_path="main", summary=1)
    s.end("a", reward=1.0)
    assert "compaction" not in kinds(s.fold(RULES))


def test_a_compaction_of_a_sub_agent_trains_if_the_sub_agent_does(story):
    s = story()
    s.turn("a", 0, "sq", "A", agent_path="main")
    s.turn("a", 1, "Xgo", "x", agent_path="agent/x")
    s.turn("a", 2, "Xgoxsum?", "SUM", base=1, agent_path="agent/x/compaction")
    s.turn("a", 3, "XSUM", "y", agent_path="agent/x")
    s.end("a", reward=1.0)
    assert s.fold(RULES).trees["a"].books.masked == {}
    assert s.fold(replace(RULES, train_sub_agents=False)).trees["a"].books.masked == {"side_call": 5}
    assert s.fold(OFF).trees["a"].books.masked == {"compaction": 3}


def test_a_compaction_of_a_player_has_the_credit_of_the_player(story):
    s = story(size=2)
    for session, reward in (("a", 1.0), ("b", 0.0)):
        s.turn(session, 0, "wq", "W", agent_path="player/white")
        s.turn(session, 1, "wqWsum?", "SUM", base=0, agent_path="player/white/compaction")
        s.turn(session, 2, "wSUM", "X", agent_path="player/white")
        s.end_game(session, white=reward)
    folded = s.fold(replace(RULES, estimator="dr_grpo"))
    assert {(one.session_id, one.player, one.advantage) for one in folded.samples} == {
        ("a", "white", 0.5), ("b", "white", -0.5),
    }  # fmt: skip
    assert folded.score.books.masked == {}


def test_under_steps_a_summary_stands_at_the_place_of_the_turn_that_goes_on_from_it(story):
    s = story(size=2)
    for session, reward in (("a", 1.0), ("b", 0.0)):
        s.turn(session, 0, "sq", "A", agent_path="main")
        s.turn(session, 1, "sum?", "SUM", tools=False, agent_path="side/compaction")
        s.turn(session, 2, "sSUM", "B", agent_path="main")
        s.end(session, reward=reward)
    folded = s.fold(replace(RULES, estimator="step", discount=0.5))
    found = {span.turn.index: span.advantage for one in folded.samples if one.session_id == "a" for span in one.spans}
    assert found == {0: 0.25, 1: 0.5, 2: 0.5}


def test_runs_of_version_4_fold_as_they_did(story):
    """Summaries beside the conversation are side calls, those within it train as agents; the setting says nothing."""
    for rules in (OLD, replace(OLD, train_compactions=False)):
        s = story()
        beside(s, summary=1)
        s.end("a", reward=1.0)
        assert kinds(s.fold(rules)) == ["main", "side_call", "main"]
        assert s.fold(rules).trees["a"].books.masked == {"side_call": 3}
        s = story()
        within(s, "main/compaction", summary=1)
        s.end("a", reward=1.0)
        assert s.fold(rules).trees["a"].books.masked == {}
        s = story()
        within(s, None, main=None, summary=1)
        s.end("a", reward=1.0)
        assert kinds(s.fold(rules)) == ["main", "main", "main"]
