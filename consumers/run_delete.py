"""Deletion of runs: remove everything that one run has left on its servers and in its directory, for good.

It is found by names that belong to this run alone: catalogue topics and Faust's changelogs below its prefix, its
consumer groups, its owner's folder and its archive in the store, its directory. Nothing under another prefix is
touched. First, the rest of the bucket is read as `turnlog gc` reads it: if another log or archive references one of the
run's blobs, the run is not deleted; blobs that recordings reference are copied to `blobs/`, which belongs to no run.

The order of deletion makes the command repeatable after it was killed. Consumer groups go first, because Kafka forgets
their commits together with the topics. Then the store, whose folder is identified by the log's cluster; then topics,
with `runs` last, because it identifies their run; finally the directory, with settings.toml last, because it holds all
the addresses.

DeleteError
├── RunIsUp         a supervisor holds the run, or its consumer groups have active members
├── StillNeeded     another run or archive references what would be deleted
├── NotConfirmed    the run's id was not typed
└── NotRemoved      a file of the directory could not be removed
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnlog.consumers import gc
from turnlog.infra import run_folder
from turnlog.infra.blobs import CHECKPOINTS, KEY, OWNED, TRASH, Blobs, Owner, key
from turnlog.infra.log import Partition, RemovableLog
from turnlog.infra.roles.runs import OtherRun
from turnlog.infra.roles.terminal import aside
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.schemas import topics
from turnlog.settings import SettingsError, load

RUNS = topics.RUNS.name
HASH = re.compile(rb"[0-9a-f]{64}")
KEPT_LAST = (run_folder.LOCK, run_folder.SETTINGS)
ELSEWHERE = "data of roles on other machines (checkpoints, tables of the views) is deleted with their volumes"
SCHEMAS = "schemas in the registry are shared by all runs"


class DeleteError(Exception):
    """Base of the tree above."""


class RunIsUp(DeleteError):
    """Remedy: `turnlog down`, or stop its roles."""


class StillNeeded(DeleteError):
    """Remedy: first delete the run or archive that needs it."""


class NotConfirmed(DeleteError):
    """Nothing was deleted. Remedy: type the id, or --yes."""


class NotRemoved(DeleteError):
    """Remedy: correct the permissions of the file, then run the command again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run to delete, and where its data lies."""

    id: str
    prefix: str
    directory: Path
    archive: str
    cluster: str = ""
    """Kafka's own cluster id; empty if unknown."""
    log: RemovableLog | None = None
    """Client of the log; without it, the log lies in the run's directory. The same holds for `blobs`."""
    blobs: Blobs | None = None

    @property
    def owner(self) -> Owner:
        """Owner of the run's folder in the store."""
        return Owner(self.cluster, self.prefix, self.id)


@dataclass(frozen=True, slots=True)
class Item:
    """A thing to delete."""

    what: str
    name: str
    count: int
    """Number of offsets of a topic (records and markers), of objects or of files; 1 for other kinds."""
    bytes: int | None
    """Size in bytes; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `delete_run` removes."""

    items: tuple[Item, ...]
    groups: tuple[str, ...]
    objects: tuple[str, ...]
    """Names of objects in the store."""
    handed: tuple[tuple[str, str], ...]
    """Objects that recordings need, each with the name to which it is copied first."""
    topics: tuple[str, ...]
    left: tuple[str, ...]
    """Notes on what stays, and why."""


Needed = Callable[[Collection[str]], Awaitable[Collection[str]]]
"""Function from hashes of blobs to those that recordings reference. Raises StillNeeded if another log or archive
references one."""


