"""Redaction as the settings ask for it: of requests, of outputs, and of every other event that holds text."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prometheus_client import Counter

from turnlog.infra.redaction.masking import Masker, count_placeholders
from turnlog.infra.redaction.scanner import Scanner
from turnlog.infra.run_folder import CREDENTIAL_KEY, DASHBOARD_KEY, GATEWAY_KEY, KAFKA_KEY, REGISTRY_KEY, STORE_KEY
from turnlog.redaction_settings import RedactionSettings
from turnlog.schemas.events import Event
from turnlog.secret_files import FileSecret
from turnlog.settings import Settings

KEY_FILES = (CREDENTIAL_KEY, DASHBOARD_KEY, GATEWAY_KEY, KAFKA_KEY, REGISTRY_KEY, STORE_KEY)
"""Files of the run's folder that hold secrets which the run made itself."""
LARGE = 1 << 16
"""Bytes from which on a payload is scanned in a thread."""
MASKED = Counter("turnlog_redacted", "Places masked in records, by record and kind", ("record", "kind"))


class TextField(NamedTuple):
    """A field of a record that holds text."""

    name: str
    form: Literal["json", "bytes", "text", "requests"]
    side: Literal["inputs", "outputs", "either"]
    """The setting that decides: inputs, outputs, or either, for text that quotes both."""
    scope: str
    """Scope of the numbers; {call_seq} stands for the field of that name."""


FIELDS: Mapping[str, tuple[TextField, ...]] = {
    "RolloutRequested": (TextField("task", "json", "inputs", "task"),),
    "RewardAssigned": (TextField("evidence", "json", "either", "verdict"),),
    "RewardFailed": (TextField("cause", "text", "either", "verdict"),),
    "SessionFinished": (TextField("reason", "text", "either", "finish"),),
    "ToolCallRequested": (TextField("arguments", "json", "outputs", "call{call_seq}"),),
    "ToolCallCompleted": (
        TextField("output", "bytes", "inputs", "result{call_seq}"),
        TextField("requests", "requests", "inputs", "request{call_seq}"),
    ),
    "RoleFailed": (TextField("cause", "text", "either", "role"),),
    "DeadLetter": (TextField("message", "text", "either", "role"),),
}
"""Fields of records that are masked as they are written. The gateway masks those of TurnCompleted itself, because
tokens depend on them. Other records hold no text, or text of the operator's only."""


class Redactor:
    """Masks by one set of rules."""

    def __init__(
        self, settings: RedactionSettings, secrets: Sequence[str] = (), key_files: Sequence[Path] = ()
    ) -> None:
        """Compile the rules. `secrets` are the run's own; those in `key_files` are read when their folder has
        changed, because roles create their keys after this."""
        self.inputs = settings.inputs
        self.outputs = settings.outputs
        self._secrets, self._key_files = tuple(secrets), tuple(key_files)
        self._keys: tuple[str, ...] = ()
        self._changed: tuple[int, ...] = ()
        self.scanner = Scanner(
            settings.kinds, own=settings.own, regions=settings.phone_regions, known=self._known_secrets
        )

    @classmethod
    def of(cls, settings: Settings) -> Redactor | None:
        """Return the redactor that the settings ask for, or None if redaction is off."""
        redaction = settings.redaction
        if redaction.inputs == redaction.outputs == "off":
            return None
        variables = [os.environ.get(name, "") for name in redaction.known_variables]
        directory = Path(settings.run.directory)
        return cls(redaction, [*secrets_of(settings), *variables], [directory / one for one in KEY_FILES])

    def masker(self, scope: str = "") -> Masker:
        """Return a masker for one text or conversation, which begins to number anew."""
        return Masker(self.scanner, scope)

    def event(self, event: Event) -> Event:
        """Return an event without the secrets in its texts; the same object if there are none. Payloads must be inline.
        TurnCompleted is returned as it is."""
        name = type(event).__name__
        changed: dict[str, Any] = {}
        for field in FIELDS.get(name, ()):
            value = getattr(event, field.name)
            if not self._applies(field.side) or not isinstance(value, bytes | str | tuple):
                continue
            scope = field.scope.format(call_seq=getattr(event, "call_seq", 0))
            masked = _mask_field(self.masker(scope), field.form, value)
            if masked is not value:
                changed[field.name] = masked
                count(
                    name, count_placeholders(*([one.url for one in masked] if field.form == "requests" else [masked]))
                )
        return dataclasses.replace(event, **changed) if changed else event

    async def redact(self, event: Event) -> Event:
        """Return what `event` returns; a large text is scanned in a thread."""
        sizes = [
            len(getattr(event, field.name)) for field in FIELDS.get(type(event).__name__, ()) if field.form != "text"
        ]
        if max(sizes, default=0) < LARGE:
            return self.event(event)
        return await asyncio.to_thread(self.event, event)

    def output(self, output: bytes, call_seq: int) -> bytes:
        """Return a tool's whole output as `event` would mask it, before it is cut."""
        if self.inputs == "off":
            return output
        return self.masker(f"result{call_seq}").content(output)

    def _known_secrets(self) -> tuple[str, ...]:
        folders = {path.parent for path in self._key_files}
        changed = tuple([one.stat().st_mtime_ns for one in folders if one.exists()])
        if changed != self._changed:
            found = [path.read_text().strip() for path in self._key_files if path.exists()]
            self._keys, self._changed = tuple(found), changed
        return (*[one.text if isinstance(one, FileSecret) else one for one in self._secrets], *self._keys)

    def _applies(self, side: str) -> bool:
        inputs, outputs = self.inputs != "off", self.outputs != "off"
        return inputs if side == "inputs" else outputs if side == "outputs" else inputs or outputs


def _mask_field(masker: Masker, form: str, value: Any) -> Any:
    if form == "requests":
        masked = tuple([dataclasses.replace(one, url=masker.text(one.url)) for one in value])
        return value if masked == value else masked
    if form == "json":
        return masker.json(value)
    return masker.content(value) if form == "bytes" else masker.text(value)


def count(record: str, counts: Mapping[str, int]) -> None:
    """Count masked places in the metrics."""
    for kind, number in counts.items():
        MASKED.labels(record, kind).inc(number)


NAMES = frozenset({"username", "oauth_client_id"})
"""Keys of settings that are not shown and name somebody, which is no secret."""


def secrets_of(settings: Settings) -> Iterator[str]:
    """Yield the values of the settings that are secrets, but for their defaults, which are none."""
    for section in dataclasses.fields(settings):
        value = getattr(settings, section.name)
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            if not field.repr and isinstance(found, str) and found != field.default and field.name not in NAMES:
                yield found
