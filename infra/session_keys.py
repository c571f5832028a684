"""Keys of sessions: envelope encryption of the content of records, so that one session can be erased for good.

Each session has a random key, which encrypts its content fields (schemas/content.py). The key itself stands on the
compacted topic `session-keys`, encrypted under the run's master key. It is acknowledged before the first record that
uses it. Whoever drops it makes all content of the session unreadable: on topics, in the archive, and in copies of both.

Content is encrypted by AES-256-GCM. Its nonce is the beginning of a pseudorandom function of the content and of what is
authenticated with it: HMAC-SHA256 of their GHASH, each under a key of its own. AES-GCM-SIV makes its nonces in the same
way (RFC 8452: POLYVAL, then AES). So the same event always gives the same bytes: replay can compare bytes, and a record
that is written twice is a duplicate. That is safe for the same reason as a synthetic IV (Rogaway and Shrimpton,
"Deterministic Authenticated-Encryption", 2006): two contents of n blocks have the same hash with a probability of
n / 2**128, so different contents have nonces as if drawn at random, of which AES-GCM allows 2**32 a key (NIST SP
800-38D, 8.2.2 and 8.3), and equal bytes reveal only that everything is equal. Record, fields, lengths and event id are
authenticated, so equal texts in two events give different bytes, and encrypted content cannot be moved. Readers verify
the tag of AES-GCM and need no nonce key.

    head = key_id [16] | nonce [12] | tag [16]
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

from turnlog.infra.log import Log, Partition, Reader, Record
from turnlog.infra.run_folder import present
from turnlog.schemas import (
    SessionIsErased,
    SessionKeyLost,
    UndecodableRecord,
    UnknownSessionKey,
    WrongMasterKey,
)
from turnlog.schemas.events import Event, SessionKeyCreated, SessionKeyErased
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import SESSION_KEYS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

log = logging.getLogger(__name__)
PLACE = Partition(SESSION_KEYS.name, 0)
KEY_BYTES, MASTER_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 96, 64, 16, 12, 16
"""A key has 32 bytes for AES-256-GCM, 32 for the hash of what is encrypted, and 32 for HMAC-SHA256."""
PURPOSE, NAME = b"turnlog master key of sessions", b"turnlog name of a master key"
CIPHERS = 4096
"""Number of keys whose ciphers are kept ready."""
REFRESH_S = 10.0
"""Maximum seconds for which a process that decodes by `EventLog.decode`, or writes by `EventLog.submit`, does not
notice that a session was erased."""


class KeyLog(Protocol):
    """The part of an EventLog with which keys are read and written."""

    @property
    def log(self) -> Log:
        """The log itself."""
        ...

    async def append(self, event: Event) -> tuple[int, int]:
        """See EventLog."""
        ...

    async def decode_known(self, record: Record) -> Event | None:
        """See EventLog."""
        ...


class MasterKeys:
    """[erasure] master_keys: the first key wraps the keys of sessions, all of them unwrap. The secret is read anew when
    its file changes."""

    def __init__(self, configured: str) -> None:
        """Raises ValueError if `configured` holds no key."""
        self._configured = configured
        self._text = ""
        self._keys: dict[str, AESSIV] = {}
        if not self._ciphers():
            raise ValueError("no master key")

    def wrap(self, key: bytes, about: bytes) -> tuple[str, bytes]:
        """Return (name of the master key, the wrapped key)."""
        name, cipher = next(iter(self._ciphers().items()))
        return name, cipher.encrypt(key, [about])

    def unwrap(self, name: str, wrapped: bytes, about: bytes) -> bytes:
        """Return a key. Raises WrongMasterKey if this process does not have the master key, or if the record was
        altered."""
        self.check(name)
        try:
            return self._ciphers()[name].decrypt(wrapped, [about])
        except _invalid_tag():
            raise WrongMasterKey(
                f"a session's key does not unwrap under master key {name}: its record on {SESSION_KEYS.name} was "
                "altered; restore the topic from a backup"
            ) from None

    def check(self, name: str) -> None:
        """Raise WrongMasterKey if this process does not have a master key."""
        if name not in self._ciphers():
            raise WrongMasterKey(
                f"a session's key is wrapped under master key {name}, and [erasure] master_keys holds "
                f"{', '.join(self._ciphers())}: use the file of the run's other roles, with its former keys"
            )

    @property
    def current(self) -> str:
        """Name of the key that wraps."""
        return next(iter(self._ciphers()))

    def _ciphers(self) -> dict[str, AESSIV]:
        text = present(self._configured)
        if text != self._text:
            # imported here: the import takes longer than everything that most processes do with it
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV
            from cryptography.hazmat.primitives.hashes import SHA512
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF

            def derive(key: str, purpose: bytes, length: int) -> bytes:
                return HKDF(SHA512(), length=length, salt=None, info=purpose).derive(key.encode())

            self._keys = {
                derive(key, NAME, 8).hex(): AESSIV(derive(key, PURPOSE, MASTER_BYTES)) for key in text.split()
            }
            self._text = text
        return self._keys


class KeyCipher:
    """Encrypts and decrypts under one key."""

    def __init__(self, key: bytes) -> None:
        # imported here: the import takes longer than everything that most processes do with it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._gcm: AESGCM = AESGCM(key[:32])
        self._hash: AESGCM = AESGCM(key[32:64])
        self._hmac_key = key[64:]

    def encrypt(self, about: bytes, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Return (nonce and tag, the encrypted parts and the tag once more)."""
        before = len(about).to_bytes(4, "big") + about
        message = b"".join((before, *parts))
        # GMAC under one nonce for all messages is no authentication code, but a universal hash, and nobody sees it.
        hashed = self._hash.encrypt(bytes(NONCE_BYTES), b"", message)
        nonce = hmac.digest(self._hmac_key, hashed, "sha256")[:NONCE_BYTES]
        sealed = self._gcm.encrypt(nonce, memoryview(message)[len(before) :], about)
        return nonce + sealed[-TAG_BYTES:], sealed

    def decrypt(self, about: bytes, head: bytes, parts: Sequence[bytes]) -> bytes:
        """Return the parts one after the other. Raises InvalidTag of cryptography."""
        return self._gcm.decrypt(head[:NONCE_BYTES], b"".join((*parts, head[NONCE_BYTES:])), about)


