"""From sessions to groups under every estimator: who is valid, what is discarded, and which changes change nothing."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each import each
from turnlog.processors.core.batches.draws import PlacedSample, ReadableGroup, draw_rules, form_draw
from turnlog.processors.core.methods.reward_transforms import overlong
from turnlog.processors.core.methods.rules import BUILT_IN, FoldRules, fold_rules
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.schemas.events import Expects, GroupStatus, Outcome, RewardFailed, StepRewardAssigned, Verifier
from turnlog.settings import BatcherSettings, FoldSettings

RULES = FoldRules(run_id="r", settings_sha256="s" * 64)
STEP = replace(RULES, estimator="step")
NAMES = sorted(BUILT_IN.estimators)
TOPICS = ("agent.sessions", "agent.turns", "agent.token-snapshots")
brief = settings(max_examples=15, deadline=None)


def step_reward(s, session, turn, value):
    s.write(
        StepRewardAssigned(
            **s.about("step", session, turn),
            turn=s.id(session, turn),
            value=value,
            components={},
            verifier=Verifier("v", "1"),
        )
    )


def pair(story, *rewards, **rules):
    """One turn per rollout; folded."""
    s = story(size=len(rewards))
    for rollout, reward in enumerate(rewards):
        s.turn(f"s{rollout}", 0, "q", "AB")
        s.end(f"s{rollout}", reward=reward)
    return s.fold(replace(RULES, **rules))


def test_the_score_records_what_the_advantages_were_made_with(story):
    assert (pair(story, 1.0, 0.0).score.baseline, pair(story, 1.0, 0.0).score.std) == (0.5, 0.5**0.5)
    assert (pair(story, 1.0, 0.0, estimator="rloo").score.std, pair(story, 1.0, 1.0).score.std) == (None, 0.0)


def turn_advantages(folded):
    """(session, turn index) to the advantage that its trained tokens carry."""
    return {
        (sample.session_id, span.turn.index): sample.advantage if span.advantage is None else span.advantage
        for sample in folded.samples
        for span in sample.spans
        if span.trained
    }


# Who is valid


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_is_trained_only_where_the_group_is_no_baseline(story, name):
    score = pair(story, 1.0, estimator=name).score
    trained = not BUILT_IN.estimator(name).is_group_relative
    assert (score.status, score.reason) == ((GroupStatus.trained, "") if trained else
                                            (GroupStatus.discarded, "too_few_valid"))  # fmt: skip
    assert score.estimator == f"{name}/1"


def test_under_none_a_group_of_one_is_emitted_as_its_session_ends(story):
    s = story(size=1)
    s.turn("a", 0, "q", "AB")
    s.finish("a")
    assert not s.fold(replace(RULES, estimator="none")).samples
    s.reward("a", 0.25)
    folded = s.fold(replace(RULES, estimator="none"))
    assert [(sample.reward, sample.advantage) for sample in folded.samples] == [(0.25, 0.25)]


@pytest.mark.parametrize(("min_valid", "status"), [(-1, "trained"), (0, "trained"), (2, "trained"), (3, "discarded")])
def test_min_valid_set_by_hand_wins_over_what_the_estimator_needs(story, min_valid, status):
    assert pair(story, 1.0, 0.0, min_valid=min_valid).score.status == status


OUTCOMES = {
    Outcome.completed: None, Outcome.truncated: None, Outcome.agent_error: None, Outcome.infra_failure: "infra_failure",
    Outcome.expired: "expired", Outcome.cancelled: "cancelled",
}  # fmt: skip


@pytest.mark.parametrize(("outcome", "reason"), OUTCOMES.items(), ids=[outcome.value for outcome in OUTCOMES])
def test_a_live_agents_end_is_valid_and_our_failure_is_excluded_under_its_name(story, outcome, reason):
    s = story(size=2)
    for session, ended in (("a", Outcome.completed), ("b", outcome)):
        s.turn(session, 0, "q", "AB")
        s.reward(session, 100.0 if session == "b" else 1.0)
        s.finish(session, outcome=ended)
    score = s.fold(replace(RULES, min_valid=1)).score
    assert score.baseline == (1.0 if reason else 50.5)
    assert score.rollouts[1].reward == 100.0
    assert [rollout.excluded_reason for rollout in score.rollouts] == [None, reason]
    assert score.books.masked == ({} if reason is None else {"excluded_outcome": 2})


def test_a_partial_group_is_scored_with_the_members_that_it_was_closed_with(story):
    s = story(size=3)
    for rollout, reward in enumerate((1.0, 0.0)):
        s.turn(f"s{rollout}", 0, "q", "AB")
        s.end(f"s{rollout}", reward=reward)
    s.turn("s2", 0, "q", "CC")
    s.close("s0", "s1")
    folded = s.fold(replace(RULES, estimator="dr_grpo"))
    assert turn_advantages(folded) == {("s0", 0): 0.5, ("s1", 0): -0.5}
    assert folded.score.baseline == 0.5


def test_the_verdict_of_an_attempt_that_was_retried_is_in_no_baseline(story):
    s = story(size=2)
    s.turn("a", 0, "q", "AAA")
    s.end("a", reward=1.0)
    s.start("b", rollout=1)
    s.turn("b", 0, "q", "BB")
    s.end("b", reward=100.0, final=False)
    s.start("c", rollout=1, attempt=1)
    s.turn("c", 0, "q", "C")
    s.end("c", reward=0.0)
    folded = s.fold(replace(RULES, estimator="dr_grpo"))
    assert turn_advantages(folded) == {("a", 0): 0.5, ("c", 0): -0.5}
    assert folded.score.books.masked == {"excluded_outcome": 2}


# What is discarded


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_are_kept_or_discarded_where_the_group_is_the_baseline(story, name):
    kept = pair(story, 1.0, 1.0, estimator=name)
    discarded = pair(story, 1.0, 1.0, estimator=name, zero_variance="discard")
    assert kept.score.status is GroupStatus.trained
    if not BUILT_IN.estimator(name).is_group_relative:
        assert turn_advantages(kept) == turn_advantages(discarded) == {("s0", 0): 1.0, ("s1", 0): 1.0}
        return
    assert set(turn_advantages(kept).values()) == {0.0}
    assert (discarded.score.status, discarded.score.reason) == (GroupStatus.discarded, "zero_variance")
    assert (discarded.samples, discarded.score.books.masked) == ([], {"discarded_group": 4})
    assert discarded.score.group_filters == ("zero_variance/1",)


def test_under_step_equal_verdicts_with_other_steps_are_no_zero_variance(story):
    s = story(size=2)
    for session, values in (("a", (1.0, 0.0)), ("b", (0.0, 1.0))):
        s.turn(session, 0, "q", "A")
        s.turn(session, 1, "qAr", "B", base=0)
        for turn, value in enumerate(values):
            step_reward(s, session, turn, value)
        s.end(session, reward=1.0)
    folded = s.fold(replace(STEP, zero_variance="discard"))
    assert turn_advantages(folded) == {("a", 0): 0, ("a", 1): -0.5, ("b", 0): 0, ("b", 1): 0.5}


@each(
    ("filters", "rewards", "reason"),
    [
        (("all_failed:0",), (0.0, 0.0), "all_failed"),
        (("all_failed:0",), (0.0, 0.5), ""),
        (("all_solved:1",), (1.0, 2.0), "all_solved"),
        (("all_solved:1",), (1.0, 0.5), ""),
        (("mean_outside:0.25:0.75",), (0.0, 0.25), "mean_outside"),
        (("mean_outside:0.25:0.75",), (0.0, 0.5), ""),
        (("mean_outside:0.25:0.75",), (1.0, 0.5), ""),
        (("mean_outside:0.25:0.75",), (1.0, 0.75), "mean_outside"),
        (("mean_outside:0.25:0.75", "all_failed:0"), (0.0, 0.0), "mean_outside"),
        (("zero_variance",), (0.5, 0.5), "zero_variance"),
    ],
)
def test_the_first_group_filter_that_discards_gives_the_reason(story, filters, rewards, reason):
    score = pair(story, *rewards, group_filters=filters).score
    assert (score.status, score.reason) == (GroupStatus.discarded if reason else GroupStatus.trained, reason)
    assert [label.split("/1")[0] for label in score.group_filters] == [spec.partition(":")[0] for spec in filters]


def test_transforms_change_advantages_and_not_what_the_verifier_said(story):
    folded = pair(story, 6.0, 1.0, estimator="dr_grpo", reward_transforms=("clip:0:2", "scale:0.5"))
    assert turn_advantages(folded) == {("s0", 0): 0.25, ("s1", 0): -0.25}  # 6 -> 2 -> 1, 1 -> 1 -> 0.5
    assert [sample.reward for sample in folded.samples] == [6.0, 1.0]
    assert [rollout.reward for rollout in folded.score.rollouts] == [6.0, 1.0]
    assert (folded.score.baseline, folded.score.reward_transforms) == (0.75, ("clip/1:0:2", "scale/1:0.5"))


@each(
    ("length", "penalty"),
    [
        (0, 0),
        (1, 0),
        (16384, 0),
        (16385, Fraction(1, 4096)),
        (18432, Fraction(1, 2)),
        (20480, 1),
        (20481, 1),
        (10**6, 1),
    ],
)
def test_an_overlong_response_loses_what_dapo_takes_off(length, penalty):
    """Equation 13 with the lengths of its authors: 20,480 tokens, of which 4,096 are punished."""
    assert Fraction(overlong(1.0, length, 20480, 4096, 1)) == 1 - penalty
    assert Fraction(overlong(0.5, length, 20480, 4096, 0.25)) == Fraction(1, 2) - Fraction(penalty) / 4


SHAPED = {"estimator": "dr_grpo", "reward_transforms": ("overlong:8:4:1",)}


def test_a_response_is_what_the_policy_sampled_in_all_turns_that_the_agent_acted_on(story):
    s = story(size=3)
    s.turn("a", 0, "a long prompt", "ABCD")
    s.turn("b", 0, "q", "ABC")
    s.turn("b", 1, "qABC and what a tool said", "DEF", base=0)
    s.turn("c", 0, "q", "ABC")
    s.turn("c", 1, "qABCr", "DEFGHIJKL", base=0, aborted=True)
    s.turn("c", 2, "qABCr", "DEFG", base=0)
    for session in "abc":
        s.end(session, reward=1.0)
    folded = s.fold(replace(RULES, **SHAPED))
    shaped = {"a": 1.0, "b": 0.5, "c": 0.25}  # 4, 6 and 7 tokens, of which the last 4 before 8 are punished
    mean = sum(shaped.values()) / 3
    assert {one.session_id: one.advantage for one in folded.samples} == pytest.approx(
        {session: reward - mean for session, reward in shaped.items()}
    )
    assert [rollout.reward for rollout in folded.score.rollouts] == [1.0] * 3
    assert folded.score.reward_transforms == ("overlong/1:8:4:1",)
    assert folded.score.status is GroupStatus.trained


def test_equal_rewards_of_other_lengths_are_no_zero_variance_and_the_order_of_transforms_counts(story):
    def of(*transforms):
        s = story(size=2)
        for session, output in (("a", "A"), ("b", "ABCDEFGH")):
            s.turn(session, 0, "q", output)
            s.end(session, reward=1.0)
        return s.fold(replace(RULES, **{**SHAPED, "reward_transforms": transforms}, zero_variance="discard")).score

    assert of().reason == "zero_variance"
    assert of("overlong:8:4:1").status is GroupStatus.trained
    assert of("overlong:8:4:1", "threshold:0").reason == "zero_variance"


def test_a_step_reward_is_shaped_by_the_length_of_its_turn(story):
    s = story(size=2)
    for session, output in (("a", "ABCDEF"), ("b", "A")):
        s.turn(session, 0, "q", output)
        s.turn(session, 1, f"q{output}r", "B", base=0)
        step_reward(s, session, 0, 1.0)
        s.end(session, reward=0.0)
    folded = s.fold(replace(STEP, reward_transforms=("overlong:8:4:1",)))
    # To go: 0.5 for 6 tokens, and less 0.75 for the 7 of the whole trajectory of a; 1 for b.
    assert turn_advantages(folded) == {("a", 0): -0.625, ("a", 1): -0.375, ("b", 0): 0.625, ("b", 1): 0.375}


# Step rewards


def test_every_turns_span_carries_the_turns_own_advantage(story):
    s = story(size=2)
    s.turn("a", 0, "q", "AB", versions=(1, 2))
    s.turn("a", 1, "qABr", "C", base=0)
    s.turn("b", 0, "q", "D")
    step_reward(s, "a", 1, 2.0)
    for session in "ab":
        s.end(session, reward=0.0)
    folded = s.fold(STEP)
    spans = [(span.turn.index, span.version, span.advantage) for sample in folded.samples for span in sample.spans]
    overall = 4 / 3  # to go: 2, 2 and 0; the second place has one rollout, so all three turns
    assert spans == [(0, 1, 1.0), (0, 2, 1.0), (1, 1, 2 - overall), (0, 1, -1.0)]
    assert [sample.advantage for sample in folded.samples] == [1.0, -1.0]
    assert folded.score.baseline == 1.0


def test_a_turn_without_a_step_reward_has_none_and_one_that_nobody_acted_on_counts_for_nothing(story):
    s = story(size=2)
    s.turn("a", 0, "q", "A")
    s.turn("a", 1, "qAr", "X", base=0, aborted=True)
    s.turn("a", 2, "qAr", "B", base=0)
    s.turn("b", 0, "q", "C")
    step_reward(s, "a", 1, 50.0)  # of an answer that the agent never had
    for session in "ab":
        s.end(session, reward=0.0)
    folded = s.fold(STEP)
    assert set(turn_advantages(folded).values()) == {0.0}
    assert folded.score.books.masked == {"aborted": 1}


def test_a_refused_step_reward_excludes_its_session(story):
    s = story(size=2)
    for session in "ab":
        s.turn(session, 0, "q", "A")
        step_reward(s, session, 0, float("nan") if session == "a" else 1.0)
        s.end(session, reward=1.0)
    folded = s.fold(replace(STEP, min_valid=1))
    assert [rollout.excluded_reason for rollout in folded.score.rollouts] == ["refused", None]
    assert len(folded.refused) == 1


def test_a_session_that_expects_no_verdict_is_valid_by_its_step_rewards_under_step_alone(story):
    s = story(size=2)
    for session, value in (("a", 3.0), ("b", 1.0)):
        s.turn(session, 0, "q", "A")
        step_reward(s, session, 0, value)
        s.finish(session, expects=Expects(reward=False, step_rewards=1))
    folded = s.fold(STEP)
    assert turn_advantages(folded) == {("a", 0): 1.0, ("b", 0): -1.0}
    assert [(sample.reward, sample.advantage) for sample in folded.samples] == [(3.0, 1.0), (1.0, -1.0)]
    reasons = {rollout.excluded_reason for rollout in s.fold(RULES).score.rollouts}
    assert reasons == {"verifier_failure"}


def test_a_session_that_expects_no_verdict_and_earned_nothing_is_not_valid(story):
    s = story(size=2)
    for session in "ab":
        s.turn(session, 0, "q", "A")
        s.finish(session, expects=Expects(reward=False))
    score = s.fold(replace(STEP, min_valid=1)).score
    assert {(rollout.reward, rollout.excluded_reason) for rollout in score.rollouts} == {(None, "verifier_failure")}


def test_step_rewards_do_not_stand_in_for_a_verdict_that_failed(story):
    s = story(size=2)
    for session in "ab":
        s.turn(session, 0, "q", "A")
        step_reward(s, session, 0, 1.0)
        s.finish(session)
    s.reward("a", 1.0)
    s.write(RewardFailed(**s.about("failed", "b"), verifier=Verifier("v", "1"), cause="crash"))
    reasons = [rollout.excluded_reason for rollout in s.fold(replace(STEP, min_valid=1)).score.rollouts]
    assert reasons == [None, "verifier_failure"]


def test_a_masked_last_turn_still_earns_for_the_turns_before_it(story):
    s = story(size=2)
    for session, value in (("a", 2.0), ("b", 0.0)):
        s.turn(session, 0, "q", "A")
        s.turn(session, 1, "qAr", "B", base=0)
        step_reward(s, session, 1, value)
        s.end(session, reward=0.0, outcome=Outcome.truncated)
    folded = s.fold(replace(STEP, truncated="mask_last_turn"))
    assert turn_advantages(folded) == {("a", 0): 1.0, ("b", 0): -1.0}


def test_advantages_are_broadcast_as_conformance_cases_say(story):
    """Rewards of trajectories with their numbers of segments -> the advantage of each segment (dr_grpo, grpo, r)."""
    cases = [
        ("dr_grpo", [(2, 3), (4, 1)], [-1, -1, -1, 1]),
        ("reinforce", [(2, 3), (4, 1)], [2, 2, 2, 4]),
        ("reinforce", [(1.5, 2), (7, 1)], [1.5, 1.5, 7]),
        ("dr_grpo", [(0, 1), (2, 1)], [-1, 1]),
        ("dr_grpo", [(5, 2), (1, 2)], [2, 2, -2, -2]),
        ("grpo", [(1, 1), (0, 2), (0, 1), (0, 1)], [1.7320508, *[-0.5773503] * 4]),
    ]
    for name, rollouts, wanted in cases:
        s = story(size=len(rollouts))
        for rollout, (reward, segments) in enumerate(rollouts):
            for index in range(segments):
                s.turn(f"s{rollout}", index, "pqr"[index], "X")
            s.end(f"s{rollout}", reward=reward)
        found = s.fold(replace(RULES, estimator=name, std_ddof=0)).samples
        assert [sample.advantage for sample in found] == pytest.approx(wanted, rel=1e-5)


# What changes nothing


def told(rng):
    """A group as data: per rollout its reward and its turns (a sub-agent's?, step reward, does it open a segment?)."""
    return [
        (
            rng.choice([0.0, 0.25, 1.0]),
            [(rng.random() < 0.3, rng.choice([None, 0.0, 0.5]), rng.random() < 0.5) for _ in range(rng.randint(1, 4))],
        )
        for _ in range(rng.randint(2, 4))
    ]


def cut_otherwise(rollouts, rng):
    return [(reward, [(*turn[:2], rng.random() < 0.5) for turn in turns]) for reward, turns in rollouts]


def written(story, rollouts, order=None):
    """The group as records; `order` says which rollout is written first."""
    s = story(size=len(rollouts))
    for rollout in order or range(len(rollouts)):
        session, (reward, turns) = f"s{rollout}", rollouts[rollout]
        s.start(session, rollout=rollout)
        text, before = "q", None
        for index, (sub_agent, earned, opens) in enumerate(turns):
            prompt = "uvwx"[index] if sub_agent or opens else f"{text}r"
            s.turn(session, index, prompt, "AB", base=None if sub_agent else before, system="sub" * sub_agent)
            if not sub_agent:
                text, before = f"{prompt}AB", index
            if earned is not None:
                step_reward(s, session, index, earned)
        s.end(session, reward=reward)
    return s


@pytest.mark.parametrize("name", NAMES)
@brief
@given(rng=st.randoms(use_true_random=False))
def test_cutting_trajectories_otherwise_changes_no_advantage(story, name, rng):
    rules, rollouts = replace(RULES, estimator=name, discount=0.5), told(rng)
    some = written(story, rollouts).fold(rules)
    other = written(story, cut_otherwise(rollouts, rng)).fold(rules)
    assert some.score.rollouts == other.score.rollouts
    assert turn_advantages(some) == turn_advantages(other)


@pytest.mark.parametrize("name", NAMES)
@brief
@given(rng=st.randoms(use_true_random=False))
def test_the_order_of_sessions_and_of_topics_changes_no_output(story, folded, name, rng):
    rules, rollouts = replace(RULES, estimator=name, discount=0.5), told(rng)
    order = rng.sample(range(len(rollouts)), len(rollouts))
    straight, mixed = written(story, rollouts), written(story, rollouts, order)
    by_topic = [record for topic in rng.sample(TOPICS, 3) for record in mixed.arrivals if record[0] == topic]
    assert folded(by_topic, rules).bodies == mixed.fold(rules).bodies == straight.fold(rules).bodies


@pytest.mark.parametrize("name", NAMES)
@brief
@given(rng=st.randoms(use_true_random=False))
def test_records_that_come_twice_change_no_output(story, folded, name, rng):
    rules, s = replace(RULES, estimator=name), written(story, told(rng))
    twice = []
    for topic in TOPICS:
        stream = [event for where, _, event in s.arrivals if where == topic]
        for _ in range(3):
            source = rng.randrange(len(stream))
            stream.insert(rng.randint(source + 1, len(stream)), stream[source])
        twice += [(topic, offset, event) for offset, event in enumerate(stream)]
    assert folded(twice, rules).bodies == s.fold(rules).bodies


@pytest.mark.parametrize("name", NAMES)
@brief
@given(rng=st.randoms(use_true_random=False))
def test_a_draw_accounts_for_every_token_that_a_score_calls_trained(story, name, rng):
    fold = FoldSettings(estimator=name)
    batcher = BatcherSettings(max_tokens=rng.randint(1, 12), updates_per_draw=rng.randint(1, 2))
    scored = written(story, told(rng)).fold(fold_rules(fold, run_id="r", settings_sha256=""))
    group = ReadableGroup(scored.score, tuple(PlacedSample(x, 0, at) for at, x in enumerate(scored.samples)))
    formed = form_draw([group], HeldVersion(1), draw_rules(fold, batcher))
    trained = sum(batch.weights.trained_tokens for batch in formed.batches)
    masked = sum(sum(one.values()) for one in [formed.masked, *(batch.masked for batch in formed.batches)])
    assert trained + masked + sum(row.sampled_tokens for row in formed.dropped) == scored.score.books.trained
