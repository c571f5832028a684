"""Every answer that S3's protocol allows: what may pass is waited for, what is wrong is told as what it is, and nothing
counts as stored that is not."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.fakes.faulty_store import HTML, Fault, FaultyStore, error
from turnlog.infra.blobs import BlobMissing, BucketMissing, StoreBusy, StoreUnavailable, StoreUnreachable
from turnlog.infra.roles import is_unreachable
from turnlog.infra.s3 import PART_BYTES, RETRIES, S3Blobs
from turnlog.settings import StoreSettings
from turnlog.trainer.checkpoints.places import StorePlace

LARGE = PART_BYTES + 1
LOGIN = b"<html><body>Welcome, please log in<br></body></html>"
SLOW = Fault(status=503, body=error("SlowDown", "Please reduce your request rate."))


@pytest.fixture
def faulty(store: StoreSettings) -> FaultyStore:
    return FaultyStore(int(store.endpoint.rpartition(":")[2]))


@pytest.fixture
async def blobs(faulty: FaultyStore, store: StoreSettings) -> AsyncIterator[S3Blobs]:
    with faulty.serving() as url:
        blobs = S3Blobs(dataclasses.replace(store, endpoint=url), backoff_s=0.001)
        await blobs.put(b"the bucket is there")
        yield blobs
        await blobs.close()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(LARGE))
    return path


@pytest.mark.parametrize(
    "answer",
    [
        Fault("COMPLETE", 200, error("InternalError", "We encountered an internal error. Please try again.")),
        Fault("COMPLETE", 200, b"\n  \n" + error("SlowDown")),
        Fault("COMPLETE", 200, LOGIN, kind=HTML),
        Fault("COMPLETE", 200, b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"),
    ],
    ids=["error", "error behind spaces", "page", "lie"],
)
async def test_an_upload_that_ends_in_an_error_under_200_is_not_stored(
    blobs: S3Blobs, faulty: FaultyStore, large: Path, answer: Fault
) -> None:
    faulty.fault = answer
    with pytest.raises(StoreBusy):
        await blobs.put_file(large)


async def test_an_error_under_200_is_asked_again(
    blobs: S3Blobs, faulty: FaultyStore, large: Path, tmp_path: Path
) -> None:
    faulty.fault = Fault("COMPLETE", 200, error("InternalError"), times=1)
    await blobs.get_file(await blobs.put_file(large), tmp_path / "back")


async def test_an_upload_that_was_ended_before_its_error_is_put_again(
    blobs: S3Blobs, faulty: FaultyStore, large: Path
) -> None:
    """The store has ended it, says that it has not, and knows no such upload when it is asked again."""
    faulty.fault = Fault("COMPLETE", 500, error("InternalError"), times=1, done=True)
    with pytest.raises(StoreBusy, match="NoSuchUpload"):
        await blobs.put_file(large)
    await blobs.put_file(large)


async def test_a_checkpoint_whose_shard_is_not_stored_is_not_sealed(
    blobs: S3Blobs, faulty: FaultyStore, large: Path, tmp_path: Path
) -> None:
    place = StorePlace(blobs._settings, f"checkpoints/{tmp_path.name}", tmp_path / "cache")
    folder = await asyncio.to_thread(place.create_folder, "step-00000001-i0")
    await asyncio.to_thread(shutil.copy, large, folder / "0.distcp")
    faulty.fault = Fault("COMPLETE", 200, error("InternalError"))
    with pytest.raises(StoreBusy):
        await asyncio.to_thread(place.store_files, folder, {}, {"cursor": {}})
    assert await asyncio.to_thread(place.names) == []


PASSING = {
    "429": Fault(status=429, body=error("TooManyRequests"), headers={"retry-after": "0"}),
    "429 SlowDown": Fault(status=429, body=error("SlowDown")),
    "429 of a proxy": Fault(status=429, body=b"slow down", kind="text/plain"),
    "503": SLOW,
    "503 with Retry-After": dataclasses.replace(SLOW, headers={"retry-after": "0"}),
    "503 with a date": dataclasses.replace(SLOW, headers={"retry-after": formatdate(usegmt=True)}),
    "500": Fault(status=500, body=error("InternalError")),
    "502 of a proxy": Fault(status=502, body=b"<html>bad gateway", kind=HTML),
    "507": Fault(status=507, body=error("XMinioStorageFull")),
    "400 RequestTimeout": Fault(status=400, body=error("RequestTimeout")),
    "400 IncompleteBody": Fault(status=400, body=error("IncompleteBody")),
    "400 BadDigest": Fault(status=400, body=error("BadDigest")),
    "408": Fault(status=408, body=error("RequestTimeout")),
    "409": Fault(status=409, body=error("OperationAborted")),
    "412 while written": Fault(status=409, body=error("ConditionalRequestConflict")),
    "403 ExpiredToken": Fault(status=403, body=error("ExpiredToken")),
    "400 ExpiredToken": Fault(status=400, body=error("ExpiredToken")),
    "403 skew": Fault(status=403, body=error("RequestTimeTooSkewed")),
    "page": Fault(status=200, body=LOGIN, kind=HTML),
    "200 with an error": Fault(status=200, body=error("InternalError")),
}
LATER = ("507", "403 ExpiredToken", "400 ExpiredToken", "403 skew")
"""The same request would meet the same answer: whoever asked asks anew, after a while."""


@pytest.mark.parametrize("name", PASSING)
async def test_an_answer_that_passes_is_waited_for(blobs: S3Blobs, faulty: FaultyStore, name: str) -> None:
    ref = await blobs.put(name.encode())
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "PUT": lambda: blobs.put(name.encode()),
        "GET": lambda: blobs.names("blobs/"),
        "COPY": lambda: blobs.copy(f"blobs/{ref.sha256[:2]}/{ref.sha256}", f"copies/{ref.sha256}"),
    }
    for what, call in calls.items():
        faulty.fault = dataclasses.replace(PASSING[name], what=what)
        with pytest.raises(StoreBusy) as told:
            await call()
        assert is_unreachable(told.value)
        assert "access_key" not in str(told.value)
        assert faulty.asked.count(what if what != "COPY" else "PUT") == (1 if name in LATER else 1 + RETRIES)
        faulty.fault = dataclasses.replace(PASSING[name], what=what, times=1)
        if name not in LATER:
            await call()
    faulty.heal()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Fault(status=403, body=error("SignatureDoesNotMatch")), "SignatureDoesNotMatch.*secret_key"),
        (Fault(status=403, body=error("AccessDenied")), "AccessDenied.*access_key"),
        (Fault(status=301, body=error("PermanentRedirect"), headers={"x-amz-bucket-region": "eu-west-1"}),
         r"is in eu-west-1; set \[store\] region"),
        (Fault(status=400, body=error("AuthorizationHeaderMalformed", more="<Region>eu-west-1</Region>")),
         r"is in eu-west-1; set \[store\] region"),
        (Fault(status=302, headers={"location": "http://127.0.0.1:9/login"}),
         r"redirects to http://127.0.0.1:9/login; set \[store\] endpoint"),
        (Fault(status=404, body=b"404 page not found", kind="text/plain"),
         r"which is not the answer of an S3 store; check \[store\] endpoint"),
        (Fault(status=501, body=error("NotImplemented")), "NotImplemented"),
    ],
    ids=["signature", "denied", "region", "region of a signature", "redirect", "no store", "not implemented"],
)  # fmt: skip
async def test_an_answer_that_stays_says_what_it_is(
    blobs: S3Blobs, faulty: FaultyStore, answer: Fault, told: str
) -> None:
    for what, call in (("PUT", lambda: blobs.put(b"x")), ("GET", lambda: blobs.get_named("x"))):
        faulty.fault = dataclasses.replace(answer, what=what)
        with pytest.raises(StoreUnavailable, match=told) as refused:
            await call()
        assert not isinstance(refused.value, StoreUnreachable)
        assert faulty.asked == [what]


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_clock_that_is_off_is_told_from_a_wrong_key(
    faulty: FaultyStore, store: StoreSettings, hours: int
) -> None:
    """Whoever asks first asks by HEAD, whose refusal has no body to say why."""
    date = formatdate(time.time() - 3600 * hours, usegmt=True)
    faulty.fault = Fault(status=403, headers={"date": date})
    with faulty.serving() as url:
        blobs = S3Blobs(dataclasses.replace(store, endpoint=url), patient=False)
        with pytest.raises(
            StoreBusy, match=f"clock is 7[12]\\d\\d s {'ahead of' if hours > 0 else 'behind'} the store's"
        ):
            await blobs.put(b"x")
        await blobs.close()


async def test_a_bucket_that_is_gone_is_no_missing_object(blobs: S3Blobs, faulty: FaultyStore) -> None:
    faulty.fault = Fault("GET", 404, error("NoSuchBucket"))
    with pytest.raises(BucketMissing):
        await blobs.get_named("x")
    faulty.heal()
    with pytest.raises(BlobMissing):
        await blobs.get_named("x")


async def test_a_put_without_an_etag_is_no_put(blobs: S3Blobs, faulty: FaultyStore) -> None:
    def without(headers: dict[str, str], content: bytes) -> bytes:
        headers.pop("etag", None)
        return content

    faulty.fault = Fault("PUT", change=without)
    with pytest.raises(StoreBusy, match="without an ETag"):
        await blobs.put(b"x")


async def test_parts_with_wrong_etags_are_put_again_by_whoever_puts(
    blobs: S3Blobs, faulty: FaultyStore, large: Path
) -> None:
    def wrong(headers: dict[str, str], content: bytes) -> bytes:
        headers["etag"] = '"00000000000000000000000000000000"'
        return content

    faulty.fault = Fault("PART", change=wrong)
    with pytest.raises(StoreBusy):
        await blobs.put_file(large)
    faulty.heal()
    await blobs.put_file(large)


async def test_an_answer_that_is_cut_is_asked_for_again(blobs: S3Blobs, faulty: FaultyStore) -> None:
    def cut(headers: dict[str, str], content: bytes) -> bytes:
        headers["content-length"] = str(len(content) // 2)
        return content[: len(content) // 2]

    def broken(headers: dict[str, str], content: bytes) -> bytes:
        headers["content-length"] = str(len(content))
        return content[: len(content) // 2]

    names = await blobs.names("blobs/")
    for change in (cut, broken):
        faulty.fault = Fault("GET", change=change, times=1)
        assert await blobs.names("blobs/") == names
        faulty.fault = Fault("GET", change=change)
        with pytest.raises(StoreUnreachable):
            await blobs.names("blobs/")
