"""Parts of a sandbox's root file system, and what a killed worker leaves on its machine.

Some are our own, copied where any user may read them (interpreter, loader, init, bwrap); others are shown from the host
or an image; /etc is built.

A virtual environment is often based on an interpreter in a private home folder, which a sandbox's own user cannot read;
and a sandbox should see no more than the standard library. Copies are named after the hash of their sources and appear
by one rename.

The /etc is one folder in our cache, shown by one mount, since each mount costs part of a millisecond. It holds our own
users and hosts, a place for the proxy's CA, and the few files of the host that programs need and that name nobody; or,
for an image, links into the image's /etc.

Processes, folders and control groups tell their owner by name, and any worker removes what is ownerless. A name is
`turnlog-sandbox-OWNER-REST`. OWNER consists of pid namespace, pid and start time, because a pid alone is reused, and in
another container means another process. Processes die with their worker; control groups and workspaces do not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Counter

from turnlog.infra.run_folder import LEAST_FREE, full_disk, lacks_room
from turnlog.infra.sandbox_root import RootError, image_root, root_sha256, tree_sha256
from turnlog.sandbox_workers.protocol import DiskLacksRoom, ImageMissing, SandboxUnavailable

log = logging.getLogger(__name__)

LEFT_OUT = (
    "test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip",
    "config-*", "*.opt-?.pyc", "_test*", "*.a",
)  # fmt: skip
INSIDE = Path(__file__).parents[1] / "inside"
PACKAGE = "turnlog.sandbox_workers.inside"
LAYOUT = "2"
"""Version of the init folder's layout; raised when its content changes."""
LISTED = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
"""A line of ldd(1)."""

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
OURS_OF_OPT = frozenset({"python", "init", "loader", "empty", "nothing"})

HOST_FILES = ("ld.so.cache", "localtime", "mime.types", "alternatives", "ssl/certs", "pki/tls/certs")
"""Libraries, time zone, content types, default programs, public certificate authorities."""
IMAGE = ".image"
"""Folder below which the image's own /etc is mounted."""
OURS = {
    "passwd": "sandbox:x:{uid}:{uid}:sandbox:/workspace:/bin/sh\n",
    "group": "sandbox:x:{uid}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
}
NEVER = frozenset({*OURS, "shadow", "gshadow", "shadow-", "gshadow-", "passwd-", "group-", "turnlog", IMAGE})
"""Names of an image's /etc that are never used."""
CA = "turnlog/ca.pem"
"""Path at which the CA is mounted, if there is one. Each worker has its own CA, so it is not part of the folder."""


@dataclass(frozen=True, slots=True)
class InterpreterCopy:
    """A copy of the base prefix. `root` holds bin/ and lib/; `python` is the binary below it."""

    root: Path
    python: str


def interpreter(cache: Path) -> InterpreterCopy:
    """Copy the running interpreter's base prefix: binary, shared library, standard library without tests and packages.
    Source: layout of sysconfig's posix_prefix scheme. Raises SandboxUnavailable."""
    base = Path(sys.base_prefix)
    binary = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    shared = sorted(base.glob("lib/libpython*.so*"))
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    about = [sys.version, str(base), *(_identity(path) for path in (binary, library / "os.py", *shared))]

    def fill(root: Path) -> None:
        (root / "bin").mkdir()
        shutil.copy2(binary, root / "bin" / binary.name)
        for name in {"python", "python3"} - {binary.name}:
            (root / "bin" / name).symlink_to(binary.name)
        place = root / library.relative_to(base)
        shutil.copytree(library, place, ignore=left_out, ignore_dangling_symlinks=True)
        for path in shared:
            shutil.copy2(path, root / "lib" / path.name, follow_symlinks=False)

    return InterpreterCopy(ensure_cached_folder(cache, "python", about, fill), binary.name)


