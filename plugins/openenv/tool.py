"""The tool `openenv`: one episode of a session in an environment behind an OpenEnv server.

The worker keeps the connection from call to call, and runs the calls itself, without a sandbox. The environment lives
as long as the connection: a step that finds it gone is answered infra_error / environment_lost, never by a new
environment, and a step on its way when it went is not sent again. A reset begins with a new environment, so it may be
repeated. Answers have the format of `env_step`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from turnlog.plugins.openenv.client import (
    ENCODER,
    EnvironmentFull,
    EnvironmentLost,
    EnvironmentRaised,
    EnvironmentSilent,
    OpenEnvError,
    OpenEnvSession,
    OpenEnvStep,
    ServerUnreachable,
)
from turnlog.plugins.openenv.places import ServerPlace, open_place
from turnlog.sandbox_workers.protocol import Execution
from turnlog.sandbox_workers.tools import Call, Tool, ToolFailed
from turnlog.sandbox_workers.tools.tool import InfraFailed
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

NAME: Final = "openenv"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds between attempts to begin an episode at a server that is full or away."""
LOST_RESETS = 3
"""Maximum number of connections that may end under one reset."""
PROBE_S = 3.0
"""Seconds for a server to say that it serves, when a step took too long."""
ANSWER_BYTES = 2**20
CUT: Final = {"truncated": True}

SERVER: Final = {
    "anyOf": [
        {"type": "string", "description": "URL of a server: http://HOST:PORT", "minLength": 1, "maxLength": 2000},
        {
            "type": "object",
            "description": "A server that the worker starts.",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 100},
                "image": {
                    "type": "string",
                    "description": "Image of the backend: a root file system, or a container's image, which names a "
                    "command.",
                },
                "backend": {
                    "type": "string",
                    "description": "Backend of the sandbox, such as docker.",
                    "maxLength": 80,
                },
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                "ready_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
                "memory_bytes": {"type": "integer", "minimum": 2**20},
            },
            "anyOf": [{"required": ["command"]}, {"required": ["image", "backend"]}],
            "additionalProperties": False,
        },
    ]
}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "action": {"type": "object", "description": "The action, as the server's schema has it."},
        "reset": {"type": "boolean", "description": "Begin an episode instead of acting."},
        "server": {**SERVER, "description": "Where the environment is; with reset alone."},
        "seed": {"type": "integer", "minimum": 0, "description": "Of the episode; with reset alone."},
        "options": {"type": "object", "description": "Further arguments of the environment's reset."},
        "describe": {
            "type": "boolean",
            "description": "Answer a reset with the schema of actions, too.",
        },
    },
    "additionalProperties": False,
}


class EpisodeConnection:
    """A session's environment at its server. Closed with the session's connections."""

    def __init__(self, place: ServerPlace) -> None:
        self.place = place
        self.session: OpenEnvSession | None = None
        self.over = ""
        """Text for the model that says why no action can be taken; empty while an episode runs."""
        self.lost: OpenEnvError | None = None
        """The failure that ended the environment, through no fault of the agent."""

    async def begin(self, options: Mapping[str, Any], *, within_s: float) -> OpenEnvStep:
        """Begin an episode, on the connection that stands or a new one. Raises OpenEnvError."""
        loop = asyncio.get_running_loop()
        until, pause, lost = loop.time() + within_s, FIRST_PAUSE_S, 0
        self.over = "the last reset failed: reset again"
        while True:
            try:
                if self.session is None or self.session.over is not None:
                    await self._disconnect()
                    self.session = await self.place.connect(timeout_s=max(0.1, until - loop.time()))
                step = await self.session.reset(options, timeout_s=max(0.1, until - loop.time()))
            except (EnvironmentFull, EnvironmentLost, ServerUnreachable) as error:
                if isinstance(error, EnvironmentFull) and self.session is not None:
                    self.place.note_full()
                await self._disconnect()
                lost += isinstance(error, EnvironmentLost)
                if lost >= LOST_RESETS or loop.time() + pause >= until:
                    raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except OpenEnvError:
                await self._disconnect()
                raise
            else:
                self.over, self.lost = self._ending(step), None
                return step

    async def act(self, action: Mapping[str, Any], *, timeout_s: float) -> OpenEnvStep:
        """Take an action. Raises EnvironmentRaised, after which the episode goes on; any other OpenEnvError ends it."""
        if self.lost is not None:
            raise self.lost
        assert self.session is not None  # or `over` would have been said
        try:
            step = await self.session.step(action, timeout_s=timeout_s)
        except EnvironmentRaised:
            raise
        except OpenEnvError as error:
            self.lost = error
            await self._disconnect()
            raise
        self.over = self._ending(step)
        if self.over:  # the server may have the place for another session
            await self._disconnect()
        return step

    async def is_served(self) -> bool:
        """Return whether the server serves others, so that the action is what took too long."""
        try:
            await self.place.server.health(timeout_s=PROBE_S)
        except OpenEnvError:
            return False
        return True

    async def close(self) -> None:
        """See Connection."""
        await self._disconnect()
        await self.place.close()

    async def _disconnect(self) -> None:
        if (session := self.session) is not None:
            self.session = None
            await session.close()
            self.place.note_disconnect()

    @staticmethod
    def _ending(step: OpenEnvStep) -> str:
        if not step.done:
            return ""
        how = "was truncated" if step.as_answer()["truncated"] else "terminated"
        return f"the episode {how}: reset before the next action"


