"""Command-line arguments of the commands that read recorded data. It imports argparse alone, so that --help stays
instant."""

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
    """Add the arguments of `turnlog archive`."""
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


INDEX_EPILOG = """\
Examples:
  turnlog index                           the role: follow the log into [index] path, until it is stopped
  turnlog index build                     everything that is on the log now, and end
  turnlog index build --from archive      when the topics are gone, or no longer begin at their beginning
"""


def index_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog index`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = INDEX_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "build"), default="run", help="run the role (default), or index and end"
    )
    _source(verb)


DASHBOARD_EPILOG = """\
It reads the file that `turnlog index` keeps, and the log or the archive only for tokens and single records. It listens
on the loopback; [dashboard] host opens it to others, who then log in. docs/dashboard.md shows its pages.

Examples:
  turnlog dashboard                       serve until Ctrl-C; the first lines say where, and how to log in
  turnlog dashboard --port 8080           at a port of your choice
  turnlog dashboard --from archive        when the topics are gone
  turnlog dashboard link                  another login link to the one that serves
  turnlog dashboard --against datasets/rloo
                                          beside a refold: settings and samples that differ
"""


def dashboard_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog dashboard`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DASHBOARD_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("serve", "link"), default="serve", help="serve (default), or print a login link"
    )
    verb.add_argument("--host", default="", metavar="ADDRESS", help="to listen on (default: [dashboard] host)")
    verb.add_argument(
        "--port", type=int, default=None, metavar="N", help="there; 0 picks a free one (default: [dashboard] port)"
    )
    verb.add_argument(
        "--against", action="append", default=[], metavar="RUN|FOLDER",
        help="compare with another run's index, or with a refold (`turnlog replay --out`); again for more",
    )  # fmt: skip
    _source(verb)


ENGINES_EPILOG = """\
What is asked for stands on the log. An engine that comes serves once it has the newest weights; one that goes takes no
new requests, and what runs there ends within [engine] drain_s or is submitted again elsewhere (docs/engines.md).

Examples:
  turnlog engines list                            who serves, with which weights, and who asked for it
  turnlog engines scale 4                         of the engines that `turnlog up` hosts; waits until they serve
  turnlog engines register http://sglang-7:30000  one that you have started yourself, with the model of [model] path
  turnlog engines drain http://sglang-7:30000     let it go; by its name, too
Exit status: 0 done, 2 cannot.
"""


def engines_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog engines`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ENGINES_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="engines of the run, as its log has them")
    listed.add_argument("--json", action="store_true")
    scaled = actions.add_parser("scale", help="host N engines")
    scaled.add_argument("count", type=int, choices=range(1, 1025), metavar="N", help="1 to 1024")
    joined = actions.add_parser("register", help="let an engine of your own serve, too")
    joined.add_argument("url", metavar="URL", help="http://host:port as gateways and its loader reach it")
    joined.add_argument("--name", default="", metavar="ID", help="what the log calls it (default: HOST:PORT)")
    gone = actions.add_parser("drain", help="let an engine go")
    gone.add_argument("engine", metavar="URL|ID", help="its address or name, as `list` shows them")
    for action in (scaled, joined, gone):
        action.add_argument("--reason", default="", metavar="TEXT", help="kept on the log")
        action.add_argument("--no-wait", action="store_true", help="return as soon as it is on the log")


QUERY_EPILOG = """\
It asks the file that `turnlog index` keeps; docs/index-schema.md lists its tables. A question reads and computes: it
opens no file, loads no extension, changes nothing, and ends when its time, memory or rows are used up.

Examples:
  turnlog query "select recipe, avg(reward), count(*) from sessions group by recipe"
  turnlog query --json "select fate, count(*) from sessions group by fate"
  turnlog query --out steps.parquet "select * from steps order by step"
"""


def query_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog query`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = QUERY_EPILOG
    verb.add_argument("sql", metavar="SQL", help="one SELECT; - reads it from standard input")
    shape = verb.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true")
    shape.add_argument("--out", type=Path, metavar="FILE", help="write the answer as Parquet, with where it came from")
    verb.add_argument("--limit", type=int, default=10_000, metavar="N", help="rows at most (default 10000)")
    verb.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds at most (default 30)")
    verb.add_argument("--memory", type=int, default=512, metavar="MB", help="memory at most (default 512)")


