"""The contract of an API adapter (`Dialect`). It parses the requests of one API into a `TurnRequest`, and renders turns
in that API's format, whole or as server-sent events. The last byte is sent after the turn is on the log.

To add one, write its module in this package and enter it in `dialects` of app.py. Inside the gateway, and on the log,
messages have the format of OpenAI's chat API; an adapter for other formats converts messages before they are parsed.
Sources: ASGI HTTP 2.3 (http.disconnect); `x-should-retry` and `retry-after-ms` as the SDKs of OpenAI and Anthropic
interpret them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import orjson
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as Sent
from starlette.types import Receive, Scope, Send

from turnlog.infra.redaction.masking import Masker
from turnlog.producers.gateway.conversation import Conversation, RecordedTurn
from turnlog.producers.gateway.errors import ERRORS, BadRequest, GatewayError, SessionEnded
from turnlog.producers.gateway.images import Admitted, MessageImage
from turnlog.producers.gateway.messages import Message, parts_of
from turnlog.producers.gateway.parsers.parser import ParsedCall, Part, Reasoning, Text
from turnlog.producers.gateway.prompts import UNKNOWN
from turnlog.producers.gateway.sessions import GatewaySession, Running
from turnlog.schemas.types import TurnId

IGNORED = Counter("turnlog_gateway_ignored_fields", "Request fields that were not honoured", ("field",))

Fields = Mapping[str, tuple[str, str]]
"""Field of a request -> its treatment (honoured, limited, without effect, refused), and details."""
MODEL = ("honoured", "names the policy, whatever it is, but for names of `[gateway] side_engines`")


class Constraint(NamedTuple):
    """A request field that would constrain what is sampled."""

    field: str
    json_schema: str | None = None
    """JSON schema to which the output would be held; None for another constraint, or one that no engine grammar can
    express."""
    tool: str | None = None
    """Tool that the output would have to call, "" for any; None for another constraint, as above."""

    @classmethod
    def to(cls, field: str, schema: Any) -> Constraint:
        """Return a constraint to JSON that fits a schema from the client."""
        return cls(field, orjson.dumps(schema).decode() if isinstance(schema, dict) else None)


def openai_constraints(choice: Any, field: str, shape: Any, schema: Any) -> tuple[Constraint, ...]:
    """Return the constraints of OpenAI's `tool_choice` and output format; `schema` is that of a format of type
    json_schema."""
    found = []
    if (choice or "auto") not in ("auto", "none"):
        named = choice.get("function", choice) if isinstance(choice, dict) else None
        tool = "" if choice == "required" else named.get("name") if isinstance(named, dict) else None
        found.append(Constraint("tool_choice", tool=tool if isinstance(tool, str) else None))
    shape = shape or {"type": "text"}
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind != "text":
        given = {"type": "object"} if kind == "json_object" else schema if kind == "json_schema" else None
        found.append(Constraint.to(field, given))
    return tuple(found)


def parse_tools(raw: Any) -> list[dict[str, Any]]:
    """Return the tools of a request as received. Raises BadRequest."""
    if not isinstance(raw or [], list) or not all(isinstance(tool, dict) for tool in raw or ()):
        raise BadRequest("tools must be a list of objects", param="tools")
    return raw or []


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, in any API."""

    api: str
    """Name of the API in TurnCompleted."""
    model: str
    """Model name that the client sent."""
    raw: list[Any]
    """Messages in the format of OpenAI's chat API."""
    messages: tuple[Message, ...]
    tools: list[Any] | None
    """Tools in the format of OpenAI's chat API."""
    custom: frozenset[str] = frozenset()
    """Names of the tools whose calls the client takes as one text, the argument `input`."""
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a tool for the policy -> its namespace, and its name there, by which the client knows it."""
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    """True if a stream should report token usage."""
    stop: tuple[str, ...] = ()
    """Texts before which the client's text ends. Their tokens stay on the log."""
    calls: bool = True
    """Whether text that looks like a tool call is parsed as one; otherwise it stays text."""
    logprobs: bool = False
    """True if the client wants log-probs and the sampled tokens."""
    token_ids: bool = False
    """True if the client wants the ids of the output."""
    references: bool = False
    """True if the client wants to send reasoning back as a reference to its turn."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints in the request; the session's purpose decides whether they apply."""
    base: TurnId | None = None
    """Turn that the request names as its base; None: it is found by the messages."""
    sha256: str
    """sha256 of the body's bytes."""
    size: int
    """Size of the body in bytes."""
    images: Mapping[str, Admitted] = field(default_factory=dict)
    """Images by sha256, once they are in the store."""
    record: TurnRequest | None = None
    """The same request with its secrets masked, where the engine sees more than records may hold; else None."""
    masker: Masker | None = None
    """Masker of the request and of its answer; None if redaction is off."""

    @property
    def recorded(self) -> TurnRequest:
        """The request as records hold it and as conversations know it."""
        return self.record or self

    @property
    def pictures(self) -> list[MessageImage]:
        """All images of the messages, in order."""
        return [picture for one in self.messages for picture in one.pictures]


