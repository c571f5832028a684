"""The interface of a recipe: dataset, prompt, tools, verifier and, for tiny models, a warm start; found by entry point.

A package offers one under the entry point group `turnlog.recipes`; `recipe(name)` imports it when a role needs it.

RecipeError
├── UnknownRecipe    no installed package offers that name; the message lists the names that exist
├── AmbiguousRecipe  two packages offer one name
└── BrokenRecipe     the entry point does not import, its object is not a recipe, or a method of it raises
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from turnlog.infra.environments.tools import BUILT_IN
from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.schemas.events.sessions import Environment, Outcome
from turnlog.schemas.events.tools import SandboxSpec
from turnlog.schemas.json_depth import deeper_than
from turnlog.schemas.types import BlobRef

P = ParamSpec("P")
T = TypeVar("T")
Message = dict[str, Any]
"""An OpenAI chat message: role, content and, for an assistant, tool_calls."""
TaskRow = Mapping[str, Any]
"""A row of the dataset; it has at least `prompt`."""


class RecipeError(Exception):
    """Base class of all errors of recipes; see the module docstring."""


class UnknownRecipe(RecipeError):
    """No package offers this recipe; see [feeder] recipe."""


class AmbiguousRecipe(RecipeError):
    """Two packages offer a recipe of this name. Remedy: uninstall one of them."""


class BrokenRecipe(RecipeError):
    """The entry point cannot be loaded, or a method of the recipe raises."""


@dataclass(frozen=True, slots=True)
class SandboxCall:
    """A tool call as the sandbox runs it: `python` {"code"}, `shell` {"command"} ...
    (turnlog.infra.environments.tools), or a tool that a package offers under `turnlog.tools`."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """The end of an agent that is a program, and its results."""

    exit_code: int | None
    """Exit status, or None if the program did not end by itself. It proves nothing about success: examine the
    workspace."""
    output: str
    """Stdout and stderr in the order of writing; if too long, the middle is left out."""
    workspace: BlobRef | None
    """The workspace after the end (docs/sandbox.md, Workspaces)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Input of a verifier."""

    task: TaskRow
    messages: tuple[Message, ...]
    """The whole conversation, the last assistant message included."""
    outcome: Outcome
    reason: str
    """Limit that a truncated session hit, or a program's exit status; empty otherwise."""
    ended: CommandEnd | None = None
    """Result of an agent that is a program; None for other agents."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, its components, and JSON-able evidence."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


class Judged(Protocol):
    """Interface common to all verifiers: FunctionVerifier, and those of turnlog.infra.environments.verifiers."""

    @property
    def name(self) -> str:
        """Name that is recorded with the reward."""
        ...

    @property
    def version(self) -> str:
        """Version of the verifier. Change it if the same episode may get another reward."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier that is a pure function. An exception becomes a RewardFailed, never a reward of 0."""

    name: str
    version: str
    judge: Callable[[Episode], Verdict]
    timeout_s: float = 300.0
    """Seconds after which the function is abandoned and recorded as RewardFailed."""
    late: bool = False
    """True if the session is finished before the reward is known."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an action in a simulation."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    """True if no further action is possible: the session ends once the model has received the observation."""


class Simulation(Protocol):
    """An episode of an environment that runs in the runner's process.

    It must be deterministic on any machine: the same task and actions give the same steps. A new owner of the session,
    and its verifier, repeat the actions to restore its state.
    """

    def reset(self) -> Any:
        """Return the first observation."""
        ...

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """Run a call of the tool `name`. Answer mistakes of the model by an observation; an exception is a fault of
        the recipe."""
        ...

    def format_observation(self, observation: Any) -> Any:
        """Return the content of a chat message: text, or OpenAI's content blocks."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxAnswer:
    """The result of a call."""

    ok: bool
    """False if the tool failed or hit a limit."""
    output: str
    """Stdout, followed by stderr."""
    exit_code: int | None = None
    """Exit status of the program; None if none ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """Arguments of an agent's function: enough for any OpenAI or Anthropic client."""

    base_url: str
    """Base URL for OpenAI's clients, ending in /v1. Anthropic's take `root_url`."""
    api_key: str = field(repr=False)
    """Key that is valid for this session only, until it ends."""
    model: str
    """Name of the policy."""
    task: TaskRow
    tools: tuple[dict[str, Any], ...]
    """Tool declarations of the recipe."""
    call: Callable[[SandboxCall], Awaitable[SandboxAnswer]]
    """Runs a call in the session's sandbox. Its exceptions do not count as a failure of the agent: the session
    is retried."""

    @property
    def root_url(self) -> str:
        """Base URL without /v1."""
        return self.base_url.removesuffix("/v1")


