"""How far a replay is: a bar with rates and remaining time on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol

from turnlog.infra.terminal import Terminal


class Progress(Protocol):
    """Told by whoever replays."""

    def begin(self, what: str, total: int) -> None:
        """`total` records are to be read."""
        ...

    def advance(self, records: int, tokens: int = 0) -> None:
        """So many more were read, and samples of so many tokens folded."""
        ...


class Silent:
    """See Progress. Says nothing."""

    def begin(self, what: str, total: int) -> None:
        """See Progress."""

    def advance(self, records: int, tokens: int = 0) -> None:
        """See Progress."""


class Shown:
    """See Progress. Use as a context."""

    def __init__(self, console: Terminal, *, lines_every_s: float = 10.0) -> None:
        self._console = console
        self._every_s = lines_every_s
        self._bar: Any = None
        self._task: Any = None
        self._what = ""
        self._total = self._records = self._tokens = 0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, what: str, total: int) -> None:
        self.__exit__(None, None, None)
        self._what, self._total, self._records, self._tokens = what, max(total, 1), 0, 0
        self._began = self._said = time.monotonic()
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(what, total=self._total, rate="")
            self._bar.start()

    def advance(self, records: int, tokens: int = 0) -> None:
        self._records += records
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._records, rate=self._rate(now))
        elif now - self._said >= self._every_s:
            self._said = now
            left = (now - self._began) * max(self._total - self._records, 0) / max(self._records, 1)
            share = min(self._records / self._total, 1)
            self._console.print(
                f"{self._what}: {share:.0%}, {self._rate(now)}, about {left:.0f} s left", highlight=False
            )

    def _rate(self, now: float) -> str:
        seconds = max(now - self._began, 1e-3)
        tokens = f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
        return f"{self._records / seconds:,.0f} records/s{tokens}"


def _bar(console: Terminal) -> Any:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
