"""The file task.toml of Harbor's task format: parsed and checked.

A key that the format does not have is reported by `unknown_keys`: Harbor ignores such keys, so a source warns of them,
and refuses them if `strict=yes`. Keys below [metadata] are free.

BadTaskFolder  names the folder, the key, what is wrong with it, and the remedy
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import tomllib
import types
import typing
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

import msgspec

from turnlog.plugins.harbor.tables import (
    MAIN,
    AgentTable,
    Artifact,
    EnvironmentTable,
    Healthcheck,
    McpServerTable,
    NetworkMode,
    StepTable,
    TaskTable,
    VerifierTable,
)

NEWEST_SCHEMA: Final = (1, 4)
SERVICE: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PACKAGE: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
SIZES: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
"""Factors to MiB of the units in the older keys `memory` and `storage`."""


Table = TypeVar("Table", AgentTable, VerifierTable)


class BadTaskFolder(Exception):
    """See the module's docstring."""


def parse_task_table(text: str, where: str) -> TaskTable:
    """Parse and check the text of a task.toml; `where` is its path, for messages. Raises BadTaskFolder."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadTaskFolder(f"{where} is no TOML: {error}") from error
    if "version" in data:
        data.setdefault("schema_version", data.pop("version"))
    try:
        table = msgspec.convert(_current_keys(data), TaskTable, strict=False)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at ")
        raise BadTaskFolder(f"{where}: {_key(place)}: {said}") from error
    return _Checks(where).task(table)


def unknown_keys(text: str) -> list[str]:
    """Return the keys of a task.toml that can be parsed which the format does not have, as dotted names."""
    data = tomllib.loads(text)
    data.pop("version", None)
    return sorted(set(_unknown(data, TaskTable, "")))


def _unknown(data: Mapping[str, Any], kind: type[Any], above: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            yield f"{above}{key}"
            continue
        inner = next((one for one in _classes(hints[key]) if dataclasses.is_dataclass(one)), None)
        for one in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(one, Mapping):
                yield from _unknown(one, inner, f"{above}{key}.")


def _classes(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (list, typing.Union):
        for inner in typing.get_args(hint):
            yield from _classes(inner)
    elif isinstance(hint, type):
        yield hint


def _key(place: str) -> str:
    """Return the dotted name of a key from msgspec's path, such as `$.agent.timeout_sec`."""
    return place.strip("`").removeprefix("$").lstrip(".") or "the file"