def loader(cache: Path, found: InterpreterCopy) -> tuple[Path, str]:
    """Return a folder with ld.so and the libraries of the interpreter and its modules, and ld.so's name there. With
    them the interpreter runs where the C library is older, another one or missing. Source: ld.so(8). Raises
    SandboxUnavailable."""
    modules = sorted(str(path) for path in found.root.glob("lib/python3*/lib-dynload/*.so"))
    try:
        said = subprocess.run(
            ["ldd", str(found.root / "bin" / found.python), *modules],
            env={"PATH": os.defpath, "LC_ALL": "C", "LD_LIBRARY_PATH": f"{found.root}/lib"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(
            f"images cannot be used, because the libraries of the interpreter cannot be listed: {error}"
        ) from error
    paths = {Path(path) for path in LISTED.findall(said) if not path.startswith(str(found.root))}
    names = sorted(path.name for path in paths if path.name.startswith("ld"))
    if not names:
        raise SandboxUnavailable("the interpreter is linked with no ld.so, so it cannot be shown in an image")
    # glibc opens libgcc_s.so.1 by its name, so ldd does not list it.
    beside = {path.parent / "libgcc_s.so.1" for path in paths if path.name.startswith("libc.")}
    wanted = sorted(path for path in paths | beside if path.exists())

    def fill(root: Path) -> None:
        for path in wanted:
            shutil.copy2(path, root / path.name)

    return ensure_cached_folder(cache, "loader", [_identity(path) for path in wanted], fill), names[0]


def init_program(cache: Path) -> Path:
    """Return a folder with `turnlog/sandbox_workers/inside`, and `empty`. Raises SandboxUnavailable."""
    sources = sorted(INSIDE.glob("*.py"))

    def fill(root: Path) -> None:
        package = root / "turnlog" / "sandbox_workers" / "inside"
        package.mkdir(parents=True)
        for source in sources:
            shutil.copy2(source, package / source.name)
        for folder in (root / "turnlog", root / "turnlog" / "sandbox_workers"):
            (folder / "__init__.py").touch()
        (root / "empty").mkdir()
        _compile(package)

    return ensure_cached_folder(cache, "init", [LAYOUT, sys.version, *(path.read_text() for path in sources)], fill)


def loader_command(*words: str) -> list[str]:
    """Return the argv of an init where no folder of ours exists: python3 is looked up on PATH, and the program is
    inside/loader.py."""
    return ["python3", "-s", "-X", "utf8", "-c", (INSIDE / "loader.py").read_text(), *words]


def sent_program(main: str, *arguments: str) -> bytes:
    """Encode what inside/loader.py reads from its input: the init's sources, and `main` to be called with
    `arguments`."""
    words = {"modules": _sources(), "main": f"{PACKAGE}.{main}", "arguments": arguments}
    data = json.dumps(words, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "big") + data


@functools.cache
def _sources() -> dict[str, str]:
    found = {"turnlog": "", "turnlog.sandbox_workers": "", PACKAGE: (INSIDE / "__init__.py").read_text()}
    names = sorted(path.stem for path in INSIDE.glob("*.py") if path.stem not in ("__init__", "loader"))
    return found | {f"{PACKAGE}.{name}": (INSIDE / f"{name}.py").read_text() for name in names}


def executable(cache: Path, binary: Path, libraries: Iterable[Path]) -> Path:
    """Copy a binary with the libraries that it finds beside itself, and retain the relative paths between them."""
    paths = [binary, *libraries]
    common = Path(os.path.commonpath([path.parent for path in paths]))

    def fill(root: Path) -> None:
        for path in paths:
            target = root / path.relative_to(common)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    root = ensure_cached_folder(cache, binary.name, [_identity(path) for path in paths], fill)
    return root / binary.relative_to(common)


def ensure_cached_folder(cache: Path, name: str, about: Iterable[str], fill: Callable[[Path], None]) -> Path:
    """Return `cache/name-<hash of about>`, filled once. If two processes fill it at the same time, the first rename
    wins. Raises SandboxUnavailable if the cache cannot be written, or if others may write to it."""
    target = cache / f"{name}-{hashlib.sha256(chr(0).join(about).encode()).hexdigest()[:16]}"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_owner(cache)
        if target.is_dir():
            return target
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        try:
            fill(part)
            _readable(part)
            os.rename(part, target)
        except FileExistsError:
            pass  # another process was first
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise SandboxUnavailable(f"cannot fill {cache}: {error}; set XDG_CACHE_HOME to a folder of yours") from error
    return target


def _check_owner(cache: Path) -> None:
    about = cache.stat()
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
        raise SandboxUnavailable(
            f"{cache} is writable by other users: remove it, because sandboxes would run what they put there"
        )


def _identity(path: Path) -> str:
    about = path.stat()
    return f"{path}:{about.st_size}:{about.st_mtime_ns}"


def _readable(root: Path) -> None:
    for parent, _, names in os.walk(root):
        os.chmod(parent, 0o755)
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & stat.S_IXUSR else 0o644)


def _compile(package: Path) -> None:
    import compileall

    compileall.compile_dir(package, quiet=1, stripdir=str(package))


def image_tree(image_folder: str, name: str) -> Path:
    """Return the folder of an image. Raises ImageMissing."""
    try:
        return image_root(image_folder, name)
    except RootError as error:
        raise ImageMissing(str(error)) from error


async def root_hash(image_folder: str, image: str | None) -> str:
    """Return the hash of the root; see `root_sha256`. Raises ImageMissing (also for one that cannot be read)."""
    try:
        return await asyncio.to_thread(root_sha256, image_folder, image)
    except (RootError, OSError) as error:
        raise ImageMissing(str(error)) from error


@functools.cache
def _tree(root: Path) -> str:
    return tree_sha256(root, frozenset({"__pycache__"}))


async def tree_hash(root: Path) -> str:
    """Return the hash of a folder in our cache, which never changes; files that Python compiles there do not count."""
    return await asyncio.to_thread(_tree, root)


def root_arguments(root: Path) -> list[str]:
    """Return the bwrap arguments that show this root as the system, read-only, without its /etc (see `etc_folder`)."""
    words = list(_bind_arguments(root / "usr", "/usr"))
    for name in SYSTEM_FOLDERS:
        words += _bind_arguments(root / name, f"/{name}")
    if (root / "opt").is_dir() and not (root / "opt").is_symlink():
        for name in sorted(set(os.listdir(root / "opt")) - OURS_OF_OPT):
            words += _bind_arguments(root / "opt" / name, f"/opt/{name}")
    return words


def _bind_arguments(source: Path, target: str) -> Iterator[str]:
    """Return the bwrap arguments for one folder. A link stays a link, so that it is resolved inside; on the host it
    could lead anywhere."""
    if source.is_symlink():
        yield from ("--symlink", os.readlink(source), target)
    elif source.exists():
        yield from ("--ro-bind", str(source), target)


def etc_folder(cache: Path, *, uid: int, ca: bool, image: Path | None) -> Path:
    """Build the /etc folder. `ca`: add an empty file `CA`. `image`: the image's /etc, which need not exist; None for
    the host's. Raises SandboxUnavailable."""
    names = sorted(set(os.listdir(image)) - NEVER) if image is not None and image.is_dir() else []
    about = [str(uid), str(ca), *names]
    about += ["host", *_identities()] if image is None else ["image"]

    def fill(root: Path) -> None:
        for name, text in OURS.items():
            (root / name).write_text(text.format(uid=uid))
        if ca:
            (root / CA).parent.mkdir()
            (root / CA).touch()
        if image is None:
            _fill_from_host(root)
            return
        (root / IMAGE).mkdir()
        for name in names:
            (root / name).symlink_to(f"{IMAGE}/{name}")

    return ensure_cached_folder(cache, "etc", about, fill)


def _identities() -> list[str]:
    found = []
    for name in HOST_FILES:
        if os.path.exists(path := f"/etc/{name}"):
            about = os.stat(path)
            found.append(f"{name}:{about.st_size}:{about.st_mtime_ns}")
    return found


def _fill_from_host(root: Path) -> None:
    for name in HOST_FILES:
        source, target = Path("/etc") / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=_unreadable)
        elif source.is_file():
            shutil.copyfile(source, target)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Return the names that not every user of the host may read; sandboxes may not either."""
    return [name for name in names if not os.lstat(os.path.join(folder, name)).st_mode & 0o004]


PREFIX = "turnlog-sandbox-"
NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-(\d+)-")
LEAKS = Counter(
    "turnlog_sandbox_leaks", "Leftovers of dead workers that were removed: process, group or folder", ["kind"]
)


def owned_prefix() -> str:
    """Return the prefix of the names of this process's things."""
    return f"{PREFIX}{_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-"


