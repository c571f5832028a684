"""Apache Kafka as pinned jars of a Maven repository: fetched once, checked by sha256, kept in the user's cache.

`jars.lock` names group:artifact:version, sha256 and bytes of the whole runtime closure, so that nothing is resolved.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import Path

from turnlog.infra.embedded.errors import JarMismatch, JarsUnavailable
from turnlog.infra.terminal import aside

REPOSITORY = "TURNLOG_MAVEN_REPOSITORY"
PARALLEL = 8
ATTEMPTS = 3
TIMEOUT_S = 60.0
CHECKED = "checked.json"


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of jars.lock."""

    coordinates: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """artifact-version.jar"""
        _, artifact, version = self.coordinates.split(":")
        return f"{artifact}-{version}.jar"

    @property
    def path(self) -> str:
        """Below the base address of a Maven 2 repository."""
        group, artifact, version = self.coordinates.split(":")
        return f"{group.replace('.', '/')}/{artifact}/{version}/{self.file}"


def pinned() -> list[Jar]:
    """Every jar of jars.lock, in its order (which is the class path's)."""
    text = (resources.files("turnlog.infra.embedded") / "jars.lock").read_text()
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Jar(coordinates, sha256, int(size)) for coordinates, sha256, size in rows]


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/turnlog/jars, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog" / "jars"


def class_path(folder: Path | None = None, *, say: Callable[[str], None] | None = None) -> str:
    """Class path of the broker, fetching what is not there. Raises JarsUnavailable, JarMismatch."""
    folder = folder or cache_folder()
    jars = pinned()
    fetch(jars, folder, say=say or aside)
    return os.pathsep.join(str(folder / jar.file) for jar in jars)


def fetch(jars: list[Jar], folder: Path, *, say: Callable[[str], None], repository: str | None = None) -> int:
    """Bring every jar into `folder`; how many were fetched. A jar that is there and right is not read again."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing(jars, folder)
    if missing:
        _fetch_all(missing, folder, repository or _repository(), say)
        _missing(jars, folder)
    return len(missing)


def _missing(jars: list[Jar], folder: Path) -> list[Jar]:
    """Jars that are not there or not right. What was hashed once is recognised by sha256, size and mtime."""
    checked = _checked(folder)
    now: dict[str, list[object]] = {}
    missing = []
    for jar in jars:
        path = folder / jar.file
        try:
            stat = path.stat()
        except FileNotFoundError:
            missing.append(jar)
            continue
        stamp: list[object] = [jar.sha256, stat.st_size, stat.st_mtime_ns]
        if checked.get(jar.file) == stamp or hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256:
            now[jar.file] = stamp
        else:
            missing.append(jar)
    if now != checked:
        _replace(folder / CHECKED, json.dumps(now).encode())
    return missing


def _checked(folder: Path) -> dict[str, list[object]]:
    try:
        stamps: dict[str, list[object]] = json.loads((folder / CHECKED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return stamps


def _repository() -> str:
    if named := os.environ.get(REPOSITORY):
        return named
    try:
        from jgo.constants import MAVEN_CENTRAL_URL
    except ImportError:
        raise JarsUnavailable(
            f"no Maven repository is known: install the `embedded` extra or set {REPOSITORY} to the base address of one"
        ) from None
    return str(MAVEN_CENTRAL_URL)


def _fetch_all(jars: list[Jar], folder: Path, repository: str, say: Callable[[str], None]) -> None:
    total = sum(jar.size for jar in jars) / 1e6
    say(f"Apache Kafka: fetching {len(jars)} jars, {total:.0f} MB")
    began, done = time.monotonic(), 0.0
    with ThreadPoolExecutor(PARALLEL, "jars") as pool:
        waiting = {pool.submit(_fetch_one, jar, folder, repository): jar for jar in jars}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                future.result()
                done += waiting[future].size / 1e6
                if number % 10 == 0 or number == len(jars):
                    say(f"Apache Kafka: {number}/{len(jars)} jars, {done:.0f}/{total:.0f} MB")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    say(f"Apache Kafka: fetched in {time.monotonic() - began:.1f} s to {folder}")


def _fetch_one(jar: Jar, folder: Path, repository: str) -> None:
    address = f"{repository.rstrip('/')}/{jar.path}"
    content = _download(address, jar)
    digest = hashlib.sha256(content).hexdigest()
    if digest != jar.sha256:
        raise JarMismatch(
            f"{jar.coordinates} from {repository} has sha256 {digest}, jars.lock pins {jar.sha256}: the repository "
            f"or something between changed it; it was not kept. Point {REPOSITORY} at another mirror"
        )
    _replace(folder / jar.file, content)


def _download(address: str, jar: Jar) -> bytes:
    last: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read(jar.size + 1)
                return content
        except urllib.error.HTTPError as refusal:
            refusal.close()
            last = refusal
            if refusal.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                break
        except (OSError, ValueError) as error:  # URLError, time-outs and resets are OSErrors; ValueError: no address
            last = error
    raise JarsUnavailable(
        f"{address}: {last}. Check the network or proxy, set {REPOSITORY} to the base address of a Maven repository "
        f"that you can reach, or set [kafka] bootstrap to a broker of your own"
    ) from last


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, also with two processes at once."""
    number, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
