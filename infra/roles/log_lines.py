"""Log lines of all processes: one line per record, whatever outside text it quotes; repeated warnings at growing
intervals with a count.

TURNLOG_LOG_LEVEL sets the level. TURNLOG_LOG_FORMAT chooses text for people or JSON objects for a log store. (The
standard library's json does that in one method; python-json-logger would be a dependency and a second place that
defines the fields.)
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from turnlog.setting_types import SettingsError

OURS = ("turnlog", "__main__")
"""Loggers that use the configured level. Libraries log from WARNING on, unless the level is DEBUG: their INFO lines
report what they do, ours what it means."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Shortest and longest interval in seconds between two lines of the same text; it doubles each time."""
OVER_S = 120.0
"""Seconds without the text after which its next occurrence counts as a new outage."""
TEXTS = 256
"""Maximum number of texts remembered at once."""


def escape_controls(text: str) -> str:
    """Replace line breaks, control characters, terminal sequences and direction marks by Python escapes, so that quoted
    text cannot begin a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class OneLine(logging.Formatter):
    """Formats a record as time, level, logger and escaped message; the lines of a traceback follow indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the first line."""
        record.message = escape_controls(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Indent each line of the traceback, and escape it except for its line breaks."""
        return _indent_lines(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        """Format the stack as `formatException` does a traceback."""
        return _indent_lines(super().formatStack(stack_info))


SUBJECTS = ("session_id", "group_id")
"""Fields that say what a line is about, given by `extra=` or `about`."""
_process: dict[str, str] = {}
_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


def instance_of(role: str) -> str:
    """Return the instance name of this process: unique among live processes of the role, and stable over restarts if
    TURNLOG_INSTANCE is set."""
    return os.environ.get("TURNLOG_INSTANCE") or f"{role}-{socket.gethostname()}-{os.getpid()}"


def speaks(role: str, *, run: str, instance: str = "") -> None:
    """Set the identity of this process in all later JSON lines."""
    _process.update(role=role, instance=instance or instance_of(role), run=run)


def about(**subjects: str) -> None:
    """Set the session_id or group_id (SUBJECTS) of all later lines of this asyncio task and of the asyncio tasks that
    it starts."""
    _about.set({**_about.get(), **subjects})


class OneObject(logging.Formatter):
    """Formats a record as a JSON object: time (RFC 3339, UTC), level, logger, message, role, instance, run; if present,
    session_id, group_id, and the exception with its traceback as one string."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one ASCII line; JSON escapes stand for all other characters."""
        about_it = {**_about.get()} | {name: getattr(record, name) for name in SUBJECTS if hasattr(record, name)}
        time_ = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {
            "time": time_.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_process,
            **{name: str(about_it[name]) for name in SUBJECTS if name in about_it},
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = record.stack_info
        return json.dumps(said)


def is_json(env: Mapping[str, str]) -> bool:
    """Whether log lines are JSON objects. Raises SettingsError."""
    wanted = env.get("TURNLOG_LOG_FORMAT") or "text"
    if wanted not in ("text", "json"):
        raise SettingsError(f"TURNLOG_LOG_FORMAT must be one of text, json, got {wanted!r}")
    return wanted == "json"


@dataclass(slots=True)
class _RepeatState:
    """When a text was last logged and when it may be logged again, in seconds of the clock."""

    last: float
    next: float
    interval: float
    held: int = 0
    """Occurrences since the text was last logged."""


class RepeatFilter(logging.Filter):
    """Rate-limits warnings and errors of one logger with the same text: the first is logged at once, later ones at
    growing intervals with the number of occurrences meanwhile.

    An outage that a client meets fifty times a second takes a dozen lines in its first hour."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._told: OrderedDict[tuple[str, str], _RepeatState] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record; adds the count to one that stands for several."""
        if record.levelno < logging.WARNING:
            return True
        now, text = self._clock(), record.getMessage()
        told = self._told.get((record.name, text))
        if told is None or now - told.last > OVER_S:
            self._told[record.name, text] = _RepeatState(now, now + FIRST_S, FIRST_S)
            self._told.move_to_end((record.name, text))
            if len(self._told) > TEXTS:
                self._told.popitem(last=False)
            return True
        told.last = now
        told.held += 1
        if now < told.next:
            return False
        record.msg, record.args = f"{text} ({told.held} times in {told.interval:.0f} s)", None
        told.interval = min(told.interval * 2, LONGEST_S)
        told.next, told.held = now + told.interval, 0
        return True


def handler(stream: TextIO, clock: Callable[[], float] = time.monotonic, *, as_json: bool = False) -> logging.Handler:
    """Return a log handler with the format and the rate limit of all our processes."""
    lines = logging.StreamHandler(stream)
    lines.setFormatter(OneObject() if as_json else OneLine())
    lines.addFilter(RepeatFilter(clock))
    return lines


def begin(env: Mapping[str, str], stream: TextIO) -> None:
    """Send all loggers of this process to `stream` at the level and in the format that the environment sets. With JSON
    lines this includes warnings and uncaught exceptions of threads and the process. Raises SettingsError."""
    wanted, as_json = level(env), is_json(env)
    lines = handler(stream, as_json=as_json)
    logging.basicConfig(level=wanted if wanted == "DEBUG" else logging.WARNING, handlers=[lines])
    for name in OURS:
        logging.getLogger(name).setLevel(wanted)
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda ended: _log_uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)


def level(env: Mapping[str, str], default: str = "INFO") -> str:
    """Return the name of the configured level. Raises SettingsError."""
    wanted = (env.get("TURNLOG_LOG_LEVEL") or default).upper()
    if wanted not in logging.getLevelNamesMapping():
        raise SettingsError(f"TURNLOG_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {wanted!r}")
    return wanted


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log an uncaught exception, in place of the traceback that Python would print."""
    logging.getLogger("turnlog").critical("ended by %s", kind.__name__, exc_info=(kind, error or kind(), trace))


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {escape_controls(line)}" for line in text.split("\n"))
