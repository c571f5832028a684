"""Blobs in any S3 store, through minio-py (synchronous, so calls run in a bounded thread pool).

A blob's key is its hash, so that a repeated put is harmless and no conditional puts are needed. aiobotocore was
considered: it pins botocore and brings ten packages for four calls.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree

import urllib3
from minio import Minio
from minio.commonconfig import REPLACE, CopySource
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider
from minio.error import MinioException, S3Error

from turnlog.infra.blobs import (
    BlobError,
    BlobMissing,
    BucketMissing,
    Folders,
    Listed,
    Listing,
    Readable,
    StoreBusy,
    StoreUnavailable,
    StoreUnreachable,
)
from turnlog.infra.roles.tls import trusting
from turnlog.infra.run_folder import present
from turnlog.settings import StoreSettings

THREADS = 8
RETRIES = 4
BACKOFF_S = 0.1
"""Base of the waits between retries: 0, 0.2, 0.4, 0.8 s for connections, 0.1, 0.2, 0.4, 0.8 s for answers."""
PART_BYTES, PIECE_BYTES = 8 << 20, 1 << 20
"""Bytes of a file per part of an upload, and per read of a download."""
MOST_PARTS = 10_000
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:? ?")
"""Matches urllib3's description of a connection object, which differs each time and helps nobody."""
SETTINGS = "check [store] endpoint, access_key, secret_key and bucket"
LONGEST_PAUSE_S = 10.0
"""Upper limit for Retry-After in seconds. The patience of callers is only a few times this."""
SKEW_S = 900.0
"""Maximum clock difference in seconds between both sides; beyond it S3 accepts no signature."""
AGAIN = frozenset({
    "BandwidthLimitExceeded", "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "PriorRequestNotComplete", "RequestLimitExceeded", "RequestTimeout", "ServiceUnavailable",
    "SlowDown", "SlowDownRead", "SlowDownWrite", "TemporaryRedirect", "Throttling", "ThrottlingException",
    "TooManyRequests", "XAmzContentSHA256Mismatch",
})  # fmt: skip
"""S3 error codes after which the same request may succeed, whatever the status."""
LATER = frozenset({
    "ExpiredToken", "ExpiredTokenException", "InvalidPart", "InvalidPartOrder", "NoSuchUpload", "RequestExpired",
    "RequestTimeTooSkewed", "TokenRefreshRequired", "XMinioStorageFull",
})  # fmt: skip
"""S3 error codes after which a later request may succeed: once clocks are set, tokens or disks renewed, parts
sent again."""
WRONG_REGION = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"})
FOR_SOMEBODY_ELSE = frozenset({"BucketAlreadyExists", "BucketAlreadyOwnedByYou", "BucketNotEmpty"})
"""Codes of a 409 that is permanent."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class S3Blobs(Folders):
    """See Blobs. The first call creates the bucket if it is missing."""

    def __init__(
        self, settings: StoreSettings, *, threads: int = THREADS, patient: bool = True, backoff_s: float = BACKOFF_S
    ) -> None:
        """Connections are opened by the first call.

        Without `patient`, requests are sent once and time out after seconds. `backoff_s` is the wait before the second
        attempt; it doubles with each further one. Raises StoreUnavailable if the endpoint is not an address. Raises
        TlsFileUnusable.
        """
        super().__init__()
        self._settings = settings
        self._http = _http(settings, threads, patient, backoff_s)
        self._client = client(settings, self._http)
        self._pool = ThreadPoolExecutor(threads, "s3")
        self._bucket_lock = threading.Lock()
        self._bucket_there = False

    async def date(self) -> str | None:
        """Return the time of the store's clock as an HTTP date (RFC 9110, 6.6.1), or None if its answers have none."""
        return await self._run(self._date)

    async def ahead_s(self) -> float:
        """Return the seconds by which this machine's clock is ahead of the store's; 0 if its answers have no date.
        Raises StoreUnreachable."""
        return await self._run_plainly(lambda: _ahead_s(self._date()))

    async def close(self) -> None:
        """See Blobs. Waits for pending calls."""
        await asyncio.to_thread(self._pool.shutdown)
        self._http.clear()

    async def _run_plainly(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread pool without checking the bucket first."""

        def call_store() -> T:
            try:
                return call()
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise StoreUnreachable(f"{self._settings.endpoint}: {_what(error)}; {SETTINGS}") from error

        return await asyncio.get_running_loop().run_in_executor(self._pool, call_store)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._translate_errors, call)

    def _translate_errors(self, call: Callable[[], T]) -> T:
        """Run `call` after making sure that the bucket exists. Answers of the store raise Refused, the transport
        HTTPError; both are converted to StoreUnavailable or a subclass."""
        try:
            self._ensure_bucket()
            return call()
        except S3ErrorResponse as refused:
            raise refused.to_store_error(self._settings) from refused
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            kind = StoreUnavailable if _status(error) else StoreUnreachable
            raise kind(f"{self._settings.endpoint}: {_what(error)}; {SETTINGS}") from error

    def _ensure_bucket(self) -> None:
        with self._bucket_lock:
            if self._bucket_there:
                return
            bucket = self._settings.bucket
            if not self._client.bucket_exists(bucket):
                if not self._settings.make_bucket:
                    raise BucketMissing(
                        f"{self._settings.endpoint} has no bucket {bucket}, and [store] make_bucket is false: create "
                        "it, or run `turnlog run configure` as a user that may create it"
                    )
                try:
                    self._client.make_bucket(bucket, self._settings.region)
                except MinioException:
                    if not self._client.bucket_exists(bucket):  # otherwise another process has just created it
                        raise
            self._bucket_there = True

    def _write(self, name: str, content: bytes, media_type: str) -> None:
        done = self._client.put_object(
            self._settings.bucket, name, io.BytesIO(content), len(content), content_type=media_type
        )
        self._check_etag(name, done.etag)

    def _write_file(self, name: str, file: Readable, size: int, media_type: str) -> None:
        """Upload in parts. minio-py buffers six parts while it sends three. S3 accepts at most 10,000 parts."""
        part = max(PART_BYTES, -(-size // MOST_PARTS))
        bucket, source = self._settings.bucket, cast(BinaryIO, file)
        done = self._client.put_object(bucket, name, source, size, content_type=media_type, part_size=part)
        self._check_etag(name, done.etag)
        if size > part:
            self._check_held(name, size)

    def _check_held(self, name: str, size: int) -> None:
        """Check that the object of a multipart upload exists with its full size. Only that proves success; the answer
        to the last request does not. Raises StoreBusy."""
        try:
            found = self._client.stat_object(self._settings.bucket, name).size
        except MinioException as error:
            if not _is_absent(error):
                raise
            found = None
        if found != size:
            held = "none" if found is None else f"{found} bytes"
            raise StoreBusy(
                f"{self._settings.endpoint} accepted {size} bytes of {name} in parts, but stored {held} of them"
            )

    def _check_etag(self, name: str, etag: str | None) -> None:
        """Check that a put was answered with an ETag. Every store sends the ETag of the stored object, but the page of
        a proxy has none. Raises StoreBusy."""
        if not etag:
            raise StoreBusy(
                f"{self._settings.endpoint} answered a PUT of {name} without an ETag: either a proxy in front of the "
                "store answered, or the object was not stored; see [store] endpoint"
            )

    def _names(self, prefix: str) -> list[str]:
        found = self._client.list_objects(self._settings.bucket, prefix=prefix, recursive=True)
        return sorted(str(entry.object_name) for entry in found)

    def _remove(self, name: str) -> None:
        self._client.remove_object(self._settings.bucket, name)

    def _date(self) -> str | None:
        return self._http.anything("HEAD", self._settings.endpoint).headers.get("date")

    def _now(self) -> float:
        """Return the store's time in whole seconds, never ahead of its clock. It is the date of any answer, even of a
        refusal. Raises StoreUnavailable if answers have no date."""
        said = self._date()
        if said is None:
            raise StoreUnavailable(
                f"{self._settings.endpoint}: its answers have no Date header, so the ages of objects are unknown"
            )
        return parsedate_to_datetime(said).timestamp()

    def _list_objects(self, prefix: str) -> Listing:
        now = self._now()
        found = self._client.list_objects(self._settings.bucket, prefix=prefix, recursive=True)
        ages = ((str(one.object_name), one.size or 0, one.last_modified) for one in found)
        return Listing(now, tuple(Listed(name, size, at.timestamp()) for name, size, at in ages if at is not None))

    def _copy(self, name: str, to: str) -> None:
        """Copy with the store's current time as modification time. rclone, unlike all other stores, would preserve the
        time of the source, but it honours a time that is given by this metadata convention."""
        metadata: dict[str, str | list[str] | tuple[str]] = {"mtime": f"{self._now():.0f}"}
        source = CopySource(self._settings.bucket, name)
        try:
            self._client.copy_object(self._settings.bucket, to, source, metadata=metadata, metadata_directive=REPLACE)
        except MinioException as error:
            if _is_absent(error):
                raise _missing(name, self._settings) from None
            raise

    def _read(self, name: str) -> bytes:
        """Read an object, and retry if an answer breaks off, which urllib3 does not do. Other writers may replace the
        object while it is sent, and several may do so in a row."""
        for pause_s in self._http.pauses_s:
            try:
                return self._whole(name)
            except urllib3.exceptions.ProtocolError:
                time.sleep(pause_s)
        return self._whole(name)

    def _whole(self, name: str) -> bytes:
        with self._pieces(name) as pieces:
            return b"".join(pieces)

    @contextmanager
    def _pieces(self, name: str) -> Iterator[Iterable[bytes]]:
        try:
            answer = self._client.get_object(self._settings.bucket, name)
        except MinioException as error:
            if _is_absent(error):
                raise _missing(name, self._settings) from None
            raise
        try:
            yield answer.stream(PIECE_BYTES)
        finally:
            answer.close()
            answer.release_conn()


class _Present(Provider):
    """Current keys, read for each request because their files may change."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings

    def retrieve(self) -> Credentials:
        settings = self._settings
        keys = present(settings.access_key), present(settings.secret_key)
        return Credentials(*keys, present(settings.session_token) or None)


class _OfRole(Provider):
    """Keys of this machine's or pod's role. minio-py renews them before they expire, and raises a bare ValueError if
    their source fails."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        identity = "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ
        # The endpoint of a store's own token service is configured as for any AWS client.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_STS") if identity else None
        self._given = IamAwsProvider(region=settings.region, custom_endpoint=endpoint)

    def retrieve(self) -> Credentials:
        try:
            return self._given.retrieve()
        except (ValueError, KeyError, OSError, MinioException, urllib3.exceptions.HTTPError) as error:
            raise StoreBusy(
                f"{self._settings.endpoint}: no keys of this machine's role yet ({OBJECT.sub('', f'{error}')}); see "
                "[store] credentials"
            ) from error


class S3ErrorResponse(MinioException):
    """An answer of the store that did not do what was requested, whatever its status: S3 may begin an answer with 200
    before the outcome is known, and end it with an error."""

    def __init__(self, status: int, code: str, said: str, headers: Mapping[str, str], region: str) -> None:
        super().__init__(f"{status} {code} {said}".strip())
        self.status, self.code, self.said, self.headers, self.region = status, code, said, headers, region
        self.skew_s = _ahead_s(headers.get("date")) if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN) else 0.0

    @property
    def again(self) -> bool:
        """True if the same request may succeed in a moment."""
        status = self.status
        if self.code in LATER | FOR_SOMEBODY_ELSE | WRONG_REGION or status == HTTPStatus.NOT_IMPLEMENTED:
            return False
        transient = (
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.CONFLICT,
            HTTPStatus.TOO_EARLY,
            HTTPStatus.TOO_MANY_REQUESTS,
        )
        return self.code in AGAIN or status in (200, *transient) or status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def is_absent(self) -> bool:
        """True if the store itself reports that the object does not exist. A 404 from a proxy says nothing
        about objects."""
        return self.status == HTTPStatus.NOT_FOUND and self.code not in ("", "NoSuchBucket", "NoSuchUpload")

    @property
    def pause_s(self) -> float | None:
        """Wait that Retry-After requests, at most LONGEST_PAUSE_S; None if there is none."""
        said = self.headers.get("retry-after", "")
        return min(float(said), LONGEST_PAUSE_S) if said.isdigit() else None

    @property
    def is_skewed(self) -> bool:
        """True if a clock difference is the cause."""
        return self.code == "RequestTimeTooSkewed" or abs(self.skew_s) > SKEW_S

    def to_store_error(self, settings: StoreSettings) -> StoreUnavailable:
        """Convert to the errors of `infra.blobs`, with cause and remedy in the message."""
        phrase = HTTPStatus(self.status).phrase if self.status in HTTPStatus._value2member_map_ else ""
        answered = f"{settings.endpoint} answered {self.status} {phrase}".rstrip() + f" ({self.code})" * bool(self.code)
        if self.is_skewed:
            how = (
                f"is {abs(self.skew_s):.0f} s {'ahead of' if self.skew_s > 0 else 'behind'}"
                if self.skew_s
                else "differs from"
            )
            return StoreBusy(f"{answered}: this machine's clock {how} the store's; synchronize both with NTP")
        if self.code == "NoSuchBucket":
            return BucketMissing(f"{answered}: {settings.bucket} is gone; restore it, or see [store] bucket")
        if self.region and (self.region != settings.region or self.code in WRONG_REGION):
            return StoreUnavailable(f"{answered}: {settings.bucket} is in {self.region}; set [store] region")
        if self.status in (301, 302, 303, 307, 308):
            where = self.headers.get("location", "nowhere")
            return StoreUnavailable(f"{answered}: it redirects to {where}; set [store] endpoint to the store itself")
        if self.again or self.code in LATER:
            return StoreBusy(f"{answered}: {self.said or 'it may be asked again'}")
        if self.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED) and not self.code:
            return StoreUnavailable(f"{answered}, which is not the answer of an S3 store; check [store] endpoint")
        return StoreUnavailable(f"{answered}; {SETTINGS}")


class _Http(urllib3.PoolManager):
    """HTTP client for minio-py. It retries answers that may be temporary, and raises Refused for any other that did not
    do what was requested."""

    def __init__(self, tries: int, backoff_s: float, **pool: Any) -> None:
        super().__init__(**pool)
        self.pauses_s = [backoff_s * 2**attempt for attempt in range(tries - 1)]
        """Seconds to wait between attempts."""

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = True, **how: Any
    ) -> urllib3.BaseHTTPResponse:
        """See PoolManager. Follows only 307, which S3 sends while a bucket is new. Raises S3ErrorResponse."""
        for pause_s in (*self.pauses_s, None):
            answer = super().urlopen(method, url, redirect=False, **how)
            where = answer.headers.get("location")
            if answer.status == HTTPStatus.TEMPORARY_REDIRECT and where:
                answer.drain_conn()
                answer = super().urlopen(method, urljoin(url, where), redirect=False, **how)
            refused = _refusal(method, answer, is_whole=how.get("preload_content", True))
            if refused is None:
                return answer
            if pause_s is None or not refused.again:
                raise refused
            time.sleep(refused.pause_s or pause_s)
        raise AssertionError("the last turn returns or raises")

    def anything(self, method: str, url: str) -> urllib3.BaseHTTPResponse:
        """Return the first answer, whatever it is."""
        return super().urlopen(method, url, redirect=False, retries=False)


def _refusal(method: str, answer: urllib3.BaseHTTPResponse, *, is_whole: bool) -> S3ErrorResponse | None:
    """Return the refusal in an answer, or None. With `is_whole` false, the body of a successful answer is an object,
    which the caller reads."""
    done = answer.status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.PARTIAL_CONTENT)
    if done and not is_whole:
        return None
    body = answer.read(cache_content=True) if not is_whole else answer.data
    if not is_whole:
        answer.release_conn()
    root = _xml(body)
    if done and (not body.strip() or (root is not None and _tag(root) != "Error")):
        return None
    told = {_tag(child): child.text or "" for child in root} if root is not None and _tag(root) == "Error" else {}
    code = told.get("Code", "")
    if method == "HEAD" and answer.status == HTTPStatus.NOT_FOUND:
        return None  # minio-py knows what that means for a bucket, and for an object
    region = answer.headers.get("x-amz-bucket-region") or told.get("Region", "")
    said = told.get("Message", "") if told else "not an answer of S3" * bool(body)
    return S3ErrorResponse(answer.status, code, said, answer.headers, region)


def _xml(body: bytes) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return None


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _ahead_s(date: str | None) -> float:
    """Return the seconds by which this machine's clock is ahead of an answer's date; 0 if it has none."""
    try:
        return time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    except ValueError:
        return 0.0


class _Client(Minio):
    """minio-py's client. If an upload fails and cannot be aborted either, the error of the upload is raised."""

    def _abort_multipart_upload(self, bucket_name: str, object_name: str, upload_id: str) -> None:
        try:
            super()._abort_multipart_upload(bucket_name, object_name, upload_id)
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            log.warning("the parts of %s/%s stay in the store: %s", bucket_name, object_name, error)


def client(settings: StoreSettings, http: urllib3.PoolManager | None = None) -> Minio:
    """Create a minio-py client from the settings. Raises StoreUnavailable."""
    address = urlsplit(settings.endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise StoreUnavailable(f"[store] endpoint must be http(s)://host:port, got {settings.endpoint!r}")
    if settings.credentials == "keys" and not settings.secret_key:
        raise StoreUnavailable(
            f"[store] secret_key is empty: set the key of {settings.endpoint} (TURNLOG_STORE_SECRET_KEY); that of an "
            "embedded store is in store/store.key of its run's directory"
        )
    made = _Client(
        address.netloc,
        credentials=_Present(settings) if settings.credentials == "keys" else _OfRole(settings),
        secure=address.scheme == "https",
        region=settings.region,
        http_client=http,
    )
    if settings.address_style == "virtual":
        made.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    else:
        made.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    return made


def _http(settings: StoreSettings, threads: int, patient: bool, backoff_s: float) -> _Http:
    retries = urllib3.Retry(  # retries of connections; `_Http` retries answers
        total=RETRIES if patient else 0,
        backoff_factor=backoff_s,
        allowed_methods=None,  # every call is idempotent
        respect_retry_after_header=False,
    )
    timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S if patient else CONNECT_TIMEOUT_S)
    trusted = trusting(settings.endpoint, settings.ca_file, "store")
    return _Http(
        1 + RETRIES if patient else 1, backoff_s, maxsize=threads, retries=retries, timeout=timeout, ssl_context=trusted
    )


def _missing(name: str, settings: StoreSettings) -> BlobError:
    return BlobMissing(
        f"{settings.endpoint} holds no {settings.bucket}/{name}: it was not written yet, or its writer used another "
        "[store]"
    )


def _status(error: Exception) -> int:
    """Return the HTTP status of an answer, or 0 if there was none."""
    return int(error.response.status) if isinstance(error, S3Error) else 0


def _is_absent(error: MinioException) -> bool:
    return error.is_absent if isinstance(error, S3ErrorResponse) else _status(error) == HTTPStatus.NOT_FOUND


def _what(error: Exception) -> str:
    """Describe an error in one line, without the request, from which a signature could be read."""
    if status := _status(error):
        return f"answered {status} {HTTPStatus(status).phrase}"
    return type(error).__name__ if isinstance(error, MinioException) else OBJECT.sub("", f"{error}")
