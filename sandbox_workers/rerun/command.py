"""`turnlog session rerun|show`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.blobs import BlobCorrupt, BlobMissing
from turnlog.infra.role import Role, opened
from turnlog.infra.terminal import aside, say_json
from turnlog.names import ExitStatus
from turnlog.sandbox_workers.rerun.again import Rerunner, interpreted
from turnlog.sandbox_workers.rerun.comparison import Difference, differences
from turnlog.sandbox_workers.rerun.recorded import BadPattern, RecordedCall, RecordedSession, recorded
from turnlog.sandbox_workers.rerun.tables import print_report, print_session, session_body
from turnlog.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which calls, and what counts."""

    call: int | None = None
    """The call_seq of the only one; None: all."""
    ignored: tuple[re.Pattern[bytes], ...] = ()
    keep_going: bool = True
    strict: bool = False


@dataclass(slots=True)
class Report:
    """What came of one call."""

    call: RecordedCall
    verdict: str
    """same | differs | not_run | cannot"""
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """As JSON."""
        request = self.call.request
        return {
            "call_seq": request.call_seq,
            "call_id": request.call_id,
            "tool": request.tool,
            "verdict": self.verdict,
            "differences": [difference.body() for difference in self.differences],
            "notes": self.notes,
        }


async def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """One action on the run's topics, or its archive; the exit status. Raises RerunError, and what keeps sandboxes from
    coming up."""
    async with opened("session", settings, archive=arguments.source == "archive") as role:
        session = await recorded(role, arguments.id)
        if arguments.action == "show":
            say_json(session_body(session)) if arguments.json else print_session(session)
            return 0
        asked = Asked(
            call=arguments.call_seq,
            ignored=patterns(arguments.ignore),
            keep_going=arguments.keep_going,
            strict=arguments.strict,
        )
        reports = await rerun(role, session, asked)
    status = exit_status(reports)
    if arguments.json:
        body = {"session_id": session.session_id, "exit": status, "calls": [report.body() for report in reports]}
        say_json(body)
    else:
        print_report(session.session_id, [report.body() for report in reports])
    return status


async def rerun(role: Role, session: RecordedSession, asked: Asked) -> list[Report]:
    """Run the calls again and compare, in order. Raises NoSuchCall, BackendUnavailable, EgressUnavailable, LogError,
    StoreUnavailable."""
    chosen = session.calls if asked.call is None else _only(session, asked.call)
    reports: list[Report] = []
    async with Rerunner.open(role, chosen) as rerunner:
        for number, call in enumerate(chosen, 1):
            report = await _one(rerunner, call, asked)
            aside(f"{number}/{len(chosen)} call {call.request.call_seq} {call.request.tool}: {report.verdict}")
            if asked.call is None or call.request.call_seq == asked.call:
                reports.append(report)
            if report.verdict == "differs" and not asked.keep_going:
                break
    return reports


def exit_status(reports: Sequence[Report]) -> int:
    """0: all that ran came out the same; 1: something did not; 2: something could not be run, or nothing was."""
    verdicts = {report.verdict for report in reports}
    if "differs" in verdicts:
        return ExitStatus.DIFFERS
    return ExitStatus.DONE if "same" in verdicts and "cannot" not in verdicts else ExitStatus.FAILED


def patterns(texts: Sequence[str]) -> tuple[re.Pattern[bytes], ...]:
    """Of --ignore. Raises BadPattern."""
    try:
        return tuple(re.compile(text.encode()) for text in texts)
    except re.error as error:
        raise BadPattern(f"--ignore {error.pattern!r}: {error}") from None


async def _one(rerunner: Rerunner, call: RecordedCall, asked: Asked) -> Report:
    if not call.ran:
        return Report(call, "not_run", notes=[call.why_not])
    again = await rerunner.run(call)
    if again.result is None:
        return Report(call, "cannot", notes=list(again.notes))
    try:
        then = await rerunner.then(call)
    except (BlobMissing, BlobCorrupt) as error:
        return Report(call, "cannot", notes=[f"what was recorded is not whole: {error}"])
    found = differences(then, again.result, asked.ignored)
    counted = [one for one in found if asked.strict or one.what != "environment"]
    return Report(call, "differs" if counted else "same", found, list(again.notes))


def _only(session: RecordedSession, call_seq: int) -> tuple[RecordedCall, ...]:
    """One call; with those before it when it goes on in the interpreter that they have built up. Raises NoSuchCall."""
    before = session.upto(call_seq)
    return before if interpreted(before[-1]) else before[-1:]
