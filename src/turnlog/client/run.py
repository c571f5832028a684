"""`connect`: which run a client means, and what it can do with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnlog.settings import Settings

if TYPE_CHECKING:
    from turnlog.client.samples import RunSamples
    from turnlog.client.session import OutsideSession
    from turnlog.client.trainer import ExternalTrainer

NAMES = ("TURNLOG_RUN_ID", "TURNLOG_RUN_DIRECTORY")


def connect(run: Settings | str | os.PathLike[str] | None = None) -> ClientRun:
    """Return a run by its directory, by a settings file (*.toml), or by `Settings`; without one, the environment names
    it as for every role. Nothing is opened yet. Raises SettingsError.
    """
    from turnlog.infra.run_folder import run_settings

    if isinstance(run, Settings):
        return ClientRun(run)
    if run is None:
        return ClientRun(run_settings(None, os.environ))
    path = Path(run)
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    if path.suffix == ".toml":
        return ClientRun(run_settings(path, env))
    return ClientRun(run_settings(None, {**env, "TURNLOG_RUN_DIRECTORY": str(path)}))


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRun:
    """A run of turnlog."""

    settings: Settings

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.settings.run.id

    def trainer(self, cursor: Mapping[str, Any] | None = None) -> ExternalTrainer:
        """Return a trainer of the run, a context manager. Entering it fences the run's previous trainer.

        `cursor` is what `ExternalTrainer.cursor` was when the checkpoint was written from which training continues;
        None: train from the first batch. Raises NotExternal, CursorUnusable.
        """
        from turnlog.client.trainer import ExternalTrainer

        return ExternalTrainer(self.settings, cursor)

    def samples(self, *, archive: bool = False) -> RunSamples:
        """Return the run's samples, which `to_arrow`, `to_pandas` or `to_polars` reads. `archive`: from the archive in
        the object store, which needs neither Kafka nor a registry, unless the run encrypts content: its keys are in
        Kafka alone.
        """
        from turnlog.client.samples import RunSamples

        return RunSamples(self.settings, archive=archive)

    def session(
        self, *, group_id: str = "", group_size: int = 1, rollout_index: int = 0, purpose: str = "train", **more: Any
    ) -> OutsideSession:
        """Return a session for a rollout of your own agent, a context manager; entering it opens the session.

        Rollouts of one task have the same `group_id` and `group_size`, and each its `rollout_index`. Without a group
        the session is alone. `more` are the other fields of POST /sessions in the gateway's /openapi.json. Raises
        SessionRefused, NoEndpoints, SecretUnusable; ValueError for a place in a group without its name.
        """
        from turnlog.client.session import OutsideSession

        if not group_id and (group_size, rollout_index) != (1, 0):
            raise ValueError("group_size and rollout_index need a group_id, which all rollouts of the task share")
        group = {"group_id": group_id, "group_size": group_size, "rollout_index": rollout_index}
        named = {**group, "rollout_id": f"{group_id}-{rollout_index}"} if group_id else {}
        return OutsideSession(self.settings, {**named, "purpose": purpose, **more})
