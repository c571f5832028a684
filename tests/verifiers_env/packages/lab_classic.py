"""An environment of verifiers' older interface for tests: a tool, and a reward for using it."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

TASKS = 4


def count(number: int) -> str:
    """Count to a number."""
    return f"counted {number}"


def right(completion: list[Any], answer: str, **_: Any) -> float:
    if answer == "0":
        raise ValueError("a bug of the reward")
    return float(completion[-1]["content"] == answer)


def length(completion: list[Any], **_: Any) -> float:
    return float(len(completion))


def load_environment(bonus: float = 0.0) -> vf.Environment:
    rows = [
        {"prompt": [{"role": "user", "content": f"Count to {number} with the tool."}], "answer": str(number)}
        for number in range(TASKS)
    ]
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, bonus])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[count], rubric=rubric, max_turns=4)
