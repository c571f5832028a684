"""A game of two players that needs no package: take 1 or 2 from a number; who takes the last wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnlog.environments import Game, NextMove


class NumberGame:
    """See the module docstring. No number is a lost game. `faults` make it break its contract: what it shows first,
    whom it asks next, which rewards it returns, and what it does at each move."""

    def __init__(self, number: int = 4, names: tuple[str, str] = ("a", "b"), **faults: Any) -> None:
        self.left, self.names, self.faults = number, names, faults
        self.won = dict.fromkeys(names, 0.0)

    def reset(self) -> NextMove:
        """See Game."""
        return NextMove(self.names[0], self.faults.get("first", f"{self.left} left"))

    def step(self, player: str, action: str) -> NextMove | None:
        """See Game."""
        other = self.names[1 - self.names.index(player)]
        self.faults.get("at_each_move", lambda: None)()
        if action not in ("1", "2"):
            self.won[other] = 1.0
            return None
        self.left -= int(action)
        if self.left <= 0:
            self.won[player] = 1.0
            return None
        return NextMove(self.faults.get("next", other), f"{self.left} left")

    def rewards(self) -> Mapping[str, float]:
        """See Game."""
        rewards: Mapping[str, float] = self.faults.get("rewards", self.won)
        return rewards


GAME: Game = NumberGame()
