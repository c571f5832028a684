"""Every tool by name: the built-in ones, and those that packages offer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from turnlog.infra.environments.tools import AGENT, BUILT_IN, BrokenTool, describe_tool, find_tools, load_tool
from turnlog.sandbox_workers.protocol import Kind
from turnlog.sandbox_workers.tools.built_in import (
    agent,
    at_the_gateway,
    edit_file,
    env_step,
    kept_interpreter,
    needs,
    python,
    python_session,
    read_file,
    shell,
    within_limits,
    write_file,
)
from turnlog.sandbox_workers.tools.tool import Tool, always

RUN = {
    "python": (python, {Kind.python}, always),
    "shell": (shell, {Kind.shell}, within_limits),
    "python_session": (python_session, {Kind.session}, kept_interpreter),
    "read_file": (read_file, (), always),
    "write_file": (write_file, (), always),
    "edit_file": (edit_file, (), always),
    "env_step": (env_step, {Kind.session}, needs),
    AGENT.name: (agent, {Kind.program}, at_the_gateway),
}
OURS = {**BUILT_IN, AGENT.name: AGENT}


@cache
def tools() -> Mapping[str, Tool]:
    """Return every tool by name, the built-in ones first; looked up once. Raises ToolOfferError."""
    found = {name: _built_in(name) for name in OURS}
    for name, point in find_tools().items():
        tool = load_tool(point)
        if not isinstance(tool, Tool):
            raise BrokenTool(f"{describe_tool(point)}: must be a turnlog.sandbox_workers.tools.Tool, got {tool!r:.200}")
        found[name] = tool
    return found


def _built_in(name: str) -> Tool:
    known, (run, kinds, legal) = OURS[name], RUN[name]
    return Tool(
        name=name, version=known.version, about=known.about, schema=known.arguments,
        run=run, kinds=frozenset(kinds), legal=legal, once=known is AGENT,
    )  # fmt: skip
