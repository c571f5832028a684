"""`runs/<id>/report.json`: report on a run, from its topics. Load, times and replay are supplied by the caller."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from turnlog.consumers import figures
from turnlog.consumers.replay.verify import ReplayResult
from turnlog.consumers.replay.verify import run as replay
from turnlog.infra.environments.sources import RecipeError, demo_rise, task_source
from turnlog.infra.history import all_events, partitions, records
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.terminal import Terminal, say_json
from turnlog.names import ExitStatus
from turnlog.processors.core.books import TokenAccount, counting_steps
from turnlog.processors.core.views.fleet import AnsweredVersions
from turnlog.schemas import topics
from turnlog.schemas.events import (
    SampleBatchFormed,
    SessionFinished,
    StepCompleted,
    ToolCallCompleted,
)
from turnlog.schemas.events.batches import HELD_OLD_CACHE_GAP_MAX, same_weights_gap, same_weights_gaps_of_kinds
from turnlog.schemas.events.tools import UNISOLATED
from turnlog.settings import Settings

JUDGED_FROM = 15
"""Minimum number of steps from which the rise of the reward is judged; with fewer it is only shown."""
GAP = 1e-4
"""Maximum difference between trainer and engine log-probs of one weight version."""
PACKAGES = ("aiokafka", "faust-streaming", "avro-python3", "fastavro", "sglang", "torch", "megatron-core", "ray",
            "transformers", "minio", "httpx", "pytest")  # fmt: skip


@dataclass(slots=True)
class Measured:
    """Measurements that are not on the log."""

    seconds: dict[str, float] = field(default_factory=dict)
    load_average: float = 0.0


@dataclass(frozen=True, slots=True)
class RunReport:
    """The content of report.json, and the reasons why the run is not a success."""

    body: dict[str, Any]
    failures: tuple[str, ...]


async def gather(role: Role, verdict: ReplayResult, measured: Measured) -> RunReport:
    """Read the run's topics and judge the run."""
    steps = newest_incarnations([e for e in await all_events(role, topics.STEPS) if isinstance(e, StepCompleted)])
    run = await figures.read_books(role)
    rewards = [step.reward_mean for step in steps]
    finished = Counter(e.outcome.value for e in await all_events(role, topics.SESSIONS)
                       if isinstance(e, SessionFinished))  # fmt: skip
    results = {e.call_id: e for e in reversed(await all_events(role, topics.TOOL_RESULTS))
               if isinstance(e, ToolCallCompleted)}  # fmt: skip
    manifests = [e for e in await all_events(role, topics.BATCHES) if isinstance(e, SampleBatchFormed)]
    weights = await acknowledgements(role)
    body: dict[str, Any] = {
        "run": role.settings.run.id,
        "steps": len(steps),
        "rewards": [round(reward, 4) for reward in rewards],
        "reward_first_2": fmean(rewards[:2]) if rewards else None,
        "reward_last_5": fmean(rewards[-5:]) if rewards else None,
        "reward_rise_wanted": wanted_rise(role.settings),
        "load_average": measured.load_average or os.getloadavg()[0],
        "sampled_tokens": run.sampled,
        "trained_tokens": run.trained,
        "masked_tokens": dict(run.masked),
        "books_balance": run.balance,
        "sessions": dict(finished),
        "tool_calls": dict(Counter(result.status.value for result in results.values())),
        "tool_calls_without_isolation": sum(result.worker.endswith(UNISOLATED) for result in results.values()),
        **weights,
        "max_lag_seen": max((manifest.max_lag for manifest in manifests), default=0),
        **gaps(steps),
        "replay": {"samples_compared": verdict.samples_compared, "batches_compared": verdict.batches_compared,
                   "identical": verdict.identical, "divergence": verdict.divergence},
        "seconds": {phase: round(seconds, 2) for phase, seconds in measured.seconds.items()},
        "bytes_on_log": await log_bytes(role),
        "versions": versions(),
    }  # fmt: skip
    return RunReport(body, tuple(failures(body, run, verdict)))


