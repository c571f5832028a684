"""The command line, `turnlog VERB`. Each verb imports its package only when it is called, so that --help is instant."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog import __version__
from turnlog.command_help import SHELLS, CommandLineParser, complete_parser, naming
from turnlog.infra.roles import ending, http_clients, leaves, log_lines
from turnlog.infra.run_folder import NAMING, check_there, newest_run, no_space_of, run_settings
from turnlog.names import OPTIONAL_ROLES, TRAINING_ROLES, ExitStatus
from turnlog.settings import RunSettings, Settings, SettingsError

if TYPE_CHECKING:
    from turnlog.infra.roles.role import Role

ROLES: dict[str, tuple[str, str]] = {
    "feeder": ("turnlog.producers.feeder", "draw tasks and admit groups of rollouts"),
    "gateway": ("turnlog.producers.gateway.app", "serve sessions and OpenAI chat completions from the engines"),
    "runner": ("turnlog.producers.runner", "run white-box agents"),
    "assembler": ("turnlog.processors.runtime.assembler", "fold turns into trees, segments and advantages"),
    "batcher": ("turnlog.processors.runtime.batcher", "form one batch per optimizer step"),
    "trainer": ("turnlog.trainer.loop", "run Megatron steps, write checkpoints, publish weight versions"),
    "loader": ("turnlog.consumers.loader", "load published weights into one engine"),
}
"""Roles that are one asyncio process: verb -> (module with `main(role)`, description)."""

Test = Callable[[argparse.Namespace], bool]


def _always(_: argparse.Namespace) -> bool:
    return True


def _acts(*actions: str) -> Test:
    return lambda arguments: arguments.action in actions


READS: dict[str, Test] = {
    "books": _always,
    "fold": _always,
    "replay": _always,
    "report": _always,
    "eval": _always,
    "export": _always,
    "reward": _always,
    "dataset": _acts("build"),
    "dead-letters": _acts("list", "show"),
    "index": _acts("build"),
    "session": lambda arguments: arguments.action == "export" or (arguments.action == "show" and not arguments.tree),
    "tail": lambda arguments: arguments.until_end,
    "why": lambda arguments: ":" in arguments.about,
}
"""Verbs that read the log of a run; if the run is down, its servers are started for them."""
LOOKS: dict[str, Test] = READS | {
    "status": _always,
    "dashboard": _always,
    "query": _always,
    "tail": _always,
    "why": _always,
    "session": _acts("show", "export"),
    "engines": _acts("list"),
    "sandbox": _acts("pool"),
}
"""Verbs that inspect a run and change nothing in it; they use the newest run if none is named."""
NAMING_VARIABLES = {*NAMING.values(), "TURNLOG_KAFKA_BOOTSTRAP"}
"""Variables that name a run or its cluster; if one is set, the newest run is not chosen."""

EPILOG = """\
First steps:
  turnlog demo                      the whole loop on this machine: agents act, tools run, the reward rises
  turnlog up && turnlog status      servers and roles, left running; `turnlog down` stops them
  turnlog replay --verify           fold the topics again and compare with what was trained

Verbs that inspect a run use the newest one in runs/ if none is named. --run and --settings may also follow the verb.
Settings: one TOML file (--settings), then TURNLOG_SECTION_KEY from the environment; see docs/settings.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status. A typed error ends as one line on stderr and status 2, or 75 if a server
    did not answer."""
    ending.obey()
    arguments = parser().parse_args(argv)
    try:
        log_lines.begin(os.environ, sys.stderr)
        http_clients.spare_loopback(os.environ)
        settings = _settings(arguments)
        log_lines.speaks(arguments.verb, run=settings.run.id)
        with _servers(settings, arguments):
            status: int = arguments.call(settings, arguments)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return ExitStatus.TERMINATED if ending.was_terminated() else ExitStatus.INTERRUPTED
    except BrokenPipeError as error:
        if not _reader_is_gone():
            return report_failure(arguments.verb, error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return ExitStatus.READER_GONE
    except Exception as error:
        return report_failure(arguments.verb, error)


def _settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the named run. If none is named, a verb that inspects a run takes the newest of runs/ and
    prints a note."""
    run_id = arguments.run_id or ""
    looks = (test := LOOKS.get(arguments.verb)) is not None and test(arguments)
    named = run_id or arguments.settings or NAMING_VARIABLES & os.environ.keys()
    if looks and not named and (run_id := newest_run()) not in ("", RunSettings().id):
        from turnlog.infra.roles.terminal import aside

        aside(f"run {run_id}, the newest in runs/ (choose another with --run)")
    settings = run_settings(arguments.settings, os.environ, run_id=run_id)
    if looks and arguments.verb != "status":  # which has a status of its own for that
        check_there(settings)
    return settings