class SessionKeys:
    """See ContentCipher. The keys of all sessions of the run, as the topic had them at the last `refresh`.

    Writers, erasers and those who wrap keys again are different processes, and nothing locks the topic. So each of them
    reads the topic up to its own record before it goes on: of two records, the writer of the later one sees the
    other's. A writer that finds its new key to be of an erased session has encrypted nothing under it yet.
    """

    def __init__(self, master: MasterKeys, run_id: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._master = master
        self._clock = clock
        self._run_id = run_id
        self._keys: dict[bytes, SessionKeyCreated | SessionKeyErased] = {}
        """Key id -> its last record."""
        self._ids: dict[str, tuple[bytes, ...]] = {}
        """Session -> ids of its keys, and of its mark if it was erased. The first one is the key to write under."""
        self._origins: dict[str, str] = {}
        """Session of a requeued call or of a verdict -> session that made the call or is judged."""
        self._erased: set[str] = set()
        self._erased_view: frozenset[str] = frozenset()
        self._newest = ""
        """Name of the master key that wraps the newest key."""
        self._ciphers: OrderedDict[bytes, KeyCipher] = OrderedDict()
        self._events: KeyLog | None = None
        self._reader: Reader | None = None
        self._stack = AsyncExitStack()
        self._next = 0
        self._read_at = -math.inf
        self._lock = asyncio.Lock()

    def attach(self, events: KeyLog) -> None:
        """Read and write keys through `events`."""
        self._events = events

    @property
    def source(self) -> KeyLog:
        """The log from which keys are read: that of the cluster, also if the records are those of an archive."""
        return self._log_of_keys()

    async def close(self) -> None:
        """Release the reader."""
        self._reader = None
        await self._stack.aclose()

    @property
    def is_due(self) -> bool:
        """Whether the topic was last read more than REFRESH_S ago."""
        return self._clock() - self._read_at > REFRESH_S

    async def refresh(self) -> None:
        """Read the topic up to its current end. Raises LogUnavailable, TopicMissing, RegistryUnavailable."""
        async with self._lock:
            await self._read()

    async def refresh_due(self) -> None:
        """Read the topic if nobody has done so for REFRESH_S. Raises as `refresh`."""
        if self.is_due:
            async with self._lock:
                if self.is_due:  # others have waited for the lock as well
                    await self._read()

    async def prepare(self, session_id: str, *, origin: str = "") -> None:
        """Ensure that `encrypt` has an acknowledged key for the session. A new key is erased together with those of
        session `origin`. Raises SessionIsErased, WrongMasterKey, LogUnavailable, RegistryUnavailable."""
        if session_id not in self._ids:
            async with self._lock:
                if session_id not in self._ids:
                    await self._read()
                if session_id not in self._ids and origin not in self._erased:
                    await self._create(session_id, self._origins.get(origin, origin))
        if session_id in self._erased or origin in self._erased:
            raise _refusal(session_id)

    def encrypt(self, session_id: str, about: bytes, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
        """See ContentCipher."""
        if session_id in self._erased:
            raise _refusal(session_id)
        ids = self._ids.get(session_id)
        if ids is None:
            raise UnknownSessionKey(f"no key is held for session {session_id}: prepare it first")
        key_id = ids[0]
        head, sealed = (self._ciphers.get(key_id) or self._cipher(key_id)).encrypt(about, parts)
        return key_id + head, sealed

    def decrypt(self, about: bytes, head: bytes, parts: Sequence[bytes]) -> bytes | None:
        """See ContentCipher. Raises UndecodableRecord if the content was altered or moved here from another event."""
        key_id = head[:ID_BYTES]
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            key = self._keys.get(key_id)
            if key is not None and key.session_id in self._erased:
                return None
            cipher = self._cipher(key_id)
        try:
            return cipher.decrypt(about, head[ID_BYTES:], parts)
        except _invalid_tag():
            raise UndecodableRecord(
                f"{about.decode()} does not decrypt under key {key_id.hex()}: it was altered, or is of another event"
            ) from None

    def is_erased(self, session_id: str) -> bool:
        """See ContentCipher."""
        return session_id in self._erased

    def sessions_of(self, session_id: str) -> list[str]:
        """Return the session, and those whose keys are erased together with its own: sessions of calls that were
        requeued, and of verdicts."""
        return [session_id, *(session for session, origin in self._origins.items() if origin == session_id)]

    def keys_of(self, session_id: str) -> list[str]:
        """Return the ids of the keys, of all `sessions_of` the session, that still stand on the topic."""
        found = (self._keys[key_id] for one in self.sessions_of(session_id) for key_id in self._ids.get(one, ()))
        return [key.key_id for key in found if isinstance(key, SessionKeyCreated)]

    @property
    def erased(self) -> frozenset[str]:
        """Sessions that were erased, as of the last `refresh`."""
        if len(self._erased_view) != len(self._erased):
            self._erased_view = frozenset(self._erased)
        return self._erased_view

    async def erase(self, session_id: str, by: str) -> list[str]:
        """Replace every key of all `sessions_of` the session on the topic, wait for the acknowledgements and return the
        ids of the keys. May be repeated; writes again what is erased already, which lets the broker compact the topic.
        Raises LogUnavailable, RegistryUnavailable."""
        async with self._lock:
            await self._read()
            done: dict[bytes, None] = {}
            while left := [pair for pair in self._to_erase(session_id) if pair[0] not in done]:
                for key_id, session in left:
                    await self._append_erased(key_id, session, by)
                    done[key_id] = None
        marks = set(map(_mark, self.sessions_of(session_id)))
        return [key_id.hex() for key_id in done if key_id not in marks]

    def _to_erase(self, session_id: str) -> list[tuple[bytes, str]]:
        """Return (key id, session) of every record that erases the session. The marks come first: a writer that creates
        a key from then on sees one."""
        sessions = self.sessions_of(session_id)
        keys = [(key_id, session) for session in sessions for key_id in self._ids.get(session, ())]
        return [*((_mark(session), session) for session in sessions), *keys]

    async def _append_erased(self, key_id: bytes, session_id: str, by: str) -> None:
        erased = SessionKeyErased(
            event_id=digest("SessionKeyErased", key_id.hex()), run_id=self._run_id, key_id=key_id.hex(),
            session_id=session_id, by=by, origin=self._origins.get(session_id, ""),
        )  # fmt: skip
        _, offset = await self._log_of_keys().append(erased)
        await self._read_to(offset + 1)

    async def rewrap(self) -> int:
        """Wrap every key that another master key wraps under the first of [erasure] master_keys, and return their
        number. Repeat it after an interruption. Raises WrongMasterKey, LogUnavailable, RegistryUnavailable."""
        count = end = 0
        async with self._lock:
            await self._read()
            for key in [key for key in self._keys.values() if isinstance(key, SessionKeyCreated)]:
                if key.master_id != self._master.current and key.session_id not in self._erased:
                    about = _about(key.run_id, key.session_id, key.key_id)
                    content = self._master.unwrap(key.master_id, key.wrapped, about)
                    end = await self._append_key(bytes.fromhex(key.key_id), key.session_id, content, key.origin)
                    count += 1
            await self._read_to(end)
            # Compaction keeps the last record of a key: one that was erased just before it was wrapped again (here, or
            # in an attempt that was interrupted) would come back.
            for key in [key for key in self._keys.values() if isinstance(key, SessionKeyCreated)]:
                if key.session_id in self._erased:
                    await self._append_erased(bytes.fromhex(key.key_id), key.session_id, self._eraser(key.session_id))
        return count

    def _eraser(self, session_id: str) -> str:
        """Return who erased a session."""
        marks = (self._keys.get(_mark(one)) for one in (session_id, self._origins.get(session_id, "")))
        return next((mark.by for mark in marks if isinstance(mark, SessionKeyErased)), "")

    def _log_of_keys(self) -> KeyLog:
        assert self._events is not None, "attach an event log first"
        return self._events

    async def _create(self, session_id: str, origin: str) -> None:
        """Create a key; if the session was erased meanwhile, erase the key at once. Raises WrongMasterKey."""
        if self._newest:  # a key that the others cannot unwrap would stop all of them
            self._master.check(self._newest)
        key_id = os.urandom(ID_BYTES)
        await self._read_to(await self._append_key(key_id, session_id, os.urandom(KEY_BYTES), origin))
        if session_id in self._erased:
            await self._append_erased(key_id, session_id, self._eraser(session_id))

    async def _append_key(self, key_id: bytes, session_id: str, key: bytes, origin: str) -> int:
        """Write a key, and return the offset behind it. Nothing is encrypted under a new key until it was read."""
        master_id, wrapped = self._master.wrap(key, _about(self._run_id, session_id, key_id.hex()))
        _, offset = await self._log_of_keys().append(
            SessionKeyCreated(
                event_id=digest("SessionKeyCreated", key_id.hex(), master_id), run_id=self._run_id,
                key_id=key_id.hex(), session_id=session_id, wrapped=wrapped, master_id=master_id, origin=origin,
            )
        )  # fmt: skip
        return offset + 1

    async def _read(self) -> None:
        ends = await self._log_of_keys().log.end_offsets([PLACE])
        await self._read_to(ends[PLACE])
        self._read_at = self._clock()

    async def _read_to(self, end: int) -> None:
        if end <= self._next:
            return
        events, reader = self._log_of_keys(), self._reader
        if reader is None:
            self._next = (await events.log.start_offsets([PLACE]))[PLACE]
            reader = await self._stack.enter_async_context(events.log.reader())
            reader.assign({PLACE: self._next})
            self._reader = reader
        try:
            while self._next < end:  # compaction never removes the last record
                for record in await reader.poll():
                    self._note(await events.decode_known(record))
                    self._next = record.offset + 1
        except BaseException:
            reader.assign({PLACE: self._next})  # the rest of what was polled is delivered again
            raise

    def _note(self, event: object) -> None:
        if not isinstance(event, SessionKeyCreated | SessionKeyErased) or event.run_id != self._run_id:
            return
        key_id, session = bytes.fromhex(event.key_id), event.session_id
        if key_id not in self._keys:
            self._ids[session] = (*self._ids.get(session, ()), key_id)
        self._keys[key_id] = event
        if event.origin:
            self._origins[session] = event.origin
        if isinstance(event, SessionKeyCreated):
            self._newest = event.master_id
            if event.origin in self._erased:
                self._forget(session)
        else:
            for one in self.sessions_of(session):
                self._forget(one)

    def _forget(self, session_id: str) -> None:
        """Note that a session was erased: for good, whatever a writer that did not know of it wrote later."""
        self._erased.add(session_id)
        for key_id in self._ids.get(session_id, ()):
            self._ciphers.pop(key_id, None)

    def _cipher(self, key_id: bytes) -> KeyCipher:
        """Return the cipher of a key that is not among those kept ready."""
        key = self._keys.get(key_id)
        if not isinstance(key, SessionKeyCreated):
            raise UnknownSessionKey(f"key {key_id.hex()} is not held: read {SESSION_KEYS.name} and decode again")
        content = self._master.unwrap(key.master_id, key.wrapped, _about(key.run_id, key.session_id, key.key_id))
        self._ciphers[key_id] = cipher = KeyCipher(content)
        if key.session_id in self._erased:  # batch files are read in threads of their own
            self._ciphers.pop(key_id, None)
        if len(self._ciphers) > CIPHERS:
            self._ciphers.popitem(last=False)
        return cipher


def _mark(session_id: str) -> bytes:
    """Return the id, of no key, under which the topic says that a session was erased: also one that has no key yet."""
    return bytes.fromhex(digest("SessionKeyErased", "session", session_id))


def _refusal(session_id: str) -> SessionIsErased:
    return SessionIsErased(f"session {session_id} was erased: nothing is written for it any more")


@functools.cache
def _invalid_tag() -> type[Exception]:
    """Return the exception of a failed decryption, imported when it is first needed."""
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def _about(run_id: str, session_id: str, key_id: str) -> bytes:
    """Return what is authenticated with a wrapped key: it cannot be moved to another session."""
    return f"{run_id}\n{session_id}\n{key_id}".encode()


def key_lost(unknown: UnknownSessionKey) -> SessionKeyLost:
    """Return the error for a key that the topic does not have although it was read to its end."""
    return SessionKeyLost(
        f"{unknown}: topic {SESSION_KEYS.name} does not have it, and no record says that it was erased; restore the "
        "topic from a backup"
    )