class AgentError(Exception):
    """Raised by an agent's function if the agent itself failed. The session gets a reward, like that of any
    other agent."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent written with any framework, which runs in the runner's process and its event loop.

    It returns None, so that the recipe's verifier judges, or the Verdict. Exceptions other than AgentError do not count
    as a failure of the agent: the session ends as `infra_failure` and is retried, as after the death of its runner. If
    the gateway refused a turn because of a limit, the session is `truncated`.
    """

    name: str
    version: str
    run: Callable[[AgentSession], Awaitable[Verdict | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """An agent that is a program (Claude Code, Codex, a script). It runs as one call in the session's sandbox.

    It reaches the gateway at GATEWAY_INSIDE (turnlog.infra.environments.tools), with any word as its key, and otherwise
    only what `sandbox.allow` of the recipe names. The session ends with the program. A program that ended without a
    turn of the policy did not act: `infra_failure`, retried. A function in place of a value receives the task's row.
    """

    name: str
    version: str
    argv: Sequence[str] | Callable[[TaskRow], Sequence[str]]
    """The program, searched on the sandbox's PATH, and its arguments. Its standard input is empty."""
    env: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Variables added to the sandbox's. Not for secrets, because they are recorded on the log."""
    files: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Path in the workspace -> text, written before the start."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Shape of a Qwen3-style model that is small enough to train on a CPU; `config()` is its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    context: int
    eos_token_id: int
    pad_token_id: int

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this shape (Qwen3ForCausalLM, untied embeddings)."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "float32",
        }


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate; `trained[i]` is True if message i has a loss (assistant messages only)."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WarmStartRow:
    """A row for supervised fine-tuning: `mask[t]` is 1 if token t has a loss. Both have the same length."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]


class WarmStart(Protocol):
    """Start of a tiny policy for this recipe: shape, tokenizer and demonstrations."""

    @property
    def model(self) -> TinyModel:
        """Shape of the model that the trainer initializes at random and fine-tunes."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Number of demonstrations per step of supervised fine-tuning."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. The bytes must be the same each time."""
        ...

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield demonstrations without end, as a function of the seed."""
        ...

    def rows(self, folder: Path, seed: int) -> Iterator[WarmStartRow]:
        """Yield the demonstrations as token ids. They are encoded with the tokenizer in `folder` exactly as the gateway
        encodes a live conversation (piece by piece: prompt, assistant turn, what follows it)."""
        ...


@runtime_checkable
class Recipe(Protocol):
    """A kind of task, end to end. Implementations are stateless values: every method is a pure function.

    Optional attributes: `sandbox_tools: tuple[str, ...]`, `workspace: BlobRef` or a method `files(task)`, `agent` (a
    FunctionAgent or a CommandAgent), `simulation: Callable[[TaskRow], Simulation]`, `demo_rise: float`, and a method
    `read_row`; see the functions `sandbox_tools`, `first_workspace`, `first_files`, `agent_of`, `played`, `demo_rise`
    and `row_of`. Subclasses of PlainRecipe define only what differs.
    """

    @property
    def name(self) -> str:
        """Name in [feeder] recipe and on RolloutRequested."""
        ...

    @property
    def environment(self) -> Environment:
        """Environment that is recorded on SessionStarted."""
        ...

    @property
    def sandbox(self) -> SandboxSpec:
        """Image, network and limits of the sandbox in which this recipe's tools run."""
        ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """OpenAI tool declarations, sent with every chat completion."""
        ...

    @property
    def verifier(self) -> Judged:
        """Verifier of episodes: a FunctionVerifier, or one of turnlog.infra.environments.verifiers."""
        ...

    @property
    def warm_start(self) -> WarmStart | None:
        """Warm start, or None if the recipe needs an existing model ([model] path)."""
        ...

    def messages(self, task: TaskRow) -> list[Message]:
        """Return the initial conversation."""
        ...

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Map a parsed tool call to the sandbox. `arguments` is the JSON text that the model wrote. A string is an
        answer that needs no sandbox, for example to a call of an unknown tool."""
        ...

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """Return the content of the tool message for a call that ran. `output` is stdout followed by stderr."""
        ...

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield task rows without end, as a function of the seed."""
        ...

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        """Write the first `count` tasks as JSON lines. The bytes must be the same each time."""
        ...


NO_OBJECT = "the arguments are no JSON object"
"""Answer to a call whose arguments cannot be parsed."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments that the model wrote. Returns None if they are not a JSON object."""
    try:
        values = None if deeper_than(arguments) else json.loads(arguments)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


class PlainRecipe:
    """A recipe without tools, as a base class. Subclasses define `name`, `verifier` and `tasks`."""

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
        prompt = task["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Map the call to the built-in tool of the same name. `arguments` are validated where it runs."""
        if name not in BUILT_IN:
            return f"there is no tool {name!r}"
        values = object_of(arguments)
        return NO_OBJECT if values is None else SandboxCall(name, values)

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """Return the output as text."""
        return output.decode(errors="replace")

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        raise NotImplementedError(f"recipe {self.name!r} has no tasks of its own: set [feeder] dataset")

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        rows = itertools.islice(self.tasks(seed), count)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def agent_of(recipe: Recipe) -> FunctionAgent | CommandAgent | None:
    """Return the recipe's attribute `agent`. Without one, return None: the built-in loop over its tools acts."""
    agent: FunctionAgent | CommandAgent | None = getattr(recipe, "agent", None)
    return agent


def sandbox_of(recipe: Recipe) -> SandboxSpec:
    """Return the sandbox of its calls. For an agent that is a program, it adds access to the gateway, and preserves the
    workspace for the verifier."""
    if not isinstance(agent_of(recipe), CommandAgent):
        return recipe.sandbox
    return dataclasses.replace(recipe.sandbox, network="allowlist", durable_workspace=True)


OVER = "the episode is over"
"""Answer to a call after the last step."""


class Played:
    """A simulation and its progress."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.first = simulation.format_observation(simulation.reset())
        """First observation, which the model receives before it acts."""
        self.rewards: list[float] = []
        """Reward of each step."""
        self.done = False

    def call(self, name: str, arguments: str) -> Any:
        """Return the content of the tool message for a call. `arguments` is the JSON text that the model wrote."""
        if self.done:
            return OVER
        values = object_of(arguments)
        if values is None:
            return NO_OBJECT
        step = self._simulation.step(name, values)
        self.rewards.append(float(step.reward))
        self.done = step.done
        return self._simulation.format_observation(step.observation)


def played(recipe: Recipe, task: TaskRow, messages: Sequence[Message]) -> Played | None:
    """Create the recipe's `simulation`, and repeat those calls in `messages` that have answers. Returns None if the
    recipe has no simulation. Raises the recipe's exceptions."""
    make: Callable[[TaskRow], Simulation] | None = getattr(recipe, "simulation", None)
    if make is None:
        return None
    game = Played(make(task))
    answered = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        if call["id"] in answered:
            game.call(call["function"]["name"], call["function"]["arguments"])
    return game


def acted_out(recipe: Recipe, task: TaskRow, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a finished session as its own verifier saw them. They include a simulation's answers to
    the calls of the last turn, which are not on the log because no turn followed. Raises the recipe's exceptions."""
    game, found = played(recipe, task, messages), list(messages)
    if game is not None and found:
        for call in found[-1].get("tool_calls") or ():
            content = game.call(call["function"]["name"], call["function"]["arguments"])
            found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return found


def sandbox_tools(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the sandbox tools that this recipe's calls may use, recorded with their versions on
    SessionStarted. Its attribute `sandbox_tools` states them; by default they are the built-in tools that it declares
    under their own names."""
    stated: tuple[str, ...] | None = getattr(recipe, "sandbox_tools", None)
    if stated is not None:
        return stated
    declared = [tool.get("function", {}).get("name") for tool in recipe.tools]
    return tuple(name for name in declared if name in BUILT_IN)


def first_workspace(recipe: Recipe) -> BlobRef | None:
    """Return the initial workspace of a session: the stored folder in the recipe's attribute `workspace`, or None."""
    workspace: BlobRef | None = getattr(recipe, "workspace", None)
    return workspace


def demo_rise(recipe: Recipe) -> float:
    """Return the rise of the mean reward that `turnlog demo` requires with this recipe, from the first two steps to the
    last five. This is the recipe's attribute `demo_rise`; with 0, the default, the rise is not checked."""
    rise: float = getattr(recipe, "demo_rise", 0.0)
    return rise


def first_files(recipe: Recipe, task: TaskRow) -> Mapping[str, Any] | None:
    """Return the files of a session's initial workspace for this row, from the recipe's method `files` (format:
    `turnlog.infra.environments.workspaces.store_files`). Returns None if the recipe has no such method."""
    files: Callable[[TaskRow], Mapping[str, Any]] | None = getattr(recipe, "files", None)
    return None if files is None else files(task)


def row_of(recipe: Recipe, row: dict[str, Any], beside: Path, *, whole: bool) -> dict[str, Any]:
    """Convert a row of a dataset by the recipe's method `read_row`, or return it unchanged if there is none.

    The method may read the folder `beside`, in which the dataset is. With `whole`, the row must have all that its
    rollouts need; without it, the row is only examined before the run begins, and large parts may be missing. Raises
    BrokenRecipe if the method raises.
    """
    read: Callable[[dict[str, Any], Path, bool], dict[str, Any]] | None = getattr(recipe, "read_row", None)
    return row if read is None else call_recipe(recipe, read, row, beside, whole)


def call_recipe(recipe: Recipe, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a method of the recipe and return its result. Raises BrokenRecipe if it raises."""
    try:
        return method(*arguments, **named)
    except Exception as error:  # foreign code may raise anything, RecursionError and MemoryError among it
        said = f"recipe {recipe.name!r}: {getattr(method, '__name__', method)} raises {type(error).__name__}"
        raise BrokenRecipe(f"{said}: {error}") from error


@cache
def recipe(name: str) -> Recipe:
    """Return the recipe that an installed package offers under `name`. The result is cached, because reading the
    metadata of all installed packages takes tens of milliseconds. Raises UnknownRecipe, AmbiguousRecipe,
    BrokenRecipe."""
    points = find_plugins(EntryPointGroup.RECIPES, "recipe", AmbiguousRecipe)
    if name not in points:
        names = ", ".join(points) or "none"
        raise UnknownRecipe(f"no recipe {name!r}: [feeder] recipe takes one of the installed ones ({names})")
    try:
        found = points[name].load()
    except Exception as error:  # a module may raise anything while it is imported
        said = f"{type(error).__name__}: {error}"
        raise BrokenRecipe(f"recipe {name!r} ({points[name].value}) does not import: {said}") from error
    if not isinstance(found, Recipe):
        raise BrokenRecipe(
            f"recipe {name!r} ({points[name].value}) lacks part of turnlog.infra.environments.recipes.Recipe"
        )
    return found
