"""The arguments of `turnlog replay`; argparse alone, so that --help stays instant."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
Examples:
  turnlog replay --verify                              identical to what was emitted and trained?
  turnlog replay --verify --from archive               the same, without the topics
  turnlog replay --verify --until step:10              what was there when step 10 was completed
  turnlog replay --policy last-turn --out data/turns   old sessions under another policy, as a dataset
  turnlog replay --set fold.discount=0.9 --estimator step --out data/steps
  turnlog replay --weighting token --out data/token    the recorded draws with other loss weights

Exit status: 0 identical (or written), 1 different, 2 cannot.
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Give the verb its options."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EPILOG
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
