"""Verbs that fold or judge recorded sessions again: replay, fold, reward."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog.infra.roles import ending
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.dataset import add_rows, query_of
from turnlog.verbs.verb import Verb, add_json, add_source, always

if TYPE_CHECKING:
    from turnlog.consumers.datasets.query import Query
    from turnlog.consumers.replay.refold import Changes
    from turnlog.infra.roles.terminal import Terminal

REPLAY_EPILOG = """\
Examples:
  turnlog replay --verify                              is the result identical to what was emitted and trained?
  turnlog replay --verify --from archive               the same without the topics
  turnlog replay --verify --until step:10              only what was there when step 10 was completed
  turnlog replay --policy last-turn --out data/turns   cut recorded sessions by another rule
  turnlog replay --set fold.discount=0.9 --estimator step --out data/steps
  turnlog replay --weighting token --out data/token    write the recorded batches with other loss weights

Exit status: 0 identical (or written), 1 different, 2 error.
"""


def _replay_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = REPLAY_EPILOG
    verb.add_argument(
        "--verify", action="store_true", help="compare the folded samples and batches with those that were trained"
    )
    add_source(verb)
    verb.add_argument(
        "--until", metavar="MOMENT", default=None,
        help="only records up to MOMENT: a time (ISO 8601 or milliseconds), step:N, or topic[partition]@offset",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="discard the progress of an unfinished replay")
    add_json(verb, "print the result, or the manifest of what was written")
    other = verb.add_argument_group("refold", "Write a dataset under other settings (needs --out)")
    other.add_argument(
        "--policy", metavar="NAME", default=None, help="rule that cuts sessions into rows ([fold] policy)"
    )
    other.add_argument("--estimator", metavar="NAME", default=None, help="advantage estimator ([fold] estimator)")
    other.add_argument(
        "--weighting", metavar="NAME", default=None, help="rule for the loss weights of tokens ([batcher] weighting)"
    )
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

    return uvloop.run(replay_or_refold(settings, arguments))


async def replay_or_refold(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run `turnlog replay` and return the exit status. Raises ReplayError, and what the log, the store and the registry
    raise, which exits with status 2."""
    from turnlog.consumers.replay.source import BadRefold

    changes = changes_of(arguments)
    if changes.none:
        if arguments.out is not None:
            raise BadRefold("--out is for a refold: name what changes, for example --policy, --estimator or --set")
        return await replay(
            settings,
            verify=arguments.verify,
            source=arguments.source,
            until=arguments.until,
            fresh=arguments.fresh,
            as_json=arguments.json,
        )
    if arguments.verify:
        raise BadRefold("--verify compares what was recorded: omit the changes")
    if arguments.out is None:
        raise BadRefold("a refold writes a dataset: name a folder with --out FOLDER")
    return await refold(
        settings, changes, arguments.out, format=arguments.format, source=arguments.source, until=arguments.until,
        fresh=arguments.fresh, overwrite=arguments.overwrite, as_json=arguments.json,
    )  # fmt: skip


async def replay(
    settings: Settings,
    *,
    verify: bool,
    console: Terminal | None = None,
    source: str = "topics",
    until: str | None = None,
    fresh: bool = False,
    as_json: bool = False,
) -> int:
    """Replay, print the result and return the exit status: 0 if identical, 1 at the first divergence or if nothing is
    recorded. Without `verify`, print only the counts.

    `source` is topics or archive; `until` is parsed by `source.moment`; `fresh` discards the state of an unfinished
    replay. Raises ReplayError, and what the log, the store and the registry raise, which exits with status 2.
    """
    from turnlog.consumers.replay.progress import TerminalProgress
    from turnlog.consumers.replay.verify import ARCHIVE, FOLDER, run
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.runs import nothing_recorded
    from turnlog.infra.roles.terminal import Terminal, say_json

    console = console or Terminal(stderr=as_json)
    async with open_role("replay", settings, archive=source == ARCHIVE) as role:
        with TerminalProgress(console) as progress:
            folder = Path(settings.run.directory) / FOLDER
            verdict = await run(role, until=until, progress=progress, folder=folder, fresh=fresh)
        empty = "" if verdict.records_compared or verdict.divergence else await nothing_recorded(role)
    if as_json:
        say_json(dataclasses.asdict(verdict) | {"identical": verdict.identical, "why": empty})
        return ExitStatus.DONE if verdict.identical or not (verify or empty) else ExitStatus.DIFFERS
    if empty:
        console.print(f"replay: {empty}", soft_wrap=True)
        return ExitStatus.DIFFERS
    if verdict.resumed:
        console.print("continued an unfinished replay (--fresh starts over)")
    if not verify:
        console.print(verdict.comparison_summary)
        return 0
    if verdict.identical:
        console.print(f"replay: identical ({verdict.comparison_summary})", style="green")
        return 0
    console.print(f"replay: DIFFERENT ({verdict.comparison_summary})", style="red", soft_wrap=True)
    console.print(f"first divergence: {verdict.divergence}", soft_wrap=True)
    return ExitStatus.DIFFERS