TAIL_EPILOG = """\
Examples:
  turnlog tail                                    what comes from now on, until Ctrl-C
  turnlog tail --all --until-end --kind GroupScored --kind StepCompleted
  turnlog tail --all --session 3fa2 --json
"""


def tail_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog tail`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TAIL_EPILOG
    verb.add_argument("--session", default="", metavar="ID", help="only of sessions that begin so")
    verb.add_argument("--group", default="", metavar="ID", help="only of groups that begin so")
    verb.add_argument("--kind", action="append", default=[], metavar="RECORD", help="only such records; again for each")
    verb.add_argument("--all", action="store_true", help="from the beginning (default: what comes from now on)")
    verb.add_argument("--until-end", action="store_true", help="end where the log ends now")
    verb.add_argument("--json", action="store_true", help="a JSON object per line")
    _source(verb)


WHY_EPILOG = """\
ID is a session or group, or its beginning. A token is SESSION:TURN:TOKEN, counted from 0: turns in order of the log,
tokens of the turn's output. Chains are read from the index, tokens from topics or archive.

Examples:
  turnlog why 3fa2            why a session was trained, masked, discarded, excluded, stale or not drawn
  turnlog why 3fa2:1:17       the same of one of its tokens
"""


def why_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog why`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = WHY_EPILOG
    verb.add_argument("about", metavar="ID", help="a session, a group, or SESSION:TURN:TOKEN")
    verb.add_argument("--json", action="store_true")
    _source(verb)


TRACE_EPILOG = """\
Sessions with turns, engine calls, tool calls and sandboxes; steps; weights: as OTLP over HTTP. A group's commits say
how far that is; after a kill some spans come again, with the ids that they had. A session is told when it is over.

Examples:
  turnlog trace --to http://localhost:4318                  follow the run, until it is stopped
  TURNLOG_TRACE_RATIO=0.1 turnlog trace --to http://localhost:4318 --until-end
  turnlog trace --from archive                              when the topics are gone; to [trace] url
"""


def trace_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog trace`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TRACE_EPILOG
    verb.add_argument(
        "--to", default="", metavar="URL", help="of the collector, up to /v1/traces (default [trace] url)"
    )
    verb.add_argument("--until-end", action="store_true", help="end where the log ends now (default: follow it)")
    _source(verb)


TRACK_EPILOG = """\
It reads train-steps and writes files alone: what TensorBoard shows, and what `wandb sync` uploads when you call it. How
far they are is read from the files, so that a killed call's successor writes no step twice and leaves none out. A step
that a later incarnation of the trainer did again replaces the first one. docs/outlets.md has the names of the curves.

Examples:
  turnlog track --to tensorboard=curves             follow the run into curves/RUN; tensorboard --logdir curves shows it
  turnlog track --to tensorboard=curves --to wandb=curves-wandb --until-end
  turnlog track --to wandb=curves-wandb --from archive      when the topics are gone
"""


def track_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog track`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TRACK_EPILOG
    verb.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="KIND=DIR",
        help="tensorboard or wandb, and a folder; again for each",
    )
    verb.add_argument("--until-end", action="store_true", help="end where the log ends now (default: follow it)")
    _source(verb)


GC_EPILOG = """\
A first call with --delete moves what nothing has named for a grace into the bucket's trash/, from where readers take it
back; a call a grace later looks again and deletes it for good. It reads every record of every log and archive of the
bucket. What is marked needs no lock: calls beside each other, and killed ones, lose nothing.

Examples:
  turnlog --run demo-20260101-120000 gc               show it, change nothing
  turnlog --settings cluster.toml gc --grace 3d --delete
  turnlog --settings cluster.toml gc --also other-cluster.toml --json
"""


