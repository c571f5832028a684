"""Client of an OpenEnv server: an episode over one WebSocket, and the server's HTTP endpoints.

Source: openenv 0.10.0, `openenv/core/env_server/types.py` (messages) and `http_server.py` (their order). A message to
`/ws` is {"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}; each but `close` is answered by one of
type `observation`, `state`, `mcp` or `error`. The server makes an environment for each connection, and ends it with the
connection. By HTTP, `/reset` and `/step` each make an environment of their own, unless the server keeps one.

OpenEnvError               every error has `reason`, by which a tool call is answered
├── ServerUnreachable      environment_unreachable: no connection, or no healthy answer
├── NotAllowed             environment_not_allowed: [egress] does not grant the address
├── EnvironmentLost        environment_lost: the connection ended, and the episode with it
├── EnvironmentSilent      environment_silent: no answer in time
├── EnvironmentGarbage     environment_garbage: an answer that is not the protocol's
├── EnvironmentFull        environment_full: the server takes no more sessions
└── EnvironmentRaised      environment_error: the server answers that it failed, or that a message is not valid
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self
from urllib.parse import urlsplit

import aiohttp

MESSAGE_BYTES = 100 * 2**20
"""Maximum size of a message from a server, as upstream's client has it."""
CONNECT_S = 10.0
"""Seconds for a connection to be opened."""
SHOWN = 300
"""Maximum characters of a server's answer that an error shows."""
CAPACITY, VALIDATION = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Codes of errors that are told apart."""


class OpenEnvError(Exception):
    """Base class of the errors listed in the module docstring."""

    reason: ClassVar[str] = "environment_error"


class ServerUnreachable(OpenEnvError):
    """The server cannot be reached, or is not healthy."""

    reason = "environment_unreachable"


class NotAllowed(OpenEnvError):
    """[egress] does not let the worker reach the server; the message names the setting."""

    reason = "environment_not_allowed"


class EnvironmentLost(OpenEnvError):
    """The connection ended. Nobody knows whether a message on its way was acted on."""

    reason = "environment_lost"


class EnvironmentSilent(OpenEnvError):
    """The server did not answer in time."""

    reason = "environment_silent"


class EnvironmentGarbage(OpenEnvError):
    """The server's answer is not what the protocol has; it is quoted in part."""

    reason = "environment_garbage"


class EnvironmentFull(OpenEnvError):
    """The server has as many sessions as it takes. Remedy: raise its max_concurrent_envs, or run fewer sessions."""

    reason = "environment_full"


class EnvironmentRaised(OpenEnvError):
    """The server answered with an error. `code` is one of WSErrorCode upstream, or an HTTP status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class OpenEnvStep:
    """An environment's answer to a reset or a step."""

    observation: Any
    """Observation as the server sent it, usually an object."""
    reward: float | None
    """Reward of the step; None if the environment gives none."""
    done: bool
    """True if the episode is over."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def as_answer(self) -> dict[str, Any]:
        """Return the answer in the format of `env_step`. OpenEnv has one flag for the end; an episode that was cut off
        is one whose metadata has `truncated`."""
        truncated = self.done and self.metadata.get("truncated") is True
        return {
            "observation": self.observation,
            "reward": self.reward or 0.0,
            "terminated": self.done and not truncated,
            "truncated": truncated,
            "info": dict(self.metadata),
        }


class ServerNetwork(Protocol):
    """A way to a server."""

    async def websocket(self, url: str, *, max_bytes: int, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to a URL of scheme http or https. Raises OpenEnvError, aiohttp.ClientError, OSError,
        TimeoutError."""
        ...

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request and yield the answer. Raises as `websocket` does."""
        ...

    async def close(self) -> None:
        """Release it."""
        ...


class DirectNetwork:
    """Connections without rules: to servers that the worker has started, and in tests and benchmarks to any."""

    def __init__(self, connector: aiohttp.BaseConnector | None = None) -> None:
        """Create it. `connector` makes the connections, in place of the machine's own network."""
        self._http = aiohttp.ClientSession(
            connector=connector or aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def websocket(self, url: str, *, max_bytes: int, timeout_s: float) -> aiohttp.ClientWebSocketResponse:
        async with asyncio.timeout(timeout_s):
            return await self._http.ws_connect(url, max_msg_size=max_bytes, compress=0)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._http.request(method, url, headers=headers, data=body or None) as response:
            yield response

    async def close(self) -> None:
        await self._http.close()

    aclose = close


def base_url(text: str) -> str:
    """Return a server's base URL in scheme http or https, without a slash at its end. Raises ValueError."""
    url = text.strip().rstrip("/")
    for websocket, plain in (("ws://", "http://"), ("wss://", "https://")):
        if url.startswith(websocket):
            url = plain + url.removeprefix(websocket)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} is no server's URL: write http://HOST:PORT, without user, query and fragment")
    return url


