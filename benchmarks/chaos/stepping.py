"""Recipe `stepping`: every call is a step of the OpenEnv server of noting_server.py, which notes what it does outside
of the log. The answer is a checksum of all steps of the episode, so a lost or repeated step changes what follows."""

from __future__ import annotations

import json
import os
from typing import Any

from turnlog.environments import (
    FunctionVerifier,
    Observation,
    Recipe,
    SandboxAnswer,
    SandboxCall,
    Task,
    TaskRow,
    Verdict,
)

SERVER = "CHAOS_ENVIRONMENT"
"""Variable of the runner that holds the server's URL."""


def judge(episode: Any) -> Verdict:
    """A reward that the answer decides, and which answer it was."""
    said = episode.messages[-1].get("content") or ""
    return Verdict(float(int(said, 16) % 2), {}, {"said": said})


def step(name: str, arguments: str) -> SandboxCall | str:
    return SandboxCall("openenv", {"action": {"line": json.loads(arguments)["line"]}})


def observe(call: SandboxCall, answer: SandboxAnswer) -> Observation:
    return Observation(json.loads(answer.output)["observation"]["checksum"] if answer.ok else "failed")


class Stepping(Recipe):
    """See the module's docstring."""

    name = "stepping"
    verifier = FunctionVerifier("stepping", "1", judge)

    def task(self, row: TaskRow) -> Task:
        parameters = {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]}
        number = row["prompt"].rpartition(" ")[2]
        return Task(
            id=number,
            row=row,
            messages=({"role": "user", "content": row["prompt"]},),
            verifier=self.verifier,
            environment=self.environment,
            tools=({"type": "function", "function": {"name": "note", "parameters": parameters}},),
            sandbox_tools=("openenv",),
            opening=SandboxCall(
                "openenv",
                {"reset": True, "server": os.environ[SERVER], "options": {"episode_id": f"task-{number}"}},
            ),
            tool_call=step,
            observe=observe,
        )


RECIPE = Stepping()
