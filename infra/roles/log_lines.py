"""Log lines of every process: one line is one record, whatever text from outside it quotes, and a warning that comes
again and again is said at growing intervals with its count.

TURNLOG_LOG_LEVEL says from which level on, TURNLOG_LOG_FORMAT whether a line is text for people or a JSON object for a
log store. (The standard library's json does that in one method: python-json-logger would bring a dependency and a
second way to say which fields there are.)
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
"""Loggers heard from the level that was asked for. Libraries are heard from WARNING on, unless that is DEBUG: their
INFO says what they do, ours says what it means."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Between two lines of one text; it doubles."""
OVER_S = 120.0
"""Without the text for so long, the next one is a new outage."""
TEXTS = 256
"""Texts remembered at once."""


def escaped(text: str) -> str:
    """Line breaks, control characters, terminal sequences and marks of direction as Python escapes: what is quoted
    cannot begin a line of its own."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class OneLine(logging.Formatter):
    """Time, level, logger and the escaped message; a traceback's lines stand indented below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line."""
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Escaped but for its own line breaks, each line indented."""
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        """As an exception's."""
        return _indented(super().formatStack(stack_info))


SUBJECTS = ("session_id", "group_id")
"""What a line may be about, from `extra=` or `about`."""
_process: dict[str, str] = {}
_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


def instance_of(role: str) -> str:
    """Unique among live processes of the role; stable over restarts where TURNLOG_INSTANCE is set."""
    return os.environ.get("TURNLOG_INSTANCE") or f"{role}-{socket.gethostname()}-{os.getpid()}"


def speaks(role: str, *, run: str, instance: str = "") -> None:
    """Which process this is, for every JSON line from now on."""
    _process.update(role=role, instance=instance or instance_of(role), run=run)


def about(**subjects: str) -> None:
    """What the lines of this task are about from now on, those of tasks that it starts included: session_id, group_id
    (SUBJECTS)."""
    _about.set({**_about.get(), **subjects})


class OneObject(logging.Formatter):
    """A JSON object: time (RFC 3339, UTC), level, logger, message, role, instance, run; where there are such,
    session_id and group_id, and the exception with its traceback as one string."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of ASCII: JSON's own escapes stand for whatever else a text has."""
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
    """Whether lines are JSON objects. Raises SettingsError."""
    wanted = env.get("TURNLOG_LOG_FORMAT") or "text"
    if wanted not in ("text", "json"):
        raise SettingsError(f"TURNLOG_LOG_FORMAT must be one of text, json, got {wanted!r}")
    return wanted == "json"


@dataclass(slots=True)
class _Told:
    """A text, when it was said last and when it may be said again, in seconds of the clock."""

    last: float
    next: float
    interval: float
    held: int = 0
    """Times that it came since it was said."""


class Repeats(logging.Filter):
    """Warnings and errors of one logger with one text: the first at once, then at growing intervals with how many came
    meanwhile. An outage that a client meets fifty times a second takes a dozen lines in its first hour."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is said; one that stands for others says so."""
        if record.levelno < logging.WARNING:
            return True
        now, text = self._clock(), record.getMessage()
        told = self._told.get((record.name, text))
        if told is None or now - told.last > OVER_S:
            self._told[record.name, text] = _Told(now, now + FIRST_S, FIRST_S)
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
    """Writes lines as every process of ours writes them."""
    lines = logging.StreamHandler(stream)
    lines.setFormatter(OneObject() if as_json else OneLine())
    lines.addFilter(Repeats(clock))
    return lines


def begin(env: Mapping[str, str], stream: TextIO) -> None:
    """Send every logger of this process to `stream`, as the environment asks; where lines are JSON, also warnings and
    what ends a thread or the process. Raises SettingsError."""
    wanted, as_json = level(env), is_json(env)
    lines = handler(stream, as_json=as_json)
    logging.basicConfig(level=wanted if wanted == "DEBUG" else logging.WARNING, handlers=[lines])
    for name in OURS:
        logging.getLogger(name).setLevel(wanted)
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _ended
        threading.excepthook = lambda ended: _ended(ended.exc_type, ended.exc_value, ended.exc_traceback)


def level(env: Mapping[str, str], default: str = "INFO") -> str:
    """The name of the level that is asked for. Raises SettingsError."""
    wanted = (env.get("TURNLOG_LOG_LEVEL") or default).upper()
    if wanted not in logging.getLevelNamesMapping():
        raise SettingsError(f"TURNLOG_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {wanted!r}")
    return wanted


def _ended(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """In place of a traceback that Python prints itself."""
    logging.getLogger("turnlog").critical("ended by %s", kind.__name__, exc_info=(kind, error or kind(), trace))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))
