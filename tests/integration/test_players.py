"""Several players of one session, and simulated users: a runner at the real gateway, folded from the log."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.number_game import NumberGame
from tests.fakes.offers import offering
from tests.integration.conftest import CALL, QUESTION, Stage, staged
from tests.unit.gateway.conftest import model_in
from turnlog.environments import Episode, FunctionVerifier, Player, Recipe, TaskRow, UserSimulator, Verdict
from turnlog.plugins.recipes.calc import Calc
from turnlog.plugins.textarena.self_play import players_source
from turnlog.processors.core.fold.group import FoldRules, GroupFold
from turnlog.schemas import ids, topics
from turnlog.schemas.events import (
    GroupScored,
    GroupStatus,
    Outcome,
    RewardAssigned,
    RewardFailed,
    SegmentSample,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    TokenSnapshot,
    TurnCompleted,
    TurnTreeAssembled,
)
from turnlog.settings import EngineSettings

BIG = "http://big"
FIRST, SECOND = Player(name="first", system="You are first."), Player(name="second", system="You are second.")
TASK = {"prompt": "-", "number": 4}
WON = ["1", "2", "1"]
"""Moves of a game that begins at 4: the first player wins."""
SPINE = (SessionStarted, SessionAdopted, RewardAssigned, RewardFailed, SessionFinished, TurnCompleted, TokenSnapshot)


class Duel(Recipe):
    """The number game of two players."""

    name = "duel"

    def __init__(self, *players: Player, verifier: FunctionVerifier | None = None, **faults: Any) -> None:
        self.players, self.faults = players or (FIRST, SECOND), faults
        if verifier is not None:
            self.verifier = verifier

    def game(self, row: TaskRow) -> NumberGame:
        return NumberGame(row["number"], ("first", "second"), **self.faults)


class Served(Calc):
    """The calculator with a simulated user."""

    name = "served"

    def __init__(self, user: UserSimulator) -> None:
        self.user = user


OFFERED = types.SimpleNamespace()
"""`recipe`: what the installed package offers."""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Install a package that offers a recipe."""
    with offering(tmp_path, monkeypatch, "offered", {"offered": f"{__name__}:OFFERED.recipe"}):
        yield OFFERED


def in_order(moves: list[str]) -> Callable[[str], str]:
    """A policy that makes these moves, one per prompt; a repeated prompt gets the same move."""
    made: dict[str, str] = {}
    left = iter(moves)
    return lambda prompt: made[prompt] if prompt in made else made.setdefault(prompt, next(left))


def with_side(stage: Stage, policy: Callable[[str], str]) -> MemoryEngine:
    """Have a side engine serve the model `big`."""
    engine = stage.sides[BIG] = MemoryEngine(vocabulary=384, context=512)
    tokens = stage.engine.script
    assert tokens is not None

    def script(prompt: Any) -> list[int]:
        stage.policy, own = policy, stage.policy
        try:
            return tokens(prompt)
        finally:
            stage.policy = own

    engine.script, engine.version = script, "default"
    gateway = dataclasses.replace(stage.settings.gateway, side_engines=(f"big={BIG}",))
    stage.settings = dataclasses.replace(stage.settings, gateway=gateway)
    return engine


