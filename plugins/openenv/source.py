"""Tasks of an OpenEnv server: `openenv url=http://HOST:PORT`, or `openenv command="..."` if workers start it.

A task is a seed. Its session begins with the environment's reset; then each tool call of the model, or each of its
messages, is an action. The episode ends when the environment says so, and the reward is the sum of its rewards."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from turnlog.environments import (
    BadSource,
    Message,
    Observation,
    Opening,
    SandboxAnswer,
    SandboxCall,
    Task,
    TaskRow,
)
from turnlog.infra.environments.sources import number_option, object_option, whole_option
from turnlog.infra.environments.tasks import task_id, write_rows
from turnlog.infra.environments.tools import declaration
from turnlog.infra.environments.verifiers import EnvironmentVerifier
from turnlog.plugins.openenv.client import base_url
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec

Actions = Literal["json", "text", "tools"]
TOOL: Final = "openenv"
CONTAINERS: Final = "docker"
"""Backend of an image without a command, which the image itself names."""
ACT: Final = "act"
"""Name of the tool that a model acts with, if the environment has no tools of its own."""
PROMPT: Final = "Act in the environment until the episode ends."
VERIFIER: Final = EnvironmentVerifier(name="openenv", version="1")
ANSWER_BYTES: Final = 2**20
"""Bytes of an observation that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSource:
    """The tasks of one environment. See TaskSource."""

    server: str | Mapping[str, Any]
    """Value of `server` in a reset: a URL, or how a worker starts one."""
    label: str
    """Name of the environment on the log."""
    count: int | None = None
    """Number of tasks; None: without end."""
    first: int = 0
    """Seed of the first task."""
    actions: Actions = "json"
    """json: a tool whose parameters are the server's schema of an action. text: each message is an action. tools: the
    environment's own tools (MCP)."""
    text_field: str = "message"
    """Field of the action that has the text of a message, and of the observation that is shown, if it has one."""
    prompt: str = PROMPT
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of each reset."""
    turns: int | None = None
    wall_s: float = 30.0

    @property
    def name(self) -> str:
        return "openenv"

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield the tasks in order of their seeds: the run's seed moves their beginning, if they have no end."""
        first = self.first if self.count is not None else self.first + seed * 1_000_003
        numbers = itertools.count(first) if self.count is None else range(first, first + self.count)
        for number in numbers:
            yield {"id": f"{self.label}-{number}", "prompt": self.prompt, "seed": number}

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        write_rows(path, itertools.islice(self.tasks(seed), count))

    def task(self, row: TaskRow) -> Task:
        reset = {"reset": True, "server": self.server, "describe": self.actions != "text"}
        options = {**self.options, **row.get("options", {})}
        if options:
            reset["options"] = options
        if isinstance(row.get("seed"), int):
            reset["seed"] = row["seed"]
        prompt = row.get("prompt", self.prompt)
        return Task(
            id=task_id(row),
            row=row,
            messages=({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt),
            verifier=VERIFIER,
            environment=Environment(name=self.label, version="openenv"),
            sandbox=SandboxSpec(limits=SandboxLimits(wall_s=self.wall_s, output_bytes=ANSWER_BYTES)),
            sandbox_tools=(TOOL,),
            tool_call=self._call,
            text_action=self._text if self.actions == "text" else None,
            observe=self._observe,
            opening=SandboxCall(TOOL, reset),
            opened=self._opening,
            max_turns=self.turns,
        )

    def _opening(self, answer: SandboxAnswer) -> Opening:
        said = json.loads(answer.output)
        shown: Message = {"role": "user", "content": self._visible_text(said["observation"])}
        if self.actions == "text":
            return Opening((shown,))
        if self.actions == "tools":
            return Opening((shown,), tuple(_mcp_declaration(tool) for tool in said.get("tools", ())))
        about = said["action_schema"].get("description") or "Take one action in the environment."
        return Opening((shown,), (declaration(ACT, about, action_parameters(said["action_schema"])),))

    def _call(self, name: str, arguments: str) -> SandboxCall | str:
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments are not JSON: {error}"
        if not isinstance(values, dict):
            return "the arguments must be an object"
        if self.actions == "tools":
            return SandboxCall(TOOL, {"action": {"type": "call_tool", "tool_name": name, "arguments": values}})
        if self.actions == "text" or name != ACT:
            return f"there is no tool {name!r}" + ("" if self.actions == "text" else f"; act by {ACT!r}")
        return SandboxCall(TOOL, {"action": values})

    def _text(self, text: str) -> SandboxCall:
        return SandboxCall(TOOL, {"action": {self.text_field: text}})

    def _observe(self, call: SandboxCall, answer: SandboxAnswer) -> Observation:
        try:
            said = json.loads(answer.output)
            done = bool(said["terminated"] or said["truncated"])
            return Observation(self._visible_text(said["observation"]), done)
        except (ValueError, KeyError, TypeError, RecursionError):  # an error, which the model reads as it is
            return Observation(answer.output)

    def _visible_text(self, observation: Any) -> str:
        """Return what the model reads: the observation's text field alone in text mode if it has one, or its JSON
        without empty metadata."""
        if not isinstance(observation, dict):
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if self.actions == "text" and isinstance(text := observation.get(self.text_field), str):
            return text
        seen = {name: value for name, value in observation.items() if name != "metadata" or value}
        return json.dumps(seen, ensure_ascii=False)


def action_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model's tool for a server's schema of an action: without pydantic's titles, and
    without `metadata`, which every action has and none needs."""
    found = _without_titles(schema)
    properties = {name: part for name, part in found.get("properties", {}).items() if name != "metadata"}
    required = [name for name in found.get("required", ()) if name in properties]
    return {**found, "type": "object", "properties": properties, "required": required}


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """Return a schema without its titles. `names`: the keys at this level are names of properties, not keywords."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: _without_titles(part, names=not names and key in ("properties", "$defs"))
        for key, part in schema.items()
        if names or key != "title"
    }


