"""Log lines of every process: one line is one record, whatever text from outside it quotes, and a warning that comes
again and again is said at growing intervals with its count.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

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


def handler(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> logging.Handler:
    """Writes lines as every process of ours writes them."""
    lines = logging.StreamHandler(stream)
    lines.setFormatter(OneLine())
    lines.addFilter(Repeats(clock))
    return lines


def begin(level: str, stream: TextIO) -> None:
    """Send every logger of this process to `stream`, from `level` on. Raises ValueError for no level."""
    wanted = level.upper()
    logging.basicConfig(level=wanted if wanted == "DEBUG" else logging.WARNING, handlers=[handler(stream)])
    for name in OURS:
        logging.getLogger(name).setLevel(wanted)


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))
