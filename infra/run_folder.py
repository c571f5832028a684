"""A run's folder, accessible to its owner only. It has the run's secrets, the supervisor's files (settings.toml,
supervisor.json, supervisor.lock, logs), and `endpoints.json`, in which the supervisor publishes the address of every
server of the run."""

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

from turnlog.former_settings import former_warnings
from turnlog.infra.embedded import AlreadyUp, NoSpace
from turnlog.secret_files import FileSecret, SecretUnusable
from turnlog.setting_types import LEAST_KEY
from turnlog.settings import (
    KafkaSettings,
    RegistrySettings,
    Settings,
    SettingsError,
    StoreSettings,
    from_tables,
    load,
    tables_of,
)

log = logging.getLogger(__name__)

GATEWAY_KEY = Path("gateway.key")
"""File in the run's folder with the key that signs session tokens."""
CREDENTIAL_KEY = Path("credential.key")
"""File in the run's folder with the key that encrypts session tokens for agents that are programs in a sandbox."""
STORE_KEY = Path("store", "store.key")
"""File in the run's folder with the key that signs requests to the embedded store."""
DASHBOARD_KEY = Path("dashboard.key")
"""File in the run's folder with the key that signs links, logins and forms of the dashboard."""
KAFKA_KEY = Path("kafka.key")
"""File in the run's folder with the password of EMBEDDED_USER at the embedded brokers. Without the file they accept any
client; runs that an earlier release started have none."""
REGISTRY_KEY = Path("registry.key")
"""File in the run's folder with the password of EMBEDDED_USER at the embedded registry."""
EMBEDDED_USER = "turnlog"
"""User name for logins at the embedded brokers and registry."""
IN_PLACE_OF = {
    GATEWAY_KEY.name: "[gateway] signing_key",
    CREDENTIAL_KEY.name: "[sandbox] credential_key",
    STORE_KEY.name: "[store] secret_key",
    DASHBOARD_KEY.name: "[dashboard] key",
}
"""Name of a secret's file -> the setting that replaces it."""


def private_folder(folder: Path) -> None:
    """Create the folder with mode 0700. An existing folder of ours gets that mode, too."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)


def kept_secret(path: Path) -> str:
    """Return the secret in a file. The first caller creates it: random, mode 0600, and never incomplete, even after a
    power failure. Raises SecretUnusable."""
    if (found := read_secret(path)) is not None:
        return found
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        _write_private(part, secrets.token_urlsafe(32) + "\n", os.O_EXCL)
        with contextlib.suppress(FileExistsError):  # another process was faster: its secret counts
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)
    return read_secret(path) or kept_secret(path)


def read_secret(path: Path) -> str | None:
    """Return the secret in a file of the run, or None if there is no file. Raises SecretUnusable if it is unreadable or
    incomplete, because a signer with an empty key would accept anybody's signature."""
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SecretUnusable(f"{path} ({_place_of(path)}) cannot be read: {why}") from None
    if len(found) < LEAST_KEY:
        raise SecretUnusable(
            f"{path} ({_place_of(path)}) does not hold a complete secret, only {len(found)} characters: restore it "
            "from a backup, or delete it to have a new one created; whatever the old one signed is then refused"
        )
    return found


def _place_of(path: Path) -> str:
    return f"in place of {IN_PLACE_OF[path.name]}" if path.name in IN_PLACE_OF else "a secret of the run"


def check_secrets(directory: Path) -> None:
    """Check the run's secret files. Raises SecretUnusable if one exists and cannot be used."""
    for path in (GATEWAY_KEY, CREDENTIAL_KEY, STORE_KEY, DASHBOARD_KEY, KAFKA_KEY, REGISTRY_KEY):
        read_secret(directory / path)


def present(secret: str) -> str:
    """Return the current value of a secret in the settings. If its file was replaced, this is the new content. If the
    file became unusable, the previous value is used, with a warning."""
    if not isinstance(secret, FileSecret):
        return secret
    try:
        if secret.reload_if_changed():
            log.info("%s was replaced and has been read again", secret.where)
    except SecretUnusable as error:
        log.warning("%s; the previous value stays in use", error)
    return secret.text


FILE = "endpoints.json"
SETTINGS = "settings.toml"
NAMING = {"id": "TURNLOG_RUN_ID", "directory": "TURNLOG_RUN_DIRECTORY"}
"""Key of [run] that names a run -> its environment variable."""


