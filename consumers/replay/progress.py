"""Progress of a replay, on screen and on disk.

A terminal shows a bar with rates and remaining time; other outputs get a plain line every few seconds. The state in
`runs/ID/replay/*.json` lets a killed replay resume where it stopped.

Each file belongs to one question (what is folded, from where, up to when, under which settings and code). It is removed
once the question is answered.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from turnlog.infra.roles.terminal import Terminal
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.ids import digest

FORMAT = 1


class ReplayState:
    """State of an unfinished replay: named sections of plain JSON values. Nothing is stored without a folder."""

    def __init__(self, folder: Path | None, question: Mapping[str, Any], *, every_s: float = 5.0) -> None:
        """`question` identifies the replay: a stored file is used only by a replay with an equal question. `every_s` is
        the minimum time between two saves in seconds."""
        text = canonical_text({"format": FORMAT, **question}, spaces=True)
        self.name = digest("replay", text)[:16]
        self._path = None if folder is None else folder / f"{self.name}.json"
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self.sections: dict[str, Any] = {}
        self.resumed = False

    def load(self, *, fresh: bool) -> None:
        """Read the state that an earlier attempt left, or delete it if `fresh`."""
        if self._path is None or not self._path.exists():
            return
        if fresh:
            self.remove()
            return
        try:
            self.sections = json.loads(self._path.read_text())
            self.resumed = True
        except ValueError:  # not caused by a kill, since the file is replaced atomically: start again
            self.remove()

    @property
    def due(self) -> bool:
        """True if it is time to save."""
        return self._path is not None and time.monotonic() - self._saved_at >= self._every_s

    def save(self) -> None:
        """Replace the file atomically."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        with part.open("w") as file:
            json.dump(self.sections, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)
        self._saved_at = time.monotonic()

    def remove(self) -> None:
        """Clear the sections and delete the file, once the question is answered."""
        self.sections = {}
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class ProgressReceiver:
    """Receiver of progress reports of a replay. This one shows nothing."""

    def begin(self, what: str, total: int) -> None:
        """Start a phase in which `total` records are read."""

    def advance(self, records: int, tokens: int = 0) -> None:
        """Report that `records` more records were read, and samples of `tokens` more tokens folded."""


class TerminalProgress(ProgressReceiver):
    """Prints progress to a terminal: a bar if it is interactive, else plain lines. Use as a context manager."""

    def __init__(self, console: Terminal, *, lines_every_s: float = 10.0) -> None:
        self._console = console
        self._every_s = lines_every_s
        self._bar: Any = None
        self._task: Any = None
        self._what = ""
        self._total = self._records = self._tokens = 0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, what: str, total: int) -> None:
        """See ProgressReceiver."""
        self.__exit__(None, None, None)
        self._what, self._total, self._records, self._tokens = what, max(total, 1), 0, 0
        self._began = self._said = time.monotonic()
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(what, total=self._total, rate="")
            self._bar.start()

    def advance(self, records: int, tokens: int = 0) -> None:
        """See ProgressReceiver."""
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
