"""`endpoints.json` in the run's directory: where every server of a run is reached; written by the supervisor."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.private_files import STORE_KEY
from turnlog.settings import Settings, StoreSettings

FILE = "endpoints.json"


class NoEndpoints(Exception):
    """The run has no endpoints.json: `turnlog up` was not started for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses as clients use them."""

    kafka: str
    registry: str
    store: str
    engines: tuple[str, ...] = ()
    gateway: str = ""
    views: str = ""
    health: dict[str, str] = dataclasses.field(default_factory=dict)
    """Role instance -> base URL of /healthz, /readyz, /metrics."""
    supervisor_pid: int = 0


def write(directory: Path, endpoints: Endpoints) -> None:
    """Replace the file in one step."""
    part = directory / (FILE + ".part")
    part.write_text(json.dumps(dataclasses.asdict(endpoints), indent=2) + "\n")
    os.replace(part, directory / FILE)


def read(directory: Path) -> Endpoints:
    """Raises NoEndpoints."""
    try:
        values = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        raise NoEndpoints(f"{directory / FILE} is missing: start the run with `turnlog up`") from None
    return Endpoints(**{**values, "engines": tuple(values["engines"])})


def resolved(settings: Settings) -> Settings:
    """Settings with every address filled in, and the embedded store's key: the user's own where one is named, else the
    run's."""
    missing = not (settings.kafka.bootstrap and settings.registry.url and settings.store.endpoint)
    if not missing and settings.engine.urls and settings.gateway.url:
        return settings
    try:
        found = read(Path(settings.run.directory))
    except NoEndpoints:
        if missing:
            raise
        return settings
    replace = dataclasses.replace
    return replace(
        settings,
        kafka=replace(settings.kafka, bootstrap=settings.kafka.bootstrap or found.kafka),
        registry=replace(settings.registry, url=settings.registry.url or found.registry),
        store=_store(settings.store, found.store, Path(settings.run.directory)),
        engine=replace(settings.engine, urls=settings.engine.urls or found.engines),
        gateway=replace(settings.gateway, url=settings.gateway.url or found.gateway),
    )


def _store(wanted: StoreSettings, address: str, directory: Path) -> StoreSettings:
    if wanted.endpoint:
        return wanted
    kept = directory / STORE_KEY
    secret = wanted.secret_key or (kept.read_text().strip() if kept.exists() else "")
    return dataclasses.replace(wanted, endpoint=address, secret_key=secret)