class OpenEnvServer:
    """A server's HTTP endpoints."""

    def __init__(self, url: str, network: ServerNetwork, *, timeout_s: float = 30.0) -> None:
        """Create a client of the server at `url`; `network` stays the caller's. Raises ValueError."""
        self.url = base_url(url)
        self.network = network
        self._timeout_s = timeout_s

    async def health(self, *, timeout_s: float | None = None) -> None:
        """Return if the server says that it serves. Raises ServerUnreachable, NotAllowed, EnvironmentGarbage."""
        try:
            answer = await self._ask("GET", "/health", None, timeout_s)
        except (EnvironmentSilent, EnvironmentLost, EnvironmentRaised) as error:
            raise ServerUnreachable(f"{self.url} is not healthy: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") not in ("healthy", "degraded"):
            raise ServerUnreachable(f"{self.url} is not healthy: {_excerpt(answer)}")

    async def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of the server's `action`, `observation` and `state`. Raises OpenEnvError."""
        answer = await self._ask("GET", "/schema", None, None)
        if not isinstance(answer, dict) or not isinstance(answer.get("action"), dict):
            raise EnvironmentGarbage(f"{self.url}/schema has no schema of the action: {_excerpt(answer)}")
        return answer

    async def state(self) -> Any:
        """Return the server's state. Raises OpenEnvError."""
        return await self._ask("GET", "/state", None, None)

    async def reset(self, options: Mapping[str, Any]) -> OpenEnvStep:
        """Begin an episode by HTTP. Raises OpenEnvError."""
        return parse_step(await self._ask("POST", "/reset", dict(options), None))

    async def step(
        self, action: Mapping[str, Any], *, request_id: str | None = None, timeout_s: float | None = None
    ) -> OpenEnvStep:
        """Take a step by HTTP. A server that honours `request_id` answers the same again to the same id. Raises
        OpenEnvError."""
        body: dict[str, Any] = {"action": dict(action)}
        if request_id is not None:
            body["request_id"] = request_id
        return parse_step(await self._ask("POST", "/step", body, timeout_s))

    async def mcp(self, method: str, params: Mapping[str, Any]) -> Any:
        """Call a method of the server's MCP endpoint (`tools/list`, `tools/call`) and return its result. Raises
        OpenEnvError."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(params)}
        return parse_rpc(await self._ask("POST", "/mcp", request, None))

    async def _ask(self, method: str, path: str, body: object, timeout_s: float | None) -> Any:
        headers = {"accept": "application/json"}
        content = b""
        if body is not None:
            headers["content-type"], content = "application/json", ENCODER.encode(body).encode()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        connected = False
        try:
            async with (
                asyncio.timeout(limit_s),
                self.network.request(method, self.url + path, headers, content) as response,
            ):
                connected = True
                status, said = response.status, await _read_limited(response)
        except TimeoutError as error:
            raise EnvironmentSilent(f"{method} {self.url}{path} was not answered within {limit_s:g} s") from error
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            raise ServerUnreachable(f"{self.url} cannot be reached: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            ended = "in its answer" if connected else "before it answered"
            raise EnvironmentLost(f"{method} {self.url}{path}: the connection ended {ended}: {error}") from error
        if status != 200:
            raise EnvironmentRaised(str(status), f"{method} {self.url}{path} is answered {status}: {_excerpt(said)}")
        return parse_json(said)


class OpenEnvSession:
    """An environment of a server, over a WebSocket of its own. It takes one request at a time."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.url = url
        self._socket = socket
        self._answers: asyncio.Queue[str | bytes | OpenEnvError] = asyncio.Queue()
        self._over: OpenEnvError | None = None
        # Always reading, so that pings of the server are answered between steps, and its end is noticed.
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, url: str, network: ServerNetwork, *, timeout_s: float = CONNECT_S) -> Self:
        """Connect to the server at `url`. Raises ServerUnreachable, NotAllowed, ValueError."""
        url = base_url(url)
        try:
            return cls(url, await network.websocket(f"{url}/ws", max_bytes=MESSAGE_BYTES, timeout_s=timeout_s))
        except TimeoutError as error:
            raise ServerUnreachable(f"{url}/ws did not open within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{url}/ws does not open: {str(error) or type(error).__name__}") from error

    @property
    def over(self) -> OpenEnvError | None:
        """The error by which no request can be made any more; None while the connection stands."""
        return self._over

    async def reset(self, options: Mapping[str, Any], *, timeout_s: float) -> OpenEnvStep:
        """Begin an episode. `options` has `seed`, `episode_id` and whatever the environment takes. Raises
        OpenEnvError."""
        return parse_step(await self._request("reset", dict(options), "observation", timeout_s))

    async def step(self, action: Mapping[str, Any], *, timeout_s: float) -> OpenEnvStep:
        """Take a step. Raises OpenEnvError."""
        return parse_step(await self._request("step", dict(action), "observation", timeout_s))

    async def state(self, *, timeout_s: float) -> Any:
        """Return the environment's state. Raises OpenEnvError."""
        return await self._request("state", None, "state", timeout_s)

    async def mcp(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call a method of the environment's MCP server and return its result. Raises OpenEnvError."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": dict(params)}
        return parse_rpc(await self._request("mcp", request, "mcp", timeout_s))

    async def close(self) -> None:
        """End the environment and the connection. Never raises."""
        if self._over is None:
            self._over = EnvironmentLost("the connection was closed here")
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._socket.send_str('{"type": "close"}')
        self._reading.cancel()
        await asyncio.wait([self._reading])
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._socket.close()

    async def _request(self, kind: str, data: dict[str, Any] | None, expected: str, timeout_s: float) -> Any:
        """Send a message and return the data of its answer. After any error but EnvironmentRaised the connection is of
        no use, since a late answer would be taken for the next one's."""
        if self._over is not None:
            raise self._over
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            if not self._answers.empty():  # the server says why it serves no session, or speaks out of turn
                parse_message(_text(self._answers.get_nowait()), "")
            async with asyncio.timeout(timeout_s):
                await self._socket.send_str(ENCODER.encode(message))
                said = await self._answers.get()
            return parse_message(_text(said), expected)
        except EnvironmentRaised:
            raise
        except TimeoutError:
            error: OpenEnvError = EnvironmentSilent(f"{self.url} did not answer a {kind} within {timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as raised:
            error = EnvironmentLost(f"{self.url}: the connection ended under a {kind}: {raised}")
        except OpenEnvError as raised:
            error = raised
        self._over = self._over or error
        raise error

    async def _read(self) -> None:
        while (message := await self._socket.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            self._answers.put_nowait(message.data)
        why = self._socket.exception()
        code = self._socket.close_code
        said = f"{self.url} ended the connection" + (f" (code {code})" if code else "") + (f": {why}" if why else "")
        error = EnvironmentLost(said)
        if self._answers.empty():  # what came before the end is an answer, or says why
            self._over = self._over or error
        self._answers.put_nowait(error)


def _text(said: str | bytes | OpenEnvError) -> str | bytes:
    if isinstance(said, OpenEnvError):
        raise said
    return said


def parse_message(text: str | bytes, expected: str) -> Any:
    """Return the data of a message of type `expected`. Raises EnvironmentFull, EnvironmentRaised,
    EnvironmentGarbage."""
    message = parse_json(text)
    kind, data = (message.get("type"), message.get("data")) if isinstance(message, dict) else (None, None)
    if kind == "error" and isinstance(data, dict):
        code, said = str(data.get("code", "")), str(data.get("message", ""))
        if code == CAPACITY:
            raise EnvironmentFull(f"the server takes no more sessions: {said[:SHOWN]}")
        raise EnvironmentRaised(code, said[:4096] + _describe_errors(data.get("errors")))
    if kind != expected or data is None:
        raise EnvironmentGarbage(f"the server's answer is no message of type {expected!r}: {_excerpt(text)}")
    return data


def parse_step(data: Any) -> OpenEnvStep:
    """Parse an observation. Raises EnvironmentGarbage for one without observation, or with a reward that is no finite
    number."""
    if not isinstance(data, dict) or "observation" not in data:
        raise EnvironmentGarbage(f"the server's answer holds no observation: {_excerpt(data)}")
    reward, done, metadata = data.get("reward"), data.get("done", False), data.get("metadata")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise EnvironmentGarbage(f"the reward is no finite number: {_excerpt(reward)}")
    if not isinstance(done, bool) or not isinstance(metadata, dict | None):
        raise EnvironmentGarbage(f'"done" must be true or false, and "metadata" an object: {_excerpt(data)}')
    return OpenEnvStep(data["observation"], None if reward is None else float(reward), done, metadata or {})


def parse_rpc(answer: Any) -> Any:
    """Return the result of a JSON-RPC answer. Raises EnvironmentRaised, EnvironmentGarbage."""
    if not isinstance(answer, dict):
        raise EnvironmentGarbage(f"no JSON-RPC answer: {_excerpt(answer)}")
    if isinstance(error := answer.get("error"), dict):
        raise EnvironmentRaised(str(error.get("code", "")), str(error.get("message", ""))[:4096])
    if "result" not in answer:
        raise EnvironmentGarbage(f"a JSON-RPC answer without result: {_excerpt(answer)}")
    return answer["result"]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON without NaN and infinities. Raises EnvironmentGarbage."""
    try:
        return DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise EnvironmentGarbage(f"the server's answer is not JSON ({error}): {_excerpt(text)}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    """Read a body. Raises EnvironmentGarbage for one longer than MESSAGE_BYTES."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > MESSAGE_BYTES:
            raise EnvironmentGarbage(f"the server's answer has more than {MESSAGE_BYTES} bytes")
    return b"".join(parts)


def _describe_errors(errors: Any) -> str:
    """Describe pydantic's list of errors: where and what, one a line."""
    if not isinstance(errors, list):
        return ""
    lines = [
        f"\n{'.'.join(str(part) for part in error.get('loc', ()))}: {error.get('msg', '')}"[:SHOWN]
        for error in errors[:10]
        if isinstance(error, dict)
    ]
    return "".join(lines)


def _excerpt(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
