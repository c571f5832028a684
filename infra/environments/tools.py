"""Declarations of the built-in tools, for models and workers: name, version, description, JSON schema of the arguments.

A recipe offers them to its model with `tool_declarations`; a sandbox worker validates calls with the same schemas (JSON
Schema draft 2020-12). A tool's version changes if the same call may return another answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Final

from turnlog.infra import offers
from turnlog.names import EntryPointGroup

Schema = Mapping[str, Any]


class UnknownTool(Exception):
    """No tool has that name."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool's declaration, without its implementation."""

    name: str
    version: str
    about: str
    """Description for the model: one or two sentences."""
    arguments: Schema
    """A JSON schema of type object."""


def _arguments(properties: Schema, *required: str, closed: bool = True) -> Schema:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(required)}
    return {**schema, "additionalProperties": False} if closed else schema


def _text(about: str, **more: Any) -> Schema:
    return {"type": "string", "description": about, **more}


PATH: Final = _text("A file of the workspace, relative to it.", minLength=1, maxLength=4096)

_TOOLS = (
    ToolSchema(
        "python",
        "1",
        "Run Python code in a fresh interpreter. Nothing but files remains of earlier calls. Answers what it prints.",
        _arguments({"code": _text("The program.")}, "code", closed=False),  # further arguments were always ignored
    ),
    ToolSchema(
        "shell",
        "1",
        "Run a command with bash in the workspace. Answers stdout, then stderr.",
        _arguments(
            {
                "command": _text("As after bash -c."),
                "stdin": _text("What the command reads; nothing by default."),
                "cwd": _text("A folder of the workspace to run in; by default the workspace itself."),
                "timeout_s": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "Seconds after which the command is ended; by default as long as calls may take.",
                },
            },
            "command",
            closed=False,
        ),
    ),
    ToolSchema(
        "python_session",
        "1",
        "Run Python code in an interpreter that keeps variables, imports and functions from call to call. Answers what "
        "it prints and the value of its last expression.",
        _arguments({"code": _text("One cell, as typed into an interactive interpreter.")}, "code"),
    ),
    ToolSchema(
        "read_file",
        "1",
        "Read a text file of the workspace, whole or some of its lines.",
        _arguments(
            {
                "path": PATH,
                "offset": {"type": "integer", "minimum": 1, "description": "The first line wanted, counted from 1."},
                "lines": {"type": "integer", "minimum": 1, "description": "How many; by default as many as fit."},
            },
            "path",
        ),
    ),
    ToolSchema(
        "write_file",
        "1",
        "Make or replace a file of the workspace; folders above it are made.",
        _arguments({"path": PATH, "content": _text("All of the file, as UTF-8.")}, "path", "content"),
    ),
    ToolSchema(
        "edit_file",
        "1",
        "Replace text of a file. `old` must occur in it exactly once, white space included, unless `all` is true.",
        _arguments(
            {
                "path": PATH,
                "old": _text("The text to replace.", minLength=1),
                "new": _text("What stands there afterwards."),
                "all": {"type": "boolean", "description": "Replace every occurrence."},
            },
            "path",
            "old",
            "new",
        ),
    ),
    ToolSchema(
        "env_step",
        "1",
        "Act in an environment. Begin with reset; then one action a call. Answers one JSON object: observation, "
        "reward, terminated, truncated, info.",
        _arguments(
            {
                "action": {"description": "Any JSON that the environment takes."},
                "reset": {"type": "boolean", "description": "Begin an episode instead of acting."},
                "seed": {"type": "integer", "minimum": 0, "description": "Of the episode; with reset alone."},
                "options": {"type": "object", "description": "Of the episode; with reset alone."},
                "environment": _text(
                    "module:NAME of its class or factory; needed with the first reset.",
                    pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
                    maxLength=200,
                ),
            }
        ),
    ),
)
STEPPING: Final = frozenset({"env_step", "openenv"})
"""Tools that act in an environment, and answer one JSON object of observation, reward, terminated, truncated, info."""
BUILT_IN: Final[Mapping[str, ToolSchema]] = {tool.name: tool for tool in _TOOLS}