def gc_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog gc`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = GC_EPILOG
    verb.add_argument("--delete", action="store_true", help="let it go (default: show it)")
    verb.add_argument(
        "--grace", type=_seconds, default="1d", metavar="TIME",
        help="unnamed for so long by the store's clock, at least 2h: 36h, 3d (default 1d)",
    )  # fmt: skip
    _bucket(verb)
    verb.add_argument(
        "--unowned", action="store_true",
        help="also what lies in no owner's folder: every log that ever used the bucket is one of those read here",
    )  # fmt: skip
    verb.add_argument("--json", action="store_true")


def _seconds(text: str) -> float:
    """Parse 90s, 30m, 36h, 3d into seconds. Raises ArgumentTypeError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a number and one of {', '.join(units)}") from None


DELETE_EPILOG = """\
It lists topics with their offsets and bytes, groups, the run's folder and archive in the store, its checkpoints and its
directory, says what stays and why, and changes nothing. With --delete all of it goes; a call that was killed is said
again. A run that is up is refused, as is one that another run or archive needs. What embedded servers hold lies in
the directory and goes with it.

Examples:
  turnlog run delete demo-20260101-120000
  turnlog run delete demo-20260101-120000 --delete
  turnlog --settings team-a.toml run delete calc-7 --also team-b.toml --delete --yes
"""


def delete_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog run delete`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.description = "Delete a run: show what that takes, or let it go for good."
    verb.epilog = DELETE_EPILOG
    verb.add_argument("target", metavar="RUN", help="its id; settings are those of its directory, else of --settings")
    verb.add_argument("--delete", action="store_true", help="let it go (default: show it); asks for the run's id")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    _bucket(verb)
    verb.add_argument("--json", action="store_true")


def _bucket(verb: argparse.ArgumentParser) -> None:
    """Add the options that name other users of the bucket."""
    verb.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FILE",
        help="settings of another cluster whose runs use the bucket; again for each",
    )  # fmt: skip
    verb.add_argument(
        "--retired", action="append", default=[], metavar="FOLDER",
        help="an owner whose log is gone for good: of it only archives count; again for each",
    )  # fmt: skip


FORK_EPILOG = """\
Examples:
  turnlog --run second run fork --from demo-20260101-120000 --step 20
  turnlog --settings other.toml run fork --from demo-20260101-120000
"""


def fork_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog run fork`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.description = (
        "Make the run of --run or --settings from a checkpoint of another: weights, optimizer, learning rate and the "
        "place in the dataset."
    )
    verb.epilog = FORK_EPILOG
    verb.add_argument(
        "--from", dest="parent", required=True, metavar="RUN", help="id of a run beside the new one, or its directory"
    )
    verb.add_argument(
        "--step", type=int, metavar="N", help="of its checkpoints that of N optimizer steps (default newest)"
    )
    verb.add_argument(
        "--from-settings", type=Path, metavar="FILE", help="the parent's settings (default settings.toml there)"
    )
    verb.add_argument("--archive", action="store_true", help="read the parent's archive instead of its topics")
    verb.add_argument("--to-prefix", metavar="PREFIX", help="[kafka] prefix of the new run")
    verb.add_argument("--draws", type=int, metavar="N", help="[feeder] draws of the new run, its own alone")


EXPORT_EPILOG = """\
FOLDER is what transformers and SGLang load: safetensors, config, tokenizer, chat template, generation settings and a
card that says which run, step and version it is. It appears when it is whole; one that exists is refused.

Examples:
  turnlog --run demo-20260101-120000 export models/calc                 the newest published version
  turnlog --run demo-20260101-120000 export models/calc-9 --version 9
  turnlog --run demo-20260101-120000 export models/calc-best --best     what `turnlog eval` finds best
  turnlog --run demo-20260101-120000 export models/calc-10 --checkpoint step-00000010-i0
  turnlog --run demo-20260101-120000 export models/calc --from archive  when the topics are gone
"""


def export_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog export`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EXPORT_EPILOG
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="folder to make")
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="a published weight version (default: the newest)")
    which.add_argument("--best", action="store_true", help="the version that `turnlog eval` finds best")
    which.add_argument(
        "--checkpoint",
        default="",
        metavar="NAME",
        help="one of the run's checkpoints instead, as [trainer] checkpoints keeps them",
    )
    verb.add_argument("--json", action="store_true", help="what was written")
    _source(verb)


