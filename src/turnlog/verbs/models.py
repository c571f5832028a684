"""Verbs about the model of a run: eval, export, sft."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, add_source, always

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from turnlog.plugins.offline.export import Exported
    from turnlog.processors.core.evaluation import Evaluations
    from turnlog.schemas.events import WeightVersionPublished

EVAL_EPILOG = """\
The feeder requests a round of [eval] tasks after every N rollout batches ([eval] every = N); their sessions are never
trained. A session counts for the version that sampled all of it. pass@k is the unbiased estimator of Chen et al. 2021;
intervals are 95 % confidence intervals with the task as the unit. The best version has the highest lower bound of
pass@1.

Examples:
  TURNLOG_EVAL_EVERY=5 turnlog --run demo-20260101-120000 up
  turnlog --run demo-20260101-120000 log eval
  turnlog --run demo-20260101-120000 log eval --json --k 1,4
  turnlog --run demo-20260101-120000 export models/calc --best
"""


def _eval_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = EVAL_EPILOG
    verb.add_argument(
        "--k", type=_ks, metavar="K,...",
        help="values of k in pass@k (default: 1, 2, 4, ... up to the samples per task)",
    )  # fmt: skip
    add_json(verb)
    add_source(verb)


def _ks(text: str) -> list[int]:
    """Parse 1,4 into a list of positive integers. Raises ArgumentTypeError."""
    found = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(found) != len(text.split(",")) or 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 on, such as 1,4")
    return found


def _eval(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.figures import evaluations
    from turnlog.infra.roles.ending import run_verb
    from turnlog.infra.roles.terminal import Terminal, say_json

    found = run_verb(evaluations(settings, archive=arguments.source == "archive"))
    ks = arguments.k or found.ks()
    if arguments.json:
        say_json(body(settings.run.id, found, ks))
    else:
        Terminal().print(table(settings.run.id, found, ks))
    return ExitStatus.DONE


def body(run_id: str, found: Evaluations, ks: Sequence[int]) -> dict[str, Any]:
    """Return the answer as JSON, versions oldest first."""
    best = found.best
    return {
        "run": run_id,
        "versions": [version.body(ks) for version in found.in_order()],
        "best": None if best is None else best.number,
        "groups": {"asked": found.asked, "scored": found.scored},
        "left_out": dict(found.left_out),
    }


def table(run_id: str, found: Evaluations, ks: Sequence[int]) -> Table:
    """Return a table of the versions, oldest first."""
    from rich.table import Table

    from turnlog.processors.core.views.progress import ANNOUNCED

    best = found.best
    left = ", ".join(f"{reason} {count:,}" for reason, count in sorted(found.left_out.items()))
    where = f" ({best.checkpoint})" if best and best.checkpoint else ""
    where += f", {ANNOUNCED} only: no files to export" if best and best.state == ANNOUNCED else ""
    lines = [f"best: version {best.number}{where}" if best else "", f"left out: {left}" if left else ""]
    shown = Table("version", "step", "state", "tasks", "sessions", "mean reward", *(f"pass@{k}" for k in ks),
                  title=f"evaluations of {run_id}", caption="; ".join(line for line in lines if line))  # fmt: skip
    for version in found.in_order():
        passing = [version.passing(k) for k in ks]
        shown.add_row(
            f"{version.number}{' *' if version is best else ''}", "-" if version.step is None else str(version.step),
            version.state or "-", str(len(version.rewards)), str(version.sessions), str(version.reward),
            *("-" if told is None else str(told) for told in passing),
        )  # fmt: skip
    return shown


EXPORT_EPILOG = """\
FOLDER can be loaded by transformers and SGLang: safetensors, config, tokenizer, chat template, generation settings and
a card that names the run, step and version. It appears once it is complete; an existing FOLDER is refused.

Examples:
  turnlog --run demo-20260101-120000 export models/calc                 the newest version that is stored
  turnlog --run demo-20260101-120000 export models/calc-9 --version 9
  turnlog --run demo-20260101-120000 export models/calc-best --best     the best one by `turnlog log eval`
  turnlog --run demo-20260101-120000 export models/calc-10 --checkpoint step-00000010-i0
  turnlog --run demo-20260101-120000 export models/calc --from archive  if the topics are gone
