"""Content fields of records: which they are, and how those of one event are encrypted and decrypted together.

A field is content if it holds what a session said, saw or computed; `types.content` marks it in its declaration. A run
with [erasure] writes these fields encrypted under a key of the session, and everything else in the clear, so that
folds, token accounting and indexes still work once the key is gone. What is encrypted has the schema of its record with
the attribute `turnlog.sealed`, so a reader knows from the schema id alone. References to blobs are not encrypted: blobs
of an erased session are deleted.

All content of an event is encrypted in one call, one field after the other in the order of the record. Each field gets
back as many bytes as it gave, and the first one also the head. What is authenticated with them names the record, the
fields with their lengths, and the event. So nobody can move content to another field or event, and a field that a later
release adds changes no older record, which does not have it. Content fields are never renamed, and their order never
changes.

This module knows no cipher: infra/session_keys.py has it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Protocol, Union, get_args, get_origin

from turnlog.schemas import MasterKeyMissing
from turnlog.schemas.avsc import field_types, stored_schema
from turnlog.schemas.binary import long
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import TOPIC_OF, Topic
from turnlog.schemas.types import CONTENT, BlobRef

SEALED: Final = "turnlog.sealed"
"""Attribute of the schema of records whose content fields are encrypted."""
CIPHER: Final = "AES-256-GCM, nonce by HMAC-SHA256"
"""Value of that attribute."""


HEAD_BYTES: Final = 44
"""Bytes by which encrypted content is longer: the id of the key, the nonce and the tag."""


class ContentCipher(Protocol):
    """Encrypts and decrypts all content of one event at once. `about` names what it belongs to; it is authenticated."""

    def encrypt(self, session_id: str, about: bytes, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Return the head [HEAD_BYTES] and the encrypted parts one after the other, perhaps with more bytes behind
        them; always the same for the same arguments. Raises UnknownSessionKey, SessionIsErased."""
        ...

    def decrypt(self, about: bytes, head: bytes, parts: Sequence[bytes]) -> bytes | None:
        """Return the parts one after the other, or None if their key was erased. Raises UnknownSessionKey,
        WrongMasterKey, UndecodableRecord."""
        ...

    def is_erased(self, session_id: str) -> bool:
        """Return whether the session is known to be erased."""
        ...