def workspace_folder(disk_bytes: int) -> Path:
    """Create a folder of this process for a workspace of that size, on a disk that has room for it. Raises
    SandboxUnavailable, DiskLacksRoom."""
    parent = Path(tempfile.gettempdir())
    if full := lacks_room(parent, min(disk_bytes, LEAST_FREE)):
        raise DiskLacksRoom(f"no workspace: {full}")
    try:
        return Path(tempfile.mkdtemp(prefix=owned_prefix(), dir=parent))
    except OSError as error:
        raise no_workspace(error) from error


def no_workspace(error: OSError) -> SandboxUnavailable:
    """Return the error that explains why no workspace could be made."""
    parent = Path(tempfile.gettempdir())
    if full := full_disk(error, parent):
        return DiskLacksRoom(f"no workspace: {full}")
    return SandboxUnavailable(f"no workspace in {parent}: {error}; set TMPDIR")


def ownerless(name: str) -> bool:
    """Return whether the name is one of ours whose owner lived in this pid namespace and is dead."""
    match = NAME.match(name)
    if match is None:
        return False
    namespace, pid, start = (int(part) for part in match.groups())
    return namespace == _namespace() and _start_time(pid) != start


def record_removal(kind: str, name: str, count: int = 1) -> None:
    """Count and log what was removed."""
    LEAKS.labels(kind).inc(count)
    log.warning("removed a leftover of a dead worker: %s %s", kind, name)