class ResponseRenderer(Protocol):
    """Renders one turn in an API's format, whole or as the data of server-sent events. It belongs to one response, and
    may remember what it has sent."""

    def whole(self, turn: RecordedTurn) -> bytes:
        """Return the body of a response that is not streamed."""
        ...

    def beginning(self) -> bytes:
        """Return the first events, which are sent at once, before anything is sampled."""
        ...

    def part(self, part: Part) -> bytes:
        """Return the events for more of the output: further text or reasoning, or a whole call."""
        ...

    def ending(self, turn: RecordedTurn) -> bytes:
        """Return the events after the last part."""
        ...

    def error_events(self, error: GatewayError) -> bytes:
        """Return the events that report an error in place of the ending."""
        ...


class NonTurnRequest(NamedTuple):
    """A request about a session that is no request for a turn."""

    request: Request
    session: GatewaySession
    prompt_tokens: Callable[[], Awaitable[int]]
    """Returns the length of the prompt that a turn would submit now, if the body requested one. Raises BadRequest,
    ImagesNotServed, ContextOverflow."""


class Endpoint(NamedTuple):
    """An endpoint that an API adapter serves besides turns."""

    method: str
    path: str
    """Path in Starlette's syntax."""
    answer: Callable[[NonTurnRequest], Awaitable[Response]]
    """Answers the request. Raises GatewayError."""


