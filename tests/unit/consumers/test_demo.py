"""What the demo does on a machine whose sandboxes cannot isolate, and what a report says of such a run."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

from turnlog.consumers.demo import runnable_here
from turnlog.consumers.replay.verify import Verdict
from turnlog.consumers.report import Measured, gather, summary
from turnlog.infra.roles.terminal import Terminal
from turnlog.sandbox_settings import SandboxSettings
from turnlog.schemas.events import ToolCallCompleted, ToolStatus
from turnlog.schemas.events.tools import UNISOLATED
from turnlog.settings import Settings


def answer(number: int, worker: str) -> ToolCallCompleted:
    """Of call `number`."""
    return ToolCallCompleted(
        event_id=str(number),
        run_id="run",
        group_id="g",
        session_id="s",
        floor=0,
        rollout_id="r",
        call_id=str(number),
        call_seq=number,
        status=ToolStatus.ok,
        reason="",
        exit_code=0,
        output=b"",
        full_output=None,
        duration_s=0.0,
        queue_s=0.0,
        workspace=None,
        attempt=1,
        worker=worker,
        cached=False,
    )


async def test_the_demo_runs_without_isolation_only_where_there_is_none_and_says_so() -> None:
    said: list[str] = []
    for why in ("", "user namespaces [off]"):

        async def unisolated(settings: SandboxSettings, why: str = why) -> str:
            return why

        console = Terminal(file=io.StringIO(), width=200)
        settings = await runnable_here(Settings(), unisolated, console)
        assert settings.sandbox == dataclasses.replace(Settings().sandbox, allow_unisolated=bool(why))
        said.append(console.file.getvalue())
    assert said[0] == ""
    for part in ("TOOLS RUN WITHOUT ISOLATION", "[sandbox] allow_unisolated = true", "user namespaces [off]"):
        assert part in said[1]


async def test_a_report_counts_the_calls_that_ran_without_isolation(trained_run: Callable[..., Any]) -> None:
    made = trained_run()
    await made.append(
        [answer(1, "sandbox-0"), answer(2, f"sandbox-1{UNISOLATED}"), answer(3, f"sandbox-1{UNISOLATED}")]
    )
    report = await gather(made.role(), Verdict(), Measured())
    assert (report.body["tool_calls"], report.body["tool_calls_without_isolation"]) == ({"ok": 3}, 2)
    console = Terminal(file=io.StringIO(), width=200)
    console.print(summary(report))
    assert "TOOLS RAN WITHOUT ISOLATION" in console.file.getvalue()