EVAL_EPILOG = """\
The feeder asks for a round of [eval] tasks after every [eval] every draws; their sessions never train. A session
counts for the version that sampled all of it. pass@k is the unbiased estimator of Chen et al. 2021; intervals are at
95 %, with a task as the unit. The best version is the one with the highest lower end of pass@1.

Examples:
  TURNLOG_EVAL_EVERY=5 turnlog --run demo-20260101-120000 up
  turnlog --run demo-20260101-120000 eval
  turnlog --run demo-20260101-120000 eval --json --k 1,4
  turnlog --run demo-20260101-120000 export models/calc --best
"""


def eval_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog eval`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EVAL_EPILOG
    verb.add_argument("--k", type=_ks, metavar="K,...", help="of pass@k (default: 1, 2, 4, ... up to the samples)")
    verb.add_argument("--json", action="store_true")
    _source(verb)


def _ks(text: str) -> list[int]:
    """Parse 1,4 into a list of positive integers. Raises ArgumentTypeError."""
    found = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(found) != len(text.split(",")) or 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on: 1,4")
    return found


SFT_EPILOG = """\
DATASET is a folder that `turnlog dataset build` wrote: of the view sft (conversations, rendered by the chat template
of MODEL; every answer is imitated) or rl (the tokens and masks that were recorded). A share of the tasks is held out:
their loss is measured before the first step and after each epoch. OUT appears when it is whole; a run that was killed
goes on after its last epoch when the same command is given again. [trainer] says dtype, threads, clip_grad,
weight_decay, betas and microbatch_tokens.

Rejection sampling, from a run to a better first policy:
  turnlog --run a dataset build good --view sft --best 2 --min-reward 1
  turnlog sft --dataset good --model models/base --out models/better --epochs 2 --rate 1e-5
  TURNLOG_MODEL_PATH=models/better turnlog --run b up
"""


def sft_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog sft`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = SFT_EPILOG
    for name, what in (
        ("dataset", "folder of a dataset, view sft or rl"),
        ("model", "Hugging Face folder to begin from: weights, tokenizer, chat template"),
        ("out", "folder to make"),
    ):
        verb.add_argument(f"--{name}", type=Path, required=True, metavar="FOLDER", help=what)
    for name, kind, default, metavar, what in (
        ("epochs", int, 1, "N", "passes over the rows"),
        ("rate", float, 1e-5, "R", "highest learning rate: rises over a tenth of the steps, then falls to a twentieth"),
        ("rows", int, 32, "N", "rows of a step"),
        ("held-out", float, 0.05, "SHARE", "of the tasks, measured and never trained; 0 for none"),
        ("max-tokens", int, 0, "N", "rows that are longer are left out, and counted; 0: the model's window"),
        ("seed", int, 0, "N", "of the order of rows and the choice of the tasks held out"),
    ):
        verb.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{what} (default {default})")
    verb.add_argument("--fresh", action="store_true", help="forget what a killed run of this OUT has done")


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
"""(flag, field of Query, type, metavar, help that completes "rows ..."). Each option may be given several times."""
BOUNDS = (
    ("--min-reward", "min_reward", float, "X", "with reward >= X: --min-reward 0.5"),
    ("--max-reward", "max_reward", float, "X", "with reward <= X: --max-reward 0"),
    ("--min-version", "min_version", int, "N", "sampled by weight versions >= N alone: --min-version 3"),
    ("--max-version", "max_version", int, "N", "sampled by weight versions <= N alone: --max-version 9"),
    ("--min-step", "min_step", int, "N", "trained by batch N or a later one: --min-step 10"),
    ("--max-step", "max_step", int, "N", "trained by batch N or an earlier one: --max-step 19"),
)


