"""Images of Harbor tasks: names by content, and how they are pulled, built and unpacked before a run.

A Dockerfile's image is called `turnlog-harbor/TASK:HASH`, where HASH covers every file of its build context, so that it
is built once and named without a container engine. Nothing is pulled or built while a call waits: `prepare` does it.

BadImage  an image does not exist, or does not build; the message has the engine's answer and the remedy
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnlog.infra.sandbox_root import tree_sha256
from turnlog.plugins.harbor.inside.unpacking import unpack

PREFIX: Final = "turnlog-harbor"
HASH_DIGITS: Final = 16
LAST_CHARS: Final = 2000


class BadImage(Exception):
    """See the module's docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """An image of a task."""

    name: str
    """Name by which a docker daemon knows it."""
    base: str = ""
    """Image that is pulled; empty if `context` is built."""
    context: str = ""
    """Folder with a Dockerfile."""
    install: str = ""
    """Shell command that is run in the image, as root, when it is built."""
    build_s: float = 600.0
    """Maximum seconds for the build."""

    @property
    def root(self) -> str:
        """Name of the folder in [sandbox] image_folder that holds the unpacked image, for bubblewrap."""
        return f"harbor-{hashlib.sha256(self.name.encode()).hexdigest()[:HASH_DIGITS]}"


def task_image(task: str, base: str | None, context: Path, install: str, build_s: float) -> TaskImage:
    """Return the image of a task: `base`, or what the Dockerfile in `context` builds. Raises OSError."""
    if base is not None and not install:
        return TaskImage(name=base, base=base)
    about = base if base is not None else tree_sha256(context)
    digest = hashlib.sha256(f"{about}\0{install}".encode()).hexdigest()[:HASH_DIGITS]
    slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
    return TaskImage(
        name=f"{PREFIX}/{slug}:{digest}", base=base or "", context="" if base else str(context), install=install,
        build_s=build_s,
    )  # fmt: skip


def prepare(
    images: Iterable[TaskImage],
    client: Any,
    report: Callable[[str], None] = lambda line: None,
    *,
    roots: str = "",
    network: str = "",
) -> None:
    """Pull or build those images that the daemon of `client` (docker.APIClient) does not have. With `roots`, the folder
    of [sandbox] image_folder, also unpack them there. `network`: network of builds, as in `docker build --network`;
    empty for the daemon's default. Blocks. Raises BadImage."""
    for image in dict.fromkeys(images):
        if _inspect(client, image.name) is None:
            _obtain(client, image, report, network)
        if roots and not (Path(roots) / image.root).is_dir():
            report(f"unpack {image.name}")
            _unpack(client, image, Path(roots))


def image_workdir(client: Any, name: str) -> str:
    """Return the working directory of an image; `/` if it sets none. Raises BadImage."""
    found = _inspect(client, name)
    if found is None:
        raise BadImage(f"image {name!r} is not there: prepare the source first")
    return str((found.get("Config") or {}).get("WorkingDir") or "/")


def _inspect(client: Any, name: str) -> Mapping[str, Any] | None:
    import docker  # type: ignore[import-untyped]

    try:
        found: Mapping[str, Any] = client.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    except docker.errors.DockerException as error:
        raise BadImage(f"the Docker daemon cannot be asked for image {name!r}: {error}") from error
    return found


def _obtain(client: Any, image: TaskImage, report: Callable[[str], None], network: str) -> None:
    if image.base and _inspect(client, image.base) is None:
        report(f"pull {image.base}")
        _follow(client.pull, f"image {image.base!r} cannot be pulled", "check its name, and the registry's login",
                image.base, stream=True, decode=True)  # fmt: skip
    base = image.base
    if image.context:
        base = image.name if not image.install else f"{image.name}-base"
        report(f"build {base} from {image.context}")
        _build(client, image, tag=base, path=image.context, network_mode=network or None)
    if image.install:
        report(f"build {image.name}: {image.install}")
        user = (_inspect(client, base) or {}).get("Config", {}).get("User") or "root"
        text = f"FROM {base}\nUSER root\nRUN {image.install}\nUSER {user}\n"
        _build(client, image, tag=image.name, fileobj=io.BytesIO(text.encode()), network_mode=network or None)


def _build(client: Any, image: TaskImage, **what: Any) -> None:
    where = image.context or image.base
    _follow(
        client.build, f"the image of {where} does not build",
        f"if it needs BuildKit, run `docker buildx build --load -t {what['tag']} {where}` yourself",
        decode=True, rm=True, forcerm=True, timeout=image.build_s, **what,
    )  # fmt: skip


def _follow(
    call: Callable[..., Iterable[Mapping[str, Any]]], failure: str, remedy: str, *words: Any, **named: Any
) -> None:
    """Call the SDK, and read its answer to the end. Raises BadImage."""
    import docker
    import requests

    said: list[str] = []
    try:
        for part in call(*words, **named):
            said.append(str(part.get("stream") or part.get("status") or ""))
            if "error" in part:
                raise BadImage(f"{failure}: {part['error']}; {remedy}\n{''.join(said)[-LAST_CHARS:]}")
    except (docker.errors.DockerException, requests.RequestException, TypeError) as error:
        raise BadImage(f"{failure}: {error}; {remedy}") from error


def _unpack(client: Any, image: TaskImage, roots: Path) -> None:
    """Write the files of an image into a folder of `roots`, without owners and devices. Raises BadImage."""
    import docker

    roots.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{image.root}-", dir=roots))
    container = None
    try:
        container = client.create_container(image.name, command="true")["Id"]
        with tempfile.TemporaryFile() as file:
            for chunk in client.export(container):
                file.write(chunk)
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                unpack(archive, str(part), members=_plain_members(archive))
        os.chmod(part, 0o755)
        os.rename(part, roots / image.root)
    except (docker.errors.DockerException, OSError, tarfile.TarError) as error:
        raise BadImage(f"image {image.name!r} cannot be unpacked into {roots}: {error}") from error
    finally:
        if container is not None:
            client.remove_container(container, force=True)
        shutil.rmtree(part, ignore_errors=True)


def _plain_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield files, folders and links, whose modes let nobody become or write as another user."""
    for member in archive:
        if member.isreg() or member.isdir() or member.issym() or member.islnk():
            member.mode &= 0o755
            yield member
