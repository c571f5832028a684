"""The archive on a real Kafka and a real S3: written by a role that is killed -9, read when the topics are gone."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import random
import signal
import subprocess
import sys

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.addresses import variables
from tests.fakes.sessions import bad_days
from turnlog.consumers.archiver import RangeLimits, flush
from turnlog.consumers.index.indexer import build, indexing
from turnlog.consumers.index.reader import path_of
from turnlog.consumers.pruning import prunable
from turnlog.consumers.replay.source import HistoryPruned
from turnlog.consumers.replay.verify import run
from turnlog.infra.archive import ArchiveIndex, live_cut
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.roles.terminal import Terminal
from turnlog.processors.core.fold_versions import FOLD_VERSION, INPUTS
from turnlog.processors.runtime import assembler
from turnlog.schemas import topics
from turnlog.settings import (
    IndexSettings,
    KafkaSettings,
    RegistrySettings,
    Settings,
)
from turnlog.verbs import archive
from turnlog.verbs.replay import replay

pytestmark = [pytest.mark.kafka, pytest.mark.chaos]


async def write(role: Role, seed: int, groups: int) -> None:
    """A history of bad days."""
    ends = [0] * role.settings.kafka.groups
    history = bad_days(
        random.Random(seed),
        groups=groups,
        partitions=len(ends),
        run_id=role.settings.run.id,
        name=f"g{seed}",
        ends=ends,
    )
    for event in history:
        await role.events.submit(event)


async def fold(settings: Settings) -> None:
    """The assembler, until everything is folded."""
    async with open_role("assembler", settings) as role:
        running = asyncio.create_task(assembler.main(role))
        units = range(settings.kafka.groups)
        async with asyncio.timeout(60):
            ends = await role.log.end_offsets([Partition(topic, unit) for topic in INPUTS for unit in units])
            while True:
                assert not running.done(), running.exception()
                cuts = [await live_cut(role.log, settings.run.id, unit) for unit in units]
                if all(cut and all(cut.high[t] >= ends[Partition(t, cut.unit)] for t in INPUTS) for cut in cuts):
                    break
                await asyncio.sleep(0.05)  # the assembler's commits are not ours to await
        role.stopping.set()
        await running


async def files(role: Role) -> int:
    """Files in the index."""
    index = ArchiveIndex(role.blobs, role.settings.run.id)
    await index.load()
    return sum(map(len, index.spans.values()))


async def killed_archiver(settings: Settings, role: Role) -> None:
    """`turnlog role archive` as a process of its own, killed -9 once it has written a few files."""
    environment = {
        **os.environ,
        **variables(settings),
        "TURNLOG_ARCHIVE_MAX_AGE_S": "0.05",
    }
    process = subprocess.Popen([sys.executable, "-m", "turnlog.cli", "role", "archive"], env=environment)  # noqa: ASYNC220
    try:
        async with asyncio.timeout(60):
            while await files(role) < 3:
                assert process.poll() is None
                await asyncio.sleep(0.05)  # another process writes: there is nothing here to wait on
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def delete_topics(settings: Settings) -> None:
    """Every topic of the run."""
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([settings.kafka.prefix + topic.name for topic in topics.CATALOGUE])
    finally:
        await admin.close()


def archive_only(settings: Settings) -> Settings:
    """The store is all that is left."""
    return dataclasses.replace(
        settings,
        kafka=KafkaSettings(bootstrap="127.0.0.1:1", groups=settings.kafka.groups),
        registry=RegistrySettings(url="http://127.0.0.1:1"),
    )


async def test_the_archive_alone_replays_what_was_emitted_after_the_topics_were_deleted(
    live_settings: Settings,
) -> None:
    settings = live_settings
    async with open_role("test", settings) as role:
        await configure(role)
        await write(role, seed=1, groups=60)
        await fold(settings)
        await killed_archiver(settings, role)
        await write(role, seed=2, groups=5)
        await fold(settings)
        before = await files(role)
        from_topics = await run(role)
        assert from_topics.identical, from_topics.divergence
        assert await flush(role, limits=RangeLimits(file_records=40)) > 0
        assert await files(role) > before
    await delete_topics(settings)
    said = io.StringIO()
    status = await replay(archive_only(settings), verify=True, source="archive", console=Terminal(file=said, width=200))
    assert status == 0, said.getvalue()
    assert from_topics.comparison_summary in said.getvalue()


async def keeps_what_an_indexer_reads(role: Role, index: ArchiveIndex, found: dict[Partition, int]) -> None:
    """`found`: what is prunable where there is none."""
    indexed = dataclasses.replace(role.settings, index=IndexSettings(enabled=True))
    beside = dataclasses.replace(role, settings=indexed)
    assert await prunable(beside, index, before_ms=1 << 60) == found, "no file is there"
    async with indexing(role, path_of(indexed), FOLD_VERSION):
        pass
    assert await prunable(beside, index, before_ms=1 << 60) == {}
    await build(role, path_of(indexed))
    assert await prunable(beside, index, before_ms=1 << 60) == found


@pytest.mark.long
async def test_what_is_archived_old_and_not_needed_can_be_pruned_and_still_be_replayed(
    live_settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suite prunes and replays in memory (test_prune.py)."""
    async with open_role("test", live_settings) as role:
        await configure(role)
        await write(role, seed=3, groups=30)
        await fold(live_settings)
        await flush(role)
        index = ArchiveIndex(role.blobs, live_settings.run.id)
        await index.load()
        assert await prunable(role, index, before_ms=0) == {}
        found = await prunable(role, index, before_ms=1 << 60)
        await keeps_what_an_indexer_reads(role, index, found)
        assert {place.topic for place in found} >= {"agent.turns", "agent.token-snapshots"}
        await archive.status(live_settings)
        assert "agent.token-snapshots" in capsys.readouterr().out
        await archive.prune(live_settings, "2099-01-01", delete=False)
        assert "nothing was deleted" in capsys.readouterr().out
        with pytest.raises(archive.BadMoment, match="yesterday"):
            await archive.prune(live_settings, "yesterday", delete=True)
        await archive.prune(live_settings, "2099-01-01", delete=True)
        assert f"agent.turns[0]: offsets 0 to {found[Partition('agent.turns', 0)] - 1}" in capsys.readouterr().out
        assert await role.log.start_offsets(list(found)) == found
        with pytest.raises(HistoryPruned, match="archive"):
            await run(role)
        await write(role, seed=4, groups=5)
    await fold(live_settings)  # the assembler starts again on what is left
    async with open_role("test", live_settings) as role:
        await flush(role)
    async with open_role("test", archive_only(live_settings), archive=True) as role:
        verdict = await run(role)
        assert verdict.identical, verdict.divergence