def wanted_rise(settings: Settings) -> float:
    """Return the required rise of the mean reward, a property of the recipe. It is 0 if the rise is not judged, as with
    a recipe that is not installed here."""
    try:
        return demo_rise(task_source(settings.feeder.recipe))
    except RecipeError:
        return 0.0


def gaps(steps: Iterable[StepCompleted]) -> dict[str, Any]:
    """Return the largest differences between trainer and engine log-probs of tokens for which both have the same
    weights. With different weights they are two policies, so other tokens are left out.

    The first maximum is over tokens whose KV cache was filled by those weights, together with the batches in which it
    exceeds GAP. The second is over the other tokens, to which no limit applies. Each is None if there are no such
    tokens. The first maximum is also given by kind of engine, for a mixed fleet.
    """
    own, old = {}, []
    kinds: dict[str, float] = {}
    for step in steps:
        on_own = step.logprob_gap_max if step.trained_tokens > step.old_cache_tokens else None
        if (gap := same_weights_gap(step.lag_max, on_own, step.metrics)) is not None:
            own[step.batch_index] = gap
        on_old = step.old_cache_gap_max if step.old_cache_tokens else None
        if (gap := same_weights_gap(step.lag_max, on_old, step.metrics, HELD_OLD_CACHE_GAP_MAX)) is not None:
            old.append(gap)
        for kind, gap in same_weights_gaps_of_kinds(step.lag_max, step.metrics).items():
            kinds[kind] = max(gap, kinds.get(kind, 0.0))
    return {
        "logprob_gap_max": max(own.values(), default=None),
        "logprob_gap_steps": {batch: gap for batch, gap in own.items() if gap > GAP},
        "logprob_gap_old_cache_max": max(old, default=None),
        "logprob_gap_by_kind": kinds,
    }


def newest_incarnations(steps: list[StepCompleted]) -> list[StepCompleted]:
    """Return the effective step of each batch, ordered by batch index."""
    return list(counting_steps(steps).values())


async def acknowledgements(role: Role) -> dict[str, Any]:
    """Return how many versions were published, and per engine the versions that were loaded, refused, superseded before
    they were loaded, and unanswered."""
    published = {event.version for event in await all_events(role, topics.WEIGHTS)}
    engines: dict[str, AnsweredVersions] = defaultdict(AnsweredVersions)
    for event in await all_events(role, topics.ENGINES):
        engines[event.engine_id].apply(event)
    acknowledged = {name: one.loaded | one.registered for name, one in engines.items()}
    unanswered = {
        name: sorted(published - acknowledged[name] - one.refused - one.superseded) for name, one in engines.items()
    }
    return {
        "weight_versions_published": len(published),
        "weight_versions_acknowledged": {name: len(versions & published) for name, versions in acknowledged.items()},
        "weight_versions_refused": {name: len(one.refused) for name, one in engines.items() if one.refused},
        "weight_versions_superseded": {name: len(one.superseded) for name, one in engines.items() if one.superseded},
        "weight_versions_unanswered": {name: versions for name, versions in unanswered.items() if versions},
    }


async def log_bytes(role: Role) -> dict[str, int]:
    """Return the bytes of keys, values and headers per topic as a consumer receives them, without the broker's
    compression."""
    totals: dict[str, int] = {}
    for topic in topics.CATALOGUE:
        wanted = partitions(role, topic)
        totals[topic.name] = 0
        async for record in records(role, wanted, await role.log.end_offsets(wanted)):
            headers = sum(len(name) + len(value) for name, value in record.headers)
            totals[topic.name] += len(record.key) + len(record.value) + headers
    return totals


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that the loop uses."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def failures(body: Mapping[str, Any], run: TokenAccount, verdict: ReplayResult) -> list[str]:
    """Return sentences that say why the run is not a success; empty if it is one."""
    said: list[str] = []
    if not body["steps"]:
        said.append("no step was trained")
    elif body["steps"] >= JUDGED_FROM and (wanted := body["reward_rise_wanted"]):
        rise = body["reward_last_5"] - body["reward_first_2"]
        if rise < wanted:
            said.append(f"the reward rose by {rise:.3f}, the recipe requires at least {wanted} (its demo_rise)")
    if not run.balance:
        said.append(
            f"the books do not balance: sampled {run.sampled}, trained {run.trained}, masked {dict(run.masked)}; "
            "`turnlog log books` shows where"
        )
    if not verdict.identical:
        said.append(f"replay differs: {verdict.divergence or 'nothing was compared'}")
    if body["weight_versions_unanswered"] or not body["weight_versions_acknowledged"]:
        said.append(f"weight versions without an answer: {body['weight_versions_unanswered'] or 'all'}")
    return said


