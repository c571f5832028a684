"""agent.sessions in offset order decides: epochs, finishes, verdicts, members; races and late facts."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from turnlog.processors.core.fold.group import offline
from turnlog.processors.core.fold.spine import ControlStreamFold, SessionFoldState
from turnlog.processors.core.fold_versions import LATEST
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.runtime.watch import GroupWatch, ReaperLimits
from turnlog.schemas.events import Expects, GroupStatus, Outcome, Purpose, RewardFailed, StepRewardAssigned, Verifier

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)


def one_turn(s, session, output="A", **start):
    s.start(session, **start)
    s.turn(session, 0, "sq", output)


def test_a_finish_of_an_older_epoch_does_not_count(story):
    s = story()
    one_turn(s, "a")
    s.adopt("a")
    s.finish("a", epoch=0, outcome=Outcome.infra_failure)  # the zombie
    s.turn("a", (1, 0), "sqAr", "BB", base=(0, 0))
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert folded.trees["a"].outcome is Outcome.completed
    assert folded.score.books.trained == 3


def test_the_first_finish_and_the_first_verdict_that_count_win(story):
    s = story()
    one_turn(s, "a")
    s.reward("a", 0.25)
    s.reward("a", 1.0)
    s.finish("a", outcome=Outcome.truncated)
    s.finish("a", outcome=Outcome.completed)
    folded = s.fold(RULES)
    assert (folded.trees["a"].outcome, folded.trees["a"].reward) == (Outcome.truncated, 0.25)


def test_a_repeated_start_does_not_reopen_its_epoch(story):
    s = story()
    one_turn(s, "a")
    s.adopt("a")
    s.write(s.topics["agent.sessions"][0])
    s.finish("a", epoch=0, outcome=Outcome.infra_failure)
    s.end("a", reward=1.0)
    assert s.fold(RULES).trees["a"].outcome is Outcome.completed


def test_a_repeated_adoption_does_not_take_the_session_back(story):
    s = story()
    one_turn(s, "a")
    s.adopt("a")
    first = s.arrivals[-1][2]
    s.adopt("a")
    s.write(first)
    s.finish("a", epoch=1, outcome=Outcome.infra_failure)
    s.end("a", reward=1.0, epoch=2)
    assert s.fold(RULES).trees["a"].outcome is Outcome.completed


def test_a_void_close_stays_void_when_it_comes_again(story, folded):
    s = story(size=2)
    one_turn(s, "a")
    s.end("a", reward=1.0)
    s.close("a", seen=8)
    spine = [record for record in s.arrivals if record[0] == "agent.sessions"]
    group = s.fold(RULES).group
    assert folded([spine[0], spine[-1]], RULES, group).outputs == []
    assert not group.complete


def test_a_session_waits_for_the_verdict_and_the_step_rewards_that_it_expects(story):
    s = story()
    one_turn(s, "a")
    s.finish("a", expects=Expects(reward=True, step_rewards=1))
    s.reward("a", 1.0)
    assert s.fold(RULES).outputs == []
    about = s.about("step", "a")
    s.write(StepRewardAssigned(**about, turn=s.id("a", 0), value=0.5, components={}, verifier=Verifier("exact", "1")))
    assert s.fold(RULES).score.status is GroupStatus.trained


def test_a_verifier_that_failed_excludes_the_session_without_a_reward(story):
    s = story(size=2)
    one_turn(s, "a")
    one_turn(s, "b")
    s.end("a", reward=1.0)
    s.finish("b")
    s.write(RewardFailed(**s.about("failed", "b"), verifier=Verifier("exact", "1"), cause="crash"))
    s.reward("b", 1.0)
    score = s.fold(RULES).score
    assert [rollout.excluded_reason for rollout in score.rollouts] == [None, "verifier_failure"]
    assert (score.baseline, score.rollouts[1].reward, score.rollouts[1].advantage) == (1.0, None, None)
    assert score.books.masked == {"excluded_outcome": 1}


def test_a_retried_attempt_has_a_tree_and_its_tokens_are_excluded(story):
    s = story(size=1)
    one_turn(s, "a", "AAA", rollout=0)
    s.finish("a", outcome=Outcome.infra_failure, final=False)
    one_turn(s, "b", "BB", rollout=0, attempt=1)
    s.end("b", reward=1.0)
    folded = s.fold(RULES)
    assert set(folded.trees) == {"a", "b"}
    assert [rollout.session_id for rollout in folded.score.rollouts] == ["b"]
    assert (folded.score.books.trained, folded.score.books.masked) == (2, {"excluded_outcome": 3})


def test_a_group_is_closed_with_its_settled_members_and_the_straggler_is_late(story):
    s = story(size=3)
    for session in "abc":
        one_turn(s, session)
    s.end("a", reward=1.0)
    s.turn("c", 1, "sqAr", "CC", base=0)
    s.turn("b", 1, "sqAr", "BB", base=0)
    s.end("b", reward=0.0)
    s.close("a", "b", "c")
    score = s.fold(RULES).score
    assert [rollout.session_id for rollout in score.rollouts] == ["a", "b"]
    assert score.books.masked == {"late": 3}


def test_a_close_is_void_when_a_record_of_the_group_came_after_what_it_saw(story):
    s = story(size=2)
    one_turn(s, "a")
    one_turn(s, "b")
    s.end("a", reward=1.0)
    s.close("a", seen=7 + 3 * 3)  # the position before the reward's offset
    assert s.fold(RULES).group.complete is False
    s.close("a")
    assert [rollout.session_id for rollout in s.fold(RULES).score.rollouts] == ["a"]


def test_of_two_attempts_named_by_a_close_the_final_one_is_the_member(story):
    for order in itertools.permutations("ab"):
        s = story(size=2)
        one_turn(s, "a", rollout=0)
        one_turn(s, "b", rollout=0, attempt=1)
        for session in order:
            s.end(session, reward=1.0, final=session == "a")
        s.close("a", "b")
        assert [rollout.session_id for rollout in s.fold(RULES).score.rollouts] == ["a"]


def lost_turn(story):
    """Session b is settled and names a turn whose snapshot never comes: its bytes were parked."""
    s = story(size=2)
    one_turn(s, "a")
    one_turn(s, "b", "BB")
    s.end("a", reward=1.0)
    s.end("b", reward=0.0, turns=[s.id("b", 0), s.id("b", 1)])
    return s


def test_a_settled_group_waits_for_every_turn_that_is_named(story):
    assert lost_turn(story).fold(RULES).group.complete is False


def test_the_reapers_close_lets_go_of_a_session_whose_turn_is_lost(story):
    s = lost_turn(story)
    s.close("a", "b", reason="quorum")
    assert s.fold(RULES).group.complete is False
    s.close("a", reason="deadline")
    score = s.fold(RULES).score
    assert [rollout.session_id for rollout in score.rollouts] == ["a"]
    assert (score.books.trained, score.books.masked) == (1, {})


def test_a_closed_group_without_members_is_discarded(story):
    s = story(size=2)
    one_turn(s, "a")
    s.close()
    folded = s.fold(RULES)
    assert (folded.score.status, folded.score.reason, folded.samples) == (GroupStatus.discarded, "too_few_valid", [])


def test_a_group_that_was_closed_before_anybody_started_is_of_no_task(story):
    s = story()
    s.reward("a", 1.0)
    s.close(reason="orphan")
    spine = ControlStreamFold(LATEST)
    for _, offset, event in s.arrivals:
        spine.fold(offset, event)
    assert spine.task is None
    score = s.fold(RULES).score
    assert (score.task_id, score.purpose, score.status) == ("", Purpose.other, GroupStatus.not_training)


def test_facts_after_the_settlement_change_nothing(story):
    s = story(size=1)
    one_turn(s, "a")
    s.finish("a")
    s.reward("a", 1.0)
    settled = s.fold(RULES)
    s.reward("a", 7.0)
    s.start("late", rollout=1)
    s.finish("late", outcome=Outcome.cancelled)
    records = sorted(s.arrivals, key=lambda record: record[0] != "agent.sessions")  # the spine is read first
    assert {out.event_id: out for out in settled.outputs} == bodies_of(records)


def bodies_of(records):
    return {out.event_id: out for out in offline([(topic, 0, at, event) for topic, at, event in records], RULES)}


@pytest.mark.parametrize("purpose", [Purpose.other, Purpose.eval])
def test_what_is_not_for_training_has_trees_and_a_score_but_no_samples(story, purpose):
    s = story(purpose=purpose, task="")
    one_turn(s, "a", "AA")
    s.finish("a", expects=Expects(reward=False))
    folded = s.fold(RULES)
    assert set(folded.trees) == {"a"}
    assert folded.samples == []
    assert (folded.score.status, folded.score.reason) == (GroupStatus.not_training, "purpose")
    assert (folded.score.books.sampled, folded.score.books.masked) == (2, {"discarded_group": 2})


def test_an_infrastructure_failure_is_in_no_baseline_and_no_loss(story):
    def group(failed):
        s = story(size=3 if failed else 2)
        for session, reward in (("a", 1.0), ("b", 0.0)):
            one_turn(s, session)
            s.end(session, reward=reward)
        if failed:
            one_turn(s, "c", "CCC")
            s.reward("c", 100.0)
            s.finish("c", outcome=Outcome.infra_failure, expects=Expects(reward=False))
        return s.fold(RULES)

    clean, dirty = group(failed=False), group(failed=True)
    assert dirty.samples == clean.samples
    assert (dirty.score.baseline, dirty.score.std) == (clean.score.baseline, clean.score.std)
    assert dirty.score.rollouts[:2] == clean.score.rollouts
    assert dirty.score.rollouts[2].excluded_reason == "infra_failure"
    assert dirty.score.books.masked == {"excluded_outcome": 3}


def test_samples_stand_in_canonical_order_and_before_the_score(story):
    s = story(size=3)
    for session, rollout in (("c", 2), ("a", 0), ("b", 1)):
        one_turn(s, session, rollout=rollout)
        s.turn(session, 1, "new", "B", system="other")
        s.end(session, reward=float(rollout))
    folded = s.fold(RULES)
    assert [(x.rollout_index, x.segment_index) for x in folded.samples] == [(i, k) for i in range(3) for k in range(2)]
    assert folded.outputs[-1] is folded.score
    assert folded.score.samples == 6


def test_versions_split_spans_and_bound_the_sample(story):
    s = story()
    s.turn("a", 0, "sq", "ABCD", versions=(3, 3, 5, 5))
    s.turn("a", 1, "sqABCDr", "E", base=0, versions=(5,))
    s.end("a", reward=1.0)
    (sample,) = s.fold(RULES).samples
    assert [(span.start, span.length, span.version) for span in sample.spans] == [(2, 2, 3), (4, 2, 5), (7, 1, 5)]
    assert (sample.weight_version_min, sample.weight_version_max) == (3, 5)


def test_zero_variance_is_kept_with_advantage_zero_or_discarded(story):
    s = story(size=2)
    for session in "ab":
        one_turn(s, session)
        s.end(session, reward=0.1)
    kept = s.fold(RULES)
    assert [sample.advantage for sample in kept.samples] == [0.0, 0.0]
    discarded = s.fold(replace(RULES, zero_variance="discard"))
    assert (discarded.score.status, discarded.score.reason) == (GroupStatus.discarded, "zero_variance")
    assert (discarded.samples, discarded.score.books.masked) == ([], {"discarded_group": 2})


def reaped(s, folded):
    """The story's records, then what the reaper writes that has read them."""
    watch, group, records = GroupWatch(), None, list(s.arrivals)
    for record in records:
        result = folded([record], RULES, group)
        group = result.group
        watch.saw(record[2], 0.0, refused=bool(result.refused))
    spine = [offset for topic, offset, _ in records if topic == "agent.sessions"]
    due = watch.overdue(9.0, caught_up_at=0.0, limits=ReaperLimits(silence_s=99.0, deadline_s=1.0), seen=spine[-1] + 1)
    return records + [("agent.sessions", spine[-1] + 1, close) for close in due]


