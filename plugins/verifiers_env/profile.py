"""Harness profile of sessions that an environment of verifiers plays: its driver names the agent of every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATH_HEADER = "x-turnlog-agent-path"
"""Header that plugins/verifiers_env/driver.py adds: main, agent/NAME or side/NAME (docs/harnesses.md)."""


def verifiers(
    headers: Mapping[str, str], system: str, tools: Sequence[Any] | None, messages: Sequence[Any]
) -> str | None:
    """Return the path that the driver sent."""
    return headers.get(PATH_HEADER)
