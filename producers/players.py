"""Sessions in which several speak: the players of a game, or an agent and the model that plays its user.

As the loop over tools, both decide from what is on the log alone: each speaker has a conversation and an agent path of
its own, and the game, or the order of speaking, says who is next. So whoever owns the task can continue a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from turnlog.infra.environments.episodes import Judged, Message, text_of
from turnlog.infra.environments.players import POLICY, Game, PlayedGame, Player
from turnlog.infra.environments.sources import BrokenRecipe, call_recipe
from turnlog.infra.environments.tasks import Task
from turnlog.processors.core.lineages import MAIN
from turnlog.producers.agents import TURNS, Attempt, SessionEnding, cut_off
from turnlog.producers.gateway_client import (
    AgentState,
    Completion,
    ContextExceeded,
    GatewayFailed,
    OpponentMissing,
    RequestRejected,
    SessionState,
    Speaker,
)
from turnlog.producers.tool_loop import ToolLoop
from turnlog.schemas.events import FinishReason, Outcome
from turnlog.schemas.types import TurnId

P = ParamSpec("P")
T = TypeVar("T")


async def speak(
    attempt: Attempt, messages: list[Message], name: str, path: str, model: str, *, step: int, trains: bool
) -> Completion | SessionEnding:
    """Return the next turn of the player `name`, or the ending of a session whose player has no room left. Raises
    GatewayClientError: OpponentMissing names the player, and what an untrained player cannot request is no failure of
    the agent."""
    speaker = Speaker(path, "" if model == POLICY else model)
    try:
        return await attempt.complete(messages, (), step=step, speaker=speaker)
    except ContextExceeded:
        return SessionEnding(Outcome.truncated, f"context (player {name})")
    except OpponentMissing as error:
        raise OpponentMissing(f"player {name!r} (model {model!r}): {error}") from error
    except RequestRejected as error:
        if trains:
            raise
        raise GatewayFailed(f"player {name!r} (model {model!r}): {error}") from error


def recorded_moves(task: Task, states: Mapping[str, AgentState]) -> tuple[dict[str, list[Message]], set[str]]:
    """Return the conversations of a game's players on the log, and the names of those whose last message is left out:
    it was cut off at max_new_tokens, so that it is no move."""
    recorded, cut = {}, set()
    for player in task.players:
        if (one := states.get(player.path)) is not None:
            recorded[player.name] = list(one.messages)
            if player.trains and one.finish_reason == FinishReason.length:
                recorded[player.name].pop()
                cut.add(player.name)
    return recorded, cut


async def players_on_log(attempt: Attempt, state: SessionState | None) -> Mapping[str, AgentState]:
    """Return the state of each player by its agent path. Raises GatewayClientError, GatewayFailed from a gateway of an
    earlier release: it would take the turns of all players for those of one agent."""
    found = state or await attempt.gateway.state(attempt.session)
    if found.players is None:
        raise GatewayFailed(
            f"the gateway at {attempt.session.base_url} is of a release that does not know players: replace it by one "
            "of this release"
        )
    return found.players


class GameLoop:
    """Players of a game: the game asks one of them for its move, whose message it then plays, until it is over or a
    limit is reached. The time that the session has spent is that in which engines sampled and the game computed. See
    Actor."""

    command_end = None

    def __init__(self, attempt: Attempt, state: SessionState | None) -> None:
        self._attempt, self._state, self._name = attempt, state, attempt.task.environment.name
        self._game: PlayedGame | None = None
        self._unplayed: set[str] = set()
        """Players whose last message is no move, see `recorded_moves`."""
        self._last: dict[str, TurnId] = {}
        """Last turn of each player, by its agent path."""
        self._spent_s = state.own_s if state else 0.0
        self._stepping = False
        self._playing_since: float | None = None

    @property
    def judged_turn(self) -> tuple[TurnId, ...]:
        return tuple(self._last.values())

    @property
    def verifier(self) -> Judged:
        return self._attempt.task.verifier

    @property
    def conversations(self) -> Mapping[str, tuple[Message, ...]]:
        """Conversation of each player by its name, up to the last move that was played."""
        game = self._game  # None if the deadline had passed before it was set up
        return {} if game is None else {name: tuple(messages) for name, messages in game.conversations.items()}

    async def messages(self) -> list[Message]:
        return list(next(iter(self.conversations.values()), ()))

    async def late(self) -> SessionEnding:
        return await cut_off(self._attempt)

    async def spent_s(self) -> float:
        if self._playing_since is not None:
            return self._spent_s + asyncio.get_running_loop().time() - self._playing_since
        state = await self._attempt.gateway.glimpse(self._attempt.session) if self._stepping else None
        return self._spent_s + (state.running_s if state else 0.0)

    async def act(self) -> SessionEnding:
        game, limits = await self._begin(), self._attempt.request.limits
        while (player := game.turn) is not None:
            if player.name in self._unplayed:
                return SessionEnding(Outcome.truncated, f"max_new_tokens (player {player.name})")
            if self._spent_s >= limits.deadline_s:
                return SessionEnding(Outcome.truncated, "deadline")
            if game.moves[player.name] >= limits.max_turns:
                return SessionEnding(Outcome.truncated, f"max_turns (player {player.name})")
            if (ending := await self._move(game, player)) is not None:
                return ending
        return SessionEnding(Outcome.completed)

    async def _begin(self) -> PlayedGame:
        """Set the game up, and repeat the moves that are on the log. Raises BrokenRecipe."""
        task, states = self._attempt.task, await players_on_log(self._attempt, self._state)
        assert task.game is not None
        recorded, self._unplayed = recorded_moves(task, states)
        self._last = {path: one.last_turn for path, one in states.items()}
        self._game = await self._play(_set_up, task.game, task.players, recorded)
        return self._game

    async def _move(self, game: PlayedGame, player: Player) -> SessionEnding | None:
        """Take one turn of a player, and play it. Return the ending if it ends the session."""
        self._stepping = True
        turn = await speak(
            self._attempt, game.conversations[player.name], player.name, player.path, player.model,
            step=game.moves[player.name], trains=player.trains,
        )  # fmt: skip
        self._stepping = False
        if isinstance(turn, SessionEnding):
            return turn
        TURNS.inc()
        self._spent_s += turn.own_s
        self._last[player.path] = turn.turn
        if player.trains and turn.finish_reason == FinishReason.length:
            self._unplayed.add(player.name)
        else:
            await self._play(game.play, turn.message)
        return None

    async def _play(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Let the game compute in a thread. Raises BrokenRecipe."""
        self._playing_since = began = asyncio.get_running_loop().time()
        result = await asyncio.to_thread(lambda: call_recipe(self._name, function, *arguments, **named))
        self._spent_s += asyncio.get_running_loop().time() - began
        self._playing_since = None
        return result


