"""The tool `calculator`: one step of arithmetic with whole numbers, in the runner's process."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, Final

CALCULATOR: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute with two whole numbers: one of + - * / % between them.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""Declaration of the tool."""
OPERATORS: Final[dict[type[ast.operator], Callable[[int, int], int | float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
USAGE: Final = "error: give two whole numbers with one of + - * / % between them"
"""Answer to what is no such expression."""
CHARS: Final = 100
"""Maximum number of characters of an expression."""


def calculate(expression: Any) -> str:
    """Return the value of `expression`, or USAGE."""
    try:
        if not isinstance(expression, str) or len(expression) > CHARS:
            return USAGE
        step = ast.parse(expression.strip(), mode="eval").body
        if not isinstance(step, ast.BinOp) or type(step.op) not in OPERATORS:
            return USAGE
        value = OPERATORS[type(step.op)](_number(step.left), _number(step.right))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return USAGE
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _number(part: ast.expr) -> int:
    """Return a whole number with or without a sign. Raises ValueError."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
        return -_number(part.operand)
    if isinstance(part, ast.Constant) and type(part.value) is int:
        return part.value
    raise ValueError("no whole number")