def killing(stage: Stage, at: int) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Return what makes policies of a stage kill its runner at the turn number `at` of all of them, 0 for never."""
    turns = itertools.count(1)

    def wrap(policy: Callable[[str], str]) -> Callable[[str], str]:
        def answer(prompt: str) -> str:
            if next(turns) == at:
                assert stage.runner is not None
                stage.runner.cancel()
            return policy(prompt)

        return answer

    return wrap


async def finish(stage: Stage, sessions: int = 1, task: dict[str, Any] | None = None, **more: Any) -> Any:
    """Run a rollout of the offered recipe to its end."""
    await stage.request(recipe="offered", task=task or TASK, **more)
    async with stage.gateway(), stage.running():
        return await stage.finished(sessions)


async def folded(stage: Stage) -> tuple[list[TurnTreeAssembled], list[SegmentSample], GroupScored | None]:
    """Trees, samples and score of the one group on the log."""
    group, outputs = GroupFold("g", 0, FoldRules(run_id="r", settings_sha256="s" * 64)), list[Any]()
    for offset, event in enumerate(await stage.said(*SPINE)):
        outputs += group.apply(topics.TOPIC_OF[type(event).__name__].name, offset, event)
    trees, samples, scores = (
        [one for one in outputs if isinstance(one, kind)] for kind in (TurnTreeAssembled, SegmentSample, GroupScored)
    )
    return trees, samples, scores[0] if scores else None


async def rewards(stage: Stage) -> list[tuple[str, float]]:
    return [(reward.player, reward.value) for reward in await stage.said(RewardAssigned)]


def said(turn: TurnCompleted) -> tuple[str | None, str]:
    return turn.agent_path, str(json.loads(turn.response)["content"])


async def test_two_players_take_turns_in_one_session_and_each_is_rewarded(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Duel(), in_order(WON)
    [finished] = await finish(stage)
    assert (finished.outcome, finished.final, len(finished.turns)) == (Outcome.completed, True, 3)
    assert (finished.expects.reward, finished.expects.players) == (True, ("first", "second"))
    turns = await stage.said(TurnCompleted)
    assert [said(turn) for turn in turns] == [("player/first", "1"), ("player/second", "2"), ("player/first", "1")]
    assert [turn.base_turn for turn in turns] == [None, None, turns[0].turn], "each continues its own conversation"
    asked = [json.loads(turn.new_messages) for turn in turns]
    assert asked[1] == [{"role": "system", "content": "You are second."}, {"role": "user", "content": "3 left"}]
    assert asked[2] == [{"role": "user", "content": "1 left"}]
    spine = await stage.said(RewardAssigned, SessionFinished)
    assert [getattr(event, "player", "end") for event in spine] == ["", "first", "second", "end"]
    assert await rewards(stage) == [("", 0.5), ("first", 1.0), ("second", 0.0)]
    assert json.loads(spine[0].evidence) == {"moves": {"first": 2, "second": 1}, "over": True}
    assert spine[0].components == {"first": 1.0, "second": 0.0}


async def test_advantages_are_taken_among_the_trajectories_of_one_role_and_every_token_is_accounted_for(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Duel(), lambda prompt: next(moves)
    moves = iter(["1", "2", "2", "x"])  # of 3: the second player wins, then the first
    alone = dataclasses.replace(stage.settings, runner=dataclasses.replace(stage.settings.runner, concurrency=1))
    for index in range(2):
        await stage.request(recipe="offered", task={"prompt": "-", "number": 3}, index=index)
    async with stage.gateway(), stage.running(alone):
        await stage.finished(2)
    trees, samples, score = await folded(stage)
    assert score is not None
    assert score.status is GroupStatus.trained
    found = {(sample.rollout_index, sample.player): (sample.reward, sample.advantage) for sample in samples}
    worth = 1.0 / (2**-0.5 + 1e-6) / 2
    won = {index: dict(await rewards_of(stage, index)) for index in range(2)}
    assert {won[0]["first"], won[1]["first"]} == {0.0, 1.0}
    assert {key: reward for key, (reward, _) in found.items()} == {
        (index, player): won[index][player] for index in range(2) for player in ("first", "second")
    }
    for reward, advantage in found.values():
        assert advantage == pytest.approx(worth if reward else -worth)
    turns = {turn.turn: str(turn.agent_path) for turn in await stage.said(TurnCompleted)}
    for sample in samples:
        assert {turns[span.turn] for span in sample.spans} == {f"player/{sample.player}"}
    sampled = sum(len(one.output_ids) // 4 for one in await stage.said(TokenSnapshot))
    assert (score.books.sampled, score.books.trained, score.books.masked) == (sampled, sampled, {})
    assert sum(tree.books.trained for tree in trees) == sampled


async def rewards_of(stage: Stage, index: int) -> list[tuple[str, float]]:
    session = ids.session_id(ids.rollout_id("g", index), 0)
    return [(one.player, one.value) for one in await stage.said(RewardAssigned) if one.session_id == session]


@pytest.mark.parametrize("gateway_dies", [False, True])
@pytest.mark.parametrize("move", [1, 2, 3])
async def test_a_runner_killed_at_any_move_is_followed_by_one_that_continues_the_game(
    stage: Stage, offered: types.SimpleNamespace, move: int, gateway_dies: bool
) -> None:
    offered.recipe, stage.policy = Duel(), killing(stage, move)(in_order(WON))
    await stage.request(recipe="offered", task=TASK)
    async with stage.gateway():
        async with stage.running() as (task, _):
            await asyncio.wait([task], timeout=20)
            assert task.cancelled()
        if not gateway_dies:
            async with stage.running():
                [finished] = await stage.finished(1)
    if gateway_dies:
        async with stage.gateway(), stage.running():
            [finished] = await stage.finished(1)
    assert (finished.outcome, finished.expects.players) == (Outcome.completed, ("first", "second"))
    turns = {turn.turn: turn for turn in await stage.said(TurnCompleted)}
    named = [said(turns[turn]) for turn in finished.turns]
    assert named == [("player/first", "1"), ("player/second", "2"), ("player/first", "1")]
    assert all(turns[turn].aborted for turn in finished.undelivered)
    found = await stage.said(RewardAssigned)
    assert {one.event_id: (one.player, one.value) for one in found} == {
        ids.reward_id(finished.session_id, "game", "1", player): (player, value)
        for player, value in (("", 0.5), ("first", 1.0), ("second", 0.0))
    }
    [tree], _, _ = await folded(stage)
    assert tree.books.sampled == tree.books.trained + sum(tree.books.masked.values())
    assert [turn for segment in tree.segments for turn in segment.turns if turn in finished.turns]


async def test_a_runner_killed_between_the_rewards_is_followed_by_one_that_writes_the_same(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Duel(), in_order(WON)
    await stage.request(recipe="offered", task=TASK)
    async with stage.gateway():
        async with stage.running() as (task, log):
            log.dies_at = log.points + 3
            await asyncio.wait([task], timeout=20)
            assert task.exception() is not None
        async with stage.running():
            [finished] = await stage.finished(1)
    found = await stage.said(RewardAssigned)
    assert len({one.event_id for one in found}) == 3 < len(found)
    assert len(finished.turns) == len(stage.engine.requests) == 3


@pytest.mark.parametrize("opponent", [Player(name="second", system="You are second.", model="big"),
                                      Player(name="second", system="You are second.", trained=False)])  # fmt: skip
async def test_an_opponent_is_on_the_log_and_never_trained(
    stage: Stage, offered: types.SimpleNamespace, opponent: Player
) -> None:
    offered.recipe = Duel(FIRST, opponent)
    stage.policy = lambda prompt: "2" if "You are second." in prompt else "1"
    side = with_side(stage, lambda prompt: "2")
    [finished] = await finish(stage)
    assert (finished.outcome, finished.expects.players) == (Outcome.completed, ("first",))
    assert await rewards(stage) == [("", 1.0), ("first", 1.0)]
    turns = await stage.said(TurnCompleted)
    assert [said(turn) for turn in turns] == [("player/first", "1"), ("player/second", "2"), ("player/first", "1")]
    is_side = opponent.model == "big"
    assert (turns[1].engine_id, len(side.requests)) == ((f"side/{BIG}", 1) if is_side else ("e", 0))
    [tree], _, _ = await folded(stage)
    outputs = {one.turn: len(one.output_ids) // 4 for one in await stage.said(TokenSnapshot)}
    assert tree.books.sampled == sum(outputs.values())
    assert tree.books.trained == outputs[turns[0].turn] + outputs[turns[2].turn]
    assert tree.books.masked == ({} if is_side else {"untrained_player": outputs[turns[1].turn]})


@each(
    ("limits", "policy", "reason", "moves"),
    [
        ({"max_turns": 2}, "1", "max_turns (player first)", 4),
        ({"max_context_tokens": 90, "max_turns": 9}, "1", "context (player first)", None),
        ({}, "1" * 60, "max_new_tokens (player first)", 1),
    ],
)
async def test_a_player_at_a_limit_truncates_the_session_by_its_name_and_all_are_judged(
    calc_model: Path, tmp_path: Path, offered: types.SimpleNamespace,
    limits: dict[str, int], policy: str, reason: str, moves: int | None,
) -> None:  # fmt: skip
    offered.recipe = Duel()
    async with staged(calc_model, tmp_path) as stage:
        stage.policy = lambda prompt: policy
        [finished] = await finish(stage, task={"prompt": "-", "number": 99}, **limits)
        assert (finished.outcome, finished.reason, finished.final) == (Outcome.truncated, reason, True)
        assert finished.expects.players == ("first", "second")
        assert moves in (None, len(finished.turns))
        assert await rewards(stage) == [("", 0.0), ("first", 0.0), ("second", 0.0)]


async def test_a_game_that_computes_beyond_the_deadline_is_cut_off_and_judged(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    judging = threading.Event()
    played: list[int] = []

    def compute() -> None:
        played.append(1)
        if len(played) == 2:  # of the session itself; the verifier repeats what was played
            judging.wait(20)

    def judge(episode: Episode) -> Verdict:
        judging.set()
        return Verdict(0.25, {"moves": float(sum(map(len, episode.players.values())))})

    offered.recipe = Duel(verifier=FunctionVerifier("late", "1", judge), at_each_move=compute)
    stage.policy = lambda prompt: "1"
    [finished] = await finish(stage, task={"prompt": "-", "number": 9}, deadline_s=0.5)
    assert (finished.outcome, finished.reason, len(finished.turns)) == (Outcome.truncated, "deadline", 2)
    assert await rewards(stage) == [("", 0.25), ("first", 0.25), ("second", 0.25)]


@pytest.mark.parametrize("dead", [False, True])
async def test_an_opponent_whose_engine_is_absent_fails_the_session_by_name_and_is_no_reward(
    stage: Stage, offered: types.SimpleNamespace, dead: bool
) -> None:
    offered.recipe = Duel(FIRST, dataclasses.replace(SECOND, model="big"))
    stage.policy = lambda prompt: "1"
    if dead:
        with_side(stage, lambda prompt: "2").kill()
    stage.settings = dataclasses.replace(
        stage.settings,
        engine=EngineSettings(request_timeout_s=0.3),
        runner=dataclasses.replace(stage.settings.runner, gateway_patience_s=0.3),
    )
    finishes = await finish(stage, 2)
    assert [(one.outcome, one.final) for one in finishes] == [
        (Outcome.infra_failure, False), (Outcome.infra_failure, True),
    ]  # fmt: skip
    for one in finishes:
        assert one.reason.startswith("OpponentMissing: player 'second' (model 'big'): ")
        assert ("engines_unavailable" if dead else "no pattern of [gateway] side_engines matches") in one.reason
        assert one.expects.players == ()
    assert await rewards(stage) == []
    assert {turn.agent_path for turn in await stage.said(TurnCompleted)} == {"player/first"}


async def test_a_game_that_breaks_is_our_failure_and_no_reward(stage: Stage, offered: types.SimpleNamespace) -> None:
    offered.recipe, stage.policy = Duel(next="third"), lambda prompt: "1"
    finishes = await finish(stage, 2)
    assert {one.outcome for one in finishes} == {Outcome.infra_failure}
    assert finishes[0].reason.startswith("BrokenRecipe: recipe 'duel': ")
    assert "raises GameError: the game asks 'third' for a move" in finishes[0].reason
    assert await rewards(stage) == []


async def test_rewards_that_the_game_cannot_give_are_a_failure_of_every_player(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Duel(rewards={"first": 1.0}), in_order(WON)
    [finished] = await finish(stage)
    failed = await stage.said(RewardFailed)
    assert [one.player for one in failed] == ["", "first", "second"]
    assert all("a finite number for each trained player" in one.cause for one in failed)
    assert (finished.expects.players, await rewards(stage)) == (("first", "second"), [])
    [tree], samples, _ = await folded(stage)
    assert (samples, tree.books.sampled) == (
        [],
        sum(len(one.output_ids) // 4 for one in await stage.said(TokenSnapshot)),
    )


async def test_a_verdict_that_forgets_a_player_fails_for_that_player_alone(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    forgets = FunctionVerifier("forgets", "1", lambda episode: Verdict(1.0, players={"first": 0.25}))
    offered.recipe, stage.policy = Duel(verifier=forgets), in_order(WON)
    await finish(stage)
    assert await rewards(stage) == [("", 1.0), ("first", 0.25)]
    [failed] = await stage.said(RewardFailed)
    assert (failed.player, failed.cause) == ("second", "garbage: the verdict has no reward of player 'second'")


@pytest.mark.parametrize("dies", [False, True])
async def test_a_late_verdict_without_players_is_shared_by_them_also_under_another_runner(
    stage: Stage, offered: types.SimpleNamespace, dies: bool
) -> None:
    seen: list[Episode] = []

    def judge(episode: Episode) -> Verdict:
        seen.append(episode)
        return Verdict(0.5)

    offered.recipe = Duel(verifier=FunctionVerifier("shared", "1", judge, late=True))
    stage.policy = in_order(WON)
    await stage.request(recipe="offered", task=TASK)
    async with stage.gateway():
        if dies:
            async with stage.running() as (task, log):
                log.dies_at = log.points + 1
                await asyncio.wait([task], timeout=20)
                assert task.exception() is not None
            assert len(await stage.said(SessionFinished)) == 1
        async with stage.running(), asyncio.timeout(20):
            while len(await stage.said(RewardAssigned)) < 3:
                await stage.broker.changed(1)
    assert set(await rewards(stage)) == {("", 0.5), ("first", 0.5), ("second", 0.5)}
    assert len(seen) == 1 + dies
    for episode in seen:
        assert [message["content"] for message in episode.players["first"] if message["role"] == "assistant"] == [
            "1", "1",
        ]  # fmt: skip
        assert [message["content"] for message in episode.players["second"] if message["role"] == "assistant"] == ["2"]
        assert episode.messages == episode.players["first"]


USER = UserSimulator(system="You are the user.")


def shop(prompt: str) -> str:
    """Agent and user in one: the agent uses its tool for each question, the user asks two and thanks."""
    if "You are the user." in prompt:
        return "3 + 5 = ?" if prompt.count("so?") == 1 else "ok ###STOP###"
    if prompt.count("tool\n8") < prompt.count("= ?"):
        return CALL
    return "8, so?"


@pytest.mark.parametrize("kill", range(7))
async def test_a_simulated_user_answers_the_agent_until_it_has_nothing_more_to_say(
    stage: Stage, offered: types.SimpleNamespace, kill: int
) -> None:
    """`kill`: at which turn the runner is killed, 0 for never."""
    offered.recipe, stage.policy = Served(USER), killing(stage, kill)(shop)
    await stage.request(recipe="offered", task={"prompt": QUESTION, "expr": "3+5", "answer": "8, so?"})
    async with stage.gateway():
        if kill:
            async with stage.running() as (task, _):
                await asyncio.wait([task], timeout=20)
                assert task.cancelled()
        async with stage.running():
            [finished] = await stage.finished(1)
    assert (finished.outcome, finished.expects.players) == (Outcome.completed, ()), finished.reason
    turns = {turn.turn: turn for turn in await stage.said(TurnCompleted)}
    paths = [turns[turn].agent_path for turn in finished.turns]
    assert paths == ["main", "main", "side/player/user", "main", "main", "side/player/user"]
    words = [json.loads(turns[turn].response)["content"] for turn in finished.turns if turns[turn].agent_path != "main"]
    assert words == ["3 + 5 = ?", "ok ###STOP###"]
    assert len(stage.executed) == 2
    assert set(stage.executed.values()) == {1}
    asked_of_agent = [one for turn in finished.turns if turns[turn].agent_path == "main"
                      for one in json.loads(turns[turn].new_messages)]  # fmt: skip
    assert [one["content"] for one in asked_of_agent if one["role"] == "user"] == [QUESTION, "3 + 5 = ?"]
    assert await rewards(stage) == [("", 1.0)]
    await check_only_main_trains(stage, finished)


async def check_only_main_trains(stage: Stage, finished: SessionFinished) -> None:
    [tree], _, _ = await folded(stage)
    paths = {turn.turn: turn.agent_path for turn in await stage.said(TurnCompleted)}
    outputs = {one.turn: len(one.output_ids) // 4 for one in await stage.said(TokenSnapshot)}
    assert tree.books.trained == sum(outputs[turn] for turn in finished.turns if paths[turn] == "main")
    users = sum(outputs[turn] for turn in finished.turns if paths[turn] != "main")
    assert tree.books.masked.pop("untrained_player") == users
    assert set(tree.books.masked) <= {"undelivered"}
    assert tree.books.sampled == sum(outputs.values())


@pytest.mark.parametrize("kill", range(5))
async def test_a_simulated_user_on_a_side_engine_begins_where_the_task_has_no_message(
    stage: Stage, offered: types.SimpleNamespace, kill: int
) -> None:
    """`kill`: at which turn runner and gateway are killed, 0 for never."""
    recipe = offered.recipe = Served(dataclasses.replace(USER, model="big", opening="Hello?"))
    system = {"role": "system", "content": "You are a shop."}
    recipe.messages = lambda row: [system]  # type: ignore[method-assign]
    counted = killing(stage, kill)
    with_side(stage, counted(lambda prompt: QUESTION if "so?" not in prompt else "###STOP###"))
    stage.policy = counted(shop)
    await stage.request(recipe="offered", task={"prompt": "-", "expr": "3+5", "answer": "8, so?"})
    if kill:
        async with stage.gateway(), stage.running() as (task, _):
            await asyncio.wait([task], timeout=20)
            assert task.cancelled()
    async with stage.gateway(), stage.running():
        [finished] = await stage.finished(1)
    assert finished.outcome is Outcome.completed
    known = {turn.turn: turn for turn in await stage.said(TurnCompleted)}
    turns = [known[turn] for turn in finished.turns]
    assert [(turn.agent_path, turn.engine_id) for turn in turns] == [
        ("side/player/user", f"side/{BIG}"), ("main", "e"), ("main", "e"), ("side/player/user", f"side/{BIG}"),
    ]  # fmt: skip
    own = [{"role": "system", "content": "You are the user."}, {"role": "user", "content": "Hello?"}]
    assert [json.loads(turns[0].new_messages), json.loads(turns[1].new_messages)] == [
        own, [system, {"role": "user", "content": QUESTION}],
    ]  # fmt: skip
    assert turns[3].base_turn == turns[0].turn, "the simulator's conversation continues"
    assert [one.output_ids for one in await stage.said(TokenSnapshot) if one.turn == turns[0].turn] == [b""]
    assert set(stage.executed.values()) == {1}
    assert await rewards(stage) == [("", 1.0)]


async def test_an_agent_that_has_used_its_turns_is_truncated_unless_the_user_has_nothing_more_to_say(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Served(USER), shop
    [finished] = await finish(stage, task={"prompt": QUESTION, "expr": "3+5", "answer": "8"}, max_turns=2)
    assert (finished.outcome, finished.reason, len(finished.turns)) == (Outcome.truncated, "max_turns", 3)


async def test_a_simulated_user_whose_engine_is_absent_fails_the_session_by_name(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.recipe, stage.policy = Served(dataclasses.replace(USER, model="big")), shop
    first, second = await finish(stage, 2, task={"prompt": QUESTION, "expr": "3+5", "answer": "8"})
    assert (first.outcome, second.outcome, second.final) == (Outcome.infra_failure, Outcome.infra_failure, True)
    assert first.reason.startswith("OpponentMissing: player 'user' (model 'big'): ")
    assert await rewards(stage) == []


async def test_a_user_that_ends_before_it_began_is_our_failure(stage: Stage, offered: types.SimpleNamespace) -> None:
    recipe = offered.recipe = Served(USER)
    recipe.messages = lambda row: []  # type: ignore[method-assign]
    stage.policy = lambda prompt: "###STOP###"
    first, _ = await finish(stage, 2, task={"prompt": "-", "expr": "3+5", "answer": "8"})
    assert first.outcome is Outcome.infra_failure
    assert "ended the conversation before the agent spoke" in first.reason


async def test_a_game_of_textarena_is_played_by_the_policy_against_itself(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    async with staged(model_in(folder, room=8192), tmp_path) as stage:
        stage.engine.context = 8192
        stage.settings = dataclasses.replace(stage.settings, engine=EngineSettings(context=8192))
        cells = {"Player 0": iter("012"), "Player 1": iter("345")}
        stage.policy = lambda prompt: f"[{next(cells['Player 0' if 'You are Player 0' in prompt else 'Player 1'])}]"
        [row] = itertools.islice(players_source("TicTacToe-v0", seed="7").tasks(0), 1)
        await stage.request(recipe="textarena-players game=TicTacToe-v0", task=row, max_context_tokens=8192)
        async with stage.gateway(), stage.running():
            [finished] = await stage.finished(1)
        assert (finished.outcome, finished.expects.players) == (Outcome.completed, ("player-0", "player-1"))
        turns = await stage.said(TurnCompleted)
        assert [said(turn) for turn in turns] == [
            (f"player/player-{number % 2}", f"[{cell}]") for number, cell in enumerate("03142")
        ]
        assert await rewards(stage) == [("", 0.0), ("player-0", 1.0), ("player-1", -1.0)]
        [tree], _, _ = await folded(stage)
        assert (tree.books.masked, tree.books.trained) == ({}, sum(turn.output_tokens for turn in turns))
        assert {lineage.player for lineage in tree.lineages} == {"player-0", "player-1"}