def summary(report: RunReport) -> Table:
    """Return the report as a table."""
    body = report.body
    shown = Table("", "", title=f"run {body['run']}", show_header=False)
    first, last = body["reward_first_2"], body["reward_last_5"]
    if first is not None:
        shown.add_row("reward, first two -> last five steps", f"{first:.3f} -> {last:.3f} ({last - first:+.3f})")
    shown.add_row("steps", str(body["steps"]))
    masked = ", ".join(f"{reason} {count:,}" for reason, count in body["masked_tokens"].items()) or "0"
    shown.add_row("tokens sampled = trained + masked",
                  f"{body['sampled_tokens']:,} = {body['trained_tokens']:,} + {masked}"
                  f" ({'balance' if body['books_balance'] else 'DO NOT BALANCE'})")  # fmt: skip
    shown.add_row("sessions", _counts(body["sessions"]))
    shown.add_row("tool calls", _counts(body["tool_calls"]))
    if body["tool_calls_without_isolation"]:
        shown.add_row(
            "TOOLS RAN WITHOUT ISOLATION", f"{body['tool_calls_without_isolation']} calls, as plain processes"
        )
    acknowledged = _counts(body["weight_versions_acknowledged"])
    shown.add_row("weight versions published / acknowledged", f"{body['weight_versions_published']} / {acknowledged}")
    shown.add_row("largest lag", str(body["max_lag_seen"]))
    if body["logprob_gap_max"] is not None:
        where = f"; above {GAP} at batches {list(body['logprob_gap_steps'])}" if body["logprob_gap_steps"] else ""
        shown.add_row("largest |trainer - engine| log-prob, same weights", f"{body['logprob_gap_max']:.1e}{where}")
    if body["logprob_gap_by_kind"]:
        of_kinds = {kind: f"{gap:.1e}" for kind, gap in sorted(body["logprob_gap_by_kind"].items())}
        shown.add_row("the same by kind of engine", _counts(of_kinds))
    if body["logprob_gap_old_cache_max"] is not None:
        shown.add_row("the same for tokens on a cache of older weights", f"{body['logprob_gap_old_cache_max']:.1e}")
    replayed = body["replay"]
    shown.add_row("replay", f"{'identical' if replayed['identical'] else 'DIFFERENT'}: "
                  f"{replayed['samples_compared']:,} samples, {replayed['batches_compared']} batches")  # fmt: skip
    shown.add_row("seconds", _counts(body["seconds"]))
    shown.add_row("on the log", f"{sum(body['bytes_on_log'].values()) / 1e6:.1f} MB")
    return shown


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def store(report: RunReport, directory: Path) -> Path:
    """Write report.json in readable form and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.json"
    path.write_text(json.dumps(report.body, indent=2, sort_keys=False) + "\n")
    return path


async def write(settings: Settings, *, as_json: bool = False) -> int:
    """Run `turnlog log report`: replay, gather, write, print. Return 0 if nothing is wrong with the run, else 1."""
    console = Terminal(stderr=as_json)
    async with open_role("report", settings) as role:
        with console.status("reading the run's topics"):
            report = await gather(role, await replay(role), Measured())
    path = store(report, Path(settings.run.directory))
    if as_json:
        say_json(report.body | {"failures": report.failures})
        return ExitStatus.DIFFERS if report.failures else ExitStatus.DONE
    console.print(summary(report), f"written to {path}", *report.failures, sep="\n")
    return ExitStatus.DIFFERS if report.failures else ExitStatus.DONE


def plot_rewards(rewards: list[float], path: Path, *, title: str) -> None:
    """Draw the mean reward of each step. Needs the `demo` extra (matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