def _servers(settings: Settings, arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Return a context with the servers that a verb needs to read the log of a run that is down."""
    if (test := READS.get(arguments.verb)) is None or not test(arguments):
        return nullcontext()
    if getattr(arguments, "source", "") == "archive" and settings.store.endpoint:
        return nullcontext()
    from turnlog.infra.embedded.up import readable

    return readable(settings)


def _reader_is_gone() -> bool:
    """Return True if nobody reads standard output any more. A BrokenPipeError alone does not prove it, since it may
    come from another connection."""
    pipe = select.poll()
    pipe.register(sys.stdout, 0)
    return any(events & select.POLLERR for _, events in pipe.poll(0))


def report_failure(verb: str, error: Exception) -> int:
    """Return the exit status for a verb that ended with an error, after printing the first error of the tasks that ran
    together. Raises the error itself if one of them is not a turnlog error, or if TURNLOG_TRACEBACK is set."""
    errors = [no_space_of(each) or each for each in leaves(error)]
    if not all(map(_is_ours, errors)) or os.environ.get("TURNLOG_TRACEBACK"):
        raise error
    _say_why(verb, errors[0])
    return _status_of(error)


def _say_why(verb: str, error: BaseException) -> None:
    said = f"turnlog {verb}: {type(error).__name__}: {error}"
    if os.environ.get("TURNLOG_LOG_FORMAT") == "json":
        logging.getLogger("turnlog").error("%s", said)
        return
    from turnlog.infra.roles.terminal import aside

    aside(*said.split("\n"))


def _is_ours(error: BaseException) -> bool:
    """Return True for turnlog's own errors: their message states what, where and the remedy, so a traceback would only
    hide it."""
    return type(error).__module__.startswith("turnlog.")


def _status_of(error: Exception) -> int:
    """Return 75 if a server did not answer, since a supervisor restarts such a role for as long as it takes, else 2."""
    from turnlog.infra.roles import is_unreachable

    return ExitStatus.UNREACHABLE if is_unreachable(error) else ExitStatus.FAILED


def parser() -> argparse.ArgumentParser:
    """Build the parser of every verb with its help."""
    top: argparse.ArgumentParser = CommandLineParser(
        prog="turnlog",
        description="Event-sourced data plane and training loop for agentic RL.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    naming(top)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (module, what) in ROLES.items():
        _verb(verbs, name, _role(name, module), f"role: {what}")
    _verb(verbs, "views", _views, "role: serve the Faust live views behind `turnlog status`")
    _verb(verbs, "lag", _lag, "role: export how far every role is behind the log, as Prometheus metrics")
    _verb(verbs, "egress", _egress, "role: run the egress proxy of sandbox workers as a separate process")
    _verb(verbs, "engine", _engine, "role: run one SGLang engine with [model] path in the foreground, here or on Ray")
    _verb(verbs, "registry", _registry, "role: run the embedded schema registry")
    _verb(verbs, "supervise", _supervise, "run the servers and roles of a run in the foreground")
    made = _verb(verbs, "recipe", _recipe, "create your own recipe: a package that works as generated")
    new = made.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "new",
        help="write the package",
        description="Write a package with a dataset, an environment, a verifier and a test.",
    )
    new.add_argument("name", metavar="NAME", help="name of the recipe and its folder, such as my-game")
    new.add_argument(
        "--into", type=Path, default=Path(), metavar="DIR", help="create the folder in DIR (default: here)"
    )
    _verb(verbs, "up", _up, "start servers and roles, leave them running, print the endpoints").add_argument(
        "--json", action="store_true", help="print the endpoints as JSON on standard output"
    )
    _verb(verbs, "down", _down, "stop what `up` started")
    _askers(verbs)
    _lives(_verb(verbs, "run", _run, "configure the run, feed tasks and train until all [feeder] draws are trained"))
    warm = _verb(verbs, "warm-start", _warm_start, "create the recipe's tiny model by supervised fine-tuning")
    warm.add_argument("--out", type=Path, metavar="DIR", help="copy the model to DIR, unless it is already there")
    demo = _verb(verbs, "demo", _demo, "run the whole loop with a live display, and judge the result")
    demo.add_argument("--steps", type=int, default=None, metavar="N", help="draws to train (default 30)")
    demo.add_argument("--engines", type=int, default=None, metavar="N", help="number of engines (default 1)")
    _readers(verbs)
    _outlets(verbs)
    completes = _verb(verbs, "completion", _completion, "print a script that completes this command line in a shell")
    completes.add_argument("shell", choices=SHELLS, help="the shell; for example: source <(turnlog completion bash)")
    complete_parser(top)
    return top


def _lives(run: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog run`; without an action it runs the training loop."""
    actions = run.add_subparsers(dest="action", metavar="ACTION")
    for name, what in (
        ("configure", "create topics and schemas and record the settings of the run; if repeated, only compare them"),
        ("pause", "request no more groups; work in progress finishes, and every role stays up"),
        ("resume", "continue a paused run"),
        ("close", "close the run for good: its roles end, and none starts for it again"),
    ):
        actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    from turnlog.consumers.arguments import delete_arguments, fork_arguments  # argparse alone

    fork_arguments(actions.add_parser("fork", help="start a new run from a checkpoint of another"))
    delete_arguments(
        actions.add_parser("delete", help="show everything that a run has left behind, or delete it for good")
    )
    known = actions.add_parser("list", help="list runs below every prefix of the cluster, and in the directories here")
    known.add_argument("--json", action="store_true")


def _askers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that report the state of what is running."""
    from turnlog.consumers import arguments as of

    status = _verb(verbs, "status", _status, "show roles, lag, engines and weight versions")
    status.add_argument("--json", action="store_true")
    status.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        default=0.0,
        metavar="S",
        help="refresh every S seconds (default 2); with --json, print one line each time",
    )
    status.add_argument(
        "--health", default="", metavar="URL,...", help="health URLs of roles without a supervisor ([status] health)"
    )
    doctor = _verb(verbs, "doctor", _doctor, "check brokers, topics, registry and store, and say what to change")
    doctor.add_argument("--json", action="store_true")
    of.engines_arguments(_verb(verbs, "engines", _engines, "list the engines; add or remove some during a run"))
    of.dashboard_arguments(_verb(verbs, "dashboard", _dashboard, "show the run in a browser: sessions, tokens, curves"))
    health = _verb(verbs, "health", _health, "ask a role in this container whether it is ready (for probes)")
    health.add_argument(
        "role",
        choices=sorted((*TRAINING_ROLES, *OPTIONAL_ROLES)),
    )
    asked = health.add_mutually_exclusive_group()
    asked.add_argument("--ready", action="store_true", help="ask whether it does its work (default)")
    asked.add_argument("--live", action="store_true", help="ask whether its loops make progress")
    health.add_argument("--url", default="", help="its health endpoint (default: TURNLOG_HEALTH_HOST and _PORT)")
    health.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait for it (default 2)")


def _readers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that read the recorded log."""
    from turnlog.consumers import arguments as of  # argparse alone; too many for this page
    from turnlog.sandbox_workers.console.verbs import sandbox_arguments, session_arguments

    sandbox_arguments(_verb(verbs, "sandbox", _sandbox, "role: run tool calls in sandboxes; pool, check, exec"))
    of.replay_arguments(_verb(verbs, "replay", _replay, "fold the log again: compare, go back in time, refold"))
    of.archive_arguments(_verb(verbs, "archive", _archive, "role: copy topics into the object store; flush, prune"))
    of.index_arguments(_verb(verbs, "index", _index, "role: index the log as tables in one file, for SQL queries"))
    of.query_arguments(_verb(verbs, "query", _query, "query the index in SQL; the answer states its as-of time"))
    of.tail_arguments(_verb(verbs, "tail", _tail, "print events as they arrive, one per line"))
    of.why_arguments(_verb(verbs, "why", _why, "show the records that decided about a session, group or token"))
    of.gc_arguments(_verb(verbs, "gc", _gc, "show unreferenced objects in the store, or delete them"))
    schemas = _verb(verbs, "schemas", _schemas, "check the schemas against every release; print them as AsyncAPI")
    schemas.add_argument(
        "action", choices=("check", "release", "asyncapi"),
        help="check, cut the next release, or print topics, records, readers and writers as AsyncAPI 3.0",
    )  # fmt: skip
    schemas.add_argument("--against", type=Path, metavar="DIR", help="folder of releases (default: the package's)")
    of.topics_arguments(_verb(verbs, "topics", _topics, "create or check the catalogue's topics; print ACLs"))
    of.dataset_arguments(_verb(verbs, "dataset", _dataset, "build a Parquet or Arrow dataset of a run, or verify one"))
    of.eval_arguments(_verb(verbs, "eval", _eval, "show mean reward and pass@k per weight version, and the best"))
    of.export_arguments(_verb(verbs, "export", _export, "write weights of a run as a Hugging Face folder"))
    of.sft_arguments(_verb(verbs, "sft", _sft, "fine-tune a model folder on a dataset of a run (supervised)"))
    of.reward_arguments(_verb(verbs, "reward", _reward, "judge recorded sessions again and write a dataset"))
    of.fold_arguments(_verb(verbs, "fold", _fold, "compare two policies on recorded sessions; write nothing"))
    of.dead_letters_arguments(_verb(verbs, "dead-letters", _dead_letters, "list, show, requeue, skip refused records"))
    session_arguments(
        _verb(verbs, "session", _session, "show the calls, turns and tokens of a session, or run its calls again")
    )
    books = _verb(verbs, "books", _books, "show the token accounting: sampled = trained + masked, by reason")
    books.add_argument("--by", choices=("session", "group", "batch", "run"), default="run", help="level (default run)")
    books.add_argument("--id", default="", metavar="ID", help="show only this account of that level")
    books.add_argument("--limit", type=int, default=20, metavar="N", help="show the N largest (default 20)")
    books.add_argument("--json", action="store_true")
    books.add_argument("--from", dest="source", choices=("topics", "archive"), default="topics", help="default topics")
    _verb(verbs, "report", _report, "write runs/ID/report.json and print the summary").add_argument(
        "--json", action="store_true", help="print the content of report.json"
    )


def _outlets(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that export the log to other programs."""
    from turnlog.consumers import arguments as of

    of.trace_arguments(_verb(verbs, "trace", _trace, "role: send the spans of a run to an OpenTelemetry collector"))
    _verb(verbs, "alerts", _alerts, "role: send the alerts of a run by mail, chat or webhook ([alerts] urls)")
    of.track_arguments(_verb(verbs, "track", _track, "role: write curves of a run for TensorBoard or Weights & Biases"))


Call = Callable[[Settings, argparse.Namespace], int]


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, call: Call, what: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, description=what[0].upper() + what[1:] + ".")  # complete_parser lists it
    verb.set_defaults(call=call)
    return verb


def _role(name: str, module: str) -> Call:
    def call(settings: Settings, _: argparse.Namespace) -> int:
        from turnlog.infra.roles.runs import serve

        async def main(role: Role) -> None:
            import asyncio

            # In a thread, and not before health is served: the trainer's takes ten seconds.
            room = await asyncio.to_thread(importlib.import_module, module)
            await room.main(role)

        return serve(name, main, settings)

    return call


def _views(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.processors.runtime.views import serve_views

    return serve_views(settings)


def _lag(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.consumers.lag import serve_lag

    return serve_lag(settings)


def _doctor(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.life.doctor import command

    return command(settings, as_json=arguments.json)


def _health(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.probe import probe

    return probe(
        arguments.role, settings, os.environ, url=arguments.url, live=arguments.live, timeout_s=arguments.timeout
    )


def _engine(settings: Settings, _: argparse.Namespace) -> int:
    if settings.engine.launcher == "ray":
        from turnlog.infra.on_ray import host_engine

        return host_engine(settings)
    from turnlog.infra.embedded.servers import serve_engine

    return serve_engine(settings)


def _egress(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.sandbox_workers.egress.apart import serve_egress

    return serve_egress(settings)


def _registry(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.registry_app import serve_registry

    return serve_registry(settings)


def _supervise(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import supervise

    return supervise(settings)


def _up(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import up
    from turnlog.infra.roles.terminal import say_json
    from turnlog.trainer.tiny_policy import prepare_model

    found = up(prepare_model(settings))
    if arguments.json:
        say_json(dataclasses.asdict(found))
    return 0


def _down(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import down

    down(settings)
    return 0


def _status(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.status import show

    addresses = [address for address in arguments.health.split(",") if address]
    return show(settings, as_json=arguments.json, health=addresses, every_s=arguments.watch)


def _run(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action in (None, "configure"):
        from turnlog.consumers.run import command, configure_command

        return configure_command(settings) if arguments.action else command(settings)
    if arguments.action == "fork":
        from turnlog.consumers.life.fork import fork
        from turnlog.trainer.checkpoint import hand_on, open_checkpoint

        return fork(settings, arguments, open_checkpoint, hand_on)
    if arguments.action == "delete":
        from turnlog.consumers.life.delete import command as delete

        return delete(settings, arguments)
    if arguments.action == "list":
        from turnlog.consumers.life.run_list import list_command

        return list_command(settings, as_json=arguments.json)
    from turnlog.consumers.life.phases import phase_command
    from turnlog.infra.roles.role import RunPhase

    phases = {"pause": RunPhase.PAUSED, "resume": RunPhase.RUNNING, "close": RunPhase.CLOSED}
    return phase_command(settings, phases[arguments.action])


def _warm_start(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.trainer.tiny_policy import copy_model, initial_weights, prepare_model

    made = initial_weights(prepare_model(settings))
    print(copy_model(made, arguments.out) if arguments.out else made)
    return 0


def _completion(_: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.command_help import command

    return command(parser(), arguments.shell)


def _recipe(_: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.producers.recipes.new import command

    return command(arguments)


def _demo(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.demo import demo
    from turnlog.sandbox_workers.pooling.providers import find_isolation_failure
    from turnlog.trainer.tiny_policy import prepare_model

    return demo(settings, prepare_model, find_isolation_failure, steps=arguments.steps, engines=arguments.engines)


def _replay(settings: Settings, arguments: argparse.Namespace) -> int:
    import uvloop  # as the assembler that it repeats

    from turnlog.consumers.replay.refold import command

    return uvloop.run(command(settings, arguments))


def _archive(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.archive import command

    return command(settings, arguments)


def _index(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index.indexer import command

    return command(settings, arguments)


def _dashboard(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.dashboard.server import command

    return command(settings, arguments)


def _engines(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.life.engines import command

    return command(settings, arguments)


def _query(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index.query import command

    return command(settings, arguments)


def _tail(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index.console import tail_command

    return tail_command(settings, arguments)


def _why(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index.console import why_command

    return why_command(settings, arguments)


def _trace(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.outlets.tracing import command

    return command(settings, arguments)


def _track(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.outlets.tracking import command

    return command(settings, arguments)


def _alerts(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.outlets.alerts import command

    return command(settings, arguments)


def _gc(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.life.gc import command

    return command(settings, arguments)


def _sandbox(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.sandbox_workers.console.verbs import sandbox

    return sandbox(settings, arguments)


def _schemas(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "asyncapi":
        from turnlog.asyncapi_page import asyncapi_page

        print(asyncapi_page(settings), end="")
        return ExitStatus.DONE
    from turnlog.schemas.releases import run

    return run(arguments.action, arguments.against)


def _topics(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.topics_admin import acls_page, run

    if arguments.action == "acls":
        print(*acls_page(settings, arguments.principal, arguments.format), sep="\n")
        return ExitStatus.DONE
    return ending.run_verb(run(arguments.action, settings))


def _dataset(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.datasets.build import run

    return run(settings, arguments)


def _eval(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.evaluation import command

    return command(settings, arguments)


def _export(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.best:
        from turnlog.consumers.evaluation import best_version

        arguments.version = best_version(settings, archive=arguments.source == "archive")
    from turnlog.trainer.offline.export import command

    return command(settings, arguments)


def _sft(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.datasets.build import verify
    from turnlog.producers.recipes.warm_start import make_row_converter
    from turnlog.trainer.offline.sft import command

    return command(settings, arguments, verify, make_row_converter(arguments.model))


def _reward(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.replay.rejudge import command

    return ending.run_verb(command(settings, arguments))


def _fold(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.fold import show

    return show(settings, arguments)


def _dead_letters(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.dead_letters import command

    return ending.run_verb(command(settings, arguments))


def _session(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "show" and (arguments.tree or arguments.tokens):
        from turnlog.consumers.index.console import show_session

        return show_session(settings, arguments)
    if arguments.action == "export":
        from turnlog.consumers.dashboard.export import command as export

        return export(settings, arguments)
    from turnlog.sandbox_workers.console.rerun import command

    return ending.run_verb(command(settings, arguments))


def _books(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.books import AccountingArguments, show

    archive = arguments.source == "archive"
    asked = AccountingArguments(
        arguments.by, arguments.id, as_json=arguments.json, limit=arguments.limit, archive=archive
    )
    return ending.run_verb(show(settings, asked))


def _report(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.report import write

    return ending.run_verb(write(settings, as_json=arguments.json))


__all__ = ["SettingsError", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
