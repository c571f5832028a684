"""The arguments of `turnlog dataset`; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

EPILOG = """\
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
    ("--outcome", "outcomes", str, "OUTCOME", "that ended so (completed, truncated, agent_error): --outcome completed"),
    ("--environment-version", "environment_versions", str, "V",
     "of these environment versions: --environment-version 2"),
    ("--expire-before", "expire_before", str, "[NAME=]V",
     "whose environment (or the one named) is at least of this version: --expire-before shop=2.1"),
    ("--include-run", "runs", str, "ID", "of these runs instead of --run's; `any`: of every run: --include-run any"),
)  # fmt: skip
"""(flag, field of Query, type, metavar, "rows ..."): may be given several times."""
BOUNDS = (
    ("--min-reward", "min_reward", float, "X", "with reward >= X: --min-reward 0.5"),
    ("--max-reward", "max_reward", float, "X", "with reward <= X: --max-reward 0"),
    ("--min-version", "min_version", int, "N", "sampled by weight versions >= N alone: --min-version 3"),
    ("--max-version", "max_version", int, "N", "sampled by weight versions <= N alone: --max-version 9"),
    ("--min-step", "min_step", int, "N", "trained by batch N or a later one: --min-step 10"),
    ("--max-step", "max_step", int, "N", "trained by batch N or an earlier one: --max-step 19"),
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions `build` and `verify`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="hash files and rows again and compare with the manifest")
    verify.add_argument("out", type=Path, metavar="OUT", help="folder of the dataset")
    build = actions.add_parser(
        "build", help="rows of a run as files", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EPILOG,
        description="Write rows of a run to the folder OUT: data/*.parquet or data/*.arrow, and manifest.json.",
    )  # fmt: skip
    build.add_argument("out", type=Path, metavar="OUT", help="folder to make; it appears when it is whole")
    build.add_argument(
        "--view", choices=("rl", "sft", "preference"), default="rl",
        help="rl: token rows; sft: conversations; preference: pairs of one group (default rl)",
    )  # fmt: skip
    build.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    build.add_argument(
        "--from", dest="source", choices=("topics", "archive"), default="topics",
        help="read the topics, or the archive of the run (default topics)",
    )  # fmt: skip
    build.add_argument("--overwrite", action="store_true", help="replace the dataset that stands at OUT")
    _add_filters(build.add_argument_group("filters", "Keep only rows ... (a filter given twice takes either)"))
    _add_choices(build.add_argument_group("choices"))


def _add_filters(group: argparse._ArgumentGroup) -> None:
    for flag, field, kind, metavar, what in FILTERS:
        group.add_argument(flag, dest=field, type=kind, metavar=metavar, action="append", default=None, help=what)
    group.add_argument(
        "--purpose", dest="purposes", action="append", choices=("train", "eval", "other", "any"), default=None,
        help="of sessions with this purpose (default train); `any`: of all: --purpose eval",
    )  # fmt: skip
    for flag, field, parse, metavar, what in BOUNDS:
        group.add_argument(flag, dest=field, type=parse, metavar=metavar, default=None, help=what)
    for flag, field, what in (
        ("--since", "since_ms", "recorded at that time or later"),
        ("--until", "until_ms", "recorded before that time"),
    ):
        group.add_argument(
            flag, dest=field, type=_milliseconds, metavar="TIME", default=None,
            help=f"{what}; ISO 8601 (UTC unless it says otherwise) or milliseconds: {flag} 2026-01-31T08:00",
        )  # fmt: skip


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dedupe", choices=("none", "tokens", "task"), default="none",
        help="tokens: equal token ids (rl) or messages (else) count once; task: the first group of a task that gives "
        "a row (default none)",
    )  # fmt: skip
    group.add_argument("--best-of-group", action="store_true", help="sft: of each group the best rewarded session")
    group.add_argument(
        "--pairs", choices=("extremes", "all"), default="extremes",
        help="preference: the best against the worst of a group, or every two of unequal reward (default extremes)",
    )  # fmt: skip
    group.add_argument(
        "--min-margin", type=float, default=0.0, metavar="X", help="preference: rewards at least X apart (default 0)"
    )


def _milliseconds(text: str) -> int:
    if text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no ISO 8601 time: {error}") from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
