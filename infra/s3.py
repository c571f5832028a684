"""Blobs in any S3 store, over minio-py (synchronous, so calls run in a bounded thread pool).

A blob's key is its hash, so that a repeated put is harmless and nothing rests on conditional puts.
aiobotocore was weighed: it pins botocore and brings ten packages for four calls.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.commonconfig import REPLACE, CopySource
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider
from minio.error import InvalidResponseError, MinioException, S3Error

from turnlog.infra.blobs import (
    BINARY,
    BlobError,
    BlobMissing,
    BucketMissing,
    Folders,
    Listed,
    Listing,
    Readable,
    StoreUnavailable,
    StoreUnreachable,
)
from turnlog.infra.roles.tls import trusting
from turnlog.infra.run_folder import present
from turnlog.schemas.types import BlobRef
from turnlog.settings import StoreSettings

THREADS = 8
RETRIES = 4
BACKOFF_S = 0.1
"""Waits between retries: 0, 0.2, 0.4, 0.8 s."""
PART_BYTES, PIECE_BYTES = 8 << 20, 1 << 20
"""Of a file: put at once, read at once."""
MOST_PARTS = 10_000
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:? ?")
"""What urllib3 says of a connection: another text each time, and of no use to anybody."""
SETTINGS = "check [store] endpoint, access_key, secret_key and bucket"

T = TypeVar("T")


class S3Blobs(Folders):
    """See Blobs. The bucket is made at the first call when it is missing."""

    def __init__(self, settings: StoreSettings, *, threads: int = THREADS, patient: bool = True) -> None:
        """Connects at the first call; not `patient`, it asks once and waits for seconds. Raises StoreUnavailable for an
        endpoint that is no address, TlsFileUnusable."""
        super().__init__()
        self._settings = settings
        self._http = _http(settings, threads, patient)
        self._client = client(settings, self._http)
        self._pool = ThreadPoolExecutor(threads, "s3")
        self._bucket_lock = threading.Lock()
        self._bucket_there = False

    async def put(self, content: bytes, *, media_type: str = BINARY) -> BlobRef:
        return await self._run(lambda: self._put(content, media_type))

    async def get(self, ref: BlobRef) -> bytes:
        return await self._run(lambda: self._get(ref))

    async def put_file(self, path: Path, *, sha256: str = "", media_type: str = BINARY) -> BlobRef:
        return await self._run(lambda: self._put_file(path, sha256, media_type))

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        await self._run(lambda: self._get_file(ref, path))

    async def put_named(self, name: str, content: bytes, *, media_type: str = BINARY) -> None:
        await self._run(lambda: self._write(name, content, media_type))

    async def get_named(self, name: str) -> bytes:
        return await self._run(lambda: self._read(name))

    async def put_named_file(self, name: str, path: Path) -> BlobRef:
        return await self._run(lambda: self._put_named_file(name, path))

    async def get_named_file(self, name: str, ref: BlobRef, path: Path) -> None:
        await self._run(lambda: self._get_named_file(name, ref, path))

    async def names(self, prefix: str) -> list[str]:
        return await self._run(lambda: self._names(prefix))

    async def date(self) -> str | None:
        """The store's clock, as HTTP writes it (RFC 9110, 6.6.1); None where its answers have none."""
        return await self._run(self._date)

    async def listed(self, prefix: str) -> Listing:
        return await self._run(lambda: self._listed(prefix))

    async def copy(self, name: str, to: str) -> None:
        await self._run(lambda: self._copy(name, to))

    async def remove(self, name: str) -> None:
        await self._run(lambda: self._client.remove_object(self._settings.bucket, name))

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
                if not self._settings.make_bucket:
                    raise BucketMissing(
                        f"{self._settings.endpoint} has no bucket {bucket}, and [store] make_bucket is false: make it, "
                        "or run `turnlog run configure` with the right to"
                    )
                try:
                    self._client.make_bucket(bucket, self._settings.region)
                except MinioException:
                    if not self._client.bucket_exists(bucket):  # else another process made it just now
                        raise
            self._bucket_there = True

    def _write(self, name: str, content: bytes, media_type: str) -> None:
        self._client.put_object(self._settings.bucket, name, io.BytesIO(content), len(content), content_type=media_type)

    def _write_file(self, name: str, file: Readable, size: int, media_type: str) -> None:
        """In parts, of which minio-py holds six while it sends three. S3 takes 10,000 of them."""
        part = max(PART_BYTES, -(-size // MOST_PARTS))
        bucket, source = self._settings.bucket, cast(BinaryIO, file)
        self._client.put_object(bucket, name, source, size, content_type=media_type, part_size=part)

    def _names(self, prefix: str) -> list[str]:
        found = self._client.list_objects(self._settings.bucket, prefix=prefix, recursive=True)
        return sorted(str(entry.object_name) for entry in found)

    def _date(self) -> str | None:
        return self._http.request("HEAD", self._settings.endpoint, retries=False).headers.get("date")

    def _now(self) -> float:
        """By the store's clock, in whole seconds and never ahead of it: any answer says it, a refusal too."""
        said = self._date()
        if said is None:
            raise StoreUnavailable(f"{self._settings.endpoint}: its answers have no Date, so ages cannot be told")
        return parsedate_to_datetime(said).timestamp()

    def _listed(self, prefix: str) -> Listing:
        now = self._now()
        found = self._client.list_objects(self._settings.bucket, prefix=prefix, recursive=True)
        ages = ((str(one.object_name), one.size or 0, one.last_modified) for one in found)
        return Listing(now, tuple(Listed(name, size, at.timestamp()) for name, size, at in ages if at is not None))

    def _copy(self, name: str, to: str) -> None:
        """With a time of its own, of the store's clock: rclone, alone among stores, would keep that of what is copied,
        and takes another by this convention."""
        metadata: dict[str, str | list[str] | tuple[str]] = {"mtime": f"{self._now():.0f}"}
        source = CopySource(self._settings.bucket, name)
        try:
            self._client.copy_object(self._settings.bucket, to, source, metadata=metadata, metadata_directive=REPLACE)
        except MinioException as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                raise _missing(name, self._settings) from None
            raise

    def _read(self, name: str) -> bytes:
        """An answer that breaks off, which urllib3 does not try again, is asked for once more: whoever owns the object
        may write it anew meanwhile."""
        try:
            return self._whole(name)
        except urllib3.exceptions.ProtocolError:
            return self._whole(name)

    def _whole(self, name: str) -> bytes:
        with self._pieces(name) as pieces:
            return b"".join(pieces)

    @contextmanager
    def _pieces(self, name: str) -> Iterator[Iterable[bytes]]:
        try:
            answer = self._client.get_object(self._settings.bucket, name)
        except MinioException as error:
            if _status(error) == HTTPStatus.NOT_FOUND:
                raise _missing(name, self._settings) from None
            raise
        try:
            yield answer.stream(PIECE_BYTES)
        finally:
            answer.close()
            answer.release_conn()


class _Present(Provider):
    """The keys as they are now: asked for each request, since files may change."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings

    def retrieve(self) -> Credentials:
        settings = self._settings
        keys = present(settings.access_key), present(settings.secret_key)
        return Credentials(*keys, present(settings.session_token) or None)


def client(settings: StoreSettings, http: urllib3.PoolManager | None = None) -> Minio:
    """Of minio-py, as the settings say. Raises StoreUnavailable."""
    address = urlsplit(settings.endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise StoreUnavailable(f"[store] endpoint must be http(s)://host:port, got {settings.endpoint!r}")
    if settings.credentials == "keys" and not settings.secret_key:
        raise StoreUnavailable(
            f"[store] secret_key is empty: set that of {settings.endpoint} (TURNLOG_STORE_SECRET_KEY); an embedded "
            "store's is in store/store.key of its run's directory"
        )
    made = Minio(
        address.netloc,
        credentials=_Present(settings) if settings.credentials == "keys" else _role(settings),
        secure=address.scheme == "https",
        region=settings.region,
        http_client=http,
    )
    if settings.address_style == "virtual":
        made.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    else:
        made.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    return made


def _role(settings: StoreSettings) -> Provider:
    """Keys of this machine's or pod's role, renewed before they expire. A store with a token service of its own says
    where that is as for any AWS client (AWS_ENDPOINT_URL_STS)."""
    identity = "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ
    return IamAwsProvider(
        region=settings.region, custom_endpoint=os.environ.get("AWS_ENDPOINT_URL_STS") if identity else None
    )


def _http(settings: StoreSettings, threads: int, patient: bool) -> urllib3.PoolManager:
    retries = urllib3.Retry(
        total=RETRIES if patient else 0,
        backoff_factor=BACKOFF_S,
        status_forcelist=(500, 502, 503, 504),
        allowed_methods=None,  # every call is idempotent
        raise_on_status=False,
    )
    timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S if patient else CONNECT_TIMEOUT_S)
    trusted = trusting(settings.endpoint, settings.ca_file, "store")
    return urllib3.PoolManager(maxsize=threads, retries=retries, timeout=timeout, ssl_context=trusted)


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
