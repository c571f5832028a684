"""Formats of answers in messages, and the check of answers that reasoning-gym would evaluate.

Reasoning-gym scores some tasks by Python's `eval` or sympy's parser, on what the model wrote. An answer to such a task
is passed on only if evaluating it calls nothing but functions of mathematics.
"""

from __future__ import annotations

import ast
import re
from enum import Enum
from typing import Final

LITERALS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks of reasoning-gym 0.1.25 whose score evaluates the answer as Python."""
FORMULAS: Final = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks of reasoning-gym 0.1.25 whose score gives the answer to sympy's parser, which knows Python's built-ins."""
FUNCTIONS: Final = frozenset(
    re.findall(
        r"\w+",
        "abs Abs pi oo exp log ln sqrt cbrt sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh"
        " atanh Integer Rational Float erf erfi Si Ci Ei li factorial theta alpha beta gamma",
    )
)
"""Names beside those of one letter (with digits) that a formula may use."""
PARTS_OF_LITERALS: Final = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load, ast.UnaryOp, ast.USub,
    ast.UAdd,
)  # fmt: skip
LINE: Final = "Answer:"


class AnswerFormat(Enum):
    """Format in which a message gives its answer."""

    tags = "tags"
    """Text between <answer> and </answer>; the last pair counts. The prompts of reasoning-gym use the same format."""
    line = "line"
    """The text after the last `Answer:`."""

    @property
    def rule(self) -> str:
        """Sentence of the prompt about the format."""
        if self is AnswerFormat.tags:
            return "Give the final answer, and nothing else, between <answer> and </answer>."
        return f"End with `{LINE}` and the final answer, and nothing after it."

    def answer_in(self, text: str) -> str | None:
        """Return the answer, or None if the text has none."""
        if self is AnswerFormat.line:
            _, found, answer = text.rpartition(LINE)
            return answer.strip() if found else None
        pairs = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return str(pairs[-1]).strip() if pairs else None

    def format_answer(self, answer: str) -> str:
        """Return a message that gives the answer."""
        return f"<answer>{answer}</answer>" if self is AnswerFormat.tags else f"{LINE} {answer}"


def is_safe(task: str, answer: str) -> bool:
    """Return whether reasoning-gym may score the answer: False if evaluating it might call foreign functions."""
    if task in LITERALS:
        return _is_literal(answer)
    return task not in FORMULAS or _is_formula(answer)


def _is_literal(answer: str) -> bool:
    """Return whether `eval` of the text does no more than make lists of constants. True if it is no Python at all."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return all(isinstance(part, PARTS_OF_LITERALS) for part in ast.walk(tree))


def _is_formula(answer: str) -> bool:
    """Return whether the text consists of numbers, operators, parentheses and names of mathematics."""
    if not re.fullmatch(r"[\s0-9A-Za-z_+\-*/^().,=!]*", answer, re.ASCII) or re.search(r"\.\s*[A-Za-z_]", answer):
        return False
    return all(re.fullmatch(r"[A-Za-z]\d*", name) or name in FUNCTIONS for name in re.findall(r"[A-Za-z_]\w*", answer))
