"""The dashboard in a real Chromium: every view in dark and light, wide and narrow, by mouse and by keyboard, without an
error on the console, a serious finding of axe, or a request to anywhere else.

`make screenshots` has it write the pictures of docs/dashboard.md.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.browsed_run import (
    ARGUMENTS,
    CHROMIUM,
    LONG_TOKENS,
    LONG_TURNS,
    SEEN,
    WIDE,
    Served,
    first_view,
    tell_long,
)
from tests.fakes.told_run import ToldRun
from tests.unit.consumers.test_dashboard import hostile, view_of
from turnlog.consumers.index.reader import Index
from turnlog.infra.run_folder import lock_run, write_state
from turnlog.plugins.dashboard import export
from turnlog.plugins.dashboard.records import Vocabulary, session_tokens

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
except ImportError:
    CHROMIUM = None
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")

DOCS = Path(__file__).parents[3] / "docs"
WRITES = "TURNLOG_WRITE_SCREENSHOTS"
"""Set: pictures go where the documents show them."""
NARROW = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run of fourteen groups, a hostile session and a long one."""
    told = ToldRun(tmp_path_factory.mktemp("told"))
    folder = told.folder / "model"

    async def tell() -> None:
        await told.tell(14, more=lambda story: hostile(story, folder))
        await tell_long(told)

    asyncio.run(tell())
    write_state(told.folder, {"pid": os.getpid()})
    with lock_run(told.folder), Served(told) as found:
        yield found


@pytest.fixture(scope="module")
def browser(served: Served) -> Iterator[Browser]:
    """One Chromium. It begins last: while it is there, its loop is this thread's."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def faults() -> list[str]:
    """What a page complained of: each test ends with none."""
    return []


@pytest.fixture
def context(browser: Browser, request: pytest.FixtureRequest, faults: list[str]) -> Iterator[BrowserContext]:
    """A browser's memory of its own; `param` are its options."""
    found = browser.new_context(**{"viewport": WIDE, **getattr(request, "param", {})})
    yield found
    found.close()
    assert not faults


@pytest.fixture
def page(context: BrowserContext, served: Served, faults: list[str]) -> Page:
    """A tab that notes errors, dialogs and requests to elsewhere."""
    found = context.new_page()
    found.on(
        "console", lambda said: faults.append(f"console: {said.text}") if said.type in ("error", "warning") else None
    )
    found.on("pageerror", lambda error: faults.append(f"error: {error}"))
    found.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    found.on("request", lambda asked: None if is_own(asked.url, served) else faults.append(f"request: {asked.url}"))
    found.set_default_timeout(20_000)
    return found


def is_own(url: str, served: Served) -> bool:
    """Of the dashboard, or of an exported file itself."""
    return url.startswith((served.url + "/", "file:///", "data:image/png;base64,"))


def views(served: Served) -> dict[str, str]:
    """Each view by name."""
    row, cut = view_of(served.told).row, view_of(served.told, "fate = 'excluded'").row
    bad = view_of(served.told, "turns = 2 AND recipe LIKE '<img%'").row
    return {
        "run": "/", "sessions": "/sessions", "session": f"/sessions/{row.session_id}",
        "excluded": f"/sessions/{cut.session_id}", "hostile": f"/sessions/{bad.session_id}",
        "compare": f"/compare?left={row.session_id}&right={cut.session_id}", "group": f"/groups/{row.group_id}",
        "batches": "/batches", "batch": "/batches/0", "weights": "/weights", "dead letters": "/dead-letters",
        "sandboxes": "/sandboxes", "timeline": "/timeline",
        "against": "/against",
        "record": "/records/agent.turns/0/0", "login": "/login",
    }  # fmt: skip


