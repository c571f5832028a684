"""What each version of the fold makes of the same records: a run keeps its own for life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnlog.processors.core.errors import RewardNotFinite, UnknownTurn
from turnlog.processors.core.fold.settlement import figures
from turnlog.processors.core.fold.spine import ControlStreamFold
from turnlog.processors.core.fold_versions import FOLD_VERSION, VERSIONS, UnknownFoldVersion, fold_version
from turnlog.processors.core.methods.rules import FoldRules, fold_rules
from turnlog.schemas.events import (
    Expects,
    FinishReason,
    GroupStatus,
    Outcome,
    SessionFinished,
    StepRewardAssigned,
    Verifier,
    VersionSpan,
)
from turnlog.schemas.types import TurnId
from turnlog.settings import FoldSettings

ONE, TWO, THREE, FOUR, FIVE = (
    FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1, version=VERSIONS[name]) for name in "12345"
)
BY_STEPS = tuple(replace(rules, estimator="step") for rules in (ONE, TWO))
STEPS = Expects(reward=False, step_rewards=1)


def step(s, session, turn, value, epoch=None):
    at = s.id(session, turn) if epoch is None else TurnId(epoch, turn)
    s.write(
        StepRewardAssigned(
            **s.about("step", session, at.epoch, at.index), turn=at, value=value, components={},
            verifier=Verifier("v", "1"),
        )
    )  # fmt: skip


class Walked(tuple):
    """Counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        type(self).walks += 1
        return super().__iter__()


def test_a_reward_for_each_of_many_turns_walks_through_the_finish_a_few_times_in_all(story):
    s = story()
    for index in range(200):
        s.turn("a", index, f"s{'qA' * index}q", "A", **({"base": index - 1} if index else {}))
    s.finish("a", expects=Expects(reward=False, step_rewards=200))
    for index in range(200):
        step(s, "a", index, 0.5)
    spine = ControlStreamFold(TWO.version)
    Walked.walks = 0
    for topic, offset, event in s.arrivals:
        if topic == "agent.sessions":
            finish = isinstance(event, SessionFinished)
            spine.fold(offset, replace(event, turns=Walked(event.turns)) if finish else event)
    assert spine.sessions["a"].settled
    assert len(spine.sessions["a"].steps) == 200
    assert Walked.walks < 5


def test_records_carry_the_version_that_folded_them(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=1.0)
    for rules in (ONE, TWO):
        folded = s.fold(rules)
        assert {folded.score.fold_version, folded.trees["a"].fold_version} == {rules.version.name}


def test_the_figures_of_a_group_say_what_its_valid_rollouts_earned_from_version_3_on(story):
    s = story(size=4)
    for index, (name, outcome) in enumerate(
        {"a": Outcome.completed, "b": Outcome.agent_error, "c": Outcome.infra_failure, "d": Outcome.completed}.items()
    ):
        s.turn(name, 0, "sq", "A")
        s.end(name, reward=float(index), outcome=outcome)
    assert [[one.rewards for one in figures(s.fold(rules).score)] for rules in (ONE, TWO, THREE)] == [
        [],
        [()],
        [(0.0, 1.0, 3.0)],
    ]


def test_spans_say_on_whose_cache_their_tokens_were_sampled_from_version_4_on(story):
    s = story()
    s.turn("a", 0, "sq", "ABCDE", version_spans=(VersionSpan(3, 2), VersionSpan(4, 1), VersionSpan(4, 2, kv_version=3)))
    s.end("a", reward=1.0)
    found = [
        [(span.start, span.length, span.version, span.kv_version) for span in s.fold(rules).samples[0].spans]
        for rules in (THREE, FOUR)
    ]
    assert found == [[(2, 2, 3, None), (4, 3, 4, None)], [(2, 2, 3, None), (4, 1, 4, None), (5, 2, 4, 3)]]


def test_spans_name_the_kind_of_engine_that_sampled_their_tokens_from_version_5_on(story):
    s = story()
    kinds = (VersionSpan(3, 2, engine_kind="sglang"), VersionSpan(3, 1, engine_kind="vllm"), VersionSpan(3, 2))
    s.turn("a", 0, "sq", "ABCDE", version_spans=kinds)
    s.end("a", reward=1.0)
    found = [
        [(span.start, span.length, span.engine_kind) for span in s.fold(rules).samples[0].spans]
        for rules in (FOUR, FIVE)
    ]
    assert found == [[(2, 5, "")], [(2, 2, "sglang"), (4, 1, "vllm"), (5, 2, "")]]


def test_a_version_that_this_release_does_not_hold_is_refused_by_name():
    with pytest.raises(UnknownFoldVersion, match=r"fold version '9' is unknown here \(1, 2, 3, 4, 5 are known\)"):
        fold_rules(FoldSettings(), run_id="r", settings_sha256="", version="9")
    assert fold_version(FOLD_VERSION) is VERSIONS[max(VERSIONS)]


