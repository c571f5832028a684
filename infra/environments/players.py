"""Players of a session: what a task with several of them declares, and the game that asks each for its move.

A game is deterministic, as a Simulation is. So the conversations of its players are all that there is to know about a
session: whoever continues it, and its verifier, let the game ask the recorded moves again.

GameError   a fault of the game or of the task's players; the message says which. It never becomes a reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Message, TaskRow, Verdict, text_of
from turnlog.processors.core.lineages import PLAYER, SIDE_PLAYER

POLICY = "policy"
"""Player.model of a player that the policy itself plays."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Name of a player: a component of an agent path, and the role among whose trajectories advantages are computed."""
PLAYERS, UNTRAINED = f"{PLAYER}/", f"{SIDE_PLAYER}/"
"""Start of the agent path of a player of a game, and of a user simulator, which never trains."""
STOP = "###STOP###"
"""Default text by which a simulated user ends the conversation."""


class GameError(Exception):
    """See the module docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A player of a game."""

    name: str
    """The role, the same in every rollout of a task: trajectories are compared with those of the same role."""
    system: str = ""
    """System prompt, which only this player sees; empty for none."""
    model: str = POLICY
    """The policy, or a model name that a pattern of [gateway] side_engines matches."""
    trained: bool = True
    """False for an opponent that shall not learn. What a side engine plays is never trained."""

    @property
    def trains(self) -> bool:
        """Whether its tokens train and it gets a reward of its own."""
        return self.trained and self.model == POLICY

    @property
    def path(self) -> str:
        """Agent path of its turns."""
        return PLAYERS + self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSimulator:
    """A model that speaks as the user: whenever the agent sends a message without tool calls, its answer becomes the
    next message of the user. It sees the texts of both, and none of the agent's system prompt, tools and calls."""

    system: str
    """System prompt: who the user is and wants, and that it writes `stop` when it has nothing more to say."""
    model: str = POLICY
    """Model of the user, as in Player. The policy does not learn from its messages as the user."""
    stop: str = STOP
    """Text by which it ends the conversation; the message that holds it does not reach the agent."""
    opening: str = "Hi! How can I help you today?"
    """First message to the simulator, if the conversation does not begin with one of the agent."""
    name: str = "user"

    @property
    def path(self) -> str:
        """Agent path of its turns."""
        return UNTRAINED + self.name

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation as the simulator sees it, from the agent's: the roles are exchanged, and calls and
        their results are left out."""
        seen: list[Message] = []
        for one in messages:
            if one["role"] == "user":
                seen.append({"role": "assistant", "content": one["content"]})
            elif one["role"] == "assistant" and not one.get("tool_calls"):
                seen.append({"role": "user", "content": one.get("content") or ""})
        if not seen or seen[0]["role"] == "assistant":
            seen.insert(0, {"role": "user", "content": self.opening})
        return [{"role": "system", "content": self.system}, *seen]


@dataclass(frozen=True, slots=True)
class NextMove:
    """Move that a game waits for: a message of `player`."""

    player: str
    """Name of the player."""
    observation: Any
    """Content of the user message that asks for the move: text, or OpenAI's content blocks. It holds whatever the
    player may know of what happened since its last move."""


class Game(Protocol):
    """A game of several players, which runs in the runner's process.

    It must be deterministic on any machine: the same moves give the same game. Its state is not stored; a new owner of
    the session, and its verifier, repeat the moves.
    """

    def reset(self) -> NextMove:
        """Return who begins, and what that player is shown."""
        ...

    def step(self, player: str, action: str) -> NextMove | None:
        """Play the text of a message of the player that was asked. Return the next move, or None if the game is over.
        Answer mistakes of a model by an observation or a loss; an exception is a fault of the task."""
        ...

    def rewards(self) -> Mapping[str, float]:
        """Return the reward of each player that is trained, at least. It is also asked of a game that a limit cut
        off."""
        ...


class PlayedGame:
    """A game and its progress: the conversation of each player, as its model sees it."""

    def __init__(
        self, game: Game, players: Sequence[Player], recorded: Mapping[str, Sequence[Message]] | None = None
    ) -> None:
        """Begin the game, and repeat the moves found in `recorded`: player -> its conversation. Raises GameError if
        the game shows a player something else than was recorded, and the game's own exceptions."""
        check_players(players)
        self._game, self._recorded = game, recorded or {}
        self.players = {player.name: player for player in players}
        self.conversations: dict[str, list[Message]] = {
            player.name: [{"role": "system", "content": player.system}] if player.system else [] for player in players
        }
        self.moves = dict.fromkeys(self.players, 0)
        """Number of moves of each player."""
        self.turn: Player | None = None
        """The player whose move the game waits for; None if the game is over."""
        self._ask(game.reset())
        while self.turn is not None and (message := self._next_recorded(self.turn.name)) is not None:
            self.play(message)

    def play(self, message: Message) -> None:
        """Play a message of the player that was asked. Raises GameError, and the game's own exceptions."""
        assert self.turn is not None
        name = self.turn.name
        self.conversations[name].append(message)
        self.moves[name] += 1
        self._ask(self._game.step(name, text_of(message)))

    def rewards(self) -> dict[str, float]:
        """Return the rewards. Raises GameError if one is missing or no finite number."""
        rewards = {str(name): float(value) for name, value in self._game.rewards().items()}
        missing = [name for name, player in self.players.items() if player.trains and name not in rewards]
        broken = [name for name, value in rewards.items() if name not in self.players or not math.isfinite(value)]
        if missing or broken:
            raise GameError(
                f"rewards() of the game returned {rewards}: it must hold a finite number for each trained player "
                f"({', '.join(name for name, player in self.players.items() if player.trains)}), and no other names "
                f"than those of Task.players"
            )
        return rewards

    def _ask(self, move: NextMove | None) -> None:
        if move is None:
            self.turn = None
            return
        if move.player not in self.players:
            raise GameError(
                f"the game asks {move.player!r} for a move; Task.players has {', '.join(map(repr, self.players))}"
            )
        self.turn = self.players[move.player]
        own = self.conversations[move.player]
        own.append({"role": "user", "content": move.observation})
        recorded = self._recorded.get(move.player, ())[: len(own)]
        if len(recorded) == len(own) and recorded[-1] != own[-1]:
            raise GameError(
                f"the game is not deterministic: at move {self.moves[move.player]} player {move.player!r} was shown "
                f"{recorded[-1].get('content')!r}, and now {move.observation!r}; let its randomness follow from the row"
            )

    def _next_recorded(self, name: str) -> Message | None:
        recorded, place = self._recorded.get(name, ()), len(self.conversations[name])
        return recorded[place] if place < len(recorded) else None


