"""Tools of OpenAI's responses API, as functions that the policy sees: `custom` tools, and tools in a namespace.

A request offers a namespace as {"type": "namespace", "name": ..., "tools": [...]}, and a call of one of its tools has
the members `namespace` and `name`. Codex offers MCP servers so: one namespace for each. The policy knows only names of
functions, so it sees NAMESPACE__NAME. The name of a call in the history follows from the call alone, not from the tools
of the request, so that a later request has the same tokens whatever it offers. Source: requests of Codex 0.171.0."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from turnlog.producers.gateway.dialects.dialect import IGNORED, parse_tools
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.parsers.parser import ParsedCall, exact

BARE = "functions"
"""Namespace whose tools are called by their bare names."""
JOINT = "__"


def name_for_policy(namespace: Any, name: str) -> str:
    """Return the name by which the policy knows a tool. Anything but a text is no namespace."""
    return f"{namespace}{JOINT}{name}" if isinstance(namespace, str) and namespace not in ("", BARE) else name


@dataclass(frozen=True, slots=True)
class ResponsesTool:
    """A function or custom tool that a request offers."""

    given: Mapping[str, Any]
    """The tool as received."""
    namespace: str = ""
    """Namespace with which its calls are answered; empty if it has none, or is in the namespace `functions`."""

    @property
    def bare(self) -> str:
        """The name in its namespace."""
        return str(self.given["name"])

    @property
    def name(self) -> str:
        """The name by which the policy knows it."""
        return name_for_policy(self.namespace, self.bare)

    @property
    def custom(self) -> bool:
        """True if its calls are answered as one text."""
        return bool(self.given["type"] == "custom")

    def as_function(self) -> dict[str, Any]:
        """Return it in the format of OpenAI's chat API. A custom tool takes one text; its grammar becomes the
        description of that text."""
        known = {
            name: self.given[name] for name in ("name", "description", "parameters", "strict") if name in self.given
        }
        known["name"] = self.name
        if self.custom:
            shape, text = self.given.get("format"), {"type": "string"}
            if isinstance(shape, dict) and isinstance(shape.get("definition"), str):
                text["description"] = f"{shape.get('syntax') or 'grammar'}: {shape['definition']}"
            known["parameters"] = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            known.pop("strict", None)
        return {"type": "function", "function": known}


def read_tools(raw: Any, where: str = "tools", *, namespace: str | None = None) -> list[ResponsesTool]:
    """Return functions and custom tools, also those in namespaces. Others, and namespaces in a namespace, are left out
    and counted. Raises BadRequest."""
    tools = []
    for index, tool in enumerate(parse_tools(raw)):
        kind, place = tool.get("type"), f"{where}[{index}]"
        if kind == "namespace" and namespace is None:
            [name] = texts_of(tool, place, "name")
            tools += read_tools(tool.get("tools"), f"{place}.tools", namespace=name)
        elif kind in ("function", "custom"):
            texts_of(tool, place, "name")
            tools.append(ResponsesTool(tool, "" if namespace in (None, BARE) else namespace))
        else:
            IGNORED.labels("tools").inc()
    return tools


def distinct(tools: Iterable[ResponsesTool]) -> list[ResponsesTool]:
    """Return the tools without those in a namespace whose name for the policy is another tool's; they are counted."""
    tools = list(tools)
    taken = {tool.name for tool in tools if not tool.namespace}
    kept = []
    for tool in tools:
        if tool.namespace and tool.name in taken:
            IGNORED.labels("tools").inc()
            continue
        taken.add(tool.name)
        kept.append(tool)
    return kept


def as_offered(function: Mapping[str, Any], custom: Container[str]) -> dict[str, Any]:
    """Return the tool as a response shows it, by its name for the policy."""
    if function["name"] in custom:
        return {"type": "custom", **{name: value for name, value in function.items() if name != "parameters"}}
    return {"type": "function", **function}


def custom_input(call: ParsedCall) -> str:
    """Return the text of a custom tool's call, or all arguments if the policy wrote others."""
    arguments = exact(call.arguments)
    text = arguments.get("input") if isinstance(arguments, dict) else None
    return text if isinstance(text, str) else call.arguments


def texts_of(values: Mapping[str, Any], where: str, *names: str) -> list[str]:
    """Return fields that must be text. Raises BadRequest."""
    for name in names:
        if not isinstance(values.get(name), str):
            raise BadRequest(f"{where}.{name} must be text", param=f"{where}.{name}")
    return [values[name] for name in names]
