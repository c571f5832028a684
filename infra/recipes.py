"""What a recipe is: dataset, prompt, tools, verifier and, for tiny models, a warm start; found by entry point.

A package offers one under the entry point group `turnlog.recipes`; `recipe(name)` imports it when a role needs it.

RecipeError
├── UnknownRecipe    no installed package offers that name; lists the names that are there
├── AmbiguousRecipe  two packages offer one name
└── BrokenRecipe     the entry point does not import, what it names is no recipe, or a method of it raises
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from turnlog.infra.offers import offered
from turnlog.infra.tools import BUILT_IN
from turnlog.names import EntryPointGroup
from turnlog.schemas.events.sessions import Environment, Outcome
from turnlog.schemas.events.tools import SandboxSpec
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a verifier judges."""

    task: TaskRow
    messages: tuple[Message, ...]
    """The whole conversation, the last assistant message included."""
    outcome: Outcome
    reason: str
    """Which limit a truncated session hit; empty when it completed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, the parts it is made of, and JSON-able evidence."""

    value: float
    components: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FunctionVerifier:
    """A verifier that is a pure function. What it raises becomes a RewardFailed, never a reward of 0."""

    name: str
    version: str
    judge: Callable[[Episode], Verdict]


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

    Optional beside these: `sandbox_tools: tuple[str, ...]` and `workspace: BlobRef`, see the functions `sandbox_tools`
    and `first_workspace`."""

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
    def verifier(self) -> FunctionVerifier:
        """Judges an episode."""
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