GATEWAY_INSIDE: Final = "http://127.0.0.1:3128"
"""Base URL of the gateway for an agent that is a program in a sandbox (docs/egress.md)."""
MCP_INSIDE: Final = "/mcp/"
"""Path at GATEWAY_INSIDE below which a program in a sandbox finds its MCP servers, by name."""
KEY_INSIDE: Final = "turnlog"
"""API key for such a program; any word is accepted."""
AGENT: Final = ToolSchema(
    "agent",
    "1",
    "The runner's own: a program that acts for a whole session. No model is offered it.",
    _arguments(
        {
            "argv": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "files": {"type": "object", "additionalProperties": {"type": "string"}},
            "credential": _text("The session's token, sealed (turnlog.infra.roles.credentials)."),
            "mcp": {"type": "array", "items": {"type": "object"}, "description": "MCP servers at MCP_INSIDE."},
        },
        "argv",
        "env",
        "files",
        "credential",
    ),
)


MCP_TOOL: Final = "mcp"
"""Name of the tool that speaks to MCP servers (turnlog.plugins.mcp); no model calls it under this name."""


def idempotency_class(tool: Mapping[str, Any]) -> str:
    """Return what may be done with a call of an MCP tool that was lost: `read_only` and `idempotent` ones may run
    again, `unsafe` ones may not. The server's annotations decide; a tool without them is unsafe."""
    hints = tool.get("annotations")
    hints = hints if isinstance(hints, Mapping) else {}
    if hints.get("readOnlyHint") is True:
        return "read_only"
    return "idempotent" if hints.get("idempotentHint") is True else "unsafe"


def declaration(name: str, about: str, arguments: Schema) -> dict[str, Any]:
    """Return a tool in the format of OpenAI's `tools` (chat completions, type function)."""
    function = {"name": name, "description": about, "parameters": copy.deepcopy(dict(arguments))}
    return {"type": "function", "function": function}


def tool_declarations(names: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """Return the declarations of built-in tools in the given order, for a recipe's `tools`. Raises UnknownTool."""
    names = tuple(names)
    for name in names:
        if name not in BUILT_IN:
            raise UnknownTool(
                f"no built-in tool {name!r}: they are {', '.join(BUILT_IN)}; others are declared by `declaration`"
            )
    return tuple(declaration(name, BUILT_IN[name].about, BUILT_IN[name].arguments) for name in names)


GROUP: Final = EntryPointGroup.TOOLS


class ToolOfferError(Exception):
    """Base class of the errors of tools that packages offer."""


class AmbiguousTool(ToolOfferError):
    """Two tools have the same name. Remedy: uninstall one, or give it another name."""


class BrokenTool(ToolOfferError):
    """The entry point of a tool cannot be used. Remedy: repair or uninstall the package that it belongs to."""


def find_tools() -> dict[str, EntryPoint]:
    """Return name -> entry point of the tools that packages offer, without importing them. Raises AmbiguousTool."""
    points = offers.find_plugins(GROUP, "tool", AmbiguousTool)
    for name in sorted(points.keys() & {*BUILT_IN, AGENT.name}):
        raise AmbiguousTool(f"{describe_tool(points[name])}: {name} is a built-in tool; give it another name")
    return points


def load_tool(point: EntryPoint) -> Any:
    """Import the tool object. Raises BrokenTool."""
    try:
        found = point.load()
    except Exception as error:  # a module may raise anything while it is imported
        raise BrokenTool(f"{describe_tool(point)}: does not import: {type(error).__name__}: {error}") from error
    if getattr(found, "name", None) != point.name or not isinstance(getattr(found, "version", None), str):
        raise BrokenTool(f"{describe_tool(point)}: must be the Tool named {point.name!r}, got {found!r:.200}")
    return found


def describe_tool(point: EntryPoint) -> str:
    """Describe an entry point for error messages."""
    return f"tool {point.name!r}, entry point {point.value} of {GROUP}"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return tool -> version, for built-in tools and tools that packages offer. Raises UnknownTool, ToolOfferError."""
    wanted = sorted(set(names))
    points = find_tools() if set(wanted) - BUILT_IN.keys() else {}
    for name in wanted:
        if name not in BUILT_IN and name not in points:
            legal = ", ".join([*BUILT_IN, *sorted(points)])
            raise UnknownTool(f"no tool {name!r}: built in or offered under the entry point group {GROUP} are {legal}")
    return {name: BUILT_IN[name].version if name in BUILT_IN else load_tool(points[name]).version for name in wanted}
