"""`turnlog log cheating`: look for suspicious success in the sessions of a run, from its topics or its archive."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, add_source, always

if TYPE_CHECKING:
    from rich.table import Table

    from turnlog.infra.roles.role import Role
    from turnlog.infra.roles.runs import Configured
    from turnlog.processors.core.cheating.actions import SessionTrace
    from turnlog.processors.core.cheating.findings import Finding
    from turnlog.processors.core.cheating.sessions import Requests

EPILOG = """\
Examples:
  turnlog log cheating                                  every flagged session of the newest run
  turnlog log cheating --detector git_history --json    one detector, as JSON with excerpts
  turnlog --run old log cheating --from archive         after the topics are deleted

docs/cheating.md says what each detector sees and what it cannot see.

Exit status: 0 no session is flagged, 1 some are, or nothing is recorded, 2 error.
"""


def _arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = EPILOG
    verb.add_argument(
        "--detector", action="append", default=[], metavar="NAME",
        help="only this detector; may be repeated (default: those of [cheating] detectors)",
    )  # fmt: skip
    verb.add_argument("--session", default="", metavar="ID", help="only sessions whose id begins with ID")
    verb.add_argument("--limit", type=int, default=50, metavar="N", help="list N sessions (default 50)")
    add_source(verb)
    add_json(verb)


def _cheating(settings: Settings, arguments: argparse.Namespace) -> int:
    return ending.run_verb(show(settings, arguments))


@dataclass(slots=True)
class FlaggedSession:
    """A session with findings."""

    session_id: str
    task_id: str
    reward: float
    findings: list[Finding] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the JSON form."""
        found = [dataclasses.asdict(one) | {"severity": one.severity.value} for one in self.findings]
        about = {"session_id": self.session_id, "task_id": self.task_id, "reward": self.reward}
        return {**about, "flags": sorted({one.detector for one in self.findings}), "findings": found}