async def plan_deletion(run: Run, needed: Needed) -> Plan:
    """Plan the deletion without changing anything. Raises OtherRun, RunIsUp, StillNeeded, LogError,
    StoreUnavailable."""
    _check_neighbours(run.directory)
    items, left = _files(run.directory, run.id)
    own: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    weights: Collection[str] = ()
    if run.log is not None:
        own, weights, said = await _topics(run, run.log)
        groups = await _groups(run, run.log)
        found = await _log_items(run, run.log, own, groups)
        items, left = [*found, *items], [*said, *left]
        left += [ELSEWHERE, SCHEMAS] if own else []
        if ids := await _ids(run, run.log):
            left.append(f"transactional ids {ids}: Kafka expires them by itself (transactional.id.expiration.ms)")
    objects: tuple[str, ...] = ()
    handed: tuple[tuple[str, str], ...] = ()
    if run.blobs is not None:
        sure = bool(own) or any(item.what == "directory" for item in items)
        stored, objects, handed, said = await _objects(run, run.blobs, weights, needed, sure=sure)
        items += stored
        left += [*said, *await _foreign_folders(run, run.blobs)]
        if handed:
            left.append(f"{len(handed)} blobs that recordings refer to move to blobs/, where every reader looks")
    return Plan(
        items=tuple(items), groups=groups, objects=objects, handed=handed, topics=own, left=tuple(dict.fromkeys(left))
    )


async def _topics(run: Run, log: RemovableLog) -> tuple[tuple[str, ...], Collection[str], list[str]]:
    """Return the run's topics with `runs` last, the hashes that its weight versions reference, and what stays. Raises
    OtherRun."""
    there = await log.topics()
    changelog = re.compile(
        rf"{re.escape(ConsumerGroup.VIEWS.format(run=run.id))}-([a-z]+-changelog|__assignor-__leader)"
    )
    own = [name for topic in topics.CATALOGUE if (name := topic.name) in there]
    own += sorted(name for name in there if changelog.fullmatch(name))
    if not own:
        return (), (), []
    whose = None
    if RUNS in there:
        async for key_, _, kind in gc.values(log, [Partition(RUNS, 0)]):
            if kind == b"RunConfigured":
                whose = key_.decode()
                break
    if whose is None:
        said = f"{len(own)} topics below prefix {run.prefix!r}: no run is configured there, so their owner is unknown"
        return (), (), [said]
    if whose != run.id:
        raise OtherRun(
            f"the topics below prefix {run.prefix!r} belong to run {whose!r}, not to {run.id!r}: name that run, or "
            "set [kafka] prefix to that of the run you mean"
        )
    weights: set[str] = set()
    if topics.WEIGHTS.name in there:
        async for _, value, _ in gc.values(log, [Partition(topics.WEIGHTS.name, 0)]):
            weights.update(found.decode() for found in HASH.findall(value))
    return (*(name for name in own if name != RUNS), RUNS), weights, []


async def _groups(run: Run, log: RemovableLog) -> tuple[str, ...]:
    """Return the run's consumer groups. Raises RunIsUp if one of them has members."""
    names = {"run": run.id, "archive": run.archive}
    exact = {group.format(**names) for group in ConsumerGroup if "{engine}" not in group}
    loaders = ConsumerGroup.LOADER.format(run=run.id, engine="")
    likely = sorted(name for name in await log.groups() if name in exact or name.startswith(loaders))
    known = {topic.name for topic in topics.CATALOGUE}
    own = []
    for group in likely:
        # The name alone is ambiguous if one prefix or id begins with another: check which topics the group has read.
        if {place.topic for place in await log.committed_partitions(group)} <= known:
            own.append(group)
    for group in own:
        if members := await log.members(group):
            raise RunIsUp(
                f"group {run.prefix}{group} has {len(members)} members ({', '.join(members)}): stop them "
                f"(`turnlog run close` ends every role of {run.id!r}), then repeat this command"
            )
    return tuple(own)


async def _log_items(run: Run, log: RemovableLog, own: Sequence[str], groups: Iterable[str]) -> list[Item]:
    there = await log.topics()
    places = [Partition(name, number) for name in own for number in range(there[name].partitions)]
    starts, ends = await log.start_offsets(places), await log.end_offsets(places, committed=False)
    sizes = await log.sizes(own)
    found = [
        Item(
            "topic", run.prefix + name, sum(ends[at] - starts[at] for at in places if at.topic == name), sizes.get(name)
        )
        for name in own
    ]
    return [*found, *(Item("group", run.prefix + group, 1, None) for group in groups)]


