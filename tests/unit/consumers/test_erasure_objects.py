"""Objects of the store that `turnlog erase` deletes, and those that it leaves to others."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from tests.fakes.memory_log import MemoryLog
from tests.unit.consumers.test_erasure import FOLDER, PLANTED, SealedRun, call, holds, trained_session
from turnlog.consumers.erasure import plan_erasure
from turnlog.consumers.erasure_objects import SessionObjects, delete_objects, find_objects
from turnlog.consumers.gc import LEAST_GRACE_S
from turnlog.infra.blobs import TRASH, Owner, key
from turnlog.infra.event_log import dead_letter
from turnlog.infra.log import Partition, Record
from turnlog.schemas import topics
from turnlog.schemas.events import EgressRequest, EgressSource, Event, SessionStarted
from turnlog.schemas.types import BlobRef

OTHER = Owner("memory", "other.", "theirs").folder
WORKSPACE = "application/vnd.turnlog.workspace+json"


async def begun() -> tuple[SealedRun, str]:
    """A run, and a session of it that trained."""
    made = await SealedRun.begin()
    await made.good_days(groups=2)
    return made, await trained_session(made)


async def objects_of(made: SealedRun, session: str) -> SessionObjects:
    role = made.role()
    assert role.events.keys is not None
    await role.events.keys.refresh()
    events = await made.read(topics.SESSIONS)
    started = next(e for e in events if isinstance(e, SessionStarted) and e.session_id == session)
    return await find_objects(role, FOLDER, started, {started.session_id})


def request(blob: BlobRef, key: str) -> EgressRequest:
    return EgressRequest(
        method="GET", url="http://host/", status=200, source=EgressSource.recorded, reason="", request_sha256=key,
        response=blob, request_bytes=0, response_bytes=blob.size, duration_s=0.0,
    )  # fmt: skip


async def test_objects_outside_the_folder_of_the_run_stay() -> None:
    made, session = await begun()
    blob = await made.objects.put(PLANTED)
    await made.objects.copy(key(blob.sha256, FOLDER), TRASH + key(blob.sha256, FOLDER))
    theirs = [key(blob.sha256, OTHER), TRASH + key(blob.sha256, OTHER), key(blob.sha256)]
    for name in theirs:
        await made.objects.put_named(name, PLANTED)
    await made.append([call(session, blob)])
    before = await objects_of(made, session)
    assert set(before.shared) == set(theirs)
    done = await made.erase(session)
    assert done.is_done
    assert set(done.objects.shared) == set(theirs)
    assert {name for name in await made.objects.names("") if name.endswith(blob.sha256)} == set(theirs)


async def test_recorded_answers_stay_with_what_they_refer_to_until_they_are_removed_by_hand() -> None:
    made, session = await begun()
    body = await made.objects.put(PLANTED)
    answer = await made.objects.put(b'{"body":{"sha256":"%s"}}' % body.sha256.encode())
    requested = hashlib.sha256(b"GET").hexdigest()
    recording = f"egress/default/{requested}/000000.000000"
    await made.objects.put_named(recording, await made.objects.get(answer))
    asked = dataclasses.replace(call(session, body), requests=(request(body, requested),), full_output=answer)
    await made.append([asked])
    done = await made.erase(session)
    assert set(done.objects.shared) == {recording, key(body.sha256, FOLDER), key(answer.sha256, FOLDER)}
    assert await made.objects.get(body) == PLANTED
    await made.objects.remove(recording)
    assert (await made.erase(session)).objects.shared == ()
    assert not any(map(holds, made.objects.named.values()))


async def test_young_objects_and_the_lists_that_name_them_wait() -> None:
    made, session = await begun()
    old = [await made.objects.put(b"old " + PLANTED), await made.objects.put(b"file " + PLANTED)]
    listing = b"".join(b'{"sha256":"%s"}' % file.sha256.encode() for file in old)
    workspace = await made.objects.put(listing, media_type=WORKSPACE)
    await made.append([call(session, workspace)])
    made.wait()
    await made.objects.put(b"file " + PLANTED)  # a worker of another session may name it within an hour
    log = MemoryLog(made.broker)
    plan = await plan_erasure(made.role("erase", log), session)
    assert [one.name for one in plan.objects.deletable] == [key(old[0].sha256, FOLDER)]
    assert set(plan.objects.waiting) == {key(old[1].sha256, FOLDER), key(workspace.sha256, FOLDER)}
    made.wait(-LEAST_GRACE_S)
    first = await made.erase(session)
    assert not first.is_done
    assert set(first.objects.waiting) == set(plan.objects.waiting)
    assert (await made.erase(session)).is_done
    assert not any(map(holds, made.objects.named.values()))


async def test_an_object_that_is_stored_again_before_its_removal_stays() -> None:
    made, session = await begun()
    blob = await made.objects.put(PLANTED)
    await made.append([call(session, blob)])
    made.wait()
    listed = (await objects_of(made, session)).deletable
    await made.objects.put(PLANTED)
    assert await delete_objects(made.objects, listed) == (key(blob.sha256, FOLDER),)
    assert await made.objects.get(blob) == PLANTED


async def parked(made: SealedRun, value: bytes, record_key: bytes) -> Event:
    """The dead letter of a record with this value."""
    record = Record(topics.TOOL_RESULTS.name, 0, 10**6, record_key, value, (), 0)
    return dead_letter(record, ValueError("no reason"), run_id="run", role="sandbox")


@pytest.mark.parametrize("broken", [False, True])
async def test_an_object_that_a_dead_letter_of_the_session_names_is_deleted(broken: bool) -> None:
    made, session = await begun()
    blob = await made.objects.put(PLANTED)
    named = call(session, blob)
    role = made.role()
    value = await role.events.encode(named) if not broken else b"not Avro: " + f"{session} {blob.sha256}".encode()
    started = next(
        event for event in await made.read(topics.SESSIONS)
        if isinstance(event, SessionStarted) and event.session_id == session
    )  # fmt: skip
    await made.append([await parked(made, value, started.rollout_id.encode())])
    done = await made.erase(session)
    assert done.is_done
    assert done.objects.records["dead-letters"] == 1
    assert not any(map(holds, made.objects.named.values()))


@pytest.mark.parametrize("topic", [topics.TURNS, topics.DEAD_LETTERS])
async def test_an_object_that_an_undecodable_record_of_another_group_names_stays(topic: topics.Topic) -> None:
    made, session = await begun()
    blob = await made.objects.put(PLANTED)
    await made.append([call(session, blob)])
    value = f"not Avro: {session} {blob.sha256}".encode()
    if topic is topics.DEAD_LETTERS:
        await made.append([await parked(made, value, b"another rollout")])
    else:
        made.broker.write(Partition(topic.name, 0), b"another group", value, ())
    done = await made.erase(session)
    assert key(blob.sha256, FOLDER) in done.objects.shared
    assert await made.objects.get(blob) == PLANTED


async def test_an_undecodable_record_of_the_session_is_its_own() -> None:
    made, session = await begun()
    blob = await made.objects.put(PLANTED)
    started = next(
        event for event in await made.read(topics.SESSIONS)
        if isinstance(event, SessionStarted) and event.session_id == session
    )  # fmt: skip
    value = f"not Avro: {session} {blob.sha256}".encode()
    made.broker.write(Partition(topics.TURNS.name, 0), started.group_id.encode(), value, ())
    log = MemoryLog(made.broker)
    made.wait()
    plan = await plan_erasure(made.role("erase", log), session)
    assert [one.name for one in plan.objects.deletable] == [key(blob.sha256, FOLDER)]
