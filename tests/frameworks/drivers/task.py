"""What every driver in Python has its framework do: two questions of one conversation, the first with a call."""

from __future__ import annotations

import json
import os

ADDRESS, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
SYSTEM = "You tell the weather."
ASKS = ("What is the weather in Oslo?", "Are you sure?")
_calls: list[list[object]] = []


def look_up(city: str, number: int, unit: str = "celsius") -> str:
    """Look the weather of a city up.

    Args:
        city: its name
        number: of its station
        unit: of the temperature
    """
    _calls.append([city, number, unit])
    return "9 degrees"


def weather(city: str) -> str:
    """Tell the weather of a city."""
    _calls.append([city])
    return "9 degrees"


TOOL = {"look_up": look_up, "weather": weather}[os.environ["TOOL"]]


def report(*answers: object) -> None:
    """Tell the test which calls ran and what was answered."""
    print(json.dumps({"calls": _calls, "answers": [str(answer) for answer in answers]}))
