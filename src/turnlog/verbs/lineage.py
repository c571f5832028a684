"""`turnlog lineage`: what made a set of weights or a dataset, and what a session has influenced."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, always

if TYPE_CHECKING:
    from turnlog.consumers.index.influence import Influence
    from turnlog.consumers.index.lineage import Lineage

LINEAGE_EPILOG = """\
The answer comes from the run's index (`turnlog log index build`), and for a fork also from the indexes of the runs that
it was forked from, in the folders beside the run's own. docs/lineage.md describes the tables and the JSON.

Examples:
  turnlog lineage --weights latest                what the newest weights were trained on, and with which code
  turnlog lineage --weights 12 --since 8          only what came in after version 8
  turnlog lineage --weights 12 --sessions         every session that was trained, a JSON object per line
  turnlog lineage --dataset datasets/best         the same for a dataset of `turnlog dataset build`
  turnlog lineage --session 3fa2 --in datasets    batches, steps, weights, datasets and forks that a session influenced
"""
LATEST, NEWEST = "latest", -1
"""Word for the newest weight version, and its value after parsing."""
DATASETS = Path("datasets")
"""Folder in which datasets are searched for, unless --in names others."""


def _lineage_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = LINEAGE_EPILOG
    about = verb.add_mutually_exclusive_group(required=True)
    about.add_argument("--weights", type=_version, metavar="V", help="a weight version, or `latest`")
    about.add_argument("--dataset", type=Path, metavar="D", help="folder of a dataset of `turnlog dataset build`")
    about.add_argument("--session", metavar="S", help="id of a session, or its beginning")
    verb.add_argument(
        "--since", type=_number, metavar="V0", help="with --weights: only what the steps after version V0 added"
    )
    verb.add_argument(
        "--in", dest="folders", type=Path, action="append", metavar="FOLDER",
        help="with --session: search FOLDER for datasets; may be repeated (default: datasets, if it exists)",
    )  # fmt: skip
    shape = verb.add_mutually_exclusive_group()
    add_json(shape)
    shape.add_argument(
        "--sessions", action="store_true",
        help="with --weights or --dataset: print every session, one JSON object per line",
    )  # fmt: skip


def _number(text: str) -> int:
    """Parse the number of a weight version. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not the number of a weight version")
    return int(text)


def _version(text: str) -> int:
    """Parse a weight version, or the word for the newest. Raises ArgumentTypeError."""
    if text == LATEST:
        return NEWEST
    return _number(text)


def _lineage(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index import BadQuestion

    about = "session" if arguments.session is not None else "dataset" if arguments.dataset is not None else "weights"
    for flag, given, of in (
        ("--since", arguments.since is not None, ("weights",)), ("--in", bool(arguments.folders), ("session",)),
        ("--sessions", arguments.sessions, ("weights", "dataset")),
    ):  # fmt: skip
        if given and about not in of:
            raise BadQuestion(f"{flag} needs {' or '.join(f'--{each}' for each in of)}")
    return _tell_influence(settings, arguments) if about == "session" else _tell_lineage(settings, arguments)


def _tell_lineage(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index.lineage import LineageReader, index_beside
    from turnlog.infra.roles.terminal import Terminal, say_json

    with LineageReader.open(index_beside(settings)) as reader:
        version = None if arguments.weights == NEWEST else arguments.weights
        asked = (settings.run.id, version, arguments.since)
        if arguments.sessions:
            found = reader.sessions(*asked) if arguments.dataset is None else reader.dataset_sessions(arguments.dataset)
            for row in found:
                say_json(row, indent=None)
            return ExitStatus.DONE
        lineage = reader.weights(*asked) if arguments.dataset is None else reader.dataset(arguments.dataset)
    if arguments.json:
        say_json(lineage.body())
    else:
        Terminal().print(*lineage_tables(lineage), sep="\n")
    return ExitStatus.DONE


def _tell_influence(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.index import BadQuestion
    from turnlog.consumers.index.influence import influence
    from turnlog.consumers.index.reader import Index, path_of, resolve_id
    from turnlog.infra.roles.terminal import Terminal, say_json

    folders = arguments.folders or [each for each in (DATASETS,) if each.is_dir()]
    with Index.open(path_of(settings)) as index, index.snapshot():
        kind, name = resolve_id(index, arguments.session)
        if kind != "session":
            raise BadQuestion(f"{name} is a group: `turnlog log why {name}` names its sessions")
        found = influence(index, name, settings, datasets=folders)
        assert found is not None, "the index has the session"
    if arguments.json:
        say_json(found.body())
    else:
        Terminal().print(*influence_tables(found), sep="\n")
    return ExitStatus.DONE


def lineage_tables(lineage: Lineage) -> Iterator[Any]:
    """Yield what a terminal shows of a lineage: a headline, a table of runs and versions, and a table of facts."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from turnlog.consumers.index.lineage_text import CHAIN_COLUMNS, chain_rows, headline, lines_of, share_label

    yield Text(headline(lineage), style="bold")
    runs = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in CHAIN_COLUMNS:
        runs.add_column(name, overflow="fold", justify="left" if name == "run" else "right")
    for part in lineage.runs:
        for row in chain_rows(part):
            runs.add_row(*row)
    if runs.row_count:
        yield runs
    yield Text("\n".join(lines_of(lineage)))
    facts = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("made of", "", "sessions", "tokens", "reward"):
        facts.add_column(name, overflow="fold", justify="left" if name in ("made of", "") else "right")
    for kind, shares in lineage.shares.items():
        for number, share in enumerate(shares):
            mean = "" if share.reward is None else f"{share.reward:.3f}"
            head = kind if not number else ""
            facts.add_row(
                head, share_label(kind, share), f"{share.sessions:,}", f"{share.tokens:,}", mean, end_section=False
            )
        facts.add_section()
    yield facts
    if lineage.tasks > len(lineage.shares["task"]):
        yield Text(f"and {lineage.tasks - len(lineage.shares['task']):,} more tasks (--sessions names all)")


def influence_tables(found: Influence) -> Iterator[Any]:
    """Yield what a terminal shows of the influence of a session."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from turnlog.consumers.index.lineage_text import influence_lines

    yield Text(f"session {found.session}: {found.disposition}, reward {found.reward}", style="bold")
    samples = Table("sample", "disposition", "tokens", "batch", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for one in found.samples:
        batch = "" if one.batch is None else str(one.batch)
        samples.add_row(one.sample_id[:12], one.disposition, f"{one.tokens:,}", batch)
    effects = Table("batch", "step", "generation", "how", "tokens", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for each in found.effects:
        how = f"{each.how}, step skipped" if each.skipped else each.how
        effects.add_row(str(each.batch), str(each.step), str(each.incarnation), how, f"{each.tokens:,}")
    yield from (table for table in (samples, effects) if table.row_count)
    yield Text("\n".join(influence_lines(found)))


VERBS = (
    Verb("lineage", "show what made a set of weights or a dataset, or what a session has influenced", _lineage,
         _lineage_arguments, looks=always),
)  # fmt: skip
