"""`turnlog sandbox check`: which backends work on this machine, and which layers of isolation hold around a call."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import dataclass

from turnlog.infra.roles.terminal import aside, say, say_json
from turnlog.names import ExitStatus
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.pooling import backend, known
from turnlog.sandbox_workers.protocol import BackendUnavailable, SandboxUnavailable
from turnlog.settings import Settings

LONGEST = 600
"""Characters of a line."""
TRUSTED = "this backend isolates nothing: for code that you trust"
BWRAP, USERS, SECCOMP, GROUPS = "bwrap", "a user per slot", "seccomp filter", "control groups"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    name: str
    ok: bool
    says: str
    """What was found, or what is missing and how to get it."""
    needed: bool
    """By the backend of [sandbox], to isolate fully."""


async def show(settings: Settings, *, as_json: bool) -> int:
    """Print a line for each; 0 when nothing is missing that is needed."""
    found = await findings(settings.sandbox)
    if as_json:
        say_json([dataclasses.asdict(finding) for finding in found])
    else:
        for finding in found:
            mark = "ok" if finding.ok else "MISSING" if finding.needed else "no"
            say(f"{finding.name:20} {mark:8} {finding.says}")
    missing = [finding.name for finding in found if finding.needed and not finding.ok]
    verdict = f"{settings.sandbox.backend} is fully isolated here"
    if missing:
        verdict = f"{settings.sandbox.backend} is not fully isolated here: {', '.join(missing)}"
    aside(verdict)
    return ExitStatus.DIFFERS if missing else ExitStatus.DONE


async def findings(settings: SandboxSettings) -> list[Finding]:
    """Layers first, then backends."""
    layers = [await asyncio.to_thread(_bwrap), _users(settings), await asyncio.to_thread(_seccomp), _groups(settings)]
    return [*layers, *[await _backend(name, settings) for name in known()]]


async def _backend(name: str, settings: SandboxSettings) -> Finding:
    needed = name == settings.backend or name in settings.backends
    try:
        provider = await backend(name, settings)
    except BackendUnavailable as error:
        return Finding(f"backend {name}", False, _line(error), needed)
    await provider.close()
    if name == "subprocess":
        return Finding(f"backend {name}", not needed, f"works; {TRUSTED}", needed)
    return Finding(f"backend {name}", True, "works", needed)


def _bwrap() -> Finding:
    from turnlog.infra.sandbox_root import cache_directory
    from turnlog.sandbox_workers.backends.bubblewrap import find, version

    try:
        binary = find(cache_directory())
    except SandboxUnavailable as error:
        return Finding(BWRAP, False, _line(error), True)
    return Finding(BWRAP, True, f"{'.'.join(map(str, version(binary)))} {binary}", True)


def _users(settings: SandboxSettings) -> Finding:
    if os.geteuid() == 0:
        last = settings.first_uid + settings.slots - 1
        return Finding(USERS, True, f"host users {settings.first_uid} to {last}", True)
    said = f"sandboxes are host user {os.geteuid()}, as we are: start the worker as root, it drops to a user per slot"
    return Finding(USERS, False, said, True)


def _seccomp() -> Finding:
    from turnlog.sandbox_workers.backends import seccomp

    content = seccomp.program()
    if content is None:
        return Finding(SECCOMP, False, "install libseccomp and turnlog[sandbox]", True)
    return Finding(SECCOMP, True, f"{len(content)} bytes of BPF", True)


def _groups(settings: SandboxSettings) -> Finding:
    from turnlog.sandbox_workers.backends.cgroups import Cgroups

    if settings.cgroups == "off":
        return Finding(GROUPS, False, 'off by [sandbox] cgroups = "off"', True)
    try:
        found = Cgroups.open(dataclasses.replace(settings, cgroups="required"))
    except BackendUnavailable as error:
        return Finding(GROUPS, False, _line(error), True)
    assert found is not None
    return Finding(GROUPS, True, f"version {found.tree.version}: {', '.join(sorted(found.tree.folders))}", True)


def _line(error: Exception) -> str:
    """What it says, on one line."""
    return " ".join(str(error).split())[:LONGEST]
