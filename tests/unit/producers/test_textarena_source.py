"""The source `textarena`: rows, sessions played by text, and their rewards."""

import itertools
from typing import Any

import pytest

from tests.each import each
from turnlog.environments import BadSource, Episode, played, task_source
from turnlog.infra.environments.tasks import acted_out
from turnlog.plugins.textarena.source import TextArena, game_row
from turnlog.schemas.events import Outcome


def source(text: str) -> TextArena:
    found = task_source(f"textarena {text}")
    assert isinstance(found, TextArena)
    return found


def session(arena: TextArena, row: Any, actions: list[str]) -> list[dict[str, Any]]:
    """The messages of a session: what the runner makes of the model's actions."""
    task, game = arena.task(row), played(arena, row, [])
    assert game is not None
    assert task.text_action is not None
    messages = list(task.messages)
    assert messages == [{"role": "user", "content": game.first}]
    for action in actions:
        call = task.text_action(action)
        assert not isinstance(call, str | None)
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "user", "content": game.act(call.tool, call.arguments)})
    return messages


def value(arena: TextArena, row: Any, messages: list[dict[str, Any]], outcome: Outcome = Outcome.completed) -> float:
    judged = tuple(acted_out(arena.task(row), messages))
    return arena.verifier.judge(Episode(task=row, messages=judged, outcome=outcome, reason="")).value


def test_a_game_that_is_won_has_the_reward_of_textarena() -> None:
    arena, row = source("game=GuessTheNumber-v0"), game_row("GuessTheNumber-v0", 3)
    low, high, actions = 1, 20, list[str]()
    while True:  # halves the range, as the answers say
        actions.append(f"[{(low + high) // 2}]")
        messages = session(arena, row, actions)
        answer, guess = messages[-1]["content"], (low + high) // 2
        if "higher" in answer:
            low = guess + 1
        elif "lower" in answer:
            high = guess - 1
        else:
            break
    game = played(arena, row, messages)
    assert game is not None
    assert game.done
    assert value(arena, row, messages) == value(arena, row, messages[:-1]) == sum(game.rewards) == 1.0


def test_a_game_without_an_end_has_no_reward() -> None:
    arena, row = source("game=FrozenLake-v0"), game_row("FrozenLake-v0", 3)
    messages = session(arena, row, ["[right]"])
    assert value(arena, row, messages, Outcome.truncated) == 0.0
    assert value(arena, row, messages[:1], Outcome.truncated) == 0.0


def test_invalid_moves_lose_the_game_as_in_textarena_and_nothing_a_model_writes_breaks_it() -> None:
    arena, row = source("game=TowerOfHanoi-v0"), game_row("TowerOfHanoi-v0", 3)
    messages = session(arena, row, ["", "\x00\ud800" * 9000])
    game = played(arena, row, messages)
    assert game is not None
    assert game.done
    assert value(arena, row, messages) == sum(game.rewards)
    assert game.act("act", {"action": "[A C]"}) == "the episode is over"


def test_rows_are_games_by_weight_each_with_a_seed_of_its_own() -> None:
    arena = source("game=FrozenLake-v0-random:3,Secretary-v0")
    rows = list(itertools.islice(arena.tasks(1), 60))
    assert len({row["id"] for row in rows}) == 60
    assert 30 < sum(row["game"] == "FrozenLake-v0-random" for row in rows) < 58
    assert rows == list(itertools.islice(arena.tasks(1), 60))
    assert {row["id"] for row in rows}.isdisjoint(row["id"] for row in itertools.islice(arena.tasks(2), 60))
    own_seed = source("game=FrozenLake-v0-random seed=4")
    assert next(own_seed.tasks(1)) == next(own_seed.tasks(2))


@each(
    ("text", "reason"),
    [
        ("game=Nope-v0", "no game 'Nope-v0'"),
        ("game=GuessWho-v0", "OpenRouter"),
        ("game=Klondike-v0", "SyntaxError"),
        ("game=TicTacToe-v0", "several players"),
        ("game=FrozenLake-v0:x", "weight 'x'"),
        ("game=FrozenLake-v0:0", "above 0"),
        ("game=FrozenLake-v0 seed=x", "seed=x: must"),
        ("", "options of textarena are game, seed"),
    ],
)
def test_a_bad_option_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadSource, match=reason):
        source(text)
