"""Flagged sessions are kept out of training by name, and the token accounting names their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.fakes.cheating.episodes import OUTPUT, Told, records_of
from tests.fakes.cheating.honest import plain_repair
from tests.fakes.cheating.planted import always_equal, reads_solution
from turnlog.fold_settings import FoldSettings
from turnlog.infra.offers import load_methods
from turnlog.processors.core.audit import Books, Ledgers
from turnlog.processors.core.cheating.sessions import RewardedSessions
from turnlog.processors.core.fold.group import GroupFold, offline
from turnlog.processors.core.fold_versions import LATEST
from turnlog.processors.core.methods.rules import FoldRules, fold_rules
from turnlog.schemas.events import Event, GroupScored, SegmentSample
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TOOL_RESULTS, TOPIC_OF, TURNS
from turnlog.setting_types import SettingsError

RULES = FoldRules(run_id="r", settings_sha256="s", estimator="dr_grpo")
EXCLUDING = replace(RULES, exclude_flagged=("hidden_files", "copied_answer"))
INPUTS = (SESSIONS.name, TURNS.name, SNAPSHOTS.name)


def group(*rewards: float) -> list[Told]:
    """A session that read the solution, one that did not, and one that failed."""
    makers = (reads_solution, plain_repair, plain_repair)
    return [
        records_of(replace(make(Random(n)), task="t", reward=reward), f"s{n}", size=3, index=n)
        for n, (make, reward) in enumerate(zip(makers, rewards, strict=True))
    ]


def recorded(told: list[Told]) -> list[tuple[str, int, int, Event]]:
    """The records with their places."""
    ends: Counter[str] = Counter()
    found = []
    for event in (event for one in told for event in one.records()):
        topic = TOPIC_OF[type(event).__name__].name
        if topic in INPUTS:
            found.append((topic, 0, ends[topic], event))
            ends[topic] += 1
    return found


def books(records: list[tuple[str, int, int, Event]], outputs: list[Event]) -> Books:
    """The token accounting of records and of what was folded from them."""
    ledgers, ends = Ledgers("r", 4096, LATEST), Counter[str]()
    for event in [*(event for *_, event in records), *outputs]:
        topic = TOPIC_OF[type(event).__name__].name
        ledgers.add(topic, 0, ends[topic], event)
        ends[topic] += 1
    return ledgers.close()


def test_a_flagged_session_is_excluded_by_name_and_its_tokens_are_accounted_for() -> None:
    records = recorded(group(1.0, 1.0, 0.0))
    outputs = offline(records, EXCLUDING)
    score = next(one for one in outputs if isinstance(one, GroupScored))
    flagged, *others = score.rollouts
    assert (flagged.excluded_reason, flagged.flags, flagged.advantage) == (
        "flagged", ("copied_answer", "hidden_files"), None,
    )  # fmt: skip
    assert [(one.excluded_reason, one.flags, one.advantage) for one in others] == [(None, (), 0.5), (None, (), -0.5)]
    assert score.detectors == ("copied_answer/1", "hidden_files/1")
    assert {one.session_id for one in outputs if isinstance(one, SegmentSample)} == {"s1", "s2"}
    turns = len(next(event for *_, event in records if event.event_id == "s0/finish").turns)
    assert score.books.masked == {"flagged": turns * OUTPUT}
    found = books(records, outputs)
    assert found.balance, found.imbalances
    assert found.levels["session"]["s0"].masked == {"flagged": turns * OUTPUT}


def test_nothing_is_excluded_unless_the_settings_say_so() -> None:
    score = offline(recorded(group(1.0, 1.0, 0.0)), RULES)[-1]
    assert [one.excluded_reason for one in score.rollouts] == [None, None, None]
    assert (score.detectors, {one.flags for one in score.rollouts}) == ((), {()})


def test_only_success_is_suspicious() -> None:
    score = offline(recorded(group(0.0, 1.0, 0.0)), EXCLUDING)[-1]
    assert [one.excluded_reason for one in score.rollouts] == [None, None, None]
    above = replace(EXCLUDING, flagged_above=1.0)
    assert offline(recorded(group(1.0, 1.0, 0.0)), above)[-1].rollouts[0].flags == ()


def test_a_detector_that_is_not_named_excludes_nothing() -> None:
    named = replace(RULES, exclude_flagged=("git_history",))
    assert offline(recorded(group(1.0, 1.0, 0.0)), named)[-1].rollouts[0].excluded_reason is None


def test_a_group_of_which_too_few_sessions_are_honest_is_discarded_and_drawn_again() -> None:
    told = [records_of(replace(always_equal(Random(n)), task="t"), f"s{n}", size=2, index=n) for n in range(2)]
    records = recorded(told)
    outputs = offline(records, replace(RULES, exclude_flagged=("verifier_bypassed",)))
    assert (outputs[-1].status.value, outputs[-1].reason) == ("discarded", "too_few_valid")
    assert books(records, outputs).balance


def test_flags_do_not_depend_on_the_order_in_which_topics_are_read() -> None:
    records = recorded(group(1.0, 1.0, 0.0))
    expected = {one.event_id: one for one in offline(records, EXCLUDING)}
    for seed in range(20):
        rng = Random(seed)
        waiting = {topic: [one for one in records if one[0] == topic] for topic in INPUTS}
        shuffled = []
        while any(waiting.values()):
            topic = rng.choice([name for name, left in waiting.items() if left])
            shuffled.append(waiting[topic].pop(0))
        assert {one.event_id: one for one in offline([*shuffled, *shuffled], EXCLUDING)} == expected
        sessions = RewardedSessions(LATEST, {})
        seen = [one for topic, _, offset, event in shuffled if topic != SNAPSHOTS.name
                for one in sessions.apply(offset, 5, event)]  # fmt: skip
        assert sorted(one.session_id for one in seen) == ["s0", "s1", "s2"]
        assert {one.ended_ms for one in seen} == {5}


def test_turns_that_the_finish_does_not_name_are_not_looked_at() -> None:
    told = group(1.0, 1.0, 0.0)
    assert told[0].finished is not None
    told[0].finished = replace(told[0].finished, turns=told[0].finished.turns[:2])
    assert offline(recorded(told), EXCLUDING)[-1].rollouts[0].flags == ()


def test_the_messages_of_sessions_are_forgotten_with_their_trees() -> None:
    fold = GroupFold("g", 0, EXCLUDING)
    for topic, _, offset, event in recorded(group(1.0, 1.0, 0.0)):
        fold.apply(topic, offset, event)
    assert fold.complete
    assert fold._texts == {}


def rules(*names: str) -> FoldRules:
    fold = FoldSettings(exclude_flagged=names)
    return fold_rules(fold, run_id="r", settings_sha256="", methods=load_methods(fold))


def test_a_name_that_cannot_exclude_is_refused_when_settings_are_read() -> None:
    assert rules("clock", "clock").detectors[0].label == "clock/1"
    with pytest.raises(SettingsError, match=r"identical_solutions looks at several sessions.* cannot exclude"):
        rules("identical_solutions")
    with pytest.raises(SettingsError, match=r"fold.exclude_flagged must be one of .*turnlog.cheat_detectors, got 'no'"):
        rules("no")


def test_results_of_tools_are_no_input_of_the_fold() -> None:
    """The flags of the fold follow from turns: a run replays without agent.tool-results."""
    assert TOOL_RESULTS.name not in INPUTS
    without = [one for one in recorded(group(1.0, 1.0, 0.0)) if one[0] in INPUTS]
    assert offline(without, EXCLUDING)[-1].rollouts[0].flags
