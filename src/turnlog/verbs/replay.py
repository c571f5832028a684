"""Verbs that fold or judge recorded sessions again: replay, fold, reward."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnlog.infra.roles import ending
from turnlog.settings import Settings
from turnlog.verbs.dataset import add_rows
from turnlog.verbs.verb import Verb, add_source, always

REPLAY_EPILOG = """\
Examples:
  turnlog replay --verify                              is the result identical to what was emitted and trained?
  turnlog replay --verify --from archive               the same without the topics
  turnlog replay --verify --until step:10              only what was there when step 10 was completed
  turnlog replay --policy last-turn --out data/turns   cut old sessions by another rule, as a dataset
  turnlog replay --set fold.discount=0.9 --estimator step --out data/steps
  turnlog replay --weighting token --out data/token    write the recorded batches with other loss weights

Exit status: 0 identical (or written), 1 different, 2 error.
"""


def replay_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog replay`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = REPLAY_EPILOG
    verb.add_argument("--verify", action="store_true", help="compare samples and batches with what was trained")
    verb.add_argument(
        "--from", dest="source", choices=("topics", "archive"), default="topics",
        help="read the topics, or the archive of the run (default topics)",
    )  # fmt: skip
    verb.add_argument(
        "--until", metavar="MOMENT", default=None,
        help="only records up to MOMENT: a time (ISO 8601 or milliseconds), step:N, or topic[partition]@offset",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="discard the progress of an unfinished replay")
    verb.add_argument("--json", action="store_true", help="print the result, or the manifest of what was written")
    other = verb.add_argument_group("refold", "Write a dataset under other settings (needs --out)")
    other.add_argument(
        "--policy", metavar="NAME", default=None, help="rule that cuts sessions into rows ([fold] policy)"
    )
    other.add_argument("--estimator", metavar="NAME", default=None, help="[fold] estimator")
    other.add_argument("--weighting", metavar="NAME", default=None, help="[batcher] weighting")
    other.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[],
        help="any other key of [fold] or [batcher]: --set fold.discount=0.9",
    )  # fmt: skip
    other.add_argument(
        "--fold-version", metavar="N", default=None,
        help="fold by the rules of another version than the run's; docs/folds.md lists what each one changes",
    )  # fmt: skip
    other.add_argument("--out", type=Path, metavar="OUT", default=None, help="folder to create")
    other.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    other.add_argument("--overwrite", action="store_true", help="replace an existing dataset at OUT")


def _replay(settings: Settings, arguments: argparse.Namespace) -> int:
    import uvloop  # as the assembler that it repeats

    from turnlog.consumers.replay.refold import command

    return uvloop.run(command(settings, arguments))


def fold_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog log fold`."""
    verb.add_argument(
        "--policy", default="", metavar="A", help="prefix, slime, last-turn or your own (default: the run's)"
    )
    verb.add_argument("--against", default="", metavar="B", help="compare with this rule")
    verb.add_argument("--fork-threshold", type=int, metavar="N", help="for slime, instead of the run's")
    verb.add_argument(
        "--session", default="", metavar="ID", help="only this session; the beginning of its id is enough"
    )
    verb.add_argument("--group", default="", metavar="ID", help="only this group")
    verb.add_argument("--show", default="", metavar="SESSION", help="draw the segments of one session")
    verb.add_argument("--top", type=int, default=20, metavar="N", help="list the N sessions that differ most")
    verb.add_argument("--from", dest="source", choices=("topics", "archive"), default="topics")
    verb.add_argument("--json", action="store_true")


def _fold(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.fold_comparison import show

    return show(settings, arguments)


REWARD_EPILOG = """\
The verifier is the one that MODULE:NAME names (a verifier, or a recipe that has one), or else that of each session's
recipe as it is installed here. Functions, services, judge models and sums of them can judge again; verifiers that need
a sandbox or an environment are refused. The log does not change: the dataset holds the new rewards, with the advantages
and groups that follow from them.

Examples:
  turnlog log reward rerun --dry-run                              how many rewards would the installed recipe change?
  turnlog log reward rerun --verifier my_recipe:STRICT --dry-run  how many would another verifier change?
  turnlog log reward rerun data/strict --verifier my_recipe:STRICT
  turnlog log reward rerun data/pairs --verifier my_recipe:STRICT --view preference --min-margin 0.5
  turnlog --run old log reward rerun data/old --from archive --at-once 32

Exit status: 0 success, 2 error.
"""


def reward_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the action `rerun` of `turnlog log reward`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = REWARD_EPILOG
    rerun = verb.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "rerun", help="judge recorded sessions again", epilog=REWARD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Judge the sessions of a run again and write the dataset that would have resulted.",
    )  # fmt: skip
    rerun.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder to create; it appears once complete")
    rerun.add_argument("--verifier", default="", metavar="MODULE:NAME", help="verifier (default: that of the recipe)")
    rerun.add_argument("--dry-run", action="store_true", help="judge and show what would change; write nothing")
    rerun.add_argument("--at-once", type=int, default=8, metavar="N", help="sessions judged concurrently (default 8)")
    rerun.add_argument("--fresh", action="store_true", help="discard the progress of a killed rerun")
    add_source(rerun)
    add_rows(rerun)


def _reward(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.replay.rejudge import command

    return ending.run_verb(command(settings, arguments))


VERBS = (
    Verb("replay", "fold the log again: compare, go back in time, refold", _replay, replay_arguments, reads=always),
    Verb("fold", "compare two policies on recorded sessions; write nothing", _fold, fold_arguments,
         reads=always, under="log"),
    Verb("reward", "judge recorded sessions again and write a dataset", _reward, reward_arguments,
         reads=always, under="log"),
)  # fmt: skip
