"""Records of topic session-keys: the keys that encrypt the content of sessions (docs/erasure.md).

The topic is compacted by `key_id`: once a key is erased, the broker removes the record that held it. It is never
archived.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeyCreated(RunEvent):
    """A key that encrypts content of one session. A session may have several, if several writers began at once."""

    key_id: str
    """Random id of the key, 32 hex digits; encrypted content names it."""
    session_id: str
    """Session whose content the key encrypts."""
    wrapped: bytes
    """The key, encrypted under the master key (AES-256-SIV)."""
    master_id: str
    """Name of the master key: the first 16 hex digits of a hash of it."""
    origin: str = ""
    """Session whose erasure erases this key as well. A call that is requeued, and one that judges a session, run in a
    session of their own; its origin is the session that made the call, or that is judged. Empty for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeyErased(RunEvent):
    """The key is gone for good, and with it all content that it encrypted. Every erased session also has such a record
    under an id of no key, which stops writers that have no key for it yet."""

    key_id: str
    """Id of the key, or an id that is derived from the session's."""
    session_id: str
    """Session that was erased."""
    by: str
    """Who erased it, in the operator's words."""
    origin: str = ""
    """As in SessionKeyCreated."""