def _set_up(
    game: Callable[[], Game], players: Sequence[Player], recorded: Mapping[str, Sequence[Message]]
) -> PlayedGame:
    return PlayedGame(game(), players, recorded)


class UserLoop(ToolLoop):
    """The loop over tools with a model that plays the user: it answers each message of the agent that is no action,
    and begins if the task has no message yet. See Actor."""

    speaker = Speaker(MAIN)

    async def _begin(self) -> None:
        await players_on_log(self._attempt, self._state)
        await super()._begin()
        messages = self._conversation.messages
        if not messages or messages[-1]["role"] == "system":
            reply = await self._ask_user()
            if isinstance(reply, SessionEnding):
                raise BrokenRecipe(f"the user simulator ended the conversation before the agent spoke: {reply}")
            messages.append(reply)

    async def _reply(self) -> Message | SessionEnding:
        reply = await self._ask_user()  # also after the last turn: the user decides whether that was the end
        if not isinstance(reply, SessionEnding) and self._conversation.steps >= self._attempt.request.limits.max_turns:
            return SessionEnding(Outcome.truncated, "max_turns")
        return reply

    async def _ask_user(self) -> Message | SessionEnding:
        """Return the user's next message, or the end of the session if it has nothing more to say."""
        user, self._stepping = self._task.user, True
        assert user is not None
        seen = user.conversation(self._conversation.messages)
        step = sum(message["role"] == "assistant" for message in seen)
        turn = await speak(self._attempt, seen, user.name, user.path, user.model, step=step, trains=False)
        self._stepping = False
        if isinstance(turn, SessionEnding):
            return turn
        TURNS.inc()
        self._spent_s += turn.own_s
        text = text_of(turn.message)
        return SessionEnding(Outcome.completed) if user.stop in text else {"role": "user", "content": text}
