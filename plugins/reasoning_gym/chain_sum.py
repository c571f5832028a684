"""A tiny policy to begin with, for sums and differences of one-digit numbers (task `chain_sum` of reasoning-gym).

Without a tool, the policy answers sums of two numbers: nearly half of the demonstrations are right; the others forget
how an answer is written, or use the wrong operator. With the calculator, it computes up to four numbers step by step:
it often stops after a step, or uses the wrong operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from turnlog.environments import Demonstration, Message
from turnlog.plugins.reasoning_gym.answers import AnswerFormat
from turnlog.plugins.reasoning_gym.calculator import calculate
from turnlog.plugins.reasoning_gym.process import reasoning_gym
from turnlog.plugins.recipes.warm_start import TinyWarmStart, demonstrate_call, imitating

UNFORMATTED, WRONG_OPERATOR = 0.4, 0.15
"""Shares of the demonstrations without a tool that give the bare number, and that exchange + and -."""
EARLY, WRONG_STEP = 0.25, 0.3
"""Shares of the steps with the calculator after which a demonstration answers too early, and that exchange + and -."""
OTHER: Final = {"+": "-", "-": "+"}
MOST_TERMS: Final = {False: 2, True: 4}
"""Number of terms that a tiny policy can add without and with the calculator."""


def warm_start(
    config: Mapping[str, Any], prompt: Callable[[str], str], python: str, *, tool: bool
) -> TinyWarmStart | None:
    """Return the warm start for this configuration; None if a tiny policy cannot learn it. `prompt` turns a question
    into the text of a prompt."""
    if config.get("max_digits") != 1 or config.get("max_terms", 6) > MOST_TERMS[tool] or config.get("allow_negation"):
        return None
    make = partial(_with_calculator if tool else _at_once, dict(config), prompt, python)
    return TinyWarmStart(make, r"[0-9+\-]")


def _question(
    config: dict[str, Any], prompt: Callable[[str], str], python: str, generator: random.Random
) -> tuple[Message, list[str]]:
    """Return a prompt, and the words of its expression: numbers and operators in turn."""
    entry = reasoning_gym(python).entry("chain_sum", {**config, "seed": 0, "size": 1}, generator.getrandbits(30))
    return {"role": "user", "content": prompt(entry["question"])}, entry["metadata"]["expression"].split()


def _at_once(
    config: dict[str, Any], prompt: Callable[[str], str], python: str, generator: random.Random
) -> Demonstration:
    question, words = _question(config, prompt, python, generator)
    flaw = generator.random()
    if UNFORMATTED < flaw < UNFORMATTED + WRONG_OPERATOR:
        words = [OTHER.get(word, word) for word in words]
    value = words[0]
    for operator, term in zip(words[1::2], words[2::2], strict=True):
        value = calculate(f"{value} {operator} {term}")
    said = value if flaw < UNFORMATTED else AnswerFormat.line.format_answer(value)
    return imitating([question, {"role": "assistant", "content": said}])


def _with_calculator(
    config: dict[str, Any], prompt: Callable[[str], str], python: str, generator: random.Random
) -> Demonstration:
    question, words = _question(config, prompt, python, generator)
    messages, value = [question], words[0]
    for operator, term in zip(words[1::2], words[2::2], strict=True):
        if len(messages) > 1 and generator.random() < EARLY:
            break
        used = OTHER[operator] if generator.random() < WRONG_STEP else operator
        expression = f"{value} {used} {term}"
        value = calculate(expression)
        messages += demonstrate_call("calculator", {"expression": expression}, value)
    messages.append({"role": "assistant", "content": AnswerFormat.line.format_answer(value)})
    return imitating(messages)
