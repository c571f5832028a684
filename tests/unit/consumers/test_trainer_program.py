"""A trainer of the user's as a process of `turnlog demo --trainer FILE`."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from turnlog.infra.embedded.supervisor import ChildState, Supervisor
from turnlog.settings import LivenessSettings, RunSettings, Settings
from turnlog.verbs.run_loop import trainer_member


async def test_a_program_that_always_fails_late_has_failed_after_some_starts(tmp_path: Path) -> None:
    """It imports for so long that none of its deaths is quick."""
    program = tmp_path / "trainer.py"
    program.write_text("raise SystemExit('there is no such model')")
    settings = Settings(run=RunSettings(directory=str(tmp_path)), liveness=LivenessSettings(deaths=3))
    member = dataclasses.replace(trainer_member(settings, program), quick_s=0.0)
    states: asyncio.Queue[ChildState] = asyncio.Queue()
    supervisor = Supervisor([member], lambda watched: states.put_nowait(watched.state))
    work = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(60):
            while await states.get() is not ChildState.FAILED:
                pass
    finally:
        supervisor.stopping.set()
        await work
    failed = supervisor.watched["trainer-0"]
    assert failed.restarts == 2
    assert "there is no such model" in str(failed.error)
