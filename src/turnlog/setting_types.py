"""Types of settings: bounds and choices stand in the declaration of each field and are checked by msgspec.

The same declaration supplies the wording of errors and of docs/settings.md. msgspec imports in 10 ms (pydantic in 200),
accepts plain frozen dataclasses, and its bounds reject NaN and infinities, too. Names that installed packages offer are
unknown to msgspec and are checked here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Amount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Partitions = Annotated[int, Meta(ge=1, le=100_000)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
"""Seconds, up to a year."""
Share = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""Decay rate of a running mean; 1 would never learn."""
Scale = Annotated[float, Meta(gt=0, le=1e6)]
Rate = Annotated[float, Meta(gt=0, le=10)]


LEAST_KEY = 16
"""Minimum characters of a key that signs or seals: a shorter one can be guessed, or was left by an interrupted write.
"""


@dataclass(frozen=True, slots=True)
class Signs:
    """Marks a secret that signs or seals: `Annotated[str, Signs()]`."""

    several: bool = False
    """True if the secret holds several keys, separated by white space."""

    def fault(self, text: str) -> str:
        """Return why the text is no such secret, or "" if it is one. The message never shows the secret."""
        keys = text.split() if self.several else [text.strip()]
        if all(len(key) >= LEAST_KEY for key in keys):
            return ""
        return f"has a key of fewer than {LEAST_KEY} characters: `openssl rand -hex 32` makes one"


class SettingsError(Exception):
    """A setting that cannot be used. The message names the key, where it was read, the legal values and the value
    found."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Marks a field whose names may also come from installed packages: `Annotated[str, Offered(...)]`, or a tuple of
    specifications `name:number:...`."""

    group: str
    """The entry point group."""
    built_in: tuple[str, ...]
    numbers: bool = False
    """True if a single name may be followed by numbers, too."""

    @property
    def names_text(self) -> str:
        """The legal names, as text."""
        return f"{', '.join(self.built_in)} (or what a package offers under the entry point group {self.group})"


def find_offered(hint: Any) -> Offered | None:
    """Return the Offered mark of a declaration, or None."""
    return next((note for note in notes(hint) if isinstance(note, Offered)), None)


def notes(hint: Any) -> tuple[Any, ...]:
    """Return the annotations of a declaration beside its type."""
    return tuple(hint.__metadata__) if get_origin(hint) is Annotated else ()


def legal(hint: Any) -> str:
    """Describe the legal values of a declaration for people."""
    plain = hint.__origin__ if get_origin(hint) is Annotated else hint
    if (own := find_offered(hint)) is not None:
        return f"names of {own.names_text}" if get_origin(plain) is tuple else f"one of {own.names_text}"
    if get_origin(plain) is Literal:
        return "one of " + ", ".join(str(choice) or '""' for choice in get_args(plain))
    if get_origin(plain) is tuple:
        inner = get_args(plain)[0]
        return "a list of strings" if inner is str else f"a list, each {legal(inner)}"
    if plain is bool:
        return "true or false"
    if plain is str:
        signs = any(isinstance(note, Signs) for note in notes(hint))
        return f"a string, keys of at least {LEAST_KEY} characters" if signs else "a string"
    return ("a whole number" if plain is int else "a number") + _range(hint)


def parsed_toml(text: str) -> dict[str, Any]:
    """Parse TOML into its tables. Raises SettingsError without the file's name, which the caller adds."""
    try:
        return tomllib.loads(text)
    # Lists in lists exhaust the parser's stack; a number of 5,000 digits is a ValueError that is no TOMLDecodeError.
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"not TOML: {error}") from error


def value_of(key: str, hint: Any, value: Any, source: str, *, bounded: bool = True, shown: bool = True) -> Any:
    """Convert `value` to its declared type. `source` is the file or the TURNLOG_ variable that it comes from.

    `bounded=False` checks only the type, for a value that an earlier release checked against its own bounds. Raises
    SettingsError; `shown=False` keeps a secret out of its message.
    """
    kind = hint if bounded else hint.__origin__ if get_origin(hint) is Annotated else hint
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise SettingsError(_refusal(key, hint, value, source, shown=shown)) from None
    if (own := find_offered(hint)) is not None:
        _check_offered(key, own, found, source)
    if not shown and isinstance(found, str) and found and (fault := secret_fault(hint, found)):
        raise SettingsError(f"{source}: {key} {fault}")
    return found


def secret_fault(hint: Any, text: str) -> str:
    """Return why a text is no secret for that declaration, or "" if it is one."""
    if not text.strip():
        return "is blank: set the secret, or omit it"
    return next((fault for note in notes(hint) if isinstance(note, Signs) and (fault := note.fault(text))), "")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `, did you mean X?` with the name nearest to a misspelt one, or "" if none is near."""
    from difflib import get_close_matches  # only a mistake needs it

    return next((f", did you mean {name}?" for name in get_close_matches(given, sorted(known), n=1)), "")


def is_service_link(text: str) -> bool:
    """Return True if a value comes from Kubernetes. For a Service `turnlog-gateway`, every pod of its namespace gets
    `TURNLOG_GATEWAY_PORT=tcp://10.0.0.1:8080` (the kubelet's service links, a relic of Docker's links)."""
    return text.startswith(("tcp://", "udp://", "sctp://"))


def from_text(hint: Any, text: str) -> Any:
    """Convert the text of an environment variable to its declared type, or return the text itself if it has no such
    value."""
    plain = hint.__origin__ if get_origin(hint) is Annotated else hint
    if get_origin(plain) is tuple:
        if not text.startswith("["):
            return [part for part in text.split(",") if part]
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    numbers = get_origin(plain) is Literal and isinstance(get_args(plain)[0], int)
    if numbers or plain in (bool, int, float):
        try:
            return msgspec.convert(text, int if numbers else plain, strict=False)
        except msgspec.ValidationError:
            return text
    return text


def _check_offered(key: str, own: Offered, found: str | tuple[str, ...], source: str) -> None:
    specs = (found,) if isinstance(found, str) else found
    names = [spec.partition(":")[0] if own.numbers or found is specs else spec for spec in specs]
    strange = [name for name in names if name not in own.built_in]
    if not strange:
        return
    from importlib.metadata import entry_points  # 30 ms that no built-in name needs

    there = sorted({point.name for point in entry_points(group=own.group)})
    for name in strange:
        if name not in there:
            among = ", ".join(dict.fromkeys((*own.built_in, *there)))
            raise SettingsError(
                f"{source}: {key} must be one of {among}, got {name!r} (or what a package offers under the entry point "
                f"group {own.group})"
            )


def _refusal(key: str, hint: Any, value: Any, source: str, *, shown: bool) -> str:
    return f"{source}: {key} must be {legal(hint)}, got {_seen(value) if shown else 'a value that is not shown'}"


def _seen(value: Any) -> str:
    """Return the repr of a value; Python refuses it for integers of more than 4,300 digits."""
    return "a number too long to show" if isinstance(value, int) and value.bit_length() > 4096 else repr(value)


def _range(hint: Any) -> str:
    """Return ` from 1 to 65535`, or "" for a number without bounds (no setting is one)."""
    for bound in notes(hint):
        if isinstance(bound, Meta):
            low = f" above {_number(bound.gt)}" if bound.gt is not None else f" from {_number(bound.ge)}"
            return low + (f" below {_number(bound.lt)}" if bound.lt is not None else f" to {_number(bound.le)}")
    return ""


def _number(bound: Any) -> str:
    """Format a bound, with powers of two as people write them."""
    for power in (31, 63):
        if bound == 2**power - 1:
            return f"2^{power} - 1"
    return str(bound)
