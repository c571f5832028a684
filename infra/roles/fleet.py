"""Engines that join and leave a running run: operators' requests, and the current state of the fleet.

A request is an EngineRequested record. The run's supervisor starts and stops the engines that it hosts and every
engine's loader; the loader drains its engine (docs/engines.md).

FleetError
├── UnknownEngine   no engine of the run has this name or address
├── NotHosted       no supervisor starts engines of this run: they are the user's own
├── TakesTurns      the engines share the trainer's devices, so their number is fixed for the run
├── BadAddress      not http(s)://host:port
├── BadKind         no kind of engine, or one that lacks what the settings need
├── BadEngineName         not a valid engine name
└── NameTaken       an engine of this name serves at another address
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import cast, get_args
from urllib.parse import urlsplit

from turnlog.infra.history import all_events
from turnlog.infra.roles.role import Role
from turnlog.processors.core.views.fleet import GONE, OPERATOR, SERVING, SILENT, Fleet, FleetEngine
from turnlog.schemas.topics import ENGINE_REQUESTS, ENGINES
from turnlog.settings import EngineKind, Settings, SettingsError, check_kinds

ADDRESS = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?/?", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9\[][\w.:\]-]{0,199}", re.ASCII)
"""Pattern of an engine name, which may also be the engine's address."""


class FleetError(Exception):
    """Base class of the errors above."""


class UnknownEngine(FleetError):
    """Remedy: see `turnlog engines list`."""


class NotHosted(FleetError):
    """Remedy: use `turnlog engines register` and `drain`, or the number of replicas in your own deployment."""


class TakesTurns(FleetError):
    """Remedy: set [engine] count before the run, or give the engines devices of their own."""


class BadAddress(FleetError):
    """Remedy: give the address at which gateways reach the engine."""


class BadKind(FleetError):
    """Remedy: register the engine as the kind that it is, or change the setting that the message names."""


class BadEngineName(FleetError):
    """Remedy: choose a name of up to 200 letters, digits, periods, hyphens, colons and underscores."""


class NameTaken(FleetError):
    """Remedy: choose another name, or run `turnlog engines drain` first."""


async def read(role: Role) -> Fleet:
    """Return the current fleet according to the log. Raises LogUnavailable."""
    found = Fleet()
    for topic in (ENGINE_REQUESTS, ENGINES):
        for event in await all_events(role, topic):
            found.apply(event)
    return found


async def scale(role: Role, count: int, *, reason: str = "") -> list[FleetEngine]:
    """Request `count` hosted engines; return those that are requested to start or to stop.

    Raises TakesTurns if engines share the trainer's devices, NotHosted if the run hosts no engines, LogUnavailable."""
    if role.settings.engine.colocate:
        raise TakesTurns(
            "with [engine] colocate, engines and trainer take turns on the same devices, and a starting engine would "
            "take memory from whichever has the turn: set [engine] count and restart the run, or give engines "
            "devices of their own"
        )
    found = await read(role)
    if not any(engine.hosted for engine in found.engines.values()):
        raise NotHosted(
            f"run {role.settings.run.id!r} hosts no engines: `turnlog up` starts engines only if [engine] urls is "
            "empty; register and drain your own engines by address"
        )
    changes = [(name, "", wanted) for name, wanted in found.plan_scaling(count)]
    return await ask(role, found, changes, by=OPERATOR, reason=reason)


async def register(role: Role, url: str, *, name: str = "", kind: str = "", reason: str = "") -> FleetEngine:
    """Register an engine that runs at `url`. Its name is that of the engine known at this address, else `name`, else
    HOST:PORT. Its kind is `kind`, else that with which this address was registered before, else what the settings say.
    Raises BadAddress, BadEngineName, BadKind, NameTaken, LogUnavailable."""
    if not _is_address(url):
        raise BadAddress(f"an engine's address must be http://host:port as gateways reach it, got {url[:200]!r}")
    if name and not NAME.fullmatch(name):
        raise BadEngineName(
            "an engine's name must have 1 to 200 letters, digits and . _ : - and begin with a letter or a digit, got "
            f"{name[:200]!r}"
        )
    if kind:
        _check_kind(role.settings, kind)
    found, url = await read(role), url.rstrip("/")
    known = found.find_engine(url)
    engine_id = known.id if known is not None else name or urlsplit(url).netloc
    other = found.engines.get(engine_id)
    if known is None and other is not None and not (other.leaving or other.state in (SILENT, GONE)):
        raise NameTaken(
            f"engine {engine_id!r} is at {other.url or 'an address of its own (hosted)'}: register {url} under "
            f"another name, or drain the other one first (`turnlog engines drain {engine_id}`)"
        )
    if kind and known is not None and known.hosted and not known.leaving:
        raise BadKind(f"engine {known.id!r} is hosted: [engine] kind and kinds say what kind it is")
    kind = kind or (known.wanted_kind if known is not None else "")
    (asked,) = await ask(role, found, [(engine_id, url, SERVING)], by=OPERATOR, reason=reason, kind=kind)
    return asked


def _check_kind(settings: Settings, kind: str) -> None:
    """Raise BadKind if there is no such kind, or if it lacks a feature that the settings need."""
    if kind not in get_args(EngineKind):
        raise BadKind(f"an engine's kind must be {' or '.join(get_args(EngineKind))}, got {kind[:200]!r}")
    engine = dataclasses.replace(settings.engine, kind=cast(EngineKind, kind), kinds=())
    try:
        check_kinds(dataclasses.replace(settings, engine=engine), f"an engine of kind {kind}")
    except SettingsError as error:
        raise BadKind(str(error)) from error


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(ADDRESS.fullmatch(url) and parts.hostname) and parts.port != 0
    except ValueError:  # brackets around no IPv6 address, or a port above 65535
        return False


async def drain(role: Role, name: str, *, reason: str = "") -> FleetEngine:
    """Request that the engine with this name or address leaves. Raises UnknownEngine, LogUnavailable."""
    found = await read(role)
    known = found.find_engine(name)
    if known is None:
        names = ", ".join(found.engines) or "none"
        raise UnknownEngine(f"run {role.settings.run.id!r} has no engine {name!r}; it has {names}")
    if known.leaving:
        return known
    (asked,) = await ask(role, found, [(known.id, "" if known.hosted else known.url, GONE)], by=OPERATOR, reason=reason)
    return asked


async def ask(
    role: Role, fleet: Fleet, wanted: Sequence[tuple[str, str, str]], *, by: str, reason: str = "", kind: str = ""
) -> list[FleetEngine]:
    """Append a request for each (engine, address, serving | gone), with `kind`, and apply it to `fleet`; return those
    engines as they are afterwards."""
    run_id = role.settings.run.id
    for engine_id, url, state in wanted:
        event = fleet.request(engine_id, state, run_id=run_id, by=by, url=url, reason=reason, kind=kind)
        await role.events.append(event)
        fleet.apply(event)
    return [fleet.engines[engine_id] for engine_id, _, _ in wanted]