async def refold(
    settings: Settings,
    changes: Changes,
    out: Path,
    *,
    format: str = "parquet",
    source: str = "topics",
    until: str | None = None,
    fresh: bool = False,
    overwrite: bool = False,
    as_json: bool = False,
    console: Terminal | None = None,
) -> int:
    """Write the dataset (if [fold] changes) and the batches (if [batcher] changes) below `out`, and return 0. Raises
    ReplayError, DatasetError, and what the log, the store and the registry raise."""
    from turnlog.consumers.replay.progress import TerminalProgress
    from turnlog.consumers.replay.refold import Refold
    from turnlog.consumers.replay.verify import ARCHIVE, FOLDER
    from turnlog.infra.access.audit import audit_command
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import Terminal, say_json

    console = console or Terminal(stderr=as_json)
    async with open_role("replay", settings, archive=source == ARCHIVE) as role:
        await audit_command(role, "export", "dataset", (out.name,), "replay")
        with TerminalProgress(console) as progress:
            folder = Path(settings.run.directory) / FOLDER
            work = Refold(role, changes, out, folder, format=format, until=until, overwrite=overwrite)
            written = await work.run(progress=progress, fresh=fresh)
    if as_json:
        manifest = out / "manifest.json"  # absent if only [batcher] changes
        body = json.loads(manifest.read_text()) if manifest.exists() else None
        say_json({"folder": str(out), "manifest": body, "said": written.split("\n")})
        return 0
    console.print(*written.split("\n"), sep="\n", highlight=False, soft_wrap=True)
    return 0


def changes_of(arguments: argparse.Namespace) -> Changes:
    """Read the changes from the command line. Raises BadRefold, UnknownFoldVersion."""
    from turnlog.consumers.replay.refold import Changes
    from turnlog.consumers.replay.source import BadRefold
    from turnlog.processors.core.fold_versions import fold_version

    found: dict[str, dict[str, str]] = {"fold": {}, "batcher": {}}
    for change in arguments.changes:
        key, equals, value = change.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or section not in found:
            raise BadRefold(f"--set {change}: write fold.KEY=VALUE or batcher.KEY=VALUE")
        found[section][name] = value.strip()
    for section, name in (("fold", "policy"), ("fold", "estimator"), ("batcher", "weighting")):
        if getattr(arguments, name) is not None:
            found[section][name] = getattr(arguments, name)
    if arguments.fold_version is not None:
        fold_version(arguments.fold_version)
    return Changes(**found, fold_version=arguments.fold_version)


