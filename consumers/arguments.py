"""Command-line arguments of the commands that read recorded data. It imports argparse alone, so that --help stays
instant."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

ARCHIVE_EPILOG = """\
Examples:
  turnlog archive                   run the role: archive closed ranges of every topic until it is stopped
  turnlog archive flush             archive everything that is on the log now; stop the role first
  turnlog archive status            show per topic what is archived and what is not yet
  turnlog archive prune --before 2026-01-31T08:00     show what may be deleted from topics; --yes deletes it
"""


def archive_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog archive`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ARCHIVE_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "flush", "status", "prune"), default="run",
        help="run the role (default), archive everything and exit, show, or delete archived records from topics",
    )  # fmt: skip
    verb.add_argument(
        "--before", metavar="TIME", default=None,
        help="prune: only files whose records are all older; ISO 8601 (UTC unless it names a zone) or milliseconds",
    )  # fmt: skip
    verb.add_argument("--yes", action="store_true", help="prune: delete instead of only showing")


INDEX_EPILOG = """\
Examples:
  turnlog index                           run the role: index the log into [index] path until it is stopped
  turnlog index build                     index everything that is on the log now, and exit
  turnlog index build --from archive      if the topics are gone, or their first records were deleted
"""


def index_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog index`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = INDEX_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("run", "build"), default="run", help="run the role (default), or index once"
    )
    _source(verb)


DASHBOARD_EPILOG = """\
The dashboard reads the file that `turnlog index` writes, and the log or the archive only for tokens and single records.
It listens on the loopback interface; [dashboard] host opens it to others, who must then log in. docs/dashboard.md shows
its pages.

Examples:
  turnlog dashboard                       serve until Ctrl-C; the first lines show the URL and how to log in
  turnlog dashboard --port 8080           on a port of your choice
  turnlog dashboard --from archive        if the topics are gone
  turnlog dashboard link                  print another login link for the running dashboard
  turnlog dashboard --against datasets/rloo
                                          compare with a refold: settings and samples that differ
"""


def dashboard_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog dashboard`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DASHBOARD_EPILOG
    verb.add_argument(
        "action", nargs="?", choices=("serve", "link"), default="serve", help="serve (default), or print a login link"
    )
    verb.add_argument("--host", default="", metavar="ADDRESS", help="listen on ADDRESS (default: [dashboard] host)")
    verb.add_argument(
        "--port", type=int, default=None, metavar="N", help="listen on port N; 0 picks one (default: [dashboard] port)"
    )
    verb.add_argument(
        "--against", action="append", default=[], metavar="RUN|FOLDER",
        help="compare with another run's index, or with a refold (`turnlog replay --out`); may be repeated",
    )  # fmt: skip
    _source(verb)


ENGINES_EPILOG = """\
Each request is recorded on the log. A new engine serves once it has the newest weights; a leaving engine takes no new
requests, and those that it still runs end within [engine] drain_s or are submitted again elsewhere (docs/engines.md).

Examples:
  turnlog engines list                            list engines, their weights, and who requested them
  turnlog engines scale 4                         let `turnlog up` host 4 engines; wait until they serve
  turnlog engines register http://sglang-7:30000  add one that you have started yourself with the model in [model] path
  turnlog engines drain http://sglang-7:30000     remove it; its name works as well
Exit status: 0 success, 2 error.
"""


def engines_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog engines`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = ENGINES_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the engines of the run, as recorded on its log")
    listed.add_argument("--json", action="store_true")
    scaled = actions.add_parser("scale", help="host N engines")
    scaled.add_argument("count", type=int, choices=range(1, 1025), metavar="N", help="1 to 1024")
    joined = actions.add_parser("register", help="add an engine that you have started yourself")
    joined.add_argument("url", metavar="URL", help="http://host:port at which gateways and its loader reach it")
    joined.add_argument("--name", default="", metavar="ID", help="its name on the log (default: HOST:PORT)")
    gone = actions.add_parser("drain", help="remove an engine")
    gone.add_argument("engine", metavar="URL|ID", help="its address or name, as shown by `list`")
    for action in (scaled, joined, gone):
        action.add_argument("--reason", default="", metavar="TEXT", help="recorded on the log")
        action.add_argument("--no-wait", action="store_true", help="return as soon as the request is on the log")


QUERY_EPILOG = """\
The query reads the file that `turnlog index` writes; docs/index-schema.md lists its tables. It can only read and
compute: it opens no file, loads no extension, changes nothing, and ends when its time, memory or rows are used up.

