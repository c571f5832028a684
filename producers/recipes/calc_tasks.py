"""The tasks of `calc`: one-digit arithmetic, drawn at random."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Final

OPERATORS: Final[dict[str, Callable[[int, int], int]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERANDS: Final = 10
"""Operands are 0 to OPERANDS - 1."""


def task_row(generator: random.Random) -> dict[str, str]:
    """One task: prompt, the expression that solves it, and its value."""
    left, right = generator.randrange(OPERANDS), generator.randrange(OPERANDS)
    sign = generator.choice("+-*")
    answer = str(OPERATORS[sign](left, right))
    return {"prompt": f"{left} {sign} {right} = ?", "expr": f"{left}{sign}{right}", "answer": answer}
