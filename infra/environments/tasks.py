"""The environment contract: a task source yields rows, and makes a Task of each, with all that its rollouts need.

`Recipe` is the base class for sources whose tasks differ only in their row. Sources with an image, limits or a verifier
per task implement `TaskSource.task` themselves. See docs/environments.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from turnlog.infra.environments.agents import CommandAgent, FunctionAgent
from turnlog.infra.environments.episodes import Judged, Message, SandboxAnswer, SandboxCall, TaskRow, text_of
from turnlog.infra.environments.players import Game, GameError, Player, UserSimulator, game_verifier
from turnlog.infra.environments.simulations import NO_OBJECT, Played, Simulation, object_of
from turnlog.infra.environments.tools import BUILT_IN
from turnlog.infra.environments.warm_starts import WarmStart
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.tools import SandboxSpec
from turnlog.schemas.types import BlobRef


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to one action of the model."""

    content: Any
    """Content of a chat message: text, or OpenAI's content blocks."""
    done: bool = False
    """True if no further action is possible: the session ends once this is part of its conversation."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Messages and tools that a task's opening call adds to the session before the first turn."""

    messages: tuple[Message, ...] = ()
    """Messages that follow those of the task, such as the first observation."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI tool declarations that follow those of the task."""
    tool_call: Callable[[str, str], SandboxCall | str] | None = None
    """Mapping of the model's calls in place of the task's own, for tools that only the opening's answer names."""


def built_in_call(name: str, arguments: str) -> SandboxCall | str:
    """Map a model's call to the built-in tool of the same name. `arguments` are validated where it runs."""
    if name not in BUILT_IN:
        return f"there is no tool {name!r}"
    values = object_of(arguments)
    return NO_OBJECT if values is None else SandboxCall(name, values)


