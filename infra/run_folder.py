"""A run's folder, its owner's alone: the secrets in it, what the supervisor keeps of itself (settings.toml,
supervisor.json, supervisor.lock, logs), and `endpoints.json`, which it writes: where every server of the run is
reached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from turnlog.infra.embedded import AlreadyUp, NoSpace
from turnlog.secret_files import FileSecret, SecretUnusable
from turnlog.setting_types import LEAST_KEY
from turnlog.settings import (
    KafkaSettings,
    RegistrySettings,
    Settings,
    SettingsError,
    StoreSettings,
    load,
    tables_of,
)

log = logging.getLogger(__name__)

GATEWAY_KEY = Path("gateway.key")
"""In the run's folder: signs session tokens."""
CREDENTIAL_KEY = Path("credential.key")
"""In the run's folder: seals the tokens of sessions whose agent is a program in a sandbox."""
STORE_KEY = Path("store", "store.key")
"""In the run's folder: signs requests to the embedded store."""
DASHBOARD_KEY = Path("dashboard.key")
"""In the run's folder: signs links, logins and forms of the dashboard."""
KAFKA_KEY = Path("kafka.key")
"""In the run's folder: the password of EMBEDDED_USER at the embedded brokers. Without it they take anybody, as those of
runs did that an earlier release has started."""
REGISTRY_KEY = Path("registry.key")
"""In the run's folder: the same at the embedded registry."""
EMBEDDED_USER = "turnlog"
"""Who logs in at the embedded brokers and registry."""
IN_PLACE_OF = {
    GATEWAY_KEY.name: "[gateway] signing_key",
    CREDENTIAL_KEY.name: "[sandbox] credential_key",
    STORE_KEY.name: "[store] secret_key",
    DASHBOARD_KEY.name: "[dashboard] key",
}
"""Name of a secret's file -> the setting that takes its place."""


def private_folder(folder: Path) -> None:
    """Make the folder its owner's alone (0700), also one of ours that is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)


def kept_secret(path: Path) -> str:
    """The secret of a file, made by whoever asks first: random, mode 0600, whole or absent, also after a power cut.
    Raises SecretUnusable."""
    if (found := read_secret(path)) is not None:
        return found
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        _write_private(part, secrets.token_urlsafe(32) + "\n", os.O_EXCL)
        with contextlib.suppress(FileExistsError):  # another was faster: its secret is the secret
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)
    return read_secret(path) or kept_secret(path)


def read_secret(path: Path) -> str | None:
    """The secret of a file of the run; None where there is no file. Raises SecretUnusable for one that is unreadable or
    not whole: whoever signed with an empty key would take everybody's signature."""
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SecretUnusable(f"{path} ({_place_of(path)}) cannot be read: {why}") from None
    if len(found) < LEAST_KEY:
        raise SecretUnusable(
            f"{path} ({_place_of(path)}) holds no whole secret, but {len(found)} characters: restore it from a "
            "copy, or delete it and a new one is made; what the old one has signed is refused then"
        )
    return found


def _place_of(path: Path) -> str:
    return f"in place of {IN_PLACE_OF[path.name]}" if path.name in IN_PLACE_OF else "a secret of the run"


def check_secrets(directory: Path) -> None:
    """Raises SecretUnusable for a secret of the run that is there and cannot be used."""
    for path in (GATEWAY_KEY, CREDENTIAL_KEY, STORE_KEY, DASHBOARD_KEY, KAFKA_KEY, REGISTRY_KEY):
        read_secret(directory / path)


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
SETTINGS = "settings.toml"
NAMING = {"id": "TURNLOG_RUN_ID", "directory": "TURNLOG_RUN_DIRECTORY"}
"""Keys of [run] that name a run -> their variables."""


def run_settings(path: Path | None, env: Mapping[str, str], *, run_id: str = "", directory: str = "") -> Settings:
    """The settings of the run that is named by `run_id` (with --run), else by the environment, else by the file.

    Half a name is enough: the files of an id alone are in runs/ID, and a directory alone is of the run whose
    settings.toml lies there. Without a file of settings, a run that is named keeps those that it was started with.
    Raises SettingsError."""
    if run_id:
        env = {name: value for name, value in env.items() if name not in NAMING.values()}
        named = {"id": run_id, "directory": directory or f"runs/{run_id}"}
    else:
        own, table = load(path, env).run, tables_of(path).get("run", {})
        named = {key: getattr(own, key) for key, variable in NAMING.items() if key in table or variable in env}
        if "id" in named:
            named.setdefault("directory", f"runs/{named['id']}")
    kept = Path(named["directory"]) / SETTINGS if "directory" in named else None
    if kept is not None and kept.exists() and (path is None or "id" not in named):
        was = tables_of(kept).get("run", {}).get("id", "")
        if not run_id and named.get("id", was) != was:
            raise SettingsError(
                f"{kept} is of run {was!r}, and {NAMING['id']} is {named['id']!r}: unset it, or {NAMING['directory']}"
            )
        named["id"] = was
        path = path or kept
    settings = load(path, env)
    run = dataclasses.replace(
        settings.run, id=named.get("id", settings.run.id), directory=named.get("directory", settings.run.directory)
    )
    return dataclasses.replace(settings, run=run)