"""


def _export_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = EXPORT_EPILOG
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    which = verb.add_mutually_exclusive_group()
    which.add_argument(
        "--version", type=int, metavar="N", help="a published weight version (default: the newest that is stored)"
    )
    which.add_argument("--best", action="store_true", help="the best version according to `turnlog log eval`")
    which.add_argument(
        "--checkpoint", default="", metavar="NAME", help="one of the run's checkpoints in [trainer] checkpoints instead"
    )
    add_json(verb, "print what was written as JSON")
    add_source(verb)


def _export(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.best:
        from turnlog.consumers.figures import best_version

        arguments.version = best_version(settings, archive=arguments.source == "archive")
    from turnlog.infra.roles.ending import run_verb
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say, say_json
    from turnlog.plugins.offline.export import check_free, export_checkpoint, export_version, published_versions
    from turnlog.trainer.checkpoints.cursor import readable

    folder: Path = arguments.folder
    check_free(folder)
    archive = arguments.source == "archive"

    async def versions_of_run() -> list[WeightVersionPublished]:
        async with open_role("export", settings, archive=archive) as role:
            return await published_versions(role)

    async def export() -> Exported:
        async with open_role("export", settings, archive=archive) as role:
            return await export_version(role, folder, arguments.version)

    if arguments.checkpoint:
        versions = run_verb(versions_of_run())
        with readable(settings, beside=folder.parent, archive=archive) as place:
            done = export_checkpoint(settings, place, arguments.checkpoint, folder, versions)
    else:
        done = run_verb(export())
    if arguments.json:
        version = None if done.version is None else done.version.version
        about = {"folder": str(folder), "run": done.run_id, "version": version, "checkpoint": done.checkpoint}
        say_json(about | {"tensors": done.tensors, "parameters": done.parameters, "dtypes": sorted(done.dtypes)})
        return ExitStatus.DONE
    held = (
        "verified against its published checksums"
        if done.version
        else "not a published version: no checksums to verify"
    )
    say(f"{folder}: {done.weights_description}", f"  {done.tensors} tensors, {done.parameters:,} parameters, {held}")
    return ExitStatus.DONE


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


def _sft_arguments(verb: argparse.ArgumentParser) -> None:
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


def _sft(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.consumers.datasets.build import verify
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.offline.export import check_free
    from turnlog.plugins.offline.sft import SftHyperparameters, Tuning, fetching, rows_of, split_rows
    from turnlog.plugins.recipes.warm_start import make_row_converter

    imitated = make_row_converter(arguments.model)
    numbers = SftHyperparameters(
        **{field.name: getattr(arguments, field.name) for field in dataclasses.fields(SftHyperparameters)}
    )
    numbers.check()
    out: Path = arguments.out
    check_free(out)
    manifest = verify(arguments.dataset)
    with fetching(settings) as fetch:
        tuning = Tuning(settings, arguments.model, out, numbers, manifest.rows_sha256, say, fetch)
        found = rows_of(arguments.dataset, manifest, imitated)
        split = split_rows(list(found), tuning.shape, numbers)
        tokens = sum(row.loss_tokens for row in split.train)
        say(f"{len(split.train):,} rows to train, {tokens:,} tokens imitated; {len(split.held_out):,} rows held out")
        for reason, count in split.removed.items():
            say(f"  left out, {reason}: {count:,}")
        tuning.run(split, fresh=arguments.fresh)
    say(f"{out}: {tuning.epochs[-1].epoch} epochs; serve it with [model] path = {str(out)!r}")
    return ExitStatus.DONE


VERBS = (
    Verb("eval", "show mean reward and pass@k per weight version, and the best", _eval, _eval_arguments,
         reads=always, under="log"),
    Verb("export", "write weights of a run as a Hugging Face folder", _export, _export_arguments, reads=always),
    Verb("sft", "fine-tune a model folder on a dataset of a run (supervised)", _sft, _sft_arguments),
)  # fmt: skip