def test_a_start_that_comes_again_hides_no_whole_session_from_the_reaper(story, folded):
    s = story(size=2)
    one_turn(s, "a")
    s.adopt("a")
    s.write(s.topics["agent.sessions"][0])
    s.end("a", reward=1.0)
    s.start("b", rollout=1)
    (*_, (_, _, close)) = reaped(s, folded)
    assert (close.reason, close.members) == ("deadline", ("a",))


def test_a_start_that_contradicts_hides_no_whole_session_from_the_reaper(story, folded, drawn):
    s = story(size=2)
    one_turn(s, "a")
    s.write(replace(s.topics["agent.sessions"][0], event_id="other", task_id="other"))
    s.end("a", reward=1.0)
    s.start("b", rollout=1)
    records = reaped(s, folded)
    assert records[-1][2].members == ("a",)
    for again in (records, sorted(records, key=lambda record: record[0])):
        assert drawn(folded(again, RULES)) == "a0* main 0: sq<A>\na 1 = 1 trained"


def test_a_session_has_one_state_and_is_counted_once_whatever_its_records(story):
    s = story(size=4)
    for name in "abcd":
        one_turn(s, name)
        s.end(name, reward=1.0)
    built = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal built
        built += event == "call" and frame.f_code is SessionFoldState.__init__.__code__

    spine = ControlStreamFold(LATEST)
    sys.setprofile(count)
    try:
        for offset, event in enumerate(s.topics["agent.sessions"]):
            spine.fold(offset, event)
    finally:
        sys.setprofile(None)
    assert len(s.topics["agent.sessions"]) == 12
    assert (built, len(spine.rollouts), len(spine.settled)) == (4, 4, 4)
