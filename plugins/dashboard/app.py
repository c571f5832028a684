"""Routes and pages of the dashboard. Each answer shows one moment of the index and names it.

Pages of the index are rendered in threads, each with its own connection. A page's script then requests what has to be
read from the log (records.Records).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode

import orjson
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from turnlog.consumers.audit import AuditFilter, newest_entries
from turnlog.consumers.dead_letters import FOLDED, PLACE, LetterError
from turnlog.consumers.index import (
    BadQuestion,
    IndexFailure,
    NoIndex,
    RecordGone,
)
from turnlog.consumers.index.fate import of_session
from turnlog.consumers.index.flags import across, flagged_sessions, flags_of
from turnlog.consumers.index.influence import influence
from turnlog.consumers.index.lineage import LineageReader, index_beside
from turnlog.consumers.index.lineage_text import (
    CHAIN_COLUMNS,
    chain_rows,
    headline,
    influence_lines,
    lines_of,
    share_label,
)
from turnlog.consumers.index.reader import AsOf, Index, SessionView, where_of, whole
from turnlog.consumers.index.search import SORTS, SessionFilter
from turnlog.infra.access.audit import AuditTrail
from turnlog.infra.archive import ReadOnlyArchive
from turnlog.infra.roles.role import Role
from turnlog.plugins.alarms import STANDS
from turnlog.plugins.dashboard import CachedQuery, Refused, Unknown, drawing, harmless, require_found
from turnlog.plugins.dashboard.comparison import Other, diff_settings, differences, settings_of
from turnlog.plugins.dashboard.conversation import align_turns, conversation, prompts, said_alike
from turnlog.plugins.dashboard.guard import Keys, checked_form
from turnlog.plugins.dashboard.notes import RUN, Note, Notes
from turnlog.plugins.dashboard.overview import (
    StepWindow,
    beside,
    engines,
    is_supervised,
    of_batches,
    overview,
    step_metrics,
)
from turnlog.plugins.dashboard.queues import Queues
from turnlog.plugins.dashboard.records import Records
from turnlog.plugins.dashboard.rights import RIGHTS, Right
from turnlog.plugins.dashboard.sandboxes import WorkerPools, sandboxes
from turnlog.plugins.dashboard.swimlanes import swimlanes
from turnlog.plugins.dashboard.timeline import timeline
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.events import Outcome
from turnlog.schemas.events.batches import LOGPROB_GAP_MAX, gaps_of_kinds
from turnlog.settings import IndexSettings, RunSettings, Settings

STATIC = Path(__file__).parent / "static"
EVERY_S = 1.0
"""Minimum seconds between two checks of the index for live pages, and so between two notifications."""
STREAMS = 32
"""Maximum number of live pages at a time."""
PAGE = 50
AUDITED = 200
"""Number of records of the audit trail on its page."""
EXPORTS = {"html": "html", "json": "json", "trace": "jsonl"}
"""Format of a session -> ending of its file; `turnlog log session export` also writes formats of several files."""
MOST_FLAGGED = 200
"""Maximum number of flagged sessions on a page."""
MOST_OF_A_PROMPT = 200
"""Maximum length of a prompt in a list, in characters."""
WITHIN_S = 10.0
"""Seconds after which a query of the index is given up."""
OUTCOMES = tuple(outcome.value for outcome in Outcome if outcome is not Outcome.unknown)
FATES = (
    "trained", "open", "unscored", "not_member", "excluded", "discarded", "not_training", "masked", "waiting",
    "dropped", "drawn", "step_skipped",
)  # fmt: skip
STATUS: Mapping[type[Exception], int] = {
    Unknown: 404, BadQuestion: 400, RecordGone: 410, LetterError: 409, ReadOnlyArchive: 409, UndecodableRecord: 422,
}  # fmt: skip
RECIPES = """WITH RECURSIVE found(name) AS (SELECT min(recipe) FROM sessions UNION ALL
    SELECT (SELECT min(recipe) FROM sessions WHERE recipe > name) FROM found WHERE name IS NOT NULL)
    SELECT name FROM found WHERE name IS NOT NULL LIMIT 100"""

Number = TypeVar("Number", int, None)
ExportSession = Callable[[Role, Index, SessionView, str, str], Awaitable[tuple[Mapping[str, bytes], Sequence[str]]]]
"""Returns the files of a session in a format by name, and notes on what is missing."""


async def read_as_of(look: Callable[[], AsOf]) -> AsOf | IndexFailure:
    """Return how far the index has read, or the error that prevents it."""
    try:
        return await asyncio.to_thread(look)
    except IndexFailure as error:
        return error


class LivePageStream(StreamingResponse):
    """Event stream of a live page. It stays in `tabs` from its creation until its answer ends for any reason, because
    the client may be gone before the first event."""

    def __init__(self, events: AsyncIterator[str], tabs: set[object]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._tabs = tabs
        tabs.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._tabs.discard(self)


class Pages:
    """All pages of one run."""

    def __init__(
        self,
        run: str,
        index: Path,
        records: Records,
        stopping: asyncio.Event,
        *,
        hint: str = "",
        streams: int = STREAMS,
        every_s: float = EVERY_S,
        within_s: float = WITHIN_S,
        against: Mapping[str, Other] = MappingProxyType({}),
        pools: WorkerPools,
        directory: Path,
        trail: AuditTrail,
        keys: Keys,
        export: ExportSession,
    ) -> None:
        """`hint` says how to build the run's index, for visitors who find none. `streams` limits live pages; `every_s`
        is the time between two checks of the index for them. `within_s` limits a query of the index. `against` maps
        names to the runs that this run is compared with. `pools` are those of its sandbox workers. `directory` is the
        run's folder, which shows whether its processes are alive. `keys` ends logins; `export` makes the files of a
        session."""
        self._against = against
        self._alive = partial(is_supervised, directory)
        self._run = run
        self._own = Settings(run=RunSettings(id=run, directory=str(directory)), index=IndexSettings(path=str(index)))
        self._notes = Notes(index)
        self._streams = streams
        self._within_s = within_s
        self._index = index
        self._records = records
        self._queues, self._pools = Queues(records), pools
        self._trail, self._keys, self._export = trail, keys, export
        self._stopping, self._tabs = stopping, set[object]()
        self._looks, self._every_s = CachedQuery(lambda: read_as_of(self._as_of)), every_s
        self._hint = hint
        self._templates = harmless.environment()
        self._templates.filters.update(filters())
        self._templates.globals.update(asset=asset, outcomes=OUTCOMES, fates=FATES)
        for name in self._templates.list_templates():  # compile now, so that no visitor waits for it
            self._templates.get_template(name)

    def application(self) -> Starlette:
        """Return the application behind the guard."""
        answers: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", path): answer for path, answer in {
                "/": self.run, "/sessions": self.sessions, "/sessions/histogram": self.histogram,
                "/sessions/total": self.total, "/sessions/{id}": self.session, "/sessions/{id}/tokens": self.tokens,
                "/sessions/{id}/images/{name}": self.image, "/sessions/{id}/export/{form}": self.export,
                "/compare": self.compare, "/groups/{id}": self.group, "/batches": self.batches,
                "/batches/{number}": self.batch, "/weights": self.weights, "/dead-letters": self.dead_letters,
                "/records/{topic}/{partition}/{offset}": self.record, "/live": self.live, "/login": self.login,
                "/queues": self.queues, "/sandboxes": self.sandboxes, "/sandboxes/pools": self.pools,
                "/timeline": self.timeline, "/against": self.against, "/against/{name}": self.against,
                "/against/{name}/samples": self.differences, "/audit": self.audit, "/cheating": self.cheating,
                "/lineage": self.lineage,
            }.items()
        }  # fmt: skip
        answers |= {
            ("POST", "/dead-letters/requeue"): self.requeue, ("POST", "/dead-letters/skip"): self.skip,
            ("POST", "/notes"): self.note, ("POST", "/logins/end"): self.end_logins,
        }  # fmt: skip
        return Starlette(
            routes=[
                *(
                    Route(path, self._speaking(answer, RIGHTS[method, path]), methods=[method])
                    for (method, path), answer in answers.items()
                ),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            exception_handlers={404: self.not_there, 405: self.not_there},
        )

    def _speaking(self, answer: Callable[..., Any], right: Right) -> Callable[[Request], Awaitable[Response]]:
        """Wrap an endpoint so that only those who have its right get an answer, which is audited first, and so that
        turnlog's errors become pages that say what is wrong and what to do."""

        async def answer_or_failure(request: Request) -> Response:
            try:
                await self._require(request, right)
                if asyncio.iscoroutinefunction(answer):
                    return cast(Response, await answer(request))
                return cast(Response, await asyncio.to_thread(answer, request))
            except Exception as error:
                if not type(error).__module__.startswith("turnlog."):
                    raise
                return self._failure(request, error)

        return answer_or_failure

    async def _require(self, request: Request, right: Right) -> None:
        """Check the form of a POST and that the visitor has the right, and record the access. Raises Refused,
        AuditUnavailable."""
        person = request.state.visitor.person
        allowed = person.may(right.role)
        request.state.form = await checked_form(request) if request.method == "POST" else {}
        if right.kind:
            await self._trail.record(person, right.attempt(request, request.state.form, allowed=allowed))
        if not allowed:
            raise Refused(
                403, f"this needs the role {right.role}, and {person.described} has the role {person.role}: ask the "
                "owner of the run"
            )  # fmt: skip

    def run(self, request: Request) -> Response:
        """Serve the overview of the run."""
        first, last = (_whole(request, name, None) for name in ("from", "to"))
        window = StepWindow(first, last, _smoothing(request), "all" in request.query_params)
        with self._open_index() as index:
            found = overview(index, window, alive=self._alive())
        view = {"smooth": request.query_params.get("smooth", ""), "first": window.first, "last": window.last}
        return self._page(request, "run.html", found.as_of, of=found, live=True, view=view, note=self._note(RUN))

    def sessions(self, request: Request) -> Response:
        """Serve a page of sessions."""
        wanted, asked = self._filter(request)
        sort = request.query_params.get("sort", "started_ms")
        descending = request.query_params.get("order", "desc") != "asc"
        with self._open_index() as index:
            page = index.sessions(
                wanted, sort=sort, descending=descending, after=request.query_params.get("after"), limit=PAGE
            )
            recipes = [row["name"] for row in index.rows(RECIPES)]
            names = [row.session_id for row in page.rows]
            told = prompts(index, names, most=MOST_OF_A_PROMPT)
            (counted,) = index.rows("SELECT count(*) AS n FROM sessions")
        total = None if asked else counted["n"]
        kept = {**asked, "sort": sort, "order": "desc" if descending else "asc"}
        return self._page(
            request, "sessions.html", page.as_of, page=page, asked=asked, sort=sort, descending=descending,
            sorts=SORTS, recipes=recipes, prompts=told, total=total,
            link=lambda **more: "/sessions?" + urlencode({**kept, **more}),
            bars="/sessions/histogram?" + urlencode(asked), counts="/sessions/total?" + urlencode(asked),
            notes=self._notes.about(names), tags=self._notes.tags(),
        )  # fmt: skip

    def cheating(self, request: Request) -> Response:
        """Serve the flagged sessions."""
        detector = request.query_params.get("detector", "")
        with self._open_index() as index, index.snapshot() as as_of:
            found = flagged_sessions(index, detector=detector, limit=MOST_FLAGGED)
        if detector and detector not in found.detectors:
            raise Unknown(f"detector {detector!r}: [cheating] detectors did not name it when the index was made")
        return self._page(request, "cheating.html", as_of, of=found, detector=detector)

    def histogram(self, request: Request) -> Response:
        """Serve the reward histogram of the sessions that pass, without the filter on rewards. Each bar links to its
        range."""
        wanted, asked = self._filter(request, but=("min_reward", "max_reward"))
        chosen = {"min_reward", "max_reward"} & set(request.query_params)
        with self._open_index() as index:
            found = index.rewards(wanted)

        def href(least: float, most: float) -> str:
            return "/sessions?" + urlencode({**asked, "min_reward": f"{least:.6g}", "max_reward": f"{most:.6g}"})

        return HTMLResponse(drawing.histogram(found.bins, href, bool(chosen), sample=found.sample))

    def total(self, request: Request) -> Response:
        """Serve the number of sessions that pass. It is a separate request, so that the page of sessions does not wait
        for it."""
        wanted, _ = self._filter(request)
        with self._open_index() as index:
            found, every = index.total(wanted)
        return HTMLResponse(drawing.number(found) if every else f"{drawing.number(found)} or more")

    async def note(self, request: Request) -> Response:
        """Replace the note and tags of the run or of a session."""
        fields = request.state.form
        subject, tags = fields.get("subject", RUN), fields.get("tags", "").split(",")
        await asyncio.to_thread(self._say, subject, fields.get("text", ""), tags)
        return RedirectResponse(f"/sessions/{quote(subject, safe='')}" if subject else "/", 303)

    def _say(self, subject: str, text: str, tags: list[str]) -> None:
        if subject != RUN:
            with self._open_index() as index:
                require_found(index.row("SELECT 1 FROM sessions WHERE session_id = ?", subject), f"session {subject}")
        self._notes.write(subject, text, tags, at_ms=time.time_ns() // 1_000_000)

    def _note(self, subject: str) -> Note:
        return self._notes.about([subject]).get(subject, Note())

    def session(self, request: Request) -> Response:
        """Serve a session; its tokens are requested once the page is loaded."""
        name = request.path_params["id"]
        with self._open_index() as index:
            view = require_found(index.session(name), f"session {name}")
            flags = [*flags_of(index, name), *across(index).get(name, ())]
            siblings = index.rows(
                "SELECT session_id, rollout_index, attempt, reward, fate FROM sessions WHERE group_id = ? "
                "ORDER BY rollout_index, attempt LIMIT 100",
                view.row.group_id,
            )
        talk = conversation(view)
        return self._page(
            request, "session.html", view.as_of, view=view, talk=talk, tree=drawing.tree(talk), chain=of_session(view),
            siblings=siblings, exported=None, note=self._note(name), flags=flags,
        )  # fmt: skip

    async def tokens(self, request: Request) -> Response:
        """Serve a session's tokens as JSON (docs/dashboard.md)."""
        return Response(await self._records.tokens(request.path_params["id"]), media_type="application/json")

    async def export(self, request: Request) -> Response:
        """Serve a session as a file of the formats that are one file."""
        name, form = request.path_params["id"], request.path_params["form"]
        if form not in EXPORTS:
            raise Unknown(f"there is no format {form[:50]!r}; formats are {', '.join(EXPORTS)}")
        role = await self._records.open_role()
        with self._open_index() as index, index.snapshot():
            view = require_found(index.session(name), f"session {name}")
            file = f"{quote(name, safe='')}.{EXPORTS[form]}"
            files, _ = await self._export(role, index, view, form, file)
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(file, safe='')}"}
        return Response(files[file], headers=headers, media_type="application/octet-stream")

    def image(self, request: Request) -> Response:
        """Serve a raster image from a message of the session."""
        with self._open_index() as index:
            view = index.session(request.path_params["id"])
        content = None if view is None else conversation(view).images.get(request.path_params["name"])
        kind = None if content is None else harmless.raster(content)
        if content is None or kind is None:
            raise Unknown("no message of the session contains this image")
        return Response(content, media_type=kind)

    def compare(self, request: Request) -> Response:
        """Serve two sessions side by side."""
        sides = []
        with self._open_index() as index, index.snapshot() as as_of:
            for side in ("left", "right"):
                name = request.query_params.get(side, "")
                view = index.session(name)
                if view is None:
                    raise Unknown(f"{side}: the index has no session {name!r}")
                sides.append((view, conversation(view)))
        pairs = align_turns(*(talk.turns for _, talk in sides))
        differ = next((at for at, (left, right) in enumerate(pairs) if not said_alike(left, right)), None)
        return self._page(request, "compare.html", as_of, sides=sides, pairs=pairs, differ=differ)

    def group(self, request: Request) -> Response:
        """Serve a group."""
        name = request.path_params["id"]
        with self._open_index() as index:
            found = require_found(index.group(name), f"group {name}")
            drawn = index.rows("SELECT batch_index, draw_index FROM batch_groups WHERE group_id = ?", name)
            told = prompts(index, [row.session_id for row in found.sessions[:1]])
        by_reward = sorted(found.sessions, key=lambda row: -math.inf if row.reward is None else row.reward)
        ends = [row.session_id for row in (*by_reward[-1:], *by_reward[:1])]
        best, worst = ends or ("", "")
        return self._page(
            request, "group.html", found.as_of, of=found, drawn=drawn, prompt=next(iter(told.values()), ""), best=best,
            worst=worst,
        )  # fmt: skip

    def batches(self, request: Request) -> Response:
        """Serve the list of batches, newest first."""
        before = _whole(request, "before", 2**62)
        with self._open_index() as index, index.snapshot() as as_of:
            rows = index.rows(
                "SELECT b.*, s.step, s.loss, s.reward_mean, s.skipped AS step_skipped FROM batches b LEFT JOIN steps s "
                "ON s.batch_index = b.batch_index WHERE b.batch_index < ? ORDER BY b.batch_index DESC LIMIT ?",
                before, PAGE + 1,
            )  # fmt: skip
        return self._page(request, "batches.html", as_of, rows=rows[:PAGE], more=len(rows) > PAGE)

    def batch(self, request: Request) -> Response:
        """Serve a batch."""
        number = whole("batch", request.path_params["number"])
        with self._open_index() as index, index.snapshot():
            found = require_found(index.batch(number), f"batch {number}")
            drawn = timeline(index, found, whole="all" in request.query_params)
            after = index.row("SELECT min(version) AS version FROM versions WHERE batch_index >= ?", number)
        version = None if after is None else after["version"]
        gaps = gaps_of_kinds(step_metrics(found.step), LOGPROB_GAP_MAX) if found.step else {}
        return self._page(request, "batch.html", found.as_of, of=found, timeline=drawn, gaps=gaps, version=version)

    def weights(self, request: Request) -> Response:
        """Serve the published versions, and the engines with what they loaded."""
        with self._open_index() as index, index.snapshot() as as_of:
            versions, _ = index.versions()
            found = engines(index, alive=self._alive())
        return self._page(request, "weights.html", as_of, versions=list(reversed(versions)), engines=found)

    def lineage(self, request: Request) -> Response:
        """Serve what made a weight version (the newest, if none is named), or what a session has influenced."""
        if session := request.query_params.get("session"):
            with self._open_index() as index:
                found = require_found(influence(index, session, self._own), f"session {session}")
            return self._page(request, "influence.html", found.as_of, of=found, lines=list(influence_lines(found)))
        version, since = (_whole(request, name, None) for name in ("weights", "since"))
        with LineageReader.open(index_beside(self._own), within_s=self._within_s) as reader:
            made = reader.weights(self._run, version, since)
        return self._page(
            request, "lineage.html", made.runs[0].as_of, of=made, headline=headline(made), columns=CHAIN_COLUMNS,
            share_label=share_label, rows=[row for part in made.runs for row in chain_rows(part)],
            lines=list(lines_of(made)),
        )  # fmt: skip

    def sandboxes(self, request: Request) -> Response:
        """Serve tool calls by status and reason."""
        asked = {name: text for name in ("status", "reason") if (text := request.query_params.get(name)) is not None}
        sort, after = request.query_params.get("sort", "duration_s"), request.query_params.get("after")
        with self._open_index() as index:
            found = sandboxes(index, asked.get("status", ""), asked.get("reason"), sort=sort, after=after)
        return self._page(
            request, "sandboxes.html", found.as_of, of=found, asked=asked, sort=sort,
            link=lambda **more: "/sandboxes?" + urlencode(more),
        )  # fmt: skip

    def timeline(self, request: Request) -> Response:
        """Serve a window of the run as lanes over wall time."""
        first, last = (_whole(request, name, None) for name in ("from", "to"))
        with self._open_index() as index:
            found = swimlanes(index, first, last)
            as_of = index.as_of() if found is None else found.as_of
        return self._page(request, "timeline.html", as_of, of=found)

    def against(self, request: Request) -> Response:
        """Serve settings and curves of the run beside another one. The samples that differ are a separate request."""
        name = request.path_params.get("name", next(iter(self._against), ""))
        with self._open_index() as index, index.snapshot() as as_of:
            if not name:
                return self._page(request, "against.html", as_of, name=name, others=(), charts=(), settings=())
            other = require_found(self._against.get(name), f"run or refold {name!r} to compare with")
            ours = settings_of(index)
            runs = {each: run.series() for each, run in self._against.items() if run.is_run and other.is_run}
            charts = beside(index.series()[0], runs) if runs else ()
            settings = diff_settings(ours, other.settings(ours))
        return self._page(
            request, "against.html", as_of, name=name, others=tuple(self._against), charts=charts, settings=settings
        )

    def differences(self, request: Request) -> Response:
        """Serve the samples that differ: a part of a page, because it reads all samples."""
        name = request.path_params["name"]
        other = require_found(self._against.get(name), f"run or refold {name!r} to compare with")
        with self._open_index() as index:
            found = differences(index, other)
        return self._page(
            request, "differences.html", None, of=found, name=name, charts=of_batches(found.batches, name)
        )

    def dead_letters(self, request: Request) -> Response:
        """Serve the dead letters, and the records that are in no table."""
        after = _whole(request, "after", -1)
        with self._open_index() as index, index.snapshot() as as_of:
            letters, _ = index.dead_letters(after=after, limit=PAGE + 1)
            unread = index.rows("SELECT * FROM unread ORDER BY time_ms DESC LIMIT ?", PAGE)
        done, at = (request.query_params.get(name, "") for name in ("done", "at"))
        said = f"{at}: {done}" if done in ("put back", "passed over") and PLACE.fullmatch(at) else ""
        more = letters[PAGE - 1]["place"] if len(letters) > PAGE else None
        return self._page(
            request,
            "dead-letters.html",
            as_of,
            letters=letters[:PAGE],
            more=more,
            unread=unread,
            folded=FOLDED,
            done=said,
        )

    async def requeue(self, request: Request) -> Response:
        """Append the record of a dead letter to its topic again."""
        fields = request.state.form
        place, offset = await self._records.requeue(fields.get("letter", ""))
        return _redirect_done("put back", f"{place.topic}[{place.number}]@{offset}")

    async def skip(self, request: Request) -> Response:
        """Order the assembler to skip a record."""
        fields = request.state.form
        reason = fields.get("reason", "").strip() or "passed over in the dashboard"
        await self._records.skip(fields.get("place", ""), reason)
        return _redirect_done("passed over", fields["place"])

    async def record(self, request: Request) -> Response:
        """Serve a record of the log."""
        place = request.path_params
        partition, offset = (whole(name, place[name]) for name in ("partition", "offset"))
        body = await self._records.record(place["topic"], partition, offset)
        with self._open_index() as index:
            as_of = index.as_of()
        text = orjson.dumps(body["event"], option=orjson.OPT_INDENT_2).decode()
        return self._page(request, "record.html", as_of, body=body, text=text)

    async def live(self, request: Request) -> Response:
        """Serve server-sent events: `moved` when the index has read on, at most once per `every_s`."""
        if len(self._tabs) >= self._streams:
            raise Refused(503, f"{self._streams} pages are already live: close one, then reload this one")
        return LivePageStream(self._moves(request), self._tabs)

    async def _moves(self, request: Request) -> AsyncIterator[str]:
        last = -1
        while not self._stopping.is_set() and not await request.is_disconnected():
            found = await self._looks.within(self._every_s)
            if isinstance(found, IndexFailure):
                yield f"event: lost\ndata: {orjson.dumps(harmless.visible(str(found))).decode()}\n\n"
            elif found.written_ms != last:
                first, last = last == -1, found.written_ms
                yield f"event: {'here' if first else 'moved'}\ndata: {orjson.dumps(drawing.clock(last)).decode()}\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._stopping.wait()

    def _as_of(self) -> AsOf:
        with self._open_index() as index:
            return index.as_of()

    async def queues(self, request: Request) -> Response:
        """Serve the unread records of each role: a part of the first page that arrives once the log has answered."""
        return self._page(request, "queues.html", None, of=await self._queues.look(), line=STANDS)

    async def pools(self, request: Request) -> Response:
        """Serve the state of the sandbox workers: a part of the page of tool calls that arrives once they have
        answered."""
        return self._page(request, "pools.html", None, of=await self._pools.look())

    async def audit(self, request: Request) -> Response:
        """Serve the newest records of the audit trail."""
        asked = AuditFilter(request.query_params.get("subject", ""), request.query_params.get("kind", ""))
        entries = await newest_entries(await self._records.open_role(), asked, most=AUDITED)
        return self._page(request, "audit.html", None, entries=entries, asked=asked)

    async def end_logins(self, request: Request) -> Response:
        """End all logins of a subject."""
        fields = request.state.form
        subject = fields.get("subject", "")
        if not subject:
            raise BadQuestion("subject: name whose logins to end")
        self._keys.end_all(subject)  # in the loop, as all changes of that file
        return RedirectResponse("/audit?" + urlencode({"subject": subject}), 303)

    def login(self, request: Request) -> Response:
        """Serve the page that explains how to get a login link."""
        return self._page(request, "login.html", None)

    async def not_there(self, request: Request, _: Exception) -> Response:
        """Answer for an unknown address."""
        return self._failure(request, Unknown(f"{request.url.path}: there is no such page"))

    def _filter(self, request: Request, *, but: tuple[str, ...] = ()) -> tuple[SessionFilter, dict[str, str]]:
        """Return the filter that the form describes, and its non-empty fields. Raises BadQuestion."""
        kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(
            ("recipe", "task_id", "group_id", "outcome", "fate", "text"), str
        )
        kinds |= {name: partial(whole, name) for name in ("min_version", "max_version", "batch_index")}
        kinds |= {"min_reward": float, "max_reward": float, "failed_calls": bool}
        values, asked = {}, {}
        for name, kind in kinds.items():
            text = request.query_params.get(name, "").strip()
            if not text or name in but:
                continue
            try:
                values[name], asked[name] = kind(text), text
            except ValueError:
                raise BadQuestion(f"{name}: {text!r} is not a number") from None
        if tag := request.query_params.get("tag", "").strip():
            asked["tag"], values["sessions"] = tag, tuple(self._notes.tagged_sessions(tag))
        return SessionFilter(**values), asked

    def _failure(self, request: Request, error: Exception) -> Response:
        """Render an error. Errors that the request did not cause get status 503, because it may succeed later."""
        known = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 503)
        status = error.status if isinstance(error, Refused) else known
        if request.url.path.endswith(("/tokens", "/live", "/histogram", "/total", "/queues", "/samples")):
            unknown = "unknown: " if request.url.path == "/queues" else ""
            said = harmless.visible(f"{unknown}{type(error).__name__}: {error}")
            return Response(orjson.dumps({"error": said}), status, media_type="application/json")
        hint = self._hint if isinstance(error, NoIndex) else ""
        kind = type(error).__name__
        return self._page(request, "failure.html", None, status=status, kind=kind, error=error, hint=hint)

    @contextlib.contextmanager
    def _open_index(self) -> Iterator[Index]:
        with Index.open(self._index, within_s=self._within_s) as index:
            yield index

    def _page(
        self, request: Request, template: str, as_of: AsOf | None, *, status: int = 200, **about: Any
    ) -> Response:
        context = {"live": False, "path": request.url.path, "visitor": request.state.visitor, "as_of": as_of,
                   "run_id": self._run, **about}  # fmt: skip
        return HTMLResponse(self._templates.get_template(template).render(context), status)


