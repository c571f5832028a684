"""`turnlog gc` as people run it: a process, a real log with an open transaction, a real store."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.test_run_life import turnlog
from turnlog.infra.blobs import BlobMissing, Owner, key
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.s3 import client
from turnlog.sandbox_workers.workspaces import stored
from turnlog.schemas.events import ToolCallCompleted, ToolStatus
from turnlog.schemas.topics import TREES
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka
DAY_S = 86400.0


def aged(role: Role, name: str, content: bytes, days: float) -> None:
    """An object of another age: rclone takes it from the metadata with which its own clients keep a file's time."""
    store = role.settings.store
    metadata: dict[str, str | list[str] | tuple[str]] = {"mtime": f"{time.time() - days * DAY_S:.0f}"}
    client(store).put_object(store.bucket, name, io.BytesIO(content), len(content), metadata=metadata)


async def put(role: Role, content: bytes, days: float = 2) -> BlobRef:
    ref = await role.blobs.put(content)
    aged(role, key(ref.sha256, role.blobs.folder), content, days)
    return ref


@pytest.fixture
def own_bucket(live_settings: Settings) -> Settings:
    """What other tests leave in theirs belongs to logs that this one cannot know."""
    store = dataclasses.replace(live_settings.store, bucket=f"gc-{uuid4().hex[:8]}")
    return dataclasses.replace(live_settings, store=store)


async def test_what_nothing_names_goes_by_the_trash_and_what_a_record_names_stays(
    own_bucket: Settings, tmp_path: Path
) -> None:
    async with open_role("test", own_bucket) as role:
        await configure(role)
        answered, open_, garbage = [await put(role, what) for what in (b"answered", b"open", b"garbage")]
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "one").write_bytes(b"in a pack that the workspace alone names")
        workspace = await stored(tmp_path / "files", role.blobs)
        for name in await role.blobs.names("owned/"):
            aged(role, name, await role.blobs.get_named(name), 2)
        young = await role.blobs.put(b"young")
        await role.events.append(completed(role, answered, workspace))
        due = BlobRef("ab" * 32, 3)
        aged(role, f"trash/{key(due.sha256, role.blobs.folder)}", b"due", 2)
        async with role.log.transactor("gc-test") as transactor:
            await transactor.begin()
            await (await transactor.send(TREES.name, 0, b"", open_.sha256.encode()))
            status, said, _ = await turnlog(own_bucket, "gc", "--json")
            assert status == 0
            found = {row["state"]: row["objects"] for row in json.loads(said)["objects"]}
            assert found == {"reachable": 4, "garbage": 1, "young": 1, "due": 1}
            status, said, _ = await turnlog(own_bucket, "gc", "--delete")
            assert status == 0
            assert "1 objects were moved to the trash; 0 objects were restored; 1 objects were deleted for good" in said
        trashed = f"trash/{key(garbage.sha256, role.blobs.folder)}"
        assert await role.blobs.names("trash/") == [trashed]
        (listed,) = (listing := await role.blobs.list_objects(trashed)).objects
        assert listing.now - listed.modified < DAY_S, "its time in the trash begins when it gets there"
        for ref in (answered, open_, young, garbage, workspace):
            assert await role.blobs.get(ref)
        assert key(garbage.sha256, role.blobs.folder) in await role.blobs.names("owned/"), "who needed it put it back"
        with pytest.raises(BlobMissing):
            await role.blobs.get(due)


async def test_an_owner_that_cannot_be_asked_and_a_grace_that_is_too_short_are_refused(own_bucket: Settings) -> None:
    async with open_role("test", own_bucket) as role:
        await configure(role)
        await put(role, b"garbage")
        stranger = Owner("elsewhere", "", "theirs")
        await role.blobs.put_named(stranger.name, stranger.json())
        status, said, why = await turnlog(own_bucket, "gc", "--delete")
        assert (status, said) == (2, "")
        assert "UnknownOwner: owned/elsewhere/prefix=/run=theirs belongs to run 'theirs'" in why
        status, _, why = await turnlog(own_bucket, "gc", "--grace", "30m")
        assert status == 2
        assert "GraceTooShort: --grace 1800 s" in why
        assert await role.blobs.names("trash/") == []


def completed(role: Role, output: BlobRef, workspace: BlobRef) -> ToolCallCompleted:
    """A call whose output and files lie in the store."""
    return ToolCallCompleted(
        event_id="call", run_id=role.settings.run.id, group_id="group", session_id="session", floor=1,
        rollout_id="rollout", call_id="call", call_seq=0, status=ToolStatus.ok, reason="", exit_code=0, output=b"",
        full_output=output, duration_s=0.0, queue_s=0.0, workspace=workspace, attempt=1, worker="test", cached=False,
    )  # fmt: skip
