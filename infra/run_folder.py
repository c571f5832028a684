"""A run's folder, its owner's alone: the secrets in it, and `endpoints.json`, which the supervisor writes: where every
server of the run is reached."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from turnlog.secret_files import FileSecret, SecretUnusable
from turnlog.settings import Settings, StoreSettings

log = logging.getLogger(__name__)

GATEWAY_KEY = Path("gateway.key")
"""In the run's folder: signs session tokens."""
STORE_KEY = Path("store", "store.key")
"""In the run's folder: signs requests to the embedded store."""


def private_folder(folder: Path) -> None:
    """Make the folder its owner's alone (0700), also one of ours that is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)


def kept_secret(path: Path) -> str:
    """The secret of a file, made by whoever asks first: random, mode 0600, whole or absent."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    try:
        with contextlib.suppress(FileExistsError):  # another was faster: its secret is the secret
            os.link(part, path)
    finally:
        part.unlink()
    return path.read_text().strip()


def present(secret: str) -> str:
    """A secret of the settings as it is now: of a file that was swapped since, the new content. A file that became
    unusable leaves the value that it held before, with a warning."""
    if not isinstance(secret, FileSecret):
        return secret
    try:
        if secret.swapped():
            log.info("%s was swapped and is read again", secret.where)
    except SecretUnusable as error:
        log.warning("%s; the value that it held before stays in use", error)
    return secret.text


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


def write_endpoints(directory: Path, endpoints: Endpoints) -> None:
    """Replace the file in one step."""
    part = directory / (FILE + ".part")
    part.write_text(json.dumps(dataclasses.asdict(endpoints), indent=2) + "\n")
    os.replace(part, directory / FILE)


def read_endpoints(directory: Path) -> Endpoints:
    """Raises NoEndpoints."""
    try:
        values = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        raise NoEndpoints(f"{directory / FILE} is missing: start the run with `turnlog up`") from None
    return Endpoints(**{**values, "engines": tuple(values["engines"])})


def kafka_of(settings: Settings) -> str:
    """Bootstrap address of the log, for who needs no other server. Raises NoEndpoints."""
    return settings.kafka.bootstrap or read_endpoints(Path(settings.run.directory)).kafka


def resolved(settings: Settings) -> Settings:
    """Settings with every address filled in, and the embedded store's key: the user's own where one is named, else the
    run's."""
    missing = not (settings.kafka.bootstrap and settings.registry.url and settings.store.endpoint)
    if not missing and settings.engine.urls and settings.gateway.url:
        return settings
    try:
        found = read_endpoints(Path(settings.run.directory))
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