class HiddenContent:
    """See ContentCipher. For readers that need no content and have no key: all content reads as if it were erased."""

    def encrypt(self, session_id: str, about: bytes, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
        """See ContentCipher. Raises MasterKeyMissing: such a reader writes nothing."""
        raise MasterKeyMissing(f"the content of session {session_id} must be encrypted")

    def decrypt(self, about: bytes, head: bytes, parts: Sequence[bytes]) -> bytes | None:
        """See ContentCipher."""
        return None

    def is_erased(self, session_id: str) -> bool:
        """See ContentCipher."""
        return False


class ErasedBytes(bytes):
    """Stands for the bytes of a content field whose key was erased."""


class ErasedText(str):
    """Stands for the text of a content field whose key was erased."""


def is_erased(value: object) -> bool:
    """Return whether a field's value stands for erased content."""
    return isinstance(value, ErasedBytes | ErasedText)


def sealed_schema(name: str) -> dict[str, Any]:
    """Return the schema of a record whose content fields are encrypted."""
    return {**stored_schema(name), SEALED: CIPHER}


Found = tuple[int, str, bool]
"""A content field of an encoded event that is not empty: (index of its length among the parts, followed by its value;
name, with the names of the fields around it; whether it is a text)."""


@dataclass(frozen=True, slots=True)
class ContentField:
    """A content field, or a field that holds records with content fields."""

    name: str
    erased: bytes | None
    """Value that readers get once the session is erased; None stands for zeros of the same length."""
    is_text: bool
    inner: type | None = None
    """Record of which the field holds a list."""


@functools.cache
def content_fields(record: type) -> tuple[ContentField, ...]:
    """Return the content fields of a record, in their order."""
    found = []
    for field, kind in zip(dataclasses.fields(record), field_types(record).values(), strict=True):
        inner = get_args(kind)[0] if get_origin(kind) is tuple else None
        if CONTENT in field.metadata:
            found.append(ContentField(field.name, field.metadata[CONTENT], str in _arms(kind)))
        elif dataclasses.is_dataclass(inner) and isinstance(inner, type) and content_fields(inner):
            found.append(ContentField(field.name, None, False, inner))
    return tuple(found)


def _arms(kind: Any) -> set[Any]:
    arms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return {get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in arms} - {NoneType}


def seal(event: Any, parts: list[bytes], found: Sequence[Found], cipher: ContentCipher) -> None:
    """Encrypt the content fields among the `parts` of an encoded event, in place; `found` says where they are. Raises
    the errors of `ContentCipher.encrypt`."""
    contents = [parts[at + 1] for at, _, _ in found]
    sizes = [len(content) for content in contents]
    about = _about(event, [name for _, name, _ in found], sizes)
    head, sealed = cipher.encrypt(event.session_id, about, contents)
    start = 0
    for (at, _, is_text), size in zip(found, sizes, strict=True):
        piece = sealed[start : start + size]
        if not start:
            piece = head + piece
        if is_text:
            piece = base64.b64encode(piece)
        if not start or is_text:
            parts[at] = long(len(piece))
        parts[at + 1] = piece
        start += size


def unseal(event: Any, cipher: ContentCipher) -> None:
    """Put back the content fields of an event that has just been decoded and that nothing else refers to; content whose
    key was erased is ErasedBytes or ErasedText. Raises the errors of `ContentCipher.decrypt`, and ValueError for
    content that `seal` did not write."""
    places: list[tuple[Any, ContentField]] = []
    names: list[str] = []
    parts: list[bytes] = []
    _gather(event, "", places, names, parts)
    sizes = [len(part) for part in parts]
    content = None
    if parts:
        sizes[0] -= HEAD_BYTES
        if sizes[0] < 0:
            raise ValueError("content without a head")
        head, parts[0] = parts[0][:HEAD_BYTES], parts[0][HEAD_BYTES:]
        content = cipher.decrypt(_about(event, names, sizes), head, parts)
    if cipher.is_erased(event.session_id) or (parts and content is None):
        _erase(event, iter(sizes).__next__)
    elif content is not None:
        start = 0
        for (owner, field), size in zip(places, sizes, strict=True):
            piece = content[start : start + size]
            _put(owner, field.name, piece.decode() if field.is_text else piece)
            start += size


_put = object.__setattr__
"""Sets a field of a frozen record: a tenth of what a copy by `dataclasses.replace` takes."""


def _about(event: Any, names: Sequence[str], sizes: Sequence[int]) -> bytes:
    """Return what is authenticated with the content of an event."""
    return f"{event.__class__.__name__}({','.join(names)}){sizes}{event.event_id}".encode()


def _gather(
    value: Any, path: str, places: list[tuple[Any, ContentField]], names: list[str], parts: list[bytes]
) -> None:
    """Append the places, names and values of the encrypted fields of a record, in order: all that have content, but for
    references."""
    for field in content_fields(value.__class__):
        found = getattr(value, field.name)
        if field.inner is not None:
            for one in found:
                _gather(one, f"{path}{field.name}.", places, names, parts)
        elif found and found.__class__ is not BlobRef:
            places.append((value, field))
            names.append(path + field.name)
            parts.append(base64.b64decode(found, validate=True) if field.is_text else found)


def _erase(value: Any, next_size: Callable[[], int]) -> None:
    """Replace the content of a record of an erased session. Blobs that hold its content are deleted, too."""
    for field in content_fields(value.__class__):
        found = getattr(value, field.name)
        if field.inner is not None:
            for one in found:
                _erase(one, next_size)
        elif found:
            size = found.size if found.__class__ is BlobRef else next_size()
            _put(value, field.name, _erased_text(field) if field.is_text else _erased_bytes(field, size))


def _erased_text(field: ContentField) -> ErasedText:
    return ErasedText((field.erased or b"").decode())


def _erased_bytes(field: ContentField, length: int) -> ErasedBytes:
    return ErasedBytes(length) if field.erased is None else ErasedBytes(field.erased)


def holds_erased(event: Any) -> bool:
    """Return whether content of the event was erased."""
    return _any_content(event, is_erased)


def holds_content(event: Any) -> bool:
    """Return whether a content field of the event is not empty, references included."""
    return _any_content(event, bool)


def _any_content(event: Any, test: Callable[[Any], bool]) -> bool:
    return any(
        test(value) if field.inner is None else any(_any_content(one, test) for one in value)
        for field in content_fields(event.__class__)
        for value in (getattr(event, field.name),)
    )


def sealable(records: Mapping[str, type]) -> tuple[str, ...]:
    """Return the names of the records that have content fields and belong to a session."""
    return tuple(name for name, record in records.items() if content_fields(record))


WITH_CONTENT: Final[frozenset[Topic]] = frozenset(TOPIC_OF[name] for name in sealable(ALL))
"""Topics whose records have content. Readers of other topics need no keys, and have no right to read them."""
