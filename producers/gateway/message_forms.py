"""The form in which a model's chat template takes messages, found by rendering probes.

Templates agree on `role` and `content` only. Some refuse arguments of calls that are objects, some a system message
between others, and they read reasoning from different places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnlog.producers.gateway.chat_template import ChatTemplate, tojson
from turnlog.producers.gateway.errors import BadRequest

SENTINEL = "Zq7"
"""Content of a probe answer, which no template contains."""
WHY = "Zq7-why"
"""Reasoning of a probe answer."""
HISTORY: tuple[dict[str, Any], ...] = ({"role": "user", "content": "d"},)
"""The dummy question before a probe."""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]


def probe_calls(count: int) -> list[dict[str, Any]]:
    """Return calls as agents send them back. The sentinel is in the arguments as well, because some templates write no
    content beside calls."""
    function = {"name": "f", "arguments": {"a": SENTINEL}}
    return [{"type": "function", "id": f"call0000{at}", "function": function} for at in range(count)]


class MessageForms:
    """The form in which one template takes messages."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._system_anywhere = self._writes([*HISTORY, {"role": "system", "content": SENTINEL}], None)
        called = {"role": "assistant", "content": "", "tool_calls": probe_calls(1)}
        self._arguments_as_text = not self._takes([*HISTORY, called]) and self._takes([*HISTORY, _with_text(called)])
        self._reasoning = next(filter(self._writes_reasoning, REASONING), _as_it_is)

    def fit(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages in the form that the template takes."""
        if self._arguments_as_text:
            messages = [_with_text(one) for one in messages]
        if not self._system_anywhere:
            # Harnesses put system messages between others, and repeat a refused request with other tools. If the
            # template has no place for such a message, it becomes the user's.
            messages = [{**one, "role": "user"} if at and one["role"] == "system" else one
                        for at, one in enumerate(messages)]  # fmt: skip
        if self._reasoning is not _as_it_is:
            messages = [self._reasoning(one) if one.get("reasoning_content") else one for one in messages]
        return messages

    def _writes_reasoning(self, form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> bool:
        """Return whether the template writes reasoning in this form, before a text and a call or before a text."""
        said = {"role": "assistant", "content": "s", "reasoning_content": WHY}
        called = said | {"tool_calls": probe_calls(1)}
        called = _with_text(called) if self._arguments_as_text else called
        result = {"role": "tool", "content": "r", "tool_call_id": "call00000", "name": "f"}
        if not self._takes([*HISTORY, form(called), result]) and self._takes([*HISTORY, called, result]):
            return False
        return self._writes([*HISTORY, form(called), result], TOOLS, WHY) or self._writes(
            [*HISTORY, form(said)], None, WHY
        )

    def _writes(self, messages: list[dict[str, Any]], tools: Any, text: str = SENTINEL) -> bool:
        """Return whether a text is written, other than within the quotes of a whole message in Python or JSON."""
        try:
            whole = self._template.render(messages, tools, generate=messages[-1]["role"] != "assistant")
        except BadRequest:
            return False
        return re.search(rf"{text}(?!['\"])", whole) is not None

    def _takes(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return bool(self._template.render(messages, TOOLS, generate=False))
        except BadRequest:
            return False


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else tojson(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _as_it_is(message: Mapping[str, Any]) -> dict[str, Any]:
    return dict(message)


def _as_member(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def form(message: Mapping[str, Any]) -> dict[str, Any]:
        """Put the reasoning under another name."""
        return {**message, name: message["reasoning_content"]}

    return form


def _before_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Put the text beside calls behind the reasoning, as the template of gpt-oss has place for one of them only."""
    thought, text = message["reasoning_content"], message["content"]
    if not message.get("tool_calls") or not text:
        return {**message, "thinking": thought}
    return {**message, "thinking": f"{thought}\n\n{text}", "content": ""}


def _as_block(message: Mapping[str, Any]) -> dict[str, Any]:
    """Put the reasoning into a content block, as Mistral's templates have it."""
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": message["reasoning_content"]}, *text]}


REASONING = (_as_it_is, _as_member("reasoning"), _as_member("thinking"), _before_calls, _as_block)
"""Forms of a message with reasoning. A template is given the first one that it writes."""
