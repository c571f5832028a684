"""The object store's contract: on the fake, on the real server, and on the user's when TURNLOG_S3_ENDPOINT names it
(with TURNLOG_STORE_BUCKET, TURNLOG_STORE_ACCESS_KEY, TURNLOG_STORE_SECRET_KEY)."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import os
import resource
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minio import Minio

from turnlog.infra.blobs import (
    BlobCorrupt,
    BlobMissing,
    Blobs,
    FileUnreadable,
    MemoryBlobs,
    NoRoom,
    Owner,
    StoreUnavailable,
    UploadSource,
    key,
)
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.infra.s3 import S3Blobs
from turnlog.schemas.types import BlobRef
from turnlog.settings import StoreSettings, load

DAY_S = 86400.0
USERS_OWN = "TURNLOG_S3_ENDPOINT"
STORES = ["memory", "embedded", *(["users_own"] if USERS_OWN in os.environ else [])]


def _settings_of(name: str, request: pytest.FixtureRequest) -> StoreSettings:
    if name == "users_own":
        return dataclasses.replace(load(None, os.environ).store, endpoint=os.environ[USERS_OWN])
    found: StoreSettings = request.getfixturevalue("store")
    return found


@pytest.fixture(params=STORES)
async def blobs(request: pytest.FixtureRequest) -> AsyncIterator[Blobs]:
    opened: Blobs = MemoryBlobs() if request.param == "memory" else S3Blobs(_settings_of(request.param, request))
    yield opened
    await opened.close()


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 40_000], ids=["empty", "one byte", "10 MB"])
async def test_what_was_put_comes_back(blobs: Blobs, content: bytes) -> None:
    ref = await blobs.put(content, media_type="text/plain")
    assert ref == BlobRef(hashlib.sha256(content).hexdigest(), len(content), "text/plain")
    assert await blobs.get(ref) == content


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=2000))
async def test_any_bytes_come_back(blobs: Blobs, content: bytes) -> None:
    assert await blobs.get(await blobs.put(content)) == content


@pytest.mark.parametrize("size", [0, 1, 40_000_000], ids=["empty", "one byte", "40 MB, in parts"])
async def test_a_file_comes_back_as_a_file(blobs: Blobs, tmp_path: Path, size: int) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    content = (uuid4().bytes * (size // 16 + 1))[:size]
    there.write_bytes(content)
    ref = await blobs.put_file(there, media_type="text/plain")
    assert ref == BlobRef(hashlib.sha256(content).hexdigest(), size, "text/plain")
    assert await blobs.put_file(there, sha256=ref.sha256, media_type="text/plain") == ref
    await blobs.get_file(ref, back)
    assert back.read_bytes() == content == await blobs.get(ref)


async def test_a_file_under_a_name_is_hashed_on_its_way_and_verified_on_its_way_back(
    blobs: Blobs, tmp_path: Path
) -> None:
    name, content = f"{uuid4().hex}/file", uuid4().bytes * 1_250_000
    (tmp_path / "there").write_bytes(content)
    ref = await blobs.put_named_file(name, tmp_path / "there")
    assert (ref.sha256, ref.size) == (hashlib.sha256(content).hexdigest(), len(content))
    await blobs.get_named_file(name, ref, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    await blobs.put_named(name, b"else")
    for error in (BlobCorrupt, BlobMissing):
        with pytest.raises(error, match=name):
            await blobs.get_named_file(name, ref, tmp_path / "again")
        await blobs.remove(name)
    assert sorted(os.listdir(tmp_path)) == ["back", "there"]


async def test_a_file_that_does_not_verify_is_not_left_behind(blobs: Blobs, tmp_path: Path) -> None:
    ref = await blobs.put(b"twelve bytes")
    for wrong, error in ((dataclasses.replace(ref, size=11), BlobCorrupt), (BlobRef("ab" * 32, 1), BlobMissing)):
        with pytest.raises(error):
            await blobs.get_file(wrong, tmp_path / "back")
        assert not os.listdir(tmp_path)


async def test_a_file_that_cannot_be_read_is_named_and_not_the_store(blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match="absent: No such file"):
        await blobs.put_file(tmp_path / "absent")
    with pytest.raises(FileUnreadable, match="mem: Input/output error"):  # it opens, and gives nothing
        await blobs.put_file(Path("/proc/self/mem"))


def test_a_file_that_breaks_off_while_the_store_takes_it_is_named() -> None:
    path = Path("/proc/self/mem")
    with path.open("rb") as file, pytest.raises(FileUnreadable, match="mem: Input/output error"):
        UploadSource(path, file).read(1)


async def test_a_disk_without_room_is_named_and_not_the_store(blobs: Blobs, tmp_path: Path) -> None:
    ref = await blobs.put(bytes(10_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        with pytest.raises(NoRoom, match="back: File too large"):
            await blobs.get_file(ref, tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not os.listdir(tmp_path)


async def test_putting_again_changes_nothing(blobs: Blobs) -> None:
    first = await blobs.put(b"again and again")
    assert await blobs.put(b"again and again") == first
    assert await blobs.get(first) == b"again and again"


async def test_many_at_once_all_arrive(blobs: Blobs) -> None:
    contents = [f"content {number}".encode() * 500 for number in range(64)]
    refs = await asyncio.gather(*map(blobs.put, contents))
    assert await asyncio.gather(*map(blobs.get, refs)) == contents


async def test_what_was_never_put_is_missing(blobs: Blobs) -> None:
    ref = BlobRef(hashlib.sha256(b"never put").hexdigest(), 9)
    with pytest.raises(BlobMissing, match=ref.sha256):
        await blobs.get(ref)


async def test_named_objects_are_replaced_and_listed_by_prefix_in_order(blobs: Blobs) -> None:
    folder = f"archive/{uuid4().hex}"
    names = [f"{folder}/topic=a.b/partition=0000{n}/{n:020d}-{n + 1:020d}.avro" for n in (2, 0, 1)]
    assert await blobs.names(f"{folder}/") == []
    for name in names:
        await blobs.put_named(name, b"first")
        await blobs.put_named(name, name.encode())
    assert await blobs.names(f"{folder}/") == sorted(names)
    assert await blobs.names(f"{folder}/topic=a.b/partition=00001/") == [names[2]]
    assert [await blobs.get_named(name) for name in names] == [name.encode() for name in names]
    with pytest.raises(BlobMissing, match=r"absent"):
        await blobs.get_named(f"{folder}/absent")


async def test_a_blob_is_found_in_ones_own_folder_in_none_in_that_of_another_owner_and_in_the_trash(
    blobs: Blobs,
) -> None:
    ours, theirs, nobody = (Owner("cluster", "team.", uuid4().hex) for _ in range(3))
    first = await blobs.put(f"of an earlier release {ours.run}".encode())
    blobs.folder = ours.folder
    second = await blobs.put(f"ours {ours.run}".encode())
    assert await blobs.names(ours.folder) == [key(second.sha256, ours.folder)]
    assert await blobs.get(first)
    blobs.folder = nobody.folder
    await blobs.put(f"by nobody {ours.run}".encode())
    blobs.folder = theirs.folder
    await blobs.put(f"theirs {ours.run}".encode())
    with pytest.raises(BlobMissing, match=second.sha256):
        await blobs.get(second)
    await blobs.put_named(ours.name, ours.json())
    assert Owner.parse(ours.name, await blobs.get_named(ours.name)) == ours
    assert await blobs.get(second) == f"ours {ours.run}".encode()
    third = BlobRef(hashlib.sha256(b"thrown away").hexdigest(), 11)
    await blobs.put_named(f"trash/{key(third.sha256, theirs.folder)}", b"thrown away")
    assert await blobs.get(third) == b"thrown away"
    assert key(third.sha256, theirs.folder) in await blobs.names(theirs.folder), "who needs it puts it back"


async def test_an_object_is_as_young_as_its_last_put_or_copy_by_the_clock_of_the_store(blobs: Blobs) -> None:
    folder = f"ages/{uuid4().hex}"
    first, second = f"{folder}/first", f"{folder}/second"
    assert (await blobs.list_objects(folder)).objects == ()
    await blobs.put_named(first, b"one")
    put = await blobs.list_objects(f"{folder}/")
    assert [(one.name, one.size) for one in put.objects] == [(first, 3)]
    assert abs(put.now - put.objects[0].modified) < 60
    if isinstance(blobs, S3Blobs):  # as if it had lain there for a day
        aged(blobs._settings, first, b"one")
    else:
        blobs.times[first] -= DAY_S  # type: ignore[attr-defined]
    (old,) = (await blobs.list_objects(first)).objects
    assert put.now - old.modified > DAY_S / 2
    await blobs.copy(first, second)
    await blobs.put_named(first, b"two")
    listing = await blobs.list_objects(folder)
    assert [(one.name, one.size) for one in listing.objects] == [(first, 3), (second, 3)]
    assert all(listing.now - one.modified < DAY_S / 2 for one in listing.objects)
    assert (await blobs.get_named(first), await blobs.get_named(second)) == (b"two", b"one")


async def test_what_was_removed_is_gone_and_what_is_not_there_is_no_error_to_remove_and_one_to_copy(
    blobs: Blobs,
) -> None:
    name = f"removed/{uuid4().hex}"
    await blobs.put_named(name, b"one")
    for _ in range(2):
        await blobs.remove(name)
        assert await blobs.names(name) == []
    with pytest.raises(BlobMissing, match=name):
        await blobs.copy(name, f"{name}-copy")


def aged(store: StoreSettings, name: str, content: bytes) -> None:
    """An object of yesterday: rclone takes the time of one from the metadata in which its own clients keep a file's."""
    at: dict[str, str | list[str] | tuple[str]] = {"mtime": f"{time.time() - DAY_S:.0f}"}
    _client(store).put_object(store.bucket, name, io.BytesIO(content), len(content), metadata=at)