Examples:
  turnlog query "select recipe, avg(reward), count(*) from sessions group by recipe"
  turnlog query --json "select fate, count(*) from sessions group by fate"
  turnlog query --out steps.parquet "select * from steps order by step"
"""


def query_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog query`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = QUERY_EPILOG
    verb.add_argument("sql", metavar="SQL", help="one SELECT statement; - reads it from standard input")
    shape = verb.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true")
    shape.add_argument("--out", type=Path, metavar="FILE", help="write the answer as Parquet, with its provenance")
    verb.add_argument("--limit", type=int, default=10_000, metavar="N", help="maximum number of rows (default 10000)")
    verb.add_argument("--timeout", type=float, default=30.0, metavar="S", help="time limit in seconds (default 30)")
    verb.add_argument("--memory", type=int, default=512, metavar="MB", help="memory limit in MB (default 512)")


TAIL_EPILOG = """\
Examples:
  turnlog tail                                    print new events until Ctrl-C
  turnlog tail --all --until-end --kind GroupScored --kind StepCompleted
  turnlog tail --all --session 3fa2 --json
"""


def tail_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog tail`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TAIL_EPILOG
    verb.add_argument("--session", default="", metavar="ID", help="only events of sessions whose id begins with ID")
    verb.add_argument("--group", default="", metavar="ID", help="only events of groups whose id begins with ID")
    verb.add_argument("--kind", action="append", default=[], metavar="RECORD", help="only these records; repeatable")
    verb.add_argument("--all", action="store_true", help="start at the beginning (default: only new events)")
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log")
    verb.add_argument("--json", action="store_true", help="print one JSON object per line")
    _source(verb)


WHY_EPILOG = """\
ID is the id of a session or group, or the beginning of one. A token is SESSION:TURN:TOKEN, both counted from 0: turns
in the order of the log, tokens within the turn's output. Chains of records are read from the index, tokens from the
topics or the archive.

Examples:
  turnlog why 3fa2            why a session was trained, masked, discarded, excluded, stale or not drawn
  turnlog why 3fa2:1:17       the same for one of its tokens
"""


def why_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog why`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = WHY_EPILOG
    verb.add_argument("about", metavar="ID", help="a session, a group, or SESSION:TURN:TOKEN")
    verb.add_argument("--json", action="store_true")
    _source(verb)


TRACE_EPILOG = """\
Exports sessions (with turns, engine calls, tool calls and sandboxes), steps and weights as OTLP over HTTP. A session is
exported when it is over. Progress is committed in a consumer group; after a kill, some spans are sent again with the
same ids.

Examples:
  turnlog trace --to http://localhost:4318                  follow the run until it is stopped
  TURNLOG_TRACE_RATIO=0.1 turnlog trace --to http://localhost:4318 --until-end
  turnlog trace --from archive                              if the topics are gone; send to [trace] url
"""


def trace_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog trace`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TRACE_EPILOG
    verb.add_argument("--to", default="", metavar="URL", help="collector URL without /v1/traces (default [trace] url)")
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    _source(verb)


TRACK_EPILOG = """\
Reads train-steps and only writes files: those that TensorBoard shows, and those that `wandb sync` uploads when you call
it. Progress is read from the files, so that a restart after a kill writes no step twice and leaves none out. If a later
generation of the trainer repeats a step, it replaces the first one. docs/outlets.md lists the names of the curves.

Examples:
  turnlog track --to tensorboard=curves             follow the run into curves/RUN; tensorboard --logdir curves shows it
  turnlog track --to tensorboard=curves --to wandb=curves-wandb --until-end
  turnlog track --to wandb=curves-wandb --from archive      if the topics are gone
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
        help="tensorboard or wandb, and a folder; may be repeated",
    )
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    _source(verb)