def sweep_folders(parent: Path | None = None) -> int:
    """Remove workspaces of dead workers below `parent` (by default the folder for temporary files). Return how many are
    gone."""
    parent, gone = parent or Path(tempfile.gettempdir()), 0
    for name in _names(parent):
        path = parent / name
        with contextlib.suppress(OSError):  # another worker has removed it, or we lack the permission
            if not ownerless(name) or not stat.S_ISDIR(os.lstat(path).st_mode):
                continue
            remove_tree(path)
            record_removal("folder", str(path))
            gone += 1
    return gone


def remove_tree(root: Path) -> None:
    """Remove a folder that an agent could write to, however deep it is (shutil.rmtree recurses, and a path has a
    maximum length) and whatever rights were removed. A nested folder is moved up before it is emptied. Raises
    OSError."""
    token, number, ahead = secrets.token_hex(8), 0, [""]
    _unlock(str(root))
    here = _open_folder(str(root))
    try:
        while ahead:
            name = ahead.pop()
            inner = _open_folder(name, here) if name else here
            try:
                for found in os.listdir(inner):
                    if not stat.S_ISDIR(os.stat(found, dir_fd=inner, follow_symlinks=False).st_mode):
                        os.unlink(found, dir_fd=inner)
                        continue
                    number += 1
                    ahead.append(f"{token}-{number}")
                    _unlock(found, inner)  # needed before the rename, which changes its `..`
                    os.rename(found, ahead[-1], src_dir_fd=inner, dst_dir_fd=here)
            finally:
                if name:
                    os.close(inner)
            if name:
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    root.rmdir()


def discard(root: Path) -> None:
    """Remove a sandbox's folder at its end; a failure is logged."""
    try:
        remove_tree(root)
    except OSError as error:
        log.warning("%s could not be removed: %s", root, error)


def _open_folder(name: str, folder: int | None = None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _unlock(name: str, folder: int | None = None) -> None:
    """Restore the owner's rights. Root needs none, and must not follow a link that has just replaced a folder."""
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=folder)


def _names(parent: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        return [entry.name for entry in entries if entry.name.startswith(PREFIX)]
    return []


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Return the start time in ticks since boot, field 22 of proc(5) stat; None if there is no such process."""
    try:
        about = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if about[0] in (b"Z", b"X") else int(about[19])
