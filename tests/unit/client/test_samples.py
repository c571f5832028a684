"""The samples of a run as rows of a table."""

from __future__ import annotations

import dataclasses

from tests.fakes.memory_log import MemoryLog
from tests.fakes.sealed_events import MASTER
from tests.unit.consumers.test_dataset_files import sample
from turnlog.client.samples import sample_batches
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role, session_keys
from turnlog.infra.topics_admin import apply
from turnlog.settings import ErasureSettings, RunSettings, Settings

SEALED = Settings(run=RunSettings(id="run"), erasure=ErasureSettings(master_keys=MASTER))


async def test_samples_of_erased_sessions_are_no_rows() -> None:
    """One of them is so large that its tokens were in the store, which has deleted them."""
    log, registry, blobs = MemoryLog(), MemoryRegistry(), MemoryBlobs()
    await apply(log, SEALED)
    async with EventLog.open(log, registry, writer="test", keys=session_keys(SEALED), blobs=blobs) as events:
        for number in range(4):
            one = sample(number, tokens=300_000 if number == 1 else 8)
            await events.append(dataclasses.replace(one, run_id="run", session_id=f"session-{number}"))
        assert events.keys is not None
        for number in (1, 2):
            await events.keys.erase(f"session-{number}", "an operator")
        for name in await blobs.names(""):
            await blobs.remove(name)
        role = Role("test", "test-0", SEALED, log, events, blobs, Health("test"))
        rows = [row for batch in await sample_batches(role) for row in batch.to_pylist()]
    assert sorted(row["session_id"] for row in rows) == ["session-0", "session-3"]