@pytest.mark.parametrize("reason", [FinishReason.stop, FinishReason.tool_calls, FinishReason.length])
def test_a_named_answer_trains_although_its_client_was_gone_when_the_engine_ended(story, reason):
    """A runner that died asks again and is handed the recorded answer: that one is judged, and earned the verdict."""
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, aborted=True, finish_reason=reason)
    s.end("a", reward=1.0)
    assert s.fold(ONE).trees["a"].books.masked == {"aborted": 2}
    assert s.fold(TWO).trees["a"].books.masked == {}
    assert s.fold(TWO).score.books.trained == 3


@pytest.mark.parametrize("reason", [FinishReason.abort, FinishReason.error])
@pytest.mark.parametrize("aborted", [True, False])
def test_a_partial_output_never_trains_as_an_answer(story, reason, aborted):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, aborted=aborted, finish_reason=reason)
    s.end("a", reward=1.0)
    assert s.fold(TWO).trees["a"].books.masked == {"aborted": 2}


def test_an_answer_does_not_give_way_to_a_later_try_that_was_cut_off(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sq", "BB", aborted=True)
    s.end("a", reward=1.0)
    assert s.fold(ONE).trees["a"].books.masked == {"undelivered": 1, "aborted": 2}
    assert s.fold(TWO).trees["a"].books.masked == {"aborted": 2}


def test_the_last_turn_is_the_last_that_was_not_taken_out(story):
    """A literal reading, the session's last turn, finds the aborted one, so that nothing was retried."""
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sq", "BB")
    s.turn("a", 2, "other", "CCC", aborted=True, finish_reason=FinishReason.abort)
    s.end("a", reward=1.0)
    assert s.fold(ONE).trees["a"].books.masked == {"aborted": 3}
    assert s.fold(TWO).trees["a"].books.masked == {"undelivered": 1, "aborted": 3}


def test_the_last_turn_is_that_of_the_session_and_not_of_the_agent(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sq", "BB")
    s.turn("a", 2, "other", "CCC")
    s.end("a", reward=1.0)
    assert "undelivered" not in s.fold(TWO).trees["a"].books.masked


def test_a_group_with_nothing_to_train_gives_its_place_back(story):
    s = story(size=2)
    for session in "ab":
        s.turn(session, 0, "sq", "A", aborted=True)
        s.end(session, reward=float(session == "a"))
    old, new = s.fold(ONE).score, s.fold(TWO).score
    assert (old.status, old.samples, old.books.masked) == (GroupStatus.trained, 0, {"aborted": 2})
    assert (new.status, new.reason, new.samples) == (GroupStatus.discarded, "nothing_to_train", 0)
    assert new.books.masked == {"discarded_group": 2}


def test_a_step_reward_for_a_turn_that_does_not_exist_settles_and_pays_nothing(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    step(s, "a", 7, 50.0)
    s.finish("a", expects=STEPS)
    old, new = BY_STEPS
    assert s.fold(old).score.rollouts[0].reward == 50.0
    waiting = s.fold(new)
    assert waiting.outputs == []
    assert waiting.refused == []
    step(s, "a", 0, 2.0)
    assert s.fold(new).score.rollouts[0].reward == 2.0


def test_before_the_finish_a_step_reward_waits_and_after_it_one_for_no_turn_of_it_is_parked(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    step(s, "a", 0, 1.0)
    s.finish("a", expects=replace(STEPS, step_rewards=2), turns=[s.id("a", 0)])
    step(s, "a", 1, 9.0)
    folded = s.fold(BY_STEPS[1])
    assert [type(refusal) for _, _, refusal in folded.refused] == [UnknownTurn]
    assert "turn 1 of epoch start/a is rewarded, its finish does not name it" in str(folded.refused[0][2])
    assert folded.outputs == []


def test_a_reward_that_is_no_number_refuses_its_session_only_where_the_finish_names_its_turn(story):
    for turn, refused in ((0, True), (5, False)):
        s = story()
        s.turn("a", 0, "sq", "A")
        step(s, "a", turn, float("nan"))
        s.end("a", reward=1.0)
        folded = s.fold(BY_STEPS[1])
        assert [type(refusal) for _, _, refusal in folded.refused] == [RewardNotFinite]
        assert folded.score.rollouts[0].excluded_reason == ("refused" if refused else None)
        assert s.fold(BY_STEPS[0]).score.rollouts[0].excluded_reason == "refused"


def test_what_a_turn_earned_that_nobody_acted_on_is_in_no_reward(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, aborted=True)
    step(s, "a", 0, 1.0)
    step(s, "a", 1, 50.0)
    s.finish("a", outcome=Outcome.completed, expects=replace(STEPS, step_rewards=2))
    assert [s.fold(rules).score.rollouts[0].reward for rules in BY_STEPS] == [51.0, 1.0]
