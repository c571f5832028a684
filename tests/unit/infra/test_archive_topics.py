"""The topics of an archive: releases that know other topics share it."""

from __future__ import annotations

import json

import pytest

from turnlog.infra.archive import ArchiveDamaged
from turnlog.infra.archive.index import FIRST_TOPICS, ArchiveIndex
from turnlog.infra.blobs import MemoryBlobs
from turnlog.schemas.topics import CATALOGUE

TOPICS = {topic.name: 4 for topic in CATALOGUE}


async def opened(blobs: MemoryBlobs) -> ArchiveIndex:
    index = ArchiveIndex(blobs, "run")
    await index.load()
    return index


async def test_an_older_archiver_finds_no_topic_that_it_does_not_know() -> None:
    blobs = MemoryBlobs()
    await (await opened(blobs)).put_topics(TOPICS)
    assert json.loads(await blobs.get_named("archive/run/topics.json")) == dict.fromkeys(FIRST_TOPICS, 4)
    assert (await opened(blobs)).topics == TOPICS


async def test_an_archive_that_an_older_or_a_newer_release_wrote_is_continued() -> None:
    blobs = MemoryBlobs()
    await (await opened(blobs)).put_topics(dict.fromkeys(FIRST_TOPICS, 4))
    await (await opened(blobs)).put_topics(TOPICS)
    assert (await opened(blobs)).topics == TOPICS
    await blobs.put_named("archive/run/topics/of-a-later-release.json", b"1")
    index = await opened(blobs)
    await index.put_topics(TOPICS)
    assert index.topics == {**TOPICS, "of-a-later-release": 1}


@pytest.mark.parametrize("topic", ["agent.sessions", "run-health"])
async def test_the_archive_of_another_log_is_refused(topic: str) -> None:
    blobs = MemoryBlobs()
    await (await opened(blobs)).put_topics(TOPICS)
    with pytest.raises(ArchiveDamaged, match="give this log an"):
        await (await opened(blobs)).put_topics({**TOPICS, topic: 5})