@dataclass(slots=True)
class CheatingReport:
    """The result of a look at a run."""

    sessions: int = 0
    """Number of rewarded sessions."""
    successes: int = 0
    """Number of them above [fold] flagged_above."""
    flagged: dict[str, FlaggedSession] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Return detector -> number of sessions that it flagged."""
        named = Counter(name for one in self.flagged.values() for name in {each.detector for each in one.findings})
        return dict(sorted(named.items()))

    def body(self, limit: int) -> dict[str, Any]:
        """Return the JSON form."""
        rows = sorted(self.flagged.values(), key=lambda one: one.session_id)
        return {
            "sessions": self.sessions, "successes": self.successes, "flagged": len(rows), "detectors": self.counts(),
            "rows": [one.body() for one in rows[:limit]],
        }  # fmt: skip


async def look(role: Role, names: tuple[str, ...] = (), session: str = "") -> CheatingReport:
    """Look at every rewarded session of the role's run. `names` are detectors, by default those of the settings;
    `session` is the beginning of an id. Raises SettingsError, NothingToReplay, LogError, BlobError."""
    from turnlog.consumers.replay.source import recorded_run
    from turnlog.infra.offers import load_detectors
    from turnlog.processors.core.cheating.across import RunHistory, SessionSummary, summarize
    from turnlog.processors.core.cheating.detectors import ACROSS, findings

    cheating = role.settings.cheating
    if names:
        cheating = dataclasses.replace(cheating, detectors=names)
    detectors, across = load_detectors(cheating), {*cheating.detectors} & {*ACROSS}
    run = await recorded_run(role)
    above = run.fold.flagged_above
    found, summaries = CheatingReport(), dict[str, SessionSummary]()
    async for one in _rewarded_sessions(role, run):
        found.sessions += 1
        about = summaries[one.session_id] = summarize(one)
        if one.reward > above:
            found.successes += 1
            for finding in findings(one, detectors):
                _add(found, about, finding)
    history = RunHistory(above=above)
    for about in sorted(summaries.values(), key=lambda one: (one.ended_ms, one.session_id)) if across else ():
        for session_id, finding in history.add(about):
            if finding.detector in across:
                _add(found, summaries[session_id], finding)
    found.flagged = {name: one for name, one in found.flagged.items() if name.startswith(session)}
    return found


async def _rewarded_sessions(role: Role, run: Configured) -> AsyncIterator[SessionTrace]:
    """Yield the rewarded sessions of a run, partition by partition."""
    from turnlog.consumers.replay.source import Inputs, Merge
    from turnlog.infra.history import partitions
    from turnlog.infra.log import Partition
    from turnlog.processors.core.cheating.sessions import RewardedSessions
    from turnlog.processors.core.fold_versions import fold_version
    from turnlog.schemas.topics import SESSIONS, TURNS

    requests = await _requests(role)
    for place in partitions(role, SESSIONS):
        fold = RewardedSessions(fold_version(run.fold_version), requests)
        inputs = Inputs(role, run.rules(), place.number, messages=True)
        places = [place, Partition(TURNS.name, place.number)]
        starts, ends = await role.log.start_offsets(places), await role.log.end_offsets(places)
        async with Merge(role.log, starts, ends) as merge:
            while chunk := await merge.chunk():
                for record in chunk:
                    event = await inputs.event(record)
                    for one in () if event is None else fold.apply(record.offset, record.timestamp_ms, event):
                        yield one


def _add(found: CheatingReport, about: Any, finding: Finding) -> None:
    one = found.flagged.setdefault(about.session_id, FlaggedSession(about.session_id, about.task_id, about.reward))
    one.findings.append(finding)


async def _requests(role: Role) -> Requests:
    """Return the network requests of every session, from the results of its tool calls."""
    from turnlog.infra.history import events
    from turnlog.schemas.events import EgressRequest
    from turnlog.schemas.topics import TOOL_RESULTS

    found: dict[str, list[tuple[str, EgressRequest]]] = {}
    seen: set[str] = set()
    async for _, event in events(role, TOOL_RESULTS, names=("ToolCallCompleted",)):
        if event.requests and event.call_id not in seen:
            seen.add(event.call_id)
            found.setdefault(event.session_id, []).extend((event.call_id, one) for one in event.requests)
    return found


async def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the flagged sessions. Return 0 if there are none, else 1, also if nothing is recorded. Raises what `look`
    raises."""
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.runs import nothing_recorded
    from turnlog.infra.roles.terminal import Terminal, say_json

    async with open_role("cheating", settings, archive=arguments.source == "archive") as role:
        await audit_command(role, "look", "cheating", tuple(filter(None, (arguments.session,))))
        found = await look(role, tuple(arguments.detector), arguments.session)
        empty = "" if found.sessions else await nothing_recorded(role)
    if arguments.json:
        say_json(found.body(max(arguments.limit, 0)), indent=1)
    elif empty:
        Terminal().print(empty, soft_wrap=True)
    else:
        Terminal().print(table(found, max(arguments.limit, 0)))
    return ExitStatus.DIFFERS if found.flagged or empty else ExitStatus.DONE


def table(found: CheatingReport, limit: int) -> Table:
    """Return a table with a line per finding."""
    from rich.table import Table

    counts = ", ".join(f"{name} {count:,}" for name, count in found.counts().items()) or "none"
    title = f"{len(found.flagged):,} flagged of {found.successes:,} successes in {found.sessions:,} rewarded sessions"
    shown = Table("session", "task", "reward", "turn", "detector", "what", "excerpt", title=title, caption=counts)
    for one in sorted(found.flagged.values(), key=lambda one: one.session_id)[:limit]:
        for place, each in enumerate(one.findings):
            about = (one.session_id, one.task_id, f"{one.reward:g}") if place == 0 else ("", "", "")
            turn = "" if each.turn is None else str(each.turn.index)
            texts = (*about, turn, f"{each.detector} ({each.severity.value})", each.says, each.excerpt)
            shown.add_row(*texts, end_section=place == len(one.findings) - 1)
    return shown


VERBS = (
    Verb("cheating", "look for sessions that were rewarded for what they did not solve", _cheating, _arguments,
         reads=always, under="log"),
)  # fmt: skip
