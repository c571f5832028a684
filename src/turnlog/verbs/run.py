"""`turnlog run`: train, and the actions on a whole run."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.gc import add_bucket
from turnlog.verbs.verb import Verb, add_json

ACTIONS = (
    ("configure", "create topics and schemas and record the settings of the run; if repeated, only compare them"),
    ("pause", "stop requesting groups; work in progress finishes, and every role stays up"),
    ("resume", "continue a paused run"),
    ("close", "close the run for good: its roles end and refuse to start again"),
)
"""Actions without arguments of their own, and their help."""


def run_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog run`; without an action it runs the training loop."""
    actions = verb.add_subparsers(dest="action", metavar="ACTION")
    for name, what in ACTIONS:
        actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    _fork_arguments(actions.add_parser("fork", help="start a new run from a checkpoint of another"))
    _delete_arguments(
        actions.add_parser("delete", help="show everything that a run has left behind, or delete it for good")
    )
    known = actions.add_parser("list", help="list runs below every prefix of the cluster, and in the directories here")
    add_json(known)


FORK_EPILOG = """\
Examples:
  turnlog --run second run fork --from demo-20260101-120000 --step 20
  turnlog --settings other.toml run fork --from demo-20260101-120000
"""


def _fork_arguments(verb: argparse.ArgumentParser) -> None:
    verb.description = (
        "Create the run of --run or --settings from a checkpoint of another run: weights, optimizer,\n"
        "learning rate and position in the dataset."
    )
    verb.epilog = FORK_EPILOG
    verb.add_argument(
        "--from", dest="parent", required=True, metavar="RUN", help="id of a run in the same folder, or its directory"
    )
    verb.add_argument(
        "--step", type=int, metavar="N", help="use the checkpoint after N steps (default: the newest checkpoint)"
    )
    verb.add_argument(
        "--from-settings", type=Path, metavar="FILE", help="the parent's settings (default settings.toml there)"
    )
    verb.add_argument("--archive", action="store_true", help="read the parent's archive instead of its topics")
    verb.add_argument("--to-prefix", metavar="PREFIX", help="prefix of the topics of the new run ([kafka] prefix)")
    verb.add_argument("--draws", type=int, metavar="N", help="rollout batches to train after the fork ([feeder] draws)")


DELETE_EPILOG = """\
Lists the run's topics with their offsets and bytes, its consumer groups, its folder and archive in the store, its
checkpoints and its directory, says what stays and why, and changes nothing. --delete deletes all of it; if that call is
killed, repeat it. A run that is up, or that another run or archive needs, is refused. The data of embedded servers lies
in the directory and is deleted with it.

Examples:
  turnlog run delete demo-20260101-120000
  turnlog run delete demo-20260101-120000 --delete
  turnlog --settings team-a.toml run delete calc-7 --also team-b.toml --delete --yes
"""


def _delete_arguments(verb: argparse.ArgumentParser) -> None:
    verb.description = "Show what deleting a run would remove, or delete it for good."
    verb.epilog = DELETE_EPILOG
    verb.add_argument("target", metavar="RUN", help="run id; settings come from its directory, else from --settings")
    verb.add_argument("--delete", action="store_true", help="delete the run after asking for its id (default: show)")
    verb.add_argument("--yes", action="store_true", help="delete without asking for the id")
    add_bucket(verb)
    add_json(verb)


def _run(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action in (None, "configure"):
        from turnlog.verbs.run_loop import command, configure_command

        return configure_command(settings) if arguments.action else command(settings)
    if arguments.action == "fork":
        from turnlog.verbs.run_fork import fork

        return fork(settings, arguments)
    if arguments.action == "delete":
        from turnlog.verbs.run_delete import command as delete

        return delete(settings, arguments)
    if arguments.action == "list":
        from turnlog.verbs.run_list import list_command

        return list_command(settings, as_json=arguments.json)
    return _set_phase(settings, arguments.action)


def _set_phase(settings: Settings, action: str) -> int:
    """Record the phase on the run's log, print the result and return 0. Every role follows the phase there
    (infra.roles.runs), also one that starts later. Raises NotConfigured, OtherRun, RunClosed."""
    from turnlog.infra.roles.ending import run_verb
    from turnlog.infra.roles.role import RunPhase, open_role
    from turnlog.infra.roles.runs import set_phase
    from turnlog.infra.roles.terminal import say

    wanted, result = {
        "pause": (RunPhase.PAUSED, "paused: no more groups are requested, and work in progress finishes"),
        "resume": (RunPhase.RUNNING, "running"),
        "close": (RunPhase.CLOSED, "closed: its roles end, and none starts for it again"),
    }[action]

    async def record() -> RunPhase:
        async with open_role("run", settings) as role:
            return await set_phase(role, wanted)

    again = " already" if run_verb(record()) is wanted else ""
    say(f"run {settings.run.id!r} is{again} {result}")
    return ExitStatus.DONE


VERBS = (Verb("run", "configure the run, feed tasks and train until it is complete", _run, run_arguments),)