def test_owners_whose_names_would_run_together_have_folders_apart() -> None:
    names = [("a", "", "b"), ("a", "b", ""), ("a/prefix=", "", "b"), ("a", "/run=b", ""), ("a", "", "b/c")]
    assert len({Owner(*name).folder for name in names}) == len(names)
    owner = Owner("a", "team.", "run")
    assert Owner.parse(owner.name, owner.json()) == owner
    for content in (b"", b"[]", b'{"cluster": "a"}', Owner("b", "team.", "run").json()):
        with pytest.raises(BlobCorrupt, match="owners/a"):
            Owner.parse(owner.name, content)


async def test_a_reference_of_another_size_is_corrupt(blobs: Blobs) -> None:
    ref = await blobs.put(b"twelve bytes")
    with pytest.raises(BlobCorrupt):
        await blobs.get(dataclasses.replace(ref, size=11))


@pytest.mark.parametrize("damaged", [b"twelve byteS", b"twelve", b""])
async def test_a_damaged_object_is_corrupt_and_never_returned(store: StoreSettings, damaged: bytes) -> None:
    real, fake = S3Blobs(store), MemoryBlobs()
    ref = await real.put(b"twelve bytes")
    assert await fake.put(b"twelve bytes") == ref
    _client(store).put_object(store.bucket, key(ref.sha256), io.BytesIO(damaged), len(damaged))
    fake.objects[ref.sha256] = damaged
    for blobs in (real, fake):
        with pytest.raises(BlobCorrupt, match=ref.sha256):
            await blobs.get(ref)
        await blobs.close()


