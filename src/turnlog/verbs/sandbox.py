"""`turnlog sandbox`: inspect and try sandboxes."""

from __future__ import annotations

import argparse

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts, add_json

SANDBOX_EPILOG = """\
Examples:
  turnlog sandbox check                 which isolation works on this machine, and how to install the rest
  turnlog sandbox pool --watch          the state of the slots of every live worker
  turnlog sandbox exec -- ls -la /      run one command as a tool call would be run
"""
CHECK_EPILOG = """\
Exit status: 0 when the backend of [sandbox] is fully isolated here, 1 when anything is missing.
"""
POOL_EPILOG = """\
Examples:
  turnlog sandbox pool                  workers of the run that `turnlog up` started
  turnlog --run exp7 sandbox pool --watch
  kubectl port-forward deploy/sandbox 9100 & turnlog sandbox pool --url http://127.0.0.1:9100

Exit status: 0, or 3 when no worker answers.
"""
EXEC_EPILOG = """\
Examples:
  turnlog sandbox exec -- ls -la /
  turnlog sandbox exec --python -- 'import os; print(os.getuid(), os.listdir("/"))'
  turnlog sandbox exec --wall-s 0.5 -- sleep 60               ends as `timeout: wall_s`, status 124
  turnlog sandbox exec --network allowlist --allow 'GET https://pypi.example/simple/*' -- \\
      curl -sI https://pypi.example/simple/turnlog/
  tar c src | turnlog sandbox exec --stdin -- tar tf -
  turnlog sandbox exec --backend docker --image python:3.12-slim -- python3 --version

Exit status: the command's; 124 after a time-out, 137 after another limit, 130 after Ctrl-C, 2 when it could not run.
"""


def _sandbox_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = SANDBOX_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    pool = _action(actions, "pool", "show slots, hits, waits and leaks of every live sandbox worker", POOL_EPILOG)
    add_json(pool)
    pool.add_argument("--watch", action="store_true", help="refresh every second, until Ctrl-C")
    pool.add_argument(
        "--url", dest="urls", metavar="URL", action="append", default=[],
        help="health address of a worker (default: those in the run's endpoints.json); may be repeated",
    )  # fmt: skip
    check = _action(actions, "check", "show which backends and layers of isolation work on this machine", CHECK_EPILOG)
    add_json(check)
    _exec(_action(actions, "exec", "run one command in a fresh sandbox and stream its output", EXEC_EPILOG))


def _exec(execute: argparse.ArgumentParser) -> None:
    execute.add_argument("--backend", metavar="B", default=None, help="default: the backend of [sandbox]")
    execute.add_argument(
        "--image", metavar="I", default=None, help="a folder in [sandbox] image_folder, or a docker image"
    )
    execute.add_argument(
        "--network", choices=("none", "allowlist"), default="none", help="network access (default none)"
    )
    execute.add_argument(
        "--allow", dest="allow", metavar="RULE", action="append", default=[],
        help="requests that the allowlist permits, as in [egress] allow; may be repeated",
    )  # fmt: skip
    for name, kind, what in (
        ("wall-s", float, "seconds of wall time"),
        ("cpu-s", float, "seconds of CPU time"),
        ("memory-bytes", int, "bytes of memory of all its processes"),
        ("pids", int, "processes and threads"),
        ("disk-bytes", int, "bytes in the workspace"),
        ("output-bytes", int, "bytes of output"),
    ):
        execute.add_argument(
            f"--{name}", type=kind, metavar="N", default=None, help=f"limit in {what} (default [sandbox])"
        )
    source = execute.add_mutually_exclusive_group()
    source.add_argument("--python", action="store_true", help="COMMAND is Python source")
    source.add_argument("--shell", action="store_true", help="COMMAND is shell source")
    execute.add_argument("--stdin", action="store_true", help="pass standard input to the command")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", epilog=epilog)


def _sandbox(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.ending import run_verb
    from turnlog.verbs import sandbox_actions

    match arguments.action:
        case "pool":
            return sandbox_actions.show_pools(settings, arguments)
        case "check":
            return run_verb(sandbox_actions.check(settings, as_json=arguments.json))
        case _:
            return sandbox_actions.execute(settings, arguments)


VERBS = (
    Verb("sandbox", "try sandboxes on this machine; show the sandbox slots of workers", _sandbox, _sandbox_arguments,
         looks=acts("pool")),
)  # fmt: skip
