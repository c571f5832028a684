"""Blobs in any S3 store, over minio-py (synchronous, so calls run in a bounded thread pool).

A blob's key is its hash, so that a repeated put is harmless and nothing rests on conditional puts or user metadata.
aiobotocore was weighed: it pins botocore and brings ten packages for four calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.credentials.credentials import Credentials
from minio.credentials.providers import Provider
from minio.error import InvalidResponseError, MinioException, S3Error

from turnlog.infra.blobs import BlobCorrupt, BlobError, BlobMissing, StoreUnavailable, StoreUnreachable
from turnlog.infra.run_folder import present
from turnlog.schemas.types import BlobRef
from turnlog.settings import StoreSettings

THREADS = 8
RETRIES = 4
BACKOFF_S = 0.1
"""Waits between retries: 0, 0.2, 0.4, 0.8 s."""
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:? ?")
"""What urllib3 says of a connection: another text each time, and of no use to anybody."""
SETTINGS = "check [store] endpoint, access_key, secret_key and bucket"

T = TypeVar("T")


def key(sha256: str) -> str:
    """The object's key: the first two hex digits spread objects over folders."""
    return f"blobs/{sha256[:2]}/{sha256}"


class S3Blobs:
    """See Blobs. The bucket is made at the first call when it is missing."""

    def __init__(self, settings: StoreSettings, *, threads: int = THREADS, patient: bool = True) -> None:
        """Connects at the first call; not `patient`, it asks once and waits for seconds. Raises StoreUnavailable for an
        endpoint that is no address."""
        self._settings = settings
        self._http = _http(threads, patient)
        self._client = _client(settings, self._http)
        self._pool = ThreadPoolExecutor(threads, "s3")
        self._bucket_lock = threading.Lock()
        self._bucket_there = False

    async def put(self, content: bytes, *, media_type: str = "application/octet-stream") -> BlobRef:
        return await self._run(lambda: self._put(content, media_type))

    async def get(self, ref: BlobRef) -> bytes:
        return await self._run(lambda: self._get(ref))

    async def put_named(self, name: str, content: bytes, *, media_type: str = "application/octet-stream") -> None:
        await self._run(lambda: self._write(name, content, media_type))

    async def get_named(self, name: str) -> bytes:
        return await self._run(lambda: self._read(name))

    async def names(self, prefix: str) -> list[str]:
        return await self._run(lambda: self._names(prefix))

    async def close(self) -> None:
        """See Blobs; waits for calls under way."""
        await asyncio.to_thread(self._pool.shutdown)
        self._http.clear()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._translated, call)

    def _translated(self, call: Callable[[], T]) -> T:
        """Run `call` with the bucket there. MinioException covers what the store said, HTTPError the transport."""
        try:
            self._ensure_bucket()
            return call()
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            kind = StoreUnreachable if _is_silence(error) else StoreUnavailable
            raise kind(f"{self._settings.endpoint}: {_what(error)}; {SETTINGS}") from error

    def _ensure_bucket(self) -> None:
        with self._bucket_lock:
            if self._bucket_there:
                return
            bucket = self._settings.bucket
            if not self._client.bucket_exists(bucket):
                try:
                    self._client.make_bucket(bucket, self._settings.region)
                except MinioException:
                    if not self._client.bucket_exists(bucket):  # else another process made it just now
                        raise
            self._bucket_there = True

    def _put(self, content: bytes, media_type: str) -> BlobRef:
        sha256 = hashlib.sha256(content).hexdigest()
        self._write(key(sha256), content, media_type)
        return BlobRef(sha256, len(content), media_type)

    def _write(self, name: str, content: bytes, media_type: str) -> None:
        self._client.put_object(self._settings.bucket, name, io.BytesIO(content), len(content), content_type=media_type)

    def _names(self, prefix: str) -> list[str]:
        found = self._client.list_objects(self._settings.bucket, prefix=prefix, recursive=True)
        return sorted(str(entry.object_name) for entry in found)

    def _read(self, name: str) -> bytes:
        try:
            answer = self._client.get_object(self._settings.bucket, name)
        except MinioException as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                raise _missing(name, self._settings) from None
            raise
        try:
            return bytes(answer.read())
        finally:
            answer.close()
            answer.release_conn()

    def _get(self, ref: BlobRef) -> bytes:
        content = self._read(key(ref.sha256))
        if len(content) != ref.size or hashlib.sha256(content).hexdigest() != ref.sha256:
            raise BlobCorrupt(
                f"{self._settings.bucket}/{key(ref.sha256)}: {len(content)} bytes do not hash to their name "
                f"(expected {ref.size}); restore the object from a copy, or remove it and let its writer put it again"
            )
        return content


class _Present(Provider):
    """The keys as they are now: asked for each request, since files may change."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings

    def retrieve(self) -> Credentials:
        return Credentials(present(self._settings.access_key), present(self._settings.secret_key))


def _client(settings: StoreSettings, http: urllib3.PoolManager) -> Minio:
    address = urlsplit(settings.endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise StoreUnavailable(f"[store] endpoint must be http(s)://host:port, got {settings.endpoint!r}")
    if not settings.secret_key:
        raise StoreUnavailable(
            f"[store] secret_key is empty: set that of {settings.endpoint} (TURNLOG_STORE_SECRET_KEY); an embedded "
            "store's is in store/store.key of its run's directory"
        )
    return Minio(
        address.netloc,
        credentials=_Present(settings),
        secure=address.scheme == "https",
        region=settings.region,
        http_client=http,
    )


def _http(threads: int, patient: bool) -> urllib3.PoolManager:
    retries = urllib3.Retry(
        total=RETRIES if patient else 0,
        backoff_factor=BACKOFF_S,
        status_forcelist=(500, 502, 503, 504),
        allowed_methods=None,  # every call is idempotent
        raise_on_status=False,
    )
    timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S if patient else CONNECT_TIMEOUT_S)
    return urllib3.PoolManager(maxsize=threads, retries=retries, timeout=timeout)


def _missing(name: str, settings: StoreSettings) -> BlobError:
    return BlobMissing(
        f"{settings.endpoint} holds no {settings.bucket}/{name}: it was not written yet, or [store] names "
        "another store than its writer used"
    )


def _status(error: MinioException) -> int:
    """HTTP status of an answer. rclone's errors are not parsed by minio-py, which keeps their status to itself."""
    if isinstance(error, S3Error):
        return int(error.response.status)
    if isinstance(error, InvalidResponseError):
        return int(error._code)
    return 0


def _is_silence(error: Exception) -> bool:
    """No answer at all, or a 5xx."""
    status = _status(error) if isinstance(error, MinioException) else 0
    return status == 0 or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _what(error: Exception) -> str:
    """One line about an error, without the request that a signature could be read from."""
    if isinstance(error, MinioException) and _status(error):
        status = HTTPStatus(_status(error))
        return f"answered {status.value} {status.phrase}"
    return type(error).__name__ if isinstance(error, MinioException) else OBJECT.sub("", f"{error}")
