"""Every record that the fold refuses: which error, what it names, and what becomes of the session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.each import each
from turnlog.processors.core import errors
from turnlog.processors.core.books import Ledger
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold_versions import VERSIONS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import (
    Expects,
    FinishReason,
    GroupStatus,
    MaskReason,
    Outcome,
    Purpose,
    StepRewardAssigned,
    Verifier,
    VersionSpan,
)
from turnlog.schemas.types import BlobRef, TurnId, pack_float32s, pack_int32s

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
NAN = float("nan")

BAD_SNAPSHOTS = {
    "BrokenArray": {"output_ids": b"12345"},
    "TokenOutOfRange": {"output_ids": pack_int32s([-1, 66])},
    "LogprobLengthMismatch": {"output_logprobs": pack_float32s([-0.5])},
    "SpansDoNotCover": {"version_spans": (VersionSpan(1, 1),)},
    "UnknownVersion": {"version_spans": (VersionSpan(-1, 2),)},
    "NotFinite": {"output_logprobs": pack_float32s([-0.5, NAN])},
    "PromptHashMismatch": {"prompt_sha256": "0" * 64},
    "UnknownParent": {"parent_turn": TurnId("start/a", 9)},
    "BaseBeyondParent": {"base_len": 99},
    "EmptyPrompt": {"delta_ids": b"", "base_len": 0},
}


def only_refusal(folded):
    ((topic, offset, error),) = folded.refused
    return topic, offset, error


@each("name", BAD_SNAPSHOTS)
def test_a_bad_snapshot_is_refused_by_name_and_excludes_its_session(story, name):
    s = story(size=2)
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, **BAD_SNAPSHOTS[name])
    s.end("a", reward=1.0)
    s.turn("b", 0, "sq", "CCC")
    s.end("b", reward=0.0)
    folded = s.fold(RULES)
    topic, _, error = only_refusal(folded)
    assert (topic, type(error).__name__) == ("agent.token-snapshots", name)
    assert "session a turn (start/a, 1)" in str(error)
    assert folded.score.status is GroupStatus.trained
    assert [rollout.excluded_reason for rollout in folded.score.rollouts] == ["refused", None]
    assert [sample.session_id for sample in folded.samples] == ["b"]
    assert set(folded.score.books.masked) == {"refused"}
    assert folded.trees["a"].books.trained == 0
    assert folded.trees["a"].segments == ()


SAID = {
    "BrokenArray": "output_ids has 5 bytes; pack 4 bytes per number, little-endian",
    "TokenOutOfRange": "output_ids holds id -1; token ids start at 0",
    "LogprobLengthMismatch": "2 output ids, 1 log-probs; the engine must return one log-prob per sampled token",
    "SpansDoNotCover": "version spans cover 1 of 2 output ids; spans must cover the output exactly",
    "UnknownVersion": "a span of version -1; serve only engines whose weight version is known",
    "NotFinite": "1 of 2 log-probs are not finite; temperature 1.0; "
    "sample with a finite temperature >= 0 and return finite log-probs",
    "PromptHashMismatch": "the prompt of 3 + 1 tokens hashes to aa5eb6fe00a47241..., the record says "
    "0000000000000000...; the gateway stored other tokens than the engine saw: compare parent_turn, base_len and "
    "delta_ids",
    "UnknownParent": "takes 3 tokens of TurnId(epoch='start/a', index=9), not before it; "
    "a parent's snapshot stands before its child's in agent.token-snapshots and was not refused",
    "BaseBeyondParent": "base_len 99, the parent has 3 tokens; "
    "base_len counts tokens of the parent's prompt and output",
    "EmptyPrompt": "the prompt has no token; sample on at least one token",
}


@each("name", BAD_SNAPSHOTS)
def test_the_message_says_what_where_and_what_to_do(story, name):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, **BAD_SNAPSHOTS[name])
    assert str(only_refusal(s.fold(RULES))[2]) == f"session a turn (start/a, 1): {SAID[name]}"


def test_a_refused_record_comes_with_the_outputs_that_it_makes_due(story, folded):
    s = story()
    s.turn("a", 0, "sq", "A", prompt_sha256="0" * 64)
    s.end("a", reward=1.0)
    records = sorted(s.arrivals, key=lambda record: record[0] == "agent.token-snapshots")  # the snapshot is last
    group = GroupFold("g", 5, RULES)
    for topic, offset, event in records[:-1]:
        assert group.apply(topic, offset, event) == []
    with pytest.raises(errors.PromptHashMismatch) as refusal:
        group.apply(*records[-1])
    assert [type(output).__name__ for output in refusal.value.outputs] == ["TurnTreeAssembled", "GroupScored"]
    assert group.complete


@pytest.mark.parametrize(
    "spans",
    [(VersionSpan(1, 2**63 - 1),), (VersionSpan(1, 2**63 - 1),) * 2, (VersionSpan(1, -5), VersionSpan(1, 7)), ()],
)
def test_books_count_what_was_sampled_whatever_the_spans_of_a_refused_record_say(story, spans):
    s = story(size=2)
    s.turn("a", 0, "sq", "AA", version_spans=spans)
    s.end("a", reward=1.0)
    s.turn("b", 0, "sq", "BBB")
    s.end("b", reward=0.0)
    books = s.fold(RULES).score.books
    assert (books.sampled, books.trained, books.masked) == (5, 3, {"refused": 2})


def test_the_first_record_of_a_turn_decides_even_when_a_good_one_follows(story):
    s = story()
    s.turn("a", 0, "sq", "A", prompt_sha256="0" * 64)
    s.snapshot("a", s.id("a", 0), "sq", "A")
    s.end("a", reward=1.0)
    assert s.fold(RULES).score.rollouts[0].excluded_reason == "refused"


def test_a_refused_turn_that_the_finish_does_not_name_excludes_nobody(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "BB", base=0, prompt_sha256="0" * 64)
    s.turn("a", 2, "sqAt", "C", base=0)
    s.end("a", reward=1.0, turns=[s.id("a", 0), s.id("a", 2)])
    folded = s.fold(RULES)
    assert folded.score.rollouts[0].excluded_reason is None
    assert (folded.score.books.trained, folded.score.books.masked) == (2, {"refused": 2})


def test_a_child_of_a_refused_parent_is_refused_too(story):
    s = story()
    s.turn("a", 0, "sq", "A", prompt_sha256="0" * 64)
    s.turn("a", 1, "sqAr", "B", base=0)
    folded = s.fold(RULES)
    assert [type(error).__name__ for _, _, error in folded.refused] == ["PromptHashMismatch", "UnknownParent"]


def test_a_base_that_is_not_earlier_is_refused(story):
    s = story()
    s.turn("a", 0, "sq", "A", base=0)
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    topic, _, error = only_refusal(folded)
    assert (topic, type(error)) == ("agent.turns", errors.BaseNotBefore)
    assert str(error) == (
        "session a turn (start/a, 0): base_turn is turn 0; a base is an earlier turn: fix the gateway"
    )
    assert folded.score.rollouts[0].excluded_reason == "refused"


@pytest.mark.parametrize("value", [NAN, float("inf"), -1e101])
def test_a_reward_that_is_no_number_excludes_its_session(story, value):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=value)
    s.reward("a", 1.0)
    folded = s.fold(RULES)
    error = only_refusal(folded)[2]
    assert isinstance(error, errors.RewardNotFinite)
    assert str(error) == f"session a: is rewarded with {value}; a verifier that cannot judge writes RewardFailed"
    assert (folded.score.rollouts[0].excluded_reason, folded.score.rollouts[0].reward) == ("refused", None)


@pytest.mark.parametrize("value", [NAN, float("inf"), -1e101])
def test_a_component_that_is_no_number_excludes_its_session_too(story, value):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=1.0)
    topic, offset, verdict = s.arrivals.pop()
    s.arrivals.append((topic, offset, replace(verdict, components={"format": 1.0, "length": value})))
    folded = s.fold(RULES)
    error = only_refusal(folded)[2]
    assert isinstance(error, errors.RewardNotFinite)
    assert "in component 'length'" in str(error)
    assert (folded.score.rollouts[0].excluded_reason, folded.score.rollouts[0].reward) == ("refused", None)


@pytest.mark.parametrize(("value", "component"), [(NAN, 0.0), (float("-inf"), 0.0), (0.5, NAN)])
def test_a_step_reward_that_is_no_number_excludes_its_session(story, value, component):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.write(
        StepRewardAssigned(
            **s.about("step", "a"), turn=s.id("a", 0), value=value, components={"c": component},
            verifier=Verifier("exact", "1"),
        )
    )  # fmt: skip
    s.end("a", reward=1.0, expects=Expects(reward=True, step_rewards=1))
    folded = s.fold(RULES)
    assert isinstance(only_refusal(folded)[2], errors.RewardNotFinite)
    assert folded.score.rollouts[0].excluded_reason == "refused"
    assert (folded.score.reason, folded.score.books.masked) == ("too_few_valid", {"discarded_group": 1})


def test_an_outcome_that_this_release_does_not_know_is_excluded_by_that_name_and_rewards_nobody(story):
    """A newer writer's symbol reads as the enum's default."""
    s = story(size=3)
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=1.0, outcome=Outcome.unknown, expects=Expects(reward=True))
    for name, reward in (("b", 1.0), ("c", 0.0)):
        s.turn(name, 0, "sq", "BB")
        s.end(name, reward=reward)
    folded = s.fold(RULES)
    assert folded.refused == []
    assert [rollout.excluded_reason for rollout in folded.score.rollouts] == ["unknown", None, None]
    assert (folded.score.baseline, folded.score.samples) == (0.5, 2)
    assert (folded.score.books.trained, folded.score.books.masked) == (4, {"excluded_outcome": 1})


def test_a_purpose_that_this_release_does_not_know_is_not_trained(story):
    s = story(purpose=Purpose.other)
    s.turn("a", 0, "sq", "A")
    s.end("a", reward=1.0)
    score = s.fold(RULES).score
    assert (score.status, score.reason, score.samples) == (GroupStatus.not_training, "purpose", 0)


def test_an_output_whose_finish_reason_this_release_does_not_know_is_no_answer_to_train(story):
    """`error` is what a reader makes of a reason that it does not know; fold version 1 asked for no reason."""
    s = story()
    s.turn("a", 0, "sq", "A")
    topic, offset, turn = s.arrivals[1]
    s.arrivals[1] = (topic, offset, replace(turn, finish_reason=FinishReason.error))
    s.end("a", reward=1.0)
    folded = s.fold(RULES)
    assert folded.trees["a"].nodes[0].finish_reason is FinishReason.error
    assert folded.trees["a"].books.masked == {"aborted": 1}
    assert s.fold(replace(RULES, version=VERSIONS["1"])).score.books.trained == 1


def test_an_empty_output_is_legal_and_an_empty_prompt_is_not(story):
    s = story(size=2)
    s.turn("a", 0, "sq", "A")
    s.turn("a", 1, "sqAr", "", base=0)
    s.end("a", reward=1.0)
    s.turn("b", 0, "", "A")
    s.end("b", reward=1.0)
    folded = s.fold(RULES)
    assert isinstance(only_refusal(folded)[2], errors.EmptyPrompt)
    assert [rollout.excluded_reason for rollout in folded.score.rollouts] == [None, "refused"]
    assert folded.trees["a"].books.trained == 1


def test_a_group_whose_sizes_disagree_is_decided_at_its_deadline_without_the_session_that_contradicts(story):
    s = story(size=3)
    for name, reward in (("a", 1.0), ("b", 0.0)):
        s.turn(name, 0, "sq", "AB")
        s.end(name, reward=reward)
    s.start("c", group_size=5)
    s.turn("c", 0, "sq", "CCC")
    s.end("c", reward=1.0)
    s.close("a", "b", reason="deadline")
    folded = s.fold(RULES)
    assert isinstance(only_refusal(folded)[2], errors.SessionContradicted)
    assert [rollout.session_id for rollout in folded.score.rollouts] == ["a", "b"]
    assert folded.score.status is GroupStatus.trained
    assert folded.score.books.sampled == folded.score.books.trained + sum(folded.score.books.masked.values())


def test_a_group_that_refusals_leave_too_small_is_discarded_by_that_name(story):
    s = story(size=2)
    s.turn("a", 0, "sq", "A", prompt_sha256="0" * 64)
    s.end("a", reward=1.0)
    s.turn("b", 0, "sq", "BB")
    s.end("b", reward=0.0)
    score = s.fold(replace(RULES, min_valid=2)).score
    assert (score.status, score.reason) == (GroupStatus.discarded, "too_few_valid")
    assert score.books.masked == {"discarded_group": 3}


def test_a_finish_that_names_an_unknown_epoch_ends_its_session_as_refused(story):
    s = story()
    s.turn("a", 0, "sq", "A")
    s.finish("a", turns=[TurnId("nowhere", 0)])
    folded = s.fold(RULES)
    error = only_refusal(folded)[2]
    assert isinstance(error, errors.UnknownEpoch)
    assert str(error) == (
        "session a: is finished with turns of epochs ['nowhere'], it has ['start/a']; "
        "name turns by the event_id of the Started or Adopted that opened their epoch"
    )
    assert folded.score.rollouts[0].excluded_reason == "refused"


def test_a_session_that_never_started_cannot_be_adopted(story):
    s = story()
    s.epochs["a"] = []
    s.adopt("a")
    error = only_refusal(s.fold(RULES))[2]
    assert isinstance(error, errors.UnknownSession)
    assert str(error) == "session a: is adopted but never started; write SessionStarted first"


@pytest.mark.parametrize(
    "change", [{"group_size": 5}, {"task_id": "other"}, {"purpose": "eval"}, {"event_id": "twin", "session_id": "a"}]
)
def test_a_start_that_contradicts_its_group_is_refused(story, change):
    s = story(size=2)
    s.start("a")
    s.start("b", **change)
    error = only_refusal(s.fold(RULES))[2]
    assert isinstance(error, errors.SessionContradicted)
    told = {"task_id": "t", "group_size": 2, "purpose": "train", "session_id": "b"} | change
    assert str(error) == (
        f"session {told['session_id']}: a start with task {told['task_id']}, group of {told['group_size']}, purpose "
        f"{told['purpose']}, rollout rollout1 contradicts an earlier one; one group_id is one drawing of one task, one "
        "session_id one attempt of one rollout"
    )


def test_a_record_in_a_topic_of_others_is_refused(story, folded):
    s = story()
    s.turn("a", 0, "sq", "A")
    start, turn, _ = s.arrivals
    refusals = [
        only_refusal(folded([record]))[2] for record in (("agent.sessions", 3, turn[2]), ("agent.turns", 4, start[2]))
    ]
    assert {type(error) for error in refusals} == {errors.MisplacedRecord}
    assert [str(error) for error in refusals] == [
        "agent.sessions offset 3: holds a TurnCompleted; write it to its own topic",
        "agent.turns offset 4: holds a SessionStarted; write it to its topic",
    ]


def test_a_payload_that_was_not_fetched_is_a_defect_of_the_shell_and_parks_nothing(story):
    s = story()
    s.turn("a", 0, "sq", "A", delta_ids=BlobRef("0" * 64, 8))
    with pytest.raises(errors.PayloadNotFetched, match="session a: delta_ids is a BlobRef"):
        s.fold(RULES)


def test_books_that_do_not_balance_stop_the_unit():
    ledger = Ledger()
    ledger.enter(3, None)
    ledger.enter(2, MaskReason.side_call)
    assert ledger.close("x", 5).masked == {"side_call": 2}
    with pytest.raises(
        errors.BooksDoNotBalance, match=r"books of x: sampled 6 != trained 3 \+ masked {'side_call': 2}"
    ):
        ledger.close("x", 6)
    assert not issubclass(errors.BooksDoNotBalance, errors.FoldError)