def fold_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog log fold`."""
    verb.add_argument(
        "--policy", default="", metavar="A",
        help="trajectory rule: prefix, slime, last-turn or your own (default: [fold] policy of the run)",
    )  # fmt: skip
    verb.add_argument(
        "--against", default="", metavar="B", help="second trajectory rule, with which the first is compared"
    )
    verb.add_argument(
        "--fork-threshold", type=int, metavar="N",
        help="value of [fold] fork_threshold_tokens for the rule slime (default: the run's)",
    )  # fmt: skip
    verb.add_argument(
        "--session", default="", metavar="ID", help="only this session; the beginning of its id is enough"
    )
    verb.add_argument("--group", default="", metavar="ID", help="only this group")
    verb.add_argument(
        "--show", default="", metavar="SESSION", help="draw the turn tree and the segments of one session"
    )
    verb.add_argument(
        "--top", type=int, default=20, metavar="N", help="list the N sessions that differ most (default 20)"
    )
    add_source(verb)
    add_json(verb)


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


def _reward_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = REWARD_EPILOG
    rerun = verb.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "rerun", help="compute rewards again", epilog=REWARD_EPILOG,
        description="Compute the rewards of a run again, and write the dataset that would have resulted.",
    )  # fmt: skip
    rerun.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder to create; it appears once complete")
    rerun.add_argument("--verifier", default="", metavar="MODULE:NAME", help="verifier (default: that of the recipe)")
    rerun.add_argument(
        "--dry-run", action="store_true", help="compute rewards and show what would change; write nothing"
    )
    rerun.add_argument(
        "--at-once", type=int, default=8, metavar="N", help="sessions whose rewards are computed at once (default 8)"
    )
    rerun.add_argument("--fresh", action="store_true", help="discard the progress of a killed rerun")
    add_source(rerun)
    add_rows(rerun)


def _reward(settings: Settings, arguments: argparse.Namespace) -> int:
    return ending.run_verb(_rerun(settings, arguments))


def rows_asked(arguments: argparse.Namespace) -> Query:
    """Return which rows of the view to write. Runs before any verifier is asked. Raises NoSuchRows, DatasetError."""
    from turnlog.consumers.datasets.query import Query
    from turnlog.consumers.datasets.writer import DatasetWriter
    from turnlog.consumers.replay.rejudge import NoSuchRows

    query, view, out = query_of(arguments), arguments.view, arguments.out
    if out is None and not arguments.dry_run:
        raise NoSuchRows("a rerun writes a dataset: name a folder (OUT), or use --dry-run to see what would change")
    if query.runs:
        raise NoSuchRows("a rerun judges only the sessions of the run of --run: omit --include-run")
    if view == "rl" and query != Query():
        raise NoSuchRows(
            f"the view rl has every sample of the fold: {query.non_default_values()} needs --view sft or preference"
        )
    query.check(view)
    if not arguments.dry_run:
        DatasetWriter(out, view, arguments.format, overwrite=arguments.overwrite).abort()
    return query


async def _rerun(settings: Settings, arguments: argparse.Namespace) -> int:
    """Judge again, print what changes, and write the dataset unless this is a dry run. Raises RewardRerunError,
    ReplayError, DatasetError, and what the log, the store and the registry raise."""
    from turnlog.consumers.replay.progress import ReplayState
    from turnlog.consumers.replay.refold import Changes, Refold
    from turnlog.consumers.replay.rejudge import Rerun, verifier_at
    from turnlog.consumers.replay.verify import FOLDER
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say

    verifier = verifier_at(arguments.verifier) if arguments.verifier else None
    query, folder = rows_asked(arguments), Path(settings.run.directory) / FOLDER
    state = ReplayState(folder, {"rejudged": settings.run.id, "by": "" if verifier is None else verifier.name})
    state.load(fresh=arguments.fresh)
    async with open_role("reward", settings, archive=arguments.source == "archive") as role:
        verdicts = await Rerun(role, verifier, at_once=arguments.at_once, state=state).run()
        for line in verdicts.lines():
            say(line)
        if not arguments.dry_run:
            work = Refold(
                role, Changes(), arguments.out, folder, format=arguments.format, overwrite=arguments.overwrite,
                verdicts=verdicts, view=arguments.view, query=query,
            )  # fmt: skip
            say(await work.run(fresh=arguments.fresh))
    state.remove()
    return ExitStatus.DONE


VERBS = (
    Verb("replay", "fold the recorded events again: verify, or apply other settings", _replay, _replay_arguments,
         reads=always),
    Verb("fold", "compare two rules that cut recorded sessions into rows; write nothing", _fold, fold_arguments,
         reads=always, under="log"),
    Verb("reward", "compute the rewards of recorded sessions again, and write a dataset", _reward, _reward_arguments,
         reads=always, under="log"),
)  # fmt: skip
