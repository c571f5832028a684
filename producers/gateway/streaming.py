"""A turn as an HTTP answer, whole or as server-sent events. The last byte leaves after the turn is on the log.

Sources: ASGI HTTP 2.3 (http.disconnect), OpenAI chat completion and chat.completion.chunk objects.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from turnlog.producers.gateway import tool_calls
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.errors import GatewayError, SessionEnded
from turnlog.producers.gateway.metrics import ERRORS
from turnlog.producers.gateway.turns import Running
from turnlog.schemas.events.turns import FinishReason

SHOWN = {
    FinishReason.stop: "stop",
    FinishReason.tool_calls: "tool_calls",
    FinishReason.length: "length",
}
"""Those of whole turns, the only ones that are answers."""
DONE = b"data: [DONE]\n\n"


class TurnResponse(Response):
    """Waits for `running` (or has a recorded turn already) and answers with it."""

    def __init__(
        self,
        turn: Running | Turn,
        *,
        session_id: str,
        model: str,
        stream: bool,
        include_usage: bool,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._turn = turn
        self._session_id = session_id
        self._model = model
        self._stream = stream
        self._include_usage = include_usage
        self._keep_alive_s = keep_alive_s
        self._created = int(time.time())
        if isinstance(turn, Running):
            turn.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. A client that leaves is noticed while the turn runs: the last one takes the engine request along."""
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

    async def _recorded(self, left: asyncio.Event) -> Turn | None:
        """None when the client has left a turn that was cut off. Raises SessionEnded, and whatever the turn raised."""
        turn = await asyncio.shield(self._turn.task) if isinstance(self._turn, Running) else self._turn
        if turn.whole:
            return turn
        if left.is_set():
            return None
        raise SessionEnded(f"session {self._session_id} was finished while this turn was sampled")

    async def _whole(self, send: Send, left: asyncio.Event) -> None:
        try:
            turn = await self._recorded(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await _send(send, error.status, orjson.dumps(error.body()))
            return
        if turn is not None:
            await _send(send, 200, orjson.dumps(self._completion(turn)))
            turn.handed_over |= not left.is_set()

    async def _events(self, send: Send, left: asyncio.Event) -> None:
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        await send(_body(self._chunk({"role": "assistant", "content": ""})))
        sent = ""
        if isinstance(self._turn, Running):
            sent = await self._follow(self._turn, send, left)
        try:
            turn = await self._recorded(left)
        except GatewayError as error:
            ERRORS.labels(error.code).inc()
            await send(_body(b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE, last=True))
            return
        if turn is not None:
            await send(_body(self._ending(turn, sent), last=True))
            turn.handed_over |= not left.is_set()

    async def _follow(self, running: Running, send: Send, left: asyncio.Event) -> str:
        """Send content as it becomes certain, until the turn is on the log; what was sent."""
        sent = ""
        while not running.task.done():
            changed = running.changed
            if len(ready := running.text[: tool_calls.settled(running.text)]) > len(sent):
                await send(_body(self._chunk({"content": ready[len(sent) :]})))
                sent = ready
            if running.task.done() or changed.is_set():
                continue
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                if not left.is_set():
                    await send(_body(b": keep-alive\n\n"))
        return sent

    def _ending(self, turn: Turn, sent: str) -> bytes:
        """All that is missing: the rest of the content, tool calls, finish reason, usage, [DONE]."""
        response = turn.response_raw
        parts = []
        if rest := (response["content"] or "")[len(sent) :]:
            parts.append(self._chunk({"content": rest}))
        if calls := response.get("tool_calls"):
            parts.append(self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}))
        parts.append(self._chunk({}, finish_reason=SHOWN[turn.finish_reason], turnlog=self._about(turn)))
        if self._include_usage:
            parts.append(self._chunk(None, usage=_usage(turn)))
        return b"".join([*parts, DONE])

    def _chunk(self, delta: dict[str, Any] | None, *, finish_reason: str | None = None, **more: Any) -> bytes:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        return (
            b"data: " + orjson.dumps({**self._envelope("chat.completion.chunk"), "choices": choices, **more}) + b"\n\n"
        )

    def _completion(self, turn: Turn) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": turn.response_raw,
            "logprobs": None,
            "finish_reason": SHOWN[turn.finish_reason],
        }
        return {
            **self._envelope("chat.completion"),
            "choices": [choice],
            "usage": _usage(turn),
            "turnlog": self._about(turn),
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        turn = self._turn.id
        return {
            "id": f"chatcmpl-{turn.epoch[:16]}-{turn.index}",
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _about(self, turn: Turn) -> dict[str, Any]:
        """What turnlog adds to OpenAI's shape: the turn's id, how it really ended, its weight versions."""
        return {
            "session_id": self._session_id,
            "epoch": turn.id.epoch,
            "index": turn.id.index,
            "finish_reason": turn.finish_reason.value,
            "weight_version_first": turn.versions[0],
            "weight_version_last": turn.versions[1],
        }


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.output_tokens,
        "total_tokens": turn.total,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _start(status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *more]}


def _body(data: bytes, *, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def _send(send: Send, status: int, data: bytes) -> None:
    await send(_start(status, b"application/json", (b"content-length", str(len(data)).encode())))
    await send(_body(data, last=True))
