"""Games of TextArena through turnlog are those of TextArena itself, in any process and among other games."""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.each import each
from turnlog.plugins.textarena.games import GameRefused, TextGame, refusal, single_player_games

TURNS = 12
DIRECTIONS = ("[up]", "[down]", "[left]", "[right]")
Draw = random.Random
SCRIPTS: dict[str, Callable[[Draw], str]] = {
    "2048": lambda draw: draw.choice(DIRECTIONS),
    "Bandit": lambda draw: f"[{draw.choice(('red', 'blue', 'green'))}]",
    "Blackjack": lambda draw: draw.choice(("[Hit]", "[Stand]")),
    "Countdown": lambda draw: f"[{draw.randrange(3)} {draw.randrange(3, 6)} {draw.choice('+-*')}]",
    "Crosswords": lambda draw: f"[8 {draw.randrange(2, 13)} {draw.choice('aeinrst')}]",
    "Cryptarithm": lambda draw: f"[{draw.choice('SENDMORY')} {draw.randrange(10)}]",
    "FifteenPuzzle": lambda draw: draw.choice(DIRECTIONS),
    "FrozenLake": lambda draw: draw.choice(DIRECTIONS),
    "GuessTheNumber": lambda draw: f"[{draw.randint(1, 20)}]",
    "LightsOut": lambda draw: f"[{draw.randrange(5)} {draw.randrange(5)}]",
    "LogicPuzzle": lambda draw: f"[gasoline {draw.choice(('bob', 'alice', 'charlie'))} {draw.choice('XO')}]",
    "Mastermind": lambda draw: f"[{' '.join(map(str, draw.sample(range(1, 7), 4)))}]",
    "Minesweeper": lambda draw: f"[{draw.randrange(5)} {draw.randrange(5)}]",
    "PegJump": lambda draw: draw.choice(("[4 1]", "[6 1]", "[11 4]", "[13 4]")),
    "RushHour": lambda draw: f"[{draw.choice('ABX')}{draw.choice('+-')}]",
    "Secretary": lambda draw: draw.choice(("[continue]", "[continue]", "[accept]")),
    "Set": lambda draw: f"[{', '.join(map(str, draw.sample(range(1, 13), 3)))}]",
    "Slitherlink": lambda draw: f"[{draw.choice('hv')} {draw.randrange(4)} {draw.randrange(4)}]",
    "Sokoban": lambda draw: draw.choice(DIRECTIONS),
    "Sudoku": lambda draw: f"[{draw.randint(1, 9)} {draw.randint(1, 9)} {draw.randint(1, 9)}]",
    "ThreeCardMonte": lambda draw: f"[{draw.randrange(3)}]",
    "TowerOfHanoi": lambda draw: f"[{draw.choice('ABC')} {draw.choice('ABC')}]",
}
"""Beginning of a game's name -> an action."""
if sys.version_info >= (3, 12):  # TextArena's module is no valid Python 3.11
    SCRIPTS["UltimateTexasHoldem"] = lambda draw: draw.choice(("[4x]", "[2x]", "[1x]", "[check]", "[skip]"))
UPSTREAM = """
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()):
    import textarena
    played = []
    for game, seed, actions in json.load(sys.stdin):
        env = textarena.make(game)
        env.reset(num_players=1, seed=seed)
        seen, rewards = [env.get_observation()[1]], None
        for action in actions:
            done, _ = env.step(action=action)
            seen.append(env.get_observation()[1])
            if done:
                rewards, _ = env.close()
                break
        played.append([seen, rewards])
print(json.dumps(played))
"""
"""The games by TextArena alone, as its README plays them."""


def actions_of(game: str, seed: int) -> list[str]:
    """The scripted actions, of which a game that ends earlier takes a part."""
    draw = random.Random(f"{game} {seed}")
    return [SCRIPTS[game.partition("-v0")[0]](draw) for _ in range(TURNS)]


def play(game: str, seed: int, actions: list[str]) -> tuple[list[str], dict[int, float]]:
    """The observations and the rewards through turnlog."""
    played = TextGame(game, seed)
    seen = [played.observe()]
    for action in actions:
        played.act(action)
        seen.append(played.observe())
        if played.done:
            break
    return seen, played.rewards


