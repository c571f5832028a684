"""Chat messages in a comparable form, so that a client's echo is recognised although its shape has changed.

A string equals one text block; None, "" and [] are equal; tool arguments are compared parsed, with sorted keys and
numbers by value; call ids and indexes, cache marks and billing lines do not count. Reasoning that an echo leaves out
matches any. `as_said` recognises an echo that a client changed without changing its meaning (decision 42).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.images import MessageImage, picture
from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning, Text, compact, exact
from turnlog.schemas.canonical import canonical_json
from turnlog.schemas.ids import call_id
from turnlog.schemas.types import TurnId

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Message:
    """A message in two forms: for the chat template, and for comparison."""

    role: str
    template: dict[str, Any]
    """Form for the chat template: content as text, tool arguments parsed."""
    digest: bytes
    """Hash of everything that counts, except reasoning."""
    reasoning: str
    pictures: tuple[MessageImage, ...] = ()
    """Images in order; the template has a part {"type": "image"} for each."""
    changed: Mapping[str, Any] | None = None
    """Members of an answer that its client sent back changed, as received. The other members are as the turn produced
    them."""

    @property
    def characters(self) -> int:
        """Number of characters in its text."""
        content = self.template["content"]
        return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)

    @property
    def text(self) -> str:
        """The text without images; a line break joins the texts beside them."""
        content = self.template["content"]
        return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def message_list(raw: Any) -> list[Any]:
    """Return the messages of a request as received. Raises BadRequest."""
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    return raw


def in_call_order(raw: list[Any]) -> list[Any]:
    """Return the messages with the results after each assistant message sorted into the order of the calls that they
    answer. Most templates print no ids, so the order alone shows a model which result belongs to which call. A result
    without an id, or with one that belongs to none of these calls, stays in place."""
    ordered = list(raw)
    for at in [at for at, one in enumerate(raw) if isinstance(one, dict) and "tool_calls" in one]:
        calls = raw[at]["tool_calls"]
        if not isinstance(calls, list) or len(calls) < 2:
            continue
        ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
        order = {named: index for index, named in enumerate(ids) if isinstance(named, str)}
        run = itertools.takewhile(lambda place: _is_result(raw[place]), range(at + 1, len(raw)))
        answers = [(raw[place].get("tool_call_id"), place) for place in run]
        found = [(order[named], place) for named, place in answers if isinstance(named, str) and named in order]
        for (_, place), (_, result) in zip(found, sorted(found), strict=True):
            ordered[place] = raw[result]
    return ordered


def _is_result(raw: Any) -> bool:
    return isinstance(raw, dict) and raw.get("role") == "tool"


def normalise_messages(raw: Any) -> tuple[Message, ...]:
    """Return the normalised messages. Raises BadRequest, which names the message."""
    return tuple([message(one, f"messages[{index}]") for index, one in enumerate(message_list(raw))])


def message(raw: Any, where: str) -> Message:
    """Normalise one message in OpenAI's shape. Raises BadRequest."""
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str) or raw["role"] not in ROLES:
        raise BadRequest(f"{where} must be an object whose role is one of {', '.join(ROLES)}", param=where)
    role = ROLES[raw["role"]]
    content, pictures = _content(raw.get("content"), where)
    reasoning = str(raw.get("reasoning_content") or raw.get("reasoning") or "").strip()
    template: dict[str, Any] = {"role": role, "content": content}
    canonical: list[Any] = [role, content, *(one.ref.sha256 for one in pictures)]
    if raw.get("name"):
        template["name"] = raw["name"]
        canonical.append(["name", str(raw["name"])])
    if role == "assistant" and raw.get("tool_calls"):
        template["tool_calls"] = _calls(raw["tool_calls"], where)
        canonical.append([_canonical(call["function"]) for call in template["tool_calls"]])
    if role == "tool" and raw.get("tool_call_id"):
        template["tool_call_id"] = raw["tool_call_id"]
    if reasoning:
        template["reasoning_content"] = reasoning
    digest = hashlib.blake2b(canonical_json(canonical), digest_size=16).digest()
    return Message(role, template, digest, reasoning, pictures)