class Dialect(Protocol):
    """Adapter of one API."""

    path: ClassVar[str]
    """Path of requests for turns."""
    fields: ClassVar[Fields]
    """Known request fields. An unknown field is counted as "other" and has no effect."""

    def request(self, body: bytes, conversation: Conversation) -> TurnRequest:
        """Parse a request. `conversation` is the session's; it recognises known messages faster. Runs in a thread if
        the body is large. Raises BadRequest, which names the field."""
        ...

    def answer(
        self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str, decode: Callable[[Sequence[int]], str]
    ) -> ResponseRenderer:
        """Return the renderer of the response to a request. `decode` returns the text of ids."""
        ...

    def refusal(self, error: GatewayError) -> bytes:
        """Return the body of an error response."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """Return the endpoints that are served besides turns."""
        ...


class TurnResponse(Response):
    """Waits for a running turn, or has a recorded one, and answers with it."""

    def __init__(
        self, turn: Running | RecordedTurn, request: TurnRequest, dialect: Dialect, *, session_id: str, model: str,
        decode: Callable[[Sequence[int]], str], keep_alive_s: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._turn = turn
        self._dialect = dialect
        self._answer = dialect.answer(request, turn.id, session_id=session_id, model=model, decode=decode)
        self._stream = request.stream
        self._session_id = session_id
        self._keep_alive_s = keep_alive_s
        if isinstance(turn, Running):
            turn.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that disconnects is noticed while the turn runs; when the last one leaves, the
        engine request is aborted."""
        left = asyncio.Event()
        watch = asyncio.create_task(self._watch(receive, left))
        try:
            if self._stream:
                await self._events(send, left)
            else:
                await self._whole(send, left)
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive, left: asyncio.Event) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        if isinstance(self._turn, Running):
            self._turn.leave()

    async def _wait_for_turn(self, left: asyncio.Event) -> RecordedTurn | None:
        """Return the completed turn, or None if the client has disconnected from a turn that was cut off. Raises
        SessionEnded, and whatever the turn raised."""
        turn = await asyncio.shield(self._turn.task) if isinstance(self._turn, Running) else self._turn
        if turn.whole:
            return turn
        if left.is_set():
            return None
        raise SessionEnded(f"session {self._session_id} was finished while this turn was sampled")

    async def _whole(self, send: Send, left: asyncio.Event) -> None:
        try:
            turn = await self._wait_for_turn(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await _send(send, error.status, self._dialect.refusal(error), *retry_headers(error))
            return
        if turn is not None:
            await _send(send, 200, self._answer.whole(turn))
            turn.handed_over |= not left.is_set()

    async def _events(self, send: Send, left: asyncio.Event) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        await send(_body(self._answer.beginning()))
        running = self._turn if isinstance(self._turn, Running) else None
        unsent = Unsent()
        if running is not None:
            await self._follow(running, unsent, send, left)
        try:
            turn = await self._wait_for_turn(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await send(_body(self._answer.error_events(error), last=True))
            return
        if turn is not None:
            rest = unsent.of(parts_of(turn.told.response) if running is None else running.parts)
            last = [*map(self._answer.part, rest), self._answer.ending(turn)]
            await send(_body(b"".join(last), last=True))
            turn.handed_over |= not left.is_set()

    async def _follow(self, running: Running, unsent: Unsent, send: Send, left: asyncio.Event) -> None:
        """Send output as it becomes certain, until the turn is on the log."""
        while not running.task.done():
            changed = running.changed
            if new := [self._answer.part(part) for part in unsent.of(running.parts)]:
                await send(_body(b"".join(new)))
            if running.task.done() or changed.is_set():
                continue
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                if not left.is_set():
                    await send(_body(b": keep-alive\n\n"))


@dataclass(slots=True)
class Unsent:
    """Tracks how much of the growing parts was sent."""

    _sent: int = 0
    """Number of parts that were sent in full."""
    _of_next: int = 0
    """Number of characters sent of the next part."""

    def of(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield what was not sent yet. The last part may grow."""
        for part in parts[self._sent :]:
            if isinstance(part, ParsedCall):
                yield part
            elif more := part.text[self._of_next :]:
                yield type(part)(more)
            if part is parts[-1] and isinstance(part, Text | Reasoning):
                self._of_next = len(part.text)
                return
            self._sent, self._of_next = self._sent + 1, 0


def count_ignored(values: Iterable[str], fields: Fields) -> None:
    """Count the request fields that are not honoured. Unknown fields count as "other", because a metric label must not
    come from a client."""
    for name in values:
        treatment, _ = fields.get(name, ("", ""))
        if treatment not in ("honoured", "refused"):
            IGNORED.labels(name if treatment else "other").inc()


def stop_sequences(raw: Any, name: str, most: int) -> tuple[str, ...]:
    """Return the stop sequences of a text or a list of texts. Raises BadRequest."""
    stops = [raw] if isinstance(raw, str) else raw or []
    if not isinstance(stops, list) or len(stops) > most or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest(f"{name} must be a text, or a list of up to {most} texts, none of them empty", param=name)
    return tuple(stops)


def about(session_id: str, turn: RecordedTurn) -> dict[str, Any]:
    """Return what turnlog adds to an answer: the turn's id, its real finish reason, its weight versions."""
    return {
        "session_id": session_id,
        "epoch": turn.id.epoch,
        "index": turn.id.index,
        "finish_reason": turn.finish_reason.value,
        "stopped_by": turn.told.stopped_by,
        "weight_version_first": turn.versions[0],
        "weight_version_last": turn.versions[1],
        "own_s": turn.own_s,
    }


def logprobs_of(turn: RecordedTurn, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Return the log-prob of every sampled token as recorded, in the format that OpenAI's APIs share. An auxiliary
    model's are not recorded."""
    content = []
    told = turn.told
    for token, logprob in zip(told.ids, told.logprobs, strict=bool(told.logprobs)):
        text = decode([token])
        data = None if UNKNOWN in text else list(text.encode())  # a part of a character has no text of its own
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return content


def retry_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Return headers that tell a client whether to retry, and after how long. SDKs follow them whatever the status
    is."""
    headers = [(b"x-should-retry", b"true" if error.retry else b"false")]
    if error.retry:
        headers.append((b"retry-after-ms", str(error.retry_after_ms).encode()))
    return headers


def _start(status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> Sent:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *more]}


def _body(data: bytes, *, last: bool = False) -> Sent:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def _send(send: Send, status: int, data: bytes, *more: tuple[bytes, bytes]) -> None:
    await send(_start(status, b"application/json", (b"content-length", str(len(data)).encode()), *more))
    await send(_body(data, last=True))