def run_settings(path: Path | None, env: Mapping[str, str], *, run_id: str = "", directory: str = "") -> Settings:
    """Return the settings of the run that `run_id` (from --run) names, else the environment, else the file.

    Half a name suffices: an id alone has its files in runs/ID, and a directory alone means the run whose settings.toml
    is there. Without a settings file, a named run keeps the settings that it was started with. Former settings are
    logged as a warning. Raises SettingsError.
    """
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
                f"{kept} belongs to run {was!r}, but {NAMING['id']} is {named['id']!r}: unset that variable or "
                f"{NAMING['directory']}"
            )
        named["id"] = was
        path = path or kept
    tables, source = tables_of(path), str(path or "defaults")
    settings = from_tables(tables, env, source=source)
    for warning in former_warnings(tables, env, source=source):
        log.warning("%s", warning)
    run = dataclasses.replace(
        settings.run, id=named.get("id", settings.run.id), directory=named.get("directory", settings.run.directory)
    )
    return dataclasses.replace(settings, run=run)


def newest_run(runs: Path = Path("runs")) -> str:
    """Return the folder name of the run that is up. If several are, or none is, return the one that was started last.
    Returns "" if there is no run."""
    started = {path.parent: path.stat().st_mtime_ns for path in runs.glob(f"*/{SETTINGS}")}
    return max(started, key=lambda directory: (is_live(directory), started[directory])).name if started else ""


def check_there(settings: Settings) -> None:
    """Check that a directory or a server is known that could have the run. Raises NoEndpoints if not."""
    directory = Path(settings.run.directory)
    known = settings.kafka.bootstrap or settings.store.endpoint or settings.index.path
    if not known and not directory.exists():
        raise _no_run(directory)


def _no_run(directory: Path) -> NoEndpoints:
    return NoEndpoints(
        f"there is no run in {directory.absolute()}: `turnlog run list` lists the runs in this directory, and "
        "`turnlog demo` starts one"
    )


def verb_line(directory: Path, verb: str) -> str:
    """Return the command line of `turnlog VERB` for the run of that directory."""
    if directory == Path("runs", directory.name):
        return f"turnlog --run {directory.name} {verb}"
    return f"{NAMING['directory']}={shlex.quote(str(directory))} turnlog {verb}"


class NoEndpoints(Exception):
    """The run has no endpoints.json: `turnlog up` was not started for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses of a run's servers for clients."""

    kafka: str
    registry: str
    store: str
    engines: tuple[str, ...] = ()
    gateway: str = ""
    views: str = ""
    dashboard: str = ""
    tinker: str = ""
    health: dict[str, str] = dataclasses.field(default_factory=dict)
    """Role instance -> base URL of /healthz, /readyz, /metrics."""
    supervisor_pid: int = 0


def write_endpoints(directory: Path, endpoints: Endpoints) -> None:
    """Replace the file atomically."""
    part = directory / (FILE + ".part")
    part.write_text(json.dumps(dataclasses.asdict(endpoints), indent=2) + "\n")
    os.replace(part, directory / FILE)


def health_addresses(settings: Settings) -> dict[str, str]:
    """Return role instance -> health address, for the roles that a supervisor here has started."""
    try:
        return read_endpoints(Path(settings.run.directory)).health
    except NoEndpoints:
        return {}


def read_endpoints(directory: Path) -> Endpoints:
    """Read endpoints.json. Raises NoEndpoints."""
    try:
        values = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        if not directory.exists():
            raise _no_run(directory) from None
        raise NoEndpoints(f"{directory / FILE} is missing: `{verb_line(directory, 'up')}` starts the run") from None
    return Endpoints(**{**values, "engines": tuple(values["engines"])})


def health_of(directory: Path, role: str) -> dict[str, str]:
    """Return instance -> base URL of the health server for a role's processes. Empty if the run was not started by
    `turnlog up`."""
    try:
        found = read_endpoints(directory).health
    except NoEndpoints:
        return {}
    return {name: url for name, url in found.items() if name.startswith(f"{role}-")}


def kafka_of(settings: Settings) -> KafkaSettings:
    """Return [kafka] with address and login filled in, for callers that need no other server. Raises NoEndpoints,
    SecretUnusable."""
    wanted, directory = settings.kafka, Path(settings.run.directory)
    return wanted if wanted.bootstrap else _kafka(wanted, read_endpoints(directory).kafka, directory)


def registry_of(wanted: RegistrySettings, address: str, directory: Path) -> RegistrySettings:
    """Return [registry] with address and login filled in. If the settings name none, it is the embedded one at
    `address`, with the run's own login. Raises SecretUnusable."""
    if wanted.url:
        return wanted
    found = dataclasses.replace(wanted, url=address)
    password = "" if wanted.token or wanted.username else read_secret(directory / REGISTRY_KEY)
    return dataclasses.replace(found, username=EMBEDDED_USER, password=password) if password else found