def newest_run(runs: Path = Path("runs")) -> str:
    """The name of the folder of the run that is up there, of several or none the one that was started last; empty where
    there is none."""
    started = {path.parent: path.stat().st_mtime_ns for path in runs.glob(f"*/{SETTINGS}")}
    return max(started, key=lambda directory: (is_live(directory), started[directory])).name if started else ""


def check_there(settings: Settings) -> None:
    """Raises NoEndpoints where neither a directory nor a server is known that could hold the run."""
    directory = Path(settings.run.directory)
    known = settings.kafka.bootstrap or settings.store.endpoint or settings.index.path
    if not known and not directory.exists():
        raise _no_run(directory)


def _no_run(directory: Path) -> NoEndpoints:
    return NoEndpoints(
        f"there is no run in {directory.absolute()}: `turnlog run list` lists the runs of this directory, and "
        "`turnlog demo` makes one"
    )


def verb_line(directory: Path, verb: str) -> str:
    """How `turnlog VERB` is said of the run of that directory."""
    if directory == Path("runs", directory.name):
        return f"turnlog --run {directory.name} {verb}"
    return f"{NAMING['directory']}={shlex.quote(str(directory))} turnlog {verb}"


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
    dashboard: str = ""
    health: dict[str, str] = dataclasses.field(default_factory=dict)
    """Role instance -> base URL of /healthz, /readyz, /metrics."""
    supervisor_pid: int = 0


def write_endpoints(directory: Path, endpoints: Endpoints) -> None:
    """Replace the file in one step."""
    part = directory / (FILE + ".part")
    part.write_text(json.dumps(dataclasses.asdict(endpoints), indent=2) + "\n")
    os.replace(part, directory / FILE)


def health_addresses(settings: Settings) -> dict[str, str]:
    """Role instance -> health address, of those that a supervisor here has begun; none where it has begun none."""
    try:
        return read_endpoints(Path(settings.run.directory)).health
    except NoEndpoints:
        return {}


def read_endpoints(directory: Path) -> Endpoints:
    """Raises NoEndpoints."""
    try:
        values = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        if not directory.exists():
            raise _no_run(directory) from None
        raise NoEndpoints(f"{directory / FILE} is missing: `{verb_line(directory, 'up')}` starts the run") from None
    return Endpoints(**{**values, "engines": tuple(values["engines"])})


def health_of(directory: Path, role: str) -> dict[str, str]:
    """Instance -> base URL of its health server, of a role's processes; none of a run that `turnlog up` did not
    start."""
    try:
        found = read_endpoints(directory).health
    except NoEndpoints:
        return {}
    return {name: url for name, url in found.items() if name.startswith(f"{role}-")}


def kafka_of(settings: Settings) -> KafkaSettings:
    """[kafka] with address and login filled in, for who needs no other server. Raises NoEndpoints, SecretUnusable."""
    wanted, directory = settings.kafka, Path(settings.run.directory)
    return wanted if wanted.bootstrap else _kafka(wanted, read_endpoints(directory).kafka, directory)


def registry_of(wanted: RegistrySettings, address: str, directory: Path) -> RegistrySettings:
    """[registry] with address and login filled in: of the embedded one at `address`, the run's own where the settings
    name none. Raises SecretUnusable."""
    if wanted.url:
        return wanted
    found = dataclasses.replace(wanted, url=address)
    password = "" if wanted.token or wanted.username else read_secret(directory / REGISTRY_KEY)
    return dataclasses.replace(found, username=EMBEDDED_USER, password=password) if password else found


def resolved(settings: Settings) -> Settings:
    """Settings with every address filled in, and what the embedded servers ask for: the user's own where one is named,
    else the run's. Raises NoEndpoints, SecretUnusable."""
    missing = not (settings.kafka.bootstrap and settings.registry.url and settings.store.endpoint)
    if not missing and settings.engine.urls and settings.gateway.url:
        return settings
    try:
        found = read_endpoints(Path(settings.run.directory))
    except NoEndpoints:
        if missing:
            raise
        return settings
    replace, directory = dataclasses.replace, Path(settings.run.directory)
    return replace(
        settings,
        kafka=_kafka(settings.kafka, found.kafka, directory),
        registry=registry_of(settings.registry, found.registry, directory),
        store=_store(settings.store, found.store, directory),
        engine=replace(settings.engine, urls=settings.engine.urls or found.engines),
        gateway=replace(settings.gateway, url=settings.gateway.url or found.gateway),
    )


def _kafka(wanted: KafkaSettings, address: str, directory: Path) -> KafkaSettings:
    if wanted.bootstrap:
        return wanted
    found = dataclasses.replace(wanted, bootstrap=address)
    password = read_secret(directory / KAFKA_KEY)
    if not password:
        return found
    return dataclasses.replace(
        found, security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username=EMBEDDED_USER, password=password
    )