GC_EPILOG = """\
The first call with --delete moves objects that nothing has referred to for the grace period into the bucket's trash/,
from which readers can restore them; a call one grace period later checks again and deletes them for good. Each call
reads every record of every log and archive of the bucket. It needs no lock: concurrent or killed calls lose nothing.

Examples:
  turnlog --run demo-20260101-120000 gc               only show what would be moved or deleted
  turnlog --settings cluster.toml gc --grace 3d --delete
  turnlog --settings cluster.toml gc --also other-cluster.toml --json
"""


def gc_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog gc`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = GC_EPILOG
    verb.add_argument("--delete", action="store_true", help="delete them (default: only show them)")
    verb.add_argument(
        "--grace", type=_seconds, default="1d", metavar="TIME",
        help="minimum time without a reference, by the store's clock, at least 2h: 36h, 3d (default 1d)",
    )  # fmt: skip
    _bucket(verb)
    verb.add_argument(
        "--unowned", action="store_true",
        help="also objects in no owner's folder; requires that every log that ever used the bucket is read here",
    )  # fmt: skip
    verb.add_argument("--json", action="store_true")


def _seconds(text: str) -> float:
    """Parse 90s, 30m, 36h, 3d into seconds. Raises ArgumentTypeError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write a number and one of {', '.join(units)}") from None


DELETE_EPILOG = """\
Lists the run's topics with their offsets and bytes, its consumer groups, its folder and archive in the store, its
checkpoints and its directory, says what stays and why, and changes nothing. --delete deletes all of it; if that call is
killed, repeat it. A run that is up, or that another run or archive needs, is refused. The data of embedded servers lies
in the directory and is deleted with it.

Examples:
  turnlog run delete demo-20260101-120000
  turnlog run delete demo-20260101-120000 --delete
  turnlog --settings team-a.toml run delete calc-7 --also team-b.toml --delete --yes
"""


def delete_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog run delete`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.description = "Show what deleting a run would remove, or delete it for good."
    verb.epilog = DELETE_EPILOG
    verb.add_argument("target", metavar="RUN", help="run id; settings come from its directory, else from --settings")
    verb.add_argument("--delete", action="store_true", help="delete the run after asking for its id (default: show)")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    _bucket(verb)
    verb.add_argument("--json", action="store_true")


def _bucket(verb: argparse.ArgumentParser) -> None:
    """Add the options that name other users of the bucket."""
    verb.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FILE",
        help="settings of another cluster whose runs use the bucket; may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--retired", action="append", default=[], metavar="FOLDER",
        help="an owner whose log is gone for good, so that only its archives count; may be repeated",
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
        "Create the run of --run or --settings from a checkpoint of another run: weights, optimizer, learning rate and "
        "position in the dataset."
    )
    verb.epilog = FORK_EPILOG
    verb.add_argument(
        "--from", dest="parent", required=True, metavar="RUN", help="id of a run in the same folder, or its directory"
    )
    verb.add_argument("--step", type=int, metavar="N", help="use the checkpoint after N steps (default newest)")
    verb.add_argument(
        "--from-settings", type=Path, metavar="FILE", help="the parent's settings (default settings.toml there)"
    )
    verb.add_argument("--archive", action="store_true", help="read the parent's archive instead of its topics")
    verb.add_argument("--to-prefix", metavar="PREFIX", help="[kafka] prefix of the new run")
    verb.add_argument("--draws", type=int, metavar="N", help="[feeder] draws of the new run, not counting its parent's")


EXPORT_EPILOG = """\
FOLDER can be loaded by transformers and SGLang: safetensors, config, tokenizer, chat template, generation settings and
a card that names the run, step and version. It appears once it is complete; an existing FOLDER is refused.

Examples:
  turnlog --run demo-20260101-120000 export models/calc                 the newest published version
  turnlog --run demo-20260101-120000 export models/calc-9 --version 9
  turnlog --run demo-20260101-120000 export models/calc-best --best     the best one by `turnlog eval`
  turnlog --run demo-20260101-120000 export models/calc-10 --checkpoint step-00000010-i0
  turnlog --run demo-20260101-120000 export models/calc --from archive  if the topics are gone
"""