def by_upstream(games: list[tuple[str, int]], hash_seed: str) -> Iterator[tuple[list[str], dict[int, float]]]:
    """The same games by TextArena alone in a fresh process."""
    asked = json.dumps([(game, seed, actions_of(game, seed)) for game, seed in games])
    done = subprocess.run(
        [sys.executable, "-c", UPSTREAM],
        input=asked,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    for seen, rewards in json.loads(done.stdout.splitlines()[-1]):
        yield seen, {int(player): reward for player, reward in (rewards or {}).items()}


def new_parts(seen: list[str], actions: list[str]) -> list[str]:
    """What each observation of TextArena adds to the one before, without the action."""
    parts = [seen[0].strip("\n")]
    for before, after, action in zip(seen, seen[1:], actions, strict=False):
        assert after.startswith(before)
        parts.append(after[len(before) :].removeprefix(f"\n[Player] {action}").removeprefix(f"\n[Player 0] {action}"))
    return [part.strip("\n") for part in parts]


def compare(games: list[tuple[str, int]]) -> set[float]:
    """Assert that observations and rewards are TextArena's. Return the rewards."""
    found = set()
    for (game, seed), (seen, rewards) in zip(games, by_upstream(games, "7"), strict=True):
        actions = actions_of(game, seed)
        mine, my_rewards = play(game, seed, actions)
        assert mine == new_parts(seen, actions), (game, seed)
        if not any(isinstance(reward, str) for reward in rewards.values()):  # Countdown: a reason
            assert my_rewards == rewards, (game, seed)
        found |= {*my_rewards.values()}
    return found


def test_each_game_for_one_player_gives_the_observations_and_rewards_that_textarena_gives() -> None:
    first = {game.partition("-v0")[0]: game for game in reversed(single_player_games())}
    assert first.keys() == SCRIPTS.keys()
    assert len(compare([(game, 1) for game in first.values()])) > 5


@pytest.mark.long
def test_each_variant_of_a_game_gives_the_observations_and_rewards_that_textarena_gives() -> None:
    assert len(compare([(game, seed) for game in single_player_games() for seed in (3, 4, 5)])) > 5


def test_games_that_are_played_at_once_do_not_change_each_other() -> None:
    names = ("2048-v0", "Blackjack-v0", "Bandit-v0", "Set-v0")
    alone = {name: play(name, 5, actions_of(name, 5)) for name in names}
    at_once: dict[str, tuple[list[str], dict[int, float]]] = {}

    def one(name: str) -> None:
        for _ in range(5):
            at_once[name] = play(name, 5, actions_of(name, 5))
            assert at_once[name] == alone[name]

    state = random.getstate()
    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == alone
    assert random.getstate() == state, "the process's own generator was used"


@each(
    ("game", "reason"),
    [
        ("GuessWho-v0", "OpenRouter"),
        ("TwentyQuestions-v0", "OpenRouter"),
        ("Klondike-v0", "SyntaxError"),
        ("TicTacToe-v0", "player"),
        ("PublicGoodsGame-v0", "several players"),
    ],
)
def test_a_game_that_cannot_be_played_alone_is_refused_with_the_reason(game: str, reason: str) -> None:
    with pytest.raises(GameRefused, match=reason):
        TextGame(game, 1)


def test_a_game_that_reads_data_of_nltk_is_refused_where_they_are_missing() -> None:
    if refusal("Hangman-v0"):
        with pytest.raises(GameRefused, match=r"python -m nltk.downloader words"):
            TextGame("Hangman-v0", 1)
    else:
        assert TextGame("Hangman-v0", 1).observe() == TextGame("Hangman-v0", 1).observe()


def test_an_unknown_game_is_refused_by_name() -> None:
    with pytest.raises(match="'Nope-v0'"):
        TextGame("Nope-v0", 1)


def test_the_share_that_countdown_exchanges_with_its_reason_is_a_number() -> None:
    game = TextGame("Countdown-v0", 1)
    for _ in range(2):
        game.act("[9 9 +]")
    assert game.done
    assert 0.0 < game.rewards[0] < 1.0