def _store(wanted: StoreSettings, address: str, directory: Path) -> StoreSettings:
    if wanted.endpoint:
        return wanted
    secret = wanted.secret_key or read_secret(directory / STORE_KEY) or ""
    return dataclasses.replace(wanted, endpoint=address, secret_key=secret)


STATE = "supervisor.json"
LOCK = "supervisor.lock"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
MAKE_ROOM = (
    "make room and everything goes on (`turnlog run list` shows what each run takes, `turnlog run delete ID` lets one "
    "go)"
)
FULL, LEAST_FREE = 16 * 2**20, 256 * 2**20
"""Bytes: what a disk has less of is full, since a broker rolls files of 10 MiB; and what a start takes at least."""


def write_settings(directory: Path, settings: Settings) -> Path:
    """Every value in effect, as a file that `turnlog --settings` reads back; mode 0600, it holds the store's secret."""
    lines = []
    for section in dataclasses.fields(settings):
        values = dataclasses.asdict(getattr(settings, section.name))
        lines += [f"[{section.name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    path = directory / SETTINGS
    replace_private(path, "\n".join(lines))
    return path


def _toml(value: Any) -> str:
    """Strings of JSON are basic strings of TOML, but for a bare DEL, which no setting holds."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace supervisor.json in one step. It speaks of processes, which a power cut ends: nothing waits for the
    disk."""
    part = directory / f"{STATE}.part"
    _write_private(part, json.dumps(state, indent=2) + "\n", os.O_TRUNC, durable=False)
    os.replace(part, directory / STATE)


def read_state(directory: Path) -> dict[str, Any]:
    """What the last supervisor said; empty when there was none."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
    except FileNotFoundError:
        return {}
    return state


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run: one supervisor at a time. Raises AlreadyUp."""
    busy = AlreadyUp(
        f"{directory} is up already: `{verb_line(directory, 'status')}` shows it, `{verb_line(directory, 'down')}` "
        "stops it, and another --run ID is another run"
    )
    with held(directory / LOCK, busy):
        yield


@contextlib.contextmanager
def held(path: Path, busy: Exception | None = None) -> Iterator[TextIO]:
    """Hold a file, which is made if need be: one process at a time. The kernel lets go when that ends. Raises `busy`
    where another one holds it, or waits for that one where there is none."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            assert busy is not None, "who waits is not refused"
            raise busy from error
        yield file


def is_live(directory: Path) -> bool:
    """Whether a supervisor holds the run."""
    if not (directory / LOCK).exists():
        return False
    try:
        with locked(directory):
            return False
    except AlreadyUp:
        return True


def lacks_room(folder: Path, least: int = FULL) -> str:
    """Which disk has too little room, and what to do; empty when there is as much, or nobody knows."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free >= least:
        return ""
    left, needed = (f"{size / 2**20:.0f} MiB" for size in (free, least))
    return f"the disk of {folder} is full: {left} are left, {needed} are needed; {MAKE_ROOM}"


def full_disk(error: BaseException, folder: Path) -> str:
    """The same for a disk that took no more: as the error, or one that led to it, says, or as it looks now, for
    libraries that say only that they could not write. Empty where it is not that."""
    met: BaseException | None = error
    while met is not None:
        if _took_no_more(met):
            return f"the disk of {folder} is full; {MAKE_ROOM}"
        met = met.__cause__ or met.__context__
    return lacks_room(folder)


def _took_no_more(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space_of(error: BaseException) -> NoSpace | None:
    """What an OSError that nobody has named says of a full disk; None where it is something else."""
    if not _took_no_more(error):
        return None
    file, some = error.filename, f"a disk that it writes to is full; {MAKE_ROOM}"  # a write knows no name of its file
    return NoSpace(f"{error}: {full_disk(error, Path(os.fsdecode(file)).parent) if file else some}")


def check_room(directory: Path) -> None:
    """Raises NoSpace where a run could not even begin."""
    if full := lacks_room(directory, LEAST_FREE):
        raise NoSpace(full)


def file_sizes(directory: Path) -> dict[str, list[int]]:
    """Bytes of each file of a run's directory, below `checkpoints` and below `directory` for all others. What goes away
    meanwhile does not count."""
    kinds: dict[str, list[int]] = {CHECKPOINTS: [], "directory": []}
    for folder, _, names in os.walk(directory):
        inside = Path(folder).relative_to(directory).parts[:1]
        sizes = kinds[CHECKPOINTS if inside == (CHECKPOINTS,) else "directory"]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(folder) / name).lstat().st_size)
    return kinds


def replace_private(path: Path, text: str) -> None:
    """Replace a file in one step, on the disk when this returns; mode 0600."""
    part = path.with_name(path.name + ".part")
    _write_private(part, text, os.O_TRUNC)
    os.replace(part, path)
    sync(path.parent)


def _write_private(path: Path, text: str, how: int, *, durable: bool = True) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Put a file on the disk, or a folder: what that names is there only when the folder itself is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
