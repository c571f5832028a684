"""Recipe `calc`: "3 + 5 = ?" answered by calling a calculator and repeating what it says.

Reward 1 iff the tool was used and the final answer is exact. Operands 0 to 9, operators + - *.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from turnlog.infra.recipes import Episode, FunctionVerifier, Message, SandboxCall, TaskRow, Verdict
from turnlog.producers.recipes.calc_model import CalcWarmStart, task_row
from turnlog.schemas.events.sessions import Environment, Outcome
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec
from turnlog.schemas.json_depth import deeper_than

ERROR: Final = "error"
"""What the tool says to a call that it cannot run."""


def judge(episode: Episode) -> Verdict:
    """1.0 iff a tool message stands in the conversation and the last assistant message is the answer, exactly."""
    used = any(message["role"] == "tool" for message in episode.messages)
    last = episode.messages[-1] if episode.messages else {"role": "none"}
    said = (last.get("content") or "") if last["role"] == "assistant" and not last.get("tool_calls") else ""
    exact = episode.outcome is Outcome.completed and said == episode.task["answer"]
    return Verdict(
        float(used and exact),
        {"tool_used": float(used), "exact": float(exact)},
        {"answer": episode.task["answer"], "said": said, "outcome": episode.outcome.value, "reason": episode.reason},
    )


class Calc:
    """See the module's docstring and turnlog.infra.recipes.Recipe."""

    name = "calc"
    environment = Environment(name="calc", version="1")
    sandbox_tools = ("python",)
    sandbox = SandboxSpec(limits=SandboxLimits(cpu_s=2.0, wall_s=5.0, output_bytes=4096))
    verifier = FunctionVerifier("calc", "1", judge)
    warm_start = CalcWarmStart()

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """One function, `calc(expr)`."""
        parameters = {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]}
        function = {"name": "calc", "description": "Evaluate an arithmetic expression.", "parameters": parameters}
        return ({"type": "function", "function": function},)

    def messages(self, task: TaskRow) -> list[Message]:
        """The question as a user message."""
        return [{"role": "user", "content": task["prompt"]}]

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """`print(expr)` for the sandbox, which is the boundary: the expression is sent as the model wrote it."""
        try:
            expression = None if deeper_than(arguments) else json.loads(arguments)["expr"]
        except (ValueError, KeyError, TypeError):
            return ERROR
        if name != "calc" or not isinstance(expression, str):
            return ERROR
        return SandboxCall("python", {"code": f"print({expression})"})

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """What was printed, or `error`."""
        return output.decode(errors="replace").strip() if ok else ERROR

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Fresh random tasks for ever."""
        generator = random.Random(f"calc tasks {seed}")
        while True:
            yield task_row(generator)

    def write_dataset(self, path: Path, count: int, seed: int) -> None:
        """`count` tasks as JSON lines."""
        rows = itertools.islice(self.tasks(seed), count)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


RECIPE: Final = Calc()
