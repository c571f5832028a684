"""Set the phase of a run: `turnlog run pause`, `resume`, `close`.

The phase is recorded on the run's log (RunPlanned.phase). Every role follows it there (infra.roles.runs), so nobody
else has to be notified, and a role that starts later learns it, too.
"""

from __future__ import annotations

from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import RunPhase, open_role
from turnlog.infra.roles.runs import set_phase
from turnlog.infra.roles.terminal import say
from turnlog.names import ExitStatus
from turnlog.settings import Settings

SAID = {
    RunPhase.PAUSED: "paused: no more groups are requested, and work in progress finishes",
    RunPhase.RUNNING: "running",
    RunPhase.CLOSED: "closed: its roles end, and none starts for it again",
}


def phase_command(settings: Settings, wanted: RunPhase) -> int:
    """Record the phase on the run's log, print the result and return 0. Raises NotConfigured, OtherRun, RunClosed."""

    async def run() -> RunPhase:
        async with open_role("run", settings) as role:
            return await set_phase(role, wanted)

    before = run_verb(run())
    again = " already" if before is wanted else ""
    say(f"run {settings.run.id!r} is{again} {SAID[wanted]}")
    return ExitStatus.DONE
