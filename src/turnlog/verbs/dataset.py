"""`turnlog dataset`: write rows of a run as files, and check them."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.infra.roles.ending import run_verb
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, acts, add_json, add_source, milliseconds

if TYPE_CHECKING:
    from turnlog.consumers.datasets.manifest import DatasetManifest
    from turnlog.consumers.datasets.query import Query

DATASET_EPILOG = """\
Examples:
  turnlog dataset build calc --view rl --format parquet
  turnlog dataset build good --view sft --best-of-group --min-reward 1
  turnlog dataset build pairs --view preference --min-margin 0.5 --format arrow
  turnlog dataset build late --min-step 10 --outcome completed --dedupe tokens
  turnlog dataset verify calc
"""
FILTERS = (
    ("--recipe", "recipes", str, "NAME", "of these recipes: --recipe calc"),
    ("--dataset", "datasets", str, "NAME", "of these datasets of tasks: --dataset tasks.jsonl"),
    ("--task-type", "task_types", str, "TYPE", "whose dataset row has this `task_type` or `type`: --task-type algebra"),
    ("--task", "tasks", str, "ID", "of these tasks: --task calc/17"),
    ("--outcome", "outcomes", str, "OUTCOME", "with this outcome (completed, truncated, ...): --outcome completed"),
    ("--environment-version", "environment_versions", str, "V",
     "of these environment versions: --environment-version 2"),
    ("--expire-before", "expire_before", str, "[NAME=]V",
     "whose environment (or the one named) has at least this version: --expire-before shop=2.1"),
    ("--include-run", "runs", str, "ID", "of these runs instead of --run; `any` for every run: --include-run any"),
)  # fmt: skip
"""(flag, field of Query, type, metavar, help that completes "rows ..."). Each option may be given several times."""
BOUNDS = (
    ("--min-reward", "min_reward", float, "X", "with reward >= X: --min-reward 0.5"),
    ("--max-reward", "max_reward", float, "X", "with reward <= X: --max-reward 0"),
    ("--min-version", "min_version", int, "N", "sampled only by weight versions >= N: --min-version 3"),
    ("--max-version", "max_version", int, "N", "sampled only by weight versions <= N: --max-version 9"),
    ("--min-step", "min_step", int, "N", "trained by batch N or a later one: --min-step 10"),
    ("--max-step", "max_step", int, "N", "trained by batch N or an earlier one: --max-step 19"),
)

OPTIONS = {flag: field for flag, field, *_ in (*FILTERS, *BOUNDS)} | {
    "--since": "since_ms", "--until": "until_ms", "--dedupe": "dedupe", "--best": "best",
    "--best-of-group": "best_of_group", "--pairs": "pairs", "--min-margin": "min_margin",
}  # fmt: skip
"""Option -> field of Query."""


def _dataset_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = DATASET_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="hash files and rows again and compare them with the manifest")
    verify.add_argument("out", type=Path, metavar="OUT", help="folder of the dataset")
    add_json(verify, "print its manifest")
    build = actions.add_parser(
        "build", help="write rows of a run as files", epilog=DATASET_EPILOG,
        description="Write rows of a run to the folder OUT: data/*.parquet or data/*.arrow, manifest.json, and a card "
        "for the Hugging Face Hub, README.md.",
    )  # fmt: skip
    build.add_argument("out", type=Path, metavar="OUT", help="folder to create; it appears once it is complete")
    add_json(build, "print its manifest and what the filters removed")
    add_source(build)
    add_rows(build)


def add_rows(verb: argparse.ArgumentParser) -> None:
    """Add the options that select rows and their output format."""
    verb.add_argument(
        "--view", choices=("rl", "sft", "preference"), default="rl",
        help="rl: token rows; sft: conversations; preference: pairs of one group (default rl)",
    )  # fmt: skip
    verb.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    verb.add_argument("--overwrite", action="store_true", help="replace an existing dataset at OUT")
    _add_filters(verb.add_argument_group("filters", "Keep only rows ... (a repeated filter matches any of its values)"))
    _add_choices(verb.add_argument_group("choices"))


def _add_filters(group: argparse._ArgumentGroup) -> None:
    for flag, field, kind, metavar, what in FILTERS:
        group.add_argument(flag, dest=field, type=kind, metavar=metavar, action="append", default=None, help=what)
    group.add_argument(
        "--purpose", dest="purposes", action="append", choices=("train", "eval", "other", "any"), default=None,
        help="of sessions with this purpose (default train); `any` for all: --purpose eval",
    )  # fmt: skip
    for flag, field, parse, metavar, what in BOUNDS:
        group.add_argument(flag, dest=field, type=parse, metavar=metavar, default=None, help=what)
    for flag, field, what in (
        ("--since", "since_ms", "recorded at this time or later"),
        ("--until", "until_ms", "recorded before this time"),
    ):
        group.add_argument(
            flag, dest=field, type=milliseconds, metavar="TIME", default=None,
            help=f"{what}; ISO 8601 (UTC unless it names a zone) or milliseconds: {flag} 2026-01-31T08:00",
        )  # fmt: skip


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dedupe", choices=("none", "tokens", "task"), default="none",
        help="tokens: keep one of the rows with equal token ids (rl) or messages (other views); task: keep only the "
        "first group of a task that gives a row (default none)",
    )  # fmt: skip
    best = group.add_mutually_exclusive_group()
    best.add_argument(
        "--best", type=int, default=None, metavar="K", help="sft: the K sessions of each group with the highest reward"
    )
    best.add_argument("--best-of-group", action="store_true", help="the same as --best 1")
    group.add_argument(
        "--pairs", choices=("extremes", "all"), default="extremes",
        help="preference: best and worst of a group, or every two with unequal rewards (default extremes)",
    )  # fmt: skip
    group.add_argument(
        "--min-margin", type=float, default=0.0, metavar="X", help="preference: least difference of rewards (default 0)"
    )


def _dataset(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.datasets.build import verify
    from turnlog.infra.roles.terminal import say, say_json

    if arguments.action == "verify":
        manifest = verify(arguments.out)
        if arguments.json:
            say_json({"folder": str(arguments.out)} | manifest.to_json())
            return 0
        say(f"{arguments.out}: complete, {_describe_manifest(manifest)}")
        return 0
    manifest = run_verb(_build(settings, arguments))
    came = manifest.provenance
    if arguments.json:
        say_json({"folder": str(arguments.out)} | manifest.to_json() | {"removed": dict(came.removed)})
        return 0
    say(f"{arguments.out}: {_describe_manifest(manifest)}")
    for name, count in came.removed.most_common():
        say(f"  removed by {name}: {count:,}")
    for topic, count in came.reading.undecodable.most_common():
        say(f"  {topic}: {count:,} records are not events and were skipped")
    return 0


def query_of(arguments: argparse.Namespace) -> Query:
    """Return the query of the arguments; purpose `any` removes the filter."""
    from turnlog.consumers.datasets.query import Query

    given: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value, list) else value
        for field in dataclasses.fields(Query)
        if (value := getattr(arguments, field.name)) is not None
    }
    if "any" in given.get("purposes", ()):
        given["purposes"] = ()
    return Query(**given)


def command_of(run: str, query: Query, arguments: argparse.Namespace) -> str:
    """Return the command line that makes the same dataset, with every option that differs from its default."""
    words = ["turnlog", "--run", run, "dataset", "build", "OUT", "--view", arguments.view, "--format", arguments.format]
    words += ["--from", arguments.source] if arguments.source != "topics" else []
    given = query.non_default_values()
    purposes = given.pop("purposes") or ["any"]
    words += [word for purpose in purposes for word in ("--purpose", purpose) if purposes != ["train"]]
    for flag, field in OPTIONS.items():
        value = given.get(field)
        if value is True:
            words.append(flag)
        elif value is not None:
            words += [word for each in (value if isinstance(value, list) else [value]) for word in (flag, str(each))]
    return shlex.join(words)


async def _build(settings: Settings, arguments: argparse.Namespace) -> DatasetManifest:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from turnlog.consumers.datasets.build import build
    from turnlog.consumers.datasets.manifest import Provenance
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import Terminal

    console = Terminal(stderr=True)
    out: Path = arguments.out
    query = query_of(arguments)
    query.check(arguments.view)
    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        async with open_role("dataset", settings, archive=arguments.source == "archive") as role:
            await audit_command(role, "export", "dataset", (out.name,), arguments.view)
            return await build(
                role,
                query,
                out,
                view=arguments.view,
                format=arguments.format,
                overwrite=arguments.overwrite,
                source=arguments.source,
                provenance=Provenance(command=command_of(settings.run.id, query, arguments)),
                progress=lambda passed, total: bar.update(task, completed=passed, total=total),
            )


def _describe_manifest(manifest: DatasetManifest) -> str:
    counts = manifest.counts
    trained = f", {counts.trained_tokens:,} trained" if manifest.view == "rl" else ""
    return (
        f"{counts.rows:,} rows of {manifest.view}, {counts.tokens:,} tokens{trained}, rows {manifest.rows_sha256[:16]}"
    )


VERBS = (
    Verb("dataset", "build a Parquet or Arrow dataset of a run, or verify one", _dataset, _dataset_arguments,
         reads=acts("build")),
)  # fmt: skip