async def _ids(run: Run, log: RemovableLog) -> str:
    """Return the transactional ids of the run, joined by commas."""
    names = {"run": run.id, "archive": run.archive, "engine": "", "unit": ""}
    exact = {one.format(**names) for one in TransactionalId if not one.endswith("}")} - {TransactionalId.REGISTRY}
    more = tuple(one.format(**names) for one in TransactionalId if one.endswith("}"))
    found = sorted(one for one in await log.transactional_ids() if one in exact or one.startswith(more))
    return ", ".join(run.prefix + one for one in found)


async def _objects(
    run: Run, blobs: Blobs, weights: Collection[str], needed: Needed, *, sure: bool
) -> tuple[list[Item], tuple[str, ...], tuple[tuple[str, str], ...], list[str]]:
    """Return the items to delete from the store, their object names with the owner's last, blobs to copy to `blobs/`
    first, and what stays.

    `sure`: whether the run has topics or a directory here. Without either, and without an owner in the store, the
    prefix may be mistaken, and the name of an archive does not contain one; so the archive stays.
    """
    folder = f"{run.owner.folder}/"
    listed = [] if not run.cluster else [
        one for prefix in (folder, TRASH + folder) for one in (await blobs.list_objects(prefix)).objects
    ]  # fmt: skip
    owner = await blobs.names(run.owner.name) if run.cluster else []
    archive, left = (await blobs.list_objects(f"archive/{run.archive}/")).objects, []
    if archive and not (sure or owner):
        left.append(
            f"archive/{run.archive}/: no topic below prefix {run.prefix!r}, no folder of the store and no directory "
            "shows that it belongs to the run: name its settings (--settings)"
        )
        archive = ()
    hashes = {one.name: match[3] for one in listed if (match := KEY.fullmatch(one.name))}
    keep = await needed(set(hashes.values())) if hashes else ()
    handed = {name: key(sha256) for name, sha256 in hashes.items() if sha256 in keep}
    saved = f"{folder}{CHECKPOINTS}/"
    blobs_there = [one for one in listed if not one.name.startswith(saved)]
    kinds = {
        "weights": [one for one in blobs_there if hashes.get(one.name) in weights],
        "blobs": [one for one in blobs_there if hashes.get(one.name) not in weights],
        "checkpoints": [one for one in listed if one.name.startswith(saved)],
        "archive": archive,
    }
    where = {"archive": f"archive/{run.archive}/", "checkpoints": saved}
    items = [
        Item(what, where.get(what, folder), len(some), sum(one.size for one in some))
        for what, some in kinds.items()
        if some
    ]
    names = [one.name for one in (*archive, *listed)]
    return items, (*names, *owner), tuple(handed.items()), left


async def _foreign_folders(run: Run, blobs: Blobs) -> list[str]:
    """Return notes on folders of this prefix and run id that belong to another cluster, whose log decides about
    them."""
    end = Owner("", run.prefix, run.id).name.partition("prefix=")[2]
    others = [
        name for name in await blobs.names("owners/") if name.endswith(f"/prefix={end}") and name != run.owner.name
    ]
    return [f"{name}: the folder of a run with this name on another cluster; its log decides" for name in others]


def _check_neighbours(directory: Path) -> None:
    """Check that no settings of a run beside this one name a file in this directory. Raises StillNeeded."""
    for path in sorted(directory.parent.glob(f"*/{run_folder.SETTINGS}")):
        if path.parent == directory:
            continue
        try:
            settings = load(path, {})
        except SettingsError as error:
            aside(f"{path} cannot be read, so what it needs is unknown: {error}")
            continue
        for section, values in dataclasses.asdict(settings).items():
            for name, value in values.items():
                if "/" in str(value) and Path(str(value)).resolve().is_relative_to(directory.resolve()):
                    raise StillNeeded(
                        f"{value} is [{section}] {name} of run {settings.run.id!r} ({path}): delete that run first, or "
                        "copy it elsewhere and name the copy there"
                    )


def _is_own(directory: Path, run_id: str) -> bool:
    kept = directory / run_folder.SETTINGS
    return kept.exists() and load(kept, {}).run.id == run_id