def output_as_text(call: SandboxCall, answer: SandboxAnswer) -> Observation:
    """Return the output of a call as it is."""
    return Observation(answer.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, with all that a rollout of it needs.

    The functions in it are pure: whoever owns the session after a crash calls them again, on the records of the log.

    Who acts: `agent` if there is one; else the built-in loop, in which the model calls `tools`, or acts by the text of
    its messages (`text_action`). Its calls run in a sandbox, or in `simulation`.
    """

    id: str
    """Name of the task, unique in its source. Groups compare rollouts of one task."""
    row: TaskRow
    """Row of the dataset."""
    messages: tuple[Message, ...]
    """Initial conversation."""
    verifier: Judged
    """A FunctionVerifier, or one of turnlog.infra.environments.verifiers."""
    environment: Environment
    """Environment that is recorded on SessionStarted; the runner adds what it leaves out."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """Image, network and limits of the sandbox in which the calls run."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI tool declarations, sent with every chat completion."""
    sandbox_tools: tuple[str, ...] = ()
    """Names of the sandbox tools that the calls may use, recorded with their versions on SessionStarted."""
    agent: FunctionAgent | CommandAgent | None = None
    """Agent in place of the built-in loop."""
    workspace: BlobRef | None = None
    """Stored folder that the sandbox begins with; None for an empty one."""
    files: Mapping[str, Any] | None = None
    """Files that the sandbox begins with, in place of `workspace`; the format is that of
    `turnlog.infra.environments.workspaces.store_files`."""
    simulation: Callable[[], Simulation] | None = None
    """Environment in the runner's process, in place of a sandbox."""
    players: tuple[Player, ...] = ()
    """Players of `game`, in place of one agent."""
    game: Callable[[], Game] | None = None
    """Game in the runner's process that asks the players for their moves."""
    user: UserSimulator | None = None
    """Model that speaks as the user: it answers the agent's messages without tool calls."""
    tool_call: Callable[[str, str], SandboxCall | str] = built_in_call
    """Maps a parsed tool call (name, and the JSON text that the model wrote) to the sandbox. A string is an answer that
    needs no sandbox, for example to a call of an unknown tool."""
    text_action: Callable[[str], SandboxCall | str | None] | None = None
    """Maps the text of a message without tool calls to an action, whose answer becomes a user message. A string is the
    answer itself; None ends the session, as every message without tool calls does without this function."""
    observe: Callable[[SandboxCall, SandboxAnswer], Observation] = output_as_text
    """Returns what the model receives for a call that ran."""
    opening: SandboxCall | None = None
    """Call before the first turn, such as the reset of an environment."""
    opened: Callable[[SandboxAnswer], Opening] | None = None
    """Returns what the answer of `opening` adds to the session; None for nothing."""
    solution: Callable[[], Sequence[Message] | CommandAgent | None] | None = None
    """Returns the solution, which must be rewarded with 1: assistant messages in the order of the turns, or a program.
    Only `turnlog env check` calls it, so a row that lacks what a solution needs can be trained on."""
    max_turns: int | None = None
    """Maximum number of turns, if the task has a lower limit than [feeder] max_turns."""
    deadline_s: float | None = None
    """Seconds that the agent may spend, if the task has a lower limit than [feeder] deadline_s."""

    def __post_init__(self) -> None:
        if (self.game is not None) != bool(self.players):
            raise GameError("Task.players and Task.game go together: set both, or neither")
        beside = {"agent": self.agent, "text_action": self.text_action, "game": self.game}
        if self.user is not None and (others := [name for name, value in beside.items() if value is not None]):
            raise GameError(f"Task.user answers the built-in loop: it cannot be combined with {', '.join(others)}")
        if self.game is not None and any((self.agent, self.simulation, self.opening, self.tools)):
            raise GameError("Task.game asks for texts: it cannot be combined with agent, simulation, opening or tools")

    @property
    def trained_players(self) -> tuple[str, ...]:
        """Names of the players of its game that train, each by a reward of its own."""
        return tuple(player.name for player in self.players if player.trains)

    @property
    def interactive(self) -> bool:
        """True if its actions change an environment, so that those of the last turn still count."""
        return self.simulation is not None or self.opening is not None or self.text_action is not None

    @property
    def call_sandbox(self) -> SandboxSpec:
        """Sandbox of the session's calls. For an agent that is a program, it adds access to the gateway, and preserves
        the workspace for the verifier."""
        if not isinstance(self.agent, CommandAgent):
            return self.sandbox
        return dataclasses.replace(self.sandbox, network="allowlist", durable_workspace=True)


def with_opening(task: Task, opening: Opening) -> Task:
    """Return the task of a session that has begun: with the opening's tools, and its mapping of calls."""
    return dataclasses.replace(task, tools=(*task.tools, *opening.tools), tool_call=opening.tool_call or task.tool_call)


@runtime_checkable
class TaskSource(Protocol):
    """A source of tasks. Implementations are stateless values: every method is a pure function.

    Optional attributes: `demo_rise: float` (see `demo_rise`), `warm_start: WarmStart | None` for sources that train
    without a model, and a method `read_row(row, beside, whole)` for rows that others wrote (see `row_of`).
    """

    @property
    def name(self) -> str:
        """Short name, for messages and files."""
        ...

    def task(self, row: TaskRow) -> Task:
        """Return the task of a row."""
        ...

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield task rows, without end if the source can, in an order that is a function of the seed."""
        ...

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        """Write the first `count` rows as JSON lines. The bytes must be the same each time."""
        ...


class Recipe:
    """Base class for sources whose tasks differ only in their row. Subclasses define `name`, `verifier` and `tasks`,
    and what else differs from the defaults.

    Optional attributes and methods beside those below, all described at Task: `agent`, `workspace`, `files(row)`,
    `simulation(row)`, `sandbox_tools`, `text_action(text)`, `solution(row)`, `game(row)` (the verifier is then its
    rewards by default), and `players` and `user`, which may be functions of the row.
    """

    name: str
    version = "1"
    sandbox = SandboxSpec()
    warm_start: WarmStart | None = None

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return ()

    @property
    def environment(self) -> Environment:
        return Environment(name=self.name, version=self.version)

    def messages(self, task: TaskRow) -> list[Message]:
        """Return the row's `prompt`, which is the text of a user message, or messages."""
        return prompt_messages(task)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Map a model's call to the sandbox; see Task."""
        return built_in_call(name, arguments)

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """Return the content of the tool message for a call that ran. `output` is stdout followed by stderr."""
        return output.decode(errors="replace")

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        raise NotImplementedError(f"recipe {self.name!r} has no tasks of its own: set [feeder] dataset")

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        write_rows(path, itertools.islice(self.tasks(seed), count))

    def task(self, row: TaskRow) -> Task:
        """Return the task of a row, from the attributes and methods of this recipe."""
        simulation, files, solution, game = (
            getattr(self, name, None) for name in ("simulation", "files", "solution", "game")
        )
        verifier: Judged | None = getattr(self, "verifier", None)
        if verifier is None and game is not None:
            verifier = game_verifier(game, lambda row: tuple(self._of_row("players", row) or ()))
        if verifier is None:
            raise NotImplementedError(f"recipe {self.name!r} has no verifier: define the attribute `verifier`")
        return Task(
            id=task_id(row),
            row=row,
            messages=tuple(self.messages(row)),
            verifier=verifier,
            environment=self.environment,
            sandbox=self.sandbox,
            tools=self.tools,
            sandbox_tools=self._sandbox_tools(),
            agent=getattr(self, "agent", None),
            workspace=getattr(self, "workspace", None),
            files=None if files is None else files(row),
            simulation=None if simulation is None else lambda: simulation(row),
            players=tuple(self._of_row("players", row) or ()),
            game=None if game is None else lambda: game(row),
            user=self._of_row("user", row),
            tool_call=self.tool_call,
            text_action=getattr(self, "text_action", None),
            observe=lambda call, answer: Observation(self.tool_answer(answer.ok, answer.output.encode())),
            solution=None if solution is None else lambda: solution(row),
        )

    def _of_row(self, name: str, row: TaskRow) -> Any:
        stated = getattr(self, name, None)
        return stated(row) if callable(stated) else stated

    def _sandbox_tools(self) -> tuple[str, ...]:
        stated: tuple[str, ...] | None = getattr(self, "sandbox_tools", None)
        return built_in_names(self.tools) if stated is None else stated


def prompt_messages(row: TaskRow) -> list[Message]:
    """Return the row's `prompt`, which is the text of a user message, or messages."""
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def task_id(row: TaskRow) -> str:
    """Return the row's `id`, `task_id` or `instance_id`, or else a hash of the row."""
    for key in ("id", "task_id", "instance_id"):
        if isinstance(found := row.get(key), str | int) and found != "":
            return str(found)
    return hashlib.sha256(canonical_text(dict(row), ascii_only=False).encode()).hexdigest()[:16]


def built_in_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of those declared tools that are built-in ones under their own names."""
    declared = [tool.get("function", {}).get("name") for tool in tools]
    return tuple(name for name in declared if name in BUILT_IN)


def write_rows(path: Path, rows: Iterator[TaskRow]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replay_actions(task: Task, messages: Sequence[Message]) -> Played | None:
    """Create the task's simulation, and repeat those actions in `messages` that have answers. Returns None if the task
    has no simulation. Raises the exceptions of the environment."""
    if task.simulation is None:
        return None
    game = Played(task.simulation())
    answered = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or ()
        for call in calls:
            if call["id"] in answered:
                game.call(call["function"]["name"], call["function"]["arguments"])
        if not calls and len(task.messages) <= place < len(messages) - 1:
            _act_by_text(task, game, message)
    return game


def _act_by_text(task: Task, game: Played, message: Message) -> Any:
    """Take the action of a message without tool calls. Return the content that answers it, or None if it is none."""
    action = None if task.text_action is None else task.text_action(text_of(message))
    return game.act(action.tool, action.arguments) if isinstance(action, SandboxCall) else action


def played(source: TaskSource, row: TaskRow, messages: Sequence[Message]) -> Played | None:
    """Return the simulation of a row after the actions in `messages`; see `replay_actions`."""
    return replay_actions(source.task(row), messages)


def acted_out(task: Task, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a finished session as its own verifier saw them. They include a simulation's answers to
    the actions of the last turn, which are not on the log because no turn followed. Raises the exceptions of the
    environment."""
    game, found = replay_actions(task, messages), list(messages)
    if game is None or not found or found[-1]["role"] != "assistant":
        return found
    calls = found[-1].get("tool_calls") or ()
    for call in calls:
        content = game.call(call["function"]["name"], call["function"]["arguments"])
        found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    if not calls and (content := _act_by_text(task, game, found[-1])) is not None:
        found.append({"role": "user", "content": content})
    return found