def check_players(players: Sequence[Player]) -> None:
    """Raise GameError unless each player has a valid name of its own."""
    names = [player.name for player in players]
    for name in names:
        if not NAME.fullmatch(name):
            raise GameError(f"player {name!r}: a name has 1 to 64 letters, digits, `_`, `.` or `-`")
    if len(set(names)) != len(names) or not names:
        raise GameError(f"Task.players is {names}: a game needs at least one player, each with a name of its own")


def game_verifier(
    game: Callable[[TaskRow], Game],
    players: Callable[[TaskRow], Sequence[Player]],
    *,
    name: str = "game",
    version: str = "1",
) -> FunctionVerifier:
    """Return a verifier that repeats the game of an episode and takes its rewards: for each trained player its own, for
    the session the mean of these. The rewards of all players are components."""

    def judge(episode: Episode) -> Verdict:
        if not episode.players:
            raise GameError("the episode holds no conversations of players")
        played = PlayedGame(game(episode.task), players(episode.task), episode.players)
        rewards = played.rewards()
        trained = {name: value for name, value in rewards.items() if played.players[name].trains}
        mean = math.fsum(trained.values()) / len(trained) if trained else 0.0
        return Verdict(mean, rewards, {"moves": played.moves, "over": played.turn is None}, trained)

    return FunctionVerifier(name, version, judge)