def _mcp_declaration(tool: Any) -> dict[str, Any]:
    """Return the declaration of an MCP tool, whose schema has the name `inputSchema` or `input_schema`."""
    schema = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    return declaration(tool["name"], tool.get("description") or "", schema)


def _label(url: str, command: str, image: str) -> str:
    """Return the name of an environment on the log: host, program, or image without registry and tag."""
    if url:
        return url.split("://")[-1].rstrip("/")
    if command:
        return Path(shlex.split(command)[0]).name
    return image.rpartition("/")[2].partition("@")[0].partition(":")[0]


def openenv(
    url: str = "",
    command: str = "",
    image: str = "",
    backend: str = "",
    port: str = "",
    env: str = "",
    ready_s: str = "",
    memory_bytes: str = "",
    tasks: str = "",
    seed: str = "0",
    action: str = "json",
    field: str = "message",
    prompt: str = PROMPT,
    options: str = "",
    max_turns: str = "",
    wall_s: str = "30",
    name: str = "",
) -> OpenEnvSource:
    """Make the source of an environment: a running server (`url`), or one that workers start (`command`, `image`, or
    both). Raises BadSource."""
    if bool(url) == bool(command or image):
        raise BadSource(
            'give url=http://HOST:PORT of a running server, or image=... or command="..." that starts one, not both'
        )
    if action not in get_args(Actions):
        raise BadSource(f"action={action}: must be one of {', '.join(get_args(Actions))}")
    server: str | dict[str, Any]
    if url:
        spare = [key for key, value in (("backend", backend), ("port", port), ("env", env)) if value]
        if spare:
            raise BadSource(f"{spare[0]} goes with image or command, not with url")
        try:
            server = base_url(url)
        except ValueError as error:
            raise BadSource(f"url: {error}") from error
    else:
        server = {"command": shlex.split(command)} if command else {}
        server |= {"image": image} if image else {}
        server |= {"backend": backend or CONTAINERS} if backend or not command else {}
        server |= {"port": whole_option("port", port, 1)} if port else {}
        server |= {"env": object_option("env", env)} if env else {}
        server |= {"ready_s": number_option("ready_s", ready_s)} if ready_s else {}
        server |= {"memory_bytes": whole_option("memory_bytes", memory_bytes, 2**20)} if memory_bytes else {}
    return OpenEnvSource(
        server=server,
        label=name or _label(url, command, image),
        count=whole_option("tasks", tasks, 1) if tasks else None,
        first=whole_option("seed", seed, 0),
        actions=action,  # type: ignore[arg-type]  # checked above
        text_field=field,
        prompt=prompt,
        options=object_option("options", options) if options else {},
        turns=whole_option("max_turns", max_turns, 1) if max_turns else None,
        wall_s=number_option("wall_s", wall_s),
    )