def join_prefill(prefill: Message, response: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
    """Return a prefill and its response as the single message of an echo, both raw and normalised."""
    raw = {**response, "content": prefill.template["content"] + (response["content"] or "")}
    if prefill.reasoning:
        raw["reasoning_content"] = prefill.reasoning
    return raw, message(raw, "response")


def without_name(message: Message) -> Message:
    """Return the message without the name of its speaker; a policy never names itself."""
    return normalise_messages([{name: value for name, value in message.template.items() if name != "name"}])[0]


def call_ids(message: Message) -> list[str]:
    """Return the ids of its calls as the client sent them; empty for a call without an id."""
    return [str(call.get("id", "")) for call in message.template.get("tool_calls", ())]


def as_said(own: Message, echo: Message) -> Message | None:
    """Return the turn's own message if an echo that a client changed still means the same, with `changed` set; else
    None. Clients name the speaker, leave out the text beside calls, round integers, and drop or fill in arguments.
    Other calls, ids or words do not match, nor do arguments that are in both and differ."""
    changed: dict[str, Any] = {}
    if name := echo.template.get("name"):
        changed["name"] = name
    text, echoed = own.template["content"], echo.template["content"]
    if text != echoed:
        if not isinstance(echoed, str) or echoed.strip() not in ("", text.strip()):
            return None
        changed["content"] = echoed
    mine, theirs = (one.template.get("tool_calls", []) for one in (own, echo))
    if call_ids(own) != call_ids(echo):
        return None
    for call, other in zip((one["function"] for one in mine), (one["function"] for one in theirs), strict=True):
        if call["name"] != other["name"] or not _alike(call["arguments"], other["arguments"]):
            return None
        if _canonical(call) != _canonical(other):
            changed["tool_calls"] = theirs
    if echo.reasoning not in ("", own.reasoning):
        return None
    template = dict(own.template)
    if not echo.reasoning:
        template.pop("reasoning_content", None)
    return replace(own, template=template, reasoning=echo.reasoning, changed=changed)


def _alike(own: Any, echo: Any) -> bool:
    """Return whether arguments agree as far as both have them. JavaScript rounds numbers, and clients' schemas drop and
    fill in keys, trim texts, and turn text into numbers."""
    if isinstance(own, dict) and isinstance(echo, dict):
        return all(_alike(own[name], echo[name]) for name in own.keys() & echo.keys())
    if isinstance(own, list) and isinstance(echo, list):
        return len(own) == len(echo) and all(map(_alike, own, echo))
    if _plain(own) == _plain(echo):
        return True
    numbers = [float(_plain(one)) for one in (own, echo) if isinstance(one, int | float) and not isinstance(one, bool)]
    return len(numbers) == 2 and numbers[0] == numbers[1]


def _plain(value: Any) -> str:
    """Return a value as text."""
    return value.strip() if isinstance(value, str) else compact(_numbers(value), sort_keys=True)


def with_ids(
    messages: Sequence[Message], ids: Callable[[str, int, str], str], written: Mapping[str, str]
) -> list[Message]:
    """Return messages whose calls and results have the ids that a chat template should show; see CallFormat. `written`
    holds ids that the model wrote itself, by the client's ids of their calls."""
    shown: dict[str, str] = {}
    rewritten, before = [], itertools.count()
    for one in messages:
        template = dict(one.template)
        if calls := template.get("tool_calls"):
            new = [
                written.get(given) or ids(call["function"]["name"], at, given)
                for call, at in zip(calls, before, strict=False)
                for given in [str(call.get("id", ""))]
            ]
            shown |= {str(call.get("id")): named for call, named in zip(calls, new, strict=True)}
            template["tool_calls"] = [{**call, "id": named} for call, named in zip(calls, new, strict=True)]
        if given := str(template.get("tool_call_id", "")):
            template["tool_call_id"] = shown.get(given) or ids("", 0, given)
        rewritten.append(replace(one, template=template))
    return rewritten


def system_digest(messages: Sequence[Message]) -> str:
    """Return the hex sha256 of the system messages before the first message of another role."""
    hashed = hashlib.sha256()
    for one in messages:
        if one.role != "system":
            break
        hashed.update(one.digest)
    return hashed.hexdigest()


def tools_digest(tools: Any) -> str:
    """Return the hex sha256 of the tool schemas in canonical JSON; None and an empty list are equal."""
    return hashlib.sha256(canonical_json(tools or [])).hexdigest()


def _content(content: Any, where: str) -> tuple[Any, tuple[MessageImage, ...]]:
    """Return (text, no images), or the parts of a message with images, and those images."""
    if not content:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be text or a list of text blocks", param=where)
    texts: list[str] = []
    parts: list[dict[str, str]] = []
    pictures: list[MessageImage] = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "image_url":
            pictures.append(picture(block, where))
            parts.append({"type": "image"})
            continue
        text = block if isinstance(block, str) else block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise BadRequest(
                f"{where}.content has a block of type {kind!r}; text and image_url are served", param=where
            )
        if not text.startswith(BILLING):
            texts.append(text)
            parts.append({"type": "text", "text": text})
    return (parts, tuple(pictures)) if pictures else ("\n".join(texts), ())


def _calls(raw: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for index, one in enumerate(raw if isinstance(raw, list) else [raw]):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{where}.tool_calls[{index}] must have function.name", param=where)
        call = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(function)}}
        calls.append({"id": one["id"], **call} if one.get("id") else call)
    return calls


def _canonical(function: dict[str, Any]) -> list[str]:
    """Return the name, and the arguments as separate text, so that they may be nested as deep as a whole body."""
    return [function["name"], compact(_numbers(function["arguments"]), sort_keys=True)]


def _numbers(value: Any) -> Any:
    """Return a JSON value with 1.0 as 1, because a client that parses arguments, as JavaScript does, cannot tell them
    apart."""
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _arguments(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    parsed = exact(arguments)
    return parsed if isinstance(parsed, dict) else arguments.strip()


def response_of(parts: Sequence[Part], named: Callable[[int], str]) -> dict[str, Any]:
    """Build the assistant's message from an output's parts; `named` returns the id of the n-th call."""
    calls = [one for one in parts if isinstance(one, ParsedCall)]
    content = "".join(one.text for one in parts if isinstance(one, Text))
    response: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning := "".join(one.text for one in parts if isinstance(one, Reasoning)):
        response["reasoning_content"] = reasoning
    if calls:
        response["tool_calls"] = [call_in(named(at), one) for at, one in enumerate(calls)]
    return response


def parts_of(response: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a recorded response."""
    parts: list[Part] = []
    if reasoning := response.get("reasoning_content"):
        parts.append(Reasoning(reasoning))
    if content := response.get("content"):
        parts.append(Text(content))
    calls = (call["function"] for call in response.get("tool_calls") or ())
    return [*parts, *(ParsedCall(call["name"], call["arguments"]) for call in calls)]


def id_of_call(session_id: str, turn: TurnId, at: int) -> str:
    """Return the id of the at-th call in a turn's answer."""
    return call_id(session_id, turn.epoch, turn.index, at, "agent")


def call_in(named: str, call: ParsedCall) -> dict[str, Any]:
    """Return a call as a message contains it."""
    return {"id": named, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
