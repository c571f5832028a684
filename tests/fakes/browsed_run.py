"""A run of stories that a dashboard serves, for a Chromium that looks at it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.fakes.sessions import GroupName
from tests.fakes.stories import Story, repair
from tests.fakes.told_run import ToldRun
from turnlog.plugins.dashboard.server import link, serving
from turnlog.schemas.events import Event, FinishReason

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
try:
    from playwright.sync_api import Page
except ImportError:
    CHROMIUM = None
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
WIDE = {"width": 1280, "height": 860}
LONG_TURNS, LONG_TOKENS = 100, 50_000
PAINT = "first-contentful-paint"
SEEN = {"painted": PAINT, "coloured": "tokens"}
"""What the browser notes of a session's page: its conversation is there, and the tokens that are in sight."""


@dataclass
class Served:
    """A dashboard that serves in a thread with a loop of its own."""

    told: ToldRun
    url: str = ""
    link: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _ready: threading.Event = field(default_factory=threading.Event)
    _done: asyncio.Event | None = None

    def run(self) -> None:
        """The thread."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self.told.settings, self.told.connect(), against=[str(self.told.index)]) as (self.url, keys):
            self.link = link(keys, self.url)
            self._ready.set()
            await self._done.wait()

    def goes_on(self) -> None:
        """The run gets another session, and the index with it."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._more(), self._loop).result(30)

    async def _more(self) -> None:
        story = Story(self.told.named(77, 1), 0, np.random.default_rng(3), self.told.words)
        await self.told.run.append(repair(story, self.told.folder / "model", reward=1.0))
        await self.told.indexed()

    def __enter__(self) -> Served:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._done is not None
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30)


async def tell_long(told: ToldRun, turns: int = LONG_TURNS) -> str:
    """The run gets a long session, whose id it is, and the index with it."""
    story = Story(GroupName("run", "long", told.named(0, 1).floor, 1), 0, np.random.default_rng(8), told.words)
    await told.run.append(_long(story, told.folder / "model", turns))
    await told.run.fold()
    await told.indexed()
    return story.session_id


def _long(story: Story, folder: Path, turns: int) -> Iterator[Event]:
    """Of five hundred tokens a turn, as many of them sampled as not."""
    yield story.begun(folder, task="long")
    words = np.random.default_rng(5)
    text = TEXT.read_text().split()
    for number in range(turns):
        said, heard = (" ".join(words.choice(text, 49)) for _ in range(2))
        yield from story.said(
            [{"role": "user", "content": f"{number}: {heard}"}], {"role": "assistant", "content": said},
            base=story.turns[-1] if story.turns else None, finish=FinishReason.stop,
        )  # fmt: skip
    yield story.rewarded(1.0)
    yield story.finished()


TEXT = Path(__file__).parents[1] / "unit/consumers/test_dashboard_browser.py"
"""Its words take about five tokens each."""


NOTED = """names => new Promise(done => {
    const look = () => {
        const found = names.map(([key, name]) => [key, performance.getEntriesByName(name)[0]?.startTime]);
        if (found.every(([, time]) => time)) done(found); else setTimeout(look, 10);
    };
    look();
})"""
"""A function, which the policy of our pages lets ask again; `wait_for_function` would compile one."""


def first_view(page: Page, url: str, seen: Mapping[str, str]) -> dict[str, float]:
    """Open a page; milliseconds from then to what is seen of it, by the browser's own clock."""
    page.goto(url)
    return dict(page.evaluate(NOTED, list(seen.items())))
