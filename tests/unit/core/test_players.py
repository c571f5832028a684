"""Players of a session: a reward each, advantages among the same player of all rollouts, rows of one player."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from turnlog.processors.core.audit import Ledgers
from turnlog.processors.core.fold_versions import LATEST, VERSIONS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import Expects, GroupStatus, Outcome
from turnlog.schemas.topics import TOPIC_OF

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, estimator="dr_grpo")
BY_STEPS = replace(RULES, estimator="step")
OLD = replace(RULES, version=VERSIONS["4"])


def game(s, session, white="WW", black="B"):
    """Two moves of white, with a move of black between them."""
    s.turn(session, 0, "wq", white, agent_path="player/white")
    s.turn(session, 1, "bq", black, agent_path="player/black")
    s.turn(session, 2, f"wq{white}r", white, base=0, agent_path="player/white")


def advantages(folded):
    return {(one.session_id, one.player): one.advantage for one in folded.samples}


def accounts(s, folded):
    """The token accounting of the records and of what was folded from them."""
    ledgers, ends = Ledgers("r", 4096, LATEST), Counter()
    for event in [*(event for _, _, event in s.arrivals), *folded.outputs]:
        topic = TOPIC_OF[type(event).__name__].name
        ledgers.add(topic, 0, ends[topic], event)
        ends[topic] += 1
    return ledgers.close()


def test_players_are_compared_with_the_same_player_of_the_other_rollouts(story):
    s = story(size=2)
    for session, white, black in (("a", 1.0, 0.0), ("b", 0.0, 0.5)):
        game(s, session)
        s.end_game(session, white=white, black=black)
    folded = s.fold(RULES)
    assert advantages(folded) == {
        ("a", "white"): 0.5, ("a", "black"): -0.25, ("b", "white"): -0.5, ("b", "black"): 0.25,
    }  # fmt: skip
    assert [(one.player, one.reward) for one in folded.samples] == [
        ("white", 1.0), ("black", 0.0), ("white", 0.0), ("black", 0.5),
    ]  # fmt: skip
    tree, score = folded.trees["a"], folded.score
    assert [(one.kind, one.player) for one in tree.lineages] == [("player", "white"), ("player", "black")]
    assert (tree.player_rewards, tree.reward) == ({"white": 1.0, "black": 0.0}, None)
    assert [(one.player, one.baseline, one.status) for one in score.roles] == [
        ("black", 0.25, GroupStatus.trained), ("white", 0.5, GroupStatus.trained),
    ]  # fmt: skip
    assert [(one.reward, one.advantage) for one in score.rollouts] == [(0.5, 0.125), (0.25, -0.125)]
    assert (score.status, score.baseline, score.books.masked) == (GroupStatus.trained, None, {})
    assert accounts(s, folded).balance


def test_the_length_of_a_players_response_is_its_own(story):
    s = story(size=2)
    for session, white in (("a", "WWW"), ("b", "W")):
        game(s, session, white=white)
        s.end_game(session, white=1.0, black=1.0)
    folded = s.fold(replace(RULES, reward_transforms=("overlong:8:4:1",)))
    # White samples 6 and 2 tokens, black 1 in each: the last 4 before 8 are punished.
    assert advantages(folded) == {
        ("a", "white"): -0.25, ("a", "black"): 0.0, ("b", "white"): 0.25, ("b", "black"): 0.0,
    }  # fmt: skip


def test_a_session_waits_for_the_reward_of_each_of_its_players(story):
    s = story()
    game(s, "a")
    s.finish("a", expects=Expects(reward=False, players=("white", "black")))
    s.reward("a", 1.0, "white")
    s.reward("a", 1.0)  # nobody expects it
    assert s.fold(replace(RULES, min_valid=1)).outputs == []
    s.fail("a", "black")
    s.reward("a", 1.0, "black")  # the first verdict is effective
    folded = s.fold(replace(RULES, min_valid=1))
    assert folded.trees["a"].player_rewards == {"white": 1.0}
    assert [(one.player, one.excluded_reason) for one in folded.score.rollouts[0].players] == [
        ("black", "verifier_failure"), ("white", None),
    ]  # fmt: skip
    assert folded.score.books.masked == {"excluded_outcome": 1}
    assert accounts(s, folded).balance


def test_a_player_that_is_not_rewarded_does_not_train(story, drawn):
    s = story(size=2)
    for session, reward in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.turn(session, 3, "mq", "MM", agent_path="main")
        s.end_game(session, white=reward)
    folded = s.fold(RULES)
    assert advantages(folded) == {("a", "white"): 0.5, ("b", "white"): -0.5}
    assert folded.trees["a"].books.masked == {"untrained_player": 3}
    assert accounts(s, folded).balance


def test_turns_of_no_player_train_by_the_reward_of_the_session(story):
    s = story(size=2)
    for session, reward in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.turn(session, 3, "mq", "MM", agent_path="main")
        s.end_game(session, own=2 * reward, white=reward, black=-reward)
    folded = s.fold(RULES)
    assert advantages(folded) == {
        ("a", ""): 1.0, ("b", ""): -1.0, ("a", "white"): 0.5, ("b", "white"): -0.5, ("a", "black"): -0.5,
        ("b", "black"): 0.5,
    }  # fmt: skip
    assert [one.reward for one in folded.score.rollouts] == [2.0, 0.0]


def test_the_reward_of_a_game_beside_those_of_its_players_is_what_its_rollout_shows(story):
    s = story(size=2)
    for session in ("a", "b"):
        game(s, session)
        s.end_game(session, own=0.25, white=1.0, black=-1.0)
    folded = s.fold(RULES)
    assert [one.player for one in folded.score.roles] == ["black", "white"]
    assert [one.reward for one in folded.score.rollouts] == [0.25, 0.25]


def test_players_without_rewards_of_their_own_share_that_of_the_session(story):
    s = story(size=2)
    for session, reward in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.end(session, reward=reward)
    folded = s.fold(RULES)
    assert [(one.session_id, one.player, one.advantage) for one in folded.samples] == [
        ("a", "", 0.5), ("a", "", 0.5), ("b", "", -0.5), ("b", "", -0.5),
    ]  # fmt: skip
    assert (folded.score.roles, folded.score.baseline) == ((), 0.5)


def test_a_simulated_user_never_trains(story):
    s = story()
    s.turn("a", 0, "uq", "UU", agent_path="side/player/user", tools=False)
    s.turn("a", 1, "mq", "M", agent_path="main", summary=0)  # its words are what main is told, and no summary
    s.turn("a", 2, "vq", "VV", agent_path="side/player/user/compaction", tools=False)
    s.end("a", reward=1.0)
    folded = s.fold(replace(RULES, min_valid=1, train_side_calls=True))
    tree = folded.trees["a"]
    assert tree.books.masked == {"untrained_player": 4}
    assert [(one.kind, one.player) for one in tree.lineages] == [
        ("side_call", "user"), ("main", ""), ("compaction", "user"),
    ]  # fmt: skip


def test_two_players_never_share_a_row_even_where_their_tokens_agree(story, drawn):
    s = story()
    s.turn("a", 0, "q", "AA", agent_path="player/white")
    s.turn("a", 1, "qAAr", "B", agent_path="player/black")
    s.turn("a", 2, "qAArBt", "C", base=0, agent_path="player/white")
    s.end_game("a", white=1.0, black=0.0)
    folded = s.fold(replace(RULES, estimator="reinforce"))
    assert drawn(folded).splitlines() == [
        "a0 player 0,2: q<AA>rBt<C>",
        "a1 player 1: qAAr<B>",
        "a 4 = 4 trained",
    ]
    assert folded.trees["a"].duplicated_prefix_tokens == 3
    assert advantages(folded) == {("a", "white"): 1.0, ("a", "black"): 0.0}


@pytest.mark.parametrize("policy", ["prefix", "slime", "last-turn"])
def test_every_trajectory_rule_gives_rows_of_one_player(story, policy):
    s = story()
    said = [{"role": "user", "content": "q"}]
    for index, (player, prompt, output) in enumerate(
        [("white", "q", "A"), ("black", "qAr", "B"), ("white", "qArBt", "C")]
    ):
        s.turn(
            "a", index, prompt, output, base=None if index == 0 else index - 1, agent_path=f"player/{player}",
            messages=said, response={"role": "assistant", "content": output},
        )  # fmt: skip
    s.end_game("a", white=1.0, black=0.0)
    folded = s.fold(replace(RULES, estimator="reinforce", policy=policy))
    trained = {(one.player, span.turn.index) for one in folded.samples for span in one.spans if span.trained}
    assert trained == {("white", 0), ("black", 1), ("white", 2)}


def test_filters_and_the_least_number_of_trajectories_hold_for_each_role(story):
    s = story(size=2)
    for session, white in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.end_game(session, white=white, black=0.5)
    folded = s.fold(replace(RULES, zero_variance="discard"))
    assert [(one.player, one.status, one.reason) for one in folded.score.roles] == [
        ("black", GroupStatus.discarded, "zero_variance"), ("white", GroupStatus.trained, ""),
    ]  # fmt: skip
    assert {one.player for one in folded.samples} == {"white"}
    assert (folded.score.status, folded.score.books.masked) == (GroupStatus.trained, {"discarded_group": 2})
    assert accounts(s, folded).balance


def test_a_group_none_of_whose_roles_trains_is_discarded(story):
    s = story(size=2)
    for session in ("a", "b"):
        game(s, session)
        s.end_game(session, white=1.0, black=None)
    folded = s.fold(replace(RULES, zero_variance="discard"))
    assert (folded.score.status, folded.score.reason) == (GroupStatus.discarded, "too_few_valid")
    assert [(one.player, one.reason) for one in folded.score.roles] == [
        ("black", "too_few_valid"), ("white", "zero_variance"),
    ]  # fmt: skip
    assert folded.score.books.masked == {"discarded_group": 10}
    assert accounts(s, folded).balance


def test_a_session_that_failed_is_excluded_with_all_of_its_players(story):
    s = story(size=3)
    for session, white in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.end_game(session, white=white, black=1 - white)
    game(s, "c")
    s.finish("c", outcome=Outcome.infra_failure)
    folded = s.fold(RULES)
    assert {one.session_id for one in folded.samples} == {"a", "b"}
    assert [one.excluded_reason for one in folded.score.rollouts] == [None, None, "infra_failure"]
    assert [one.player for one in folded.score.roles] == ["black", "white"]
    assert folded.score.books.masked == {"excluded_outcome": 5}


def test_a_reward_of_a_player_that_is_no_number_excludes_the_session(story):
    s = story()
    game(s, "a")
    s.end_game("a", white=float("nan"), black=1.0)
    folded = s.fold(replace(RULES, min_valid=1))
    assert [type(error).__name__ for _, _, error in folded.refused] == ["RewardNotFinite"]
    assert folded.score.rollouts[0].excluded_reason == "refused"
    assert folded.score.reason == "too_few_valid"


def test_under_steps_the_turns_of_a_player_are_its_own_sequence(story):
    """Its helpers stand at the place of the turn that reads them; the other player's turns are no place."""
    s = story(size=2)
    for session, white, black in (("a", 1.0, 0.0), ("b", 0.0, 1.0)):
        s.turn(session, 0, "wq", "W", agent_path="player/white")
        s.turn(session, 1, "bq", "B", agent_path="player/black")
        s.turn(session, 2, "hq", "H", agent_path="player/white/agent/helper")
        s.turn(session, 3, "wqWr", "X", base=0, agent_path="player/white")
        s.end_game(session, white=white, black=black)
    folded = s.fold(replace(BY_STEPS, discount=0.5))
    per_turn = {
        (one.session_id, span.turn.index): span.advantage for one in folded.samples for span in one.spans
    }  # fmt: skip
    assert per_turn == {
        ("a", 0): 0.25, ("a", 1): -0.5, ("a", 2): 0.5, ("a", 3): 0.5,
        ("b", 0): -0.25, ("b", 1): 0.5, ("b", 2): -0.5, ("b", 3): -0.5,
    }  # fmt: skip