async def openenv(call: Call) -> Execution:
    """Reset, or take an action. The answer is one JSON object of observation, reward, terminated, truncated, info."""
    given, connections = call.arguments, call.context.connections
    episode: EpisodeConnection | None = connections.find(NAME)
    if given.get("reset", False):
        return await _reset(call, episode)
    if episode is None:
        if call.context.call_seq == 0:
            raise ToolFailed("no episode has begun: reset first")
        raise InfraFailed(
            EnvironmentLost.reason,
            "the environment went with its connection: this worker has none for the session. Nothing was sent",
        )
    if episode.over:
        raise ToolFailed(episode.over)
    wall_s = call.limits.wall_s
    try:
        return _answer(call, await episode.act(given["action"], timeout_s=wall_s))
    except EnvironmentRaised as error:
        raise ToolFailed(str(error)) from error
    except EnvironmentSilent as error:
        if episode.lost is error and await episode.is_served():
            episode.lost, episode.over = None, f"an action took longer than {wall_s:g} s and ended the episode: reset"
            cut = OpenEnvStep(f"The action took longer than {wall_s:g} s; the episode has ended.", None, True, CUT)
            return call.answer(_text(cut, {}), status=ToolStatus.timeout, reason="wall_s")
        raise _failure(episode.place, error) from error
    except OpenEnvError as error:
        raise _failure(episode.place, error) from error


async def _reset(call: Call, episode: EpisodeConnection | None) -> Execution:
    given, connections = call.arguments, call.context.connections
    named = given.get("server")
    if episode is None and named is None:
        raise ToolFailed('no server is known yet: the first reset names one, "server": "http://HOST:PORT"')
    if episode is None or (named is not None and named != episode.place.named):
        await connections.drop(NAME)
        place = await open_place(named, call.context)
        episode = await connections.open(NAME, lambda: _new_episode(place))
        first = True
    else:
        first = False
    options = {**given.get("options", {}), **({"seed": given["seed"]} if "seed" in given else {})}
    try:
        step = await episode.begin(options, within_s=call.limits.wall_s)
        more = await _describe(episode, call.limits.wall_s) if given.get("describe", False) else {}
    except EnvironmentRaised as error:
        if not first:
            raise ToolFailed(f"the environment refuses the reset: {error}") from error
        raise _failure(episode.place, error) from error
    except OpenEnvError as error:
        episode.lost = error
        raise _failure(episode.place, error) from error
    return _answer(call, step, more)


async def _describe(episode: EpisodeConnection, timeout_s: float) -> dict[str, Any]:
    """Return the schema of actions, and the environment's MCP tools if it has any. Raises OpenEnvError."""
    schema = (await episode.place.server.schema())["action"]
    if episode.session is None:
        return {"action_schema": schema}
    try:
        listed = await episode.session.mcp("tools/list", {}, timeout_s=timeout_s)
    except EnvironmentRaised:  # it has no MCP server
        return {"action_schema": schema}
    tools = listed.get("tools") if isinstance(listed, dict) else None
    return {"action_schema": schema, **({"tools": tools} if tools else {})}


async def _new_episode(place: ServerPlace) -> EpisodeConnection:
    return EpisodeConnection(place)


def _failure(place: ServerPlace, error: OpenEnvError) -> InfraFailed:
    said = place.output()
    return InfraFailed(error.reason, f"{error}" + (f"\nThe server printed last:\n{said}" if said else ""))


def _answer(call: Call, step: OpenEnvStep, more: Mapping[str, Any] | None = None) -> Execution:
    return call.answer(_text(step, more or {}))


def _text(step: OpenEnvStep, more: Mapping[str, Any]) -> str:
    return ENCODER.encode({**step.as_answer(), **more}) + "\n"


def fitting(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse a call that is neither a reset nor an action, or mixes both."""
    if arguments.get("reset", False):
        return '"reset" begins an episode and takes no "action"' if "action" in arguments else ""
    if "action" not in arguments:
        return 'missing: "action", or "reset": true'
    spare = [name for name in ("server", "seed", "options", "describe") if name in arguments]
    return f'"{spare[0]}" goes with "reset": true alone' if spare else ""


def outside(arguments: Mapping[str, Any]) -> bool:
    """Return False: the worker speaks to the server itself."""
    return False


OPENENV = Tool(
    name=NAME,
    version="1",
    about="Act in an environment behind an OpenEnv server. Begin with reset; then one action a call. Answers one JSON "
    "object: observation, reward, terminated, truncated, info.",
    schema=SCHEMA,
    run=openenv,
    legal=fitting,
    sandboxed=outside,
    output_bytes=ANSWER_BYTES,
)
