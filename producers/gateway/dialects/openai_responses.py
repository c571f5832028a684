"""API adapter for OpenAI responses: POST /v1/responses, and requests about a response afterwards.

A response is a turn, and its id names that turn, so any gateway finds it on the log. Items are converted to messages in
the format of OpenAI's chat API: adjacent reasoning, text and calls form one assistant message. A stream sends items in
the order of the output; the finished response has them in the order of the log: reasoning, text, calls. Sources:
OpenAI's response object and streaming events; vLLM and gpt-oss for reasoning_text, which OpenAI's own models do not
show. Additions by turnlog are under the key `turnlog`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

from turnlog.producers.gateway.conversation import Conversation, RecordedTurn
from turnlog.producers.gateway.dialects.dialect import (
    IGNORED,
    MODEL,
    Constraint,
    Endpoint,
    Fields,
    NonTurnRequest,
    TurnRequest,
    about,
    count_ignored,
    logprobs_of,
    openai_constraints,
)
from turnlog.producers.gateway.dialects.responses_tools import (
    ResponsesTool,
    as_offered,
    custom_input,
    distinct,
    name_for_policy,
    read_tools,
    texts_of,
)
from turnlog.producers.gateway.errors import (
    BadRequest,
    GatewayError,
    UnknownPrevious,
    UnknownResponse,
    WebSocketNotServed,
)
from turnlog.producers.gateway.messages import id_of_call, in_call_order
from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning
from turnlog.producers.gateway.requests import SigningKeys, object_of, refer, resolve_reference, typed_field
from turnlog.schemas.events.turns import FinishReason
from turnlog.schemas.types import TurnId

FIELDS: Fields = {
    "model": MODEL,
    "input": ("honoured", "text, `message`, `reasoning`, `function_call`, `function_call_output`, `custom_tool_call`, "
                          "`custom_tool_call_output`, `item_reference` to an output item of this session, "
                          "`additional_tools`, which are offered to this response; others are refused"),
    "instructions": ("honoured", "a system message of this response alone: the next one does not inherit it"),
    "previous_response_id": ("honoured", "the turn that is continued, at any gateway; of this session"),
    "tools": ("honoured", "functions, `custom` tools as functions of one text, `input`, and both in a `namespace`, as "
                          "functions `NAMESPACE__NAME`; others are left out and counted"),
    "max_output_tokens": ("honoured", "up to the limit that the task's sampling sets"),
    "stream": ("honoured", ""),
    "include": ("honoured", "`reasoning.encrypted_content`, `message.output_text.logprobs`; others are counted"),
    "tool_choice": ("honoured", "`auto`, `none`; others are constraints"),
    "text": ("honoured", "`format` of type `text`; others are constraints, `text.format`"),
    "background": ("honoured", "false; true is refused: a turn is answered when it is on the log"),
    "conversation": ("honoured", "null; more is refused: the session is the conversation"),
    "prompt": ("honoured", "null; more is refused: no templates are kept here"),
    "store": ("without effect", "every turn is on the log"),
    "top_logprobs": ("limited", "of the sampled token alone"),
    "parallel_tool_calls": ("limited", "the policy decides how many calls it makes"),
    "temperature": ("limited", "the task's sampling decides, so that recorded log-probs are of one distribution"),
    "top_p": ("limited", "as temperature"),
    "reasoning": ("limited", "the model's template decides; reasoning is shown as it is, never as a summary"),
    "truncation": ("limited", "nothing is left out: a prompt beyond the window is `context_length_exceeded`"),
    "max_tool_calls": ("without effect", "it counts tools that run at OpenAI"),
    **dict.fromkeys(
        ("stream_options", "metadata", "client_metadata", "prompt_cache_key", "prompt_cache_retention",
         "safety_identifier", "service_tier", "user"),
        ("without effect", ""),
    ),
}  # fmt: skip
REFUSED = ("background", "conversation", "prompt")
UNTYPED = {"role": "message", "id": "item_reference"}
"""Type of an item without a type, by a field that it has."""
SPEAKERS = ("user", "assistant", "system", "developer")
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
BESIDE: Mapping[str, Mapping[str, Any]] = {"output_text": {"logprobs": []}, "reasoning_text": {}}
"""Further members of events about a text; log-probs are in the finished response."""
ID = re.compile(r"resp_(\w+)_(\d{1,18})", re.ASCII)
OF_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_([^\W_]+)_(\d{1,18})(?:_\d{1,18})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class OpenAIResponses:
    """See Dialect."""

    keys: SigningKeys
    path: ClassVar[str] = "/v1/responses"
    fields: ClassVar[Fields] = FIELDS

    def request(self, body: bytes, conversation: Conversation) -> TurnRequest:
        values = object_of(body)
        count_ignored(values, FIELDS)
        for name in REFUSED:
            if values.get(name):
                raise BadRequest(f"{name}: {FIELDS[name][1]}", param=name)
        include = typed_field(values, "include", list, [])
        IGNORED.labels("include").inc(sum(one not in (ENCRYPTED, LOGPROBS) for one in include))
        base, previous = None, typed_field(values, "previous_response_id", str, None)
        if previous is not None and (base := _find_turn(previous, conversation)) is None:
            raise UnknownPrevious(
                f"this session has no response {previous[:99]!r}, or it was deleted: send every item of it instead",
                param="previous_response_id",
            )
        items = Items(
            lambda reference: self._recall_reasoning(reference, conversation), lambda name: _item(name, conversation)
        )
        items.take(values.get("input"))
        tools = distinct([*read_tools(values.get("tools")), *items.tools])
        raw = _behind(base, typed_field(values, "instructions", str, None), items.messages)
        return TurnRequest(
            api="responses",
            model=str(values.get("model") or ""),
            raw=raw,
            messages=conversation.messages.read(raw, ["input"] * len(raw)),
            tools=[tool.as_function() for tool in tools] or None,
            custom=frozenset(tool.name for tool in tools if tool.custom),
            namespaced={tool.name: (tool.namespace, tool.bare) for tool in tools if tool.namespace},
            max_new_tokens=typed_field(values, "max_output_tokens", int, None),
            stream=values.get("stream") is True,
            include_usage=True,
            constraints=_constraints(values),
            calls=values.get("tool_choice") != "none",
            logprobs=LOGPROBS in include,
            references=ENCRYPTED in include,
            base=base.id if base is not None else None,
            sha256=hashlib.sha256(body).hexdigest(),
            size=len(body),
        )

    def _recall_reasoning(self, reference: str, conversation: Conversation) -> str:
        """Return the reasoning that a reference stands for; "" for a reference to no turn of the session, which agrees
        with any."""
        named = resolve_reference(reference, "", *self.keys.accepted_keys)
        turn = conversation.turns.get(named) if named is not None else None
        return turn.response.reasoning if turn is not None else ""

    def answer(
        self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str, decode: Callable[[Sequence[int]], str]
    ) -> ResponseAnswer:
        reference = refer(turn, "", self.keys.first) if request.references else None
        return ResponseAnswer(turn, session_id, model, int(time.time()), reference, request, decode)

    def refusal(self, error: GatewayError) -> bytes:
        body = error.body()
        if error.param == "messages":  # code outside the API adapters names the field so
            body["error"]["param"] = "input"
        return orjson.dumps(body)

    def endpoints(self) -> Sequence[Endpoint]:
        one = f"{self.path}/{{response_id}}"
        return (
            Endpoint("GET", one, self._serve_get),
            Endpoint("DELETE", one, self._serve_delete),
            Endpoint("GET", self.path, self._refuse_upgrade),
        )

    async def _serve_get(self, asked: NonTurnRequest) -> Response:
        """Serve GET of a response as the log has it. The request's fields are not repeated, and no time was recorded
        (`created_at` is 0)."""
        turn, session, query = _asked_for(asked), asked.session, asked.request.query_params
        if query.get("stream") == "true":
            raise BadRequest("a response is streamed when it is made: ask without stream", param="stream")
        wanted = any(value == ENCRYPTED for _, value in query.multi_items())
        reference = refer(turn.id, "", self.keys.first) if wanted else None
        shape = ResponseAnswer(turn.id, session.id, session.started.model, 0, reference)
        return Response(shape.whole(turn), media_type="application/json")

    async def _serve_delete(self, asked: NonTurnRequest) -> Response:
        """Serve DELETE of a response: this gateway no longer shows it or continues it by name. The log keeps what was
        sampled."""
        turn = _asked_for(asked)
        asked.session.conversation.deleted.add(turn.id)
        gone = {"id": _id("resp", turn.id), "object": "response", "deleted": True}
        return Response(orjson.dumps(gone), media_type="application/json")

    async def _refuse_upgrade(self, _: NonTurnRequest) -> Response:
        raise WebSocketNotServed(f"responses are not served over WebSockets: POST {self.path}, with stream if need be")


@dataclass(slots=True)
class Items:
    """Input items converted to messages of OpenAI's chat API, one after the other."""

    recalled: Callable[[str], str]
    """Returns the reasoning that a client has only by reference."""
    said: Callable[[str], dict[str, Any] | None]
    """Returns the output item with an id; None if there is none."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[ResponsesTool] = field(default_factory=list)
    """Tools that items offer."""

    def take(self, given: Any) -> None:
        """Convert all items. Raises BadRequest, which names the item."""
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise BadRequest("input must be text, or a list of at least one item", param="input")
        read = {"message": self._message, "reasoning": self._reasoning, "function_call": self._call,
                "function_call_output": self._result, "custom_tool_call": self._custom_call,
                "custom_tool_call_output": self._result, "additional_tools": self._more_tools,
                "item_reference": self._reference}  # fmt: skip
        for index, item in enumerate(items):
            where = f"input[{index}]"
            if not isinstance(item, dict):
                raise BadRequest(f"{where} must be an object", param=where)
            kind = item.get("type") or next((kind for name, kind in UNTYPED.items() if name in item), None)
            if not isinstance(kind, str) or kind not in read:
                raise BadRequest(f"{where} has type {str(kind)[:99]!r}; served are {', '.join(read)}", param=where)
            read[kind](item, where)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), _content(item.get("content"), where)
        if role not in SPEAKERS:
            raise BadRequest(f"{where}.role must be one of {', '.join(SPEAKERS)}", param=where)
        if role != "assistant":
            self.messages.append({"role": role, "content": content})
            return
        said = self._assistant()
        said["content"] = (said["content"] or "") + _text(content, where)

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Convert a reasoning item. Text takes precedence over a reference. Reasoning begins an assistant message."""
        text = _text(_content(item.get("content") or item.get("summary"), where), where)
        reference = item.get("encrypted_content")
        if not text and isinstance(reference, str):
            text = self.recalled(reference)
        said = self._assistant()
        if said["content"] is not None or "tool_calls" in said:
            said = self._assistant(another=True)
        if text:
            said["reasoning_content"] = said.get("reasoning_content", "") + text

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        name, named, arguments = texts_of(item, where, "name", "call_id", "arguments")
        name = name_for_policy(item.get("namespace"), name)
        call = {"id": named, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        [text], named = texts_of(item, where, "input"), item.get("id")
        own = self.said(named) if isinstance(named, str) else None
        whole = own is not None and own.get("arguments") == text
        self._call({**item, "arguments": text if whole else orjson.dumps({"input": text}).decode()}, where)

    def _more_tools(self, item: Mapping[str, Any], where: str) -> None:
        """Add tools from an item; Codex offers its tools this way to the models that it knows."""
        self.tools += read_tools(item.get("tools"), f"{where}.tools")

    def _result(self, item: Mapping[str, Any], where: str) -> None:
        [named] = texts_of(item, where, "call_id")
        self.messages.append(
            {"role": "tool", "tool_call_id": named, "content": _content(item.get("output"), where, "output")}
        )

    def _reference(self, item: Mapping[str, Any], where: str) -> None:
        """Convert the item that a reference names in its place."""
        [named] = texts_of(item, where, "id")
        if (said := self.said(named)) is None:
            raise BadRequest(
                f"{where} refers to {named[:99]!r}, which is no output item of this session, or its response was "
                "deleted: send the item itself",
                param=where,
            )
        read = {"message": self._message, "reasoning": self._reasoning, "function_call": self._call}
        read[said["type"]](said, where)

    def _assistant(self, *, another: bool = False) -> dict[str, Any]:
        """Return the assistant message in progress, or a new one."""
        if another or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


@dataclass(slots=True)
class ResponseAnswer:
    """See Answer."""

    turn: TurnId
    session_id: str
    model: str
    created: int
    reference: str | None
    """Reference to the turn, if reasoning should carry one; else None."""
    request: TurnRequest | None = None
    """The request; None if it is no longer known."""
    decode: Callable[[Sequence[int]], str] = str
    sent: int = 0
    """Number of events that were sent."""
    items: int = 0
    """Number of items that have begun."""
    calls: int = 0
    messages: int = 0
    open: dict[str, Any] | None = None
    """The text or reasoning item in progress."""

    def whole(self, turn: RecordedTurn) -> bytes:
        return orjson.dumps(self._final_response(turn))

    def beginning(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def part(self, part: Part) -> bytes:
        if isinstance(part, ParsedCall):
            return self._close_item("completed") + self._call_events(part)
        kind, events = "reasoning" if isinstance(part, Reasoning) else "message", b""
        if self.open is None or self.open["type"] != kind:
            events = self._close_item("completed") + self._open_item(kind)
        return events + self._more(part.text)

    def ending(self, turn: RecordedTurn) -> bytes:
        """Return the end of the item in progress, and the whole response."""
        rest = b"" if self.calls or self.messages else self._close_item("completed") + self._open_item("message")
        rest += self._close_item(_status(turn))
        return rest + self._event(f"response.{_status(turn)}", response=self._final_response(turn))

    def error_events(self, error: GatewayError) -> bytes:
        said = {"code": error.code, "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=said))

    def _open_item(self, kind: str) -> bytes:
        if kind == "reasoning":
            self.open = self._reasoning("", "in_progress")
        else:
            self.open = self.message("", "in_progress", self.messages)
            self.messages += 1
        self.items += 1
        begun = {name: value for name, value in self.open.items() if name != "encrypted_content"} | {"content": []}
        return self._of_item("added", begun) + self._of_content("content_part.added", part=self.open["content"][0])

    def _more(self, text: str) -> bytes:
        assert self.open is not None
        content = self.open["content"][0]
        content["text"] += text
        return self._of_content(f"{content['type']}.delta", delta=text, **BESIDE[content["type"]])

    def _close_item(self, status: str) -> bytes:
        if (item := self.open) is None:
            return b""
        [content] = item["content"]
        item["status"] = status
        done = self._of_content(f"{content['type']}.done", text=content["text"], **BESIDE[content["type"]])
        done += self._of_content("content_part.done", part=content)
        self.open = None
        return done + self._of_item("done", item)

    def _call_events(self, call: ParsedCall) -> bytes:
        item = self._call(self.calls, id_of_call(self.session_id, self.turn, self.calls), call)
        self.calls += 1
        self.items += 1
        at = {"item_id": item["id"], "output_index": self.items - 1}
        custom = item["type"] == "custom_tool_call"
        member, kind = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        named = {} if custom else {"name": item["name"]}
        said = self._of_item("added", {**item, member: "", "status": "in_progress"})
        said += self._event(f"response.{kind}.delta", **at, delta=item[member])
        said += self._event(f"response.{kind}.done", **at, **named, **{member: item[member]})
        return said + self._of_item("done", item)

    def _of_item(self, what: str, item: Mapping[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self.items - 1, item=item)

    def _of_content(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the only part of the item in progress."""
        assert self.open is not None
        at = {"item_id": self.open["id"], "output_index": self.items - 1, "content_index": 0}
        return self._event(f"response.{kind}", **at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self.sent, **fields})
        self.sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the fields that stay the same from beginning to end, and `more`."""
        asked = self.request
        return {
            "id": _id("resp", self.turn),
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": _id("resp", asked.base) if asked and asked.base else None,
            "parallel_tool_calls": True,
            "tool_choice": "none" if asked and not asked.calls else "auto",
            "tools": [as_offered(tool["function"], asked.custom) for tool in asked.tools or ()] if asked else [],
            "output": [],
            "usage": None,
            **more,
        }

    def _final_response(self, turn: RecordedTurn) -> dict[str, Any]:
        return self._response(
            _status(turn),
            incomplete_details={"reason": "max_output_tokens"} if _status(turn) == "incomplete" else None,
            output=list(self.output(turn)),
            usage={
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": turn.cached_tokens},
                "output_tokens": turn.output_tokens,
                "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
                "total_tokens": turn.total,
            },
            turnlog=about(self.session_id, turn),
        )

    def output(self, turn: RecordedTurn) -> Iterator[dict[str, Any]]:
        """Yield the output items as recorded."""
        said = turn.told.response
        calls = said.get("tool_calls") or ()
        if thought := said.get("reasoning_content"):
            yield self._reasoning(thought, "completed")
        if said["content"] or not calls:
            message = self.message(said["content"] or "", "completed" if calls else _status(turn))
            if self.request is not None and self.request.logprobs:
                message["content"][0]["logprobs"] = logprobs_of(turn, self.decode)
            yield message
        for at, call in enumerate(calls):
            yield self._call(at, call["id"], ParsedCall(**call["function"]))

    def _reasoning(self, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"type": "reasoning", "id": _id("rs", self.turn), "summary": [], "status": status}
        item["content"] = [{"type": "reasoning_text", "text": text}]
        return item if self.reference is None else {**item, "encrypted_content": self.reference}

    def message(self, text: str, status: str, at: int = 0) -> dict[str, Any]:
        """Return the turn's text; in a stream, the piece number `at` of a text that calls interrupt."""
        item = {"type": "message", "id": _id("msg", self.turn, at), "role": "assistant", "status": status}
        return {**item, "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}

    def _call(self, at: int, named: str, call: ParsedCall) -> dict[str, Any]:
        item = {"call_id": named, "status": "completed", "name": call.name}
        if self.request is not None and call.name in self.request.namespaced:
            item["namespace"], item["name"] = self.request.namespaced[call.name]
        if self.request is not None and call.name in self.request.custom:
            return {"type": "custom_tool_call", "id": _id("ctc", self.turn, at), **item, "input": custom_input(call)}
        return {"type": "function_call", "id": _id("fc", self.turn, at), **item, "arguments": call.arguments}


def _id(kind: str, turn: TurnId, at: int = 0) -> str:
    return f"{kind}_{turn.epoch}_{turn.index}" + (f"_{at}" if at else "")


def _status(turn: RecordedTurn) -> str:
    return "incomplete" if turn.finish_reason is FinishReason.length else "completed"


def _find_turn(named: str, conversation: Conversation, names: re.Pattern[str] = ID) -> RecordedTurn | None:
    """Return the completed turn with that id, unless it was deleted."""
    match = names.fullmatch(named)
    turn = conversation.turns.get(TurnId(match[1], int(match[2]))) if match else None
    return turn if turn is not None and turn.whole and turn.id not in conversation.deleted else None


def _item(named: str, conversation: Conversation) -> dict[str, Any] | None:
    """Return the output item with that id as recorded. A stream gives ids to the pieces of a text that calls interrupt;
    the first piece stands for all of it, the others add nothing."""
    if (turn := _find_turn(named, conversation, OF_ITEM)) is None:
        return None
    shape = ResponseAnswer(turn.id, "", "", 0, None)
    pieces = range(1, 1 + len(turn.response_raw.get("tool_calls") or ()))
    items = [*shape.output(turn), *(shape.message("", "completed", at) for at in pieces)]
    named = re.sub("^ctc_", "fc_", named)  # only the request knew which tools were custom ones
    return next((item for item in items if item["id"] == named), None)


def _asked_for(asked: NonTurnRequest) -> RecordedTurn:
    """Return the turn that a request names. Raises UnknownResponse."""
    named = asked.request.path_params["response_id"]
    if (turn := _find_turn(named, asked.session.conversation)) is None:
        raise UnknownResponse(f"this session has no response {named[:99]!r}, or it was deleted", param="response_id")
    return turn


def _behind(base: RecordedTurn | None, instructions: str | None, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all messages of a request. Instructions of the base are recognised by their mark, and not inherited."""
    raw: list[dict[str, Any]] = []
    if instructions:
        raw.append({"role": "system", "content": instructions, "instructions": True})
    if base is None:
        return raw + in_call_order(new)
    *before, last = [one for one, _ in base.messages() if not one.get("instructions")]
    return raw + before + in_call_order([last, *new])


def _constraints(values: dict[str, Any]) -> tuple[Constraint, ...]:
    shape = typed_field(values, "text", dict, {}).get("format")
    schema = shape.get("schema") if isinstance(shape, dict) else None
    choice = values.get("tool_choice")
    if isinstance(choice, dict) and isinstance(name := choice.get("name"), str):
        choice = {**choice, "name": name_for_policy(choice.get("namespace"), name)}
    return openai_constraints(choice, "text.format", shape, schema)


def _content(given: Any, where: str, name: str = "content") -> str | list[dict[str, Any]]:
    """Return text, or blocks in the format of OpenAI's chat API. Raises BadRequest."""
    if isinstance(given, str):
        return given
    if not isinstance(given or [], list):
        raise BadRequest(f"{where}.{name} must be text or a list of blocks", param=where)
    content: list[dict[str, Any]] = []
    for block in given or ():
        if isinstance(block, dict) and block.get("type") == "input_image":
            content.append({"type": "image_url", "image_url": {"url": block.get("image_url")}})
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            content.append({"type": "text", "text": block["text"]})
        else:
            kind = str(block.get("type"))[:99] if isinstance(block, dict) else type(block).__name__
            raise BadRequest(
                f"{where}.{name} has a block of type {kind!r}; text and input_image are served", param=where
            )
    return content


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    """Return the text of the assistant's content, joined. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if any("text" not in block for block in content):
        raise BadRequest(f"{where} is the assistant's: text is all that it has", param=where)
    return "".join(block["text"] for block in content)
