"""`turnlog log session show|rerun` on a real log, store and registry."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from turnlog import cli
from turnlog.consumers.archiver import flush
from turnlog.infra.roles.role import open_role
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.console.recorded import load_session
from turnlog.sandbox_workers.worker import main
from turnlog.schemas.events import SandboxSpec, ToolCallRequested
from turnlog.schemas.ids import digest
from turnlog.settings import Settings
from turnlog.verbs.session import show_or_rerun

pytestmark = pytest.mark.kafka
SANDBOX = SandboxSettings(backend="subprocess", slots=1, prewarm=0, first_uid=286_000, cgroups="off")
SPEC = SandboxSpec(backend="subprocess", durable_workspace=True)


def requested(settings: Settings, seq: int, code: str) -> ToolCallRequested:
    """A call of session `s`."""
    return ToolCallRequested(
        event_id=digest("call", seq), run_id=settings.run.id, group_id="g", session_id="s", floor=0, rollout_id="s",
        call_id=f"c{seq}", call_seq=seq, tool="python", arguments=json.dumps({"code": code}).encode(), sandbox=SPEC,
        workspace=None, deadline_s=600.0,
    )  # fmt: skip


async def test_a_session_is_shown_and_run_again_from_the_log_and_from_its_archive(
    live_settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(live_settings, sandbox=SANDBOX)
    workspace = None
    async with open_role("sandbox", settings) as role:
        working = asyncio.create_task(main(role))
        for seq, code in enumerate(
            ("open('f', 'w').write('4'); print(3)", "import os; print(open('f').read(), os.urandom(8))")
        ):
            await role.events.append(dataclasses.replace(requested(settings, seq, code), workspace=workspace))
            while (done := (await load_session(role, "s")).calls[seq].completed) is None:
                assert not working.done(), working
            workspace = done.workspace
        role.stopping.set()
        await working
        await flush(role)
    shown = cli.parser().parse_args(["log", "session", "show", "s", "--json"])
    assert await show_or_rerun(settings, shown) == 0
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert [(call["call_seq"], call["status"], call["attempts"]) for call in calls] == [(0, "ok", 1), (1, "ok", 1)]
    assert await show_or_rerun(settings, cli.parser().parse_args(["log", "session", "rerun", "s", "--json"])) == 1
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert [call["verdict"] for call in report["calls"]] == ["same", "differs"]
    assert report["calls"][1]["differences"][0]["what"] == "output"
    assert "2/2 call 1 python: differs" in said.err
    again = ["log", "session", "rerun", "s", "--ignore", "b['\"].*", "--from", "archive"]
    assert await show_or_rerun(settings, cli.parser().parse_args(again)) == 0
    assert "2 same" in capsys.readouterr().out
