"""`turnlog replay`: fold the log again, from topics or the archive, and compare with what was emitted and trained.

Everything up to a Cut is folded; every tree, sample and score must come out with the same bytes, and every
batch with the same rows, weights and hashes as its manifest and its file. With other settings it writes a dataset
instead (refold.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.consumers.replay.progress import Progress, ReplayState, Shown, Silent
from turnlog.consumers.replay.source import NothingToReplay, cut_of, moment, recorded_run
from turnlog.consumers.replay.verify import Question, cheap_collections, verify_batches, verify_unit
from turnlog.infra.archive.index import Cut
from turnlog.infra.archive.log import ArchiveLog
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, opened
from turnlog.infra.roles.runs import Configured
from turnlog.infra.roles.terminal import Terminal
from turnlog.names import ExitStatus
from turnlog.settings import Settings

ARCHIVE = "archive"
FOLDER = "replay"
"""Of a run's directory: what an unfinished replay remembers."""


@dataclass(slots=True)
class Verdict:
    """What a replay found. `divergence` is the first one, explained."""

    samples_compared: int = 0
    batches_compared: int = 0
    records_compared: int = 0
    divergence: str | None = None
    batches_later: int = 0
    """Formed after the cut: not compared."""
    resumed: bool = False

    @property
    def identical(self) -> bool:
        """Nothing differed, and there was something to compare."""
        return self.divergence is None and self.records_compared > 0

    @property
    def compared(self) -> str:
        """What was compared, for people."""
        later = f", {self.batches_later} batches formed later" if self.batches_later else ""
        return (
            f"{self.samples_compared:,} samples, {self.batches_compared} batches, {self.records_compared:,} records "
            f"compared{later}"
        )


async def replay(
    settings: Settings,
    *,
    verify: bool,
    console: Terminal | None = None,
    source: str = "topics",
    until: str | None = None,
    fresh: bool = False,
) -> int:
    """Print the verdict; 0 when identical, 1 at the first divergence. Without `verify` only counts are shown.

    `source`: topics | archive; `until`: see `until.moment`; `fresh`: forget what an unfinished replay compared.
    Raises ReplayError and what the log, the store and the registry raise: status 2.
    """
    console = console or Terminal()
    async with opened("replay", settings, archive=source == ARCHIVE) as role:
        with Shown(console) as progress:
            folder = Path(settings.run.directory) / FOLDER
            verdict = await run(role, until=until, progress=progress, folder=folder, fresh=fresh)
    if verdict.resumed:
        console.print("went on where an unfinished replay had stopped (--fresh starts again)")
    if not verify:
        console.print(verdict.compared)
        return 0
    if verdict.identical:
        console.print(f"replay: identical ({verdict.compared})", style="green")
        return 0
    console.print(f"replay: DIFFERENT ({verdict.compared})", style="red", soft_wrap=True)
    console.print(f"first divergence: {verdict.divergence or 'no records'}", soft_wrap=True)
    return ExitStatus.DIFFERS


async def run(
    role: Role,
    *,
    until: str | None = None,
    progress: Progress | None = None,
    folder: Path | None = None,
    fresh: bool = False,
    save_every_s: float = 5.0,
) -> Verdict:
    """Replay the run of `role`. `folder` keeps what a killed replay goes on from; without it nothing is kept.
    Raises ReplayError, LogError, BlobError, RegistryError."""
    found = await recorded_run(role)
    state = ReplayState(folder, asked(role, until, found), every_s=save_every_s)
    state.load(fresh=fresh)
    cuts = await cuts_of(role, state)
    limit = None if until is None else await moment(role, until)
    question = Question(role, found, cuts, limit, state, progress or Silent())
    question.progress.begin("folding again", await _total(role, cuts))
    verdict = Verdict(resumed=state.resumed)
    done: dict[str, dict[str, int]] = state.sections.setdefault("done", {})
    with cheap_collections():
        for unit in cuts:
            if str(unit) not in done:
                result = await verify_unit(question, unit)
                done[str(unit)] = result.counts
                verdict.divergence = result.divergence
                state.sections.pop("unit", None)
            verdict.records_compared += done[str(unit)].get("records", 0)
            verdict.samples_compared += done[str(unit)].get("samples", 0)
            if verdict.divergence is not None:
                break
    if verdict.divergence is None:
        state.save()
        batches = await verify_batches(question, found.draw_rules())
        verdict.batches_compared, verdict.batches_later = batches.compared, batches.later
        verdict.divergence = batches.divergence
    state.remove()
    return verdict


def asked(role: Role, until: str | None, configured: Configured) -> dict[str, Any]:
    """What must be the same for a killed replay's memory to count."""
    source = role.log.index.root if isinstance(role.log, ArchiveLog) else f"topics {role.settings.kafka.prefix}"
    return {
        "run": role.settings.run.id,
        "source": source,
        "until": until,
        "settings": configured.settings_sha256,
        "fold": configured.fold_version,
        "units": role.settings.kafka.groups,
    }


async def cuts_of(role: Role, state: ReplayState) -> dict[int, Cut]:
    """Of every unit; those of the attempt that is continued, so that what it compared still counts."""
    if "cuts" not in state.sections:
        cuts = [await cut_of(role, unit) for unit in range(role.settings.kafka.groups)]
        state.sections["cuts"] = [cut.as_json() for cut in cuts]
    return {cut.unit: cut for cut in map(Cut.from_json, state.sections["cuts"])}


async def _total(role: Role, cuts: dict[int, Cut]) -> int:
    ends = {Partition(t, unit): end for unit, cut in cuts.items() for t, end in {**cut.high, **cut.ends}.items()}
    starts = await role.log.start_offsets(list(ends))
    return sum(max(end - starts[place], 0) for place, end in ends.items())


__all__ = ["NothingToReplay", "Verdict", "replay", "run"]
