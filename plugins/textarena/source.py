"""Source `textarena game=FrozenLake-v0`: games of TextArena for one player. Each message of the model is an action, and
the game's answer is the next user message."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from turnlog.environments import (
    BadSource,
    Episode,
    FunctionVerifier,
    Recipe,
    SandboxCall,
    Step,
    TaskRow,
    Verdict,
    played,
)
from turnlog.infra.environments.episodes import add_rewards
from turnlog.infra.environments.sources import weights_option, whole_option
from turnlog.plugins.textarena.games import GameRefused, TextGame, single_player_refusal
from turnlog.schemas.events.sessions import Environment

VERSION: Final = "0.7.4"
"""Version of TextArena whose games these are."""
ACTION_CHARS: Final = 4000
"""Maximum number of characters of a message that the game reads."""


class GameSimulation:
    """See turnlog.environments.Simulation. An observation is text."""

    def __init__(self, row: TaskRow) -> None:
        self._row = row

    def reset(self) -> str:
        """Return the game's first observation."""
        self._game = TextGame(self._row["game"], self._row["seed"])
        return self._game.observe()

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """Carry out the action. The reward comes with the game's end."""
        self._game.act(str(arguments["action"])[:ACTION_CHARS])
        return Step(self._game.observe(), self._game.rewards.get(0, 0.0), self._game.done)

    def format_observation(self, observation: Any) -> str:
        """Return the observation unchanged."""
        return str(observation)


class TextArena(Recipe):
    """Games of TextArena for one player; see `games.py` for those that are refused."""

    name = "textarena"
    environment = Environment(name=name, version=VERSION)
    simulation = GameSimulation

    def __init__(self, games: dict[str, float], seed: int | None = None) -> None:
        """Draw games in proportion to the weights of `games`, a seed for each game from `seed`."""
        self._games, self._seed = games, seed
        self.verifier = FunctionVerifier("textarena", "1", self._judge)

    def text_action(self, text: str) -> SandboxCall:
        """Return the text as the game's action."""
        return SandboxCall("act", {"action": text})

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield games without end, each with its first observation as the prompt."""
        draw = random.Random(f"textarena {seed if self._seed is None else self._seed}")
        while True:
            game = draw.choices([*self._games], [*self._games.values()])[0]
            yield game_row(game, draw.getrandbits(31))

    def _judge(self, episode: Episode) -> Verdict:
        """Return the game's reward, by playing it again. A game without an end has none: 0."""
        game = played(self, episode.task, episode.messages)
        assert game is not None
        components = {"done": float(game.done), "actions": float(len(game.rewards))}
        return Verdict(
            add_rewards(game.rewards), components, {"game": episode.task["game"], "seed": episode.task["seed"]}
        )


def game_row(game: str, seed: int) -> dict[str, Any]:
    """Return the row of a game."""
    return {"id": f"{game}-{seed}", "prompt": TextGame(game, seed).observe(), "game": game, "seed": seed}


def textarena_source(game: str, seed: str = "") -> TextArena:
    """Make the source of `textarena game=NAME[:WEIGHT],... [seed=N]`. Raises BadSource."""
    games = weights_option("game", game)
    for name in games:
        try:
            why = single_player_refusal(name)
        except GameRefused as error:
            raise BadSource(str(error)) from error
        if why:
            raise BadSource(f"TextArena's {name} cannot be played: {why}")
    return TextArena(games, whole_option("seed", seed) if seed else None)
