"""What a recipe is: dataset, prompt, tools, verifier and, for tiny models, a warm start; found by entry point.

A package offers one under the entry point group `turnlog.recipes`; `recipe(name)` imports it when a role needs it.

RecipeError
├── UnknownRecipe    no installed package offers that name; lists the names that are there
├── AmbiguousRecipe  two packages offer one name
└── BrokenRecipe     the entry point does not import, what it names is no recipe, or a method of it raises
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

from turnlog.infra.offers import offered
from turnlog.infra.tools import BUILT_IN
from turnlog.names import EntryPointGroup
from turnlog.schemas.events.sessions import Environment, Outcome
from turnlog.schemas.events.tools import SandboxSpec
from turnlog.schemas.json_depth import deeper_than
from turnlog.schemas.types import BlobRef

P = ParamSpec("P")
T = TypeVar("T")
Message = dict[str, Any]
"""One OpenAI chat message: role, content and, for an assistant, tool_calls."""
TaskRow = Mapping[str, Any]
"""One row of the dataset; has at least `prompt`."""


class RecipeError(Exception):
    """Base of the tree above."""


class UnknownRecipe(RecipeError):
    """Nobody offers this recipe; see [feeder] recipe."""


class AmbiguousRecipe(RecipeError):
    """Remedy: uninstall one of the packages."""


class BrokenRecipe(RecipeError):
    """The entry point leads nowhere useful, or what it leads to falls over."""


@dataclass(frozen=True, slots=True)
class SandboxCall:
    """A tool call as the sandbox runs it: `python` {"code"}, `shell` {"command"} ... (turnlog.infra.tools), or a
    tool that a package offers under `turnlog.tools`."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How an agent that is a program ended, and what it left."""

    exit_code: int | None
    """None: it did not end by itself. What it says of itself proves nothing: look at what it left."""
    output: str
    """What it printed, both streams in their order; of too much the middle is left out."""
    workspace: BlobRef | None
    """Its files (docs/sandbox.md, Workspaces)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a verifier judges."""

    task: TaskRow
    messages: tuple[Message, ...]
    """The whole conversation, the last assistant message included."""
    outcome: Outcome
    reason: str
    """Which limit a truncated session hit; empty when it completed, but for a program's exit status."""
    ended: CommandEnd | None = None
    """Of an agent that is a program."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, the parts it is made of, and JSON-able evidence."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


class Judged(Protocol):
    """What every kind of verifier has: FunctionVerifier, and those of turnlog.infra.verifiers."""

    @property
    def name(self) -> str:
        """Stands on the log with the verdict."""
        ...

    @property
    def version(self) -> str:
        """Change it when the same episode may be judged otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier that is a pure function. What it raises becomes a RewardFailed, never a reward of 0."""

    name: str
    version: str
    judge: Callable[[Episode], Verdict]
    timeout_s: float = 300.0
    """Then it is left alone, and is a RewardFailed."""
    late: bool = False
    """The session is finished before the verdict is there."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an action in a simulation came to."""

    observation: Any
    reward: float = 0.0
    done: bool = False
    """Nothing more can be done: the session is over when the model has been told."""


class Simulation(Protocol):
    """One episode of an environment that acts in the runner's process. The same task and the same actions give the same
    steps, on any machine: a new owner of the session, and its verifier, come to where it stood by doing them again."""

    def reset(self) -> Any:
        """The first observation."""
        ...

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        """A call of the tool `name`. What the model may do wrong is answered by an observation; what is raised is the
        recipe's fault."""
        ...

    def format_observation(self, observation: Any) -> Any:
        """Content of a chat message: text, or OpenAI's content blocks."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxAnswer:
    """What a call came to."""

    ok: bool
    """False: the tool failed, or met a limit."""
    output: str
    """Stdout, then stderr."""
    exit_code: int | None = None
    """Of the program; None where none ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """What an agent's function is given: enough for any OpenAI or Anthropic client."""

    base_url: str
    """Ends with /v1, as OpenAI's clients take it; Anthropic's take `root_url`."""
    api_key: str = field(repr=False)
    """Speaks for this session alone, until it ends."""
    model: str
    """Name of the policy."""
    task: TaskRow
    tools: tuple[dict[str, Any], ...]
    """As the recipe declares them."""
    call: Callable[[SandboxCall], Awaitable[SandboxAnswer]]
    """Runs a call in the session's sandbox. What it raises is no failure of the agent's: the session is tried again."""

    @property
    def root_url(self) -> str:
        """Without /v1."""
        return self.base_url.removesuffix("/v1")


class AgentError(Exception):
    """An agent's function raises it where the agent itself failed: it gets its verdict, as an agent that lived."""


