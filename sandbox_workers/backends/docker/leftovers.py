"""Containers whose worker is dead: their inits have ended with it, their records are removed here."""

from __future__ import annotations

import contextlib
from typing import Any

from turnlog.sandbox_workers.backends.docker.client import asked
from turnlog.sandbox_workers.backends.docker.container import LABEL, boot_id
from turnlog.sandbox_workers.backends.leftovers import noted, ownerless
from turnlog.sandbox_workers.protocol import SandboxUnavailable


async def sweep(client: Any) -> int:
    """Remove containers of this machine's dead workers, and ended ones of workers anywhere; how many are gone.
    Raises SandboxUnavailable when the daemon does not answer."""
    gone = 0
    for found in await asked(client.containers, all=True, filters={"label": [LABEL]}):
        name = next((name.lstrip("/") for name in found.get("Names") or ()), "")
        here = found["Labels"][LABEL] == boot_id()
        if not (found["State"] in ("exited", "dead") or (here and ownerless(name))):
            continue
        with contextlib.suppress(SandboxUnavailable):  # another worker removes it too
            await asked(client.remove_container, found["Id"], force=True)
            noted("container", name)
            gone += 1
    return gone
