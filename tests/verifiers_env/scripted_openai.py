"""An endpoint of OpenAI's chat completions whose answers are a function of the messages, for the upstream runner."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
Answers = Callable[[str], str]
"""The conversation as ChatML -> what the model says, tool calls between <tool_call> marks."""


def chat_ml(messages: list[dict[str, Any]]) -> str:
    """Return messages as the policy of the tests sees them; see CHAT_TEMPLATE of plugins/recipes/warm_start.py."""
    text = ""
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = [
            f'<tool_call>{{"name":{json.dumps(call["name"])},"arguments":{call["arguments"]}}}</tool_call>'
            for call in calls
        ]
        text += f"<|im_start|>{message['role']}\n{''.join([*parts, *called])}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def completion(said: str) -> dict[str, Any]:
    """Return an answer as a chat completion."""
    found = [json.loads(call) for call in CALL.findall(said)]
    calls = [
        {
            "index": index,
            "id": f"call-{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for index, call in enumerate(found)
    ]
    message = {"role": "assistant", "content": CALL.sub("", said).strip() or None}
    return {
        "id": "answer",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls" if calls else "stop",
                "message": message | ({"tool_calls": calls} if calls else {}),
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _chunks(whole: dict[str, Any]) -> list[dict[str, Any]]:
    [choice], base = whole["choices"], {**whole, "object": "chat.completion.chunk", "choices": [], "usage": None}
    first = {"index": 0, "delta": choice["message"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return [base | {"choices": [first]}, base | {"choices": [last]}, base | {"usage": whole["usage"]}]


@asynccontextmanager
async def scripted_openai(answers: Answers, keys: list[str] | None = None) -> AsyncIterator[str]:
    """Serve on a free port; yields the base URL, ending in /v1. `keys` collects the credentials that were sent."""

    async def chat(request: Request) -> Response:
        if keys is not None:
            keys.append(request.headers.get("authorization", ""))
        asked = await request.json()
        whole = completion(answers(chat_ml(asked["messages"])))
        if not asked.get("stream"):
            return JSONResponse(whole)
        events = [*(json.dumps(chunk) for chunk in _chunks(whole)), "[DONE]"]
        return StreamingResponse((f"data: {event}\n\n" for event in events), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await serving