@dataclass(frozen=True, slots=True)
class FunctionAgent:
    """An agent written with any framework, which runs in the runner's process and its event loop.

    It returns None, for the recipe's verifier to judge, or the Verdict. What it raises, but for AgentError, is no
    failure of the agent's: the session ends as `infra_failure` and is tried again, as after the death of its runner;
    a limit that the gateway refused a turn for makes it `truncated`."""

    name: str
    version: str
    run: Callable[[AgentSession], Awaitable[Verdict | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """An agent that is a program (Claude Code, Codex, a script): it runs as one call in the session's sandbox, with the
    gateway at GATEWAY_INSIDE (turnlog.infra.tools) and any word as its key, and reaches nothing else but what
    `sandbox.allow` of the recipe names.

    Its end is the session's. A program that ended without a turn of the policy's did not act: `infra_failure`, tried
    again. A function in place of a value is given the task's row."""

    name: str
    version: str
    argv: Sequence[str] | Callable[[TaskRow], Sequence[str]]
    """The program, found on the sandbox's PATH, and its arguments. Its input is empty."""
    env: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Added to the sandbox's; no place for secrets, since the log keeps it."""
    files: Mapping[str, str] | Callable[[TaskRow], Mapping[str, str]] = field(default_factory=dict)
    """Path in the workspace -> text, written before it starts."""


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
        """The Hugging Face `config.json` of this shape (Qwen3ForCausalLM, untied embeddings)."""
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
    """A conversation to imitate; `trained[i]` says whether message i carries loss (assistant messages only)."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WarmStartRow:
    """One row of supervised fine-tuning: `mask[t]` is 1 where token t carries loss. Equal lengths."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]


class WarmStart(Protocol):
    """How a tiny policy of this recipe begins: shape, tokenizer and demonstrations."""

    @property
    def model(self) -> TinyModel:
        """The shape that the trainer initialises at random and fine-tunes."""
        ...

    @property
    def rows_per_step(self) -> int:
        """Demonstrations per step of supervised fine-tuning."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; the same bytes each time."""
        ...

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """An endless stream, a function of the seed."""
        ...

    def rows(self, folder: Path, seed: int) -> Iterator[WarmStartRow]:
        """The demonstrations as token ids, encoded with the tokenizer in `folder` exactly as the gateway feeds a
        live conversation (piece by piece: prompt, assistant turn, what follows it)."""
        ...


@runtime_checkable
class Recipe(Protocol):
    """One kind of task, end to end. Implementations are stateless values: every method is a pure function.

    Optional beside these: `sandbox_tools: tuple[str, ...]`, `workspace: BlobRef` or a method `files(task)`, `agent`, a
    FunctionAgent or a CommandAgent, `simulation: Callable[[TaskRow], Simulation]`, `demo_rise: float`, and a method
    `read_row`, see the functions `sandbox_tools`, `first_workspace`, `first_files`, `agent_of`, `played`, `demo_rise`
    and `row_of`. Whoever inherits from PlainRecipe says what differs."""

    @property
    def name(self) -> str:
        """As in [feeder] recipe and on RolloutRequested."""
        ...

    @property
    def environment(self) -> Environment:
        """Recorded on SessionStarted."""
        ...

    @property
    def sandbox(self) -> SandboxSpec:
        """Where and within which limits the tools of this recipe run."""
        ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """OpenAI tool declarations, sent with every chat completion."""
        ...

    @property
    def verifier(self) -> Judged:
        """Judges an episode: a FunctionVerifier, or one of turnlog.infra.verifiers."""
        ...

    @property
    def warm_start(self) -> WarmStart | None:
        """None when the recipe needs a model that exists already ([model] path)."""
        ...

    def messages(self, task: TaskRow) -> list[Message]:
        """The conversation that the agent starts from."""
        ...

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Map a parsed tool call (arguments as the JSON text the model wrote) to the sandbox; a string is an answer
        that needs no sandbox, for example to a call of an unknown tool."""
        ...

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """Content of the tool message for a call that ran; `output` is stdout, then stderr."""
        ...

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """An endless stream of rows, a function of the seed."""
        ...

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        """Write the first `count` tasks as JSON lines; the same bytes each time."""
        ...


NO_OBJECT = "the arguments are no JSON object"
"""What the model is told of a call whose arguments cannot be read."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """The arguments as the model wrote them; None where they are no JSON object."""
    try:
        values = None if deeper_than(arguments) else json.loads(arguments)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


class PlainRecipe:
    """A recipe without tools, to inherit from: `name`, `verifier` and `tasks` are left to state."""

    name: str
    version = "1"
    sandbox = SandboxSpec()
    warm_start: WarmStart | None = None

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """See Recipe."""
        return ()

    @property
    def environment(self) -> Environment:
        """See Recipe."""
        return Environment(name=self.name, version=self.version)

    def messages(self, task: TaskRow) -> list[Message]:
        """The row's `prompt`: a user's message, or messages."""
        prompt = task["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """A built-in tool under its own name; `arguments` are checked where it runs."""
        if name not in BUILT_IN:
            return f"there is no tool {name!r}"
        values = object_of(arguments)
        return NO_OBJECT if values is None else SandboxCall(name, values)

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """What was printed, as text."""
        return output.decode(errors="replace")

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """See Recipe."""
        raise NotImplementedError(f"recipe {self.name!r} has no tasks of its own: set [feeder] dataset")

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        """See Recipe."""
        rows = itertools.islice(self.tasks(seed), count)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def agent_of(recipe: Recipe) -> FunctionAgent | CommandAgent | None:
    """Who acts: what the recipe's attribute `agent` names; None, the built-in loop over its tools, without one."""
    agent: FunctionAgent | CommandAgent | None = getattr(recipe, "agent", None)
    return agent


def sandbox_of(recipe: Recipe) -> SandboxSpec:
    """Where its calls run: a program that acts has the way to the gateway, and what it leaves is kept to be judged."""
    if not isinstance(agent_of(recipe), CommandAgent):
        return recipe.sandbox
    return dataclasses.replace(recipe.sandbox, network="allowlist", durable_workspace=True)


OVER = "the episode is over"
"""What a call after the last step is told."""


class Played:
    """A simulation, and what has been done in it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.first = simulation.format_observation(simulation.reset())
        """What the model is told before it acts."""
        self.rewards: list[float] = []
        """Of each step."""
        self.done = False

    def call(self, name: str, arguments: str) -> Any:
        """Content of the tool message for a call with these arguments, as the model wrote them."""
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
    """Where the recipe's attribute `simulation` stands after the calls in `messages` that have their answers; None
    without one. Raises whatever the recipe raises."""
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
    """The messages of a session that is over as its own verifier had them: no turn followed that would have put on the
    log what a simulation answered the last one's calls. Raises whatever the recipe raises."""
    game, found = played(recipe, task, messages), list(messages)
    if game is not None and found:
        for call in found[-1].get("tool_calls") or ():
            content = game.call(call["function"]["name"], call["function"]["arguments"])
            found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return found


def sandbox_tools(recipe: Recipe) -> tuple[str, ...]:
    """The sandbox's tools that this recipe's calls may use, recorded with their versions on SessionStarted: what its
    attribute `sandbox_tools` names; without one, the built-in tools that it declares under their own names."""
    stated: tuple[str, ...] | None = getattr(recipe, "sandbox_tools", None)
    if stated is not None:
        return stated
    declared = [tool.get("function", {}).get("name") for tool in recipe.tools]
    return tuple(name for name in declared if name in BUILT_IN)


def first_workspace(recipe: Recipe) -> BlobRef | None:
    """What the first call of a session finds in its workspace: the stored folder that the recipe's attribute
    `workspace` names; nothing without one."""
    workspace: BlobRef | None = getattr(recipe, "workspace", None)
    return workspace


def demo_rise(recipe: Recipe) -> float:
    """By how much the mean reward must rise in `turnlog demo` with this recipe, of its last five steps above its first
    two, for the demo to succeed: the recipe's attribute `demo_rise`; 0 without one, and then it is not judged."""
    rise: float = getattr(recipe, "demo_rise", 0.0)
    return rise


def first_files(recipe: Recipe, task: TaskRow) -> Mapping[str, Any] | None:
    """What the first call of a session on this row finds in its workspace: what the recipe's method `files` says, as
    `turnlog.infra.workspaces.kept` takes it; None without one."""
    files: Callable[[TaskRow], Mapping[str, Any]] | None = getattr(recipe, "files", None)
    return None if files is None else files(task)


def row_of(recipe: Recipe, row: dict[str, Any], beside: Path, *, whole: bool) -> dict[str, Any]:
    """A row of a dataset as the recipe's method `read_row` understands it, which may look into the folder that the
    dataset lies in; the row itself without one. `whole`: with all that its rollouts need; else it is looked at alone,
    before the run begins, and large parts may be left out. Raises BrokenRecipe for whatever that raises."""
    read: Callable[[dict[str, Any], Path, bool], dict[str, Any]] | None = getattr(recipe, "read_row", None)
    return row if read is None else called(recipe, read, row, beside, whole)


def called(recipe: Recipe, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What a method of the recipe returns. Raises BrokenRecipe for whatever it raises."""
    try:
        return method(*arguments, **named)
    except Exception as error:  # foreign code falls over in ways of its own, RecursionError and MemoryError among them
        said = f"recipe {recipe.name!r}: {getattr(method, '__name__', method)} raises {type(error).__name__}"
        raise BrokenRecipe(f"{said}: {error}") from error


@cache
def recipe(name: str) -> Recipe:
    """The recipe that an installed package offers under `name`; looked up once (reading the metadata of every installed
    package takes tens of milliseconds). Raises UnknownRecipe, AmbiguousRecipe, BrokenRecipe."""
    points = offered(EntryPointGroup.RECIPES, "recipe", AmbiguousRecipe)
    if name not in points:
        names = ", ".join(points) or "none"
        raise UnknownRecipe(f"no recipe {name!r}: [feeder] recipe takes one of the installed ones ({names})")
    try:
        found = points[name].load()
    except Exception as error:  # a module may raise anything while it is imported
        said = f"{type(error).__name__}: {error}"
        raise BrokenRecipe(f"recipe {name!r} ({points[name].value}) does not import: {said}") from error
    if not isinstance(found, Recipe):
        raise BrokenRecipe(f"recipe {name!r} ({points[name].value}) lacks part of turnlog.infra.recipes.Recipe")
    return found
