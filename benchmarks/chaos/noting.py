"""Recipe `noting`: every call appends its line to the session's own notes, and to a file outside of the log and of
every sandbox, so that a call that took effect twice shows there. The answer says what the notes are now."""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any

from turnlog.infra.environments.episodes import Episode, FunctionVerifier, SandboxCall, Verdict
from turnlog.infra.environments.tasks import Recipe
from turnlog.schemas.events import SandboxLimits, SandboxSpec

EFFECTS = "CHAOS_EFFECTS"
"""Variable of the runner that names the file."""
TAKES_S = 0.15
"""Of each call, behind its effect: time to be killed in."""
LINE = re.compile(r"[0-9a-z.-]+")


def judge(episode: Episode) -> Verdict:
    """A reward that the answer decides, and which answer it was."""
    said = episode.messages[-1].get("content") or ""
    return Verdict(float(int(said, 16) % 2), {}, {"said": said})


class Noting(Recipe):
    """See the module's docstring."""

    name = "noting"
    verifier = FunctionVerifier("noting", "1", judge)
    sandbox_tools = ("shell",)
    sandbox = SandboxSpec(
        backend="subprocess",
        durable_workspace=True,
        limits=SandboxLimits(cpu_s=5.0, wall_s=20.0, output_bytes=4096),
    )

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """`note(line)`."""
        parameters = {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]}
        return ({"type": "function", "function": {"name": "note", "parameters": parameters}},)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Both lines, then a pause, then a checksum of the notes."""
        line = json.loads(arguments)["line"]
        assert LINE.fullmatch(line), line
        outside = shlex.quote(os.environ[EFFECTS])
        command = f"echo {line} >> {outside}; echo {line} >> notes; sleep {TAKES_S}; cksum < notes"
        return SandboxCall("shell", {"command": command})

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """The checksum alone."""
        return output.decode().split()[0] if ok else "failed"


RECIPE = Noting()
