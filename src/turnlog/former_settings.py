"""Keys that were settings until 0.2. A settings file or the environment may hold them until 0.3.0, and a warning says
what became of them.

To remove a setting, delete its field, enter it here, and add it to `leaving` in tests/golden/names.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fixed:
    """A former setting whose value is a constant now; another value is ignored."""

    value: str
    """The constant, as text with its unit."""

    @property
    def fate(self) -> str:
        """Text for people about what became of the key."""
        return f"fixed at {self.value}"


@dataclass(frozen=True, slots=True)
class Longest:
    """Former seconds of silence that another key of the section covers now. The longest of all that are given applies,
    so that nothing is killed sooner than somebody allowed; 0 means for ever."""

    into: str
    """The key of the same section that covers it."""

    @property
    def fate(self) -> str:
        """Text for people about what became of the key."""
        return f"set {self.into}, which until then is raised to this value"


@dataclass(frozen=True, slots=True)
class Gone:
    """A former setting of something that no longer exists; its value is ignored."""

    instead: str
    """Remedy, as text."""

    @property
    def fate(self) -> str:
        """Text for people about what became of the key."""
        return self.instead


BY_DISK = (
    "engines read the folder of a version themselves, under the same path as the loader; to send weights from the "
    'training ranks to the engines, set [trainer] publish = "direct" (docs/engines.md)'
)
FORMER: Mapping[str, Fixed | Longest | Gone] = {
    "alerts.every_s": Fixed("15 s"),
    "archive.buffer_bytes": Fixed("256 MiB"),
    "archive.max_bytes": Fixed("32 MiB"),
    "archive.max_records": Fixed("100,000 records"),
    "assembler.max_records": Fixed("500 records"),
    "assembler.poll_ms": Fixed("20 ms"),
    "engine.autoscale_after_s": Fixed("15 s"),
    "gateway.keep_alive_s": Fixed("10 s"),
    "gateway.max_image_pixels": Fixed("32 x 2^20 pixels"),
    "gateway.request_s": Fixed("60 s"),
    "liveness.broker_s": Longest("servers_s"),
    "liveness.join_s": Fixed("600 s"),
    "liveness.rank_s": Longest("role_s"),
    "liveness.registry_s": Longest("servers_s"),
    "liveness.store_s": Longest("servers_s"),
    "loader.attempts": Fixed("3 attempts"),
    "loader.group_backend": Gone(BY_DISK),
    "loader.transport": Gone(BY_DISK),
    "registry.max_body_bytes": Fixed("1 MiB"),
    "sandbox.health_s": Fixed("10 s"),
    "sandbox.max_uses": Fixed("1000 calls"),
    "trainer.warm_start_rate": Fixed("0.003"),
}
"""Former setting -> what became of it."""


def keys_of(section: str) -> list[str]:
    """Return the former keys of a section."""
    return [key.partition(".")[2] for key in FORMER if key.partition(".")[0] == section]


def variable_of(key: str) -> str:
    """Return the environment variable of `section.key`, whether it is a setting or was one."""
    return f"TURNLOG_{key.replace('.', '_')}".upper()


def former_warnings(tables: Mapping[str, Any], env: Mapping[str, str], *, source: str) -> list[str]:
    """Return a warning for the file and one for the environment, if they still hold former settings."""
    parts = {key: key.split(".") for key in FORMER}
    found = {
        source: [key for key, (section, name) in parts.items() if name in tables.get(section, {})],
        "environment": [key for key in FORMER if variable_of(key) in env],
    }
    return [
        f"{place}: no longer settings since 0.2, and errors from 0.3.0 on; remove them: "
        + ", ".join(f"{key} ({FORMER[key].fate})" for key in keys)
        for place, keys in found.items()
        if keys
    ]
