"""Source `textarena-players game=TicTacToe-v0`: games of TextArena for several players, played by the policy against
itself, or against an opponent that does not learn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from turnlog.environments import BadSource, NextMove, Player, Recipe, TaskRow, game_verifier
from turnlog.infra.environments.sources import whole_option
from turnlog.plugins.textarena.games import GameRefused, TextGame
from turnlog.plugins.textarena.source import ACTION_CHARS, VERSION
from turnlog.schemas.events.sessions import Environment


def role(number: int) -> str:
    """Return the name of TextArena's player `number`."""
    return f"player-{number}"


class ArenaGame:
    """See turnlog.environments.Game. An observation is what TextArena's player has not seen yet."""

    def __init__(self, row: TaskRow) -> None:
        self._row = row

    def reset(self) -> NextMove:
        """Begin the game."""
        self._game = TextGame(self._row["game"], self._row["seed"], self._row["players"])
        return self._next()

    def step(self, player: str, action: str) -> NextMove | None:
        """Carry out the text of a message."""
        self._game.act(action[:ACTION_CHARS])
        return None if self._game.done else self._next()

    def rewards(self) -> Mapping[str, float]:
        """Return TextArena's rewards, from -1 to 1 in most games; 0 for everybody in a game without an end."""
        return {role(number): self._game.rewards.get(number, 0.0) for number in range(self._row["players"])}

    def _next(self) -> NextMove:
        return NextMove(role(self._game.player), self._game.observe())


class ArenaPlayers(Recipe):
    """Games of TextArena for several players."""

    name = "textarena-players"
    environment = Environment(name=name, version=VERSION)
    game = ArenaGame

    def __init__(self, games: tuple[str, ...], players: int, opponent: str, seed: int | None) -> None:
        """`opponent` is the model of all players but one: a side engine's, or `policy` for the policy's own weights
        without learning; empty if the policy plays and learns them all."""
        self._games, self._players, self._opponent, self._seed = games, players, opponent, seed
        self.verifier = game_verifier(ArenaGame, self.players, name="textarena")

    def players(self, row: TaskRow) -> tuple[Player, ...]:
        """Return the players. Against an opponent the policy has the seat of the row."""
        return tuple(
            Player(name=role(number))
            if not self._opponent or number == row["seat"]
            else Player(name=role(number), model=self._opponent, trained=False)
            for number in range(row["players"])
        )

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield games without end, each with a seed and a seat for the policy."""
        draw = random.Random(f"textarena-players {seed if self._seed is None else self._seed}")
        while True:
            game, number, seat = draw.choice(self._games), draw.getrandbits(31), draw.randrange(self._players)
            yield {
                "id": f"{game}-{number}-{seat}",
                "prompt": TextGame(game, number, self._players).observe(),
                "game": game,
                "seed": number,
                "players": self._players,
                "seat": seat,
            }


def players_source(game: str, players: str = "2", opponent: str = "", seed: str = "") -> ArenaPlayers:
    """Make the source of `textarena-players game=NAME[,NAME] [players=N] [opponent=MODEL] [seed=N]`. Raises
    BadSource."""
    count, first = whole_option("players", players), whole_option("seed", seed) if seed else None
    if count < 2:
        raise BadSource(f"players={players} must be at least 2; games for one player are those of the source textarena")
    games = tuple(game.split(","))
    for each in games:
        try:
            TextGame(each, 0, count)
        except GameRefused as error:
            raise BadSource(str(error)) from error
    return ArenaPlayers(games, count, opponent, first)