def test_before_version_5_the_first_reward_is_that_of_the_session(story):
    s = story(size=2)
    for session, white in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.end_game(session, own=white, white=1 - white)
    folded = s.fold(OLD)
    assert [one.kind for one in folded.trees["a"].lineages] == ["sub_agent", "sub_agent"]
    assert {one.reward for one in folded.samples if one.session_id == "a"} == {1.0}
    assert {one.player for one in folded.samples} == {""}


@settings(max_examples=60, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 2**40).map(Random))
def test_an_advantage_depends_on_the_rewards_of_its_own_role_alone(story, rng):
    """Whatever the other player earned, however its turns were cut, in any order of the records."""

    def group(other):
        s = story(size=len(mine))
        for index, reward in enumerate(mine):
            session = f"s{index}"
            game(s, session, black="B" * rng.randint(1, 3))
            s.end_game(session, white=reward, black=other[index])
        return s

    mine = [rng.choice([0.0, 0.25, 1.0]) for _ in range(rng.randint(2, 4))]
    rules = replace(RULES, estimator=rng.choice(["grpo", "dr_grpo", "rloo", "reinforce", "step"]))
    first, second = (group([rng.random() for _ in mine]) for _ in range(2))
    found = [s.fold(rules) for s in (first, second)]
    whites = [{key: value for key, value in advantages(one).items() if key[1] == "white"} for one in found]
    assert whites[0] == whites[1]
    if rules.estimator != "reinforce":
        for player in ("white", "black"):
            total = sum(v for (_, name), v in advantages(found[0]).items() if name == player)
            assert total == pytest.approx(0.0, abs=1e-9)
    for one, s in zip(found, (first, second), strict=True):
        assert accounts(s, one).balance


def test_every_order_of_the_topics_gives_the_same_players(story, folded):
    s = story(size=2)
    for session, white in (("a", 1.0), ("b", 0.0)):
        game(s, session)
        s.end_game(session, white=white, black=None if session == "a" else 1.0)
    live = s.fold(replace(RULES, min_valid=1))
    streams = {topic: [record for record in s.arrivals if record[0] == topic] for topic, _, _ in s.arrivals}
    for order in itertools.permutations(streams.values()):
        again = folded([record for stream in order for record in stream], replace(RULES, min_valid=1))
        assert again.bodies == live.bodies