async def test_a_bucket_that_is_not_there_is_made_also_by_several_at_once(store: StoreSettings) -> None:
    fresh = dataclasses.replace(store, bucket="made-by-the-test")
    clients = [S3Blobs(fresh) for _ in range(4)]
    refs = await asyncio.gather(*(client.put(b"first") for client in clients))
    assert len(set(refs)) == 1
    for client in clients:
        await client.close()


@pytest.mark.parametrize("change", [{"secret_key": "wrong"}, {"access_key": "nobody"}])
async def test_wrong_credentials_name_the_settings_and_not_the_secret(
    store: StoreSettings, change: dict[str, str]
) -> None:
    blobs = S3Blobs(dataclasses.replace(store, **change))  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable, match=r"403.*\[store\] endpoint, access_key, secret_key") as refused:
        await blobs.put(b"x")
    assert "wrong" not in str(refused.value)
    await blobs.close()


async def test_keys_from_a_file_that_is_swapped_are_used_without_a_new_client(
    store: StoreSettings, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("wrong\n")
    env = {"TURNLOG_STORE_ENDPOINT": store.endpoint, "TURNLOG_STORE_SECRET_KEY_FILE": str(file)}
    blobs = S3Blobs(load(None, env).store)
    with pytest.raises(StoreUnavailable, match="403"):
        await blobs.put(b"x")
    swapped = tmp_path / "swapped"
    swapped.write_text(store.secret_key + "\n")
    swapped.rename(file)
    assert await blobs.get(await blobs.put(b"x")) == b"x"
    await blobs.close()


async def test_an_unreachable_store_is_retried_and_then_named(store: StoreSettings) -> None:
    nowhere = f"http://{HOST}:{free_ports(1)[0]}"
    blobs = S3Blobs(dataclasses.replace(store, endpoint=nowhere))
    with pytest.raises(StoreUnavailable, match=rf"{nowhere}.*\[store\] endpoint"):
        await blobs.get(BlobRef("00" * 32, 1))
    await blobs.close()


def test_an_endpoint_that_is_no_address_is_refused_at_once() -> None:
    with pytest.raises(StoreUnavailable, match=r"\[store\] endpoint must be http"):
        S3Blobs(StoreSettings(endpoint="localhost:9000"))


async def test_objects_survive_a_kill_of_the_embedded_store(tmp_path: Path) -> None:
    with ObjectStore(tmp_path, StoreSettings()) as server:
        blobs = S3Blobs(server.settings)
        refs = await asyncio.gather(*(blobs.put(bytes([number]) * 100_000) for number in range(20)))
        server.kill()
        server.start()
        for number, ref in enumerate(refs):
            assert await blobs.get(ref) == bytes([number]) * 100_000
        await blobs.close()


def _client(store: StoreSettings) -> Minio:
    return Minio(
        store.endpoint.removeprefix("http://"),
        access_key=store.access_key,
        secret_key=store.secret_key,
        secure=False,
        region=store.region,
    )