def resolve_endpoints(settings: Settings) -> Settings:
    """Return the settings with the addresses and logins of all servers filled in: the user's own if configured, else
    the run's. Raises NoEndpoints, SecretUnusable."""
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
    "free some space, and everything continues (`turnlog run list` shows the size of each run, `turnlog run delete "
    "ID` deletes one)"
)
FULL, LEAST_FREE = 16 * 2**20, 256 * 2**20
"""Free bytes below which a disk counts as full, since a broker rolls files of 10 MiB; and the minimum for a start."""


def write_settings(directory: Path, settings: Settings) -> Path:
    """Write all effective values to a file that `turnlog --settings` can read. Its mode is 0600, because it contains
    the store's secret."""
    lines = []
    for section in dataclasses.fields(settings):
        values = dataclasses.asdict(getattr(settings, section.name))
        lines += [f"[{section.name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    path = directory / SETTINGS
    replace_private(path, "\n".join(lines))
    return path


def _toml(value: Any) -> str:
    """Format a TOML value. JSON strings are basic TOML strings, except for a bare DEL, which no setting contains."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace supervisor.json atomically. It is not synced to disk: it describes processes, which a power failure
    ends."""
    part = directory / f"{STATE}.part"
    _write_private(part, json.dumps(state, indent=2) + "\n", os.O_TRUNC, durable=False)
    os.replace(part, directory / STATE)


def read_state(directory: Path) -> dict[str, Any]:
    """Return the last supervisor's state; empty if there was none."""
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
    except FileNotFoundError:
        return {}
    return state


@contextlib.contextmanager
def lock_run(directory: Path) -> Iterator[None]:
    """Lock the run for one supervisor. Raises AlreadyUp."""
    busy = AlreadyUp(
        f"{directory} is already up: `{verb_line(directory, 'status')}` shows it, `{verb_line(directory, 'down')}` "
        "stops it; another --run ID starts another run"
    )
    with lock_file(directory / LOCK, busy):
        yield


@contextlib.contextmanager
def lock_file(path: Path, busy: Exception | None = None) -> Iterator[TextIO]:
    """Lock a file, which is created if it is missing, for one process. The kernel releases the lock when the process
    ends. If another process has it, raise `busy`, or wait if `busy` is None."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            assert busy is not None, "who waits is not refused"
            raise busy from error
        yield file


def is_live(directory: Path) -> bool:
    """Return True if a supervisor has locked the run."""
    if not (directory / LOCK).exists():
        return False
    try:
        with lock_run(directory):
            return False
    except AlreadyUp:
        return True


def lacks_room(folder: Path, least: int = FULL) -> str:
    """Return a message if the folder's disk has less than `least` bytes free; empty if there is enough, or if that
    is unknown."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free >= least:
        return ""
    left, needed = (f"{size / 2**20:.0f} MiB" for size in (free, least))
    return f"the disk of {folder} is full: {left} are free, {needed} are needed; {MAKE_ROOM}"


def full_disk(error: BaseException, folder: Path) -> str:
    """Return a message if a full disk caused the error; empty if not. The error itself or one of its causes shows it,
    or else the disk's present state, for libraries that report only that a write failed."""
    met: BaseException | None = error
    while met is not None:
        if _took_no_more(met):
            return f"the disk of {folder} is full; {MAKE_ROOM}"
        met = met.__cause__ or met.__context__
    return lacks_room(folder)


def _took_no_more(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space_of(error: BaseException) -> NoSpace | None:
    """Return a NoSpace error if an uncaught OSError was caused by a full disk, else None."""
    if not _took_no_more(error):
        return None
    file, some = error.filename, f"a disk that it writes to is full; {MAKE_ROOM}"  # a write knows no name of its file
    return NoSpace(f"{error}: {full_disk(error, Path(os.fsdecode(file)).parent) if file else some}")


def check_room(directory: Path) -> None:
    """Check that there is room to start a run. Raises NoSpace if not."""
    if full := lacks_room(directory, LEAST_FREE):
        raise NoSpace(full)


def file_sizes(directory: Path) -> dict[str, list[int]]:
    """Return the bytes of each file of a run's directory: under "checkpoints" those below `checkpoints`, under
    "directory" all others. Files that disappear meanwhile are ignored."""
    kinds: dict[str, list[int]] = {CHECKPOINTS: [], "directory": []}
    for folder, _, names in os.walk(directory):
        inside = Path(folder).relative_to(directory).parts[:1]
        sizes = kinds[CHECKPOINTS if inside == (CHECKPOINTS,) else "directory"]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(folder) / name).lstat().st_size)
    return kinds


def replace_private(path: Path, text: str) -> None:
    """Replace a file atomically, with mode 0600. It is on disk when this returns."""
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
    """Sync a file or a folder to disk. A new name in a folder is durable only after the folder itself is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
