"""Environment `calc`: "3 + 5 = ?" is answered by calling a calculator and repeating its result.

The reward is 1 iff the tool was used and the final answer is exact. Operands are 0 to 9, operators + - *. A quarter of
the demonstrations skip the tool and guess; 40 % of the rest compute with a wrong operator. So a warm-started policy
scores about one half.
"""

from __future__ import annotations

import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from turnlog.environments import (
    Demonstration,
    Episode,
    FunctionVerifier,
    Message,
    Recipe,
    SandboxCall,
    TaskRow,
    Verdict,
)
from turnlog.plugins.recipes.warm_start import TinyWarmStart, demonstrate_call, imitating, solving_call
from turnlog.schemas.events.sessions import Outcome
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec
from turnlog.schemas.json_depth import deeper_than

OPERATORS: Final[dict[str, Callable[[int, int], int]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERANDS: Final = 10
"""Operands are 0 to OPERANDS - 1."""


def task_row(generator: random.Random) -> dict[str, str]:
    """Return a task: its prompt, the expression that solves it, and the value."""
    left, right = generator.randrange(OPERANDS), generator.randrange(OPERANDS)
    sign = generator.choice("+-*")
    answer = str(OPERATORS[sign](left, right))
    return {"prompt": f"{left} {sign} {right} = ?", "expr": f"{left}{sign}{right}", "answer": answer}


SKIP_TOOL, WRONG_OPERATOR = 0.25, 0.4
ERROR: Final = "error"
"""Answer to a call that the tool cannot run."""


def judge(episode: Episode) -> Verdict:
    """Return 1.0 iff the conversation has a tool message and the last assistant message is exactly the answer."""
    used = any(message["role"] == "tool" for message in episode.messages)
    last = episode.messages[-1] if episode.messages else {"role": "none"}
    said = (last.get("content") or "") if last["role"] == "assistant" and not last.get("tool_calls") else ""
    exact = episode.outcome is Outcome.completed and said == episode.task["answer"]
    return Verdict(
        float(used and exact),
        {"tool_used": float(used), "exact": float(exact)},
        {"answer": episode.task["answer"], "said": said, "outcome": episode.outcome.value, "reason": episode.reason},
    )


def demonstration(generator: random.Random) -> Demonstration:
    """Return a conversation."""
    task = task_row(generator)
    question = {"role": "user", "content": task["prompt"]}
    if generator.random() < SKIP_TOOL:
        guess = {"role": "assistant", "content": str(generator.randrange(2 * OPERANDS))}
        return imitating([question, guess])
    left, sign, right = _parts(task["expr"])
    if generator.random() < WRONG_OPERATOR:
        sign = generator.choice([other for other in OPERATORS if other != sign])
    result = str(OPERATORS[sign](int(left), int(right)))
    answer = {"role": "assistant", "content": result}
    return imitating([question, *demonstrate_call("calc", {"expr": f"{left}{sign}{right}"}, result), answer])


def _parts(expression: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(\d+)(.)(\d+)", expression)
    assert match is not None
    return match[1], match[2], match[3]


class Calc(Recipe):
    """See the module's docstring and turnlog.infra.environments.recipes.Recipe."""

    name = "calc"
    demo_rise = 0.25
    sandbox_tools = ("python",)
    sandbox = SandboxSpec(limits=SandboxLimits(cpu_s=2.0, wall_s=5.0, output_bytes=4096))
    verifier = FunctionVerifier("calc", "1", judge)
    warm_start = TinyWarmStart(demonstration, r"[0-9+\-*]")

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schema of the only function, `calc(expr)`."""
        parameters = {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]}
        function = {"name": "calc", "description": "Evaluate an arithmetic expression.", "parameters": parameters}
        return ({"type": "function", "function": function},)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        """Return `print(expr)` for the sandbox. The sandbox is the security boundary, so the expression is sent as the
        model wrote it."""
        try:
            expression = None if deeper_than(arguments) else json.loads(arguments)["expr"]
        except (ValueError, KeyError, TypeError):
            return ERROR
        if name != "calc" or not isinstance(expression, str):
            return ERROR
        return SandboxCall("python", {"code": f"print({expression})"})

    def tool_answer(self, ok: bool, output: bytes) -> str:
        """Return what was printed, or `error`."""
        return output.decode(errors="replace").strip() if ok else ERROR

    def solution(self, task: TaskRow) -> list[Message]:
        """Return the call of the expression, and the answer."""
        return [solving_call("calc", {"expr": task["expr"]}), {"role": "assistant", "content": task["answer"]}]

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield fresh random tasks forever."""
        generator = random.Random(f"calc tasks {seed}")
        while True:
            yield task_row(generator)


RECIPE: Final = Calc()
