"""Bounds on what a chat template, a program written by the model's makers, may do for one conversation: iterations of
its loops and calls, and characters that it builds. They count work instead of time, so that every gateway reaches the
same result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from turnlog.producers.gateway.errors import TemplateSpent

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