def _redirect_done(what: str, place: str) -> Response:
    return RedirectResponse("/dead-letters?" + urlencode({"done": what, "at": place}), 303)


def _smoothing(request: Request) -> float:
    """Parse the smoothing weight. Raises BadQuestion."""
    text = request.query_params.get("smooth", "") or "0"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise BadQuestion(f"smooth: {text!r} is not a number from 0 to less than 1")
    return value


def _whole(request: Request, name: str, otherwise: Number) -> int | Number:
    """Parse an integer parameter. Raises BadQuestion."""
    text = request.query_params.get(name, "")
    return whole(name, text) if text else otherwise


def moment(ms: int | None) -> Markup:
    """Format a time in a table, without its year."""
    if not ms:
        return Markup("–")
    short = time.strftime("%m-%d %H:%M:%S", time.gmtime(ms / 1000))
    return Markup('<time title="{}">{}</time>').format(drawing.clock(ms), short)


def record_link(place: int | str) -> Markup:
    """Return a link to a record, by its place or its topic[partition]@offset."""
    said = where_of(place) if isinstance(place, int) else place
    topic, _, rest = said.partition("[")
    partition, _, offset = rest.partition("]@")
    return Markup('<a class="at" href="/records/{}/{}/{}">{}</a>').format(topic, partition, offset, said)


def filters() -> dict[str, Callable[..., Any]]:
    """Return the template filters that format numbers, times and places."""
    return {
        "number": drawing.number, "clock": drawing.clock, "moment": moment, "where": where_of, "json": _from_json,
        "record": record_link, "short": lambda text: str(text)[:12],
    }  # fmt: skip


def asset(name: str) -> str:
    """Return the address of a static file. It changes with the file, so that browsers load the new content."""
    return f"/static/{name}?{int((STATIC / name).stat().st_mtime)}"


def _from_json(text: str | None) -> Any:
    return orjson.loads(text) if text else {}