def export_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog export`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = EXPORT_EPILOG
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="a published weight version (default: the newest)")
    which.add_argument("--best", action="store_true", help="the best version according to `turnlog eval`")
    which.add_argument(
        "--checkpoint",
        default="",
        metavar="NAME",
        help="one of the run's checkpoints in [trainer] checkpoints instead",
    )
    verb.add_argument("--json", action="store_true", help="print what was written as JSON")
    _source(verb)


EVAL_EPILOG = """\
The feeder requests a round of [eval] tasks after every [eval] every draws; their sessions are never trained. A session
counts for the version that sampled all of it. pass@k is the unbiased estimator of Chen et al. 2021; intervals are 95 %
confidence intervals with the task as the unit. The best version has the highest lower bound of pass@1.

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
    verb.add_argument("--k", type=_ks, metavar="K,...", help="k of pass@k (default: 1, 2, 4, ... up to the samples)")
    verb.add_argument("--json", action="store_true")
    _source(verb)


def _ks(text: str) -> list[int]:
    """Parse 1,4 into a list of positive integers. Raises ArgumentTypeError."""
    found = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(found) != len(text.split(",")) or 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 on, such as 1,4")
    return found


SFT_EPILOG = """\
DATASET is a folder written by `turnlog dataset build` with the view sft (conversations, rendered by the chat template
of MODEL; every answer is imitated) or rl (the recorded tokens and masks). A share of the tasks is held out: their loss
is measured before the first step and after each epoch. OUT appears once it is complete; after a kill, the same command
continues after the last finished epoch. [trainer] sets dtype, threads, clip_grad, weight_decay, betas and
microbatch_tokens.

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
        ("model", "Hugging Face folder to start from: weights, tokenizer, chat template"),
        ("out", "folder to create"),
    ):
        verb.add_argument(f"--{name}", type=Path, required=True, metavar="FOLDER", help=what)
    for name, kind, default, metavar, what in (
        ("epochs", int, 1, "N", "passes over the rows"),
        ("rate", float, 1e-5, "R", "peak learning rate: warms up for a tenth of the steps, then decays to a twentieth"),
        ("rows", int, 32, "N", "rows per step"),
        ("held-out", float, 0.05, "SHARE", "share of tasks that are measured and never trained; 0 for none"),
        ("max-tokens", int, 0, "N", "longest row; longer ones are left out and counted; 0: the model's window"),
        ("seed", int, 0, "N", "seed for the order of rows and the choice of held-out tasks"),
    ):
        verb.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{what} (default {default})")
    verb.add_argument("--fresh", action="store_true", help="discard the progress of a killed run with this OUT")


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


def dataset_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions `build` and `verify` of `turnlog dataset`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DATASET_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="hash files and rows again and compare them with the manifest")
    verify.add_argument("out", type=Path, metavar="OUT", help="folder of the dataset")
    verify.add_argument("--json", action="store_true", help="print its manifest")
    build = actions.add_parser(
        "build", help="write rows of a run as files", epilog=DATASET_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write rows of a run to the folder OUT: data/*.parquet or data/*.arrow, and manifest.json.",
    )  # fmt: skip
    build.add_argument("out", type=Path, metavar="OUT", help="folder to create; it appears once it is complete")
    build.add_argument("--json", action="store_true", help="print its manifest and what the filters removed")
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
            flag, dest=field, type=_milliseconds, metavar="TIME", default=None,
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


def _milliseconds(text: str) -> int:
    if text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an ISO 8601 time: {error}") from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


DEAD_LETTERS_EPILOG = """\
Examples:
  turnlog dead-letters list --cause AttemptsExhausted     tool calls that crashed their sandbox too often
  turnlog dead-letters show 4f1c                          one letter: cause, remedy, and what can be read of the record
  turnlog dead-letters requeue 4f1c                       append its record to its topic again, once
  turnlog dead-letters requeue --cause UndecodableRecord  all with one cause (asks first, except with --yes)
  turnlog dead-letters skip 'agent.turns[0]@1' --reason "gateway bug, fixed"
                                                          let a stopped assembler unit skip one record

A letter is named by its id or a unique prefix of it. A requeued tool call is a new call: the first answer of the old
one stands, so the new one runs under a new call_id, on the same workspace.
Exit status: 0 success, also if `list` finds none; 1 nothing to requeue; 2 error.
"""


def dead_letters_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the actions of `turnlog dead-letters`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = DEAD_LETTERS_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list letters, oldest first")
    _choosing(listed)
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="show the N newest (default 50)")
    listed.add_argument("--json", action="store_true", help="print one JSON object per letter and line")
    _source(listed)
    shown = actions.add_parser("show", help="show one letter in full")
    shown.add_argument("id", metavar="ID")
    shown.add_argument("--json", action="store_true")
    _source(shown)
    again = actions.add_parser("requeue", help="append the records of letters to their topics again")
    again.add_argument("ids", nargs="*", metavar="ID")
    _choosing(again)
    again.add_argument("--again", action="store_true", help="include letters that were requeued before")
    again.add_argument("--yes", action="store_true", help="do not ask")
    passed = actions.add_parser("skip", help="let a stopped assembler unit skip one record")
    passed.add_argument("place", metavar="TOPIC[PARTITION]@OFFSET", help="the record, as shown in `turnlog status`")
    passed.add_argument("--reason", required=True, metavar="TEXT", help="recorded on the log")


def _choosing(action: argparse.ArgumentParser) -> None:
    for name, what in (("cause", "error class"), ("topic", "topic of the record"), ("role", "role that refused it")):
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
    verb.add_argument("--fork-threshold", type=int, metavar="N", help="for slime, instead of the run's")
    verb.add_argument(
        "--session", default="", metavar="ID", help="only this session; the beginning of its id is enough"
    )
    verb.add_argument("--group", default="", metavar="ID", help="only this group")
    verb.add_argument("--show", default="", metavar="SESSION", help="draw the segments of one session")
    verb.add_argument("--top", type=int, default=20, metavar="N", help="list the N sessions that differ most")
    verb.add_argument("--from", dest="source", choices=("topics", ARCHIVE), default="topics")
    verb.add_argument("--json", action="store_true")


REPLAY_EPILOG = """\
Examples:
  turnlog replay --verify                              is the result identical to what was emitted and trained?
  turnlog replay --verify --from archive               the same without the topics
  turnlog replay --verify --until step:10              only what was there when step 10 was completed
  turnlog replay --policy last-turn --out data/turns   write old sessions under another policy as a dataset
  turnlog replay --set fold.discount=0.9 --estimator step --out data/steps
  turnlog replay --weighting token --out data/token    write the recorded draws with other loss weights

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
    verb.add_argument("--json", action="store_true", help="print the verdict, or the manifest of what was written")
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
        help="fold by the rules of another version than the run's; docs/folds.md lists what each one changes",
    )  # fmt: skip
    other.add_argument("--out", type=Path, metavar="OUT", default=None, help="folder to create")
    other.add_argument("--format", choices=("parquet", "arrow"), default="parquet", help="default parquet")
    other.add_argument("--overwrite", action="store_true", help="replace an existing dataset at OUT")


REWARD_EPILOG = """\
The verifier is the one that MODULE:NAME names (a verifier, or a recipe that has one), or else that of each session's
recipe as it is installed here. Functions, services, judge models and sums of them can judge again; verifiers that need
a sandbox or an environment are refused. The log does not change: the dataset holds the new rewards, with the advantages
and groups that follow from them.

Examples:
  turnlog reward rerun --dry-run                              how many rewards would the installed recipe change?
  turnlog reward rerun --verifier my_recipe:STRICT --dry-run  how many would another verifier change?
  turnlog reward rerun data/strict --verifier my_recipe:STRICT
  turnlog reward rerun data/pairs --verifier my_recipe:STRICT --view preference --min-margin 0.5
  turnlog --run old reward rerun data/old --from archive --at-once 32

Exit status: 0 success, 2 error.
"""


def reward_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the action `rerun` of `turnlog reward`."""
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
    _source(rerun)
    _add_rows(rerun)


def topics_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog topics`."""
    verb.add_argument("action", choices=("apply", "check", "acls"), help="acls: print the rights that each role needs")
    verb.add_argument(
        "--principal", action="append", default=[], metavar="ROLE=User:NAME", help="acls: who a role is (User:ROLE)"
    )
    verb.add_argument(
        "--format", choices=("kafka-acls", "json"), default="kafka-acls", help="acls: commands (default) or JSON list"
    )