def dataset_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions `build` and `verify` of `turnlog dataset`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DATASET_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="hash files and rows again and compare with the manifest")
    verify.add_argument("out", type=Path, metavar="OUT", help="folder of the dataset")
    verify.add_argument("--json", action="store_true", help="its manifest")
    build = actions.add_parser(
        "build", help="rows of a run as files", epilog=DATASET_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write rows of a run to the folder OUT: data/*.parquet or data/*.arrow, and manifest.json.",
    )  # fmt: skip
    build.add_argument("out", type=Path, metavar="OUT", help="folder to make; it appears when it is whole")
    build.add_argument("--json", action="store_true", help="its manifest, and what filters removed")
    build.add_argument(
        "--from", dest="source", choices=("topics", "archive"), default="topics",
        help="read the topics, or the archive of the run (default topics)",
    )  # fmt: skip
    _add_rows(build)


def _add_rows(verb: argparse.ArgumentParser) -> None:
    """Add the options that select rows and their output format."""
    verb.add_argument(
        "--view", choices=("rl", "sft", "preference"), default="rl",
        help="rl: token rows; sft: conversations; preference: pairs of one group (default rl)",
    )  # fmt: skip
    verb.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    verb.add_argument("--overwrite", action="store_true", help="replace the dataset that stands at OUT")
    _add_filters(verb.add_argument_group("filters", "Keep only rows ... (a filter given twice takes either)"))
    _add_choices(verb.add_argument_group("choices"))


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
    best = group.add_mutually_exclusive_group()
    best.add_argument(
        "--best", type=int, default=None, metavar="K", help="sft: of each group the K best rewarded sessions"
    )
    best.add_argument("--best-of-group", action="store_true", help="the same as --best 1")
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
Exit status: 0 done, also when `list` finds none; 1 nothing to requeue, 2 cannot.
"""


def dead_letters_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog dead-letters`."""
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
    """Add the arguments of `turnlog fold`."""
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
        help="only records up to then: a time (ISO 8601 or milliseconds), step:N, or topic[partition]@offset",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="forget what an unfinished replay has done")
    verb.add_argument("--json", action="store_true", help="the verdict, or the manifest of what was written")
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


REWARD_EPILOG = """\
The verifier is what MODULE:NAME names (a verifier, or a recipe that has one), else each session's own recipe names it,
as it is installed here. Functions, services, judge models and sums of them can be asked again; what needs a sandbox or
an environment is refused. The log stays as it is: the new rewards stand in the dataset, with the advantages and groups
that follow from them.

Examples:
  turnlog reward rerun --dry-run                              how many rewards would the installed recipe change?
  turnlog reward rerun --verifier my_recipe:STRICT --dry-run  and another verifier?
  turnlog reward rerun data/strict --verifier my_recipe:STRICT
  turnlog reward rerun data/pairs --verifier my_recipe:STRICT --view preference --min-margin 0.5
  turnlog --run old reward rerun data/old --from archive --at-once 32

Exit status: 0 done, 2 cannot.
"""


def reward_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the action `rerun` of `turnlog reward`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = REWARD_EPILOG
    rerun = verb.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "rerun", help="judge recorded sessions again", epilog=REWARD_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Judge the sessions of a run again, and write the dataset that it would have given.",
    )  # fmt: skip
    rerun.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder to make; it appears when it is whole")
    rerun.add_argument("--verifier", default="", metavar="MODULE:NAME", help="who judges (default: the recipe's)")
    rerun.add_argument("--dry-run", action="store_true", help="judge, say what would change, write nothing")
    rerun.add_argument("--at-once", type=int, default=8, metavar="N", help="sessions judged at once (default 8)")
    rerun.add_argument("--fresh", action="store_true", help="ask again what a killed rerun has asked")
    _source(rerun)
    _add_rows(rerun)


def topics_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog topics`."""
    verb.add_argument("action", choices=("apply", "check", "acls"), help="acls: print what each role may have to do")
    verb.add_argument(
        "--principal", action="append", default=[], metavar="ROLE=User:NAME", help="acls: who a role is (User:ROLE)"
    )
    verb.add_argument(
        "--format", choices=("kafka-acls", "json"), default="kafka-acls", help="acls: commands (default), or a list"
    )
