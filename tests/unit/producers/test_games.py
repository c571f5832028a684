"""A game and its progress, and the conversation of a user simulator: what is recorded is all there is to know."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.each import each
from tests.fakes.number_game import NumberGame
from turnlog.environments import (
    Episode,
    GameError,
    NextMove,
    PlayedGame,
    Player,
    Recipe,
    Task,
    UserSimulator,
    Verdict,
    game_verifier,
)
from turnlog.infra.environments.players import check_players
from turnlog.schemas.events import Outcome

PLAYERS = (Player(name="a", system="You are a."), Player(name="b"))


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asks(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "You are a."}
WHOLE = {
    "a": [SYSTEM, asks("4 left"), says("1"), asks("1 left"), says("1")],
    "b": [asks("3 left"), says("2")],
}


def test_each_player_sees_its_own_conversation_and_the_game_says_whose_turn_it_is() -> None:
    played = PlayedGame(NumberGame(), PLAYERS)
    for name, text in (("a", "1"), ("b", "2"), ("a", "1")):
        assert played.turn is not None
        assert played.turn.name == name
        played.play(says(text))
    assert (played.turn, played.conversations, played.moves) == (None, WHOLE, {"a": 2, "b": 1})
    assert played.rewards() == {"a": 1.0, "b": 0.0}


@each(("moves_of_a", "moves_of_b", "turn"), [(0, 0, "a"), (1, 0, "b"), (1, 1, "a"), (2, 1, None)])
def test_what_is_recorded_at_any_move_is_enough_to_continue(moves_of_a: int, moves_of_b: int, turn: str | None) -> None:
    recorded = {"a": WHOLE["a"][: 1 + 2 * moves_of_a], "b": WHOLE["b"][: 2 * moves_of_b]}
    played = PlayedGame(NumberGame(), PLAYERS, recorded)
    assert (played.turn.name if played.turn else None) == turn
    while played.turn is not None:
        played.play(says({"a": "1", "b": "2"}[played.turn.name]))
    assert (played.conversations, played.rewards()) == (WHOLE, {"a": 1.0, "b": 0.0})


def test_a_game_that_shows_something_else_than_was_recorded_is_named_and_not_continued() -> None:
    with pytest.raises(GameError, match="not deterministic: at move 0 player 'a' was shown '4 left', and now '5 left'"):
        PlayedGame(NumberGame(5), PLAYERS, WHOLE)


@each(
    ("faults", "why"),
    [
        ({"next": "c"}, "asks 'c' for a move; Task.players has 'a', 'b'"),
        ({"rewards": {"a": 1.0}}, "a finite number for each trained player"),
        ({"rewards": {"a": 1.0, "b": math.nan}}, "a finite number for each trained player"),
        ({"rewards": {"a": 1.0, "b": 0.0, "c": 0.0}}, "no other names"),
    ],
)
def test_a_faulty_game_is_an_error_and_no_reward(faults: dict[str, Any], why: str) -> None:
    def play() -> None:
        played = PlayedGame(NumberGame(1, **faults), PLAYERS)
        while played.turn is not None:
            played.play(says("1"))
        played.rewards()

    def play_longer() -> None:
        PlayedGame(NumberGame(9, **faults), PLAYERS).play(says("1"))

    with pytest.raises(GameError, match=why):
        play_longer() if "next" in faults else play()


def test_an_opponent_needs_no_reward_and_a_side_engine_never_trains() -> None:
    players = (Player(name="a"), Player(name="b", model="big"))
    assert [player.trains for player in players] == [True, False]
    assert not Player(name="c", trained=False).trains
    assert [player.path for player in players] == ["player/a", "player/b"]
    assert PlayedGame(NumberGame(rewards={"a": 1.0}), players).rewards() == {"a": 1.0}


@each("names", [(), ("a", "a"), ("a/b",), ("",), ("x" * 65,), ("ä",)])
def test_players_have_names_of_their_own_that_a_path_can_hold(names: tuple[str, ...]) -> None:
    with pytest.raises(GameError, match="player"):
        check_players([Player(name=name) for name in names])


def test_text_blocks_of_a_move_are_joined() -> None:
    played = PlayedGame(NumberGame(2), PLAYERS)
    played.play({"role": "assistant", "content": [{"type": "text", "text": "2"}]})
    assert (played.turn, played.rewards()) == (None, {"a": 1.0, "b": 0.0})
    silent = PlayedGame(NumberGame(2), PLAYERS)
    silent.play({"role": "assistant", "content": None})
    assert silent.rewards() == {"a": 0.0, "b": 1.0}


USER = UserSimulator(system="You want a refund.")


def test_a_simulator_sees_both_texts_with_roles_exchanged_and_nothing_else() -> None:
    called = {"role": "assistant", "content": "let me see", "tool_calls": [{"id": "1"}]}
    policy = {"role": "system", "content": "the shop's rules"}
    said = [policy, asks("refund!"), called, {"role": "tool", "tool_call_id": "1", "content": "paid"}, says("done")]
    own = {"role": "system", "content": "You want a refund."}
    assert USER.conversation(said) == [own, asks(USER.opening), says("refund!"), asks("done")]
    assert USER.conversation([policy]) == [own, asks(USER.opening)], "it begins"
    greeted = [policy, says("Welcome!"), asks("hello")]
    assert USER.conversation(greeted) == [own, asks("Welcome!"), says("hello")]
    assert USER.path == "side/player/user"


def test_what_a_simulator_saw_is_the_beginning_of_what_it_sees_next() -> None:
    said: list[dict[str, Any]] = []
    before = USER.conversation(said)
    for text in ("one", "two", "three"):
        said += [asks(text), says(text.upper())]
        now = USER.conversation(said)
        assert now[: len(before)] == before
        before = now


class Duel(Recipe):
    name = "duel"

    def players(self, row: Any) -> tuple[Player, ...]:
        return PLAYERS

    def game(self, row: Any) -> NumberGame:
        return NumberGame(row["number"])


def test_a_recipe_of_a_game_is_judged_by_the_game_of_the_row() -> None:
    task = Duel().task({"prompt": "-", "number": 4})
    assert (task.players, task.trained_players) == (PLAYERS, ("a", "b"))
    assert task.game is not None
    assert task.game().reset() == NextMove("a", "4 left")
    played = {name: tuple(messages) for name, messages in WHOLE.items()}
    episode = Episode(task=task.row, messages=(), outcome=Outcome.completed, reason="", players=played)
    verdict: Verdict = task.verifier.judge(episode)  # type: ignore[attr-defined] # a FunctionVerifier
    assert (verdict.value, verdict.players, verdict.components) == (0.5, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0})
    assert verdict.evidence == {"moves": {"a": 2, "b": 1}, "over": True}


def test_the_session_reward_is_the_mean_of_those_who_train() -> None:
    players = (Player(name="a", system="You are a."), Player(name="b", model="big"))
    verifier = game_verifier(lambda row: NumberGame(), lambda row: players)
    played = {name: tuple(messages) for name, messages in WHOLE.items()}
    episode = Episode(task={}, messages=(), outcome=Outcome.completed, reason="", players=played)
    assert (verifier.judge(episode).value, verifier.judge(episode).players) == (1.0, {"a": 1.0})
    with pytest.raises(GameError, match="no conversations"):
        verifier.judge(Episode(task={}, messages=(), outcome=Outcome.completed, reason=""))


@each(
    ("parts", "why"),
    [
        ({"players": PLAYERS}, "go together"),
        ({"game": NumberGame}, "go together"),
        ({"game": NumberGame, "players": PLAYERS, "tools": ({},)}, "asks for texts"),
        ({"game": NumberGame, "players": PLAYERS, "user": USER}, "combined with game"),
        ({"user": USER, "text_action": lambda text: None}, "combined with text_action"),
    ],
)
def test_what_does_not_fit_together_is_no_task(parts: dict[str, Any], why: str) -> None:
    task = Duel().task({"prompt": "-", "number": 4})
    about = {"id": "t", "row": {}, "messages": (), "verifier": task.verifier, "environment": task.environment}
    with pytest.raises(GameError, match=why):
        Task(**about, **parts)
