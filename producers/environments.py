"""Facts about a session's sandbox that its `Recipe` does not state: versions of root, policy and tools, for
reproducibility.

They are computed once per recipe and process, because hashing an image takes seconds the first time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from turnlog.infra.environments.recipes import Recipe, first_workspace, sandbox_of, sandbox_tools
from turnlog.infra.environments.tools import versions
from turnlog.infra.sandbox_root import RootError, root_sha256
from turnlog.sandbox_settings import LOCAL, EgressSettings
from turnlog.schemas.events import SandboxSpec
from turnlog.schemas.events.sessions import Environment
from turnlog.schemas.ids import environment_digest
from turnlog.settings import Settings

log = logging.getLogger(__name__)


class Environments:
    """Environments of the recipes in this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, Environment] = {}
        self._turn = asyncio.Lock()

    async def of(self, recipe: Recipe) -> Environment:
        """Return the Environment for SessionStarted. Values that the recipe itself states are kept. Raises UnknownTool,
        ToolOfferError."""
        async with self._turn:
            if recipe.name not in self._known:
                self._known[recipe.name] = await self._describe(recipe)
            return self._known[recipe.name]

    async def _describe(self, recipe: Recipe) -> Environment:
        stated, spec, workspace = recipe.environment, sandbox_of(recipe), first_workspace(recipe)
        return dataclasses.replace(
            stated,
            image=stated.image or spec.image,
            data_snapshot=stated.data_snapshot or (workspace.sha256 if workspace else None),
            root_sha256=stated.root_sha256 or await self._root(recipe.name, spec),
            policy_sha256=stated.policy_sha256 or policy_sha256(spec, self._settings.egress),
            tools=stated.tools or await asyncio.to_thread(versions, sandbox_tools(recipe)),
        )

    async def _root(self, name: str, spec: SandboxSpec) -> str | None:
        if spec.backend not in LOCAL:
            return None  # its calls name their root in environment_sha256 of ToolCallStarted
        try:
            return await asyncio.to_thread(root_sha256, self._settings.sandbox.image_folder, spec.image)
        except (RootError, OSError) as error:  # the image may exist on the sandbox workers' machines only
            log.warning("sessions of recipe %s are recorded without root_sha256: %s", name, error)
            return None


def policy_sha256(spec: SandboxSpec, egress: EgressSettings) -> str:
    """Return the hash of backend, limits and network rules. Environment variables count by name only, secrets not at
    all."""
    about = {
        "backend": spec.backend,
        "network": spec.network,
        "allow": list(spec.allow),
        "limits": dataclasses.asdict(spec.limits),
        "env": sorted(spec.env),
    }
    rules = dataclasses.asdict(dataclasses.replace(egress, signing_key="")) if spec.network != "none" else None
    return environment_digest({**about, "egress": rules})