def _files(directory: Path, run_id: str) -> tuple[list[Item], list[str]]:
    """Return the run's directory, with checkpoints as an item of their own, and what stays of it."""
    if not directory.exists():
        return [], []
    if not _is_own(directory, run_id):
        return [], [f"{directory}: it has no {run_folder.SETTINGS} that shows that it belongs to the run"]
    kinds = run_folder.file_sizes(directory)
    where = {run_folder.CHECKPOINTS: directory / run_folder.CHECKPOINTS, "directory": directory}
    return [Item(kind, str(where[kind]), len(sizes), sum(sizes)) for kind, sizes in kinds.items() if sizes], []


async def delete_run(run: Run, plan: Plan, close: Callable[[], Awaitable[None]]) -> None:
    """Carry out `plan`. `close` records on the log that nothing may start for the run any more. If this is interrupted
    anywhere, a new plan covers the rest. Raises RunIsUp, NotRemoved, LogError, StoreUnavailable."""
    if run.log is not None:
        if RUNS in plan.topics:
            await close()
        await _groups(run, run.log)  # raises if members have joined meanwhile
        await run.log.delete_groups(plan.groups)
    if run.blobs is not None:
        for name, to in plan.handed:
            await run.blobs.copy(name, to)
        *objects, last = plan.objects or ("",)
        for at in range(0, len(objects), gc.AT_ONCE):
            await asyncio.gather(*map(run.blobs.remove, objects[at : at + gc.AT_ONCE]))
        if last:
            await run.blobs.remove(last)
    if run.log is not None and plan.topics:
        *others, last = plan.topics
        await run.log.delete_topics(others)
        await run.log.delete_topics([last])
    if any(item.what == "directory" for item in plan.items):
        _remove(run.directory)


def _remove(directory: Path) -> None:
    """Remove the directory. Raises NotRemoved."""
    try:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in KEPT_LAST:
                path.unlink()
        for name in KEPT_LAST:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    except OSError as error:
        raise NotRemoved(
            f"{error.filename or directory}: {error.strerror}; everything else of the run was deleted"
        ) from error


async def needed_elsewhere(
    hashes: Collection[str], *, blobs: Blobs, run: Run, clusters: Mapping[str, gc.Connect],
    roots: Collection[tuple[str, str]], retired: Collection[str],
) -> Collection[str]:  # fmt: skip
    """Return those of the run's blobs that recordings reference and that exist nowhere else. Raises StillNeeded if the
    log or archive of another run references one; UnknownOwner, LogError, StoreUnavailable."""
    objects = [one.name for prefix in (OWNED, "blobs/") for one in (await blobs.list_objects(prefix)).objects]
    places = [match for name in objects if (match := KEY.fullmatch(name))]
    copied = {match[3] for match in places if match[2] != run.owner.folder}
    if not (wanted := set(hashes) - copied):
        return ()
    folders = {match[2] for match in places if match[2]} - {run.owner.folder}
    ours = [run.owner.folder] if await blobs.names(run.owner.name) else []
    owners = await gc.owners_of(blobs, folders, clusters, [*ours, *retired])
    logs = {*roots, *((owner.cluster, owner.prefix) for owner in owners if owner.folder not in retired)}

    async def check(whose: str, marks: gc.ReferenceMarks) -> None:
        await gc.follow(blobs, [run.owner.folder, *(owner.folder for owner in owners)], marks)
        if marks.seen:
            raise StillNeeded(
                f"{len(marks.seen)} blobs of run {run.id!r} are referenced by {whose} and stored nowhere "
                f"else, for example {min(marks.seen)}: delete that first"
            )

    for cluster, prefix in sorted(logs - {(run.cluster, run.prefix)}):
        marks, whose = (
            gc.ReferenceMarks(wanted),
            [one for one in owners if (one.cluster, one.prefix) == (cluster, prefix)],
        )
        await gc.mark_log(
            clusters[cluster](prefix), prefix, [one for one in whose if one.folder not in retired], folders, marks
        )
        await check(f"the log below prefix {prefix!r} of cluster {cluster}", marks)
    for archive in await gc.archives(blobs):
        if archive != run.archive:
            marks = gc.ReferenceMarks(wanted)
            await gc.mark_archive(blobs, archive, marks)
            await check(f"archive {archive!r}", marks)
    marks = gc.ReferenceMarks(wanted)
    await gc.mark_recordings(blobs, marks)
    await gc.follow(blobs, [run.owner.folder], marks)
    return marks.seen
