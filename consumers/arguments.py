"""The arguments of the verbs that read the past; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

ARCHIVE_EPILOG = """\
Examples:
  turnlog archive                   the role: closed ranges of every topic, until it is stopped
  turnlog archive flush             everything that is on the log now; stop the role first
  turnlog archive status            what is archived, per topic, and what is not yet
  turnlog archive prune --before 2026-01-31T08:00     show what may be deleted from topics; --yes deletes it
"""


def archive_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ARCHIVE_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "flush", "status", "prune"), default="run",
        help="run the role (default), archive all there is and end, show, or delete archived records from topics",
    )  # fmt: skip
    verb.add_argument(
        "--before", metavar="TIME", default=None,
        help="prune: only files whose records are all older; ISO 8601 (UTC unless it says otherwise) or milliseconds",
    )  # fmt: skip
    verb.add_argument("--yes", action="store_true", help="prune: delete, do not only show")


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


def dataset_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions `build` and `verify`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DATASET_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="hash files and rows again and compare with the manifest")
    verify.add_argument("out", type=Path, metavar="OUT", help="folder of the dataset")
    build = actions.add_parser(
        "build", help="rows of a run as files", epilog=DATASET_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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


DEAD_LETTERS_EPILOG = """\
Examples:
  turnlog dead-letters list --cause AttemptsExhausted     tool calls that took their sandbox down too often
  turnlog dead-letters show 4f1c                          one letter: cause, remedy, the record as far as it can be read
  turnlog dead-letters requeue 4f1c                       append its record to its topic again, once
  turnlog dead-letters requeue --cause UndecodableRecord  all of one cause (asks first; --yes does not)
  turnlog dead-letters skip 'agent.turns[0]@1' --reason "gateway bug, mended"
                                                          let a stopped assembler unit pass one record

A letter is named by its id or any beginning of it that only one letter has. A requeued tool call is a call of its own:
the first answer of the old one stands, so it runs under a new call_id, on the workspace that it named.
Exit status: 0 done, 1 nothing matched, 2 cannot.
"""


def dead_letters_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its actions."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DEAD_LETTERS_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="letters, oldest first")
    _choosing(listed)
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="the N newest (default 50)")
    listed.add_argument("--json", action="store_true", help="one JSON object per letter and line")
    _source(listed)
    shown = actions.add_parser("show", help="one letter in full")
    shown.add_argument("id", metavar="ID")
    shown.add_argument("--json", action="store_true")
    _source(shown)
    again = actions.add_parser("requeue", help="append the records of letters to their topics again")
    again.add_argument("ids", nargs="*", metavar="ID")
    _choosing(again)
    again.add_argument("--again", action="store_true", help="also those that were requeued before")
    again.add_argument("--yes", action="store_true", help="do not ask")
    passed = actions.add_parser("skip", help="let a stopped assembler unit pass one record")
    passed.add_argument("place", metavar="TOPIC[PARTITION]@OFFSET", help="as the unit names it in `turnlog status`")
    passed.add_argument("--reason", required=True, metavar="TEXT", help="kept on the log")


def _choosing(action: argparse.ArgumentParser) -> None:
    for name, what in (("cause", "error class"), ("topic", "topic of the record"), ("role", "who refused it")):
        action.add_argument(f"--{name}", default="", metavar=name.upper(), help=f"only this {what}")


def _source(action: argparse.ArgumentParser) -> None:
    action.add_argument("--from", dest="source", choices=("topics", "archive"), default="topics", help="default topics")


ARCHIVE = "archive"


def fold_arguments(verb: argparse.ArgumentParser) -> None:
    """The options of `turnlog fold`."""
    verb.add_argument(
        "--policy", default="", metavar="A", help="prefix, slime, last-turn or your own (default: the run's)"
    )
    verb.add_argument("--against", default="", metavar="B", help="compare with this policy")
    verb.add_argument("--fork-threshold", type=int, metavar="N", help="of slime, in place of the run's")
    verb.add_argument(
        "--session", default="", metavar="ID", help="this session alone; the beginning of its id is enough"
    )
    verb.add_argument("--group", default="", metavar="ID", help="this group alone")
    verb.add_argument("--show", default="", metavar="SESSION", help="draw the segments of one session")
    verb.add_argument("--top", type=int, default=20, metavar="N", help="sessions to list, those that differ most first")
    verb.add_argument("--from", dest="source", choices=("topics", ARCHIVE), default="topics")
    verb.add_argument("--json", action="store_true")


REPLAY_EPILOG = """\
Examples:
  turnlog replay --verify                              identical to what was emitted and trained?
  turnlog replay --verify --from archive               the same, without the topics
  turnlog replay --verify --until step:10              what was there when step 10 was completed
  turnlog replay --policy last-turn --out data/turns   old sessions under another policy, as a dataset
  turnlog replay --set fold.discount=0.9 --estimator step --out data/steps
  turnlog replay --weighting token --out data/token    the recorded draws with other loss weights

Exit status: 0 identical (or written), 1 different, 2 cannot.
"""


def replay_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its options."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = REPLAY_EPILOG
    verb.add_argument("--verify", action="store_true", help="compare samples and batches with what was trained")
    verb.add_argument(
        "--from", dest="source", choices=("topics", "archive"), default="topics",
        help="read the topics, or the archive of the run (default topics)",
    )  # fmt: skip
    verb.add_argument(
        "--until", metavar="MOMENT", default=None,
        help="only records up to then: a time (ISO 8601 or milliseconds), step:N, or topic[partition]@offset",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="forget what an unfinished replay has done")
    other = verb.add_argument_group("refold", "Write a dataset under other settings (needs --out)")
    other.add_argument("--policy", metavar="NAME", default=None, help="[fold] policy")
    other.add_argument("--estimator", metavar="NAME", default=None, help="[fold] estimator")
    other.add_argument("--weighting", metavar="NAME", default=None, help="[batcher] weighting")
    other.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[],
        help="any other key of [fold] or [batcher]: --set fold.discount=0.9",
    )  # fmt: skip
    other.add_argument(
        "--fold-version", metavar="N", default=None,
        help="fold by the rules of another version than the run's: docs/folds.md says what each one makes otherwise",
    )  # fmt: skip
    other.add_argument("--out", type=Path, metavar="OUT", default=None, help="folder to make")
    other.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    other.add_argument("--overwrite", action="store_true", help="replace the dataset that stands at OUT")