def _current_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with values that Harbor accepts in other forms as those that it means."""

    def environment(table: Any) -> Any:
        if isinstance(table, dict):
            if isinstance(table.get("os"), str):
                table["os"] = table["os"].lower()
            for server in table.get("mcp_servers") or ():
                if isinstance(server, dict) and server.get("transport") == "http":
                    server["transport"] = "streamable-http"
        return table

    environment(data.get("environment"))
    steps = data.get("steps")
    for one in (data, *(steps if isinstance(steps, list) else ())):
        verifier = one.get("verifier") if isinstance(one, dict) else None
        if isinstance(verifier, dict):
            environment(verifier.get("environment"))
    return data


class _Checks:
    """The rules beyond types, for one file."""

    def __init__(self, where: str) -> None:
        self._where = where

    def task(self, table: TaskTable) -> TaskTable:
        """Return the table with older keys replaced by those of today. Raises BadTaskFolder."""
        self._schema(table.schema_version)
        if table.task is not None and (not PACKAGE.fullmatch(table.task.name) or ".." in table.task.name):
            self._refuse("task.name", f"{table.task.name!r} is not of the form org/name")
        steps = table.steps and [self._step(number, step) for number, step in enumerate(table.steps)]
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps or ()]
        if len(set(names)) < len(names):
            self._refuse("steps", "two steps have the same name, perhaps in another case: rename one")
        self._phase("agent", table.agent)
        self._artifacts("artifacts", table.artifacts)
        return dataclasses.replace(
            table,
            environment=self._environment("environment", table.environment),
            verifier=self._verifier("verifier", table.verifier),
            agent=_with_hosts(table.agent, self._hosts("agent", table.agent.allowed_hosts)),
            steps=steps,
        )

    def _schema(self, said: str) -> None:
        try:
            version = tuple(int(part) for part in said.split("."))
        except ValueError:
            self._refuse("schema_version", f"{said!r} is no version such as 1.4")
        if version[:2] > NEWEST_SCHEMA:
            newest = ".".join(map(str, NEWEST_SCHEMA))
            self._refuse("schema_version", f"{said} is newer than {newest}, the newest that is known here")

    def _step(self, number: int, step: StepTable) -> StepTable:
        place = f"steps[{number}]"
        if flaw := step_name_flaw(step.name):
            self._refuse(f"{place}.name", f"{step.name!r} {flaw}")
        gates = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward or 0.0}
        if any(math.isnan(gate) for gate in gates.values()):
            self._refuse(f"{place}.min_reward", "nan is no threshold")
        if step.healthcheck is not None:
            self._healthcheck(f"{place}.healthcheck", step.healthcheck)
        self._phase(f"{place}.agent", step.agent)
        self._artifacts(f"{place}.artifacts", step.artifacts)
        return dataclasses.replace(
            step,
            agent=_with_hosts(step.agent, self._hosts(f"{place}.agent", step.agent.allowed_hosts)),
            verifier=self._verifier(f"{place}.verifier", step.verifier),
        )

    def _verifier(self, place: str, table: VerifierTable) -> VerifierTable:
        self._phase(place, table)
        self._positive(f"{place}.timeout_sec", table.timeout_sec)
        if table.environment_mode == "shared" and table.environment is not None:
            self._refuse(f"{place}.environment_mode", f"'shared' excludes [{place}.environment]: remove one of them")
        for number, hook in enumerate(table.collect):
            self._service(f"{place}.collect[{number}].service", hook.service)
            self._positive(f"{place}.collect[{number}].timeout_sec", hook.timeout_sec)
        container = table.environment
        return dataclasses.replace(
            _with_hosts(table, self._hosts(place, table.allowed_hosts)),
            environment=container and self._environment(f"{place}.environment", container),
        )

    def _environment(self, place: str, table: EnvironmentTable) -> EnvironmentTable:
        if table.os not in ("linux", "windows"):
            self._refuse(f"{place}.os", f"{table.os!r} is neither linux nor windows")
        mode = table.network_mode
        if mode is None and table.allowed_hosts is None and table.allow_internet is not None:
            mode = "public" if table.allow_internet else "no-network"
        self._network(place, mode or "public", table.allowed_hosts)
        for key in ("cpus", "memory_mb", "storage_mb", "build_timeout_sec"):
            self._positive(f"{place}.{key}", getattr(table, key))
        if table.workdir is not None and not table.workdir.startswith("/"):
            self._refuse(f"{place}.workdir", f"{table.workdir!r} is no absolute path")
        if table.healthcheck is not None:
            self._healthcheck(f"{place}.healthcheck", table.healthcheck)
        for number, server in enumerate(table.mcp_servers):
            self._server(f"{place}.mcp_servers[{number}]", server)
        return dataclasses.replace(
            table, network_mode=mode, allowed_hosts=self._hosts(place, table.allowed_hosts), allow_internet=None,
            memory=None, memory_mb=self._size(place, "memory", table),
            storage=None, storage_mb=self._size(place, "storage", table),
        )  # fmt: skip

    def _size(self, place: str, key: str, table: EnvironmentTable) -> int | None:
        """Return the MiB that an older key or its successor states."""
        text: str | None = getattr(table, key)
        now: int | None = getattr(table, f"{key}_mb")
        if text is None:
            return now
        number, unit = text.strip().upper()[:-1], text.strip().upper()[-1:]
        try:
            old = int(float(number) * SIZES[unit])
        except (ValueError, KeyError, OverflowError):
            self._refuse(f"{place}.{key}", f"{text!r} is no size such as '1G' or '512M'")
        if now not in (None, old):
            self._refuse(f"{place}.{key}", f"{text!r} contradicts {key}_mb = {now}: remove {key}")
        return old

    def _phase(self, place: str, table: AgentTable | VerifierTable) -> None:
        if isinstance(table, AgentTable):
            self._positive(f"{place}.timeout_sec", table.timeout_sec)
        if table.network_mode is None and table.allowed_hosts is not None:
            self._refuse(f"{place}.allowed_hosts", "it needs network_mode = 'allowlist' beside it")
        if table.network_mode is not None:
            self._network(place, table.network_mode, table.allowed_hosts)

    def _network(self, place: str, mode: NetworkMode, hosts: list[str] | None) -> None:
        if mode != "allowlist" and hosts:
            self._refuse(f"{place}.allowed_hosts", f"it needs network_mode = 'allowlist', not {mode!r}")

    def _hosts(self, place: str, hosts: list[str] | None) -> list[str] | None:
        return hosts and [self._host(f"{place}.allowed_hosts", host.strip().lower().rstrip(".")) for host in hosts]

    def _host(self, key: str, host: str) -> str:
        with_suffix = host.removeprefix("*.")
        try:
            if "/" in host:
                return str(ipaddress.ip_network(host, strict=True))
            if ":" in host:
                return str(ipaddress.IPv6Address(host))
        except ValueError:
            self._refuse(key, f"{host!r} is no host, address or network: leave out scheme, port and path")
        labels = with_suffix.split(".")
        numeric = host.startswith("*.") and all(label.isdigit() for label in labels)
        if numeric or not all(LABEL.fullmatch(label) for label in labels):
            self._refuse(key, f"{host!r} is no host name, nor '*.' and one")
        return host

    def _healthcheck(self, place: str, check: Healthcheck) -> None:
        self._positive(f"{place}.timeout_sec", check.timeout_sec)
        for key in ("interval_sec", "start_period_sec", "start_interval_sec"):
            value: float = getattr(check, key)
            if not (math.isfinite(value) and value >= 0):
                self._refuse(f"{place}.{key}", f"{value} is no number of seconds")

    def _server(self, place: str, server: McpServerTable) -> None:
        if server.transport == "stdio":
            if not server.command:
                self._refuse(f"{place}.command", "a server with transport 'stdio' needs one")
            if server.headers:
                self._refuse(f"{place}.headers", "only a server that is reached by HTTP has headers")
        elif not server.url:
            self._refuse(f"{place}.url", f"a server with transport {server.transport!r} needs one")
        for name, value in server.headers.items():
            if not HEADER.fullmatch(name) or "\r" in value or "\n" in value:
                self._refuse(f"{place}.headers", f"{name!r} is no header of one line")

    def _artifacts(self, key: str, artifacts: list[str | Artifact]) -> None:
        for one in artifacts:
            artifact = Artifact(source=one) if isinstance(one, str) else one
            if not artifact.source or ".." in PurePosixPath(artifact.source).parts:
                self._refuse(key, f"source {artifact.source!r} is no path without '..'")
            target = artifact.destination or "x"
            if target.startswith("/") or "\\" in target or ".." in PurePosixPath(target).parts:
                self._refuse(key, f"destination {target!r} is no relative path without '..'")
            if target.rstrip("/") == "manifest.json":
                self._refuse(key, "destination 'manifest.json' is reserved")
            self._service(key, artifact.service or MAIN)
            if artifact.service not in (None, MAIN) and not artifact.source.startswith("/"):
                self._refuse(key, f"source {artifact.source!r} of service {artifact.service!r} must be absolute")

    def _service(self, key: str, name: str) -> None:
        if not SERVICE.fullmatch(name):
            self._refuse(key, f"{name!r} is no name of a compose service")

    def _positive(self, key: str, value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value > 0):
            self._refuse(key, f"{value} is not above 0")

    def _refuse(self, key: str, said: str) -> typing.NoReturn:
        raise BadTaskFolder(f"{self._where}: {key}: {said}")


def _with_hosts(table: Table, hosts: list[str] | None) -> Table:
    return dataclasses.replace(table, allowed_hosts=hosts)


UNPORTABLE: Final = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
DEVICE: Final = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³])", re.IGNORECASE)


def step_name_flaw(name: str) -> str:
    """Return why a step cannot have this name, or "": it names a folder on any system."""
    bad = not name.strip() or name in (".", "..") or name.endswith((".", " ")) or UNPORTABLE.search(name)
    if bad or DEVICE.fullmatch(name.partition(".")[0].rstrip(" ")):
        return "is no name of a folder on every system"
    return "is longer than 255 bytes" if len(name.encode()) > 255 else ""
