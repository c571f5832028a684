"""The rights and the configuration of topics that a run needs if it encrypts content."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.topics_admin import ACCESS, ROLES, acls, apply, check
from turnlog.schemas.content import WITH_CONTENT
from turnlog.schemas.topics import AUDIT, SESSION_KEYS
from turnlog.settings import ErasureSettings, Settings

SEALED = Settings(erasure=ErasureSettings(master_keys="0123456789abcdef"))


def operations(settings: Settings, role: str, topic: str = SESSION_KEYS.name) -> set[str]:
    return {acl.operation for acl in acls(settings, role) if (acl.resource, acl.name) == ("topic", topic)}


@pytest.mark.parametrize("role", sorted(ACCESS))
def test_who_reads_content_may_read_its_keys_and_who_writes_content_may_create_them(role: str) -> None:
    access = ACCESS[role]
    reads, writes = bool(WITH_CONTENT & set(access.receives)), bool(WITH_CONTENT & set(access.writes))
    found = operations(SEALED, role)
    assert ("Read" in found) >= (reads or writes)
    assert ("Write" in found) >= writes


def test_who_handles_no_content_has_no_right_on_its_keys() -> None:
    without = {role for role in ROLES if not operations(SEALED, role) & {"Read", "Write"}}
    assert {"loader", "track", "tinker", "configure", "pause", "up", "engines", "prune", "fork"} <= without
    assert {role for role in ROLES if "Write" in operations(SEALED, role)} == {
        "gateway", "runner", "sandbox", "assembler", "erase", "dead-letters", "skip",
    }  # fmt: skip


def test_who_erases_may_write_the_audit_trail() -> None:
    assert "Write" in operations(SEALED, "erase", AUDIT.name)


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("segment.ms", "604800000", False),
        ("max.compaction.lag.ms", "9223372036854775807", False),
        ("min.cleanable.dirty.ratio", "0.5", False),
        ("segment.ms", "60000", True),
        ("min.cleanable.dirty.ratio", "0.0", True),
    ],
)
async def test_a_topic_of_keys_that_is_never_compacted_is_found(key: str, value: str, fits: bool) -> None:
    log, settings = MemoryLog(), Settings()
    await apply(log, settings)
    assert await check(log, settings) == []
    spec = log.broker.specs[SESSION_KEYS.name]
    log.broker.specs[SESSION_KEYS.name] = dataclasses.replace(spec, config={**spec.config, key: value})
    problems = await check(log, settings)
    assert not problems if fits else key in problems[0]
