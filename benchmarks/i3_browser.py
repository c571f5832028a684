"""I3: the first view of a session of 100 turns and 50 thousand tokens in a headless Chromium, to the colours of its
tokens.

Each view is of a browser that keeps nothing of the one before. The log is in memory, and a thread beside this one
serves. Beside it: until the conversation was painted. Floor in the same run: the page of the login painted, which shows
nothing of the run.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from row import percentile, say, size, told

from tests.fakes.browsed_run import ARGUMENTS, CHROMIUM, LONG_TURNS, PAINT, SEEN, WIDE, Served, first_view, tell_long
from tests.fakes.told_run import ToldRun
from turnlog.consumers.index.reader import Index

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TURNS, VIEWS = size((LONG_TURNS, 15), smallest=(4, 1))
GOAL_MS = 500.0


async def begun(folder: Path) -> tuple[ToldRun, str]:
    """A run of few groups, and its long session."""
    run = ToldRun(folder)
    await run.tell(2)
    return run, await tell_long(run, TURNS)


def viewed(browser: Browser, served: Served, session: str) -> dict[str, float]:
    """Milliseconds to what is seen of the session, and of the login."""
    found: dict[str, float] = {}
    for path, seen in (("/login", {"login": PAINT}), (f"/sessions/{session}", SEEN)):
        context = browser.new_context(viewport=WIDE)
        found |= first_view(context.new_page(), served.url + path, seen)
        context.close()
    return found


def main() -> int:
    """Measure; the exit status."""
    if CHROMIUM is None:
        raise SystemExit("no browser is installed (Debian: chromium; Playwright is of the extra dev)")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder:
        run, session = asyncio.run(begun(Path(folder)))
        with Index.open(run.index) as index:
            row = index.row("SELECT turns, context_tokens FROM sessions WHERE session_id = ?", session)
        assert row is not None
        with Served(run) as served, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
            viewed(browser, served, session)  # the browser's own beginning
            views = [viewed(browser, served, session) for _ in range(VIEWS)]
            browser.close()
    at = {name: [view[name] for view in views] for name in (*SEEN, "login")}
    for name, times in at.items():
        say(f"I3: {name} after {', '.join(f'{ms:.0f}' for ms in times)} ms")
    value = percentile(at["coloured"], 0.5)
    return told(
        id="I3", value=value, unit="ms", goal=GOAL_MS, floor=percentile(at["login"], 0.5), met=value <= GOAL_MS,
        detail={
            "floor_is": "the page of the login painted", "turns": row["turns"], "tokens": row["context_tokens"],
            "painted_ms": round(percentile(at["painted"], 0.5), 1), "slowest_ms": round(max(at["coloured"]), 1),
            "views": VIEWS,
        },
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