def opened(page: Page, served: Served, name: str) -> Page:
    """A view, its tokens and its histogram there."""
    page.goto(served.url + views(served)[name])
    if name in ("session", "excluded", "hostile", "compare"):
        page.wait_for_selector(".tokens .t")
    if name == "sessions":
        page.wait_for_selector(".histogram")
    if name == "against":
        page.wait_for_selector("text=samples are the same")
    if name == "run":
        page.wait_for_selector("[aria-label=queues]")
    return page


@pytest.mark.parametrize("context", [{}, {"color_scheme": "dark"}, {"viewport": NARROW}], indirect=True,
                         ids=["light", "dark", "narrow"])  # fmt: skip
def test_every_view_is_whole_quiet_and_has_no_serious_finding_of_axe(
    page: Page, served: Served, context: BrowserContext, faults: list[str], request: pytest.FixtureRequest
) -> None:
    for name in views(served):
        if "dark" in request.node.callspec.id and name not in ("run", "sessions", "session", "excluded", "timeline"):
            continue  # the others are made of the same colours
        opened(page, served, name)
        across = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert across <= 0, (name, across)
        found = Axe().run(page).response["violations"]
        serious = [
            (one["id"], one["impact"], [node["target"] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious, (name, serious)
        assert not faults, (name, faults)


@pytest.mark.parametrize("context", [{"viewport": NARROW}], indirect=True, ids=["narrow"])
def test_rows_of_wide_tables_stay_low_on_a_telephone(page: Page, served: Served) -> None:
    for name in ("batches", "weights", "sandboxes"):
        opened(page, served, name)
        rows = "[...document.querySelectorAll('table.rows tbody tr')].map(row => row.getBoundingClientRect().height)"
        line = "parseFloat(getComputedStyle(document.querySelector('table.rows td')).lineHeight)"
        assert max(page.evaluate(rows)) < 4 * page.evaluate(line), name


def test_what_agents_wrote_runs_nowhere(page: Page, served: Served, faults: list[str]) -> None:
    for name in ("hostile", "sessions", "run", "compare", "sandboxes", "timeline"):
        opened(page, served, name)
        for fold in page.query_selector_all("details"):
            fold.evaluate("one => { one.open = true }")
        assert page.evaluate("document.querySelectorAll('script').length") == 1, name
        assert "javascript:" not in page.evaluate("[...document.links].map(link => link.protocol)")
    opened(page, served, "hostile").click("input[value=tokens]")
    assert "alert(1)" in page.inner_text(".tokens .prompt div")
    page.hover(".tokens .t")
    assert not faults


def test_a_token_tells_what_became_of_it_to_mouse_and_keyboard(page: Page, served: Served) -> None:
    opened(page, served, "session")
    page.hover("#turn-0 .out .t >> nth=2")
    tip = page.locator("#tip")
    for said in ("id ", "log-prob -", "trained in batch", "advantage", "segment 0", "entropy 0.", "turnlog log why "):
        expect(tip).to_contain_text(said)
    page.focus("#turn-0 .out")
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"):
        page.keyboard.press(key)
    expect(page.locator("#turn-0 .t.cur")).to_have_count(1)
    expect(tip).to_be_visible()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("scrollY") > 100
    page.keyboard.press("k")
    page.focus('.tree a[data-turn="5"]')
    expect(tip).to_contain_text("history_rewritten")
    page.keyboard.press("Enter")
    assert page.url.endswith("#turn-5")


def test_tokens_are_coloured_by_what_is_chosen_and_a_legend_says_how(page: Page, served: Served) -> None:
    opened(page, served, "session")
    expect(page.locator("#legend")).to_contain_text("length cut")
    for colour, legend in (
        ("log-prob", "≥ 99 %"), ("advantage", "0"), ("version", "version 0"), ("entropy", "≥ 0"), ("gap", "0.1 nats"),
        ("ratio", "1.5"), ("fate", "trained"),
    ):  # fmt: skip
        page.check(f"input[name=colour][value={colour}]")
        expect(page.locator("#legend")).to_contain_text(legend)
        styles = page.evaluate("[...document.querySelectorAll('#turn-0 .out .t')].map(one => one.className)")
        assert all(re.fullmatch(r"t (k-[a-z_]+|[qdv]\d|na)( special)?", style) for style in styles), styles
    page.check("input[name=show][value=messages]")
    expect(page.locator("#turn-0 .tokens")).to_be_hidden()
    page.check("input[name=show][value=tokens]")
    expect(page.locator("#turn-0 .said.user")).to_be_hidden()
    expect(page.locator("#turn-0 .prompt div")).to_contain_text("<|im_start|>user")


def test_two_sessions_stand_side_by_side_turn_by_turn_in_one_scale_of_colours(page: Page, served: Served) -> None:
    opened(page, served, "compare")
    page.wait_for_function("document.querySelectorAll('#side-1-turn-0 .t, #side-2-turn-0 .t').length > 2")
    for number in range(2):  # the other one ends early
        left, right = (page.locator(f"#side-{side}-turn-{number}").bounding_box() for side in (1, 2))
        assert left is not None
        assert right is not None
        assert (left["y"], left["x"] + left["width"] <= right["x"]) == (right["y"], True)
    expect(page.locator(".pair >> nth=2")).to_contain_text("no such turn in this session")
    expect(page.locator("#legend")).to_contain_text("|")
    page.hover("#side-2-turn-0 .out .t >> nth=2")
    expect(page.locator("#tip")).to_contain_text("masked: excluded outcome")
    why = page.locator("#tip").inner_text().split()[-1].partition(":")[0]
    assert why == page.locator(".pair .side >> nth=1").get_attribute("data-session")[:12]
    page.check("input[name=colour][value=log-prob]")
    for side in (1, 2):
        styles = page.evaluate(
            f"[...document.querySelectorAll('#side-{side}-turn-0 .out .t')].map(one => one.className)"
        )
        assert all(re.fullmatch(r"t q\d( special)?", style) for style in styles), styles
    page.check("input[name=show][value=messages]")
    expect(page.locator("#side-2-turn-0 .tokens")).to_be_hidden()
    page.keyboard.press("Escape")
    page.focus("#main")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("scrollY") > 100


def test_a_bar_of_the_histogram_and_the_form_choose_sessions(page: Page, served: Served) -> None:
    opened(page, served, "sessions")
    rows = page.locator("tbody tr")
    before = rows.count()
    page.click(".histogram a >> nth=0")
    page.wait_for_selector(".histogram .chosen")
    assert 0 < rows.count() < before
    assert page.input_value("[name=min_reward]")
    page.click("text=clear")
    page.select_option("[name=fate]", "excluded")
    page.click("button:has-text('Filter')")
    page.wait_for_url("**fate=excluded**")
    assert set(page.locator("tbody .fate").all_inner_texts()) == {"excluded"}
    page.click("th a:has-text('reward')")
    page.wait_for_selector("th[aria-sort=descending]:has-text('reward')")
    assert "fate=excluded" in page.url


def test_the_run_moves_while_it_is_looked_at(page: Page, served: Served) -> None:
    opened(page, served, "run")
    sessions = page.locator(".facts dd").last
    before = int(sessions.inner_text())
    expect(page.locator("#as-of.fresh")).to_be_visible()
    served.goes_on()
    expect(sessions).to_have_text(str(before + 1))
    queue = page.locator("[aria-label=queues] tr:has-text('assembler')")
    expect(queue).to_contain_text("agent.sessions", timeout=20_000)
    page.hover(".chart .hit >> nth=3")
    expect(page.locator("#tip")).to_contain_text("step 4")


def test_lanes_of_the_run_tell_to_mouse_and_keyboard_and_a_part_of_it_is_looked_at_closer(
    page: Page, served: Served
) -> None:
    opened(page, served, "timeline")
    tip = page.locator("#tip")
    page.hover(".timeline .span.v0 >> nth=1")
    expect(tip).to_contain_text("step")
    page.focus("a[aria-label^='engine-0']")
    expect(tip).to_contain_text("open requests")
    page.focus(".timeline a[href*='from='] >> nth=2")
    page.keyboard.press("Enter")
    page.wait_for_url("**/timeline?from=*")
    page.click("text=whole run")
    page.wait_for_url("**/timeline?from=*")
    expect(page.locator(".pages")).not_to_contain_text("wider")
    page.goto(f"{served.url}/batches/0")
    page.focus(".timeline a >> nth=0")
    expect(tip).to_contain_text("generation")


def test_a_link_logs_in_once_and_a_button_out(page: Page, served: Served) -> None:
    page.goto(served.link)
    page.click("text=Log out")
    expect(page.locator("text=Log out")).to_have_count(0)


@pytest.mark.parametrize("where", ["fate = 'trained' AND turns = 7", "turns = 2 AND recipe LIKE '<img%'"])
def test_an_exported_session_is_read_from_its_file_alone(
    page: Page, served: Served, tmp_path: Path, where: str
) -> None:
    view = view_of(served.told, where)

    async def exported() -> str:
        with Index.open(served.told.index) as index:
            own = Vocabulary(served.told.settings.model.path)
            return export.as_html(view, await session_tokens(served.told.run.role(), index, view, own))

    file = tmp_path / "session.html"
    file.write_text(in_a_thread(exported))
    page.goto(file.as_uri())
    page.hover("#turn-0 .out .t >> nth=2")
    expect(page.locator("#tip")).to_contain_text("log-prob")


def in_a_thread(work: Callable[[], Coroutine[None, None, str]]) -> str:
    """What it returns: a loop runs in this thread already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result(60)


def test_a_long_session_is_seen_at_once_and_its_tokens_come_as_they_are_looked_at(page: Page, served: Served) -> None:
    """How soon, I3 measures (benchmarks/i3_browser.py)."""
    row = view_of(served.told, "task_id = 'long'").row
    assert row.turns == LONG_TURNS
    assert row.context_tokens > LONG_TOKENS
    seen = first_view(page, f"{served.url}/sessions/{row.session_id}", SEEN)
    assert min(seen.values()) > 0
    drawn = page.evaluate("document.querySelectorAll('.out').length")
    assert drawn < LONG_TURNS / 2, "what is not looked at is not drawn"
    page.locator("#turn-99").scroll_into_view_if_needed()
    page.wait_for_selector("#turn-99 .out .t")


@pytest.mark.parametrize("context", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_pictures_are_taken_for_the_documents(
    page: Page, served: Served, tmp_path: Path, context: BrowserContext, request: pytest.FixtureRequest
) -> None:
    into = DOCS if os.environ.get(WRITES) else tmp_path
    dark = "dark" in request.node.callspec.id
    for name in ("session",) if dark else ("run", "session", "timeline"):
        opened(page, served, name)
        if name == "timeline":
            with Index.open(served.told.index) as index:
                (around,) = index.rows("SELECT min(time_ms) - 4000 AS first, max(time_ms) + 12000 AS last FROM steps")
            page.goto(f"{served.url}/timeline?from={around['first']}&to={around['last']}")
            page.hover(".timeline .span.v0 >> nth=2")
        if name == "session":
            page.check(f"input[name=colour][value={'log-prob' if dark else 'fate'}]")
            page.locator(f"#turn-{3 if dark else 0}").scroll_into_view_if_needed()
            page.hover(f"#turn-{4 if dark else 0} .out .t >> nth=9")
        file = into / f"dashboard-{name}{'-dark' if dark else ''}.png"
        whole = page.viewport_size or WIDE
        page.screenshot(path=file, clip={"x": 0, "y": 0, **whole, **({"height": 370} if name == "timeline" else {})})
        assert file.stat().st_size > 10_000
