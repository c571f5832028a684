"""Games of TextArena for several players: as in TextArena itself, and playable by any recipe of players."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.each import each
from turnlog.environments import BadSource, PlayedGame
from turnlog.infra.environments.sources import task_source
from turnlog.plugins.textarena.self_play import players_source

GAMES = (
    "TicTacToe-v0", "WildTicTacToe-v0", "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0", "SimpleTak-v0", "LiarsDice-v0",
    "IteratedPrisonersDilemma-v0",
)  # fmt: skip
SEEDS = (0, 1, 2)
UPSTREAM = """
import json, sys
import textarena
found = []
for game, seed, moves in json.load(sys.stdin):
    env = textarena.make(game)
    env.reset(num_players=2, seed=seed)
    seen, done = [], False
    for move in moves:
        player, observation = env.get_observation()
        seen.append([player, observation])
        done, _ = env.step(action=move)
        if done:
            break
    found.append([seen, {str(player): reward for player, reward in env.close()[0].items()} if done else None])
print("FOUND" + json.dumps(found))
"""


def moves(seed: int) -> list[str]:
    """Moves that most games accept, in an order of their own."""
    return [f"[{(seed + number * 4) % 7}]" for number in range(12)]


def test_games_take_the_course_that_they_take_in_textarena_itself() -> None:
    plans = [(game, seed, moves(seed)) for game, seed in itertools.product(GAMES, SEEDS)]
    done = subprocess.run(
        [sys.executable, "-c", UPSTREAM], input=json.dumps(plans), capture_output=True, text=True, check=True
    )
    upstream = json.loads(done.stdout.partition("FOUND")[2])
    ended = 0
    for (game, seed, plan), (seen, rewards) in zip(plans, upstream, strict=True):
        recipe = players_source(game)
        task = recipe.task({"prompt": "-", "game": game, "seed": seed, "players": 2, "seat": 0})
        assert task.game is not None
        played = PlayedGame(task.game(), task.players)
        for (player, observation), move in zip(seen, plan, strict=False):
            assert played.turn is not None, (game, seed)
            assert played.turn.name == f"player-{player}", (game, seed)
            shown = played.conversations[played.turn.name][-1]["content"]
            assert str(observation).strip("\n").endswith(shown.strip("\n")), (game, seed)
            played.play({"role": "assistant", "content": move})
        if rewards is not None:
            ended += 1
            assert played.turn is None, (game, seed)
            assert played.rewards() == {f"player-{number}": reward for number, reward in rewards.items()}
    assert ended > len(plans) / 2


def test_self_play_trains_every_seat_and_an_opponent_none() -> None:
    found = task_source("textarena-players game=TicTacToe-v0,Nim-v0 seed=3")
    rows = list(itertools.islice(found.tasks(0), 8))
    assert rows == list(itertools.islice(found.tasks(1), 8)), "the seed of the options decides"
    assert {row["game"] for row in rows} == {"TicTacToe-v0", "Nim-v0"}
    assert all(row["prompt"] and json.dumps(row) for row in rows)
    assert found.task(rows[0]).trained_players == ("player-0", "player-1")
    for opponent, model in (("policy", "policy"), ("big", "big")):
        against = task_source(f"textarena-players game=TicTacToe-v0 opponent={opponent}")
        for row in itertools.islice(against.tasks(0), 4):
            task = against.task(row)
            assert task.trained_players == (f"player-{row['seat']}",)
            assert [player.model for player in task.players if not player.trains] == [model]
        assert {row["seat"] for row in itertools.islice(against.tasks(0), 9)} == {0, 1}


@each(
    ("options", "why"),
    [
        ("game=NoGame-v0", "has no game 'NoGame-v0'"),
        ("game=Debate-v0", "OpenRouter API key not found"),
        ("game=TicTacToe-v0 players=1", "players=1 must be at least 2"),
        ("game=TicTacToe-v0 players=3", "cannot begin with 3 player"),
        ("game=TicTacToe-v0 players=two", "players=two: must be a whole number"),
        ("game=TicTacToe-v0 seed=x", "seed=x: must be a whole number"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(options: str, why: str) -> None:
    with pytest.raises(BadSource, match=why):
        task_source(f"textarena-players {options}")


def test_a_game_without_an_end_gives_everybody_0() -> None:
    recipe: Any = players_source("TicTacToe-v0")
    task = recipe.task({"prompt": "-", "game": "TicTacToe-v0", "seed": 1, "players": 2, "seat": 0})
    assert PlayedGame(task.game(), task.players).rewards() == {"player-0": 0.0, "player-1": 0.0}


def test_three_players_take_part() -> None:
    recipe = players_source("LiarsDice-v0", players="3")
    task = recipe.task({"prompt": "-", "game": "LiarsDice-v0", "seed": 1, "players": 3, "seat": 0})
    assert task.game is not None
    played = PlayedGame(task.game(), task.players)
    for number in range(1, 4):
        assert played.turn is not None
        played.play({"role": "assistant", "content": f"[Bid: {number}, 6]"})
    assert played.moves == {"player-0": 1, "player-1": 1, "player-2": 1}
