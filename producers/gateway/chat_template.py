"""A model's chat template, rendered exactly as transformers renders it, without importing it (0.1 s instead of 4 s).

Sources: transformers 5.12 `utils/chat_template_utils.py` (sandboxed environment, tojson, loop controls, generation
blocks) and `PreTrainedTokenizerBase.apply_chat_template` (special tokens are template variables). A template is a
program written by the model's makers: the iterations of its loops and calls, and the characters that it builds, are
bounded. They count work instead of time, so that every gateway reaches the same result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from turnlog.producers.gateway.errors import BadRequest, TemplateSpent

ROUNDS = 1_000_000
ROUNDS_PER_PAIR = 8
"""Iterations allowed beyond ROUNDS for each pair of messages or tools, because templates search for one message while
they write another."""
ROUNDS_PER_CALL = 5
"""Iterations that one macro call counts as."""
CHARACTERS = 1 << 28
SLOW = 20_000
"""Number of iterations that take some milliseconds."""
WORK = " work"
"""Variable that holds the Work of a rendering. Its name contains a space, so that no template can access it."""
REPEATS = frozenset({
    "batch", "center", "expandtabs", "generate_lorem_ipsum", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap",
    "zfill",
})  # fmt: skip
"""Filters, functions and methods whose output is as long as a number argument demands."""
FORMATS = ("format", "format_map")
WIDTH = re.compile(r"[0-9]{6}|[%.]\*|:[^}]*\{")
"""A format directive that sets a width, and so the length of the output."""
TOLD_LENGTHS = REPEATS | {"format", "join", "replace"}
COUNTED, MEASURED, TOLD = "counted ", "measured ", "told "
"""Filters whose names contain a space, so that no template can use them."""


class Work:
    """Work that a rendering has done."""

    def __init__(self, described: str, entries: int) -> None:
        """`described` is the template as errors name it; `entries` is the number of messages and tools of the
        conversation."""
        self.rounds = 0
        self._described = described
        self._most = ROUNDS + ROUNDS_PER_PAIR * entries**2
        self._characters = 0

    def go(self, rounds: int = 1) -> None:
        """Count iterations. Raises TemplateSpent."""
        self.rounds += rounds
        if self.rounds > self._most:
            raise self._spent_error(f"{self._most} rounds of its loops")

    def build(self, characters: int) -> None:
        """Count characters. Raises TemplateSpent."""
        self._characters += characters
        if characters > CHARACTERS or self._characters > CHARACTERS:
            raise self._spent_error(f"{CHARACTERS} characters")

    def _spent_error(self, what: str) -> TemplateSpent:
        return TemplateSpent(
            f"{self._described} takes more than {what} to write these messages: it loops or multiplies text; send "
            "fewer messages, or give the model's folder another template",
            param="messages",
        )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


@pass_context  # the decorator also keeps Jinja from computing it once at compile time
def _count_iterations(context: Context, values: Any) -> Any:
    """Return the values that a loop iterates over, with each iteration counted."""
    work: Work = context.parent[WORK]
    if isinstance(values, Sized):
        work.go(len(values))
        return values
    return _each(work, values)


def _each(work: Work, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        work.go()
        yield value


@pass_context
def _measure_text(context: Context, value: Any) -> Any:
    """Count the text that an expression has built."""
    context.parent[WORK].build(_size(value))
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every loop, call and growing text counted in `Work`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {COUNTED: _count_iterations, MEASURED: _measure_text, TOLD: _check_filter}

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        return super()._generate(_Measures().visit(source), *rest, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See SandboxedEnvironment. Covers functions, methods and macros."""
        work: Work = __context.parent[WORK]
        work.go(ROUNDS_PER_CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps those that format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        _check_told(work, name, owner if isinstance(owner, str) else "", [*args, *kwargs.values()])
        if isinstance(owner, str) and name == "join" and args and isinstance(args[0], Sized):
            work.build(len(args[0]) * len(owner))
        result = super().call(__context, __obj, *args, **kwargs)
        work.build(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        work: Work = context.parent[WORK]
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                work.build(_size(some) * max(0, times) if isinstance(times, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            work.build(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str):
            _check_told(work, "format", left, ())
        result = super().call_binop(context, operator, left, right)
        if operator != "*":
            work.build(_size(result))
        return result


def _check_told(work: Work, name: str, text: str, args: Iterable[Any]) -> None:
    """Count a text before it is built, if an argument sets its length. Raises TemplateSpent."""
    args = list(args)
    if name in REPEATS:
        lines = 1 + sum(map(text.count, "\n\t"))
        lines *= 2000 if name == "generate_lorem_ipsum" else 1  # characters of a paragraph
        work.build(lines * max((one for one in args if isinstance(one, int)), default=0))
    elif name in FORMATS and WIDTH.search(text):
        work.build(CHARACTERS + 1)
    elif name == "replace" and len(args) > 1:
        work.build(text.count(str(args[0])) * len(str(args[1])))


@pass_context
def _check_filter(context: Context, value: Any, name: str, *args: Any) -> Any:
    _check_told(context.parent[WORK], name, str(value) if name in (*FORMATS, "replace", "indent") else "", args)
    if name == "join" and args and isinstance(value, Sized):
        context.parent[WORK].build(len(value) * len(str(args[0])))
    return value


class _Measures(NodeTransformer):
    """Wraps what loops iterate over so that it is counted, and what expressions and blocks build so that it is
    measured."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap_in_filter(node.iter, COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap_in_filter(node, MEASURED)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        if node.name in TOLD_LENGTHS:
            args = [nodes.Const(node.name), *node.args, *(one.value for one in node.kwargs)]
            node.node = _wrap_in_filter(node.node, TOLD, args)
        return _wrap_in_filter(node, MEASURED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _wrap_in_filter(node.filter, MEASURED)
        return node


def _wrap_in_filter(node: nodes.Node | None, name: str, args: Iterable[nodes.Node] = ()) -> nodes.Filter:
    """Wrap a node in a filter. None as `node` stands for the content of the enclosing block."""
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno if node else 1)


SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions with which a template, a program written by the model's makers, fails on messages that it was not written
for."""


class TemplateMissing(Exception):
    """The model's folder has no chat template. Remedy: add chat_template.jinja to [model] path."""


class TemplateUnusable(Exception):
    """The model's chat template serves no conversation. The message says why, and what to do."""


DEFAULT, TOOL_USE = "default", "tool_use"


class TemplateUnbounded(Exception):
    """The model's chat template does not end, or multiplies text. Remedy: another template for [model] path."""


class ChatTemplate:
    """Renders messages to the text that is tokenised."""

    def __init__(self, source: str, variables: Mapping[str, str], tool_use: str | None = None) -> None:
        """`variables` holds special tokens by the names that the template uses; `tool_use` is the template of
        conversations that offer tools, if it is a separate one."""
        sources = [source] if tool_use is None else [source, tool_use]
        self.source = "\n".join(sources)
        self.sha256 = hashlib.sha256("\0".join(sources).encode()).hexdigest()
        self.described = f"the model's chat template ({self.sha256[:12]})"
        """The template as errors name it."""
        self.slow = False
        """True once it has taken many iterations to write a conversation, however small. It is rendered in a thread
        then."""
        self._variables = dict(variables)
        self._templates = [_compile_template(one) for one in sources]

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Load the template from a model's folder as transformers and its processors do. Raises TemplateMissing."""
        config = read_json(folder / "tokenizer_config.json")
        named = _load_templates(folder, config)
        if DEFAULT not in named:
            raise TemplateMissing(
                f"{folder} has no chat template for conversations without tools: neither chat_template.jinja, nor a "
                "chat_template in chat_template.json or tokenizer_config.json, nor one named default there"
            )
        special = {**read_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: _content(special[name]) for name in SPECIAL_TOKENS if special.get(name)}
        return cls(named[DEFAULT], tokens, named.get(TOOL_USE))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, generate: bool, now: datetime | None = None
    ) -> str:
        """Return the text of a conversation. `generate` adds the generation prompt; `now` is the time from which dates
        are printed, by default the current time. Raises BadRequest if the template refuses the conversation,
        TemplateSpent."""

        def strftime_now(pattern: str) -> str:
            return (now or datetime.now(UTC)).strftime(pattern)

        work = Work(self.described, len(messages) + len(tools or ()))
        pieces = []
        try:
            for piece in self._templates[-1 if tools else 0].generate({
                "messages": messages,
                "tools": tools or None,
                "documents": None,
                "add_generation_prompt": generate,
                "strftime_now": strftime_now,
                WORK: work,
                **self._variables,
            }):  # fmt: skip
                work.build(len(piece))
                pieces.append(piece)
            return "".join(pieces)
        except REFUSALS as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        finally:
            self.slow = self.slow or work.rounds > SLOW


def check_ends(folder: Path, *, cpu_s: int = 10, memory_bytes: int = 2**30) -> None:
    """Render a question in a separate process with limits on CPU seconds and memory, because an endless loop of a
    template cannot be stopped in this one, and constants are multiplied as soon as a template is compiled. Raises
    TemplateUnbounded."""
    bounds = (str(cpu_s), str(memory_bytes), str(folder))
    argv = [sys.executable, "-m", "turnlog.producers.gateway.chat_template", *bounds]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TemplateUnbounded(
            f"the chat template of {folder} takes more than {cpu_s} s or {memory_bytes / 2**20:.0f} MiB for one "
            f"question: it loops or multiplies text; give the model another ({done.stderr[-500:].strip() or 'killed'})"
        )


def _end_in_bounds(cpu_s: int, memory_bytes: int, folder: Path) -> None:
    """Render the question in the process that `check_ends` starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        template = ChatTemplate.load(folder)
    except TemplateMissing:  # reported by whoever loads it
        return
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    for tools in (None, [tool]):
        with contextlib.suppress(BadRequest):  # a refusal of the question is reported when somebody asks it
            template.render([{"role": "user", "content": "?"}], tools, generate=True)


def _load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a folder, by name. Jinja files take precedence over a processor's chat_template.json, and
    that over the tokenizer's configuration."""
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if found := {name: file.read_text() for name, file in files.items() if file.exists()}:
        return found
    for source in (read_json(folder / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        if source:
            return dict(source) if isinstance(source, dict) else {DEFAULT: source}
    return {}


def _compile_template(source: str) -> jinja2.Template:
    template = _environment().from_string(source)
    template.globals = dict(template.globals)  # each render copies it, and a ChainMap slowly
    return template


class _Generation(jinja2.ext.Extension):
    """Implements `{% generation %}`, which marks assistant text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block up to endgeneration."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise
    return environment


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Implement transformers' filter, which escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file of a model's folder; empty if there is none."""
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


if __name__ == "__main__":
    _end_in_bounds(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
